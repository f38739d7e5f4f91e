//! What hosts ask each other after a journal was put back, and what people do about it.

use std::time::Duration;

use chronicle::BranchId;
use migration::VolumeId;
use migration::journal::Stage;
use migration::restoration::{self, Action, Answer, Event, Order, Standing};

use super::Fleet;

/// How long an answer is under way at most: what it says may not be so any more when it comes.
const ANSWER_TRAVELS_MAX: Duration = Duration::from_secs(6);

/// An answer on its way.
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
            let others = self.hosts.iter().map(|other| other.id).filter(|id| *id != self.hosts[host].id);
            let hosts = Event::Hosts(others.collect());
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
                    let volumes = asker.state.restored_volumes();
                    let known = volumes.filter_map(|(volume, _)| {
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
                    let Ok(records) = restoration::reinstate(&self.hosts[host].state, volume) else {
                        continue;
                    };
                    if self.reinstated(host, volume, records) {
                        self.shown.confirmed += 1;
                    }
                }
            }
        }
    }

    fn reinstated(
        &mut self,
        host: usize,
        volume: VolumeId,
        records: Vec<migration::journal::Record>,
    ) -> bool {
        if self.hosts[host].next_number().is_none() {
            self.violated(|| format!("host {host} gives the number of a stay again"));
            return false;
        }
        let is_done = self.hosts[host].commit(records);
        self.say(|| format!("host {host} has volume {volume} again: {is_done}"));
        is_done
    }

    /// Somebody looks at what waits at a host, knows how it is, and says so. What contradicts them keeps them from it: nobody
    /// insists here.
    pub(super) fn order(&mut self) {
        let host = self.random.index(self.hosts.len());
        let waiting: Vec<VolumeId> =
            self.hosts[host].state.restored_volumes().map(|(volume, _)| volume).collect();
        if waiting.is_empty() {
            return;
        }
        let volume = waiting[self.random.index(waiting.len())];
        let Some(standing) = self.hosts[host].restoration.standing(volume) else { return };
        if !self.is_current(host, volume) {
            // They know that it is elsewhere, or that the image is an old one; which is said as well, mostly.
            if self.is_elsewhere(host, volume)
                && matches!(standing, Standing::Contradicted(_))
                && let Ok(records) = restoration::forget(&self.hosts[host].state, volume)
            {
                self.hosts[host].commit(records);
                self.shown.given_up += 1;
            }
            return;
        }
        let branch = BranchId([self.random.below(256) as u8; 16]);
        match restoration::order(&self.hosts[host].state, volume, &standing, Order::Known, branch) {
            Ok(records) => {
                self.say(|| {
                    format!("somebody says at host {host} that it has volume {volume}: {standing:?}")
                });
                if self.reinstated(host, volume, records) {
                    self.shown.ordered += 1;
                }
            }
            Err(_) => self.shown.refused += 1,
        }
    }

    /// What people can know: the image is the volume as guests know it, and no other host has that, or may get it.
    fn is_current(&self, host: usize, volume: VolumeId) -> bool {
        let Some(waiting) = self.hosts[host].state.restored_volume(volume) else { return false };
        let image = self.hosts[host].images.get(&waiting.volume.record.image.place);
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

    /// Somebody says at a host that nobody need know where a volume went.
    pub(super) fn forget_where_one_went(&mut self) {
        let host = self.random.index(self.hosts.len());
        let gone: Vec<VolumeId> = self.hosts[host].state.moved.keys().copied().collect();
        if !gone.is_empty() {
            let volume = gone[self.random.index(gone.len())];
            self.hosts[host].commit(vec![migration::journal::Record::MovedForgotten { volume }]);
        }
    }
}
