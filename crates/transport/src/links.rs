//! Pairs the links of two hosts by their speed, as \[VM51\] describes ("Using Multiple NICs"): the fastest with the fastest, and
//! one link with several while it has capacity to spare. At least one connection is made for each pair.

use crate::peer::Link;

/// Two links with a connection between them, as indices into the lists given to [`pair`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Index of the dialling host's link.
    pub source: usize,
    /// Index of the called host's link.
    pub target: usize,
}

/// Pairs links by speed, the fastest first.
///
/// A link takes partners from the other side until their speeds use up its capacity. When one side is used up, each link left
/// over is paired with the other side's fastest link. That adds little, but no configured link stays idle, and any of them may
/// fail. A link of unknown speed counts as the slowest known one, so links without any speeds are paired one to one. The order of
/// equally fast links is kept.
#[must_use]
pub fn pair(source: &[Link], target: &[Link]) -> Vec<Pair> {
    let slowest = source.iter().chain(target).filter_map(|link| link.speed_bits_per_second).min();
    let mut sources = fastest_first(source, slowest);
    let mut targets = fastest_first(target, slowest);
    let (Some(&(fastest_source, _)), Some(&(fastest_target, _))) = (sources.first(), targets.first()) else {
        return Vec::new();
    };
    let mut pairs = Vec::with_capacity(source.len() + target.len());
    let (mut next_source, mut next_target) = (0, 0);
    while let (Some((source, source_left)), Some((target, target_left))) =
        (sources.get_mut(next_source), targets.get_mut(next_target))
    {
        pairs.push(Pair { source: *source, target: *target });
        let shared = (*source_left).min(*target_left);
        *source_left -= shared;
        *target_left -= shared;
        next_source += usize::from(*source_left == 0);
        next_target += usize::from(*target_left == 0);
    }
    // The first link left over may have a pair already.
    let unused_sources = sources.iter().skip(next_source).map(|&(source, _)| source);
    let unused_sources = unused_sources.filter(|source| pairs.iter().all(|pair| pair.source != *source));
    let unused_targets = targets.iter().skip(next_target).map(|&(target, _)| target);
    let unused_targets = unused_targets.filter(|target| pairs.iter().all(|pair| pair.target != *target));
    let spare: Vec<Pair> = unused_sources
        .map(|source| Pair { source, target: fastest_target })
        .chain(unused_targets.map(|target| Pair { source: fastest_source, target }))
        .collect();
    pairs.extend(spare);
    pairs
}

/// Returns each link's index and speed. A speed is never zero, so each pairing uses up capacity.
fn fastest_first(links: &[Link], slowest: Option<u64>) -> Vec<(usize, u64)> {
    let speed = |link: &Link| link.speed_bits_per_second.or(slowest).unwrap_or(1).max(1);
    let mut speeds: Vec<(usize, u64)> = links.iter().map(speed).enumerate().collect();
    speeds.sort_by_key(|&(_, speed)| std::cmp::Reverse(speed));
    speeds
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Pair, pair};
    use crate::peer::Link;

    const GIGABIT: u64 = 1_000_000_000;

    fn links(speeds: &[u64]) -> Vec<Link> {
        let link = |speed: &u64| Link { speed_bits_per_second: Some(speed * GIGABIT), ..Link::new("x:1") };
        speeds.iter().map(link).collect()
    }

    fn check(source: &[u64], target: &[u64], expected: &[(usize, usize)]) {
        let pairs = pair(&links(source), &links(target));
        let expected: Vec<Pair> = expected.iter().map(|&(source, target)| Pair { source, target }).collect();
        assert_eq!(pairs, expected, "{source:?} with {target:?}");
    }

    #[test]
    fn two_of_ten_with_ten_and_two_of_one_make_three_pairs() {
        check(&[10, 10], &[10, 1, 1], &[(0, 0), (1, 1), (1, 2)]);
        check(&[10, 10], &[1, 10, 1], &[(0, 1), (1, 0), (1, 2)]);
        check(&[10, 1, 1], &[10, 10], &[(0, 0), (1, 1), (2, 1)]);
    }

    #[test]
    fn one_fast_link_serves_several_slow_ones() {
        check(&[25], &[10, 10], &[(0, 0), (0, 1)]);
        check(&[10, 10], &[25], &[(0, 0), (1, 0)]);
        check(&[10, 10], &[15, 5], &[(0, 0), (1, 0), (1, 1)]);
    }

    #[test]
    fn what_is_left_over_is_paired_with_the_fastest() {
        check(&[10, 1, 1], &[10], &[(0, 0), (1, 0), (2, 0)]);
        check(&[1], &[10, 1], &[(0, 0), (0, 1)]);
    }

    #[test]
    fn links_of_unknown_speed_are_paired_one_to_one() {
        let unknown = [Link::new("a:1"), Link::new("b:1")];
        assert_eq!(pair(&unknown, &unknown), [Pair { source: 0, target: 0 }, Pair { source: 1, target: 1 }]);
        assert_eq!(pair(&unknown, &[]), []);
        let mixed = pair(&unknown, &links(&[1, 10]));
        assert_eq!(
            mixed,
            [Pair { source: 0, target: 1 }, Pair { source: 1, target: 1 }, Pair { source: 0, target: 0 }]
        );
    }

    proptest! {
        #[test]
        fn every_link_is_used_and_no_pair_is_made_twice(
            source in proptest::collection::vec(0u64..50, 1..8),
            target in proptest::collection::vec(0u64..50, 1..8),
        ) {
            let pairs = pair(&links(&source), &links(&target));
            for place in 0..source.len() {
                prop_assert!(pairs.iter().any(|pair| pair.source == place));
            }
            for place in 0..target.len() {
                prop_assert!(pairs.iter().any(|pair| pair.target == place));
            }
            for (place, one) in pairs.iter().enumerate() {
                prop_assert!(!pairs[place + 1..].contains(one));
            }
            prop_assert!(pairs.len() < source.len() + target.len());
        }
    }
}
