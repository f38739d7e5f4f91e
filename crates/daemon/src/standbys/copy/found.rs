//! What the source names, and an image has already: it is not sent.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use bytes::Bytes;
use chronicle::BlockRange;
use lane::capture::BLOCK_BYTES;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use standby::VolumeIndex;
use standby::receiver::Event;
use standby::record::{ImageState, StandbyRecord, Standing};
use standby::wire::{Content, StreamId, ToStandby};

use super::exported::Export;
use super::folder::Foreign;
use super::input::{Carried, Named};
use super::keeper::Keeper;
use crate::standbys::book::Side;
use crate::standbys::frames::Frame;

/// The most blocks of one question: 1 MiB of content.
const BLOCKS_MAX: u64 = 256;

impl Keeper {
    /// Hands to the machine, as extents, what the image has of the named contents, unless they are only compared. Answers with the rest.
    pub(super) fn take_named(&mut self, named: Named) {
        let Named { line, stream, number, volume, blocks, hashes, is_taken, credit } = named;
        // N.B. The blocks are what another host says.
        let is_known = self.open.as_ref().is_some_and(|open| volume.index() < open.sizes.len());
        let is_valid = is_known
            && blocks.start < blocks.end
            && blocks.len() <= BLOCKS_MAX
            && hashes.len() as u64 == blocks.len() * SHA256_OUTPUT_LEN as u64;
        let Some(open) = self.open.as_mut().filter(|open| open.machine.is_owners(stream)) else { return };
        let found = if is_valid {
            open.files.found(volume, blocks.start.0, &hashes, is_taken)
        } else {
            Ok(Vec::new())
        };
        let found = match found {
            Ok(found) => found,
            Err(error) => return self.fail(&error),
        };
        let mut wanted = Vec::new();
        let mut from = blocks.start.0;
        for (run, content) in found {
            wanted.extend((from < run.start.0).then_some((from, run.start.0 - from)));
            from = run.end.0;
            if is_taken {
                self.take_found(stream, volume, run, &content.into());
            }
        }
        wanted.extend((from < blocks.end.0).then(|| (from, blocks.end.0 - from)));
        line.send(&Frame::Wanted { stream, number, runs: wanted }, Bytes::new());
        drop(credit);
    }

    fn take_found(&mut self, stream: StreamId, volume: VolumeIndex, blocks: BlockRange, content: &Bytes) {
        let extent = ToStandby::Extent { volume, blocks, content: Content::Payload };
        let Some(open) = &mut self.open else { return };
        // An extent that is in its place needs no room.
        let is_in_place = open.machine.record().image == ImageState::Torn;
        if !is_in_place && let Err(error) = self.look_for_room(&extent) {
            return self.fail(&error);
        }
        self.open.iter_mut().for_each(|open| open.is_found = true);
        self.handle(Event::Received(stream, extent), content);
        self.open.iter_mut().for_each(|open| open.is_found = false);
    }

    /// Puts files in the places of the images of a standby that has never had anything.
    pub(super) fn seed(
        &mut self,
        files: &[(VolumeIndex, PathBuf)],
        exported: Option<Carried>,
    ) -> Result<(), String> {
        if self.open.is_none() {
            self.reopen();
        }
        let Some(open) = &mut self.open else { return Err(self.words()) };
        let record = open.machine.record();
        let is_new = record.standing == Standing::Receiving
            && record.watermark.is_none()
            && record.sealed.is_empty()
            && record.points.is_empty();
        if !is_new || self.lent_to.is_some() {
            let reason = "it has a recovery point already, or soon: what its images have is compared anyway";
            return Err(reason.to_owned());
        }
        let generation = record.generation;
        // A file that is refused changes nothing.
        let opened = files.iter().map(|(volume, path)| Ok((*volume, open.files.foreign(path)?)));
        let opened = opened.collect::<io::Result<Vec<_>>>().map_err(|error| error.to_string())?;
        let mut sizes = self.sizes();
        if let Some(Carried { export, .. }) = &exported {
            for (volume, file) in &opened {
                let size = self.check_exported(export, *volume, file)?;
                // A volume may have grown before it was exported.
                sizes.iter_mut().skip(volume.index()).take(1).for_each(|known| known.0 = known.0.max(size));
            }
        }
        let seeded = opened.iter().try_for_each(|(volume, file)| {
            let size = sizes.get(volume.index()).ok_or(io::ErrorKind::NotFound)?;
            self.open.as_ref().map_or(Ok(()), |open| open.files.replace_image(volume.index(), file, *size))
        });
        // N.B. Their locks end with the descriptors: the images are opened and locked anew.
        drop(opened);
        // The machine begins anew, and so does the stream: what was sent is compared again.
        self.open = None;
        let seeded = seeded.and_then(|()| match exported {
            Some(Carried { at: Some(at), export }) => {
                // N.B. Not before the images are in their places: a record alone is no copy.
                let record = StandbyRecord {
                    standby: at.standby,
                    generation,
                    standing: Standing::Receiving,
                    watermark: Some(at),
                    as_of_ms: export.manifest.as_of_unix_ms,
                    image: ImageState::AsOfWatermark,
                    sealed: Vec::new(),
                    points: Vec::new(),
                };
                self.book.write_record(Side::Copy, &self.config.id, &record)
            }
            _ => Ok(()),
        });
        self.reopen();
        if let Some(line) = &self.line {
            let text = "an image was put in its place there: what it has is not sent";
            line.send(&Frame::Fault(text.to_owned()), Bytes::new());
        }
        seeded.map_err(|error: io::Error| error.to_string())
    }
}

impl Keeper {
    /// Checks that a file is what was exported; returns its size in blocks.
    fn check_exported(&self, export: &Export, volume: VolumeIndex, file: &Foreign) -> Result<u64, String> {
        let named = self.config.volumes.get(volume.index()).map(|volume| &volume.name);
        let exported = export.manifest.volumes.iter().find(|exported| Some(&exported.name) == named);
        let exported = exported.ok_or("the export has no such volume")?;
        let hash = file.hash().map_err(|error| format!("{} cannot be read: {error}", exported.file))?;
        if hash != (exported.size_bytes, exported.hash.clone())
            || !exported.size_bytes.is_multiple_of(BLOCK_BYTES)
        {
            return Err(format!(
                "{} is not as it was exported: carry it here again, or put it into the store and name it without --exported: then every block \
                 is compared",
                exported.file
            ));
        }
        Ok(exported.size_bytes / BLOCK_BYTES)
    }
}

/// Returns the runs of blocks from `first` on whose contents have these SHA-256 hashes, with the contents. Blocks beyond the end of
/// the image are zeroes if they are only compared: the source has not announced the growth of the volume yet.
pub(super) fn found(
    image: &File,
    first: u64,
    hashes: &[u8],
    is_taken: bool,
) -> io::Result<Vec<(BlockRange, Vec<u8>)>> {
    let length = image.metadata()?.len();
    let mut runs: Vec<(BlockRange, Vec<u8>)> = Vec::new();
    for (hash, index) in hashes.chunks_exact(SHA256_OUTPUT_LEN).zip(0..) {
        // N.B. The first block is what another host says.
        let block = first.saturating_add(index);
        let Some(end) = block.checked_add(1).and_then(|end| end.checked_mul(BLOCK_BYTES)) else { break };
        let mut content = vec![0; BLOCK_BYTES as usize];
        match end <= length {
            true => image.read_exact_at(&mut content, end - BLOCK_BYTES)?,
            false if is_taken => break,
            false => {}
        }
        if digest(&SHA256, &content).as_ref() != hash {
            continue;
        }
        match runs.last_mut() {
            Some((run, bytes)) if run.end.0 == block => {
                run.end.0 += 1;
                bytes.extend(content);
            }
            _ => runs.push((BlockRange::new(block, block + 1), content)),
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(byte: u8) -> Vec<u8> {
        vec![byte; BLOCK_BYTES as usize]
    }

    #[test]
    fn what_the_image_has_is_found_with_its_content_and_nothing_else() {
        let image = tempfile::tempfile().unwrap();
        image.write_all_at(&[block(1), block(2), block(3), block(4)].concat(), 0).unwrap();
        let hashes = |bytes: &[u8]| -> Vec<u8> {
            bytes.iter().flat_map(|byte| digest(&SHA256, &block(*byte)).as_ref().to_vec()).collect()
        };
        let expected = [(BlockRange::new(1, 2), block(2)), (BlockRange::new(3, 4), block(4))];
        assert_eq!(found(&image, 1, &hashes(&[2, 9, 4, 0]), true).unwrap(), expected);
        let joined = [(BlockRange::new(0, 2), [block(1), block(2)].concat())];
        assert_eq!(found(&image, 0, &hashes(&[1, 2]), true).unwrap(), joined);
        assert_eq!(found(&image, u64::MAX - 1, &hashes(&[1, 1, 1]), true).unwrap(), []);
        let beyond = [(BlockRange::new(3, 5), [block(4), block(0)].concat())];
        assert_eq!(found(&image, 3, &hashes(&[4, 0, 1]), false).unwrap(), beyond);
    }
}
