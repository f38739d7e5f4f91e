//! What an administrator has run before and after a VM changes its host.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::{ConfigError, require_absolute, within};

/// How long a hook may take, if nobody says: routes and DNS are changed in less, and the guest works meanwhile.
const TIMEOUT_S_DEFAULT: u64 = 30;
/// Range of `timeout_s`. Above, the other host would have to be waited for longer than anybody watches.
pub(crate) const TIMEOUT_S: std::ops::RangeInclusive<u64> = 1..=300;

/// Programs that are run when a VM changes its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HooksConfig {
    /// Run before the VM is stopped: if it fails, the VM stays.
    pub before: Option<PathBuf>,
    /// Run after it has moved, or has not.
    pub after: Option<PathBuf>,
    /// How long each of them may take.
    pub timeout: Duration,
}

/// What is wrong with a hook.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookProblem {
    /// It is not there, or cannot be looked at.
    #[error("it cannot be looked at: {0}")]
    Unreadable(String),
    /// It is no file.
    #[error("it is no file")]
    NoFile,
    /// Nobody may execute it.
    #[error("it is not executable; chmod +x it")]
    NotExecutable,
}

impl Default for HooksConfig {
    fn default() -> Self {
        Self { before: None, after: None, timeout: Duration::from_secs(TIMEOUT_S_DEFAULT) }
    }
}

impl HooksConfig {
    /// Looks whether the programs could be run, in the configuration at `path`.
    ///
    /// # Errors
    /// [`ConfigError::Hook`].
    pub(super) fn look(&self, path: &Path) -> Result<(), ConfigError> {
        for (key, program) in [("hooks.before", &self.before), ("hooks.after", &self.after)] {
            let Some(program) = program else { continue };
            check(program).map_err(|problem| ConfigError::Hook {
                path: path.to_owned(),
                key,
                program: program.clone(),
                problem,
            })?;
        }
        Ok(())
    }

    /// Why `before` could not be run as it is now, for people; a migration would fail. May sleep.
    pub(crate) fn before_problem(&self) -> Option<String> {
        problem("hooks.before", self.before.as_deref()?)
    }

    /// Why `after` could not be run as it is now, for people. May sleep.
    pub(crate) fn after_problem(&self) -> Option<String> {
        problem("hooks.after", self.after.as_deref()?)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileHooks {
    before: Option<PathBuf>,
    after: Option<PathBuf>,
    timeout_s: Option<u64>,
}

impl FileHooks {
    /// Checks what is written in the file at `path`; looks at no program.
    pub(super) fn check(self, path: &Path) -> Result<HooksConfig, ConfigError> {
        let program = |key, program: Option<PathBuf>| {
            program.map(|program| require_absolute(path, key, program)).transpose()
        };
        let timeout_s = self.timeout_s.unwrap_or(TIMEOUT_S_DEFAULT);
        Ok(HooksConfig {
            before: program("hooks.before", self.before)?,
            after: program("hooks.after", self.after)?,
            timeout: within(path, "hooks.timeout_s", timeout_s, &TIMEOUT_S).map(Duration::from_secs)?,
        })
    }
}

fn problem(key: &str, program: &Path) -> Option<String> {
    let problem = check(program).err()?;
    Some(format!("the hook {} ({key}) cannot be run: {problem}", program.display()))
}

fn check(program: &Path) -> Result<(), HookProblem> {
    let metadata = std::fs::metadata(program).map_err(|error| HookProblem::Unreadable(error.to_string()))?;
    if !metadata.is_file() {
        return Err(HookProblem::NoFile);
    }
    // Whether the daemon itself may is seen when it is run: root may do what the mode says that somebody may.
    if metadata.permissions().mode() & 0o111 == 0 {
        return Err(HookProblem::NotExecutable);
    }
    Ok(())
}
