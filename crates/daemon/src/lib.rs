//! The control plane: HTTP API, journal, volumes, migrations.

pub mod config;
pub mod folders;
pub mod names;

pub use config::{Config, ConfigError, EngineSetting};
pub use folders::Folders;
