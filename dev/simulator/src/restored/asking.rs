//! The questions between hosts after a journal was restored, and the orders of administrators.

use std::time::Duration;

use chronicle::BranchId;
use migration::VolumeId;
use migration::journal::{Record, Stage};
use migration::restoration::{self, Action, Answer, Event, Look, Order, Words};

use super::Fleet;

/// The longest journey of an answer, which may be outdated on arrival.
const ANSWER_TRAVELS_MAX: Duration = Duration::from_secs(6);

#[derive(Debug)]
pub(super) struct Answering {
    arrives: Duration,
    from: usize,
    to: usize,
    answer: Answer,
}

impl Fleet {
    pub(super) fn ask_and_answer(&mut self) {
        let arrived = self.answers.extract_if(.., |answer| answer.arrives <= self.now).collect::<Vec<_>>();
        for Answering { from, to, answer, .. } in arrived {
            let from = self.hosts[from].id;
            self.handle(to, Event::Answered(from, answer));
        }
        for host in 0..self.hosts.len() {
            let here = &self.hosts[host];
            let hosts = restoration::hosts_to_ask(&here.state, Ok(here.list.paired.clone()));
            let hosts = Event::Hosts(hosts);
            let waiting = Event::waiting(&self.hosts[host].state);
            self.handle(host, hosts);
            self.handle(host, waiting);
            let now = self.now;
            self.hosts[host].restoration.handle_timeout(now);
            self.carry_out(host);
        }
    }

    fn handle(&mut self, host: usize, event: Event) {
        let now = self.now;
        self.hosts[host].restoration.handle_event(now, event);
        self.carry_out(host);
    }

    fn carry_out(&mut self, host: usize) {
        while let Some(action) = self.hosts[host].restoration.poll_action() {
            match action {
                Action::Ask(peer) => {
                    let Some(from) = self.hosts.iter().position(|other| other.id == peer) else { continue };
                    if !self.is_connected(host, from) {
                        continue;
                    }
                    let (asker, asked) = (&self.hosts[host], &self.hosts[from].state);
                    let volumes = asker.state.in_question().map(|known| known.record.volume);
                    let known = volumes.filter_map(|volume| {
                        Some((volume, restoration::knowledge(asked, asker.id, volume)?))
                    });
                    let answer = Answer { known: known.collect(), knows_all: restoration::knows_all(asked) };
                    let travels = self.random.duration(Duration::from_millis(1), ANSWER_TRAVELS_MAX);
                    self.answers.push(Answering { arrives: self.now + travels, from, to: host, answer });
                }
                Action::Look(volume) => {
                    let look = self.hosts[host].look(volume);
                    let now = self.now;
                    self.hosts[host].restoration.handle_event(now, Event::Looked(volume, look));
                }
                Action::Confirm(volume) => {
                    self.look(host, volume);
                    let here = &self.hosts[host];
                    let Some(standing) = here.restoration.standing(volume) else { continue };
                    let confirmed = restoration::confirm(&here.state, volume, &standing);
                    let is_done = confirmed.is_ok_and(|records| self.reinstated(host, volume, records, None));
                    match is_done {
                        true => self.shown.confirmed += 1,
                        false => {
                            let now = self.now;
                            self.hosts[host].restoration.handle_event(now, Event::NotRecorded(volume));
                        }
                    }
                }
            }
        }
    }

    fn look(&mut self, host: usize, volume: VolumeId) {
        let look = self.hosts[host].look(volume);
        let now = self.now;
        self.hosts[host].restoration.handle_event(now, Event::Looked(volume, look));
    }

    /// Commits a decision, with the volume's present size. `said`: the administrator's knowledge of it.
    fn reinstated(
        &mut self,
        host: usize,
        volume: VolumeId,
        mut records: Vec<Record>,
        said: Option<u64>,
    ) -> bool {
        if matches!(records[..], [Record::Reinstated { .. }]) {
            match self.hosts[host].size_of(volume, said) {
                Some(Ok(size_bytes)) => records.push(Record::Resized { volume, size_bytes }),
                _ => return false,
            }
            if self.hosts[host].next_number().is_none() {
                self.violated(|| format!("host {host} gives the number of a stay again"));
                return false;
            }
        }
        let is_done = self.hosts[host].commit(records);
        self.say(|| format!("host {host} has decided on volume {volume}: {is_done}"));
        is_done
    }

    /// Gives an administrator's order about a waiting volume, by the true state. A contradiction stops it: no
    /// order is forced here.
    pub(super) fn order(&mut self) {
        let host = self.random.index(self.hosts.len());
        let waiting: Vec<VolumeId> =
            self.hosts[host].state.in_question().map(|known| known.record.volume).collect();
        if waiting.is_empty() {
            return;
        }
        let volume = waiting[self.random.index(waiting.len())];
        self.look(host, volume);
        let Some(standing) = self.hosts[host].restoration.standing(volume) else { return };
        // N.B. even an administrator who is mistaken about the image: the order must notice that.
        let is_unfit = matches!(standing.look, Some(Look::HalfMade | Look::Missing));
        if !is_unfit && !self.is_current(host, volume) {
            // The administrator knows that the volume is elsewhere, or the image outdated, and usually says so.
            if self.is_elsewhere(host, volume)
                && matches!(standing.words, Words::Contradicted(_))
                && let Ok(records) = restoration::forget(&self.hosts[host].state, volume)
            {
                self.hosts[host].commit(records);
                self.shown.given_up += 1;
            }
            return;
        }
        let branch = BranchId([self.random.below(256) as u8; 16]);
        match restoration::order(&self.hosts[host].state, volume, &standing, Order::Known, branch) {
            Ok(_) if is_unfit => {
                self.violated(|| format!("host {host} takes an image of volume {volume} that is not fit"));
            }
            Ok(records) => {
                self.say(|| {
                    format!("somebody says at host {host} that it has volume {volume}: {standing:?}")
                });
                let size = self.sizes[&volume];
                if self.reinstated(host, volume, records, Some(size)) {
                    self.shown.ordered += 1;
                }
            }
            Err(_) => self.shown.refused += 1,
        }
    }

    /// Returns what an administrator can know: the image is current, and no other host has the volume, or may get it.
    fn is_current(&self, host: usize, volume: VolumeId) -> bool {
        let Some(waiting) = self.hosts[host].state.questioned(volume) else { return false };
        let image = self.hosts[host].images.get(&waiting.record.image.place);
        let has_all = image.is_some_and(|image| {
            image.volume == volume && !image.is_half_made && image.writes == self.acknowledged[&volume]
        });
        has_all && !self.is_elsewhere(host, volume)
    }

    fn is_elsewhere(&self, host: usize, volume: VolumeId) -> bool {
        let mut others = self.hosts.iter().enumerate().filter(|(other, _)| *other != host);
        others.any(|(_, other)| {
            let waits = other.state.unfinished().any(|(_, migration)| {
                matches!(migration.stage, Stage::Prepared(_))
                    && migration.volumes.iter().any(|moving| moving.volume == volume)
            });
            waits
                || other.state.volumes.contains_key(&volume)
                || other.state.restored_volume(volume).is_some()
        })
    }

    pub(super) fn forget_where_one_went(&mut self) {
        let host = self.random.index(self.hosts.len());
        let gone: Vec<VolumeId> = self.hosts[host].state.moved.keys().copied().collect();
        if !gone.is_empty() {
            let volume = gone[self.random.index(gone.len())];
            self.hosts[host].commit(vec![Record::MovedForgotten { volume }]);
        }
    }
}
