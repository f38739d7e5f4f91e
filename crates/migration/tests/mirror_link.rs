//! Tests an asynchronous mirror over a link that is slower than its guest. The guest keeps more than half of the link and waits
//! for at most a second, and the migration ends.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "mirror_link/bench.rs"]
mod bench;

use std::time::Duration;

use bench::{Bench, Pattern, Setting};
use migration::strategy::HotBlocks;

const MIB: u64 = 1 << 20;

fn setting() -> Setting {
    Setting {
        link_bytes_per_second: 12 * MIB,
        round_trip: Duration::from_millis(10),
        volume_bytes: 128 * MIB,
        write_bytes: 4096,
        depth: 8,
        disk_latency: Duration::from_micros(500),
        pattern: Pattern::Random,
        bandwidth: None,
        hot: HotBlocks::PutOff,
    }
}

fn check(setting: &Setting) {
    let seen = Bench::run(setting);
    let share = seen.guest_bytes_per_second / setting.link_bytes_per_second as f64;
    assert!(share >= 0.5, "the guest writes at {share:.2} of the link's rate");
    assert!(seen.held_longest <= Duration::from_millis(1001), "a write was held for {:?}", seen.held_longest);
    let closed_max = Duration::from_millis(500) + setting.round_trip;
    assert!(seen.drained_in <= closed_max, "gates closed for {:?}", seen.drained_in);
    // Twice the time for the volume and the guest's writes meanwhile.
    let alone = setting.volume_bytes as f64 / setting.link_bytes_per_second as f64;
    assert!(seen.took.as_secs_f64() < 8.0 * alone, "it took {:?}, alone {alone:.1} s", seen.took);
}

#[test]
fn a_guest_that_writes_faster_than_the_link_keeps_half_of_it_and_the_migration_ends() {
    check(&setting());
    check(&Setting { pattern: Pattern::Sequential, ..setting() });
    check(&Setting { pattern: Pattern::Hot { bytes: 8 * MIB }, ..setting() });
}

#[test]
fn a_guest_with_large_writes_keeps_half_of_the_link_too() {
    check(&Setting { write_bytes: 65536, depth: 16, ..setting() });
    check(&Setting { write_bytes: MIB as u32, depth: 4, pattern: Pattern::Sequential, ..setting() });
}

#[test]
fn a_long_round_trip_changes_nothing() {
    for milliseconds in [1, 50, 180] {
        check(&Setting { round_trip: Duration::from_millis(milliseconds), ..setting() });
    }
}

#[test]
fn a_guest_that_the_link_carries_easily_is_never_throttled() {
    let setting = Setting { disk_latency: Duration::from_millis(16), ..setting() };
    let seen = Bench::run(&setting);
    assert_eq!((seen.throttles, seen.held_longest), (0, Duration::ZERO));
    assert!(seen.took.as_secs_f64() < 1.5 * 128.0 / 12.0, "it took {:?}", seen.took);
    // Far less than gates may be closed: little patience makes the rest that small.
    assert!(seen.drained_in < Duration::from_millis(60), "gates closed for {:?}", seen.drained_in);
}

#[test]
fn a_bandwidth_limit_of_the_mover_throttles_no_guest() {
    // The guest takes most of the link, and the mover makes the little progress that its limit permits.
    let bandwidth = Some(2 * MIB);
    let setting =
        Setting { bandwidth, disk_latency: Duration::from_millis(4), volume_bytes: 32 * MIB, ..setting() };
    let seen = Bench::run(&setting);
    assert_eq!(seen.throttles, 0);
}

#[test]
fn a_bandwidth_limit_does_not_bind_behind_closed_gates() {
    // A chunk at this rate takes longer than gates may be closed.
    let bandwidth = Some(MIB / 4);
    let setting = Setting {
        bandwidth,
        disk_latency: Duration::from_millis(4),
        volume_bytes: 2 * MIB,
        pattern: Pattern::Hot { bytes: MIB },
        ..setting()
    };
    let seen = Bench::run(&setting);
    assert!(seen.took >= Duration::from_secs(6), "the limit was not kept: {:?}", seen.took);
    assert!(seen.drained_in <= Duration::from_millis(300), "gates closed for {:?}", seen.drained_in);
}

/// Returns the link's bytes besides the volume with hot blocks merged, relative to those without merging.
fn merged(setting: &Setting) -> f64 {
    let [merged, one_by_one] =
        [HotBlocks::PutOff, HotBlocks::AsOthers].map(|hot| Bench::run(&Setting { hot, ..setting.clone() }));
    assert!(merged.drained_in <= Duration::from_millis(500) + setting.round_trip, "{merged:?}");
    assert!(merged.took.as_secs_f64() <= one_by_one.took.as_secs_f64() * 1.02, "{merged:?} {one_by_one:?}");
    let besides = |carried: u64| (carried - setting.volume_bytes) as f64;
    besides(merged.carried) / besides(one_by_one.carried)
}

#[test]
fn what_is_written_again_and_again_is_merged_and_its_writes_cost_the_link_a_third_less() {
    // The guest writes more than the link carries.
    let disk_latency = Duration::from_millis(1);
    let part = merged(&Setting { disk_latency, pattern: Pattern::Zipf, ..setting() });
    assert!(part <= 0.7, "{part} of the bytes are carried");
    // The link suffices, and the guest writes only to a part of the volume.
    for milliseconds in [2, 5] {
        let disk_latency = Duration::from_millis(milliseconds);
        let part = merged(&Setting { disk_latency, pattern: Pattern::Hot { bytes: 8 * MIB }, ..setting() });
        assert!(part <= 0.4, "{part} of the bytes are carried");
    }
}

#[test]
fn of_a_uniform_load_merging_costs_nothing() {
    for milliseconds in [1, 5, 20] {
        let setting = Setting { disk_latency: Duration::from_millis(milliseconds), ..setting() };
        let part = merged(&setting);
        assert!(part <= 1.02, "{part} of the bytes are carried");
    }
}
