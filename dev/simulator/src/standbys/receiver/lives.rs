//! How processes of the standby's host begin and end, and how the standby ends.

use std::time::Duration;

use standby::receiver::{Event, Image, Journal, PromoteOrder, Refusal};
use standby::record::{ImageState, KeptBy, Record as _, StandbyRecord, Standing};
use standby::{Standby, Watermark};

use super::{Backup, Doing};
use crate::standbys::met::Fault;
use crate::standbys::owner::STANDBY;
use crate::standbys::trouble::ANY_AGE;
use crate::standbys::world::{AGE_SLACK, Task, World};

impl World {
    pub(in crate::standbys) fn stop_standby(&mut self) {
        for link in 0..self.links.len() {
            self.disconnect(link);
        }
        let mut random = self.random.fork();
        let process = self.number();
        let host = &mut self.standby;
        for (_, record) in std::mem::take(&mut host.pending) {
            if random.percent(50) {
                break;
            }
            host.record = Some(record);
        }
        host.machine = None;
        host.process = process;
        host.was_restoring = host.doing == Doing::Restoring;
        host.doing = Doing::Nothing;
        host.spool_flushes = 0;
        host.has_received = false;
        host.is_agreed = false;
        host.tested = None;
        host.order = None;
        host.received = None;
    }

    pub(in crate::standbys) fn cut_standbys_power(&mut self) {
        self.stop_standby();
        let mut random = self.random.fork();
        let host = &mut self.standby;
        host.images.iter_mut().for_each(|image| image.cut_power(&mut random));
        for entries in host.named.values_mut().flatten().chain(&mut host.unnamed) {
            entries.retain(|entry| entry.is_durable || random.percent(50));
            entries.iter_mut().for_each(|entry| entry.is_durable = true);
        }
    }

    /// Puts a backup of the standby's journal back.
    pub(in crate::standbys) fn restore_standby(&mut self) {
        if self.standby.backups.is_empty() {
            return;
        }
        let index = self.random.index(self.standby.backups.len());
        let host = &mut self.standby;
        let Backup { mut record, versions } = host.backups[index].clone();
        // What does not exist any more is not restored.
        record.points.retain(|point| host.points.contains_key(&point.watermark));
        record.sealed.retain(|sealed| host.named.contains_key(&sealed.watermark));
        host.record = Some(record);
        host.is_restored = true;
        host.is_agreed = false;
        host.fence = 0;
        // Its image is not as it was at the backup.
        host.strangers += u64::from(versions != host.versions());
    }

    pub(in crate::standbys) fn start_standby(&mut self) {
        if self.standby.machine.is_some() {
            return;
        }
        self.standby.process = self.number();
        let settings = self.standby.settings.clone();
        self.standby.reported = self.standby.strangers;
        let image = if self.standby.is_touched() { Image::Touched } else { Image::AsLeft };
        let journal = if self.standby.is_restored { Journal::Restored } else { Journal::Own };
        let machine = match self.standby.record.clone() {
            None => Standby::begin(settings, STANDBY),
            Some(record) => {
                if StandbyRecord::decode(&record.encode()).as_ref() != Some(&record) {
                    self.violate("a record of the standby is not what was stored");
                }
                if journal == Journal::Own {
                    self.standby
                        .points
                        .retain(|at, _| record.points.iter().any(|point| point.watermark == *at));
                }
                Standby::restart(settings, record, journal, image)
            }
        };
        self.tell(|_| format!("standby starts: {journal:?} {image:?} {:?}", machine.record()));
        self.standby.machine = Some(machine);
        self.drain_standby();
        // An administrator whose promotion of a point was interrupted wants the newest one instead.
        let is_interrupted = std::mem::take(&mut self.standby.was_restoring) && journal == Journal::Own;
        if is_interrupted && !self.is_calm && self.random.percent(50) {
            self.promote(PromoteOrder { owner_is_lost: true, age_max: ANY_AGE, point: None });
        }
        for link in 0..self.links.len() {
            self.in_about(Duration::from_millis(300), Task::Connect(link));
        }
    }

    /// An administrator says that this is a standby, after a journal was restored.
    pub(in crate::standbys) fn agree(&mut self) {
        self.standby.is_agreed = true;
        self.standby_event(Event::Agreed);
    }

    /// Reports that others have changed the image, if they have.
    pub(in crate::standbys) fn notice_touch(&mut self) {
        let may_be = self.standby.owned.is_none() && !self.is_consumed;
        if may_be && self.standby.is_touched() && self.standby.machine.is_some() {
            self.standby.reported = self.standby.strangers;
            self.standby_event(Event::ImageTouched);
        }
    }

    /// An administrator orders a promotion; returns what has refused it.
    pub(in crate::standbys) fn promote(&mut self, order: PromoteOrder) -> Option<Refusal> {
        self.notice_touch();
        let is_beside_owner = self.standby.has_received;
        let phase = self.standby.phase();
        self.standby.refused = None;
        self.standby.order = Some((order, self.now));
        self.standby_event(Event::Promote(order));
        let refused = self.standby.refused;
        self.standby.order.take_if(|_| refused.is_some());
        self.met.add(if refused.is_some() { Fault::PromoteRefused } else { Fault::Promoted }, phase);
        self.tell(|_| format!("{order:?}: {refused:?}"));
        if refused.is_none() && is_beside_owner {
            self.violate("a standby was promoted while its owner can be reached");
        }
        let is_asked_about = self.standby.whereabouts.may_be_at(self.current);
        if refused.is_none() && !is_asked_about && self.owners[self.current].is_serving {
            self.violate("a standby was promoted, and nobody was asked about the host that has the group");
        }
        if refused.is_none() && !order.owner_is_lost {
            self.violate("a standby was promoted although nobody says that the owner is lost");
        }
        refused
    }

    /// The group is owned at the standby's host, as of a cut.
    pub(super) fn own(&mut self, at: Watermark) {
        let durable = self.standby.record.as_ref().map(|record| record.standing);
        if durable != Some(Standing::Promoted { at }) {
            self.violate("a group is owned before that is durable");
        }
        if self.standby.owned.is_some() {
            return;
        }
        self.shown.promotions += 1;
        let content = self.standby.content();
        if let Some(difference) = self.truth.difference(at, &content) {
            self.violate(format!("what was promoted is not what the group was: {difference}"));
        }
        if let Some((order, ordered)) = self.standby.order {
            if order.point.is_some_and(|point| point != at) {
                self.violate("another point was promoted than was ordered");
            }
            let current = self.standby.current_at.get(&at).copied().unwrap_or_default();
            if ordered.saturating_sub(current) > order.age_max + AGE_SLACK {
                self.violate("a point was promoted that is older than the order says");
            }
        }
        self.standby.owned = Some(at);
        self.standby.promoted = Some((at, content));
        self.standby.is_restored = false;
        // A guest runs here, and writes.
        let value = self.number();
        self.standby.images[0].write(0, value);
        self.standby.strangers += 1;
    }

    /// The image belongs to a migration: each block is as of the cut, or newer.
    pub(super) fn consumed(&mut self, at: Option<Watermark>) {
        if self.is_consumed {
            return;
        }
        self.is_consumed = true;
        self.standby.is_over = true;
        let value = self.number();
        self.standby.images[0].write(0, value);
        if at.is_some_and(|at| self.truth.cut(at).is_none()) {
            self.violate("a migration was told of a cut that never was");
        }
    }

    pub(super) fn drop_point(&mut self, at: Watermark) {
        if self.standby.tested == Some(at) {
            self.violate("the point of a running test was deleted");
        }
        let Some(record) = &self.standby.record else { return };
        let is_point = record.image == ImageState::AsOfWatermark && record.watermark.is_some();
        let is_needed = record.points.iter().any(|point| point.watermark == at);
        let is_last = !is_point && record.points.is_empty() && !self.standby.is_over;
        let is_useless = self.standby.settings.kept_by == KeptBy::Undo && record.watermark.is_none();
        let was_abandoned = record.watermark.is_none();
        if is_needed || is_last && !is_useless && !was_abandoned {
            self.violate("the last recovery point was deleted, or one that the record names");
        }
        self.standby.points.remove(&at);
    }
}
