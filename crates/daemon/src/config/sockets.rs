//! Who may use a unix socket: its mode, and its owner.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use super::ConfigError;

/// The default mode of sockets, for the daemon's user alone: a volume is a disk, and the API moves disks.
const PRIVATE: u32 = 0o600;
/// The bits that a mode may have: a client needs write access, and sockets are not executed.
const MODE_BITS: u32 = 0o666;
/// The files that name users and groups.
const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// Who may use a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// The mode of the socket.
    pub mode: SocketMode,
    /// The owner of the socket; `None`: the daemon's user and group.
    pub owner: Option<SocketOwner>,
}

/// The mode of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

/// The user and the group that own a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOwner {
    /// The text in the configuration.
    text: String,
    /// The number of the user; `None`: the daemon's.
    pub user: Option<u32>,
    /// The number of the group; `None`: the daemon's.
    pub group: Option<u32>,
}

/// Why a mode or an owner is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SocketFault {
    /// The text is not a mode.
    #[error("\"{0}\" is no mode of a socket; write four octal digits of 0, 2, 4 and 6, for example \"0660\"")]
    Mode(String),
    /// The text is not an owner.
    #[error("\"{0}\" is no owner of a socket; write \"USER:GROUP\", \"USER\" or \":GROUP\"")]
    Owner(String),
    /// The system has no such user.
    #[error("there is no user \"{0}\"; see: getent passwd")]
    User(String),
    /// The system has no such group.
    #[error("there is no group \"{0}\"; see: getent group")]
    Group(String),
    /// QEMU's user has no group.
    #[error("\"{0}\" is the number of no user, so its group is unknown; write \"USER:GROUP\"")]
    NoGroup(String),
    /// The text is not a range of user IDs, or some of them are taken.
    #[error(
        "\"{0}\" is no range of unused user numbers; write \"FIRST-LAST\", such as \"2100000000-2100065535\", or \"shared\" for \
         one user for all VMs"
    )]
    Numbers(String),
    /// QEMU cannot run as another user.
    #[error(
        "a daemon that is not root cannot run QEMU as \"{0}\"; leave it out: QEMU runs as the daemon's user"
    )]
    NotRoot(String),
}

impl Default for SocketAccess {
    fn default() -> Self {
        Self { mode: SocketMode(PRIVATE), owner: None }
    }
}

impl SocketMode {
    /// Returns the bits of the mode.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Returns the mode with these bits, without those that no socket has.
    pub fn from_bits(bits: u32) -> Self {
        Self(bits & MODE_BITS)
    }

    /// Returns whether others than the owner may connect.
    pub fn is_shared(self) -> bool {
        self.0 & 0o077 != 0
    }
}

impl FromStr for SocketMode {
    type Err = SocketFault;

    fn from_str(text: &str) -> Result<Self, SocketFault> {
        let fault = || SocketFault::Mode(text.to_owned());
        let is_octal = (3..=4).contains(&text.len()) && text.bytes().all(|digit| digit.is_ascii_digit());
        let mode = u32::from_str_radix(text, 8).ok().filter(|_| is_octal).ok_or_else(fault)?;
        if mode & !MODE_BITS == 0 { Ok(Self(mode)) } else { Err(fault()) }
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl FromStr for SocketOwner {
    type Err = SocketFault;

    fn from_str(text: &str) -> Result<Self, SocketFault> {
        let (user, group) = text.split_once(':').unwrap_or((text, ""));
        if (user.is_empty() && group.is_empty()) || group.contains(':') {
            return Err(SocketFault::Owner(text.to_owned()));
        }
        let number = |name: &str, file, missing: fn(String) -> SocketFault| match name {
            "" => Ok(None),
            name => number_of(name, file).map(Some).ok_or_else(|| missing(name.to_owned())),
        };
        Ok(Self {
            user: number(user, USERS, SocketFault::User)?,
            group: number(group, GROUPS, SocketFault::Group)?,
            text: text.to_owned(),
        })
    }
}

impl fmt::Display for SocketOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Returns the number of a user or a group: the name itself, or the third field of its line in `file`.
fn number_of(name: &str, file: &str) -> Option<u32> {
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    let lines = std::fs::read_to_string(file).ok()?;
    let mut fields =
        lines.lines().map(|line| line.split(':')).find(|fields| fields.clone().next() == Some(name))?;
    fields.nth(2)?.parse().ok()
}

pub(super) fn group_of(user: u32) -> Option<u32> {
    let lines = std::fs::read_to_string(USERS).ok()?;
    let numbers = lines.lines().map(|line| {
        let mut fields = line.split(':').skip(2);
        (fields.next().and_then(|user| user.parse().ok()), fields.next())
    });
    numbers.filter(|(number, _)| *number == Some(user)).find_map(|(_, group)| group?.parse().ok())
}

pub(super) fn more_groups_of(user: u32) -> Vec<u32> {
    let (Ok(users), Ok(groups)) = (std::fs::read_to_string(USERS), std::fs::read_to_string(GROUPS)) else {
        return Vec::new();
    };
    let is_of = |line: &&str| line.split(':').nth(2).and_then(|number| number.parse().ok()) == Some(user);
    let Some(name) = users.lines().find(is_of).and_then(|line| line.split(':').next()) else {
        return Vec::new();
    };
    let with = groups.lines().filter(|line| {
        let members = line.split(':').nth(3).unwrap_or_default();
        members.split(',').any(|member| member == name)
    });
    with.filter_map(|line| line.split(':').nth(2)?.parse().ok()).collect()
}

/// Returns whether a user or a group has one of these numbers.
pub(super) fn is_taken(numbers: &RangeInclusive<u32>) -> bool {
    let lines = std::fs::read_to_string(USERS).unwrap_or_default();
    let mut taken = lines.lines().filter_map(|line| line.split(':').nth(2)?.parse().ok());
    taken.any(|number| numbers.contains(&number))
}

/// The settings of a socket in their TOML form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileSocket {
    mode: Option<String>,
    owner: Option<String>,
}

impl FileSocket {
    /// Checks the settings in the table `table` of the file at `path`.
    pub(super) fn check(&self, path: &Path, table: &'static str) -> Result<SocketAccess, ConfigError> {
        let refused = |fault| ConfigError::Socket { path: path.to_owned(), table, fault };
        let default = SocketAccess::default();
        Ok(SocketAccess {
            mode: self.mode.as_deref().map_or(Ok(default.mode), str::parse).map_err(refused)?,
            owner: self.owner.as_deref().map(str::parse).transpose().map_err(refused)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{SocketFault, SocketMode, SocketOwner};

    #[test]
    fn modes_are_octal_and_never_executable() {
        for (text, bits) in [("0660", 0o660), ("600", 0o600), ("0666", 0o666)] {
            assert_eq!(text.parse::<SocketMode>().unwrap().bits(), bits);
        }
        assert_eq!("660".parse::<SocketMode>().unwrap().to_string(), "0660");
        for text in ["", "0", "0770", "0o660", "+660", "06660", "rw-rw----", "0668"] {
            assert!(matches!(text.parse::<SocketMode>(), Err(SocketFault::Mode(_))), "{text}");
        }
    }

    #[test]
    fn owners_are_found_by_name_and_number() {
        let owner = |text: &str| text.parse::<SocketOwner>().map(|owner| (owner.user, owner.group));
        assert_eq!(owner("root:root"), Ok((Some(0), Some(0))));
        assert_eq!(owner("7"), Ok((Some(7), None)));
        assert_eq!(owner(":0"), Ok((None, Some(0))));
        assert_eq!(owner("nobody-of-that-name"), Err(SocketFault::User("nobody-of-that-name".into())));
        assert_eq!(owner("root:no-such-group"), Err(SocketFault::Group("no-such-group".into())));
        for text in ["", ":", "a:b:c"] {
            assert!(matches!(owner(text), Err(SocketFault::Owner(_))), "{text}");
        }
    }
}
