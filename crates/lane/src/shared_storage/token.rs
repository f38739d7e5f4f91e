//! Proves to two hosts that they mean one image, by small files beside it. All of this may sleep.
//!
//! ```text
//!   IMAGE.sterna-token-NAME     made by the target's host: a host that can read it may have the same folder
//!   IMAGE.sterna-answer-NAME    made by the source's host: once the target reads it back, both have the same folder
//! ```
//! Names and contents are random. So no folder has them by accident, and no client of a network file system has cached that such
//! a file is absent.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The part between the name of an image and the rest of a token's name.
const TOKEN: &str = ".sterna-token-";
/// The part between the name of an image and the rest of an answer's name.
const ANSWER: &str = ".sterna-answer-";
/// Bytes of a secret in the name of its file; the others are in its content only.
const NAME_BYTES: usize = 8;
/// The mode of such a file, as of the image.
const MODE: u32 = 0o600;

/// Random bytes that cannot be guessed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 32]);

/// An image that two hosts may be able to open, and its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedImage {
    /// The image's path on this host.
    pub path: PathBuf,
    /// The content of the token beside it.
    pub token: Secret,
}

impl Secret {
    /// Makes a new random secret.
    pub fn new() -> io::Result<Self> {
        let mut bytes = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }

    pub(super) fn name(self) -> String {
        self.0.iter().take(NAME_BYTES).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Enough to distinguish secrets.
        write!(f, "Secret({}…)", self.name())
    }
}

impl SharedImage {
    /// Durably puts a new token beside an image, at the target.
    ///
    /// # Errors
    /// The system's error; [`remove`] removes a token that was made all the same.
    pub fn offer(path: &Path) -> io::Result<Self> {
        let shared = Self { path: path.to_owned(), token: Secret::new()? };
        put(&shared.beside(TOKEN, shared.token), shared.token)?;
        Ok(shared)
    }

    /// Returns the token that was put beside an image before a restart; `None` if there is none.
    pub fn find(path: &Path) -> io::Result<Option<Self>> {
        for found in beside(path, &[TOKEN])? {
            if let Ok(token) = read(&found) {
                let shared = Self { path: path.to_owned(), token };
                if shared.beside(TOKEN, token) == found {
                    return Ok(Some(shared));
                }
            }
        }
        Ok(None)
    }

    /// Returns whether this host sees the token beside the image, at the source.
    pub fn is_there(&self) -> bool {
        is(&self.beside(TOKEN, self.token), self.token)
    }

    /// Puts an answer beside the image for the target's host, at the source.
    ///
    /// # Errors
    /// The system's error, for example that the folder is read-only here.
    pub fn answer(&self, answer: Secret) -> io::Result<()> {
        put(&self.beside(ANSWER, answer), answer)
    }

    /// Removes the answer beside the image.
    pub fn forget_answer(&self, answer: Secret) {
        let path = self.beside(ANSWER, answer);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %path.display(), %error, "an answer is left to the target's host");
        }
    }

    /// Returns whether the answer beside the image is this one, at the target.
    pub fn is_answered(&self, answer: Secret) -> bool {
        is(&self.beside(ANSWER, answer), answer)
    }

    fn beside(&self, kind: &str, secret: Secret) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(kind);
        name.push(secret.name());
        name.into()
    }
}

/// Removes token and answers beside an image.
///
/// **N.B.** Do this before the image is deleted, or belongs to a volume: its token identifies the image
/// of exactly this migration.
///
/// # Errors
/// The system's error; an image whose folder is gone is a success.
pub fn remove(image: &Path) -> io::Result<()> {
    for path in beside(image, &[TOKEN, ANSWER])? {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the name of the image that a file of this name belongs to; `None` if it is no such file.
pub fn image_of(name: &str) -> Option<&str> {
    [TOKEN, ANSWER].iter().find_map(|kind| {
        let (image, rest) = name.rsplit_once(kind)?;
        let is_ours = rest.len() == 2 * NAME_BYTES && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_ours.then_some(image)
    })
}

fn beside(image: &Path, kinds: &[&str]) -> io::Result<Vec<PathBuf>> {
    let (Some(folder), Some(name)) = (image.parent(), image.file_name().and_then(|name| name.to_str()))
    else {
        return Ok(Vec::new());
    };
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let is_beside = entry.file_name().to_str().is_some_and(|found| {
            image_of(found) == Some(name) && kinds.iter().any(|kind| found.contains(kind))
        });
        if is_beside {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn put(path: &Path, secret: Secret) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)?;
    file.write_all(&secret.0)?;
    file.sync_all()
}

fn is(path: &Path, secret: Secret) -> bool {
    read(path).is_ok_and(|found| found == secret)
}

/// Reads a file that holds exactly one secret. Opens it anew each time, because that makes a network file system ask its server.
fn read(path: &Path) -> io::Result<Secret> {
    let file = File::open(path)?;
    let mut secret = Secret([0; 32]);
    file.read_exact_at(&mut secret.0, 0)?;
    if file.metadata()?.len() != secret.0.len() as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_by_its_content_and_found_after_a_restart() {
        let (target, source) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let offered = SharedImage::offer(&target.path().join("v.img")).unwrap();
        assert!(offered.is_there());
        assert_eq!(SharedImage::find(&offered.path).unwrap(), Some(offered.clone()));

        // Another folder that looks the same.
        let token = offered.beside(TOKEN, offered.token);
        let alike = source.path().join(token.file_name().unwrap());
        std::fs::write(&alike, [7; 32]).unwrap();
        let elsewhere = SharedImage { path: source.path().join("v.img"), token: offered.token };
        assert!(!elsewhere.is_there(), "another content");
        std::fs::copy(&token, &alike).unwrap();
        assert!(elsewhere.is_there(), "a copy cannot be told from the file itself");
        let answer = Secret::new().unwrap();
        elsewhere.answer(answer).unwrap();
        assert!(elsewhere.is_answered(answer) && !offered.is_answered(answer), "but by the answer it can");

        offered.answer(answer).unwrap();
        remove(&offered.path).unwrap();
        assert!(!offered.is_there() && std::fs::read_dir(target.path()).unwrap().next().is_none());
    }

    #[test]
    fn files_are_known_by_their_names() {
        assert_eq!(image_of("v.img.sterna-token-0123456789abcdef"), Some("v.img"));
        assert_eq!(image_of("v.img.sterna-answer-0123456789abcdef"), Some("v.img"));
        for other in ["v.img", "v.img.sterna-token-", "v.img.sterna-token-xyz", "v.img.sterna-new"] {
            assert_eq!(image_of(other), None, "{other}");
        }
    }
}
