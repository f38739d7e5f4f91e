//! What a lane tells of itself.

use block::ByteRange;
use block::latency::Latencies;
use migration::filling::FillingProgress;
use migration::{HostId, MigrationId};

use crate::clients::ByHost;
use crate::front_end::ClientProcess;

/// What a lane is doing, at one instant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LaneStatus {
    /// Name of the I/O engine: `io_uring` or `threads`.
    pub engine: &'static str,
    /// NBD connections.
    pub connections: usize,
    /// The processes of this host that use the volume by its unix socket, one for each connection.
    pub client_processes: Vec<ClientProcess>,
    /// Clients at other hosts, which lead them here.
    pub clients_elsewhere: ByHost,
    /// Other hosts that lead their clients here, whether they have any at this moment or not.
    pub led_here_by: Vec<HostId>,
    /// The host that the volume came from has yet to say whether it leads clients here.
    pub awaits_word_of_clients: bool,
    /// Guest requests in flight.
    pub requests_in_flight: usize,
    /// Guest reads since the lane began.
    pub reads: u64,
    /// Guest writes, discards and zeroing since the lane began.
    pub writes: u64,
    /// Guest flushes since the lane began.
    pub flushes: u64,
    /// Bytes that guests have read.
    pub bytes_read: u64,
    /// Bytes that guests have written.
    pub bytes_written: u64,
    /// Guest requests that failed.
    pub errors: u64,
    /// What the latest of them failed by.
    pub last_error: Option<String>,
    /// How long guest requests took since the lane began.
    pub latencies: Latencies,
    /// How often the volume has changed hands.
    pub generation: u64,
    /// The migrations that have begun to copy the volume, of whose copies it is known what they lack.
    pub copies: Vec<MigrationId>,
    /// How far the volume is that came with blocks missing; `None`: it did not, or before this start.
    pub filling: Option<FillingProgress>,
    /// The first runs of what it lacks.
    pub missing: Vec<ByteRange>,
}
