//! A folder with the images of a standby at one cut, for somebody to carry to its host.
//!
//! ```text
//!   .NAME.partial/   the standby is kept there until it has everything ─► images, hashed ─► manifest ─► renamed to NAME
//!   NAME/            manifest.json   what the images are, with their hashes       VOLUME.img   sparse
//! ```
//! Everything is reached through descriptors. Everything here may block.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256, digest};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, RenameFlags, SeekFrom, fstat, fsync, mkdirat, openat,
    renameat_with, seek, statat, unlinkat,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "sterna standby export, version 1";
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// The length of a piece that is hashed, in bytes.
const PIECE_BYTES: u64 = 1 << 20;
const FOLDER: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Folders in folders: more than a standby has.
const DEPTH_MAX: u32 = 4;

/// What an exported folder has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) format: String,
    /// The identity of the standby, 32 hexadecimal digits.
    pub(crate) standby: String,
    /// Its name at the host that has exported it.
    pub(crate) name: String,
    /// The life and the epoch that the images are as of.
    pub(crate) life: String,
    pub(crate) epoch: u64,
    /// When that epoch was cut, in milliseconds since 1970.
    pub(crate) as_of_unix_ms: u64,
    pub(crate) volumes: Vec<ExportedVolume>,
}

/// An exported volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ExportedVolume {
    /// The identity of the volume, 32 hexadecimal digits.
    pub(crate) volume: String,
    pub(crate) name: String,
    /// The name of its image in the folder.
    pub(crate) file: String,
    pub(crate) size_bytes: u64,
    /// The hash of the image ([`hash`]), 64 hexadecimal digits.
    pub(crate) hash: String,
}

/// The file of a manifest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    /// The SHA-256 hash of the manifest as JSON without spaces.
    sha256: String,
}

impl Manifest {
    /// Returns one without volumes.
    pub(crate) fn new(standby: String, name: String, life: String, epoch: u64, as_of_unix_ms: u64) -> Self {
        Self { format: FORMAT.to_owned(), standby, name, life, epoch, as_of_unix_ms, volumes: Vec::new() }
    }

    fn encode(self) -> io::Result<Vec<u8>> {
        let sha256 = hex(digest(&SHA256, &serde_json::to_vec(&self)?).as_ref());
        Ok(serde_json::to_vec_pretty(&Sealed { manifest: self, sha256 })?)
    }

    fn decode(bytes: &[u8]) -> Result<Self, String> {
        let Sealed { manifest, sha256 } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let again = serde_json::to_vec(&manifest).map_err(|error| error.to_string())?;
        if manifest.format != FORMAT {
            return Err("it is of another version".to_owned());
        }
        if hex(digest(&SHA256, &again).as_ref()) != sha256 {
            return Err("it is damaged".to_owned());
        }
        Ok(manifest)
    }
}

/// An exported folder that is being read.
pub(crate) struct Export {
    folder: OwnedFd,
    pub(crate) manifest: Manifest,
}

impl Export {
    /// Opens an exported folder. The error says what is wrong with it.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        let folder = openat(CWD, path, FOLDER, Mode::empty());
        let folder =
            folder.map_err(|error| format!("{} is no folder that can be read: {error}", path.display()))?;
        let bytes = read(&folder).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("{} has no {MANIFEST}: it is no whole export", path.display()),
            _ => format!("{MANIFEST} of {} cannot be read: {error}", path.display()),
        })?;
        let manifest = Manifest::decode(&bytes)
            .map_err(|error| format!("{MANIFEST} of {} is none of an export: {error}", path.display()))?;
        Ok(Self { folder, manifest })
    }

    /// Returns a path by which a file is reached through the folder's descriptor, while this lives; `None`: it is no name of a file.
    pub(crate) fn path(&self, volume: &ExportedVolume) -> Option<PathBuf> {
        let name = volume.file.as_str();
        let is_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        is_name.then(|| through(&self.folder).join(name))
    }
}

fn read(folder: &OwnedFd) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(folder, MANIFEST, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no file"));
    }
    let mut bytes = Vec::new();
    File::from(file).take(MANIFEST_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MANIFEST_BYTES_MAX {
        true => Err(io::Error::other("it is too large")),
        false => Ok(bytes),
    }
}

/// An export that is being made. What is not finished is deleted.
pub(crate) struct Partial {
    parent: OwnedFd,
    /// The name that it gets.
    name: String,
    partial: String,
    folder: OwnedFd,
    is_finished: bool,
}

impl Partial {
    /// Makes the folder that becomes an export at `path`, where nothing may be. The error says what is in the way.
    pub(crate) fn make(path: &Path) -> Result<Self, String> {
        let name = path.file_name().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'));
        let (Some(parent), Some(name), true) = (path.parent(), name, path.is_absolute()) else {
            return Err(format!("{} is no absolute path of a new folder", path.display()));
        };
        let io = |error: Errno| format!("{} cannot be made: {error}", path.display());
        let parent_fd =
            openat(CWD, parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(io)?;
        if statat(&parent_fd, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Err(format!("{} is there already: name a folder that is not there", path.display()));
        }
        let partial = format!(".{name}.partial");
        match mkdirat(&parent_fd, partial.as_str(), Mode::RWXU) {
            Err(Errno::EXIST) => {
                let way = parent.join(&partial);
                return Err(format!(
                    "{} is in the way, which a killed export has left: delete it",
                    way.display()
                ));
            }
            made => made.map_err(io)?,
        }
        let folder = openat(&parent_fd, partial.as_str(), FOLDER, Mode::empty()).map_err(io)?;
        Ok(Self { parent: parent_fd, name: name.to_owned(), partial, folder, is_finished: false })
    }

    /// Returns a path by which the folder is reached through its descriptor, while this lives.
    pub(crate) fn path(&self) -> PathBuf {
        through(&self.folder)
    }

    /// Makes the images of the standby that was kept here an export. `go_on` gets the bytes that were hashed, and returns whether to go on.
    pub(crate) fn finish(
        mut self,
        images: &Path,
        mut manifest: Manifest,
        volumes: Vec<(String, String)>,
        go_on: &dyn Fn(u64) -> bool,
    ) -> io::Result<()> {
        let from = openat(CWD, images, FOLDER, Mode::empty())?;
        for (index, (volume, name)) in volumes.into_iter().enumerate() {
            let (image, file) = (super::files::image_name(index), format!("{name}.img"));
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = File::from(openat(&from, image.as_str(), flags, Mode::empty())?);
            let size_bytes = opened.metadata()?.len();
            let hash = hash(&opened, size_bytes, go_on)?;
            opened.sync_all()?;
            renameat_with(&from, image.as_str(), &self.folder, file.as_str(), RenameFlags::NOREPLACE)?;
            manifest.volumes.push(ExportedVolume { volume, name, file, size_bytes, hash });
        }
        drop(from);
        let kept: Vec<String> = manifest.volumes.iter().map(|volume| volume.file.clone()).collect();
        clear(&self.folder, &kept, DEPTH_MAX)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&self.folder, MANIFEST, flags, Mode::RUSR | Mode::WUSR)?);
        file.write_all(&manifest.encode()?)?;
        file.sync_all()?;
        fsync(&self.folder)?;
        renameat_with(
            &self.parent,
            self.partial.as_str(),
            &self.parent,
            self.name.as_str(),
            RenameFlags::NOREPLACE,
        )
        .map_err(|error| match error {
            Errno::EXIST => {
                io::Error::other("something else has got the name of the folder meanwhile: name another one")
            }
            other => other.into(),
        })?;
        self.is_finished = true;
        Ok(fsync(&self.parent)?)
    }

    fn delete(&self) -> io::Result<()> {
        clear(&self.folder, &[], DEPTH_MAX)?;
        // N.B. Another folder may have its name by now: one that has files stays.
        unlinkat(&self.parent, self.partial.as_str(), AtFlags::REMOVEDIR)?;
        Ok(fsync(&self.parent)?)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.is_finished
            && let Err(error) = self.delete()
        {
            tracing::warn!(folder = self.partial, %error, "a half-made export is left");
        }
    }
}

/// Deletes all that is in a folder, except files with these names.
fn clear(folder: &OwnedFd, kept: &[String], depth: u32) -> io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_owned();
        let text = name.to_string_lossy();
        if text == "." || text == ".." || kept.iter().any(|kept| *kept == text) {
            continue;
        }
        let is_folder = FileType::from_raw_mode(statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
            == FileType::Directory;
        if is_folder && depth > 0 {
            clear(&openat(folder, &name, FOLDER, Mode::empty())?, &[], depth - 1)?;
        }
        unlinkat(folder, &name, if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() })?;
    }
    Ok(())
}

/// Returns the hash of an image: of its length, and of the position and content of each mebibyte that is not all zeroes. Holes are not
/// read.
pub(crate) fn hash(image: &File, length: u64, go_on: &dyn Fn(u64) -> bool) -> io::Result<String> {
    let mut context = Context::new(&SHA256);
    context.update(&length.to_le_bytes());
    let mut piece = vec![0; PIECE_BYTES as usize];
    let mut from = 0;
    while from < length {
        if !go_on(from) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "it was cancelled"));
        }
        from = match seek(image, SeekFrom::Data(from)) {
            Ok(data) => data / PIECE_BYTES * PIECE_BYTES,
            Err(Errno::NXIO) => break,
            // A file system without holes.
            Err(_) => from,
        };
        let bytes = &mut piece[..(length.saturating_sub(from)).min(PIECE_BYTES) as usize];
        image.read_exact_at(bytes, from)?;
        if bytes.iter().any(|byte| *byte != 0) {
            context.update(&from.to_le_bytes());
            context.update(bytes);
        }
        from += PIECE_BYTES;
    }
    Ok(hex(context.finish().as_ref()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn through(folder: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let mut manifest = Manifest::new("1".repeat(32), "web1".to_owned(), "2".repeat(32), 7, 9);
        let file = "web1.img".to_owned();
        let (volume, hash) = ("3".repeat(32), "4".repeat(64));
        manifest.volumes.push(ExportedVolume {
            volume,
            name: "web1".to_owned(),
            file,
            size_bytes: 4096,
            hash,
        });
        manifest
    }

    #[test]
    fn a_manifest_of_which_a_letter_has_changed_is_none() {
        let bytes = manifest().encode().unwrap();
        assert_eq!(Manifest::decode(&bytes), Ok(manifest()));
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            // White space and the case of nothing may change.
            assert!(
                Manifest::decode(&changed).is_ok_and(|read| read == manifest())
                    || Manifest::decode(&changed).is_err()
            );
            assert!(Manifest::decode(&bytes[..index]).is_err());
        }
        let other = String::from_utf8(bytes).unwrap().replace("\"epoch\": 7", "\"epoch\": 8");
        assert_eq!(Manifest::decode(other.as_bytes()), Err("it is damaged".to_owned()));
    }

    #[test]
    fn holes_and_zeroes_are_the_same_and_moved_content_is_not() {
        let image = |blocks: &[(u64, u8)], length: u64| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(length).unwrap();
            blocks.iter().for_each(|(at, byte)| file.write_all_at(&[*byte; 4096], *at).unwrap());
            hash(&file, length, &|_| true).unwrap()
        };
        let length = 5 * PIECE_BYTES + 4096;
        let one = image(&[(3 * PIECE_BYTES, 9)], length);
        assert_eq!(one, image(&[(3 * PIECE_BYTES, 9), (0, 0), (length - 4096, 0)], length));
        assert_ne!(one, image(&[(2 * PIECE_BYTES, 9)], length));
        assert_ne!(one, image(&[(3 * PIECE_BYTES + 4096, 9)], length));
        assert_ne!(one, image(&[(3 * PIECE_BYTES, 9)], length - 4096));
        assert_ne!(one, image(&[(3 * PIECE_BYTES, 9), (length - 4096, 1)], length));
    }

    #[test]
    fn nothing_is_left_of_an_export_that_is_not_finished_and_nothing_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("carry");
        let partial = Partial::make(&path).unwrap();
        std::fs::create_dir_all(partial.path().join("a/b")).unwrap();
        std::fs::write(partial.path().join("a/b/image-0"), [1; 4096]).unwrap();
        assert!(Partial::make(&path).is_err_and(|error| error.contains("in the way")));
        drop(partial);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let partial = Partial::make(&path).unwrap();
        std::fs::create_dir_all(partial.path().join("a/b")).unwrap();
        std::fs::write(partial.path().join("a/b/image-0"), [1; 4096]).unwrap();
        let images = partial.path().join("a/b");
        let volumes = vec![("3".repeat(32), "web1".to_owned())];
        partial.finish(&images, Manifest { volumes: Vec::new(), ..manifest() }, volumes, &|_| true).unwrap();
        let export = Export::open(&path).unwrap();
        let volume = &export.manifest.volumes[0];
        let image = File::open(export.path(volume).unwrap()).unwrap();
        assert_eq!(hash(&image, 4096, &|_| true).unwrap(), volume.hash);
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 2);
        assert!(Partial::make(&path).is_err_and(|error| error.contains("already")));
        for name in ["../x", "", "a/b", ".x"] {
            assert!(export.path(&ExportedVolume { file: name.to_owned(), ..volume.clone() }).is_none());
        }
        std::fs::remove_file(path.join(MANIFEST)).unwrap();
        assert!(Export::open(&path).is_err_and(|error| error.contains("no whole export")));
        std::os::unix::fs::symlink("/etc/passwd", path.join(MANIFEST)).unwrap();
        assert!(Export::open(&path).is_err());
    }
}
