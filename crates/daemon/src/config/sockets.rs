//! Who may use a unix socket: its mode, and its owner.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use super::ConfigError;

/// Mode of sockets that nothing is said about: the user that runs the daemon. A volume is a disk; the API moves disks.
const PRIVATE: u32 = 0o600;
/// Bits that a mode may have: whoever connects to a socket needs to write to it, and nobody executes one.
const MODE_BITS: u32 = 0o666;
/// Files that name users and groups.
const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// Who may use a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// Its mode.
    pub mode: SocketMode,
    /// Its owner; `None`: the daemon's user and group.
    pub owner: Option<SocketOwner>,
}

/// Mode of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(u32);

/// User and group that a socket belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOwner {
    /// As it was written.
    text: String,
    /// Number of the user; `None`: the daemon's.
    pub user: Option<u32>,
    /// Number of the group; `None`: the daemon's.
    pub group: Option<u32>,
}

/// Why a mode or an owner is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SocketFault {
    /// The mode is no mode.
    #[error("\"{0}\" is no mode of a socket; write four octal digits of 0, 2, 4 and 6, for example \"0660\"")]
    Mode(String),
    /// The owner is none.
    #[error("\"{0}\" is no owner of a socket; write \"USER:GROUP\", \"USER\" or \":GROUP\"")]
    Owner(String),
    /// There is no such user.
    #[error("there is no user \"{0}\"; see: getent passwd")]
    User(String),
    /// There is no such group.
    #[error("there is no group \"{0}\"; see: getent group")]
    Group(String),
    /// QEMU's user has no group.
    #[error("\"{0}\" is nobody's number, so nobody says its group; write \"USER:GROUP\"")]
    NoGroup(String),
    /// The numbers are none, or are taken.
    #[error(
        "\"{0}\" is no range of users' numbers that nobody has; write \"FIRST-LAST\", such as \"2100000000-2100065535\", or \
         \"shared\" for one user for all VMs"
    )]
    Numbers(String),
    /// QEMU cannot be run as somebody else.
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
    /// The bits.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// A mode of these bits; those that no socket has are left out.
    pub fn from_bits(bits: u32) -> Self {
        Self(bits & MODE_BITS)
    }

    /// Tells whether anybody but the owner may connect.
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

/// The number of a user or a group: itself, or that of its line in `file`, whose third field it is.
fn number_of(name: &str, file: &str) -> Option<u32> {
    if let Ok(number) = name.parse() {
        return Some(number);
    }
    let lines = std::fs::read_to_string(file).ok()?;
    let mut fields =
        lines.lines().map(|line| line.split(':')).find(|fields| fields.clone().next() == Some(name))?;
    fields.nth(2)?.parse().ok()
}

/// The group of a user, by its line in the list of users.
pub(super) fn group_of(user: u32) -> Option<u32> {
    let lines = std::fs::read_to_string(USERS).ok()?;
    let numbers = lines.lines().map(|line| {
        let mut fields = line.split(':').skip(2);
        (fields.next().and_then(|user| user.parse().ok()), fields.next())
    });
    numbers.filter(|(number, _)| *number == Some(user)).find_map(|(_, group)| group?.parse().ok())
}

/// The groups of a user besides its own, by the list of groups.
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

/// Whether somebody has one of these numbers.
pub(super) fn is_taken(numbers: &RangeInclusive<u32>) -> bool {
    let lines = std::fs::read_to_string(USERS).unwrap_or_default();
    let mut taken = lines.lines().filter_map(|line| line.split(':').nth(2)?.parse().ok());
    taken.any(|number| numbers.contains(&number))
}

/// Who may use a socket, as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileSocket {
    mode: Option<String>,
    owner: Option<String>,
}

impl FileSocket {
    /// Checks what is written in the table `table` of the file at `path`.
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
