//! The control plane: HTTP API, journal, volumes, migrations.
//!
//! ```text
//!   serve ── start-up order, signals
//!     │
//!   http ──► host ──► volumes ──► lane (one thread for each volume)
//!              │                    │ Control: commits, images, reports
//!              ├──► migrations ◄────┤
//!              ├──► journal    ◄────┘
//!              ├──► stores, images ──► files
//!              ├──► vms ──► hypervisor: QEMU processes
//!              ├──► grants: clients of the API over TLS; sign_ins: browsers at the page
//!              └──► hosts ──► transport ──► peers: messages of other hosts
//! ```
//!
//! `host` puts rooms together, each with its few fields. The rooms for volumes, VMs and migrations are in the modules of these
//! nouns; only `serve`, `http` and `peers` use a `Host`. Nothing here is on the path of a guest's request. Durable state is in the
//! journal before it is acted upon. All other state is lost at a restart, and rebuilt from the journal.

mod audit;
mod boot;
pub mod config;
mod config_check;
mod custody;
mod error;
mod evacuations;
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
mod notices;
mod peers;
mod serve;
mod service_manager;
mod sign_ins;
mod standbys;
mod stores;
mod take_over;
mod vms;
mod volumes;

pub use self::host::reload::ReadConfig;
pub use config::folders::Folders;
pub use config::{Config, ConfigError, EngineSetting, StoreConfig};
pub use config_check::{ConfigCheck, ConfigProblem};
pub use files::lock::LockError;
pub use files::sockets::SocketError;
pub use http::openapi_document;
pub use journal::{
    HostToAsk, HostsSaid, JOURNAL_FILE, JournalError, JournalExamination, JournalMigration, JournalOwner,
    JournalVolume, Replacing, RestoreError, RestoredJournal, read_journal, restore_journal,
};
pub use serve::{Daemon, ServeError, Start, serve};
pub use take_over::TakeOverError;
