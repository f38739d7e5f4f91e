//! Spreads the cuts of a host's groups over the interval, so that they do not flush and send in the same second (case 27).

use std::time::Duration;

/// Returns when the first cut of a group is due: the group at `position`, from 0, of the host's `count` groups.
///
/// Groups with equal intervals are cut at equal distances. `count` of 0 counts as 1.
pub fn first_cut(every: Duration, position: u32, count: u32) -> Duration {
    let count = count.max(1);
    every + every / count * (position % count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_of_thirty_groups_are_a_thirtieth_of_the_interval_apart() {
        let every = Duration::from_secs(30);
        let mut cuts: Vec<_> = (0..30).map(|position| first_cut(every, position, 30)).collect();
        cuts.dedup();
        assert_eq!(cuts.len(), 30);
        assert!(cuts.windows(2).all(|two| two[1] - two[0] == Duration::from_secs(1)));
        assert!(cuts.iter().all(|cut| *cut >= every && *cut < 2 * every));
        assert_eq!(first_cut(every, 7, 0), every);
    }
}
