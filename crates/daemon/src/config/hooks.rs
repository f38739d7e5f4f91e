//! What an administrator has run before and after a VM changes its host.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::held;
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

/// Whoever may write to a file besides its owner.
const OTHERS_WRITE: u32 = 0o022;

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
    /// Others than root and the daemon's user may write it, or put another one in its place.
    #[error(
        "others than root may change it, or what is in its place; it and the folders above it must be root's alone (chown, chmod go-w)"
    )]
    OfOthers,
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
    let held = held::find(program).map_err(|error| HookProblem::Unreadable(error.to_string()))?;
    if held.is_in_hands_of_others() || held.status().st_mode & OTHERS_WRITE != 0 {
        return Err(HookProblem::OfOthers);
    }
    // Whether the daemon itself may is seen when it is run: root may do what the mode says that somebody may.
    if metadata.permissions().mode() & 0o111 == 0 {
        return Err(HookProblem::NotExecutable);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use super::*;

    #[test]
    fn a_hook_that_others_may_change_is_not_run() {
        if !rustix::process::geteuid().is_root() {
            return omission::machine_lacks("root, to give a file away");
        }
        let folder = tempfile::tempdir().unwrap();
        let hook = folder.path().join("hook");
        let set = |path: &Path, mode| {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        std::fs::write(&hook, "").unwrap();
        set(&hook, 0o755);
        assert_eq!(check(&hook), Ok(()));
        set(&hook, 0o775);
        assert_eq!(check(&hook), Err(HookProblem::OfOthers));
        set(&hook, 0o755);
        set(folder.path(), 0o777);
        assert_eq!(check(&hook), Err(HookProblem::OfOthers));
        set(folder.path(), 0o755);
        chown(&hook, Some(24_005), None).unwrap();
        assert_eq!(check(&hook), Err(HookProblem::OfOthers));
    }
}
