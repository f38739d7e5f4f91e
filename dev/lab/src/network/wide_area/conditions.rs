//! The conditions of a wide-area link for packets.

use std::time::Duration;

use crate::network::BitRate;

/// The shortest queue: the buffer of a small switch, as in a link without delay. A round trip of half a millisecond would be too
/// short: a gigabit carries less in it than TCP passes on at once.
const QUEUE_TIME_MIN: Duration = Duration::from_millis(10);
/// The smallest queue of slow links: four of the largest packets that TCP passes on at once.
const QUEUE_BYTES_MIN: u64 = 4 * 65_536;

/// The conditions of a wide-area link, the same in each direction. They can be changed while the link is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conditions {
    /// The wire's rate, in bits of IP packets with their headers.
    pub rate: BitRate,
    /// Round trip of a small packet on an idle link, half of it in each direction, without the kernels' own time.
    pub round_trip: Duration,
    /// A packet takes up to this much more or less; all values are equally likely.
    pub jitter: Duration,
    /// Whether jitter may let a later packet overtake an earlier one.
    pub order: Order,
    /// Random losses, of a million packets.
    pub lost_per_million: u32,
    /// Bytes that may wait for the wire; beyond that, packets are dropped.
    pub queue_bytes_max: u64,
    /// The seed of all random numbers: the same seed and packets give the same result.
    pub seed: u64,
}

/// The possible effects of jitter on the order of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A packet waits for those that were sent before it, as on most real paths.
    Kept,
    /// A packet arrives at its own time.
    ByArrival,
}

impl Conditions {
    /// Returns a link with delay, without jitter and loss.
    ///
    /// The queue holds what the link carries in a round trip: a single TCP connection needs that to keep the link busy after a
    /// loss. It holds at least what the link carries in 10 ms, and 256 KiB.
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
