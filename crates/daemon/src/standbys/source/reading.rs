//! Reads blocks of a volume, and cuts them into what can be sent.

use block::Buffer;
use bytes::Bytes;
use chronicle::BlockRange;
use lane::LaneHandle;
use lane::capture::BLOCK_BYTES;
use standby::wire::Content;

use super::naming::hashes_of;
use crate::error::RequestError;
use crate::host::blocking;

/// Successive blocks that were read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) blocks: BlockRange,
    pub(super) content: Content,
    /// The content of the blocks; empty if they read as zeroes.
    pub(super) bytes: Bytes,
    /// Empty if it is sent as it is.
    pub(super) hashes: Bytes,
}

/// Reads blocks, and has contents hashed if they are to be named.
pub(super) async fn read_runs(
    lane: &LaneHandle,
    blocks: BlockRange,
    is_named: bool,
) -> Result<Vec<Run>, String> {
    let buffer = lane.read_for_standby(blocks).await.map_err(|refused| refused.to_string())?;
    let runs = cut(&buffer, blocks);
    if !is_named {
        return Ok(runs);
    }
    let hashed = blocking(move || {
        Ok(runs.into_iter().map(|run| Run { hashes: hashes_of(&run.bytes), ..run }).collect())
    });
    hashed.await.map_err(|error: RequestError| error.message())
}

/// Reads blocks, and returns their hashes.
pub(super) async fn read_hashes(lane: &LaneHandle, blocks: BlockRange) -> Result<Bytes, String> {
    let buffer = lane.read_for_standby(blocks).await.map_err(|refused| refused.to_string())?;
    let hashed = blocking(move || Ok(hashes_of(buffer.as_slice())));
    hashed.await.map_err(|error: RequestError| error.message())
}

/// Cuts what was read into runs of zeroes and of data.
fn cut(buffer: &Buffer, blocks: BlockRange) -> Vec<Run> {
    let mut runs: Vec<(Content, BlockRange)> = Vec::new();
    for (bytes, block) in buffer.as_slice().chunks(BLOCK_BYTES as usize).zip(blocks.iter()) {
        let content = if block::buffer::is_zero(bytes) { Content::Zeroes } else { Content::Payload };
        match runs.last_mut() {
            Some((last, run)) if *last == content => run.end.0 = block.0 + 1,
            _ => runs.push((content, BlockRange::new(block.0, block.0 + 1))),
        }
    }
    let bytes = |run: &BlockRange| {
        let from = ((run.start.0 - blocks.start.0) * BLOCK_BYTES) as usize;
        Bytes::copy_from_slice(&buffer.as_slice()[from..from + (run.len() * BLOCK_BYTES) as usize])
    };
    let with_bytes = |(content, blocks)| {
        let bytes = match content {
            Content::Payload => bytes(&blocks),
            Content::Zeroes => Bytes::new(),
        };
        Run { blocks, content, bytes, hashes: Bytes::new() }
    };
    runs.into_iter().map(with_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_cut_where_zeroes_begin_and_end() {
        let mut bytes = vec![0; 4 * BLOCK_BYTES as usize];
        bytes[BLOCK_BYTES as usize] = 1;
        bytes[3 * BLOCK_BYTES as usize - 1] = 1;
        let cut = cut(&Buffer::copy_of(&bytes), BlockRange::new(10, 14));
        let shape: Vec<_> = cut.iter().map(|run| (run.content, run.blocks, run.bytes.len() as u64)).collect();
        let expected = [
            (Content::Zeroes, BlockRange::new(10, 11), 0),
            (Content::Payload, BlockRange::new(11, 13), 2 * BLOCK_BYTES),
            (Content::Zeroes, BlockRange::new(13, 14), 0),
        ];
        assert_eq!(shape, expected);
    }
}
