//! Proves to two hosts that they mean one image, by small files beside it. All of this may sleep.
//!
//! ```text
//!   IMAGE.sterna-token-NAME     made by the target's host: a host that can read it may have the same folder
//!   IMAGE.sterna-answer-NAME    made by the source's host: once the target reads it back, both have the same folder
//! ```
//! A token also says which file the image is. A host that opens the image by its name compares the open file with it before it writes.
//! Names and contents are random. So no folder has them by accident, and no client of a network file system has cached that such
//! a file is absent.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};

/// The part between the name of an image and the rest of a token's name.
const TOKEN: &str = ".sterna-token-";
/// The part between the name of an image and the rest of an answer's name.
const ANSWER: &str = ".sterna-answer-";
/// Bytes of a secret in the name of its file; the others are in its content only.
const NAME_BYTES: usize = 8;
/// The mode of such a file, as of the image.
const MODE: u32 = 0o600;

/// Bytes of a token after its secret.
const WHICH_BYTES: usize = 20;

/// The identity of an image's file, as far as two hosts see the same of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WhichFile {
    inode: u64,
    /// When it was made: seconds since 1970 and nanoseconds. `None`: the file system does not say so.
    born: Option<(i64, u32)>,
}

impl WhichFile {
    fn of(file: impl AsFd) -> io::Result<Self> {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)?;
        let is_said = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
        let born = is_said.then_some((found.stx_btime.tv_sec, found.stx_btime.tv_nsec));
        Ok(Self { inode: found.stx_ino, born })
    }

    /// Returns whether both are the same file. A client of a network file system may not know when a file was made.
    fn is(self, other: Self) -> bool {
        let born_apart = self.born.zip(other.born).is_some_and(|(one, other)| one != other);
        self.inode == other.inode && !born_apart
    }

    fn bytes(self) -> [u8; WHICH_BYTES] {
        // No file is made in the nanosecond of this number.
        let (seconds, nanoseconds) = self.born.unwrap_or((0, u32::MAX));
        let mut bytes = [0; WHICH_BYTES];
        bytes[..8].copy_from_slice(&self.inode.to_le_bytes());
        bytes[8..16].copy_from_slice(&seconds.to_le_bytes());
        bytes[16..].copy_from_slice(&nanoseconds.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; WHICH_BYTES]) -> Self {
        let part = |from: usize| std::array::from_fn(|at| bytes[from + at]);
        let nanoseconds = u32::from_le_bytes(std::array::from_fn(|at| bytes[16 + at]));
        let born = (nanoseconds != u32::MAX).then(|| (i64::from_le_bytes(part(8)), nanoseconds));
        Self { inode: u64::from_le_bytes(part(0)), born }
    }
}

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
    /// Which file it is; `None`: the token is yet to be read.
    pub(super) which: Option<WhichFile>,
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
    /// Names an image that another host has put a token beside.
    pub fn named(path: PathBuf, token: Secret) -> Self {
        Self { path, token, which: None }
    }

    /// Durably puts a new token beside an open image, at the target.
    ///
    /// # Errors
    /// The system's error; [`remove`] removes a token that was made all the same.
    pub fn offer(path: &Path, image: impl AsFd) -> io::Result<Self> {
        let which = WhichFile::of(image)?;
        let shared = Self { path: path.to_owned(), token: Secret::new()?, which: Some(which) };
        put(&shared.beside(TOKEN, shared.token), &[&shared.token.0[..], &which.bytes()].concat())?;
        Ok(shared)
    }

    /// Returns the token that was put beside an image before a restart; `None` if there is none.
    pub fn find(path: &Path) -> io::Result<Option<Self>> {
        for found in beside(path, &[TOKEN])? {
            if let Ok((token, which)) = read_token(&found) {
                let shared = Self { path: path.to_owned(), token, which: Some(which) };
                if shared.beside(TOKEN, token) == found {
                    return Ok(Some(shared));
                }
            }
        }
        Ok(None)
    }

    /// Returns whether this host sees the token beside the image, at the source.
    pub fn is_there(&self) -> bool {
        self.read_which().is_some()
    }

    /// Returns whether an open file is the image that the token was put beside.
    ///
    /// **N.B.** Ask this before the first write to a file that was opened by the image's name, which may lead elsewhere since.
    pub(super) fn is_image(&self, file: impl AsFd) -> bool {
        let found = WhichFile::of(file);
        self.which.or_else(|| self.read_which()).zip(found.ok()).is_some_and(|(which, found)| which.is(found))
    }

    fn read_which(&self) -> Option<WhichFile> {
        let (token, which) = read_token(&self.beside(TOKEN, self.token)).ok()?;
        (token == self.token).then_some(which)
    }

    /// Puts an answer beside the image for the target's host, at the source.
    ///
    /// # Errors
    /// The system's error, for example that the folder is read-only here.
    pub fn answer(&self, answer: Secret) -> io::Result<()> {
        put(&self.beside(ANSWER, answer), &answer.0)
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

fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn is(path: &Path, secret: Secret) -> bool {
    read::<32>(path).is_ok_and(|found| found == secret.0)
}

fn read_token(path: &Path) -> io::Result<(Secret, WhichFile)> {
    let bytes = read::<{ 32 + WHICH_BYTES }>(path)?;
    let which = WhichFile::from_bytes(std::array::from_fn(|at| bytes[32 + at]));
    Ok((Secret(std::array::from_fn(|at| bytes[at])), which))
}

/// Reads a file of exactly this length. Opens it anew each time, because that makes a network file system ask its server.
fn read<const BYTES: usize>(path: &Path) -> io::Result<[u8; BYTES]> {
    let file = File::open(path)?;
    let mut content = [0; BYTES];
    file.read_exact_at(&mut content, 0)?;
    if file.metadata()?.len() != BYTES as u64 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_known_by_its_content_and_found_after_a_restart() {
        let (target, source) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = target.path().join("v.img");
        std::fs::write(&path, b"").unwrap();
        let offered = SharedImage::offer(&path, File::open(&path).unwrap()).unwrap();
        assert!(offered.is_there());
        assert_eq!(SharedImage::find(&offered.path).unwrap(), Some(offered.clone()));

        // Another folder that looks the same.
        let token = offered.beside(TOKEN, offered.token);
        let alike = source.path().join(token.file_name().unwrap());
        std::fs::write(&alike, [7; 32 + WHICH_BYTES]).unwrap();
        let elsewhere = SharedImage::named(source.path().join("v.img"), offered.token);
        assert!(!elsewhere.is_there(), "another content");
        std::fs::copy(&token, &alike).unwrap();
        assert!(elsewhere.is_there(), "a copy cannot be told from the file itself");
        let answer = Secret::new().unwrap();
        elsewhere.answer(answer).unwrap();
        assert!(elsewhere.is_answered(answer) && !offered.is_answered(answer), "but by the answer it can");

        offered.answer(answer).unwrap();
        remove(&offered.path).unwrap();
        assert!(!offered.is_there() && std::fs::read_dir(target.path()).unwrap().count() == 1);
    }

    #[test]
    fn a_token_says_which_file_the_image_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img");
        std::fs::write(&path, b"").unwrap();
        let image = File::open(&path).unwrap();
        let offered = SharedImage::offer(&path, &image).unwrap();
        let named = SharedImage::named(path.clone(), offered.token);
        assert!(offered.is_image(&image) && named.is_image(&image));
        std::fs::rename(&path, folder.path().join("away")).unwrap();
        std::fs::write(&path, b"another").unwrap();
        let another = File::open(&path).unwrap();
        assert!(!offered.is_image(&another) && offered.is_image(&image));
        assert!(!named.is_image(&another) && named.is_image(&image));

        let which = WhichFile { inode: 7, born: Some((8, 9)) };
        assert_eq!(WhichFile::from_bytes(which.bytes()), which);
        let unborn = WhichFile { born: None, ..which };
        assert_eq!(WhichFile::from_bytes(unborn.bytes()), unborn);
        assert!(which.is(unborn) && unborn.is(which));
        assert!(!which.is(WhichFile { born: Some((8, 10)), ..which }), "it has only the number");
        remove(&path).unwrap();
        assert!(!named.is_image(&image), "the migration is over");
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
