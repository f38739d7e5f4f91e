//! The whole host at one glance: what the web page, `sterna top` and `sterna watch` look at again and again.
//!
//! It holds no secrets (tickets, invitations, definitions of VMs): whoever may see the page may see all of it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    HistorySample, Host, ImageFormat, ImageKind, Migration, Peer, PeerConnection, Readiness, Store, Vm,
    VolumeCreation, VolumeFilling, VolumeState,
};

/// The host at one instant. A daemon takes it at most once a second, however many ask; those in between get the latest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Overview {
    /// When it was taken, in milliseconds since 1970.
    pub taken_unix_ms: u64,
    /// What other hosts call it, or what its system does.
    pub name: String,
    /// The daemon.
    pub host: Host,
    /// Whether it does all that it is to do.
    pub readiness: Readiness,
    /// The other hosts, by name.
    pub peers: Vec<PeerAtWork>,
    /// The stores, by name; some seconds old.
    pub stores: Vec<Store>,
    /// The volumes, by name.
    pub volumes: Vec<VolumeAtWork>,
    /// The VMs, by name, without their definitions; some seconds old.
    pub vms: Vec<Vm>,
    /// Migrations that wait or are under way, and the latest that have ended, oldest first; without tickets.
    pub migrations: Vec<MigrationAtWork>,
    /// How many migrations are remembered that have ended; not all of them need be among [`Overview::migrations`].
    pub migrations_ended: u64,
}

/// A volume, and what its guests do at present.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeAtWork {
    /// Its name.
    pub name: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes that its image takes in the store; some seconds old. `None`: nobody says.
    pub allocated_bytes: Option<u64>,
    /// The store that holds its image; `None` for one that is served in place, or if another host has it.
    pub store: Option<String>,
    /// The other host that has it.
    pub host: Option<String>,
    /// Absolute path of its image, or the URI of the export that holds it.
    pub image: String,
    /// What its image is.
    pub kind: ImageKind,
    /// How its bytes lie in its image.
    pub format: ImageFormat,
    /// Whether clients may only read.
    pub read_only: bool,
    /// Whether it is being served.
    pub state: VolumeState,
    /// Why it is not being served; `None` while it is.
    pub message: Option<String>,
    /// How far its creation has come; `None` once it exists.
    pub creation: Option<VolumeCreation>,
    /// The migration under way.
    pub migration: Option<String>,
    /// NBD connections at this host.
    pub connections: u64,
    /// Clients at other hosts, which lead them here.
    pub clients_elsewhere: u64,
    /// What it lacks; `None` if that is nothing, and while it is not being served.
    #[serde(default)]
    pub filling: Option<VolumeFilling>,
    /// Requests that failed since the daemon began to serve it.
    pub errors: u64,
    /// What the latest of them failed by.
    pub last_error: Option<String>,
    /// What its guests do; `None`: it is not being served, or nobody has looked a moment ago.
    pub activity: Option<Activity>,
}

/// What guests did between the latest two looks at a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Activity {
    /// Reads a second.
    pub reads_per_second: f64,
    /// Writes, discards and zeroing a second.
    pub writes_per_second: f64,
    /// Flushes a second.
    pub flushes_per_second: f64,
    /// Bytes read a second.
    pub bytes_read_per_second: f64,
    /// Bytes written a second.
    pub bytes_written_per_second: f64,
    /// Requests in flight at this moment.
    pub requests_in_flight: u64,
    /// Latency that half of the requests did not exceed, in microseconds; `None` if there was no request.
    pub median_us: Option<u64>,
    /// Latency that 99 of 100 requests did not exceed.
    pub p99_us: Option<u64>,
}

/// Another host, and what goes over the connections with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PeerAtWork {
    /// The host; its connections are beside it.
    pub peer: Peer,
    /// Every connection.
    pub connections: Vec<ConnectionAtWork>,
}

/// A connection with another host, and what goes over it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ConnectionAtWork {
    /// The connection.
    pub connection: PeerConnection,
    /// Bytes sent a second; `None`: nobody has looked a moment ago.
    pub bytes_sent_per_second: Option<f64>,
    /// Bytes received a second.
    pub bytes_received_per_second: Option<f64>,
}

/// A migration, and what was recorded of it a moment ago.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MigrationAtWork {
    /// The migration.
    pub migration: Migration,
    /// The latest samples of its recording, some seconds' worth; empty if it has ended, or is recorded at the other host.
    pub samples: Vec<HistorySample>,
    /// Whether there is a recording of it, so that its report has more than the journal knows.
    pub recorded: bool,
}

impl Activity {
    /// Requests a second.
    pub fn requests_per_second(&self) -> f64 {
        self.reads_per_second + self.writes_per_second + self.flushes_per_second
    }
}
