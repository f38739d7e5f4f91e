//! The control plane: HTTP API, journal, volumes, migrations.

pub mod config;
pub mod fail_point;
pub mod folders;
pub mod journal;
pub mod lock;
pub mod names;

pub use config::{Config, ConfigError, EngineSetting};
pub use folders::Folders;
