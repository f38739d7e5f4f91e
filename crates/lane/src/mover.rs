//! Copies one chunk from the source store to the target store, below all filters.

use block::{Buffer, ByteRange, Durability, IoError};
use futures_util::future::join_all;
use migration::strategy::{Copied, CopyFault, SourceFault, TargetFault};

use crate::copy::{VolumeCopy, target_fault};

/// Zeroes are looked for in pieces of this many bytes: what a thin target would allocate at a time at most.
const ZERO_GRAIN_BYTES: usize = 64 << 10;

/// Copies `range`; runs of zeroes become holes at the target, so thin stays thin (design §5.5), unless its space is to
/// stay allocated.
pub(crate) async fn copy_chunk(copy: &VolumeCopy, range: ByteRange) -> Result<Copied, CopyFault> {
    let Ok(length) = usize::try_from(range.length) else { return Err(CopyFault::Source(SourceFault)) };
    let buffer = copy.buffers().take(length);
    let data = copy.source().read(range.offset, buffer).await.map_err(|_| CopyFault::Source(SourceFault))?;
    let writes = runs(&data).into_iter().map(|run| write_run(copy, range.offset, &data, run));
    // N.B. all of them to their end, also when one has failed: the chunk is copied again then, and a write of the
    // first time that was still under way could land on top of that (hard case 4).
    let mut copied = Copied::default();
    for run in join_all(writes).await {
        let run = run.map_err(CopyFault::Target)?;
        copied.bytes_written += run.bytes_written;
        copied.bytes_zero += run.bytes_zero;
    }
    Ok(copied)
}

async fn write_run(copy: &VolumeCopy, offset: u64, data: &Buffer, run: Run) -> Result<Copied, TargetFault> {
    let range = ByteRange::new(offset + run.start as u64, run.length as u64);
    let fault = |error: IoError| target_fault(&error);
    match run.content {
        Content::Zero => {
            let zeroed = copy.target().write_zeroes(range, copy.zeroes(), Durability::Volatile);
            zeroed.await.map_err(fault)?;
            Ok(Copied { bytes_written: 0, bytes_zero: range.length })
        }
        Content::Data => {
            let data = data.slice(run.start, run.length);
            copy.target().write(range.offset, data, Durability::Volatile).await.map_err(fault)?;
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

/// Cuts a chunk into runs of zeroes and of data.
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
