//! The control plane: HTTP API, journal, volumes, migrations.
//!
//! ```text
//!   serve ── start-up order, signals
//!     │
//!   http ──► host ──► volumes ──► lane (one thread a volume)
//!              │                    │ Control: commits, images, reports
//!              ├──► migrations ◄────┤
//!              ├──► journal    ◄────┘
//!              ├──► stores, images, sockets
//!              ├──► vms ──► hypervisor: QEMU processes
//!              └──► hosts ──► transport ──► peers: what other hosts say
//! ```
//!
//! Nothing here is on the path of a guest's request. What must be remembered is in the journal before it is acted
//! upon; what is here besides is forgotten at a restart, and found again from the journal.

mod chronicles;
pub mod config;
mod control;
mod copying;
mod descriptors;
mod dockets;
mod error;
pub mod fail_point;
pub mod folders;
mod growing;
mod history;
mod hooks;
mod host;
mod hosts;
mod http;
mod images;
mod journal;
mod kept;
mod listing;
mod lock;
mod migrations;
mod moving;
pub mod names;
mod opening;
mod peers;
mod qemu_sockets;
mod queue;
mod recovery;
mod replicas;
mod serve;
mod sockets;
mod stores;
mod vms;
mod volume_hooks;
mod volumes;
mod whole_file;

pub use config::{Config, ConfigError, EngineSetting, StoreConfig};
pub use folders::Folders;
pub use http::openapi_document;
pub use journal::{JOURNAL_FILE, JournalError, read_journal};
pub use lock::LockError;
pub use serve::{Daemon, ServeError, serve};
pub use sockets::SocketError;
