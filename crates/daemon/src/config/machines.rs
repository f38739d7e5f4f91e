//! What other hosts' VMs may name here, and the users that QEMU runs as.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use block::held::User;
use serde::Deserialize;

use super::sockets::{self, SocketFault, SocketOwner};
use super::{ConfigError, require_absolute};

/// The default user of QEMU, if the daemon is root and this user exists.
const USER_DEFAULT: &str = "sterna-qemu";
/// The default user IDs of VMs: above those to which directories of users are mapped, and below those that systemd reserves.
const NUMBERS_DEFAULT: RangeInclusive<u32> = 2_100_000_000..=2_100_065_535;
/// The setting by which all VMs run as one user.
const SHARED: &str = "shared";
/// The first user ID of ordinary users; lower ones are the system's.
const NUMBER_MIN: u32 = 1000;
/// The last one: higher numbers mean no user.
const NUMBER_MAX: u32 = u32::MAX - 2;
/// The program that changes the user and then executes QEMU (util-linux).
const CHANGES_USER: &str = "setpriv";

/// What other hosts' VMs may name here, besides what is always allowed; and the users that QEMU runs as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachinesConfig {
    /// Options of QEMU, alone or with the beginning of their value: `-vnc`, `-netdev bridge`.
    pub allow: Vec<String>,
    /// Absolute paths of folders below which files and sockets may be named.
    pub folders: Vec<PathBuf>,
    /// The user of the QEMUs that Sterna starts.
    pub runs_as: RunsAs,
    /// The user IDs of these QEMUs, one for each VM.
    pub users: VmUsers,
    /// The absolute path of the folder with the memory of suspended VMs; `None`: `suspended` in the data folder.
    pub suspended: Option<PathBuf>,
}

/// The users of QEMUs that do not run as the daemon's user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmUsers {
    /// Each has one of these numbers, which no other VM has, in the groups of [`RunsAs::Other`].
    Each(RangeInclusive<u32>),
    /// All run as [`RunsAs::Other`].
    Shared,
}

impl Default for VmUsers {
    fn default() -> Self {
        Self::Each(NUMBERS_DEFAULT)
    }
}

/// The user of the QEMUs that Sterna starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RunsAs {
    /// The daemon's user: the daemon is not root, or the configuration says so.
    #[default]
    Daemon,
    /// The daemon's user, which is root: nothing is configured, and QEMU's default user does not exist.
    Root,
    /// A user that is not the daemon's.
    Other(QemuUser),
}

impl RunsAs {
    /// Returns the user with its certain rights; leaves out further groups that it may be in.
    pub(crate) fn user(&self) -> User {
        match self {
            Self::Other(user) => User { user: user.user, groups: vec![user.group] },
            Self::Daemon | Self::Root => User {
                user: rustix::process::geteuid().as_raw(),
                groups: vec![rustix::process::getegid().as_raw()],
            },
        }
    }
}

/// A user that is not the daemon's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QemuUser {
    /// The text in the configuration.
    text: String,
    /// The number of the user.
    pub user: u32,
    /// The number of the user's group.
    pub group: u32,
    /// The further groups of the user.
    groups: Groups,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Groups {
    /// The system's groups of a user with a name.
    OfName,
    Cleared,
    These(Vec<u32>),
}

impl QemuUser {
    /// Returns the words that run `command` as this user, without any of the daemon's rights, in the same process.
    pub(crate) fn command(&self, command: Vec<String>) -> Vec<String> {
        let groups = match &self.groups {
            Groups::OfName => "--init-groups".to_owned(),
            Groups::Cleared => "--clear-groups".to_owned(),
            Groups::These(groups) => {
                let groups: Vec<String> = groups.iter().map(u32::to_string).collect();
                format!("--groups={}", groups.join(","))
            }
        };
        let words = [
            CHANGES_USER.to_owned(),
            format!("--reuid={}", self.user),
            format!("--regid={}", self.group),
            groups,
            "--inh-caps=-all".to_owned(),
            "--".to_owned(),
        ];
        words.into_iter().chain(command).collect()
    }

    /// Returns the user of one VM: a number and a group of its own, in the groups of this user, which give access
    /// to files of all VMs.
    pub(crate) fn of_vm(&self, number: u32) -> Self {
        let mut groups = vec![self.group];
        if self.groups == Groups::OfName {
            groups.extend(sockets::more_groups_of(self.user));
        }
        Self { text: self.text.clone(), user: number, group: number, groups: Groups::These(groups) }
    }

    #[cfg(test)]
    pub(crate) fn of_numbers(user: u32, group: u32) -> Self {
        Self { text: user.to_string(), user, group, groups: Groups::These(Vec::new()) }
    }

    /// Parses `USER` or `USER:GROUP`; without a group, takes the user's own.
    pub(crate) fn parse(text: &str) -> Result<Self, SocketFault> {
        let owner: SocketOwner = text.parse()?;
        let user = owner.user.ok_or_else(|| SocketFault::User(String::new()))?;
        let own_group = sockets::group_of(user);
        let group = owner.group.or(own_group).ok_or_else(|| SocketFault::NoGroup(text.to_owned()))?;
        let groups = if own_group.is_some() { Groups::OfName } else { Groups::Cleared };
        Ok(Self { text: text.to_owned(), user, group, groups })
    }
}

impl fmt::Display for QemuUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileMachines {
    allow: Vec<String>,
    folders: Vec<PathBuf>,
    suspended: Option<PathBuf>,
    user: Option<String>,
    users: Option<String>,
}

impl FileMachines {
    pub(super) fn check(self, path: &Path) -> Result<MachinesConfig, ConfigError> {
        if let Some(entry) =
            self.allow.iter().find(|entry| !entry.starts_with('-') || entry.split(' ').count() > 2)
        {
            return Err(ConfigError::Allowed { path: path.to_owned(), entry: entry.clone() });
        }
        let folders = self.folders.into_iter();
        let folders = folders.map(|folder| require_absolute(path, "machines.folders", folder));
        let runs_as = runs_as(path, self.user.as_deref(), rustix::process::geteuid().as_raw())?;
        let users = users(self.users.as_deref())
            .map_err(|fault| ConfigError::QemuUser { path: path.to_owned(), fault })?;
        let suspended = self.suspended.map(|folder| require_absolute(path, "machines.suspended", folder));
        Ok(MachinesConfig {
            allow: self.allow,
            folders: folders.collect::<Result<_, _>>()?,
            runs_as,
            users,
            suspended: suspended.transpose()?,
        })
    }
}

fn users(written: Option<&str>) -> Result<VmUsers, SocketFault> {
    let text = match written {
        None => return Ok(VmUsers::default()),
        Some(SHARED) => return Ok(VmUsers::Shared),
        Some(text) => text,
    };
    let numbers =
        text.split_once('-').and_then(|(first, last)| Some(first.parse().ok()?..=last.parse().ok()?));
    let is_sound = |numbers: &RangeInclusive<u32>| {
        !numbers.is_empty()
            && *numbers.start() >= NUMBER_MIN
            && *numbers.end() <= NUMBER_MAX
            && !sockets::is_taken(numbers)
    };
    numbers.filter(is_sound).map(VmUsers::Each).ok_or_else(|| SocketFault::Numbers(text.to_owned()))
}

/// Returns the user of QEMU for a setting and the daemon's own user.
fn runs_as(path: &Path, written: Option<&str>, own: u32) -> Result<RunsAs, ConfigError> {
    let Some(text) = written else {
        // That it does not exist is no error, because it was not configured.
        return Ok(match QemuUser::parse(USER_DEFAULT) {
            _ if own != 0 => RunsAs::Daemon,
            Ok(user) => RunsAs::Other(user),
            Err(_) => RunsAs::Root,
        });
    };
    let refused = |fault| ConfigError::QemuUser { path: path.to_owned(), fault };
    let user = QemuUser::parse(text).map_err(refused)?;
    match (user.user == own, own) {
        (true, _) => Ok(RunsAs::Daemon),
        (false, 0) => Ok(RunsAs::Other(user)),
        (false, _) => Err(refused(SocketFault::NotRoot(text.to_owned()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs_as_of(written: Option<&str>, own: u32) -> Result<RunsAs, String> {
        runs_as(Path::new("sterna.toml"), written, own).map_err(|error| error.to_string())
    }

    #[test]
    fn qemu_runs_as_whom_the_configuration_says_if_the_daemon_can_do_that() {
        let other = |text: &str, user, group, groups| {
            Ok(RunsAs::Other(QemuUser { text: text.to_owned(), user, group, groups }))
        };
        assert_eq!(runs_as_of(Some("2:3"), 0), other("2:3", 2, 3, Groups::OfName));
        assert_eq!(runs_as_of(Some("987654:3"), 0), other("987654:3", 987_654, 3, Groups::Cleared));
        assert_eq!(runs_as_of(Some("root"), 0), Ok(RunsAs::Daemon));
        assert_eq!(runs_as_of(Some("7"), 7), Ok(RunsAs::Daemon));
        assert_eq!(runs_as_of(None, 7), Ok(RunsAs::Daemon));
        for (written, own, expected) in [
            ("987654", 0, "write \"USER:GROUP\""),
            ("2:3", 7, "a daemon that is not root"),
            ("nobody-of-that-name", 0, "there is no user"),
            (":3", 0, "there is no user"),
        ] {
            let refused = runs_as_of(Some(written), own).unwrap_err();
            assert!(refused.contains("machines.user") && refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn a_command_is_run_with_the_groups_of_a_user_that_is_known() {
        let with = |text: &str| QemuUser::parse(text).unwrap().command(vec!["qemu".to_owned()]).join(" ");
        assert_eq!(with("2:3"), "setpriv --reuid=2 --regid=3 --init-groups --inh-caps=-all -- qemu");
        assert!(with("987654:3").contains(" --clear-groups "));
        let of_vm = QemuUser::parse("987654:3").unwrap().of_vm(7);
        assert_eq!(
            of_vm.command(vec!["qemu".to_owned()]).join(" "),
            "setpriv --reuid=7 --regid=7 --groups=3 --inh-caps=-all -- qemu"
        );
    }

    #[test]
    fn numbers_of_users_are_those_that_nobody_has() {
        assert_eq!(users(None), Ok(VmUsers::Each(NUMBERS_DEFAULT)));
        assert_eq!(users(Some("shared")), Ok(VmUsers::Shared));
        assert_eq!(users(Some("3000000000-3000000009")), Ok(VmUsers::Each(3_000_000_000..=3_000_000_009)));
        for refused in ["", "7", "0-9", "999-2000", "1000-4294967295", "9000-8000", "1000-70000", "a-b", "5-"]
        {
            assert!(users(Some(refused)).is_err(), "{refused}");
        }
    }
}
