//! Where copies of one volume parted ways.
//!
//! A volume's history is a line as long as exactly one host owns it: epochs are handed on with it. A forced
//! promotion breaks that, because the old owner may have written something that nobody has seen. From then on the
//! history is a tree, and epoch numbers can be compared only up to the point where two branches part.
//!
//! ```text
//!   main      1 ── 2 ── 3 ── 4 ── 5          host A wrote 4 and 5, unsent, and died
//!                        \
//!   promoted              4'── 5'── 6'       host B, as of 3, was promoted and wrote on
//!
//!   A returns: missing at A = written at A after 3  ∪  written at B after 3
//! ```
//!
//! It neither decides a promotion nor invents identities: the caller gives both.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bitmap::LayeredBitmap;
use crate::chronicle::Chronicle;
use crate::units::Epoch;

/// The identity of a volume and of all its copies, on whatever host; given by who creates the volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LineageId(pub [u8; 16]);

/// The identity of one branch; given by who promotes, and never given twice: two hosts may promote unseen by each
/// other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BranchId(pub [u8; 16]);

/// A point in the history of a volume: the end of an epoch on a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BranchPoint {
    /// The branch.
    pub branch: BranchId,
    /// The last epoch on it that is included.
    pub epoch: Epoch,
}

/// The branches of one volume, as far as a host knows them.
///
/// Hosts that meet join what they know ([`Lineage::join`]); branches are never forgotten, as any old copy may come
/// back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lineage {
    id: LineageId,
    /// The branch that the volume was created on.
    trunk: BranchId,
    /// Every other branch, with the last point that it shares with its parent. The parents of every branch are
    /// known down to the trunk.
    forks: BTreeMap<BranchId, BranchPoint>,
}

/// The most branches beside the trunk: each is a promotion that somebody forced, and what a peer says about them is
/// bounded by it.
pub const FORKS_MAX: usize = 1024;

impl Lineage {
    /// The lineage of a new volume.
    pub fn new(id: LineageId, trunk: BranchId) -> Self {
        Self { id, trunk, forks: BTreeMap::new() }
    }

    /// The lineage as another host or a journal tells it ([`Lineage::forks`]); the forks may come in any order.
    ///
    /// # Errors
    /// [`LineageError`] if they are not a tree that grows from `trunk`, or too many.
    pub fn from_forks(
        id: LineageId,
        trunk: BranchId,
        forks: impl IntoIterator<Item = (BranchId, BranchPoint)>,
    ) -> Result<Self, LineageError> {
        let mut lineage = Self::new(id, trunk);
        for (branch, from) in forks {
            lineage.add(branch, from)?;
        }
        for (&branch, &from) in &lineage.forks {
            lineage.path_to_trunk(BranchPoint { branch, epoch: from.epoch })?;
            lineage.check_parent(from)?;
        }
        Ok(lineage)
    }

    /// Every branch beside the trunk, with the last point that it shares with its parent.
    pub fn forks(&self) -> impl Iterator<Item = (BranchId, BranchPoint)> {
        self.forks.iter().map(|(&branch, &from)| (branch, from))
    }

    /// The identity of the volume.
    pub fn id(&self) -> LineageId {
        self.id
    }

    /// The branch that the volume was created on.
    pub fn trunk(&self) -> BranchId {
        self.trunk
    }

    /// Tells whether a branch is known.
    pub fn contains(&self, branch: BranchId) -> bool {
        branch == self.trunk || self.forks.contains_key(&branch)
    }

    /// Where a branch left its parent; `None` for the trunk and for unknown branches.
    pub fn parent(&self, branch: BranchId) -> Option<BranchPoint> {
        self.forks.get(&branch).copied()
    }

    /// Opens a branch by a forced promotion of a copy that is current as of `from`.
    ///
    /// The first epoch of the new branch is the one after `from.epoch`, or a later one. Its numbers mean nothing on
    /// the parent from there on.
    ///
    /// # Errors
    /// [`LineageError`] if the branch exists, its parent does not, the parent itself began after `from.epoch`, or
    /// there are too many.
    pub fn open_branch(&mut self, branch: BranchId, from: BranchPoint) -> Result<(), LineageError> {
        self.check_parent(from)?;
        self.add(branch, from)
    }

    /// The last epoch that two points share: everything up to it is the same history, nothing after it is.
    ///
    /// On one branch that is the earlier of both; otherwise it lies where the two parted, or before it.
    ///
    /// # Errors
    /// [`LineageError::BranchUnknown`].
    pub fn common_epoch(&self, one: BranchPoint, other: BranchPoint) -> Result<Epoch, LineageError> {
        let path = self.path_to_trunk(one)?;
        for point in self.path_to_trunk(other)? {
            if let Some(met) = path.iter().find(|candidate| candidate.branch == point.branch) {
                return Ok(met.epoch.min(point.epoch));
            }
        }
        // Unreachable: both paths end at the trunk, where the two have met at the latest.
        Err(LineageError::BranchUnknown { branch: other.branch })
    }

    /// Learns the branches that another host knows of.
    ///
    /// Learns nothing if it fails.
    ///
    /// # Errors
    /// [`LineageError::Foreign`] if it is another volume; [`LineageError::Contradiction`] if both know a branch,
    /// but not from the same point: identities were given twice.
    pub fn join(&mut self, other: &Self) -> Result<(), LineageError> {
        if self.id != other.id || self.trunk != other.trunk {
            return Err(LineageError::Foreign { here: self.id, there: other.id });
        }
        for (&branch, point) in &other.forks {
            if self.parent(branch).is_some_and(|known| known != *point) {
                return Err(LineageError::Contradiction { branch });
            }
        }
        let mut joined = self.forks.clone();
        joined.extend(&other.forks);
        if joined.len() > FORKS_MAX {
            return Err(LineageError::TooMany);
        }
        self.forks = joined;
        Ok(())
    }

    /// Adds a branch without a look at its parent.
    fn add(&mut self, branch: BranchId, from: BranchPoint) -> Result<(), LineageError> {
        if self.contains(branch) {
            return Err(LineageError::BranchExists { branch });
        }
        if self.forks.len() == FORKS_MAX {
            return Err(LineageError::TooMany);
        }
        self.forks.insert(branch, from);
        Ok(())
    }

    /// Checks that a branch can begin at a point: the point's branch is known and did not begin after it.
    fn check_parent(&self, from: BranchPoint) -> Result<(), LineageError> {
        let BranchPoint { branch, epoch } = from;
        if !self.contains(branch) {
            return Err(LineageError::BranchUnknown { branch });
        }
        if self.parent(branch).is_some_and(|parent| epoch < parent.epoch) {
            return Err(LineageError::BeforeBranch { branch, epoch });
        }
        Ok(())
    }

    /// The points through which the history of a point goes, from its branch down to the trunk.
    fn path_to_trunk(&self, from: BranchPoint) -> Result<Vec<BranchPoint>, LineageError> {
        let mut path = vec![from];
        let mut point = from;
        while point.branch != self.trunk {
            let branch = point.branch;
            let parent = self.parent(branch).ok_or(LineageError::BranchUnknown { branch })?;
            point = BranchPoint { branch: parent.branch, epoch: parent.epoch.min(point.epoch) };
            if path.len() > self.forks.len() {
                // More steps than branches: what another host said runs in a circle.
                return Err(LineageError::BranchUnknown { branch });
            }
            path.push(point);
        }
        Ok(path)
    }
}

/// What a copy lacks whose branch has writes of its own, when it comes back to the branch that is now right.
///
/// `here` is the chronicle of the returning copy, `written_there` what the other branch has written since `common`
/// ([`Lineage::common_epoch`]). Both count: a block that only the returning copy wrote is wrong there too (hard case
/// 9). Holds only if nothing but Sterna has touched the copy since; otherwise it is compared by hash.
pub fn missing_after_branching(
    here: &Chronicle,
    written_there: &LayeredBitmap,
    common: Epoch,
) -> LayeredBitmap {
    let mut missing = here.since(common);
    missing.union_with(written_there);
    missing
}

/// A lineage refused a question or a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineageError {
    /// A branch identity that is taken.
    #[error("open branch {branch:?}: it exists")]
    BranchExists {
        /// The identity.
        branch: BranchId,
    },
    /// A branch that this host has not heard of; joining what the other host knows may help.
    #[error("find branch {branch:?}")]
    BranchUnknown {
        /// The identity.
        branch: BranchId,
    },
    /// More branches than [`FORKS_MAX`].
    #[error("add a branch: {FORKS_MAX} are known already")]
    TooMany,
    /// The parent did not exist yet at that epoch; the branch belongs to the parent's parent.
    #[error("branch off {branch:?} at epoch {epoch}: it began later")]
    BeforeBranch {
        /// The parent.
        branch: BranchId,
        /// The epoch that was asked for.
        epoch: Epoch,
    },
    /// Two lineages of different volumes.
    #[error("join lineage {there:?} into {here:?}: another volume")]
    Foreign {
        /// Ours.
        here: LineageId,
        /// Theirs.
        there: LineageId,
    },
    /// Two hosts know the same branch from different points.
    #[error("join lineages: they disagree where branch {branch:?} begins")]
    Contradiction {
        /// The identity.
        branch: BranchId,
    },
}

impl fmt::Debug for LineageId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Display for LineageId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for BranchId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl fmt::Display for BranchId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", u128::from_be_bytes(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{BlockCount, BlockRange, BlockSize};

    const TRUNK: BranchId = BranchId([0; 16]);

    fn branch(number: u8) -> BranchId {
        BranchId([number; 16])
    }

    fn at(number: u8, epoch: u64) -> BranchPoint {
        BranchPoint { branch: branch(number), epoch: Epoch(epoch) }
    }

    /// The trunk; 1 and 2 leave it after 3 and 8; 3 leaves 1 after 6.
    fn lineage() -> Lineage {
        let mut lineage = Lineage::new(LineageId([7; 16]), TRUNK);
        for (number, from) in [(1, at(0, 3)), (2, at(0, 8)), (3, at(1, 6))] {
            lineage.open_branch(branch(number), from).unwrap();
        }
        lineage
    }

    fn check_common(one: BranchPoint, other: BranchPoint, epoch: u64) {
        let lineage = lineage();
        assert_eq!(lineage.common_epoch(one, other), Ok(Epoch(epoch)));
        assert_eq!(lineage.common_epoch(other, one), Ok(Epoch(epoch)));
    }

    #[test]
    fn on_one_branch_the_earlier_point_is_common() {
        check_common(at(0, 4), at(0, 9), 4);
        check_common(at(3, 20), at(3, 12), 12);
    }

    #[test]
    fn branches_share_history_up_to_where_they_parted() {
        check_common(at(0, 9), at(1, 9), 3);
        check_common(at(1, 9), at(2, 9), 3);
        check_common(at(3, 9), at(1, 9), 6);
        check_common(at(3, 9), at(2, 9), 3);
        check_common(at(3, 9), at(0, 2), 2);
    }

    #[test]
    fn a_copy_from_before_the_parting_shares_only_what_it_has() {
        check_common(at(1, 9), at(0, 1), 1);
        check_common(at(3, 5), at(1, 9), 5);
    }

    #[test]
    fn branches_grow_only_from_what_is_known() {
        let mut lineage = lineage();
        let before = lineage.clone();
        let exists = LineageError::BranchExists { branch: branch(1) };
        assert_eq!(lineage.open_branch(branch(1), at(0, 5)), Err(exists));
        let unknown = LineageError::BranchUnknown { branch: branch(9) };
        assert_eq!(lineage.open_branch(branch(4), at(9, 5)), Err(unknown));
        assert_eq!(lineage.common_epoch(at(9, 1), at(0, 1)), Err(unknown));
        let early = LineageError::BeforeBranch { branch: branch(1), epoch: Epoch(2) };
        assert_eq!(lineage.open_branch(branch(4), at(1, 2)), Err(early));
        assert_eq!(lineage, before);
    }

    #[test]
    fn two_hosts_that_promoted_unseen_by_each_other_learn_of_both_branches() {
        let mut here = Lineage::new(LineageId([7; 16]), TRUNK);
        let mut there = here.clone();
        here.open_branch(branch(1), at(0, 4)).unwrap();
        there.open_branch(branch(2), at(0, 6)).unwrap();
        here.join(&there).unwrap();
        assert_eq!(here.common_epoch(at(1, 9), at(2, 9)), Ok(Epoch(4)));

        let mut liar = Lineage::new(LineageId([7; 16]), TRUNK);
        liar.open_branch(branch(1), at(0, 1)).unwrap();
        let before = here.clone();
        assert_eq!(here.join(&liar), Err(LineageError::Contradiction { branch: branch(1) }));
        let foreign = Lineage::new(LineageId([8; 16]), TRUNK);
        assert!(matches!(here.join(&foreign), Err(LineageError::Foreign { .. })));
        assert_eq!(here, before);
    }

    #[test]
    fn what_a_lineage_tells_in_any_order_makes_the_same_lineage() {
        let lineage = lineage();
        let mut told = lineage.forks().collect::<Vec<_>>();
        told.reverse();
        assert_eq!(Lineage::from_forks(lineage.id(), TRUNK, told), Ok(lineage));
    }

    #[test]
    fn a_peer_that_tells_of_a_circle_an_orphan_or_too_many_branches_is_refused() {
        let tell =
            |forks: Vec<(BranchId, BranchPoint)>| Lineage::from_forks(LineageId([7; 16]), TRUNK, forks);
        let unknown = |number| Err(LineageError::BranchUnknown { branch: branch(number) });
        assert!(tell(vec![(branch(1), at(2, 5)), (branch(2), at(1, 5))]).is_err());
        assert!(tell(vec![(branch(1), at(1, 5))]).is_err());
        assert_eq!(tell(vec![(branch(1), at(9, 5))]), unknown(9));
        assert!(tell(vec![(branch(1), at(0, 5)), (branch(2), at(1, 4))]).is_err());
        assert!(tell(vec![(branch(1), at(0, 5)), (branch(1), at(0, 6))]).is_err());
        let many = (1..=FORKS_MAX as u128 + 1).map(|number| (BranchId(number.to_be_bytes()), at(0, 5)));
        assert_eq!(tell(many.collect()), Err(LineageError::TooMany));
    }

    #[test]
    fn a_copy_that_returns_lacks_what_was_written_on_either_side_since_the_parting() {
        let block = BlockSize::DEFAULT.bytes();
        let mut here = Chronicle::new(BlockSize::DEFAULT, 100 * block, Epoch(1));
        for index in [5, 6, 7] {
            let _ = here.record(index * block, block);
            here.advance();
        }
        let mut written_there = LayeredBitmap::new(BlockCount(100));
        written_there.insert(BlockRange::new(9, 10));

        let missing = missing_after_branching(&here, &written_there, Epoch(2));
        let expected = [BlockRange::new(7, 8), BlockRange::new(9, 10)];
        assert_eq!(
            missing.runs().collect::<Vec<_>>(),
            expected,
            "7, unsent, would survive at the returning host"
        );
    }
}
