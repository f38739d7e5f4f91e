//! Which of the images that migrations kept are given up, because there are too many of them or they take too much.
//!
//! The oldest go first. One that is needed never goes, and counts all the same: limits bound what piles up, not what
//! somebody relies on.

use std::collections::BTreeMap;

use crate::identity::MigrationId;

/// An image that a migration kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptImage {
    /// Name of its volume.
    pub volume: String,
    /// The migration that left it: a later one has a larger number.
    pub migration: MigrationId,
    /// Name of the store that it is in.
    pub store: String,
    /// Bytes that it takes there.
    pub allocated_bytes: u64,
    /// Whether anything relies on it.
    pub necessity: Necessity,
}

/// Whether anything relies on an image that was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Necessity {
    /// A later state of its volume is known, and no way home begins with it.
    Spare,
    /// It may be the only copy of something, or was somebody's, or a way home begins with it.
    Needed,
}

/// How much is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionLimits {
    /// Images of one volume.
    pub images_per_volume_max: usize,
    /// Bytes of all kept images by store; what is not named has no limit.
    pub bytes_per_store_max: BTreeMap<String, u64>,
}

/// Tells which of the images go, by their positions, oldest first.
pub fn surplus(kept: &[KeptImage], limits: &RetentionLimits) -> Vec<usize> {
    let mut oldest_first: Vec<usize> = (0..kept.len()).collect();
    oldest_first.sort_by_key(|position| kept[*position].migration);
    let mut count_by_volume = BTreeMap::<&str, usize>::new();
    let mut bytes_by_store = BTreeMap::<&str, u64>::new();
    for image in kept {
        *count_by_volume.entry(&image.volume).or_default() += 1;
        let bytes = bytes_by_store.entry(&image.store).or_default();
        *bytes = bytes.saturating_add(image.allocated_bytes);
    }
    let mut gone = Vec::new();
    for position in oldest_first {
        let image = &kept[position];
        if image.necessity == Necessity::Needed {
            continue;
        }
        let (Some(count), Some(bytes)) =
            (count_by_volume.get_mut(image.volume.as_str()), bytes_by_store.get_mut(image.store.as_str()))
        else {
            continue;
        };
        let bytes_max = limits.bytes_per_store_max.get(&image.store).copied().unwrap_or(u64::MAX);
        if *count > limits.images_per_volume_max || *bytes > bytes_max {
            *count -= 1;
            *bytes = bytes.saturating_sub(image.allocated_bytes);
            gone.push(position);
        }
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::{KeptImage, Necessity, RetentionLimits, surplus};
    use crate::identity::MigrationId;

    /// Image number `migration` of a volume, of 10 bytes.
    fn image(volume: &str, migration: u64, necessity: Necessity) -> KeptImage {
        KeptImage {
            volume: volume.to_owned(),
            migration: MigrationId(migration),
            store: "a".to_owned(),
            allocated_bytes: 10,
            necessity,
        }
    }

    fn check(kept: &[KeptImage], images_max: usize, bytes_max: u64, expected: &[u64]) {
        let limits = RetentionLimits {
            images_per_volume_max: images_max,
            bytes_per_store_max: [("a".to_owned(), bytes_max)].into(),
        };
        let gone: Vec<u64> = surplus(kept, &limits).into_iter().map(|at| kept[at].migration.0).collect();
        assert_eq!(gone, expected);
    }

    #[test]
    fn the_oldest_go_first_until_there_are_few_enough() {
        let kept = [5, 1, 3, 2].map(|migration| image("v", migration, Necessity::Spare));
        check(&kept, 4, 100, &[]);
        check(&kept, 2, 100, &[1, 2]);
        check(&kept, 4, 25, &[1, 2]);
        check(&kept, 0, 0, &[1, 2, 3, 5]);
    }

    #[test]
    fn a_volume_is_not_thinned_for_another_ones_number_but_for_the_space_of_both() {
        let kept = [
            image("v", 1, Necessity::Spare),
            image("w", 2, Necessity::Spare),
            image("w", 3, Necessity::Spare),
        ];
        check(&kept, 1, 100, &[2]);
        check(&kept, 9, 20, &[1]);
    }

    #[test]
    fn what_is_needed_counts_and_stays() {
        let kept = [
            image("v", 1, Necessity::Needed),
            image("v", 2, Necessity::Spare),
            image("v", 3, Necessity::Needed),
        ];
        check(&kept, 1, 100, &[2]);
        check(&kept, 0, 0, &[2]);
    }
}
