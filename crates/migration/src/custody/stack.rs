//! Which images have bytes in common: a loop device and its file, a partition and its disk, two spellings of an export.
//!
//! ```text
//!   whole   other names of all its bytes                                  a loop device: its file; a mapping: what it maps
//!   below   what it is a part of, or lies in                              a partition: its disk; a file: its file system's device
//! ```
//! Two parts of one disk have no byte in common as far as anybody can tell, and neither have two files of one file system.

use std::collections::BTreeSet;

use super::book::Identity;

/// What an image is above and below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// Other names of all its bytes.
    pub whole: BTreeSet<Identity>,
    /// What it is a part of.
    pub below: BTreeSet<Identity>,
}

impl Stack {
    /// Of an image that is nothing else.
    pub fn of(identity: Identity) -> Self {
        Self { whole: BTreeSet::from([identity]), below: BTreeSet::new() }
    }

    /// It is all of what `other` is.
    pub fn is(&mut self, other: Self) {
        self.whole.extend(other.whole);
        self.below.extend(other.below);
    }

    /// It is a part of `other`.
    pub fn lies_in(&mut self, other: Self) {
        self.below.extend(other.whole);
        self.below.extend(other.below);
    }

    /// Tells whether some bytes may be of both.
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
