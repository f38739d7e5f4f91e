//! Copies one chunk from the source store to the target store, below all filters.

use block::{BlockDevice, Buffer, ByteRange, Durability, IoError, ZeroMode};
use futures_util::future::join_all;
use migration::strategy::{Copied, CopyFault, SourceFault};

use crate::copy::{VolumeCopy, target_fault};

/// The grain of the search for zeroes, in bytes. Smaller ones would split chunks into more requests than their zeroes save.
/// Unallocated ranges of the source are in no chunk, whatever their length.
const ZERO_GRAIN_BYTES: usize = 64 << 10;

/// Copies `range`. Runs of zeroes become holes at the target, so thin images stay thin (design §5.5), unless space
/// is to stay allocated.
pub(crate) async fn copy_chunk(copy: &VolumeCopy, range: ByteRange) -> Result<Copied, CopyFault> {
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
        let run = run?;
        copied.bytes_written += run.bytes_written;
        copied.bytes_zero += run.bytes_zero;
    }
    Ok(copied)
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
            Ok(Copied { bytes_written: 0, bytes_zero: range.length })
        }
        Content::Data => {
            store.write(range.offset, data.slice(run.start, run.length), Durability::Volatile).await?;
            Ok(Copied { bytes_written: range.length, bytes_zero: 0 })
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
