//! Feeds the parser of the configuration file.

use std::path::{Path, PathBuf};

use daemon::config::Overrides;
use daemon::{Config, Folders};

/// Parses the bytes as a configuration. An accepted one is complete, and a refusal has a reason.
pub(crate) fn feed(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let folders = Folders {
        config_file: None,
        data_dir: Some(PathBuf::from("/var/lib/sterna")),
        runtime_dir: PathBuf::from("/run/sterna"),
    };
    match Config::parse(Path::new("sterna.toml"), &text, &Overrides::default(), &folders) {
        Ok(config) => {
            assert!(!config.stores.is_empty(), "a daemon has a store");
            assert!(config.data_dir.is_absolute(), "{config:?}");
        }
        Err(error) => assert!(!error.to_string().is_empty(), "an error says why: {error:?}"),
    }
}
