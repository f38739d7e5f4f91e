//! Passes over a whole disk in order: the first filling, and the last comparison.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use testbed::nbd_client::{Client, Completion, Operation, WriteDurability};

use super::content::{Content, Findings};
use super::pattern::{digest_block, is_zero, read_stamp};

/// Bytes of a request: large enough to be fast, small enough for memory.
const REQUEST_BYTES: u64 = 1 << 20;
const IN_FLIGHT: usize = 4;

/// Writes every block of the first `bytes` bytes, in order, and flushes. `progress` gets the number of done bytes.
pub fn fill(
    client: &mut Client,
    content: &mut Content,
    bytes: u64,
    mut progress: impl FnMut(u64),
) -> anyhow::Result<()> {
    let request_blocks = request_blocks(client, content);
    let block_bytes = u64::from(content.block_bytes());
    let end = (bytes / block_bytes).min(content.blocks());
    let (mut next, mut done) = (0, 0);
    let mut completions = Vec::new();
    while done < end {
        while next < end && client.in_flight() < IN_FLIGHT {
            let blocks = next..(next + request_blocks).min(end);
            let mut data = vec![0; ((blocks.end - blocks.start) * block_bytes) as usize];
            for (bytes, block) in data.chunks_exact_mut(block_bytes as usize).zip(blocks.clone()) {
                content.next_stamp(block).fill(bytes);
            }
            let durability = WriteDurability::Volatile;
            client.submit(Operation::Write { offset: next * block_bytes, data, durability }, next)?;
            next = blocks.end;
        }
        client.complete(&mut completions)?;
        for Completion { operation, result, .. } in completions.drain(..) {
            result.context("fill the disk")?;
            if let Operation::Write { offset, data, .. } = operation {
                let blocks = content.blocks_of(offset, data.len() as u64);
                done += blocks.end - blocks.start;
                content.note_written(blocks);
            }
        }
        progress(done * block_bytes);
    }
    if client.export().flush {
        client.perform(Operation::Flush).context("flush the filled disk")?;
    }
    Ok(())
}

/// Reads the whole disk and compares it with the expected content. `progress` gets the number of done bytes. Fails if a read is
/// refused, or the sizes differ.
pub fn verify_export(
    client: &mut Client,
    content: &Content,
    mut progress: impl FnMut(u64),
) -> anyhow::Result<Findings> {
    let disk_bytes = content.disk_bytes();
    ensure!(
        client.export().size == disk_bytes,
        "the export has {} bytes instead of {disk_bytes}",
        client.export().size
    );
    let request_bytes = request_blocks(client, content) * u64::from(content.block_bytes());
    let (mut next, mut done) = (0, 0);
    let mut findings = Findings::default();
    let mut completions = Vec::new();
    while done < disk_bytes {
        while next < disk_bytes && client.in_flight() < IN_FLIGHT {
            let length = request_bytes.min(disk_bytes - next);
            client.submit(Operation::Read { offset: next, buffer: vec![0; length as usize] }, 0)?;
            next += length;
        }
        client.complete(&mut completions)?;
        for Completion { operation, result, .. } in completions.drain(..) {
            result.context("read the disk to verify it")?;
            if let Operation::Read { offset, buffer } = operation {
                content.check(offset, &buffer, &mut findings);
                done += buffer.len() as u64;
            }
        }
        progress(done);
    }
    Ok(findings)
}

/// Reads a raw image file, which must not change, and compares it with the expected content. The file may be longer than its
/// disk, because stores round up; the rest is ignored. Fails if it is shorter.
pub fn verify_file(
    path: &Path,
    content: &Content,
    mut progress: impl FnMut(u64),
) -> anyhow::Result<Findings> {
    let context = || format!("verify {}", path.display());
    let file = File::open(path).with_context(context)?;
    let length = file.metadata().with_context(context)?.len();
    let disk_bytes = content.disk_bytes();
    ensure!(length >= disk_bytes, "{} has {length} bytes, its disk has {disk_bytes}", path.display());
    let block_bytes = u64::from(content.block_bytes());
    let request_bytes = (REQUEST_BYTES / block_bytes).max(1) * block_bytes;
    let mut buffer = vec![0; request_bytes as usize];
    let mut findings = Findings::default();
    let mut offset = 0;
    while offset < disk_bytes {
        let part = &mut buffer[..request_bytes.min(disk_bytes - offset) as usize];
        file.read_exact_at(part, offset).with_context(context)?;
        content.check(offset, part, &mut findings);
        offset += part.len() as u64;
        progress(offset);
    }
    Ok(findings)
}

/// Reads a raw image file of another guest, by a digest of all versions ([`digest_block`]). Returns the errors in words.
///
/// Every block must be zero, or hold the content of a stamp with its own number and the right seed. All versions together must
/// have the digest. So no block can be wrong, old or misplaced.
pub fn verify_digest(
    path: &Path,
    blocks: u64,
    block_bytes: u32,
    seed: u64,
    digest: u64,
    mut progress: impl FnMut(u64),
) -> anyhow::Result<Vec<String>> {
    let context = || format!("verify {}", path.display());
    let file = File::open(path).with_context(context)?;
    let per_request = (REQUEST_BYTES / u64::from(block_bytes)).max(1);
    let mut buffer = vec![0; (per_request * u64::from(block_bytes)) as usize];
    let mut found_digest = 0;
    let mut wrong = Vec::new();
    let mut first = 0;
    while first < blocks {
        let count = per_request.min(blocks - first);
        let part = &mut buffer[..(count * u64::from(block_bytes)) as usize];
        file.read_exact_at(part, first * u64::from(block_bytes)).with_context(context)?;
        for (bytes, block) in part.chunks_exact(block_bytes as usize).zip(first..) {
            let version = match read_stamp(bytes) {
                Some(stamp) if (stamp.block, stamp.seed) == (block, seed) => stamp.version,
                None if is_zero(bytes) => 0,
                _ => {
                    wrong
                        .push(format!("block {block} of the image holds what its guest did not write there"));
                    continue;
                }
            };
            found_digest = digest_block(found_digest, block, version);
        }
        first += count;
        progress(first * u64::from(block_bytes));
    }
    if wrong.is_empty() && found_digest != digest {
        wrong.push("blocks of the image have other versions than the guest wrote last".to_owned());
    }
    Ok(wrong)
}

/// Returns the blocks per request: at most the server's limit, and at least one.
fn request_blocks(client: &Client, content: &Content) -> u64 {
    let bytes = REQUEST_BYTES.min(u64::from(client.export().payload_bytes_max));
    (bytes / u64::from(content.block_bytes())).max(1)
}
