//! The stored form of a chronicle, which survives restarts.
//!
//! ```text
//!   kept whole, now and then:    epochs up to `through`, exactly; replicas, and what each lacked at its epoch
//!   kept meanwhile, by others:   marks: regions that may be written in a later epoch, durable before the first write
//! ```
//! Together they cover at least everything written ([`Chronicle::restore`](crate::Chronicle::restore)); after a clean
//! stop they are exact. The caller decides where the bytes are stored.

use std::collections::BTreeMap;

use crate::bitmap::{BLOCKS_MAX, LayeredBitmap};
use crate::stay::StayId;
use crate::units::{BlockCount, BlockRange, BlockSize, Epoch, Generation};

/// The most runs stored of one set, 16 MiB of bytes; a larger set is stored coarser.
pub const RUNS_MAX: usize = 1 << 20;
/// The most sets and replicas accepted when reading: more than a volume ever has.
const ENTRIES_MAX: u64 = 4096;
/// The first bytes of the file; the last one is the version.
const HEADER: [u8; 8] = *b"STERNAC\x03";
const PREFIX_BYTES: usize = HEADER.len() + 4;

/// A chronicle, and the replicas that refer to it, in the form that is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The size of a block.
    pub block_size: BlockSize,
    /// The volume's size in bytes at the time of storing.
    pub size_bytes: u64,
    /// The oldest epoch whose later writes are all known.
    pub known_after: Epoch,
    /// `epochs` is complete up to this epoch; marks cover later ones.
    pub through: Epoch,
    /// The blocks written in each epoch later than `known_after`.
    pub epochs: Vec<(Epoch, LayeredBitmap)>,
    /// The copies that refer to this chronicle.
    pub replicas: BTreeMap<ReplicaOf, KeptReplica>,
}

/// The holder of a copy. The keeper of the chronicle defines the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ReplicaOf {
    /// The target of a migration that is under way.
    Migration(u64),
    /// A host that had the volume before, and kept its image when the volume left.
    ///
    /// **N.B.** A generation does not identify that image. After a forced promotion two branches of the history have volumes of
    /// the same generation, and both may have been at that host (hard case 9). The number of the departure does identify it.
    Host {
        /// The identity of the host.
        host: [u8; 32],
        /// The migration by which the volume left there, in that host's numbering, which never repeats.
        departure: u64,
    },
}

/// The recorded state of one copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptReplica {
    /// The generation of the volume at the time of the copy.
    pub generation: Generation,
    /// The copy lacks the blocks written after this epoch …
    pub as_of: Epoch,
    /// … and these blocks, too.
    pub missing: LayeredBitmap,
}

/// Bytes that are not a kept chronicle of this residency: damaged, of another version, or something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotKept {
    /// They are damaged, or something else.
    #[error("read a kept chronicle of {bytes} bytes")]
    Damaged {
        /// How many there are.
        bytes: usize,
    },
    /// Another version of the program wrote them.
    #[error("read a kept chronicle of version {found}: this program reads version {} alone", HEADER[7])]
    Version {
        /// The version in the header.
        found: u8,
    },
}

impl Kept {
    /// Returns the bytes to store for this residency of the volume.
    pub fn encode(&self, volume: [u8; 16], stay: StayId) -> Vec<u8> {
        let mut bytes = HEADER.to_vec();
        bytes.extend([0; 4]);
        bytes.extend(volume);
        put(&mut bytes, number_of(stay));
        let head = [self.block_size.bytes(), self.size_bytes, self.known_after.0, self.through.0];
        head.into_iter().for_each(|number| put(&mut bytes, number));
        put(&mut bytes, self.epochs.len() as u64);
        for (epoch, written) in &self.epochs {
            put(&mut bytes, epoch.0);
            put_set(&mut bytes, written);
        }
        put(&mut bytes, self.replicas.len() as u64);
        for (of, replica) in &self.replicas {
            let (tag, name, departure) = match of {
                ReplicaOf::Migration(number) => (*number, [0; 32], 0),
                ReplicaOf::Host { host, departure } => (u64::MAX, *host, *departure),
            };
            put(&mut bytes, tag);
            bytes.extend(name);
            put(&mut bytes, departure);
            put(&mut bytes, replica.generation.0);
            put(&mut bytes, replica.as_of.0);
            put_set(&mut bytes, &replica.missing);
        }
        let checksum = crc32c::crc32c(&bytes[PREFIX_BYTES..]).to_le_bytes();
        bytes[HEADER.len()..PREFIX_BYTES].copy_from_slice(&checksum);
        bytes
    }

    /// Parses the output of [`Kept::encode`] for this residency of the volume.
    ///
    /// # Errors
    /// [`NotKept`]: nothing is known, and every copy counts as lacking everything.
    pub fn decode(bytes: &[u8], volume: [u8; 16], stay: StayId) -> Result<Self, NotKept> {
        match bytes.strip_prefix(&HEADER[..7]) {
            Some([found, ..]) if *found != HEADER[7] => Err(NotKept::Version { found: *found }),
            _ => Self::read(bytes, volume, stay).ok_or(NotKept::Damaged { bytes: bytes.len() }),
        }
    }

    /// Returns whether the parts fit together: no replica is as of an epoch that had not ended at the time of storing.
    pub fn is_consistent(&self) -> bool {
        self.replicas
            .values()
            .all(|replica| self.known_after <= replica.as_of && replica.as_of <= self.through)
    }

    /// Adds the blocks of marks: they may have been written in epochs later than [`Kept::through`].
    pub fn with_marks(mut self, marks: impl IntoIterator<Item = (Epoch, Vec<BlockRange>)>) -> Self {
        let later = marks.into_iter().filter(|(epoch, _)| *epoch > self.through);
        for (epoch, runs) in later.collect::<Vec<_>>() {
            // A volume that has grown since has marks beyond its former end.
            let mut marked = LayeredBitmap::new(self.block_size.blocks_of(self.size_bytes));
            for run in runs {
                marked.insert(run);
            }
            self.epochs.push((epoch, marked));
        }
        self
    }

    fn read(bytes: &[u8], volume: [u8; 16], stay: StayId) -> Option<Self> {
        let (prefix, body) = bytes.split_at_checked(PREFIX_BYTES)?;
        let (header, checksum) = prefix.split_at_checked(HEADER.len())?;
        if *header != HEADER || *checksum != crc32c::crc32c(body).to_le_bytes() {
            return None;
        }
        let (of, body) = body.split_first_chunk::<16>()?;
        let mut rest = Rest(body);
        if *of != volume || rest.number()? != number_of(stay) {
            return None;
        }
        let block_size = BlockSize::new(u32::try_from(rest.number()?).ok()?).ok()?;
        let size_bytes = rest.number()?;
        let (known_after, through) = (Epoch(rest.number()?), Epoch(rest.number()?));
        let blocks = block_size.blocks_of(size_bytes);
        let mut epochs = Vec::new();
        for _ in 0..rest.count()? {
            epochs.push((Epoch(rest.number()?), rest.set(blocks)?));
        }
        let mut replicas = BTreeMap::new();
        for _ in 0..rest.count()? {
            let (tag, host, departure) = (rest.number()?, rest.name()?, rest.number()?);
            let of = match tag {
                u64::MAX => ReplicaOf::Host { host, departure },
                migration => ReplicaOf::Migration(migration),
            };
            let (generation, as_of) = (Generation(rest.number()?), Epoch(rest.number()?));
            replicas.insert(of, KeptReplica { generation, as_of, missing: rest.set(blocks)? });
        }
        rest.0.is_empty().then_some(Self { block_size, size_bytes, known_after, through, epochs, replicas })
    }
}

/// Returns a set with at most `runs_max` runs that holds all blocks of `set`, and roughly as few others as possible.
pub fn coarsened(set: &LayeredBitmap, runs_max: usize) -> LayeredBitmap {
    let mut coarse = set.clone();
    let mut grain = 1_u64;
    while coarse.runs().nth(runs_max.max(1)).is_some() {
        // A grain as large as the volume leaves one run.
        grain = grain.saturating_mul(2);
        let mut coarser = LayeredBitmap::new(set.blocks());
        for run in coarse.runs() {
            let end = run.end.0.div_ceil(grain).saturating_mul(grain);
            coarser.insert(BlockRange::new(run.start.0 / grain * grain, end.min(set.blocks().0)));
        }
        coarse = coarser;
    }
    coarse
}

/// Returns the residency as a number. No host numbers a migration as high as `u64::MAX`.
fn number_of(stay: StayId) -> u64 {
    match stay {
        StayId::Made => u64::MAX,
        StayId::Arrived(migration) => migration,
    }
}

fn put(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(number.to_le_bytes());
}

fn put_set(bytes: &mut Vec<u8>, set: &LayeredBitmap) {
    let set = coarsened(set, RUNS_MAX);
    put(bytes, set.runs().count() as u64);
    for run in set.runs() {
        put(bytes, run.start.0);
        put(bytes, run.end.0);
    }
}

struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }

    fn name(&mut self) -> Option<[u8; 32]> {
        let (name, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*name)
    }

    fn count(&mut self) -> Option<u64> {
        self.number().filter(|count| *count <= ENTRIES_MAX)
    }

    /// Reads a set, whose runs are in order. Memory is bounded by the bytes that are there.
    fn set(&mut self, blocks: BlockCount) -> Option<LayeredBitmap> {
        let mut set = LayeredBitmap::new(BlockCount(blocks.0.min(BLOCKS_MAX.0)));
        let runs = self.number().filter(|runs| *runs <= RUNS_MAX as u64)?;
        for _ in 0..runs {
            let (start, end) = (self.number()?, self.number()?);
            if start >= end || end > blocks.0 {
                return None;
            }
            set.insert(BlockRange::new(start, end));
        }
        Some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(runs: &[(u64, u64)]) -> LayeredBitmap {
        let mut set = LayeredBitmap::new(BlockCount(1000));
        for (start, end) in runs {
            set.insert(BlockRange::new(*start, *end));
        }
        set
    }

    const VOLUME: [u8; 16] = [7; 16];
    const STAY: StayId = StayId::Arrived(5);

    fn encoded() -> Vec<u8> {
        kept().encode(VOLUME, STAY)
    }

    fn kept() -> Kept {
        let host = KeptReplica { generation: Generation(4), as_of: Epoch(7), missing: set(&[(5, 6)]) };
        let target = KeptReplica { generation: Generation(5), as_of: Epoch(9), missing: set(&[(0, 1000)]) };
        Kept {
            block_size: BlockSize::DEFAULT,
            size_bytes: 1000 << 12,
            known_after: Epoch(7),
            through: Epoch(9),
            epochs: vec![(Epoch(8), set(&[(1, 3), (10, 20)])), (Epoch(9), set(&[]))],
            replicas: [
                (ReplicaOf::Host { host: [9; 32], departure: 8 }, host),
                (ReplicaOf::Migration(3), target),
            ]
            .into(),
        }
    }

    #[test]
    fn what_is_kept_comes_back() {
        assert_eq!(Kept::decode(&encoded(), VOLUME, STAY), Ok(kept()));
        assert!(kept().is_consistent());
    }

    #[test]
    fn what_is_kept_of_another_stay_or_volume_is_refused() {
        for (volume, stay) in [(VOLUME, StayId::Made), (VOLUME, StayId::Arrived(6)), ([8; 16], STAY)] {
            assert!(Kept::decode(&encoded(), volume, stay).is_err());
        }
    }

    #[test]
    fn a_kept_chronicle_of_another_version_is_refused_by_its_number() {
        let mut bytes = encoded();
        bytes[7] += 1;
        let refused = Kept::decode(&bytes, VOLUME, STAY).unwrap_err();
        assert_eq!(refused, NotKept::Version { found: HEADER[7] + 1 });
    }

    #[test]
    fn bytes_that_were_changed_or_cut_off_are_refused() {
        let bytes = encoded();
        for end in 0..bytes.len() {
            assert!(Kept::decode(&bytes[..end], VOLUME, STAY).is_err(), "{end} bytes");
        }
        for index in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[index] ^= 1;
            assert!(Kept::decode(&changed, VOLUME, STAY).is_err(), "byte {index}");
        }
    }

    #[test]
    fn counts_that_promise_more_than_there_is_are_refused_before_anything_is_allocated() {
        let mut bytes = encoded();
        // The number of epochs follows the volume and five numbers.
        let at = PREFIX_BYTES + 16 + 5 * 8;
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        let checksum = crc32c::crc32c(&bytes[PREFIX_BYTES..]).to_le_bytes();
        bytes[HEADER.len()..PREFIX_BYTES].copy_from_slice(&checksum);
        assert!(Kept::decode(&bytes, VOLUME, STAY).is_err());
    }

    #[test]
    fn a_set_with_too_many_runs_is_kept_coarser_and_lacks_nothing() {
        let scattered = set(&(0..250).map(|index| (4 * index, 4 * index + 1)).collect::<Vec<_>>());
        for runs_max in [1, 7, 100, 250, 1000] {
            let coarse = coarsened(&scattered, runs_max);
            assert!(coarse.runs().count() <= runs_max, "{runs_max}");
            let mut left_out = scattered.clone();
            left_out.subtract(&coarse);
            assert!(left_out.is_empty(), "{runs_max}");
        }
        assert_eq!(coarsened(&scattered, 250), scattered);
    }
}
