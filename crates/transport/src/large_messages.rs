//! Finds a path that swallows large packets once connections exist (`greeting.rs` does when they are made): they are made and answer heartbeats, and each ends with its first large message.
//!
//! ```text
//!   a large message is acknowledged ─► large packets pass
//!   a connection is lost with one that is not ─► and the next one, and the next one ─► only small packets pass
//! ```
//! Interfaces of 9,000 bytes over a switch of 1,500 do this if a firewall drops what would say so (ICMP).

/// A message of at least this many bytes fills packets of any usual size.
const LARGE_BYTES: usize = 16 << 10;
/// How many connections in a row must be lost. A link that is cut again and again carries some large message in between.
const LOST_MAX: u32 = 3;

/// What to do about a path on which only small packets pass.
pub(crate) const MTU_ADVICE: &str =
    "set the smallest MTU of the path at both hosts (ip link set DEVICE mtu 1500), or let ICMP pass";

/// The advice for a connection that was made on such a path: the path may have changed since, or the peer is older.
pub(crate) const ADVICE: &str = "only small packets pass on this path: each connection ends with its first large message; set the \
    smallest MTU of the path at both hosts (ip link set DEVICE mtu 1500), or let ICMP pass";

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LargeMessages {
    lost_in_a_row: u32,
}

impl LargeMessages {
    /// Notes that the peer has acknowledged a message.
    pub(crate) fn acknowledged(&mut self, bytes: usize) {
        if bytes >= LARGE_BYTES {
            self.lost_in_a_row = 0;
        }
    }

    /// Notes that a connection was lost while its largest unacknowledged message had this many bytes.
    pub(crate) fn lost(&mut self, largest_bytes: usize) {
        if largest_bytes >= LARGE_BYTES {
            self.lost_in_a_row = self.lost_in_a_row.saturating_add(1);
        }
    }

    pub(crate) fn only_small_ones_pass(self) -> bool {
        self.lost_in_a_row >= LOST_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_connections_that_end_with_a_large_message_show_that_only_small_packets_pass() {
        let after = |events: &[(bool, usize)]| {
            let mut seen = LargeMessages::default();
            for (is_acknowledged, bytes) in events {
                if *is_acknowledged { seen.acknowledged(*bytes) } else { seen.lost(*bytes) }
            }
            seen.only_small_ones_pass()
        };
        let (lost, small) = ((false, 512 << 10), (true, 200));
        assert!(after(&[lost, small, lost, small, lost]));
        assert!(!after(&[lost, small, lost]));
        // A link that is cut, and a host that ends while it is idle.
        assert!(!after(&[lost, lost, (true, 64 << 10), lost]));
        assert!(!after(&[(false, 100); 10]));
    }
}
