//! The content of a disk: as reads see it, as a power cut leaves it, and the log of volatile changes.
//!
//! A sector of 512 bytes is stored as one number, its *token*: guests write sectors of eight token bytes and zeroes, so no other
//! content occurs. Zero is the token of a sector of zeroes.

use std::collections::VecDeque;

use block::{Buffer, ByteRange, Durability, Extent, ExtentKind, ZeroMode};

use crate::random::Random;

/// Bytes of a sector, which one token stands for.
pub(crate) const SECTOR_BYTES: u64 = 512;
const GRAIN_BYTES: u64 = 4096;
const GRAIN_SECTORS: usize = (GRAIN_BYTES / SECTOR_BYTES) as usize;

pub(crate) struct Medium {
    current: Vec<u64>,
    /// The least that a power cut leaves.
    durable: Vec<u64>,
    /// The number of the log entry that each durable sector is from, plus one; 0: from none.
    durable_entry: Vec<u64>,
    /// Applied changes that may still be lost, oldest first.
    log: VecDeque<LogEntry>,
    log_start: u64,
    allocated: Vec<bool>,
    /// Sectors lost by a failed flush: reads see them until they vanish, and no flush makes them durable.
    lost: Vec<bool>,
    /// The entries that such flushes were to make durable, with their numbers.
    dropped: Vec<(u64, LogEntry)>,
    atomic_sectors: usize,
}

struct LogEntry {
    first: usize,
    content: Content,
}

enum Content {
    Tokens(Vec<u64>),
    Zeroes(usize),
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Zeroes(count) => *count,
        }
    }

    fn token(&self, index: usize) -> u64 {
        match self {
            Self::Tokens(tokens) => tokens[index],
            Self::Zeroes(_) => 0,
        }
    }
}

impl Medium {
    pub(super) fn new(size_bytes: u64, sector_bytes: u32) -> Self {
        let sectors = (size_bytes / SECTOR_BYTES) as usize;
        Self {
            current: vec![0; sectors],
            durable: vec![0; sectors],
            durable_entry: vec![0; sectors],
            log: VecDeque::new(),
            log_start: 0,
            allocated: vec![false; sectors.div_ceil(GRAIN_SECTORS)],
            lost: vec![false; sectors],
            dropped: Vec::new(),
            atomic_sectors: (u64::from(sector_bytes) / SECTOR_BYTES) as usize,
        }
    }

    pub(crate) fn current(&self) -> &[u64] {
        &self.current
    }

    /// Returns whether a power cut would change nothing, except the reported losses of a failed flush.
    pub(crate) fn is_durable(&self) -> bool {
        let mut sectors = self.current.iter().zip(&self.durable).zip(&self.lost);
        sectors.all(|((current, durable), lost)| current == durable || *lost)
    }

    pub(crate) fn has_lost(&self) -> bool {
        !self.dropped.is_empty()
    }

    pub(crate) fn keep_lost(&mut self) {
        for (number, entry) in std::mem::take(&mut self.dropped) {
            self.persist(number, &entry, |_| true);
        }
        self.lost.fill(false);
    }

    /// Lets lost data vanish from reads, because the disk is unused for a while.
    pub(crate) fn let_go(&mut self) {
        self.dropped.clear();
        for (sector, lost) in self.lost.iter_mut().enumerate().filter(|(_, lost)| **lost) {
            self.current[sector] = self.durable[sector];
            *lost = false;
        }
    }

    /// Sets content that was always there.
    pub(crate) fn prefill(&mut self, sector: usize, token: u64) {
        self.current[sector] = token;
        self.durable[sector] = token;
        self.lost[sector] = false;
        self.allocated[sector / GRAIN_SECTORS] = true;
    }

    pub(super) fn entries(&self) -> u64 {
        self.log_start + self.log.len() as u64
    }

    pub(super) fn read(&self, offset: u64, buffer: &mut Buffer) {
        let first = (offset / SECTOR_BYTES) as usize;
        // A reader's buffer is its own (contract of `BlockDevice::read`).
        let Some(bytes) = buffer.as_mut_slice() else { return };
        bytes.fill(0);
        for (sector, token) in bytes.chunks_mut(SECTOR_BYTES as usize).zip(&self.current[first..]) {
            sector[..8].copy_from_slice(&token.to_le_bytes());
        }
    }

    pub(super) fn write(&mut self, first: usize, tokens: &[u64], durability: Durability) {
        if tokens.is_empty() {
            return;
        }
        self.current[first..first + tokens.len()].copy_from_slice(tokens);
        self.lost[first..first + tokens.len()].fill(false);
        self.allocated[grains(first, tokens.len())].fill(true);
        self.log.push_back(LogEntry { first, content: Content::Tokens(tokens.to_vec()) });
        self.persist_last_if(durability);
    }

    pub(super) fn zero(&mut self, first: usize, count: usize, unmap: ZeroMode, durability: Durability) {
        if count == 0 {
            return;
        }
        self.current[first..first + count].fill(0);
        self.lost[first..first + count].fill(false);
        match unmap {
            ZeroMode::KeepAllocated => self.allocated[grains(first, count)].fill(true),
            ZeroMode::MayUnmap => {
                let whole = first.div_ceil(GRAIN_SECTORS)..(first + count) / GRAIN_SECTORS;
                if whole.start < whole.end {
                    self.allocated[whole].fill(false);
                }
            }
        }
        self.log.push_back(LogEntry { first, content: Content::Zeroes(count) });
        self.persist_last_if(durability);
    }

    pub(super) fn flush(&mut self, entries: u64) {
        while self.log_start < entries {
            let Some(entry) = self.log.pop_front() else { break };
            self.persist(self.log_start, &entry, |_| true);
            self.log_start += 1;
        }
    }

    /// Forgets the entries below number `entries`: reads see their data, but no flush makes it durable.
    pub(super) fn drop_volatile(&mut self, entries: u64) {
        while self.log_start < entries && self.log.pop_front().is_some() {
            self.log_start += 1;
        }
    }

    /// Loses the entries below number `entries`, which a failed flush was to make durable: as [`Medium::drop_volatile`], and
    /// reads see them only for a while.
    pub(super) fn lose(&mut self, entries: u64) {
        while self.log_start < entries {
            let Some(entry) = self.log.pop_front() else { break };
            for sector in entry.first..entry.first + entry.content.len() {
                self.lost[sector] = self.durable[sector] != self.current[sector];
            }
            self.dropped.push((self.log_start, entry));
            self.log_start += 1;
        }
        for entry in &self.log {
            self.lost[entry.first..entry.first + entry.content.len()].fill(false);
        }
    }

    /// Keeps some sectors of volatile data and loses others; any of their versions may stay.
    pub(super) fn power_cut(&mut self, random: &mut Random) {
        let kept_percent = random.pick(&[0, 50, 90, 100]);
        let log = std::mem::take(&mut self.log);
        for entry in &log {
            let mut draws = random.fork();
            let atomic = self.atomic_sectors;
            let mut unit = usize::MAX;
            let mut kept = false;
            self.persist(self.log_start, entry, |sector| {
                if sector / atomic != unit {
                    unit = sector / atomic;
                    kept = draws.percent(kept_percent);
                }
                kept
            });
            self.log_start += 1;
        }
        self.current.copy_from_slice(&self.durable);
        self.lost.fill(false);
        self.dropped.clear();
        for (grain, sectors) in self.allocated.iter_mut().zip(self.current.chunks(GRAIN_SECTORS)) {
            *grain |= sectors.iter().any(|token| *token != 0);
        }
    }

    /// A durable write (FUA) makes no other change durable.
    fn persist_last_if(&mut self, durability: Durability) {
        if durability == Durability::Durable
            && let Some(entry) = self.log.pop_back()
        {
            let number = self.entries();
            self.persist(number, &entry, |_| true);
            self.log.push_back(entry);
        }
    }

    fn persist(&mut self, number: u64, entry: &LogEntry, mut kept: impl FnMut(usize) -> bool) {
        for index in 0..entry.content.len() {
            let sector = entry.first + index;
            if kept(sector) && self.durable_entry[sector] <= number {
                self.durable[sector] = entry.content.token(index);
                self.durable_entry[sector] = number + 1;
            }
        }
    }

    pub(super) fn allocation(&self, range: ByteRange) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut offset = range.offset;
        while offset < range.end() {
            let end = (offset / GRAIN_BYTES + 1) * GRAIN_BYTES;
            let piece = ByteRange::new(offset, end.min(range.end()) - offset);
            let allocated = self.allocated[(offset / GRAIN_BYTES) as usize];
            let kind = if allocated { ExtentKind::Data } else { ExtentKind::Hole };
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.range.length += piece.length,
                _ => extents.push(Extent { range: piece, kind }),
            }
            offset = piece.end();
        }
        extents
    }
}

pub(super) fn tokens(data: &[u8]) -> Vec<u64> {
    data.chunks(SECTOR_BYTES as usize)
        .map(|sector| {
            debug_assert!(block::buffer::is_zero(&sector[8..]), "a sector holds a token and zeroes");
            sector.first_chunk().map_or(0, |token| u64::from_le_bytes(*token))
        })
        .collect()
}

pub(super) fn sectors(range: ByteRange) -> (usize, usize) {
    ((range.offset / SECTOR_BYTES) as usize, (range.length / SECTOR_BYTES) as usize)
}

fn grains(first: usize, count: usize) -> std::ops::Range<usize> {
    first / GRAIN_SECTORS..(first + count).div_ceil(GRAIN_SECTORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_flushed_survives_and_what_was_not_may_be_lost() {
        let mut lost = 0;
        for seed in 0..100 {
            let mut medium = Medium::new(16 << 10, 512);
            medium.write(0, &[7, 7], Durability::Volatile);
            medium.flush(medium.entries());
            medium.write(0, &[8], Durability::Volatile);
            medium.write(3, &[9], Durability::Durable);
            medium.power_cut(&mut Random::new(seed));
            assert_eq!((medium.current()[1], medium.current()[3]), (7, 9));
            assert!([7, 8].contains(&medium.current()[0]));
            lost += u32::from(medium.current()[0] == 7);
        }
        assert!((1..100).contains(&lost));
    }

    #[test]
    fn what_a_failed_flush_has_dropped_is_not_made_durable_by_another() {
        let mut medium = Medium::new(16 << 10, 512);
        medium.write(0, &[7], Durability::Volatile);
        medium.drop_volatile(medium.entries());
        medium.write(1, &[8], Durability::Volatile);
        medium.flush(medium.entries());
        assert_eq!((medium.current()[0], medium.is_durable()), (7, false));
        medium.power_cut(&mut Random::new(1));
        assert_eq!(medium.current()[..2], [0, 8]);
    }

    #[test]
    fn what_a_failed_flush_of_the_owner_has_lost_is_seen_until_nobody_uses_the_disk() {
        let mut medium = Medium::new(16 << 10, 512);
        medium.write(0, &[7, 7], Durability::Volatile);
        let entries = medium.entries();
        medium.write(1, &[8], Durability::Volatile);
        medium.lose(entries);
        assert!(medium.has_lost() && !medium.is_durable(), "what came later is not durable yet");
        medium.flush(medium.entries());
        assert!(medium.is_durable());
        assert_eq!(medium.current()[..2], [7, 8]);
        medium.let_go();
        assert_eq!((medium.current()[..2].to_vec(), medium.has_lost()), (vec![0, 8], false));
    }

    #[test]
    fn an_older_write_never_comes_back_over_a_durable_one() {
        for seed in 0..50 {
            let mut medium = Medium::new(16 << 10, 512);
            medium.write(0, &[1], Durability::Volatile);
            medium.write(0, &[2], Durability::Durable);
            medium.power_cut(&mut Random::new(seed));
            assert_eq!(medium.current()[0], 2);
        }
    }

    #[test]
    fn whole_grains_become_holes() {
        let mut medium = Medium::new(16 << 10, 512);
        medium.write(0, &[5; 24], Durability::Volatile);
        medium.zero(4, 16, ZeroMode::MayUnmap, Durability::Volatile);
        let kinds: Vec<_> = medium
            .allocation(ByteRange::new(0, 16 << 10))
            .iter()
            .map(|extent| (extent.range.offset, extent.range.length, extent.kind))
            .collect();
        assert_eq!(
            kinds,
            [
                (0, 4096, ExtentKind::Data),
                (4096, 4096, ExtentKind::Hole),
                (8192, 4096, ExtentKind::Data),
                (12288, 4096, ExtentKind::Hole)
            ]
        );
    }
}
