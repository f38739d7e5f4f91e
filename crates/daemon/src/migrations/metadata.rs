//! Metadata of migrations, beside the journal: the order, whether it waits for its turn, and notes.
//!
//! ```text
//!   ordered, no room ──► metadata without a beginning ──its turn──► journal: started ──► metadata with it
//!   ordered, room ────────────────────────────────────────────────► journal: started ──► metadata with it
//! ```
//! No decision about the owner of a volume depends on it, so it is not in the journal. It is in the data folder, one file for
//! each migration, which is replaced as a whole. Lost metadata costs a `migration retry`, or a place in the queue.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::MigrateVolume;
use migration::journal::State;
use migration::source::Costs;
use migration::stay::ImageRecord;
use migration::strategy::{Round, Tally};
use migration::{Carried, MigrationId, Progress};
use serde::{Deserialize, Serialize};

use crate::files::whole_file;
use crate::migrations::registry::parse_id;

const FOLDER: &str = "dockets";
/// The version of the files; other versions are ignored.
const VERSION: u32 = 1;
/// The longest file that is read: many times the usual length.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// How many begun migrations have metadata: as many as the journal keeps ended ones. The oldest are deleted.
const BEGUN_MAX: usize = 1000;

/// How many warnings are kept of one migration: each hook fails at most once.
const WARNINGS_MAX: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Metadata {
    /// The volume or the VM of the order.
    pub(crate) name: String,
    /// The identities of its volumes, each 32 hexadecimal digits.
    pub(crate) volumes: Vec<String>,
    /// The order; `None`: it was given at another host.
    pub(crate) order: Option<MigrateVolume>,
    pub(crate) ordered_unix_ms: u64,
    /// When it began, as in the journal; `None`: it waits for its turn.
    pub(crate) begun_unix_ms: Option<u64>,
    pub(crate) retry_of: Option<u64>,
    /// The latest migration that repeats it.
    pub(crate) retried_as: Option<u64>,
    /// The allocated bytes of the volumes, if the target began with an old image of them.
    pub(crate) held_bytes: Option<u64>,
    /// Failures that did not stop it.
    pub(crate) warnings: Vec<String>,
    /// Images at the other host that this host may be able to open itself.
    pub(crate) shared: Vec<SharedNote>,
    pub(crate) is_paused: bool,
    /// Whether an orderly stop of the daemon interrupted it, so that the next daemon repeats it.
    pub(crate) goes_on: bool,
    /// Whether its start is just being written to the journal. If the journal does not have it, this metadata is void.
    pub(crate) is_beginning: bool,
    /// The state of its copy, for a restart, if it is between stores of this host.
    pub(crate) copy: CopyNote,
    /// What was expected of it when it began.
    pub(crate) forecast: Option<api::Forecast>,
    /// Why the daemon chose the strategy in `order`; empty: the order named it.
    pub(crate) strategy_reason: String,
    /// What guests wrote just before it began, in bytes a second.
    pub(crate) load_bytes_per_second: f64,
}

/// The state of a copy in another store of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct CopyNote {
    /// The attributes of its image when the copy was begun or interrupted.
    pub(crate) image: Option<ImageRecord>,
    /// Bytes of blocks that became synchronised; a block counts each time.
    pub(crate) bytes_synchronised: u64,
    /// The completed part, in millionths.
    pub(crate) done_ppm: u64,
    pub(crate) bytes_copied: u64,
    pub(crate) bytes_mirrored: u64,
    pub(crate) bytes_zero: u64,
    pub(crate) bytes_cloned: u64,
    pub(crate) rounds: Vec<RoundNote>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RoundNote {
    pub(crate) blocks: u64,
    /// Bytes that were written for these blocks.
    pub(crate) bytes: u64,
    pub(crate) took_us: u64,
    /// Bytes that guests wrote meanwhile.
    pub(crate) dirtied: u64,
    pub(crate) put_off: u64,
}

/// An image at another host that this host may be able to open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SharedNote {
    /// The identity of its volume, 32 hexadecimal digits.
    pub(crate) volume: String,
    pub(crate) path: String,
    /// Whether blocks go straight to it; `None`: not known yet.
    pub(crate) is_used: Option<bool>,
}

#[derive(Serialize, Deserialize)]
struct Stored<D> {
    version: u32,
    #[serde(rename = "docket")]
    metadata: D,
}

#[derive(Debug)]
pub(crate) struct MetadataFolder {
    folder: PathBuf,
    known: Mutex<BTreeMap<MigrationId, Metadata>>,
    /// Held during a change, so that the file is as new as the memory.
    changing: tokio::sync::Mutex<()>,
}

impl Metadata {
    /// Sets the bandwidth limit, and returns the former one.
    pub(crate) fn limit(&mut self, bytes_per_second: Option<u64>) -> Option<u64> {
        // The limit is kept even if the order is lost.
        let order = self.order.get_or_insert_with(|| MigrateVolume::to(String::new()));
        std::mem::replace(&mut order.bandwidth_bytes_per_second, bytes_per_second)
    }

    /// Sets the impact on guests, and returns the former one.
    pub(crate) fn swap_impact(&mut self, percent: Option<u8>) -> Option<u8> {
        let order = self.order.get_or_insert_with(|| MigrateVolume::to(String::new()));
        std::mem::replace(&mut order.impact_percent, percent)
    }

    pub(crate) fn warn(&mut self, warning: String) {
        if self.warnings.len() < WARNINGS_MAX {
            self.warnings.push(warning);
        }
    }
}

/// The unit of [`CopyNote::done_ppm`].
const MILLION: f64 = 1e6;

impl CopyNote {
    pub(crate) fn count(&mut self, progress: &Progress) {
        self.bytes_synchronised = progress.bytes_synchronised;
        // Between 0 and a million.
        self.done_ppm = (progress.fraction.clamp(0.0, 1.0) * MILLION) as u64;
        self.bytes_copied = progress.bytes_copied;
        self.bytes_mirrored = progress.bytes_mirrored;
        self.bytes_zero = progress.bytes_zero;
        self.bytes_cloned = progress.bytes_cloned;
        let rounds = progress.rounds.iter().map(|(_, round)| RoundNote {
            blocks: round.blocks,
            bytes: round.bytes,
            took_us: u64::try_from(round.took.as_micros()).unwrap_or(u64::MAX),
            dirtied: round.dirtied,
            put_off: round.put_off,
        });
        self.rounds = rounds.collect();
    }

    /// Returns the figures to which a resumed copy adds.
    pub(crate) fn carried(&self) -> Carried {
        let rounds = self.rounds.iter().map(|round| Round {
            blocks: round.blocks,
            bytes: round.bytes,
            took: Duration::from_micros(round.took_us),
            dirtied: round.dirtied,
            put_off: round.put_off,
        });
        Carried {
            bytes_synchronised: self.bytes_synchronised,
            fraction: self.done_ppm as f64 / MILLION,
            costs: Costs {
                bytes_copied: self.bytes_copied,
                bytes_mirrored: self.bytes_mirrored,
                bytes_zero: self.bytes_zero,
                bytes_cloned: self.bytes_cloned,
                tally: Tally::default(),
            },
            rounds: rounds.collect(),
        }
    }
}

impl MetadataFolder {
    /// Reads the metadata of migrations that are in the journal or wait. Metadata that cannot be read counts as lost, and does
    /// not keep the daemon from starting.
    pub(crate) fn open(data_dir: &Path, state: &State) -> Self {
        let folder = data_dir.join(FOLDER);
        let found = read_all(&folder).unwrap_or_else(|error| {
            tracing::warn!(folder = %folder.display(), %error, "cannot read the order of a migration");
            BTreeMap::new()
        });
        let mut known = BTreeMap::new();
        for (id, mut metadata) in found {
            let begun = state.migrations.get(&id).map(|known| known.started_unix_ms);
            match (metadata.begun_unix_ms, begun) {
                // Its turn came, and then the daemon was killed.
                (None, Some(begun)) => (metadata.begun_unix_ms, metadata.is_beginning) = (Some(begun), false),
                // It never began, and its client was not told that it had.
                (None, None) if metadata.is_beginning => {
                    remove(&folder, id);
                    continue;
                }
                (None, None) => {}
                (Some(noted), Some(begun)) if noted == begun => {}
                // It belongs to a forgotten migration, or to another journal.
                _ => {
                    remove(&folder, id);
                    continue;
                }
            }
            known.insert(id, metadata);
        }
        Self { folder, known: Mutex::new(known), changing: tokio::sync::Mutex::default() }
    }

    pub(crate) fn of(&self, id: MigrationId, begun_unix_ms: u64) -> Option<Metadata> {
        let metadata = self.lock().get(&id).cloned();
        metadata.filter(|metadata| metadata.begun_unix_ms == Some(begun_unix_ms))
    }

    /// Returns the waiting migrations in the order of their places.
    pub(crate) fn waiting(&self) -> Vec<(MigrationId, Metadata)> {
        let known = self.lock();
        let waits = |metadata: &Metadata| metadata.begun_unix_ms.is_none() && !metadata.is_beginning;
        let waiting = known.iter().filter(|(_, metadata)| waits(metadata));
        waiting.map(|(id, metadata)| (*id, metadata.clone())).collect()
    }

    /// Makes durable that a migration waits for its turn. After an error it does not wait.
    pub(crate) async fn put(&self, id: MigrationId, metadata: Metadata) -> io::Result<()> {
        let _changing = self.changing.lock().await;
        self.write(id, metadata.clone()).await?;
        self.lock().insert(id, metadata);
        Ok(())
    }

    /// Makes the order of a migration durable that the journal is about to begin. A waiting migration has its order already.
    /// After an error nothing is kept.
    pub(crate) async fn announce(&self, id: MigrationId, order: &MigrateVolume) -> io::Result<()> {
        let waited =
            self.lock().get(&id).is_some_and(|known| known.begun_unix_ms.is_none() && !known.is_beginning);
        if waited {
            return Ok(());
        }
        let order = Some(order.clone());
        self.put(id, Metadata { order, is_beginning: true, ..Metadata::default() }).await
    }

    /// Changes the order of a migration that began at `begun_unix_ms`, durably. After an error nothing has changed.
    pub(crate) async fn order<T>(
        &self,
        id: MigrationId,
        begun_unix_ms: u64,
        change: impl FnOnce(&mut Metadata) -> T + Send,
    ) -> io::Result<T> {
        let _changing = self.changing.lock().await;
        let mut metadata = self.begun(id, begun_unix_ms);
        let changed = change(&mut metadata);
        self.write(id, metadata.clone()).await?;
        self.lock().insert(id, metadata);
        Ok(changed)
    }

    /// Returns the metadata of a migration that began at `begun_unix_ms`, new if there is none.
    fn begun(&self, id: MigrationId, begun_unix_ms: u64) -> Metadata {
        let known = self.lock().get(&id).cloned();
        let is_its = |metadata: &Metadata| metadata.begun_unix_ms.is_none_or(|begun| begun == begun_unix_ms);
        let metadata = known.filter(is_its).unwrap_or_default();
        Metadata { begun_unix_ms: Some(begun_unix_ms), is_beginning: false, ..metadata }
    }

    /// Changes the metadata of a migration that began at `begun_unix_ms`. If the file cannot be written, the change is
    /// kept until the daemon ends.
    pub(crate) async fn note(
        &self,
        id: MigrationId,
        begun_unix_ms: u64,
        change: impl FnOnce(&mut Metadata) + Send,
    ) {
        let _changing = self.changing.lock().await;
        let mut metadata = self.begun(id, begun_unix_ms);
        change(&mut metadata);
        self.lock().insert(id, metadata.clone());
        if let Err(error) = self.write(id, metadata).await {
            tracing::warn!(migration = %id, %error, "cannot store the data of a migration");
        }
        self.prune().await;
    }

    async fn write(&self, id: MigrationId, metadata: Metadata) -> io::Result<()> {
        let folder = self.folder.clone();
        let written = tokio::task::spawn_blocking(move || {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
            let stored = serde_json::to_vec_pretty(&Stored { version: VERSION, metadata })?;
            whole_file::replace(&path_of(&folder, id), &stored)
        });
        written.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    async fn prune(&self) {
        let forgotten: Vec<MigrationId> = {
            let mut known = self.lock();
            let begun = known.iter().filter(|(_, metadata)| metadata.begun_unix_ms.is_some());
            let begun: Vec<MigrationId> = begun.map(|(id, _)| *id).collect();
            let too_many = begun.len().saturating_sub(BEGUN_MAX);
            let oldest: Vec<_> = begun.into_iter().take(too_many).collect();
            oldest.iter().for_each(|id| drop(known.remove(id)));
            oldest
        };
        if forgotten.is_empty() {
            return;
        }
        let folder = self.folder.clone();
        let removed = tokio::task::spawn_blocking(move || {
            forgotten.into_iter().for_each(|id| remove(&folder, id));
        });
        // The next daemon deletes leftovers of migrations that the journal does not know.
        let _ = removed.await;
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<MigrationId, Metadata>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn path_of(folder: &Path, id: MigrationId) -> PathBuf {
    folder.join(format!("{id}.json"))
}

fn remove(folder: &Path, id: MigrationId) {
    if let Err(error) = std::fs::remove_file(path_of(folder, id))
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(migration = %id, %error, "the data of a migration is left over");
    }
}

fn read_all(folder: &Path) -> io::Result<BTreeMap<MigrationId, Metadata>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries?,
    };
    let mut found = BTreeMap::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json"));
        let Some(id) = name.and_then(|name| parse_id(name).ok()) else { continue };
        let metadata = whole_file::believe(&*path, FILE_BYTES_MAX).and_then(|bytes| {
            let stored: Stored<Metadata> = serde_json::from_slice(&bytes.unwrap_or_default())?;
            Ok((stored.version == VERSION).then_some(stored.metadata))
        });
        match metadata {
            Ok(metadata) => drop(metadata.map(|metadata| found.insert(id, metadata))),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot read the data of a migration");
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use api::MigrateVolume;
    use migration::MigrationId;
    use migration::journal::{MigratingVolume, Record, Side, State};
    use migration::stay::{Lives, Look, copy};
    use migration::strategy::Round;

    use super::{Metadata, MetadataFolder};

    const ID: MigrationId = MigrationId(3);

    /// Returns a state in which migration m3 began at a given time.
    fn begun_at(at_unix_ms: u64) -> State {
        let mut state = State::default();
        let volumes = Vec::<MigratingVolume>::new();
        let record =
            Record::MigrationStarted { migration: ID, volumes, keep_source: false, side: Side::OneHost };
        state.apply(&migration::journal::Entry { at_unix_ms, records: vec![record] }).unwrap();
        state
    }

    fn ordered() -> Metadata {
        let order = Some(MigrateVolume { bandwidth_bytes_per_second: Some(7), ..MigrateVolume::to("b") });
        Metadata { name: "v".to_owned(), order, ordered_unix_ms: 5, ..Metadata::default() }
    }

    #[tokio::test]
    async fn an_order_that_waits_is_there_again_after_a_restart_until_it_has_begun() {
        let folder = tempfile::tempdir().unwrap();
        let metadata_folder = MetadataFolder::open(folder.path(), &State::default());
        metadata_folder.put(ID, ordered()).await.unwrap();
        let again = MetadataFolder::open(folder.path(), &State::default());
        assert_eq!(again.waiting(), [(ID, ordered())]);
        assert_eq!(again.of(ID, 9), None);
        // Killed when the journal knew it already.
        let begun = MetadataFolder::open(folder.path(), &begun_at(9));
        assert!(begun.waiting().is_empty());
        assert_eq!(begun.of(ID, 9).unwrap().order, ordered().order);
    }

    #[tokio::test]
    async fn an_order_that_is_announced_is_that_of_a_migration_only_once_the_journal_has_begun_it() {
        let folder = tempfile::tempdir().unwrap();
        let metadata_folder = MetadataFolder::open(folder.path(), &State::default());
        let order = ordered().order.unwrap();
        metadata_folder.announce(ID, &order).await.unwrap();
        assert!(metadata_folder.waiting().is_empty());
        // Killed after the beginning.
        let begun = MetadataFolder::open(folder.path(), &begun_at(9));
        assert_eq!(begun.of(ID, 9).unwrap().order, Some(order.clone()));
        // Killed before it: its client got no answer.
        let never = MetadataFolder::open(folder.path(), &State::default());
        assert!(never.waiting().is_empty() && !folder.path().join("dockets/m3.json").exists());
        // A waiting migration keeps its metadata.
        metadata_folder.put(ID, ordered()).await.unwrap();
        metadata_folder.announce(ID, &order).await.unwrap();
        assert_eq!(metadata_folder.waiting(), [(ID, ordered())]);
    }

    #[tokio::test]
    async fn notes_outlast_the_daemon_and_belong_to_one_migration() {
        let folder = tempfile::tempdir().unwrap();
        let metadata_folder = MetadataFolder::open(folder.path(), &State::default());
        metadata_folder.put(ID, ordered()).await.unwrap();
        metadata_folder.note(ID, 9, |metadata| metadata.warn("late".to_owned())).await;
        let again = MetadataFolder::open(folder.path(), &begun_at(9));
        let noted = again.of(ID, 9).unwrap();
        assert_eq!((noted.name.as_str(), noted.warnings.as_slice()), ("v", ["late".to_owned()].as_slice()));
        // A new journal gives its number to another migration.
        assert_eq!(again.of(ID, 10), None);
        again.note(ID, 10, |metadata| metadata.retry_of = Some(1)).await;
        assert_eq!(again.of(ID, 10).unwrap().order, None);
        let other = MetadataFolder::open(folder.path(), &begun_at(11));
        assert_eq!(other.of(ID, 11), None);
        assert!(!folder.path().join("dockets/m3.json").exists());
    }

    #[tokio::test]
    async fn an_order_that_cannot_be_written_is_not_answered_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let metadata_folder = MetadataFolder::open(folder.path(), &State::default());
        metadata_folder.put(ID, ordered()).await.unwrap();
        let limited = metadata_folder.order(ID, 9, |metadata| metadata.limit(Some(5))).await.unwrap();
        assert_eq!(limited, Some(7));
        metadata_folder.order(ID, 9, |metadata| metadata.is_paused = true).await.unwrap();
        let again = MetadataFolder::open(folder.path(), &begun_at(9)).of(ID, 9).unwrap();
        let limit = |metadata: &Metadata| metadata.order.clone().unwrap().bandwidth_bytes_per_second;
        assert_eq!((again.is_paused, limit(&again)), (true, Some(5)));
        // A file has the folder's name.
        std::fs::remove_dir_all(folder.path().join("dockets")).unwrap();
        std::fs::write(folder.path().join("dockets"), b"").unwrap();
        metadata_folder.order(ID, 9, |metadata| metadata.is_paused = false).await.unwrap_err();
        assert!(metadata_folder.of(ID, 9).unwrap().is_paused);
    }

    #[tokio::test]
    async fn what_is_noted_of_a_copy_is_carried_on_by_the_next_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let look = Look {
            which: vec![1, 2],
            state: vec![3],
            changed_at: 1_700_000_000_123_456_789,
            touched_at: Some(4),
        };
        let lives = Lives::begin(&[], 5);
        let round = Round { blocks: 5, took: std::time::Duration::from_millis(7), ..Round::default() };
        let mut noted = super::CopyNote {
            image: copy::left(Some(copy::in_use(look.clone(), lives.run())), Some(look), &lives),
            ..super::CopyNote::default()
        };
        (noted.bytes_copied, noted.done_ppm, noted.bytes_synchronised) = (9 << 20, 500_000, 8 << 20);
        noted.rounds = vec![super::RoundNote { blocks: 5, took_us: 7000, ..super::RoundNote::default() }];
        let metadata_folder = MetadataFolder::open(folder.path(), &begun_at(9));
        metadata_folder.note(ID, 9, |metadata| metadata.copy = noted.clone()).await;
        let again = MetadataFolder::open(folder.path(), &begun_at(9)).of(ID, 9).unwrap().copy;
        assert_eq!(again, noted);
        let carried = again.carried();
        assert_eq!((carried.costs.bytes_copied, carried.bytes_synchronised), (9 << 20, 8 << 20));
        assert_eq!((carried.fraction, carried.rounds), (0.5, vec![round]));
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_as_good_as_lost() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("dockets")).unwrap();
        for (name, text) in [
            ("m1.json", "{"),
            ("m2.json", r#"{"version":9,"docket":{}}"#),
            ("other.json", "{}"),
            ("m3.json", r#"{"version":1,"docket":{"name":"v","of_a_newer_daemon":1}}"#),
        ] {
            std::fs::write(folder.path().join("dockets").join(name), text).unwrap();
        }
        let waiting = MetadataFolder::open(folder.path(), &State::default()).waiting();
        assert_eq!(waiting.into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [ID]);
    }
}
