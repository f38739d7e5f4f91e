//! What machines that come from other hosts may name here.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{ConfigError, require_absolute};

/// What machines that come from other hosts may name here, besides what is always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachinesConfig {
    /// Options of QEMU, alone or with what their value begins with: `-vnc`, `-netdev bridge`.
    pub allow: Vec<String>,
    /// Folders below which files and sockets may be named; absolute.
    pub folders: Vec<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileMachines {
    allow: Vec<String>,
    folders: Vec<PathBuf>,
}

impl FileMachines {
    /// Checks what is written in the file at `path`.
    pub(super) fn check(self, path: &Path) -> Result<MachinesConfig, ConfigError> {
        if let Some(entry) =
            self.allow.iter().find(|entry| !entry.starts_with('-') || entry.split(' ').count() > 2)
        {
            return Err(ConfigError::Allowed { path: path.to_owned(), entry: entry.clone() });
        }
        let folders = self.folders.into_iter();
        let folders = folders.map(|folder| require_absolute(path, "machines.folders", folder));
        Ok(MachinesConfig { allow: self.allow, folders: folders.collect::<Result<_, _>>()? })
    }
}
