//! Selects kept images to delete when there are too many or they occupy too much space.
//!
//! The oldest are deleted first. A needed image is never deleted, but counts towards the limits.

use std::collections::BTreeMap;

use crate::identity::MigrationId;

/// An image that a migration left and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptImage {
    /// The name of its volume.
    pub volume: String,
    /// The migration that left it; later ones have larger numbers.
    pub migration: MigrationId,
    /// The name of its store.
    pub store: String,
    /// The bytes that it occupies in the store.
    pub allocated_bytes: u64,
    /// Whether anything relies on the image.
    pub necessity: Necessity,
}

/// Whether anything relies on a kept image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Necessity {
    /// A later state of its volume is known, and no incremental return uses the image.
    Spare,
    /// The image may be an only copy, existed before Sterna, or serves an incremental return.
    Needed,
}

/// The limits on kept images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionLimits {
    /// The most images of one volume.
    pub images_per_volume_max: usize,
    /// The most bytes of kept images for each store; other stores have no limit.
    pub bytes_per_store_max: BTreeMap<String, u64>,
}

/// Returns the positions of the images to delete, oldest first.
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
