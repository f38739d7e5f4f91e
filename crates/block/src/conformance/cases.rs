//! The cases of the suite, each on a device of its own.

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Waker};

use futures_util::future::join_all;

use super::model::Model;
use crate::buffer::Buffer;
use crate::device::{ALIGNMENT, BlockDevice, ByteRange, Durability, ZeroMode};
use crate::error::IoError;
use crate::executor::Handle;
use crate::random::Random;

/// Granularity by which overlapping writes may mix, in bytes: a sector, which no disk tears.
const SECTOR: usize = 512;

const DROPPED: u64 = 20;

pub(super) struct Subject {
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) scene: String,
    pub(super) handle: Handle,
}

impl Subject {
    pub(super) fn geometry(&self) {
        let geometry = self.device.geometry();
        assert!(geometry.alignment.is_power_of_two(), "{}: {geometry:?}", self.scene);
        assert_eq!(self.device.geometry(), geometry, "{}: it changes", self.scene);
    }

    pub(super) async fn reads_as_zeroes(&self) {
        let model = Model::new(self.size());
        self.assert_is(&model).await;
        self.device.flush().await.unwrap_or_else(|error| panic!("{}: flush: {error}", self.scene));
    }

    pub(super) async fn boundaries(&self) {
        let (size, step) = (self.size(), self.step());
        let mut model = Model::new(size);
        let last = size - (size - 1) % step - 1;
        for (fill, range) in (1..).zip([
            ByteRange::new(0, step.min(size)),
            ByteRange::new(last, size - last),
            ByteRange::new(0, size),
            ByteRange::new(last, size - last),
            ByteRange::new(0, step.min(size)),
        ]) {
            let data = vec![fill; range.length as usize];
            self.write(&mut model, range.offset, &data, Durability::Durable).await;
            self.assert_reads(&model, range).await;
        }
        self.assert_is(&model).await;
    }

    pub(super) async fn empty_requests(&self) {
        for offset in [0, self.size() - self.size() % self.step()] {
            let (device, none) = (&self.device, ByteRange::new(offset, 0));
            let read = device.read(offset, Buffer::zeroed(0)).await;
            assert!(read.is_ok_and(|buffer| buffer.is_empty()), "{}: read at {offset}", self.scene);
            let written = [
                device.write(offset, Buffer::zeroed(0), Durability::Durable).await,
                device.discard(none).await,
                device.write_zeroes(none, ZeroMode::KeepAllocated, Durability::Durable).await,
                device.write_zeroes(none, ZeroMode::MayUnmap, Durability::Volatile).await,
            ];
            assert_eq!(written, [Ok(()); 4], "{}: changes at {offset}", self.scene);
            assert_eq!(device.allocation(none).await, Ok(vec![]), "{}: allocation at {offset}", self.scene);
        }
    }

    pub(super) async fn refusals(&self) {
        let (size, step) = (self.size(), self.step());
        let mut model = Model::new(size);
        self.write(&mut model, 0, &vec![0x5A; size as usize], Durability::Volatile).await;
        let behind = size.next_multiple_of(step);
        let out_of_range =
            [(behind, step), (behind + step, step), (0, behind + step), (u64::MAX - step + 1, step)];
        for (offset, length) in out_of_range {
            let expected = IoError::OutOfRange { offset, length, size };
            self.assert_refused(ByteRange::new(offset, length), expected).await;
        }
        if step > 1 && size > 2 * step {
            for (offset, length) in [(1, step), (step / 2, step), (0, step / 2), (0, step + 1)] {
                let alignment = self.device.geometry().alignment;
                let expected = IoError::Misaligned { offset, length, alignment };
                self.assert_refused(ByteRange::new(offset, length), expected).await;
            }
        }
        self.assert_is(&model).await;
    }

    pub(super) async fn overlaps_in_sequence(&self) {
        let mut model = Model::new(self.size());
        let mut random = Random::new(3);
        for fill in 1..40 {
            let range = self.any_range(&mut random);
            self.write(&mut model, range.offset, &vec![fill; range.length as usize], Durability::Volatile)
                .await;
        }
        self.assert_is(&model).await;
    }

    pub(super) async fn many_in_flight(&self) {
        let mut model = Model::new(self.size());
        let ranges = self.pieces();
        let writes = ranges.iter().zip(1_u64..).map(|(range, number)| {
            let data = pattern(number, range.length);
            model.write(range.offset, &data);
            self.device.write(range.offset, Buffer::copy_of(&data), Durability::Volatile)
        });
        let answers = join_all(writes).await;
        assert!(answers.iter().all(Result::is_ok), "{}: {answers:?}", self.scene);
        let reads =
            ranges.iter().map(|range| self.device.read(range.offset, Buffer::zeroed(range.length as usize)));
        for (read, range) in join_all(reads).await.into_iter().zip(&ranges) {
            let buffer = read.unwrap_or_else(|error| panic!("{}: read of {range:?}: {error}", self.scene));
            model.assert_same(&self.scene, range.offset, buffer.as_slice());
        }
        let flushes = join_all((0..5).map(|_| self.device.flush())).await;
        assert_eq!(flushes, [Ok(()); 5], "{}: flushes at once", self.scene);
    }

    pub(super) async fn overlaps_in_flight(&self) {
        let size = self.size() as usize;
        let write = |fill| self.device.write(0, Buffer::copy_of(&vec![fill; size]), Durability::Volatile);
        let answers = join_all([write(1), write(2), write(3)]).await;
        assert!(answers.iter().all(Result::is_ok), "{}: {answers:?}", self.scene);
        let first = self.read(ByteRange::new(0, self.size())).await;
        for sector in first.as_slice().chunks(SECTOR) {
            let fill = sector[0];
            let is_whole = (1..=3).contains(&fill) && sector.iter().all(|byte| *byte == fill);
            assert!(is_whole, "{}: a sector is neither of the writes", self.scene);
        }
        let second = self.read(ByteRange::new(0, self.size())).await;
        assert_eq!(first.as_slice(), second.as_slice(), "{}: it changes by itself", self.scene);
    }

    pub(super) async fn zeroes(&self) {
        let mut model = Model::new(self.size());
        let mut random = Random::new(5);
        let whole = vec![0xFF; self.size() as usize];
        for round in 0..12 {
            self.write(&mut model, 0, &whole, Durability::Volatile).await;
            let range = self.any_range(&mut random);
            let answer = match round % 4 {
                0 => self.device.discard(range).await,
                1 => self.device.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile).await,
                2 => self.device.write_zeroes(range, ZeroMode::KeepAllocated, Durability::Volatile).await,
                _ => self.device.write_zeroes(range, ZeroMode::KeepAllocated, Durability::Durable).await,
            };
            assert_eq!(answer, Ok(()), "{}: zeroes of {range:?}", self.scene);
            model.zero(range);
            self.assert_is(&model).await;
            self.assert_allocation(&model, ByteRange::new(0, self.size())).await;
        }
    }

    /// Checks that a dropped write is applied or not, by sectors, and affects no other data.
    pub(super) async fn dropped_futures(&self) {
        let mut model = Model::new(self.size());
        let pieces = self.pieces();
        let (touched, kept): (Vec<_>, Vec<_>) = pieces.iter().zip(0..).partition(|(_, index)| index % 2 == 0);
        for (range, index) in &kept {
            self.write(&mut model, range.offset, &pattern(*index + 1, range.length), Durability::Volatile)
                .await;
        }
        for round in 0..DROPPED {
            for (range, _) in &touched {
                let data = Buffer::copy_of(&vec![0xEE; range.length as usize]);
                let zeroed = ByteRange::new(range.offset, range.length);
                drop(self.device.write(range.offset, data.clone(), Durability::Volatile));
                poll_once(self.device.write(range.offset, data, Durability::Durable));
                poll_once(self.device.read(range.offset, Buffer::zeroed(range.length as usize)));
                poll_once(self.device.write_zeroes(zeroed, ZeroMode::MayUnmap, Durability::Volatile));
                poll_once(self.device.flush());
                poll_once(self.device.allocation(zeroed));
            }
            if round % 4 == 0 {
                self.handle.sleep(std::time::Duration::ZERO).await;
            }
        }
        for (range, _) in &kept {
            self.assert_reads(&model, **range).await;
        }
        for (range, _) in &touched {
            let read = self.read(**range).await;
            let is_old_or_new = read.as_slice().iter().all(|byte| [0, 0xEE].contains(byte));
            assert!(is_old_or_new, "{}: bytes that nobody wrote in {range:?}", self.scene);
        }
        assert_eq!(self.device.flush().await, Ok(()), "{}", self.scene);
    }

    pub(super) async fn random(&self, seed: u64, operations: usize) {
        let mut model = Model::new(self.size());
        let mut random = Random::new(seed);
        for _ in 0..operations {
            let range = self.any_range(&mut random);
            let durability = if random.below(8) == 0 { Durability::Durable } else { Durability::Volatile };
            let answer = match random.below(10) {
                0..=3 => {
                    let data = pattern(random.next(), range.length);
                    self.write(&mut model, range.offset, &data, durability).await;
                    continue;
                }
                4..=6 => {
                    self.assert_reads(&model, range).await;
                    self.assert_allocation(&model, range).await;
                    continue;
                }
                7 => self.device.discard(range).await,
                8 => {
                    let modes = [ZeroMode::MayUnmap, ZeroMode::KeepAllocated];
                    self.device.write_zeroes(range, modes[random.below(2) as usize], durability).await
                }
                _ => {
                    assert_eq!(self.device.flush().await, Ok(()), "{}: flush", self.scene);
                    continue;
                }
            };
            assert_eq!(answer, Ok(()), "{}: zeroes of {range:?}", self.scene);
            model.zero(range);
        }
        self.assert_is(&model).await;
    }

    /// Checks that the new part reads as zeroes, the old content stays, and requests reach the new end. The new size is invisible
    /// before it is shown.
    pub(super) async fn growth(&self) {
        let Some(growth) = self.device.growth() else { return };
        let (old, unit) = (self.size(), u64::from(ALIGNMENT));
        let mut content = vec![0x6D; old as usize];
        self.device_is_filled(&content).await;
        for blocks in [1, 17, 3] {
            let (before, step) = (self.size(), self.step());
            let size = before.next_multiple_of(unit) + blocks * unit;
            let capacity = growth.capacity().await;
            let capacity = capacity.unwrap_or_else(|error| panic!("{}: capacity: {error}", self.scene));
            if capacity.is_some_and(|capacity| capacity < size + unit) {
                return;
            }
            let prepared =
                [growth.prepare(size + unit).await, growth.undo().await, growth.prepare(size).await];
            assert_eq!(prepared, [Ok(()); 3], "{}: prepare {size}", self.scene);
            assert_eq!(self.size(), before, "{}: seen before it was shown", self.scene);
            let beyond = ByteRange::new(before.next_multiple_of(step), step);
            let expected = IoError::OutOfRange { offset: beyond.offset, length: step, size: before };
            self.assert_refused(beyond, expected).await;
            // A write to the old end was in flight when the new size was shown.
            let end = ByteRange::new(before - (before - 1) % step - 1, (before - 1) % step + 1);
            let last = Buffer::copy_of(&vec![blocks as u8; end.length as usize]);
            let late = self.device.write(end.offset, last, Durability::Volatile);
            growth.show(size);
            assert_eq!(late.await, Ok(()), "{}: a write to the former end", self.scene);
            content[end.offset as usize..].fill(blocks as u8);
            content.resize(size as usize, 0);
            let mut model = Model::new(size);
            model.write(0, &content);
            assert_eq!(self.size(), size, "{}", self.scene);
            self.assert_is(&model).await;
            self.assert_allocation(&model, ByteRange::new(0, size)).await;
            let new = ByteRange::new(size - unit, unit);
            self.write(&mut model, new.offset, &pattern(blocks, unit), Durability::Durable).await;
            self.assert_is(&model).await;
            assert_eq!(self.device.discard(new).await, Ok(()), "{}: discard of what is new", self.scene);
            model.zero(new);
            self.assert_is(&model).await;
        }
        let (undone, size) = (growth.undo().await, self.size());
        assert_eq!(undone, Ok(()), "{}: nothing to undo", self.scene);
        assert_eq!(self.device.geometry().size, size, "{}", self.scene);
    }

    async fn device_is_filled(&self, content: &[u8]) {
        let answer = self.device.write(0, Buffer::copy_of(content), Durability::Volatile).await;
        assert_eq!(answer, Ok(()), "{}: write of everything", self.scene);
    }

    fn size(&self) -> u64 {
        self.device.geometry().size
    }

    fn step(&self) -> u64 {
        u64::from(self.device.geometry().alignment)
    }

    fn any_range(&self, random: &mut Random) -> ByteRange {
        let (size, step) = (self.size(), self.step());
        let steps = size.div_ceil(step);
        let first = random.below(steps);
        // Mostly small, sometimes up to the end.
        let longest = if random.below(4) == 0 { steps - first } else { (steps - first).min(8) };
        let end = ((first + 1 + random.below(longest)) * step).min(size);
        ByteRange::new(first * step, end - first * step)
    }

    fn pieces(&self) -> Vec<ByteRange> {
        let (size, step) = (self.size(), self.step());
        let length = (size / 64).next_multiple_of(step).max(step.max(SECTOR as u64));
        let starts = (0..size).step_by(length as usize);
        starts.map(|start| ByteRange::new(start, length.min(size - start))).collect()
    }

    async fn write(&self, model: &mut Model, offset: u64, data: &[u8], durability: Durability) {
        let answer = self.device.write(offset, Buffer::copy_of(data), durability).await;
        assert_eq!(answer, Ok(()), "{}: write of {} bytes at {offset}", self.scene, data.len());
        model.write(offset, data);
    }

    async fn read(&self, range: ByteRange) -> Buffer {
        // The buffer's former content must not show.
        let buffer = Buffer::copy_of(&vec![0xA5; range.length as usize]);
        let read = self.device.read(range.offset, buffer).await;
        let buffer = read.unwrap_or_else(|error| panic!("{}: read of {range:?}: {error}", self.scene));
        assert_eq!(buffer.len() as u64, range.length, "{}: read of {range:?}", self.scene);
        buffer
    }

    async fn assert_reads(&self, model: &Model, range: ByteRange) {
        model.assert_same(&self.scene, range.offset, self.read(range).await.as_slice());
    }

    async fn assert_is(&self, model: &Model) {
        self.assert_reads(model, ByteRange::new(0, self.size())).await;
    }

    async fn assert_allocation(&self, model: &Model, range: ByteRange) {
        match self.device.allocation(range).await {
            Ok(extents) => model.assert_allocation(&self.scene, range, &extents),
            Err(error) => panic!("{}: allocation of {range:?}: {error}", self.scene),
        }
    }

    async fn assert_refused(&self, range: ByteRange, expected: IoError) {
        let ByteRange { offset, length } = range;
        let (device, buffer) = (&self.device, || Buffer::zeroed(length as usize));
        let answers = [
            device.read(offset, buffer()).await.map(drop),
            device.write(offset, buffer(), Durability::Volatile).await,
            device.discard(range).await,
            device.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile).await,
            device.allocation(range).await.map(drop),
        ];
        assert_eq!(answers, [Err(expected); 5], "{}: {range:?}", self.scene);
    }
}

pub(super) async fn check_read_only(name: &str, device: &dyn BlockDevice) {
    let geometry = device.geometry();
    let range = ByteRange::new(0, geometry.size.min(u64::from(geometry.alignment)));
    let before = device.read(0, Buffer::zeroed(range.length as usize)).await;
    let answers = [
        device.write(0, Buffer::copy_of(&vec![1; range.length as usize]), Durability::Volatile).await,
        device.discard(range).await,
        device.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile).await,
    ];
    assert_eq!(answers, [Err(IoError::ReadOnly); 3], "{name}");
    let after = device.read(0, Buffer::zeroed(range.length as usize)).await;
    match (before, after) {
        (Ok(before), Ok(after)) => assert_eq!(before.as_slice(), after.as_slice(), "{name}"),
        answers => panic!("{name}: it does not read: {answers:?}"),
    }
    assert!(device.allocation(range).await.is_ok(), "{name}");
    assert_eq!(device.flush().await, Ok(()), "{name}: nothing to flush is no error");
}

fn pattern(number: u64, length: u64) -> Vec<u8> {
    (0..length).map(|index| ((number.wrapping_mul(31) + index / SECTOR as u64) % 255 + 1) as u8).collect()
}

fn poll_once<T>(request: impl Future<Output = T>) {
    let _ = pin!(request).poll(&mut Context::from_waker(Waker::noop()));
}
