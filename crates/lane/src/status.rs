//! The report of a lane about itself.

use block::ByteRange;
use block::latency::Latencies;
use migration::filling::FillingProgress;
use migration::{HostId, MigrationId};

use crate::clients::ByHost;
use crate::front_end::ClientProcess;

/// The state of a lane at one instant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LaneStatus {
    /// Name of the I/O engine: `io_uring` or `threads`.
    pub engine: &'static str,
    /// The number of NBD connections.
    pub connections: usize,
    /// The processes of this host that use the volume by its unix socket, one for each connection.
    pub client_processes: Vec<ClientProcess>,
    /// Clients of other hosts, which are forwarded here.
    pub clients_elsewhere: ByHost,
    /// Other hosts that forward clients here, even if they have none at present.
    pub led_here_by: Vec<HostId>,
    /// Whether the report of the volume's former host about its clients is still due.
    pub awaits_word_of_clients: bool,
    /// Guest requests that have not ended.
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
    /// The error of the latest failure.
    pub last_error: Option<String>,
    /// Latencies of guest requests since the lane began.
    pub latencies: Latencies,
    /// How often the volume has changed hands.
    pub generation: u64,
    /// The migrations that have begun to copy the volume, and whose missing sets are known.
    pub copies: Vec<MigrationId>,
    /// Progress of filling an incomplete volume; `None`: it was complete before this lane began.
    pub filling: Option<FillingProgress>,
    /// The first runs of its missing blocks.
    pub missing: Vec<ByteRange>,
}
