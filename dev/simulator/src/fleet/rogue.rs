//! The product's authority checks between hosts; and a rogue host that keeps asking after its permission has ended.
//!
//! ```text
//!   A ──1──► B ──2──► A ──3──► C ──4──► B      A asks B for the volume by migration 1, which has ended
//! ```
//! Honest requests must never be refused; a rogue's request would show in the content.

use std::rc::{Rc, Weak};

use bytes::Bytes;
use lane::peer::Asked;
use lane::peer::head::{Address, Head, Operation};
use migration::MigrationId;
use migration::VolumeIndex;
use migration::authority::{Denied, Request, Role, judge};
use migration::journal::{Outcome, Side, Stage};

use super::Fleet;
use super::host::{SimHost, volume_id};
use super::line::{BESIDES, Guard, Judged};
use super::link::{Link, Subject};
use super::place::Place;
use super::tally::Event;
use crate::disk::SECTOR_BYTES;

const ASKS_PERCENT: u64 = 20;
/// The sector that a rogue writes, with a token that no guest has.
const GARBAGE: [u8; SECTOR_BYTES as usize] = {
    let mut sector = [0; SECTOR_BYTES as usize];
    sector[0] = 0xE7;
    sector[7] = 0xE7;
    sector
};

impl SimHost {
    pub(super) fn guard(&self, subject: Subject, from: Place) -> Guard {
        let me = Weak::clone(&self.me);
        Box::new(move |head, payload| {
            let Some(host) = me.upgrade() else { return Judged::Heard };
            match Asked::by(head, payload) {
                Asked::Nothing | Asked::Garbled => Judged::Heard,
                Asked::Message(request) => match host.judge(subject, from, request) {
                    // The journal answers messages of migrations that it does not know.
                    Ok(()) | Err(Denied::Unknown) => Judged::Heard,
                    Err(denied) => {
                        host.honest_is_refused(from, request, denied);
                        Judged::LeftOut
                    }
                },
                Asked::Call(call, _) if call >= BESIDES && !host.is_asked_by_a_rogue(subject, from) => {
                    // The volumes have moved on since it was asked: there is nothing to check.
                    Judged::Refused(call)
                }
                Asked::Call(call, request) => match host.judge(subject, from, request) {
                    Ok(()) => Judged::Heard,
                    Err(denied) => {
                        // A request by an ended permission may have been in flight for long: its guest reports if it still waits.
                        let is_over = denied == Denied::Over;
                        let is_over = is_over || host.is_detached(subject, from);
                        let is_honest = call < BESIDES
                            && matches!(request, Request::Volume(_) | Request::Change(_))
                            && !is_over;
                        if is_honest {
                            host.honest_is_refused(from, request, denied);
                        }
                        Judged::Refused(call)
                    }
                },
            }
        })
    }

    fn judge(&self, subject: Subject, from: Place, request: Request) -> Result<(), Denied> {
        let role = match (subject, request) {
            (Subject::Migration(source, migration), _) if source == self.place => Role::Target { migration },
            // One line serves all volumes.
            (Subject::Migration(_, migration), Request::Store(volume) | Request::Copies(volume)) => {
                Role::Source { migration, volume }
            }
            (Subject::Migration(_, migration), _) => Role::Source { migration, volume: VolumeIndex(0) },
            (Subject::Reservoir(_, migration), Request::Reservoir(volume)) => {
                Role::Filler { migration, volume }
            }
            (Subject::Reservoir(_, migration), _) => Role::Filler { migration, volume: VolumeIndex(0) },
            (Subject::Clients(source, migration), _) if source == self.place => Role::NewOwner { migration },
            (Subject::Clients(_, migration), _) => Role::FormerOwner { migration },
        };
        self.journal().look(|state, _| judge(state, from.host(), role, request))
    }

    /// Returns whether a line is that of an attachment that has ended at the host that asks. Its last requests may be under way.
    fn is_detached(&self, subject: Subject, from: Place) -> bool {
        let (Subject::Clients(source, number), Some(fleet)) = (subject, self.fleet()) else { return false };
        source == from
            && fleet.host(from).journal().look(|state, _| {
                let is_unused = !state.moved.values().any(|moved| moved.migration == number);
                is_unused && !state.migrations.contains_key(&number)
            })
    }

    /// Returns whether the permission of a rogue's line has still ended.
    fn is_asked_by_a_rogue(&self, subject: Subject, from: Place) -> bool {
        let Subject::Clients(source, migration) = subject else { return false };
        let Some(fleet) = self.fleet() else { return false };
        source == from && fleet.host(from).ended_relation() == Some((self.place, migration))
    }

    fn honest_is_refused(&self, from: Place, request: Request, denied: Denied) {
        let detail = || format!("{} refuses {from} {request:?}: {denied}", self.place);
        self.world.violated("authority", detail);
    }

    /// Returns a migration from here to a host that has the volumes again, but by another one: they returned from there, and
    /// moved by a third host. The permission of that migration has ended.
    fn ended_relation(&self) -> Option<(Place, MigrationId)> {
        let fleet = self.fleet()?;
        let elsewhere = fleet.hosts.iter().filter(|host| host.place != self.place && host.is_up());
        let owner = elsewhere.filter(|host| host.owns_and_rests()).map(|host| host.place).next()?;
        if let Some(number) = self.former_number.get() {
            // An attachment of this host has ended, or lets it read only, as long as the volumes have not come here since.
            let is_stranger = self.journal().look(|state, possible| {
                possible.is_empty() && state.moved.is_empty() && state.migrations.is_empty()
            });
            return is_stranger.then_some((owner, number));
        }
        self.journal().look(|state, possible| {
            if !possible.is_empty() || state.unfinished().next().is_some() {
                return None;
            }
            let between = state.migrations.iter().filter_map(|(id, recorded)| {
                let has_moved = matches!(recorded.stage, Stage::Ended(Outcome::Moved { .. }));
                match &recorded.side {
                    Side::Outgoing { peer, .. } if has_moved && *peer == owner.host() => Some((*id, true)),
                    Side::Incoming { peer, .. } if has_moved && *peer == owner.host() => Some((*id, false)),
                    _ => None,
                }
            });
            let mut latest_first = between.collect::<Vec<_>>().into_iter().rev();
            latest_first.next().filter(|(_, is_outgoing)| !is_outgoing)?;
            let (earlier, _) = latest_first.find(|(_, is_outgoing)| *is_outgoing)?;
            Some((owner, earlier))
        })
    }

    fn owns_and_rests(&self) -> bool {
        self.journal().look(|state, possible| {
            let is_here = state.volumes.contains_key(&volume_id(0));
            is_here && possible.is_empty() && state.unfinished().next().is_none()
        })
    }
}

impl Fleet {
    /// Lets a host keep asking by its ended permission.
    pub(super) fn perhaps_go_rogue(&self) {
        for host in self.hosts.iter().filter(|host| host.is_up()) {
            let Some((owner, migration)) = host.ended_relation() else { continue };
            if !self.random.borrow_mut().percent(ASKS_PERCENT) {
                continue;
            }
            if let Some(link) = self.link(host.place, owner) {
                self.tally(Event::Rogue);
                go_rogue(link, host.place, migration);
            }
        }
    }
}

/// Asks for the volume's fence; once that is known, overwrites the volume.
fn go_rogue(link: &Rc<Link>, place: Place, migration: MigrationId) {
    let line = link.line(Subject::Clients(place, migration));
    let address = Address::Owner(volume_id(0).0);
    match line.told_besides(place) {
        None => {
            let head = Head::Call { call: BESIDES, address, operation: Operation::Attach };
            line.ask_besides(place, &head, Bytes::new());
        }
        Some(fence) => {
            let operation = Operation::Write { offset: 0, durable: false };
            let head = Head::FencedCall { call: BESIDES, address, operation, fence };
            line.ask_besides(place, &head, Bytes::from_static(&GARBAGE));
        }
    }
}
