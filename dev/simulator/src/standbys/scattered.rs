//! A guest that writes everywhere, over a slow link, to a standby that lacks everything.

use std::time::Duration;

use standby::owner::State;

use super::owner::Knows;
use super::world::{EVERY, World};

/// Intervals within which the standby is current: the link carries the largest group in three, and all that is written meanwhile.
const CAUGHT_UP_IN: u32 = 8;
/// The most time between two writes of one block. The link carries about twice as much.
pub(super) const SCATTERED_PAUSE: Duration = Duration::from_millis(40);

impl World {
    /// The standby becomes current in about the time that the link needs for the group and for what is written.
    pub(super) fn expect_caught_up(&mut self) {
        self.tell(|_| "the guest writes everywhere, and the standby lacks everything".to_owned());
        let host = self.current;
        self.stop_owner(host);
        // Nothing can be copied before it is overwritten. What is written is kept, or it is not.
        (self.shape.ring_blocks, self.shape.rate) = self.random.pick(&[(1000, 1), (1000, 1), (0, 4)]);
        (self.shape.spool_blocks, self.shape.catch_up_blocks) = (0, 4);
        self.shape.is_scattered = true;
        self.owners[host].knows = Some(Knows::Nothing);
        self.start_owner(host);
        let before = self.owners[host].rewritten;
        self.run_until(self.now + EVERY * CAUGHT_UP_IN);
        let owner = &self.owners[host];
        let (state, rewritten) = (owner.state, owner.rewritten - before);
        if self.violation.is_none() && state != Some(State::Current) {
            return self.violate(format!("the standby does not catch up with scattered writes: {state:?}"));
        }
        self.shown.caught_up += u64::from(rewritten > 0);
    }
}
