//! The control plane: HTTP API, journal, volumes, migrations.
//!
//! ```text
//!   serve ── start-up order, signals
//!     │
//!   http ──► host ──► volumes ──► lane (one thread a volume)
//!              │                    │ Control: commits, images, reports
//!              ├──► migrations ◄────┤
//!              ├──► journal    ◄────┘
//!              ├──► stores, images ──► files
//!              ├──► vms ──► hypervisor: QEMU processes
//!              ├──► grants: who may use the API over TLS
//!              └──► hosts ──► transport ──► peers: what other hosts say
//! ```
//!
//! `host` has the operations, what can be asked for: those on volumes in `host/volumes/`, for example. The other rooms
//! have what operations need; only `serve`, `http` and `peers` know a `Host`.
//!
//! Nothing here is on the path of a guest's request. What must be remembered is in the journal before it is acted
//! upon; what is here besides is forgotten at a restart, and found again from the journal.

mod audit;
pub mod config;
mod config_check;
mod custody;
mod error;
pub mod fail_point;
mod files;
mod grants;
mod hooks;
mod host;
mod hosts;
mod http;
mod images;
mod journal;
pub mod log;
mod metrics;
mod migrations;
pub mod names;
mod peers;
mod serve;
mod service_manager;
mod stores;
mod take_over;
mod vms;
mod volumes;

pub use config::folders::Folders;
pub use config::{Config, ConfigError, EngineSetting, StoreConfig};
pub use config_check::{ConfigCheck, ConfigProblem};
pub use files::lock::LockError;
pub use files::sockets::SocketError;
pub use host::reload::ReadConfig;
pub use http::openapi_document;
pub use journal::{
    HostToAsk, HostsSaid, JOURNAL_FILE, JournalError, JournalExamination, JournalMigration, JournalOwner,
    JournalVolume, Replacing, RestoreError, RestoredJournal, read_journal, restore_journal,
};
pub use serve::{Daemon, ServeError, Start, serve};
pub use take_over::TakeOverError;
