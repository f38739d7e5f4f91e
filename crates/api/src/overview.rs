//! The whole host at a glance, for the web page, `sterna top` and `sterna watch`, which poll it.
//!
//! It holds no secrets (tickets, invitations, definitions of VMs), because every viewer of the page gets all of it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    HistorySample, Host, ImageFormat, ImageKind, Migration, Peer, PeerConnection, Readiness, Standby, Store,
    Vm, VolumeCreation, VolumeFilling, VolumeState,
};

/// The host at one instant. The daemon collects it at most once a second; requests in between get the latest one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// When it was taken, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// Its name for other hosts, or else the system's host name.
    pub name: String,
    /// The daemon with its version.
    pub host: Host,
    /// The daemon's problems.
    pub readiness: Readiness,
    /// The other hosts, by name.
    pub peers: Vec<PeerAtWork>,
    /// The stores, by name; some seconds old.
    pub stores: Vec<Store>,
    /// The volumes, by name.
    pub volumes: Vec<VolumeAtWork>,
    /// The VMs, by name, without their definitions; some seconds old.
    pub vms: Vec<Vm>,
    /// The standbys of both roles, by name, without recovery points and tests; some seconds old.
    #[serde(default)]
    pub standbys: Vec<Standby>,
    /// Queued migrations, migrations under way and the latest ended ones, oldest first; without tickets.
    pub migrations: Vec<MigrationAtWork>,
    /// Number of ended migrations that the daemon knows; `migrations` may have fewer.
    pub migrations_ended: u64,
}

/// A volume, with the present load of its guests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeAtWork {
    /// Name of the volume.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Bytes that its image takes in the store, some seconds old; `None`: unknown.
    pub allocated_bytes: Option<u64>,
    /// The store that holds its image; `None` for one that is served in place, or if another host has it.
    pub store: Option<String>,
    /// The other host that has the volume.
    pub host: Option<String>,
    /// Absolute path of its image, or the URI of the export that holds it.
    pub image: String,
    /// Whether its image is a file, a device or an export.
    pub kind: ImageKind,
    /// The format of its image.
    pub format: ImageFormat,
    /// Whether clients may only read.
    pub read_only: bool,
    /// Whether it is served, or why not.
    pub state: VolumeState,
    /// Why it is not served; `None` while it is.
    pub message: Option<String>,
    /// Progress of its creation; `None` once it exists.
    pub creation: Option<VolumeCreation>,
    /// Identity of its migration under way.
    pub migration: Option<String>,
    /// NBD connections at this host.
    pub connections: u64,
    /// Number of clients that other hosts forward here.
    pub clients_elsewhere: u64,
    /// The blocks that it lacks; `None` if it is complete, or is not served.
    #[serde(default)]
    pub filling: Option<VolumeFilling>,
    /// Requests that failed since the daemon began to serve it.
    pub errors: u64,
    /// The latest error of a request.
    pub last_error: Option<String>,
    /// The load of its guests; `None`: it is not served, or there is no recent measurement.
    pub activity: Option<Activity>,
}

/// The load of a volume's guests between the latest two measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Activity {
    /// Read requests a second.
    pub reads_per_second: f64,
    /// Writes, discards and zeroing a second.
    pub writes_per_second: f64,
    /// Flush requests a second.
    pub flushes_per_second: f64,
    /// Bytes that guests read a second.
    pub bytes_read_per_second: f64,
    /// Bytes that guests write a second.
    pub bytes_written_per_second: f64,
    /// Requests in flight at this moment.
    pub requests_in_flight: u64,
    /// Latency that half of the requests did not exceed, in microseconds; `None` if there was no request.
    pub median_us: Option<u64>,
    /// Latency that 99 of 100 requests did not exceed, in microseconds.
    pub p99_us: Option<u64>,
}

/// Another host, with the traffic over its connections.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PeerAtWork {
    /// The other host, without its connections.
    pub peer: Peer,
    /// Every connection with it.
    pub connections: Vec<ConnectionAtWork>,
}

/// A connection with another host, with its traffic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionAtWork {
    /// The connection with its state.
    pub connection: PeerConnection,
    /// Bytes sent a second; `None`: there is no recent measurement.
    pub bytes_sent_per_second: Option<f64>,
    /// Bytes received a second; `None` as above.
    pub bytes_received_per_second: Option<f64>,
}

/// A migration, with its latest samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationAtWork {
    /// The migration with its state.
    pub migration: Migration,
    /// The samples of its last seconds; empty if it has ended, or is recorded at the other host.
    pub samples: Vec<HistorySample>,
    /// Whether it has a recording, so that its report has more than the journal.
    pub recorded: bool,
}

impl Activity {
    /// Returns the requests a second, of all kinds.
    pub fn requests_per_second(&self) -> f64 {
        self.reads_per_second + self.writes_per_second + self.flushes_per_second
    }
}
