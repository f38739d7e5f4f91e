//! What a seed means: workloads, targets, links, and what happens to them.

use std::time::Duration;

use crate::workload::*;

/// How large an evacuation is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// One host, a few workloads.
    Small,
    /// 10,000 VMs of 200 hosts.
    Site,
}

/// Something that happens to the world.
#[derive(Clone, Copy, Debug)]
pub(super) enum Turn {
    Lost(TargetIndex),
    Back(TargetIndex),
    Closed(TargetIndex),
    /// A path has another capacity, as a factor of its first one.
    Capacity(PathIndex, f64),
    Abort,
}

/// One evacuation.
pub(super) struct Story {
    pub(super) setup: Setup,
    /// The true capacity of each path, in bytes a second.
    pub(super) capacities: Vec<f64>,
    /// The highest rate of one transfer.
    pub(super) single: f64,
    /// The probability of a failure, for each transfer and second.
    pub(super) failing: f64,
    /// Transfers of these fail always.
    pub(super) doomed: Option<WorkloadIndex>,
    pub(super) turns: Vec<(Duration, Turn)>,
    /// How long each VM takes to stop, in seconds.
    pub(super) stop_seconds: u64,
    pub(super) seed: u64,
}

/// A sequence of numbers (SplitMix64).
#[derive(Clone)]
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(super) fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    pub(super) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(super) fn unit(&mut self) -> f64 {
        self.below(1 << 32) as f64 / (1u64 << 32) as f64
    }
}

const MIB: u64 = 1 << 20;

impl Story {
    pub(super) fn of(seed: u64, size: Size) -> Self {
        let mut random = Random(seed.wrapping_mul(0x5851_f42d_4c95_7f2d) ^ 0xe7ac);
        let (hosts, targets, workloads) = match size {
            Size::Small => (1, random.between(1, 4), random.between(1, 24)),
            Size::Site => (200, 20, 10_000),
        };
        let is_calm = size == Size::Site || random.chance(40);
        let mut paths = Vec::new();
        let mut capacities = Vec::new();
        let mut path = |random: &mut Random, capacity: u64| {
            let transfers_max = if random.chance(30) { 2 } else { 16 };
            let rate = random.chance(50).then_some(capacity as f64);
            paths.push(Path { rate, transfers_max });
            capacities.push(capacity as f64);
            PathIndex(paths.len() as u32 - 1)
        };
        let outs: Vec<PathIndex> = (0..hosts)
            .map(|_| {
                let capacity = random.between(50, 400) * MIB;
                path(&mut random, capacity)
            })
            .collect();
        let mut ways = Vec::new();
        for _ in 0..targets {
            let capacity = random.between(100, 1000) * MIB;
            let into = path(&mut random, capacity);
            let capacity = random.between(100, 1000) * MIB;
            ways.push((into, path(&mut random, capacity)));
        }
        let is_tight = random.chance(30);
        let room = |random: &mut Random, workloads: u64| match is_tight {
            true => random.between(1, 1 + workloads / 2) * 8 * 1024 * MIB,
            false => workloads * 64 * 1024 * MIB,
        };
        let stores = (0..targets).map(|_| Room { free_bytes: Some(room(&mut random, workloads)) }).collect();
        let all_targets = (0..targets)
            .map(|_| Target {
                state: if random.chance(8) { TargetState::Closed } else { TargetState::Open },
                takes_vms: !random.chance(10),
                memory_free: random.chance(50).then(|| random.between(4, 256) * 1024 * MIB * hosts),
            })
            .collect();
        let levels = random.between(1, 4);
        let list = (0..workloads)
            .map(|number| {
                let out = outs[(number % hosts) as usize];
                workload(&mut random, levels, out, &ways)
            })
            .collect();
        let deadline = random.chance(70).then(|| Duration::from_secs(random.between(30, 600)));
        let stop_before = deadline
            .filter(|_| random.chance(50))
            .map(|deadline| (deadline / 3).min(Duration::from_secs(60)));
        let setup = Setup {
            workloads: list,
            targets: all_targets,
            stores,
            paths,
            terms: Terms { deadline, stop_before },
        };
        let single = if random.chance(50) { random.between(20, 120) * MIB } else { 4096 * MIB } as f64;
        let turns = if is_calm { Vec::new() } else { turns(&mut random, targets, setup.paths.len() as u64) };
        let doomed = (!is_calm && random.chance(20)).then(|| WorkloadIndex(random.below(workloads) as u32));
        Self {
            setup,
            capacities,
            single,
            failing: if is_calm { 0.0 } else { random.unit() * 0.01 },
            doomed,
            turns,
            stop_seconds: random.between(1, 20),
            seed,
        }
    }

    /// Returns whether nothing unforeseen happens.
    pub(super) fn is_calm(&self) -> bool {
        self.turns.is_empty() && self.failing == 0.0
    }
}

fn workload(random: &mut Random, levels: u64, out: PathIndex, ways: &[(PathIndex, PathIndex)]) -> Workload {
    let kind = match random.below(10) {
        0 | 1 => Kind::Volume,
        2 => Kind::StoppedVm,
        _ => Kind::RunningVm { memory_bytes: random.between(1, 8) * 512 * MIB },
    };
    let disk = match random.chance(20) {
        true => random.between(1, 64) * MIB,
        false => random.between(100, 8000) * MIB,
    };
    let mut routes = Vec::new();
    for (number, (into, store)) in ways.iter().enumerate() {
        if ways.len() > 1 && random.chance(15) {
            continue;
        }
        let origin = match random.below(20) {
            0 | 1 => Origin::Standby,
            2 => Origin::KeptImage,
            _ => Origin::Nothing,
        };
        let memory = if let Kind::RunningVm { memory_bytes } = kind { memory_bytes } else { 0 };
        let (sent, room) = if origin == Origin::Nothing { (disk, disk) } else { (disk / 20, 0) };
        let index = number as u32;
        routes.push(Route {
            target: TargetIndex(index),
            store: StoreIndex(index),
            way: Way { out, into: *into, store: *store },
            bytes: sent + memory,
            room_bytes: room,
            origin,
        });
    }
    Workload {
        kind,
        priority: random.below(levels) as u8,
        writes_per_second: if random.chance(50) { random.below(20) * MIB } else { 0 },
        may_post_copy: random.chance(50),
        routes,
    }
}

fn turns(random: &mut Random, targets: u64, paths: u64) -> Vec<(Duration, Turn)> {
    let mut turns = Vec::new();
    for _ in 0..random.below(4) {
        let at = Duration::from_secs(random.below(120));
        let target = TargetIndex(random.below(targets) as u32);
        match random.below(5) {
            0 | 1 => {
                turns.push((at, Turn::Lost(target)));
                if random.chance(60) {
                    turns.push((at + Duration::from_secs(random.between(1, 90)), Turn::Back(target)));
                }
            }
            2 => turns.push((at, Turn::Closed(target))),
            3 => turns
                .push((at, Turn::Capacity(PathIndex(random.below(paths) as u32), 0.1 + 2.0 * random.unit()))),
            _ if random.chance(40) => turns.push((at, Turn::Abort)),
            _ => {}
        }
    }
    turns.sort_by_key(|(at, _)| *at);
    turns
}
