//! Reports of copies at earlier hosts to the host that the volume leaves for. So the volume can return, or move to any of them,
//! incrementally (\[TPM\] §VII names this as future work).
//!
//! ```text
//!   it leaves: the missing set of each copy at the handover ──report──► at the new owner: that set, and the writes since
//! ```
//! A copy is named by the departure that left it. A report stays true while that image is unchanged, wherever the volume is. A
//! lost report costs a full copy later, but nothing waits for it.

use std::collections::BTreeMap;

use chronicle::{Chronicle, Epoch, Generation, KeptReplica, LayeredBitmap, ReplicaOf, coarsened};

use super::Stay;
use super::machine::{FIRST_EPOCH, lacked_by};
use crate::planted::{Bug, broken};

/// The most copies that are reported: those that lack least.
pub const COPIES_MAX: usize = 16;
/// The most runs reported for one copy; a larger set is reported coarser. Their bytes fit into one call.
const RUNS_MAX: usize = 100_000;

/// A copy at another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyElsewhere {
    /// The identity of its host.
    pub host: [u8; 32],
    /// The migration by which the volume left there, in that host's numbering.
    pub departure: u64,
    /// The generation of the volume at the time of the copy.
    pub generation: Generation,
    /// The blocks that it lacks, and perhaps others.
    pub lacking: LayeredBitmap,
}

/// The known copies at the departure of a volume. It is made quickly; the missing sets are computed later.
#[derive(Debug)]
pub struct Departed {
    chronicle: Chronicle,
    replicas: BTreeMap<ReplicaOf, KeptReplica>,
}

impl Departed {
    /// Returns the copies, those that lack least first. A copy that lacks everything is left out.
    pub fn copies(self) -> Vec<CopyElsewhere> {
        let Self { chronicle, replicas } = self;
        let known = replicas.into_iter().filter_map(|(of, replica)| match of {
            ReplicaOf::Host { host, departure } => {
                let (generation, lacking) = (replica.generation, lacked_by(&replica, &chronicle));
                Some(CopyElsewhere { host, departure, generation, lacking })
            }
            ReplicaOf::Migration(_) => None,
        });
        let mut known: Vec<_> = known.filter(|copy| copy.lacking.count() < chronicle.blocks().0).collect();
        known.sort_by_cached_key(|copy| (copy.lacking.count(), copy.host, copy.departure));
        known.truncate(COPIES_MAX);
        for copy in &mut known {
            copy.lacking = coarsened(&copy.lacking, RUNS_MAX);
        }
        known
    }
}

impl Stay {
    /// Returns the known copies at other hosts than `to`, once nothing is written here; `None` if there are none. The host `to`
    /// does not need a report of its own copy.
    pub fn departs(&self, to: [u8; 32]) -> Option<Departed> {
        let is_elsewhere = |of: &ReplicaOf| matches!(of, ReplicaOf::Host { host, .. } if *host != to);
        let replicas = self.known().iter().filter(|(of, _)| is_elsewhere(of));
        let replicas: BTreeMap<_, _> = replicas.map(|(of, replica)| (*of, replica.clone())).collect();
        (!replicas.is_empty()).then(|| Departed { chronicle: self.chronicle().clone(), replicas })
    }

    /// Returns the current missing set of a copy that lacked `at_departure` when the volume left for here. `None` if later
    /// writes are not known, so that it counts as lacking everything.
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
        // It waits for nothing, because nothing would be known after a crash.
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
        assert!(here.departs([8; 32]).is_none());
        knows(&mut here, 7, 3, &[1]);
        knows(&mut here, 8, 4, &[2]);
        write(&mut here, 5, 1);
        let told = here.departs([8; 32]).expect("a copy is known").copies();
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
        let told = here.departs([0; 32]).expect("copies are known").copies();
        assert_eq!(told.len(), COPIES_MAX);
        assert!(told.iter().all(|copy| copy.departure <= COPIES_MAX as u64));
    }
}
