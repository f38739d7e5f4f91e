//! The hosts that may take workloads, and whether they answer.

use std::time::Duration;

use evacuation::{Event, Moment, Target, TargetIndex, TargetState};
use transport::Peer;

use super::Evacuations;

/// A host that is disconnected for longer counts as lost. A connection that is made again is back before.
const LOST_AFTER: Duration = Duration::from_secs(1);

/// The hosts of an evacuation, by their [`TargetIndex`].
#[derive(Default)]
pub(super) struct Targets {
    peers: Vec<Peer>,
    states: Vec<TargetState>,
}

impl Targets {
    /// Returns the number of a host, which is added if it is new.
    pub(super) fn index_of(&mut self, peer: &Peer) -> TargetIndex {
        let known = self.peers.iter().position(|known| known.id == peer.id);
        let index = known.unwrap_or_else(|| {
            self.peers.push(peer.clone());
            self.states.push(TargetState::Open);
            self.peers.len() - 1
        });
        TargetIndex(u32::try_from(index).unwrap_or(u32::MAX))
    }

    pub(super) fn all(&self) -> Vec<Target> {
        // Whether a host takes VMs, and has the memory, the dry run to it has asked.
        let target = |state: &TargetState| Target { state: *state, takes_vms: true, memory_free: None };
        self.states.iter().map(target).collect()
    }

    pub(super) fn name(&self, target: TargetIndex) -> &str {
        self.peers.get(target.as_usize()).map_or("", |peer| &peer.name)
    }

    /// Notes that a target takes nothing more.
    pub(super) fn close(&mut self, target: TargetIndex) -> Event {
        if let Some(state) = self.states.get_mut(target.as_usize()) {
            *state = TargetState::Closed;
        }
        Event::Target { target, state: TargetState::Closed }
    }

    /// Looks which targets answer, and returns what has changed.
    pub(super) fn look(&mut self, evacuations: &Evacuations, now: Moment) -> Vec<Event> {
        let mut changes = Vec::new();
        for (number, (peer, state)) in self.peers.iter().zip(&mut self.states).enumerate() {
            let is_lost = match evacuations.hosts.session(peer) {
                Ok(session) => {
                    let status = session.status();
                    !status.is_connected && status.since >= LOST_AFTER
                }
                // It is paired no more, or this host reaches no one.
                Err(_) => true,
            };
            let next = match (*state, is_lost) {
                (TargetState::Open, true) => TargetState::Lost(now),
                (TargetState::Lost(_), false) => TargetState::Open,
                _ => continue,
            };
            *state = next;
            tracing::info!(host = %peer.name, is_lost, "a target of the evacuation");
            let target = TargetIndex(u32::try_from(number).unwrap_or(u32::MAX));
            changes.push(Event::Target { target, state: next });
        }
        changes
    }
}
