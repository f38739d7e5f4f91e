//! What a former owner's images lack, before the first epoch of a standby whose direction was turned round.
//!
//! ```text
//!   written here since the promotion: the chronicles ──────────────────────────┐
//!   written there since its watermark: Ask::Lacking ─► Ask::Compare: the same? ─┴─► the first epoch
//! ```
//! That host's chronicle is coarse after it was killed. So blocks that only it may have written are compared by their hashes first.

use bytes::Bytes;
use chronicle::{BlockCount, BlockIndex, BlockRange, LayeredBitmap};
use lane::LaneHandle;
use standby::record::OwnerRecord;
use standby::reprotection::{needs_former, of_size, to_compare};

use super::naming::hashes_of;
use super::run::EXTENT_BLOCKS;
use super::{Source, Surroundings};
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::standbys::book::{Side, SourceConfig};
use crate::standbys::frames::{Answered, Ask, cleaned};
use crate::standbys::reprotecting::asked_return;

/// The most answers about one volume: more than the largest set has.
const ANSWERS_MAX: usize = 1000;

/// A standby whose direction was turned round, and of which no epoch is confirmed.
pub(super) struct Turned<'a> {
    source: &'a Source,
    with: &'a Surroundings,
}

/// Returns the turned direction of a source that needs to know what the former owner lacks, once that host is ready; `None`: it needs
/// nothing of it. An error says what is waited for.
pub(super) async fn turned<'a>(
    source: &'a Source,
    with: &'a Surroundings,
    config: &SourceConfig,
) -> Result<Option<Turned<'a>>, String> {
    if config.returns.is_none() {
        return Ok(None);
    }
    let (book, id) = (with.book.clone(), config.id.clone());
    let record: Option<OwnerRecord> = blocking(move || {
        let record = book.record(Side::Source, &id);
        record.map_err(|error| StandbyError::Unreadable(error.to_string()).into())
    })
    .await
    .map_err(|error: RequestError| error.message())?;
    let Some(record) = record.filter(needs_former) else { return Ok(None) };
    let turned = Turned { source, with };
    let Some(asked) = asked_return(config, Some(&record), &with.journal) else {
        return Err("one of its volumes is not at this host".to_owned());
    };
    match turned.ask(Ask::Return(asked), Bytes::new()).await? {
        Answered::Returning { is_ready: true, .. } => Ok(Some(turned)),
        Answered::Returning { problem: Some(problem), .. } => {
            Err(format!("the former owner cannot make its images the standby yet: {}", cleaned(&problem)))
        }
        _ => Err("the former owner keeps what only it has, and makes its images the standby".to_owned()),
    }
}

impl Turned<'_> {
    /// Adds to what each volume's copy lacks what the former owner may have written.
    pub(super) async fn add(
        &self,
        lanes: &[LaneHandle],
        lacks: &mut [Option<LayeredBitmap>],
    ) -> Result<(), String> {
        for ((lane, lacks), volume) in lanes.iter().zip(lacks).zip(0_u16..) {
            // Without a chronicle everything is sent anyway.
            let Some(ours) = lacks else { continue };
            let size = ours.blocks();
            match self.lacking(volume, size).await? {
                None => *ours = LayeredBitmap::full(size),
                Some(mut theirs) => {
                    let same = self.same(volume, lane, &to_compare(&theirs, ours)).await?;
                    theirs.subtract(&same);
                    ours.union_with(&theirs);
                }
            }
        }
        Ok(())
    }

    /// Returns what the former owner's image lacks of a volume; `None`: perhaps everything.
    async fn lacking(&self, volume: u16, size: BlockCount) -> Result<Option<LayeredBitmap>, String> {
        let (mut lacking, mut from) = (LayeredBitmap::new(BlockCount(u64::MAX >> 20)), 0);
        for _ in 0..ANSWERS_MAX {
            match self.ask(Ask::Lacking { volume, from }, Bytes::new()).await? {
                Answered::Lacking { runs: Some(runs), next } => {
                    for (start, count) in runs {
                        let run = BlockRange::new(start, start.saturating_add(count));
                        lacking.insert(run.intersect(&BlockRange::new(0, lacking.blocks().0)));
                    }
                    match next.filter(|next| *next > from) {
                        Some(next) => from = next,
                        None => return Ok(Some(of_size(&lacking, size))),
                    }
                }
                Answered::Lacking { runs: None, .. } => return Ok(None),
                _ => return Err("the former owner has answered another question".to_owned()),
            }
        }
        Ok(None)
    }

    /// Returns those of the blocks that the former owner's image has as they are here. A write of a guest meanwhile makes a block
    /// missing again: its lane shows that to the group.
    async fn same(
        &self,
        volume: u16,
        lane: &LaneHandle,
        compared: &LayeredBitmap,
    ) -> Result<LayeredBitmap, String> {
        let (mut same, mut from) = (LayeredBitmap::new(compared.blocks()), BlockIndex(0));
        while let Some(run) = compared.next_run(from, 4 * EXTENT_BLOCKS) {
            let buffer = lane.read_for_standby(run).await.map_err(|refused| refused.to_string())?;
            let ask = Ask::Compare { volume, first: run.start.0 };
            let Answered::Same(runs) = self.ask(ask, hashes_of(buffer.as_slice())).await? else {
                return Err("the former owner has answered another question".to_owned());
            };
            for (start, count) in runs {
                same.insert(BlockRange::new(start, start.saturating_add(count)).intersect(&run));
            }
            from = run.end;
        }
        Ok(same)
    }

    async fn ask(&self, ask: Ask, payload: Bytes) -> Result<Answered, String> {
        let asked = self.with.asker.ask(self.source.host(), self.source.standby(), ask, payload);
        asked.await.map_err(|error| error.message())
    }
}
