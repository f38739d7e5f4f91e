//! Copies one chunk from the source store to the target store, below all filters: by a clone where the file system has that.
//!
//! ```text
//!   chunk ──► clone ──► done
//!               └─ refused ──► pieces, all at once: read ► runs of zeroes and data ► written
//! ```

use block::{BlockDevice, Buffer, ByteRange, Durability, IoError, ZeroMode};
use futures_util::future::join_all;
use migration::strategy::{Copied, CopyFault, SourceFault};

use crate::copy::{VolumeCopy, target_fault};

/// The grain of the search for zeroes, in bytes. Smaller ones would split chunks into more requests than their zeroes save.
/// Unallocated ranges of the source are in no chunk, whatever their length.
const ZERO_GRAIN_BYTES: usize = 64 << 10;

/// The most bytes that one read takes. Only a chunk that was to be cloned is larger.
const PIECE_BYTES: u64 = 512 << 10;

/// Copies `range`. Runs of zeroes become holes at the target, so thin images stay thin (design §5.5), unless space
/// is to stay allocated.
///
/// A clone needs no claims of its own: the core has claimed the chunk, as for a read. Writes to it that were submitted before have
/// ended, and the blocks of later ones are copied again.
pub(crate) async fn copy_chunk(copy: &VolumeCopy, range: ByteRange) -> Result<Copied, CopyFault> {
    if let Some(from) = copy.cloned_from() {
        match copy.target().clone_range(&from, range).await {
            Ok(()) => return Ok(Copied { bytes_cloned: range.length, ..Copied::default() }),
            // Whose fault it is, and whether there is one, the copy shows.
            Err(error) => copy.clone_refused(&error),
        }
    }
    let pieces = pieces(range).map(|piece| copy_piece(copy, piece));
    // N.B. all are awaited, as in `write_data`.
    let mut copied = Copied::default();
    for piece in join_all(pieces).await {
        copied = sum(copied, piece?);
    }
    Ok(copied)
}

fn pieces(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let starts = (range.offset..range.end()).step_by(PIECE_BYTES as usize);
    starts.map(move |start| ByteRange::new(start, PIECE_BYTES.min(range.end() - start)))
}

async fn copy_piece(copy: &VolumeCopy, range: ByteRange) -> Result<Copied, CopyFault> {
    let Ok(length) = usize::try_from(range.length) else { return Err(CopyFault::Source(SourceFault)) };
    let buffer = copy.buffers().take(length);
    let reading = copy.reads(range.length);
    let data = copy.source().read(range.offset, buffer).await.map_err(|_| CopyFault::Source(SourceFault))?;
    drop(reading);
    write_data(&**copy.target(), range.offset, data, copy.zeroes())
        .await
        .map_err(|error| CopyFault::Target(target_fault(&error)))
}

/// Writes data to a store. Runs of zeroes become holes there, unless space is to stay allocated.
pub(crate) async fn write_data(
    store: &dyn BlockDevice,
    offset: u64,
    data: Buffer,
    zeroes: ZeroMode,
) -> Result<Copied, IoError> {
    let writes = runs(&data).into_iter().map(|run| write_run(store, offset, &data, run, zeroes));
    // N.B. all writes are awaited, even after a failure: the chunk is copied again then, and an old write in flight could land on
    // top of that (hard case 4).
    let mut copied = Copied::default();
    for run in join_all(writes).await {
        copied = sum(copied, run?);
    }
    Ok(copied)
}

fn sum(one: Copied, other: Copied) -> Copied {
    Copied {
        bytes_written: one.bytes_written + other.bytes_written,
        bytes_zero: one.bytes_zero + other.bytes_zero,
        bytes_cloned: one.bytes_cloned + other.bytes_cloned,
    }
}

async fn write_run(
    store: &dyn BlockDevice,
    offset: u64,
    data: &Buffer,
    run: Run,
    zeroes: ZeroMode,
) -> Result<Copied, IoError> {
    let range = ByteRange::new(offset + run.start as u64, run.length as u64);
    match run.content {
        Content::Zero => {
            store.write_zeroes(range, zeroes, Durability::Volatile).await?;
            Ok(Copied { bytes_zero: range.length, ..Copied::default() })
        }
        Content::Data => {
            store.write(range.offset, data.slice(run.start, run.length), Durability::Volatile).await?;
            Ok(Copied { bytes_written: range.length, ..Copied::default() })
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    start: usize,
    length: usize,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    Data,
}

fn runs(data: &Buffer) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (index, grain) in data.as_slice().chunks(ZERO_GRAIN_BYTES).enumerate() {
        let content = if block::buffer::is_zero(grain) { Content::Zero } else { Content::Data };
        match runs.last_mut() {
            Some(run) if run.content == content => run.length += grain.len(),
            _ => runs.push(Run { start: index * ZERO_GRAIN_BYTES, length: grain.len(), content }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_that_was_to_be_cloned_is_copied_in_pieces_that_cover_it() {
        let cut = |offset, length| pieces(ByteRange::new(offset, length)).collect::<Vec<_>>();
        let whole = ByteRange::new(4096, 2 * PIECE_BYTES + 512);
        let expected = [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 512)];
        let expected = expected.map(|(offset, length)| ByteRange::new(4096 + offset, length));
        assert_eq!(cut(whole.offset, whole.length), expected);
        assert_eq!(cut(8192, 4096), [ByteRange::new(8192, 4096)]);
    }

    #[test]
    fn a_chunk_is_cut_where_zeroes_begin_and_end() {
        let mut bytes = vec![0; 5 * ZERO_GRAIN_BYTES + 4096];
        bytes[ZERO_GRAIN_BYTES + 7] = 1;
        bytes[2 * ZERO_GRAIN_BYTES] = 1;
        bytes[5 * ZERO_GRAIN_BYTES + 4095] = 1;
        let cut = runs(&Buffer::copy_of(&bytes));
        let cut: Vec<_> = cut.iter().map(|run| (run.start, run.length, run.content)).collect();
        let grain = ZERO_GRAIN_BYTES;
        assert_eq!(
            cut,
            [
                (0, grain, Content::Zero),
                (grain, 2 * grain, Content::Data),
                (3 * grain, 2 * grain, Content::Zero),
                (5 * grain, 4096, Content::Data),
            ]
        );
    }
}
