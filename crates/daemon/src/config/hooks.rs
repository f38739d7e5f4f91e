//! The programs that an administrator has run before and after a VM changes its host.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use block::held;
use serde::Deserialize;

use super::{ConfigError, require_absolute, within};

/// The default time limit of a hook: changing routes and DNS takes less, and the guest runs meanwhile.
const TIMEOUT_S_DEFAULT: u64 = 30;
/// The range of `timeout_s`. A longer limit would make the other host wait too long.
pub(crate) const TIMEOUT_S: std::ops::RangeInclusive<u64> = 1..=300;

/// Programs that run when a VM changes its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HooksConfig {
    /// Runs before the VM is stopped; if it fails, the VM stays.
    pub before: Option<PathBuf>,
    /// Runs after the VM has moved, or the move has failed.
    pub after: Option<PathBuf>,
    /// The time limit of each program.
    pub timeout: Duration,
}

/// The mode bits by which others than the owner may write to a file.
const OTHERS_WRITE: u32 = 0o022;

/// Why a program cannot be a hook.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HookProblem {
    /// It does not exist, or cannot be examined.
    #[error("it cannot be examined: {0}")]
    Unreadable(String),
    /// It is not a file.
    #[error("it is no file")]
    NoFile,
    /// No user may execute it.
    #[error("it is not executable; chmod +x it")]
    NotExecutable,
    /// Others than root and the daemon's user may write it, or replace it.
    #[error(
        "users other than root may change or replace it; only root may write to it and the folders above it (chown, chmod go-w)"
    )]
    OfOthers,
}

impl Default for HooksConfig {
    fn default() -> Self {
        Self { before: None, after: None, timeout: Duration::from_secs(TIMEOUT_S_DEFAULT) }
    }
}

impl HooksConfig {
    /// Checks whether the programs of the configuration at `path` can be run; fails with [`ConfigError::Hook`].
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

    /// Returns why `before` could not be run at present, for which a migration would fail. May block.
    pub(crate) fn before_problem(&self) -> Option<String> {
        problem("hooks.before", self.before.as_deref()?)
    }

    /// Returns why `after` could not be run at present. May block.
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
    /// Checks the settings of the file at `path`, without examining the programs.
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

/// Checks whether a program of an administrator can be run. May block.
pub(super) fn check(program: &Path) -> Result<(), HookProblem> {
    let metadata = std::fs::metadata(program).map_err(|error| HookProblem::Unreadable(error.to_string()))?;
    if !metadata.is_file() {
        return Err(HookProblem::NoFile);
    }
    let held = held::find(program).map_err(|error| HookProblem::Unreadable(error.to_string()))?;
    if held.is_in_hands_of_others() || held.status().st_mode & OTHERS_WRITE != 0 {
        return Err(HookProblem::OfOthers);
    }
    // Running it shows whether the daemon itself may: root may if the mode allows it to any user.
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
