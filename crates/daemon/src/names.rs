//! Names of volumes and stores: they become file names, export names and parts of paths.

/// The longest name. With every suffix it stays below the 255 bytes of a file name, and with a usual folder below the 107
/// bytes of a socket's path.
pub const NAME_BYTES_MAX: usize = 64;

/// Why a text cannot be a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    /// The text is empty.
    #[error("it is empty")]
    Empty,
    /// The text is too long.
    #[error("it is longer than {NAME_BYTES_MAX} characters")]
    TooLong,
    /// The text does not begin with a letter or digit.
    #[error("it must begin with a letter or a digit")]
    Start,
    /// The text contains something else than letters, digits, `.`, `_` and `-`.
    #[error("only letters a to z and A to Z, digits, '.', '_' and '-' are allowed")]
    Character,
}

/// Checks a name of a volume or a store.
///
/// # Errors
/// [`InvalidName`]: the text cannot be a name.
pub fn check(name: &str) -> Result<(), InvalidName> {
    let Some(first) = name.bytes().next() else { return Err(InvalidName::Empty) };
    if name.len() > NAME_BYTES_MAX {
        return Err(InvalidName::TooLong);
    }
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return Err(InvalidName::Character);
    }
    if first.is_ascii_alphanumeric() { Ok(()) } else { Err(InvalidName::Start) }
}

/// Checks a name of a snapshot, `NAME@LABEL`: no other volume has such a name.
///
/// # Errors
/// [`InvalidName`]: the text cannot be the name of a snapshot.
pub fn check_snapshot(name: &str) -> Result<(), InvalidName> {
    let (volume, label) = name.split_once('@').ok_or(InvalidName::Character)?;
    check(volume).and_then(|()| check(label))?;
    if name.len() > NAME_BYTES_MAX { Err(InvalidName::TooLong) } else { Ok(()) }
}

/// Returns the most characters of a label of a volume's snapshots.
pub fn label_bytes_max(volume: &str) -> usize {
    NAME_BYTES_MAX.saturating_sub(volume.len() + "@".len())
}

/// Returns whether a volume or a snapshot may have this name.
pub fn is_of_volume(name: &str) -> bool {
    check(name).is_ok() || check_snapshot(name).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{InvalidName, check, check_snapshot};

    #[test]
    fn snapshots_have_names_that_no_other_volume_has() {
        for name in ["web1@20261130T050102", "a@b", "a-1@b.2"] {
            assert_eq!(check_snapshot(name), Ok(()), "{name}");
            assert_eq!(check(name), Err(InvalidName::Character), "{name}");
        }
        for name in ["web1", "@b", "a@", "a@b@c", "a@/b", "../a@b", &format!("a@{}", "x".repeat(63))] {
            assert!(check_snapshot(name).is_err(), "{name}");
        }
    }

    #[test]
    fn names_that_stay_in_their_folder_are_allowed() {
        for name in ["a", "Disk-1_b.root", "0", &"x".repeat(64)] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn names_that_could_leave_their_folder_or_hide_are_refused() {
        assert_eq!(check(""), Err(InvalidName::Empty));
        assert_eq!(check(&"x".repeat(65)), Err(InvalidName::TooLong));
        for name in [".", "..", ".hidden", "-rf", "_a"] {
            assert_eq!(check(name), Err(InvalidName::Start), "{name}");
        }
        for name in ["a/b", "../a", "a b", "a\0b", "a\nb", "ä", "a%2Fb"] {
            assert_eq!(check(name), Err(InvalidName::Character), "{name}");
        }
    }
}
