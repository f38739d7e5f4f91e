//! Images that share bytes: a loop device and its file, a partition and its disk, two spellings of an export.
//!
//! ```text
//!   whole   other names of all its bytes                                  a loop device: its file; a mapping: what it maps
//!   below   what it is a part of, or lies in                              a partition: its disk; a file: its file system's device
//! ```
//! Two parts of one disk are assumed to share no byte, and so are two files of one file system.

use std::collections::BTreeSet;

use super::book::Identity;

/// The images that share bytes with an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Other names of the same bytes, all of them.
    pub whole: BTreeSet<Identity>,
    /// The images of which it is a part.
    pub below: BTreeSet<Identity>,
}

impl Stack {
    /// Returns the stack of an image that shares no bytes.
    pub fn of(identity: Identity) -> Self {
        Self { whole: BTreeSet::from([identity]), below: BTreeSet::new() }
    }

    /// Adds that it has exactly the bytes of `other`.
    pub fn is(&mut self, other: Self) {
        self.whole.extend(other.whole);
        self.below.extend(other.below);
    }

    /// Adds that it is a part of `other`.
    pub fn lies_in(&mut self, other: Self) {
        self.below.extend(other.whole);
        self.below.extend(other.below);
    }

    /// Returns whether both may share bytes.
    pub fn overlaps(&self, other: &Self) -> bool {
        let is_same = !self.whole.is_disjoint(&other.whole);
        let is_part = !self.whole.is_disjoint(&other.below) || !self.below.is_disjoint(&other.whole);
        is_same || is_part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(number: u64) -> Stack {
        Stack::of(Identity::Device(number))
    }

    #[test]
    fn what_is_the_same_or_a_part_overlaps_and_two_parts_do_not() {
        let disk = device(1);
        let part = |number| {
            let mut part = device(number);
            part.lies_in(disk.clone());
            part
        };
        let mut file = Stack::of(Identity::File { device: 2, inode: 7 });
        file.lies_in(part(2));
        let mut over_file = device(9);
        over_file.is(file.clone());
        for (one, other) in [(&disk, &part(2)), (&file, &disk), (&file, &part(2)), (&file, &over_file)] {
            assert!(one.overlaps(other) && other.overlaps(one), "{one:?} {other:?}");
        }
        assert!(over_file.overlaps(&disk));
        assert!(!part(2).overlaps(&part(3)));
        assert!(!over_file.overlaps(&part(3)));
    }
}
