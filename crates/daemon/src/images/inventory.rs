//! Lists the images that migrations kept, with their volumes and times.
//!
//! ```text
//!   folders of stores    IMAGE.moved-mN ─┐
//!   journal: migrations  served in place ├──► Kept ──► listed, dropped
//!   journal: fences      devices, exports┘
//! ```
//! No list can contradict the stores: existing files are listed, and missing ones are not, even if they were deleted by hand.
//! The journal's knowledge of the migration is added. Everything here may block.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use migration::MigrationId;
use migration::custody::Purpose;
use migration::journal::{
    ImageFormat, ImageLocation, MigrationState, Outcome, Place, ReservedContent, Stage, State,
};

use crate::images;
use crate::migrations::registry::parse_id;
use crate::stores::{Store, StoreKind, Stores, image_name};

/// The part of a kept image's name between the image and the migration: see [`images::fenced_path`].
const MARK: &str = ".moved-";

/// An image that a migration left and that was kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) volume: String,
    pub(crate) migration: MigrationId,
    /// Its place; without a store it was served in place.
    pub(crate) image: ImageLocation,
    /// Where the volume went, in the form for users; `None`: forgotten.
    pub(crate) went_to: Option<String>,
    /// The volume's size in bytes; `None`: not known.
    pub(crate) size_bytes: Option<u64>,
    /// The allocated bytes of the file; `None`: it is a device or an export.
    pub(crate) allocated_bytes: Option<u64>,
    /// When the volume left it, in milliseconds since 1970; `None`: not known.
    pub(crate) kept_unix_ms: Option<u64>,
}

/// Parses the name of a kept image: its volume, its format as the journal has it, or else as the name does, and the migration.
pub(crate) fn known<'a>(name: &'a str, state: &State) -> Option<(&'a str, ImageFormat, MigrationId)> {
    let (volume, by_name, migration) = parse(name)?;
    let volumes = state.migrations.get(&migration).map_or(&[][..], |known| &known.volumes);
    let is_it = |source: &&ImageLocation| {
        let source = source.place.file().and_then(|path| Path::new(path).file_name()?.to_str());
        source.is_some_and(|source| name.starts_with(source))
    };
    let recorded = volumes.iter().map(|moving| &moving.source).find(is_it);
    Some((volume, recorded.map_or(by_name, |image| image.format), migration))
}

pub(crate) fn in_store(store: &Store, state: &State) -> io::Result<Vec<Kept>> {
    let StoreKind::Folder { folder, .. } = store.kind() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder.path())? {
        let path = entry?.path();
        let named = path.file_name().and_then(|name| name.to_str()).and_then(|name| known(name, state));
        let Some((volume, format, migration)) = named else { continue };
        let Some(text) = path.to_str() else { continue };
        let volume = left_by(state, &path, migration).unwrap_or(volume);
        let image =
            ImageLocation { store: store.name().to_owned(), place: Place::File(text.to_owned()), format };
        found.extend(look(&path, volume, migration, image, state)?);
    }
    Ok(found)
}

/// Returns the kept images outside of folders: images that were served in place, devices and exports.
pub(crate) fn elsewhere(stores: &Stores, state: &State) -> Vec<Kept> {
    let mut found = Vec::new();
    let folders: BTreeSet<&Path> = stores.iter().filter_map(folder_of).collect();
    let moved = state.migrations.iter().filter(|(_, known)| has_moved(known) && known.side.has_source());
    for (id, known) in moved {
        for (moving, name) in known.volumes.iter().zip(&known.names) {
            let Some(path) = moving.source.place.file().map(Path::new) else { continue };
            let kept = images::kept_path(state, path, *id);
            let Some(text) = kept.to_str() else { continue };
            let is_named = kept.file_name().and_then(|name| name.to_str()).and_then(parse).is_some();
            if is_named && path.parent().is_some_and(|parent| folders.contains(parent)) {
                // The search of that folder has found it.
                continue;
            }
            let image = ImageLocation { place: Place::File(text.to_owned()), ..moving.source.clone() };
            // An image that cannot be examined is of no use.
            found.extend(look(&kept, name, *id, image, state).ok().flatten());
        }
    }
    let fenced = state.reservations.iter().filter(|(_, fence)| fence.content == ReservedContent::Kept);
    found.extend(fenced.map(|(place, fence)| {
        let store = stores.of_place(place).unwrap_or_default().to_owned();
        let image = ImageLocation { store, place: place.clone(), format: ImageFormat::Raw };
        let mut kept = remembered(&fence.volume, fence.migration, image, state);
        kept.size_bytes = size_of(&fence.volume, state);
        kept
    }));
    found
}

/// Returns one file, if it exists.
fn look(
    path: &Path,
    volume: &str,
    migration: MigrationId,
    image: ImageLocation,
    state: &State,
) -> io::Result<Option<Kept>> {
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => metadata,
        // It may just have been deleted or reused.
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => return Ok(None),
    };
    let format = image.format;
    let mut kept = remembered(volume, migration, image, state);
    kept.size_bytes = match format {
        ImageFormat::Raw => Some(metadata.len()),
        ImageFormat::Qcow2 => size_of(volume, state),
    };
    // The unit of st_blocks is 512 bytes, whatever the file system's own is.
    kept.allocated_bytes = Some(metadata.blocks().saturating_mul(512));
    // Renaming was its last change.
    let changed_ms = u64::try_from(metadata.ctime()).ok().map(|seconds| seconds.saturating_mul(1000));
    kept.kept_unix_ms = kept.kept_unix_ms.or(changed_ms);
    Ok(Some(kept))
}

/// Returns the name of the volume that has left the image now at `kept`: the image may have been named after another one.
fn left_by<'a>(state: &'a State, kept: &Path, migration: MigrationId) -> Option<&'a str> {
    let known = state.migrations.get(&migration).filter(|known| known.side.has_source())?;
    let mut pairs = known.volumes.iter().zip(&known.names);
    let has_left = |source: &Path| images::kept_path(state, source, migration) == kept;
    let found =
        pairs.find(|(moving, _)| moving.source.place.file().is_some_and(|path| has_left(Path::new(path))));
    found.map(|(_, name)| name.as_str())
}

fn remembered(volume: &str, migration: MigrationId, mut image: ImageLocation, state: &State) -> Kept {
    // A new journal gives the same numbers to other migrations.
    let known = state.migrations.get(&migration);
    let known =
        known.filter(|known| known.side.has_source() && known.names.iter().any(|name| name == volume));
    let position = known.and_then(|known| known.names.iter().position(|name| name == volume));
    let target = known.zip(position).and_then(|(known, position)| known.volumes.get(position));
    let is_given =
        state.images.get(&image.place).is_some_and(|known| known.purpose == Purpose::Given(migration));
    if is_given || target.is_some_and(|moving| moving.source.is_adopted()) {
        // Even in the folder of a store it belongs to a user.
        image.store.clear();
    }
    Kept {
        volume: volume.to_owned(),
        migration,
        image,
        went_to: target.map(|moving| moving.target.store.clone()),
        size_bytes: None,
        allocated_bytes: None,
        kept_unix_ms: known.and_then(|known| known.ended_unix_ms),
    }
}

/// Returns the size of the volume with this name, wherever it is.
fn size_of(volume: &str, state: &State) -> Option<u64> {
    let here = state.volume_named(volume).map(|(_, known)| known.record.size_bytes);
    here.or_else(|| Some(state.moved_named(volume)?.1.volume.record.size_bytes))
}

fn has_moved(known: &MigrationState) -> bool {
    matches!(known.stage, Stage::Ended(Outcome::Moved { .. }))
}

fn folder_of(store: &Store) -> Option<&Path> {
    match store.kind() {
        StoreKind::Folder { folder, .. } => Some(folder.path()),
        StoreKind::Single(_) => None,
    }
}

/// Reads the name of a kept file, `web1.img.moved-m7` or `web1.img.moved-m7-2`.
pub(crate) fn parse(name: &str) -> Option<(&str, ImageFormat, MigrationId)> {
    let (image, migration) = name.rsplit_once(MARK)?;
    let (volume, format) = image_name(image)?;
    // Another name was taken where the first one was not free.
    let migration = match migration.split_once('-') {
        Some((first, number)) if is_number(number) => first,
        _ => migration,
    };
    Some((volume, format, parse_id(migration).ok()?))
}

fn is_number(text: &str) -> bool {
    let number = text.parse::<u32>().ok().filter(|number| (2..=images::FENCED_MAX).contains(number));
    number.is_some_and(|number| number.to_string() == text)
}

pub(crate) fn file_of(kept: &Kept) -> Option<PathBuf> {
    kept.image.place.file().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use migration::MigrationId;
    use migration::journal::{ImageFormat, State};

    use super::{Stores, elsewhere, in_store, parse};
    use crate::config::StoreConfig;

    #[test]
    fn only_names_that_migrations_give_are_those_of_kept_images() {
        assert_eq!(parse("web1.img.moved-m7"), Some(("web1", ImageFormat::Raw, MigrationId(7))));
        assert_eq!(parse("web1.img.moved-m7-2"), Some(("web1", ImageFormat::Raw, MigrationId(7))));
        assert_eq!(
            parse("a.moved-m1.qcow2.moved-m12"),
            Some(("a.moved-m1", ImageFormat::Qcow2, MigrationId(12)))
        );
        for other in [
            "web1.img",
            "web1.moved-m7",
            "web1.img.moved-7",
            "web1.img.moved-m07",
            "web1.img.moved-m7-1",
            "web1.img.moved-m7-02",
            "web1.img.moved-m7-",
            ".img.moved-m1",
            "moved-m1",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_file_is_listed_while_it_is_there_whether_or_not_the_journal_remembers_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("v.img.moved-m3");
        std::fs::write(&path, vec![7; 8192]).unwrap();
        std::fs::write(folder.path().join("v.img"), b"").unwrap();
        std::fs::create_dir(folder.path().join("w.img.moved-m4")).unwrap();
        let config = StoreConfig::Folder { path: folder.path().into(), format: None };
        let stores = Stores::new(&BTreeMap::from([("a".to_owned(), config)]));
        let (store, state) = (stores.get("a").unwrap(), State::default());
        let found = in_store(store, &state).unwrap();
        let [kept] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(
            (kept.volume.as_str(), kept.migration, kept.size_bytes),
            ("v", MigrationId(3), Some(8192))
        );
        assert_eq!((&kept.went_to, kept.allocated_bytes.is_some_and(|bytes| bytes > 0)), (&None, true));
        assert!(elsewhere(&stores, &state).is_empty());
        std::fs::remove_file(path).unwrap();
        assert!(in_store(store, &state).unwrap().is_empty());
    }
}
