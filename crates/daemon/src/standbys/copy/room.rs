//! How much of a store standbys may fill: they leave a reserve to others.

use lane::capture::BLOCK_BYTES;

/// The reserve of a large store is this part of it.
const RESERVE_PART: u64 = 50;
const RESERVE_BYTES_MIN: u64 = 1 << 30;
/// The reserve of a small store is at most this part of it.
const RESERVE_PART_MAX: u64 = 10;

/// Returns how many blocks a store can give to standbys, of which so many bytes are free, and which has so many. Below zero: the
/// reserve lacks so many.
pub(super) fn room(free: u64, total: u64) -> i64 {
    let reserve = (total / RESERVE_PART).max(RESERVE_BYTES_MIN).min(total / RESERVE_PART_MAX);
    let blocks = |bytes: u64| i64::try_from(bytes / BLOCK_BYTES).unwrap_or(i64::MAX);
    blocks(free) - blocks(reserve)
}

/// Returns whether so many bytes more leave the reserve of a store alone, and a quarter of that besides: points do not give way to
/// tests.
pub(super) fn has_room(free: u64, total: u64, bytes: u64) -> bool {
    let margin = (room(0, total).unsigned_abs() / 4) as i64;
    room(free, total) - margin >= i64::try_from(bytes.div_ceil(BLOCK_BYTES)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_is_a_part_of_the_store_and_not_most_of_a_small_one() {
        let gib = 1_u64 << 30;
        let blocks = |gib: i64| gib << 18;
        assert_eq!(room(50 * gib, 1000 * gib), blocks(30));
        assert_eq!(room(5 * gib, 20 * gib), blocks(4));
        assert_eq!(room(gib, 5 * gib), blocks(1) / 2);
        assert_eq!(room(0, 20 * gib), -blocks(1));
        assert_eq!(room(0, 0), 0);
    }

    #[test]
    fn a_test_leaves_more_than_the_reserve() {
        let gib = 1_u64 << 30;
        assert!(has_room(4 * gib, 20 * gib, 2 * gib));
        assert!(!has_room(4 * gib, 20 * gib, 3 * gib));
        assert!(!has_room(gib, 20 * gib, 0), "only the reserve is left");
    }
}
