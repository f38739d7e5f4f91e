//! The expected content of a device: an array of bytes, and the open outcomes of writes.

use crate::device::{ByteRange, Extent, ExtentKind};
use crate::filter::check::assert_covers;

pub(super) struct Model {
    bytes: Vec<u8>,
}

impl Model {
    pub(super) fn new(size: u64) -> Self {
        Self { bytes: vec![0; size as usize] }
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        self.slice_mut(ByteRange::new(offset, data.len() as u64)).copy_from_slice(data);
    }

    pub(super) fn zero(&mut self, range: ByteRange) {
        self.slice_mut(range).fill(0);
    }

    pub(super) fn assert_same(&self, scene: &str, offset: u64, bytes: &[u8]) {
        let expected = self.slice(ByteRange::new(offset, bytes.len() as u64));
        if let Some(index) = (0..bytes.len()).find(|index| bytes[*index] != expected[*index]) {
            let (found, wanted) = (bytes[index], expected[index]);
            let place = offset + index as u64;
            panic!("{scene}: byte {place} is {found:#x} and should be {wanted:#x}");
        }
    }

    pub(super) fn assert_allocation(&self, scene: &str, range: ByteRange, extents: &[Extent]) {
        assert_covers(extents, range);
        for extent in extents.iter().filter(|extent| extent.kind != ExtentKind::Data) {
            let is_zero = self.slice(extent.range).iter().all(|byte| *byte == 0);
            assert!(is_zero, "{scene}: {extent:?} hides data");
        }
    }

    fn slice(&self, range: ByteRange) -> &[u8] {
        &self.bytes[range.offset as usize..range.end() as usize]
    }

    fn slice_mut(&mut self, range: ByteRange) -> &mut [u8] {
        &mut self.bytes[range.offset as usize..range.end() as usize]
    }
}
