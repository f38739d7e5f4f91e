//! What a wide-area link does to packets.

use std::time::Duration;

use crate::network::BitRate;

/// The shortest queue: the buffer of a small switch, as that of a link without delay. A round trip of half a millisecond
/// is no measure for it: a gigabit carries less in it than TCP hands down at once.
const QUEUE_TIME_MIN: Duration = Duration::from_millis(10);
/// The smallest queue of slow links: four of the largest packets that TCP hands down at once.
const QUEUE_BYTES_MIN: u64 = 4 * 65_536;

/// What a wide-area link does, the same each way. It can be changed while the link is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// What the wire carries: bytes of IP packets, headers and all.
    pub rate: BitRate,
    /// What a small packet and its answer take on an idle link, half of it each way, besides what the kernels take.
    pub round_trip: Duration,
    /// A packet's way takes up to so much more or less, each value as likely as another.
    pub jitter: Duration,
    /// Whether a packet that was sent later can arrive earlier, if there is jitter.
    pub order: Order,
    /// How many of a million packets are lost on the way, by chance.
    pub lost_per_million: u32,
    /// How many bytes wait for the wire before packets are refused.
    pub queue_bytes_max: u64,
    /// Chance is the same for the same seed and the same packets.
    pub seed: u64,
}

/// What jitter may do to the order of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A packet waits for those that were sent before it, as on most real paths.
    Kept,
    /// A packet arrives when its own time has come.
    ByArrival,
}

impl Conditions {
    /// A link that does nothing worse than to take its time.
    ///
    /// The queue holds what the link carries in a round trip, which is what a single TCP connection needs to keep the link
    /// busy through one of its losses; at least what it carries in 10 ms, and 256 KiB.
    pub fn of(rate: BitRate, round_trip: Duration) -> Self {
        Self {
            rate,
            round_trip,
            jitter: Duration::ZERO,
            order: Order::Kept,
            lost_per_million: 0,
            queue_bytes_max: rate.bytes_in(round_trip.max(QUEUE_TIME_MIN)).max(QUEUE_BYTES_MIN),
            seed: 0,
        }
    }
}
