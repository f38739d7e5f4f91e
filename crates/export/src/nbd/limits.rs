//! Limits of a server and of each of its connections.

use std::time::Duration;

use crate::nbd::protocol::PAYLOAD_LENGTH_MAX;

/// Limits of a server; [`Limits::STANDARD`] suits a volume's own socket.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time over unix sockets, and as many over TCP; further ones are closed as soon as they are accepted.
    pub connections_max: usize,
    /// The same for one host that connects over TCP, so that it cannot take every place.
    pub connections_per_host_max: usize,
    /// Requests of one connection whose replies have not been sent. At this number its socket is not read.
    pub requests_in_flight_max: usize,
    /// Bytes of read and write payloads that one connection holds, with the same effect. A request that is alone on its
    /// connection is accepted whatever its size.
    pub payload_in_flight_max: usize,
    /// Bytes among these that every connection may hold whatever the others do, so that none can starve another.
    pub payload_allowance: usize,
    /// Bytes that all connections hold beyond their allowances. So a server never holds more payload than this and one allowance
    /// for each connection, however many requests are announced.
    pub payload_in_flight_total_max: usize,
    /// Time after which a client is cut off if others wait for the memory that it holds. The client holds more than its
    /// allowance, and neither sends the rest of a payload nor reads its replies. If nobody waits, it has no limit, since a
    /// machine may be paused in the midst of a write.
    pub stall_timeout: Duration,
    /// Time from the connection to the end of negotiation: a slow client must not keep a place.
    pub negotiation_timeout: Duration,
    /// Time that a client has to read the last replies after its goodbye.
    pub linger_timeout: Duration,
}

impl Limits {
    /// The limits that the product uses.
    pub const STANDARD: Self = Self {
        // QEMU opens one; copying tools open four to sixteen.
        connections_max: 64,
        // `nbd-client` opens one for each processor at most, and two such hosts fit.
        connections_per_host_max: 32,
        // Linux's own client keeps 128 in flight per connection, copying tools 64.
        requests_in_flight_max: 128,
        // Two of the largest payloads: one being received, one being executed.
        payload_in_flight_max: 2 * PAYLOAD_LENGTH_MAX as usize,
        // 32 requests of 8 KiB: the most that most guests have in flight.
        payload_allowance: 256 << 10,
        // Eight of the largest; with requests of 8 KiB this is no limit at all.
        payload_in_flight_total_max: 8 * PAYLOAD_LENGTH_MAX as usize,
        // The time that QEMU grants its clients.
        negotiation_timeout: Duration::from_secs(10),
        linger_timeout: Duration::from_secs(10),
        // The largest payload over 5 Mbit/s.
        stall_timeout: Duration::from_secs(60),
    };
}
