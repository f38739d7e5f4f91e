//! How two hosts find out that they mean one image: small files beside it. Everything here may sleep.
//!
//! ```text
//!   IMAGE.sterna-token-NAME     the target's host made it: whoever can read its content may have the same folder
//!   IMAGE.sterna-answer-NAME    the source's host made it: whoever reads that back there has the same folder
//! ```
//! Names and contents are random: no folder shows them by accident, and no host remembers from earlier that there is no
//! such file, as clients of network file systems do for a while.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// Between the name of an image and the rest of a token's.
const TOKEN: &str = ".sterna-token-";
/// Between the name of an image and the rest of an answer's.
const ANSWER: &str = ".sterna-answer-";
/// Bytes of a secret that are in the name of its file; the others are in its content only.
const NAME_BYTES: usize = 8;
/// Who may read such a file: whoever may read the image.
const MODE: u32 = 0o600;

/// Bytes that nobody guesses, and that come about once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 32]);

/// An image that two hosts may be able to open, and what the target's host has put beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedImage {
    /// Where this host has the image.
    pub path: PathBuf,
    /// What is in the token beside it.
    pub token: Secret,
}

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// What the system answers.
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
        // Enough to tell one from another.
        write!(f, "Secret({}…)", self.name())
    }
}

impl SharedImage {
    /// Puts a new token beside an image, durably: at the target.
    ///
    /// # Errors
    /// What the system answers; there may be a token then, which [`remove`] finds.
    pub fn offer(path: &Path) -> io::Result<Self> {
        let shared = Self { path: path.to_owned(), token: Secret::new()? };
        put(&shared.beside(TOKEN, shared.token), shared.token)?;
        Ok(shared)
    }

    /// The token that was put beside an image before a restart; `None`: there is none.
    ///
    /// # Errors
    /// What the system answers.
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

    /// Tells whether this host sees the token beside the image: at the source.
    pub fn is_there(&self) -> bool {
        is(&self.beside(TOKEN, self.token), self.token)
    }

    /// Puts an answer beside the image, for the target's host to read: at the source.
    ///
    /// # Errors
    /// What the system answers, for example that the folder can only be read here.
    pub fn answer(&self, answer: Secret) -> io::Result<()> {
        put(&self.beside(ANSWER, answer), answer)
    }

    /// Takes the answer away.
    pub fn forget_answer(&self, answer: Secret) {
        let path = self.beside(ANSWER, answer);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(path = %path.display(), %error, "an answer is left to the target's host");
        }
    }

    /// Tells whether the answer beside the image is this one: at the target.
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

/// Removes whatever was put beside an image.
///
/// **N.B.** Before the image itself goes, or is used as a volume's own: who finds its token has found the image of this very
/// migration.
///
/// # Errors
/// What the system answers; an image whose folder is gone is a success.
pub fn remove(image: &Path) -> io::Result<()> {
    for path in beside(image, &[TOKEN, ANSWER])? {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Name of the image that a file of this name was put beside; `None`: it is no such file.
pub fn image_of(name: &str) -> Option<&str> {
    [TOKEN, ANSWER].iter().find_map(|kind| {
        let (image, rest) = name.rsplit_once(kind)?;
        let is_ours = rest.len() == 2 * NAME_BYTES && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_ours.then_some(image)
    })
}

/// The files of these kinds that are beside an image.
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

/// Reads a file that has a secret and nothing else. It is opened anew each time: that is when a network file system asks
/// its server.
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

        // A folder that looks the same, and is another one.
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
