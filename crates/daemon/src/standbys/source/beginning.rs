//! The beginning of a group: its lanes join, and its machine continues from the record and the chronicles.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chronicle::{BlockCount, LayeredBitmap, ReplicaOf};
use lane::capture::{BLOCK_BYTES, Group};
use lane::{CaptureOrder, LaneHandle};
use standby::owner::{Event, History, Replication, Settings};
use standby::record::OwnerRecord;
use standby::{LifeId, VolumeIndex};

use super::run::EXTENT_BLOCKS;
use super::{Source, Surroundings};
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::journal::now_unix_ms;
use crate::standbys::book::{Side, SourceConfig};
use crate::standbys::frames::Ask;
use crate::volumes::orders::create::{random_bytes, random_number};
use crate::volumes::registry::Service;

/// The number of blocks that the payloads of a group may occupy in memory: 64 MiB.
const RING_BLOCKS: u64 = 16 << 10;
/// The number of blocks that only the disk may have when an epoch is cut: 4 MiB, which are sent in a moment.
const CATCH_UP_BLOCKS: u64 = 1024;
/// How long it is waited for what the former host says, in milliseconds: it takes ten seconds at most (decision 0063).
const LEARN_MAX_MS: u64 = 15_000;
/// How long a write waits for a copy of the blocks that it overwrites (design §5.7).
const WAIT_MAX: Duration = Duration::from_secs(1);

/// Returns the lanes of all volumes, and their sizes in blocks; or what is waited for.
pub(super) fn lanes_of(
    config: &SourceConfig,
    with: &Surroundings,
) -> Result<(Vec<LaneHandle>, Vec<BlockCount>), String> {
    let (mut lanes, mut sizes) = (Vec::new(), Vec::new());
    for volume in &config.volumes {
        let name = &volume.name;
        let size = with.journal.read(|state| {
            let known =
                state.volumes.values().find(|known| known.record.volume.to_string() == volume.volume)?;
            Some(known.record.size_bytes)
        });
        let Some(size) = size else { return Err(format!("the volume \"{name}\" is not at this host")) };
        let identity = crate::standbys::promotion::identity(&volume.volume);
        if with.journal.read(|state| state.fillings.contains_key(&identity)) {
            return Err(format!("blocks of the volume \"{name}\" still follow from another host"));
        }
        match with.volumes.service(name) {
            Some(Service::Serving(lane)) => lanes.push(lane),
            _ => return Err(format!("the volume \"{name}\" is not served yet")),
        }
        sizes.push(BlockCount(size / BLOCK_BYTES));
    }
    Ok((lanes, sizes))
}

/// Tells the standby's host that the volumes have come here from another host, until it knows.
pub(super) async fn arrive(
    source: &Source,
    with: &Surroundings,
    config: &SourceConfig,
) -> Result<(), String> {
    if config.came_unix_ms.is_none() {
        return Ok(());
    }
    let asked = with.asker.ask(source.host(), source.standby(), Ask::Arrived, Bytes::new());
    asked.await.map(drop).map_err(|error| error.message())
}

/// Waits a while for what the former host says that the standby lacks. Later everything is sent.
pub(super) fn wait_to_learn(
    config: &SourceConfig,
    lacks: Vec<Option<LayeredBitmap>>,
) -> Result<Vec<Option<LayeredBitmap>>, String> {
    let is_recent = config.came_unix_ms.is_some_and(|came| now_unix_ms().saturating_sub(came) < LEARN_MAX_MS);
    match is_recent && lacks.iter().any(Option::is_none) {
        true => Err("the former host of the volumes says what the standby lacks".to_owned()),
        false => Ok(lacks),
    }
}

/// Lets all lanes join. Returns what their chronicles know the standby to lack.
pub(super) async fn join(
    group: &Arc<Group>,
    lanes: &[LaneHandle],
    of: ReplicaOf,
) -> Result<Vec<Option<LayeredBitmap>>, String> {
    let mut lacks = Vec::new();
    for (lane, volume) in lanes.iter().zip(0..) {
        let member = Some(group.member(VolumeIndex(volume)));
        lacks.push(lane.capture(CaptureOrder { member, of }).await.map_err(|refused| refused.to_string())?);
    }
    Ok(lacks)
}

/// Begins the machine from its record.
pub(super) async fn begin(
    source: &Arc<Source>,
    with: &Surroundings,
    config: &SourceConfig,
    group: &Arc<Group>,
    lacks: Vec<Option<LayeredBitmap>>,
) -> Result<(), String> {
    let (book, id) = (with.book.clone(), config.id.clone());
    let record: Option<OwnerRecord> = blocking(move || {
        let record = book.record(Side::Source, &id);
        record.map_err(|error| StandbyError::Unreadable(error.to_string()).into())
    })
    .await
    .map_err(|error: RequestError| error.message())?;
    let (standby, life) = (source.standby(), LifeId(u128::from_le_bytes(random_bytes())));
    let settings = settings(config);
    let is_paused = config.is_paused;
    let has_begun = group.begin(|seen| {
        // A volume may have grown while its lane joined.
        let sizes: Vec<BlockCount> = seen.iter().map(LayeredBitmap::blocks).collect();
        let sizes = &sizes;
        let known: Option<Vec<LayeredBitmap>> = lacks.into_iter().collect();
        let known = known.filter(|_| record.as_ref().is_some_and(|record| record.acknowledged.is_some()));
        match (record, known) {
            (None, _) => Replication::begin(settings, standby, life, sizes.to_vec()),
            (Some(record), None) => {
                Replication::restart(settings, record, History::Forgotten(life, sizes.to_vec()))
            }
            (Some(record), Some(mut lacks)) => {
                for ((lacks, seen), size) in lacks.iter_mut().zip(&seen).zip(sizes) {
                    lacks.grow(*size);
                    lacks.union_with(seen);
                }
                Replication::restart(settings, record, History::Since(lacks))
            }
        }
    });
    if !has_begun {
        return Err("a volume is leaving this host".to_owned());
    }
    if is_paused {
        group.handle(Event::Paused);
    }
    note_begun(source, with).await?;
    source.show(|shown| {
        shown.group = Some(Arc::clone(group));
        shown.waiting_since = None;
        shown.reason = None;
        shown.older_than = None;
    });
    Ok(())
}

/// Notes that the standby's host knows this one, and that the group has begun here.
async fn note_begun(source: &Source, with: &Surroundings) -> Result<(), String> {
    let config = source.config();
    if config.came_unix_ms.is_none() {
        return Ok(());
    }
    let config = SourceConfig { came_unix_ms: None, ..config };
    let (book, written) = (with.book.clone(), config.clone());
    let noted = blocking(move || {
        let noted = book.write_config(Side::Source, &written.id, &written);
        noted.map_err(|error| StandbyError::Record(error.to_string()).into())
    });
    noted.await.map_err(|error: RequestError| error.message())?;
    source.set(config);
    Ok(())
}

fn settings(config: &SourceConfig) -> Settings {
    let every = Duration::from_millis(config.every_ms.max(1));
    // Cuts of a host's standbys are spread over the interval.
    let first_cut = every.mul_f64((random_number() % 1000) as f64 / 1000.0);
    Settings {
        every,
        first_cut,
        rpo: Duration::from_millis(config.rpo_ms),
        wait_max: WAIT_MAX,
        ring_blocks: RING_BLOCKS,
        spool_blocks: 0,
        extent_blocks: EXTENT_BLOCKS,
        catch_up_blocks: CATCH_UP_BLOCKS,
    }
}
