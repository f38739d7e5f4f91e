//! Copies at hosts that the volume has visited, as they are told to the host that it leaves for: so it comes home, or goes on to
//! any of them, with what that one lacks (\[TPM\] §VII names this as future work).
//!
//! ```text
//!   leaves here:   what each copy lacks at the handover ──told──► comes there: that, and what has been written there since its stay began
//! ```
//! A copy is named by the departure that left it, and what is told of one is true for as long as that image is not touched, whoever
//! has the volume. What is lost on the way costs a whole copy later, and nothing else: nobody waits for it.

use chronicle::{Epoch, Generation, LayeredBitmap, ReplicaOf, coarsened};

use super::Stay;
use super::machine::FIRST_EPOCH;
use crate::planted::{Bug, broken};

/// Copies that are told of at most: those that lack least.
pub const COPIES_MAX: usize = 16;
/// Runs of one copy's blocks that are told; more are told coarser. Their bytes fit into one call.
const RUNS_MAX: usize = 100_000;

/// A copy at another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyElsewhere {
    /// The identity of its host.
    pub host: [u8; 32],
    /// The migration by which the volume left there, as that host numbers it.
    pub departure: u64,
    /// The generation of the volume that it is a copy of.
    pub generation: Generation,
    /// The blocks that it lacks, and perhaps others.
    pub lacking: LayeredBitmap,
}

impl Stay {
    /// The copies that the host `to` is told of, when nothing is written here any more. What that one has itself is no use to it.
    pub fn copies_elsewhere(&self, to: [u8; 32]) -> Vec<CopyElsewhere> {
        let known = self.replicas().into_iter().filter_map(|(of, generation, lacks)| match of {
            ReplicaOf::Host { host, departure } if host != to => Some((lacks, host, departure, generation)),
            _ => None,
        });
        let mut known: Vec<_> = known.filter(|(lacks, ..)| *lacks < self.chronicle().blocks().0).collect();
        known.sort_unstable();
        known.truncate(COPIES_MAX);
        let told = known.into_iter().filter_map(|(_, host, departure, generation)| {
            let lacking = self.lacking(ReplicaOf::Host { host, departure }, generation)?;
            Some(CopyElsewhere { host, departure, generation, lacking: coarsened(&lacking, RUNS_MAX) })
        });
        told.collect()
    }

    /// What a copy lacks at this instant that lacked so much when the volume left for here; `None`: as good as everything, because
    /// it is not known any more what has been written since.
    pub fn lacking_since_arrival(&self, at_departure: &LayeredBitmap) -> Option<LayeredBitmap> {
        let mut lacking = LayeredBitmap::new(self.chronicle().blocks());
        lacking.union_with(at_departure);
        if !broken(Bug::ToldCopyForgetsWrites) {
            lacking.union_with(&self.chronicle().since(Epoch(FIRST_EPOCH.0 - 1)));
        }
        (lacking.count() < lacking.blocks().0).then_some(lacking)
    }
}

#[cfg(test)]
mod tests {
    use chronicle::{BlockRange, BlockSize, ByteRange, MarkPolicy, StayId};

    use super::super::Beginning;
    use super::*;

    const BLOCK: u64 = BlockSize::DEFAULT.bytes();

    fn stay(number: u64) -> Stay {
        Stay::begin(Beginning {
            id: StayId::Arrived(number),
            block_size: BlockSize::DEFAULT,
            size_bytes: 100 * BLOCK,
            regions: MarkPolicy::Volatile,
        })
    }

    fn blocks(of: &[u64]) -> LayeredBitmap {
        let mut set = LayeredBitmap::new(BlockSize::DEFAULT.blocks_of(100 * BLOCK));
        for block in of {
            set.insert(BlockRange::new(*block, block + 1));
        }
        set
    }

    fn write(stay: &mut Stay, block: u64, blocks: u64) {
        // It waits for nothing: nobody would know after a crash.
        let _ = stay.record(ByteRange::new(block * BLOCK, blocks * BLOCK));
    }

    fn knows(stay: &mut Stay, host: u8, departure: u64, missing: &[u64]) {
        let premarks = stay.premarks();
        let of = ReplicaOf::Host { host: [host; 32], departure };
        let referral = stay.take_down(&premarks, of, Generation(departure), blocks(missing));
        let _kept = stay.refer(referral.expect("the stay is not over"));
    }

    #[test]
    fn a_copy_lacks_elsewhere_what_it_lacked_and_what_was_written_since() {
        let mut here = stay(1);
        knows(&mut here, 7, 3, &[1]);
        knows(&mut here, 8, 4, &[2]);
        write(&mut here, 5, 1);
        let told = here.copies_elsewhere([8; 32]);
        let [copy] = &told[..] else { panic!("what a host has itself it is not told: {told:?}") };
        assert_eq!((copy.host, copy.departure, copy.generation), ([7; 32], 3, Generation(3)));
        assert_eq!(copy.lacking, blocks(&[1, 5]));

        let mut there = stay(2);
        write(&mut there, 9, 1);
        there.advance();
        write(&mut there, 10, 1);
        assert_eq!(there.lacking_since_arrival(&copy.lacking), Some(blocks(&[1, 5, 9, 10])));
        write(&mut there, 0, 100);
        assert_eq!(there.lacking_since_arrival(&copy.lacking), None, "it lacks everything");
    }

    #[test]
    fn those_that_lack_least_are_told() {
        let mut here = stay(1);
        for departure in 1..=20 {
            let missing: Vec<u64> = (0..departure).collect();
            knows(&mut here, departure as u8, departure, &missing);
        }
        let told = here.copies_elsewhere([0; 32]);
        assert_eq!(told.len(), COPIES_MAX);
        assert!(told.iter().all(|copy| copy.departure <= COPIES_MAX as u64));
    }
}
