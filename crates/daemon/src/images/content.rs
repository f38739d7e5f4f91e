//! Lists all files of a store with their roles: which volume or migration each belongs to, which are parts of a
//! disk, and which are unknown.
//!
//! ```text
//!   journal      volumes, migrations under way ─┐
//!   chains       backing files of images        ├──► role of each file ──► listed, imported, dropped
//!   names        IMAGE.moved-mN, …sterna-new    │
//!   half_made    half-made                     ─┘
//! ```
//! Changes and locks nothing. Opens only regular files, so a pipe does not block it. Everything here may block.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use api::{FileRole, StoreFile};
use block::held::ByName;
use block::store::qcow2::{Format, TopLayer, disk_size, probe_format};
use migration::journal::{ImageFormat, ImageLocation, State};

use crate::files::lock::is_lock_file;
use crate::images::half_made::{self, Marked, Marks};
use crate::images::{inventory, replicas};
use crate::migrations::view::api_format;
use crate::stores::{image_name, is_unsettled_name};

/// How many files of one folder are examined: more than any store has volumes.
const FILES_MAX: usize = 10_000;
const CHAINED_MAX: usize = 4 * FILES_MAX;

/// The known facts about a folder's files before any of them is examined.
pub(crate) struct Known {
    claims: BTreeMap<PathBuf, Claim>,
    /// Claims on images that are served in place, which may have other names, by device and inode.
    in_place: BTreeMap<(u64, u64), Claim>,
    /// The backing files of other images, each with one of those.
    backing: BTreeMap<PathBuf, PathBuf>,
    marks: Marks,
}

#[derive(Clone)]
struct Claim {
    role: FileRole,
    volume: Option<String>,
    migration: Option<String>,
    format: ImageFormat,
}

/// Returns all files of a folder by name, and how many were left out. Fails if the folder cannot be read.
pub(crate) fn of_folder(folder: &Path, data_dir: &Path, state: &State) -> io::Result<(Vec<StoreFile>, u64)> {
    let (mut paths, mut left_out) = (Vec::new(), 0);
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if is_of_ours(&path) {
            continue;
        }
        if paths.len() < FILES_MAX { paths.push(path) } else { left_out += 1 }
    }
    let known = Known::new(&paths, Marks::of_folder(folder)?, state);
    // A file that was just deleted is left out.
    let mut files: Vec<StoreFile> = paths.iter().filter_map(|path| known.look(path, data_dir)).collect();
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok((files, left_out))
}

/// Returns one file; `None`: it does not exist. Fails if the folder cannot be read.
pub(crate) fn of_file(path: &Path, data_dir: &Path, state: &State) -> io::Result<Option<StoreFile>> {
    if is_of_ours(path) {
        return Ok(None);
    }
    let Some(folder) = path.parent() else { return Ok(None) };
    // Any of them may have it as a backing file.
    let paths: io::Result<Vec<PathBuf>> =
        std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect();
    Ok(Known::new(&paths?, Marks::of_folder(folder)?, state).look(path, data_dir))
}

impl Known {
    fn new(paths: &[PathBuf], marks: Marks, state: &State) -> Self {
        let claims = claims(state);
        let mut known = Self { claims, in_place: BTreeMap::new(), backing: BTreeMap::new(), marks };
        for (path, claim) in &known.claims {
            let is_in_place = state.volumes.values().any(|volume| {
                let image = &volume.record.image;
                image.is_adopted() && image.place.file().map(Path::new) == Some(path)
            });
            if let (true, Ok(found)) = (is_in_place, std::fs::metadata(path)) {
                known.in_place.insert((found.dev(), found.ino()), claim.clone());
            }
        }
        let named = paths.iter().filter(|path| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(is_named_qcow2)
                && !known.claims.contains_key(*path)
        });
        // N.B. other files with a qcow2 header are ignored: a guest can have written that, with any name in it.
        let qcow2 = known.claims.iter().filter(|(_, claim)| claim.format == ImageFormat::Qcow2);
        let tops: Vec<PathBuf> = qcow2.map(|(path, _)| path).chain(named).cloned().collect();
        known.backing = chains(tops);
        known
    }

    /// Returns what the file at `path` is; `None`: it does not exist.
    fn look(&self, path: &Path, data_dir: &Path) -> Option<StoreFile> {
        let metadata = match std::fs::symlink_metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => return Some(unreadable(path, &error)),
        };
        let claim = self.claim_of(path, &metadata);
        // A volume's path may be a link to the file.
        let metadata = claim.and_then(|_| std::fs::metadata(path).ok()).unwrap_or(metadata);
        let mut file = plain(path, FileRole::Other, &metadata);
        match claim {
            Some(claim) => {
                file.role = claim.role;
                (file.volume, file.migration) = (claim.volume.clone(), claim.migration.clone());
                file.format = Some(api_format(claim.format));
                // The format is the journal's: a guest can have written any header.
                file.size_bytes = size_as(claim.format, path, &metadata);
            }
            None if !metadata.is_file() => file.note = Some(kind_of(&metadata).to_owned()),
            None => self.judge(&mut file, path, &metadata, data_dir),
        }
        Some(file)
    }

    /// Determines what an unclaimed file is.
    fn judge(&self, file: &mut StoreFile, path: &Path, metadata: &Metadata, data_dir: &Path) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            file.note = Some("its name is not UTF-8: rename it".to_owned());
            return;
        };
        if is_unsettled_name(name) {
            file.role = FileRole::Unsettled;
            return;
        }
        if let Some((volume, format, migration)) = inventory::parse(name) {
            let is_way_home = replicas::is_untouched(data_dir, path);
            file.role = if is_way_home { FileRole::Replica } else { FileRole::StaleReplica };
            (file.volume, file.migration) = (Some(volume.to_owned()), Some(migration.to_string()));
            file.format = Some(api_format(format));
            file.size_bytes = size_as(format, path, metadata);
            return;
        }
        if let Err(why) = describe(file, path) {
            file.note = Some(why);
        }
        let marked = self.marks.marked(path);
        if marked != Marked::No || name.contains(half_made::SUFFIX) {
            file.role = FileRole::HalfMade;
            match &marked {
                Marked::Other => {
                    file.note =
                        Some("another file had its name when that was marked as half-made".to_owned());
                }
                Marked::Renamed(from) => {
                    file.note = Some(format!("it was half-made as {}, and renamed since", from.display()));
                }
                Marked::No | Marked::Itself => {}
            }
            file.volume = image_name(name).map(|(volume, _)| volume.to_owned());
        } else if let Some(top) = self.backing.get(path) {
            file.role = FileRole::Backing;
            file.note = Some(format!("{} stands on it", top.display()));
        } else if file.format.is_some()
            && (is_image_name(name) || file.format == Some(api::ImageFormat::Qcow2))
        {
            file.role = FileRole::Unclaimed;
        }
    }

    fn claim_of(&self, path: &Path, metadata: &Metadata) -> Option<&Claim> {
        let spelled = || self.claims.get(&path.canonicalize().ok()?);
        let by_path = self.claims.get(path).or_else(|| metadata.is_file().then(spelled).flatten());
        by_path.or_else(|| self.in_place.get(&(metadata.dev(), metadata.ino())))
    }
}

/// Returns the files that the journal uses.
fn claims(state: &State) -> BTreeMap<PathBuf, Claim> {
    let mut claims = BTreeMap::new();
    let mut add = |image: &ImageLocation, role, volume: Option<&String>, migration: Option<String>| {
        let Some(path) = image.place.file().filter(|path| !path.is_empty()) else { return };
        let claim = Claim { role, volume: volume.cloned(), migration, format: image.format };
        claims.insert(PathBuf::from(path), claim);
    };
    for (id, known) in state.unfinished() {
        for (position, moving) in known.volumes.iter().enumerate() {
            let (name, migration) = (known.names.get(position), Some(id.to_string()));
            if known.side.has_source() {
                add(&moving.source, FileRole::Volume, name, migration.clone());
            }
            // The target of a volume that goes to another host is there.
            if known.side.has_target() {
                add(&moving.target, FileRole::Target, name, migration);
            }
        }
    }
    for record in state.claimed_records() {
        let moves = state
            .unfinished()
            .find(|(_, known)| known.volumes.iter().any(|moving| moving.volume == record.volume));
        add(&record.image, FileRole::Volume, Some(&record.name), moves.map(|(id, _)| id.to_string()));
    }
    claims
}

/// Returns the backing files of images, each with the image above it.
fn chains(mut tops: Vec<PathBuf>) -> BTreeMap<PathBuf, PathBuf> {
    let (mut backing, mut seen) = (BTreeMap::new(), BTreeSet::new());
    while let Some(top) = tops.pop() {
        if seen.len() >= CHAINED_MAX || !seen.insert(top.clone()) {
            continue;
        }
        // Opening a pipe would block.
        let is_file = std::fs::metadata(&top).is_ok_and(|found| found.is_file());
        let named =
            if is_file { TopLayer::of(&top, &ByName).ok().and_then(|layer| layer.backing) } else { None };
        if let Some(below) = named {
            let path = PathBuf::from(&below.path);
            backing.insert(path.clone(), top);
            if below.format == Format::Qcow2 {
                tops.push(path);
            }
        }
    }
    backing
}

/// Adds what the file's first bytes say; the error is for messages.
fn describe(file: &mut StoreFile, path: &Path) -> Result<(), String> {
    let unreadable = |error: block::store::ImageError| crate::error::with_causes(&error);
    file.format = match probe_format(path).map_err(unreadable)? {
        Format::Raw => Some(api::ImageFormat::Raw),
        Format::Qcow2 => Some(api::ImageFormat::Qcow2),
        Format::Other(name) => {
            return Err(format!("a {name} image, which cannot be served: qemu-img convert -O qcow2"));
        }
    };
    file.size_bytes = disk_size(path).map_err(unreadable)?;
    Ok(())
}

/// Returns the size of the disk in a file with this format.
fn size_as(format: ImageFormat, path: &Path, metadata: &Metadata) -> Option<u64> {
    match format {
        ImageFormat::Raw => Some(metadata.len()),
        ImageFormat::Qcow2 => disk_size(path).ok().flatten(),
    }
}

fn plain(path: &Path, role: FileRole, metadata: &Metadata) -> StoreFile {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let modified = u64::try_from(metadata.mtime()).ok();
    let milliseconds = u64::try_from(metadata.mtime_nsec() / 1_000_000).unwrap_or_default();
    StoreFile {
        name,
        role,
        volume: None,
        migration: None,
        format: None,
        size_bytes: None,
        // The unit of st_blocks is 512 bytes, whatever the file system's own is.
        allocated_bytes: metadata.is_file().then(|| metadata.blocks().saturating_mul(512)),
        modified_unix_ms: modified.map(|seconds| seconds.saturating_mul(1000).saturating_add(milliseconds)),
        note: None,
    }
}

fn unreadable(path: &Path, error: &io::Error) -> StoreFile {
    StoreFile {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        role: FileRole::Other,
        volume: None,
        migration: None,
        format: None,
        size_bytes: None,
        allocated_bytes: None,
        modified_unix_ms: None,
        note: Some(error.to_string()),
    }
}

fn kind_of(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    if kind.is_dir() {
        "a folder"
    } else if kind.is_symlink() {
        "a symbolic link; to serve its target: sterna volume add NAME --image PATH"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// Returns whether a file is not an image but a file that Sterna keeps beside images.
fn is_of_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| is_lock_file(name) || lane::shared_storage::image_of(name).is_some())
        || half_made::image_of(path).is_some()
}

fn is_image_name(name: &str) -> bool {
    image_name(name).is_some() || name.ends_with(".raw") || is_named_qcow2(name)
}

fn is_named_qcow2(name: &str) -> bool {
    name.ends_with(".qcow2") || name.ends_with(".qcow")
}

#[cfg(test)]
mod tests;
