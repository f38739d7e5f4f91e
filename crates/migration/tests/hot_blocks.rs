//! Tests how much copying is saved by putting hot blocks off, under Zipf-distributed, uniform and entirely hot loads.

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::strategy::{
    Copied, Copying, CopyingSettings, Distance, HotBlocks, Otherwise, Recording, Round, Strategy,
    VolumeAction, VolumeEvent, WriteId,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1 << 15;
/// The target's rate in blocks a second.
const RATE: u32 = 8192;

#[derive(Clone, Copy, Debug)]
enum Load {
    /// The block of rank r with frequency 1/r.
    Zipf,
    /// Each block equally often.
    Uniform,
    /// Each of the first blocks, up to this number.
    Few(u64),
}

#[derive(Debug)]
struct Seen {
    rounds: Vec<Round>,
    /// The blocks of the round that is copied while the guest is held.
    last: u64,
    blocks: u64,
    /// Blocks that guests first wrote after their copy: a strategy that learns only from writes must copy them twice.
    unforeseen: u64,
    /// Whether it ended with a handover, not by giving up.
    converged: bool,
}

/// Copies a volume block by block, with `per_hundred` writes for each hundred blocks. At most `within` blocks may be left.
fn migrate(load: Load, per_hundred: u64, within: u64, hot: HotBlocks) -> Seen {
    let settings = CopyingSettings {
        block_size: BlockSize::DEFAULT,
        size_bytes: BLOCKS * BLOCK,
        pacing: PacingSettings { depth: 2, chunk_bytes: BLOCK, bytes_per_second: None },
        wait_max: Duration::from_secs(1),
        no_progress_max: Duration::from_secs(300),
    };
    let drain_max = Duration::from_secs_f64(within as f64 / f64::from(RATE));
    let strategy = Strategy::Tracking {
        recording: Recording::Incremental,
        hot,
        distance: Distance::Far,
        drain_max,
        otherwise: Otherwise::Fail,
    };
    let mut copying = Copying::new(settings, strategy);
    let mut random = Random(3);
    let (mut now, mut chunks, mut copied, mut writes, mut due) = (Duration::ZERO, Vec::new(), 0, 0, 0);
    let (mut closed_after, mut given_up, mut synchronised) = (None, false, false);
    let (mut is_copied, mut is_written) = (vec![false; BLOCKS as usize], vec![false; BLOCKS as usize]);
    let mut unforeseen = 0;
    copying.handle_event(now, VolumeEvent::Allocated(ByteRange::new(0, BLOCKS * BLOCK)));
    let mut events = vec![VolumeEvent::AllocationKnown];
    loop {
        while let Some(event) = events.pop() {
            copying.handle_event(now, event);
            while let Some(action) = copying.poll_action() {
                match action {
                    VolumeAction::Copy { chunk, range } => chunks.push((chunk, range)),
                    VolumeAction::FlushTarget { flush } => {
                        events.push(VolumeEvent::TargetFlushed { flush, result: Ok(()) });
                    }
                    VolumeAction::Admit { write, .. } => {
                        events.push(VolumeEvent::SourceWritten { write, result: Ok(()) });
                    }
                    VolumeAction::Converged if closed_after.is_none() => {
                        closed_after = Some(copied);
                        events.push(VolumeEvent::GateCloses);
                    }
                    VolumeAction::Synchronised => synchronised = true,
                    VolumeAction::Failed { .. } => given_up = true,
                    _ => {}
                }
            }
        }
        if given_up || synchronised {
            let rounds = copying.progress(now).rounds;
            let last = closed_after.map_or(0, |before| copied - before);
            return Seen { rounds, last, blocks: copied - BLOCKS, unforeseen, converged: !given_up };
        }
        let (chunk, range) = chunks.remove(0);
        now += Duration::from_secs(1) / RATE;
        copied += range.length / BLOCK;
        is_copied[(range.offset / BLOCK) as usize] = true;
        let result = Ok(Copied { bytes_written: range.length, ..Copied::default() });
        events.push(VolumeEvent::ChunkCopied { chunk, result });
        due += if closed_after.is_none() { per_hundred } else { 0 };
        while due >= 100 {
            due -= 100;
            let block = load.next(&mut random);
            let is_first = !std::mem::replace(&mut is_written[block as usize], true);
            unforeseen += u64::from(is_first && is_copied[block as usize]);
            let range = ByteRange::new(block * BLOCK, BLOCK);
            events.insert(0, VolumeEvent::WriteArrived { write: WriteId(writes), range });
            writes += 1;
        }
    }
}

impl Load {
    fn next(self, random: &mut Random) -> u64 {
        match self {
            Self::Zipf => {
                let uniform = random.below(1 << 32) as f64 / f64::from(u32::MAX);
                // Neighbours in rank are not neighbours on the volume.
                (BLOCKS as f64).powf(uniform) as u64 * 7919 % BLOCKS
            }
            Self::Uniform => random.below(BLOCKS),
            Self::Few(blocks) => random.below(blocks),
        }
    }
}

/// Returns the results with hot blocks put off, and without.
fn compare(load: Load, per_hundred: u64, within: u64) -> (Seen, Seen) {
    let copied = |hot| migrate(load, per_hundred, within, hot);
    (copied(HotBlocks::PutOff), copied(HotBlocks::AsOthers))
}

#[test]
fn of_a_zipf_load_that_needs_many_rounds_they_copy_a_third_less_with_hot_blocks_put_off() {
    for (per_hundred, within) in [(150, 2048), (200, 2048)] {
        let (put_off, as_others) = compare(Load::Zipf, per_hundred, within);
        assert!(put_off.converged && as_others.converged, "{put_off:?} {as_others:?}");
        let part = put_off.blocks as f64 / as_others.blocks as f64;
        assert!(part <= 0.7, "{part}: {put_off:?} {as_others:?}");
        assert!(put_off.rounds.len() < as_others.rounds.len(), "{put_off:?} {as_others:?}");
        assert!(put_off.last <= 2 * within, "{put_off:?}");
    }
}

/// Returns the part of repeated copies that is saved, and the largest possible saving.
fn saved(load: Load, per_hundred: u64, within: u64) -> (f64, f64) {
    let (put_off, as_others) = compare(load, per_hundred, within);
    assert!(put_off.converged && as_others.converged, "{put_off:?} {as_others:?}");
    let part = |blocks: u64| 1.0 - blocks as f64 / as_others.blocks as f64;
    (part(put_off.blocks), part(as_others.unforeseen))
}

#[test]
fn of_a_zipf_load_that_needs_few_rounds_they_copy_a_tenth_less_and_nobody_could_save_a_third() {
    for (per_hundred, within) in [(10, 1024), (20, 1024), (40, 1024), (40, 2048)] {
        let (saved, at_most) = saved(Load::Zipf, per_hundred, within);
        assert!(saved >= 0.1 && at_most < 0.3, "{per_hundred} {within}: {saved} of {at_most}");
    }
    for (per_hundred, within, least) in [(60, 1024, 0.15), (80, 1024, 0.2), (100, 2048, 0.25)] {
        let (saved, at_most) = saved(Load::Zipf, per_hundred, within);
        assert!(saved >= least && at_most < 0.45, "{per_hundred} {within}: {saved} of {at_most}");
    }
}

#[test]
fn of_a_small_hot_part_rounds_copy_less() {
    for (per_hundred, within) in [(80, 512), (150, 1024), (200, 2048)] {
        let (put_off, as_others) = compare(Load::Few(1024), per_hundred, within);
        assert!(put_off.converged && as_others.converged, "{put_off:?} {as_others:?}");
        let part = put_off.blocks as f64 / as_others.blocks as f64;
        assert!(part <= 0.8, "{part}: {put_off:?} {as_others:?}");
    }
}

#[test]
fn of_a_uniform_load_hardly_more_is_copied() {
    for per_hundred in [20, 40, 60, 80] {
        for within in [256, 512, 1024, 2048] {
            let (put_off, as_others) = compare(Load::Uniform, per_hundred, within);
            assert!(put_off.converged && as_others.converged, "{put_off:?} {as_others:?}");
            let part = put_off.blocks as f64 / as_others.blocks as f64;
            assert!(part <= 1.02, "{per_hundred} {within} {part}: {put_off:?} {as_others:?}");
        }
    }
}

#[test]
fn hot_blocks_are_copied_in_the_last_round_but_one_and_not_before() {
    let seen = migrate(Load::Zipf, 150, 2048, HotBlocks::PutOff);
    let cold = seen.rounds.iter().skip(1).take_while(|round| round.put_off > 0);
    let put_off: Vec<_> = cold.map(|round| round.put_off / BLOCK).collect();
    assert!(!put_off.is_empty(), "{seen:?}");
    // Their number grows, and one round copies them all.
    assert!(put_off.windows(2).all(|pair| pair[0] <= pair[1]), "{seen:?}");
    let with_all = &seen.rounds[put_off.len() + 1];
    assert!(with_all.put_off == 0 && with_all.blocks >= *put_off.last().unwrap(), "{seen:?}");
}

#[test]
fn a_guest_that_writes_everywhere_faster_than_is_copied_is_given_up_all_the_same() {
    for load in [Load::Uniform, Load::Few(8192)] {
        let (put_off, as_others) = compare(load, 200, 256);
        assert!(!put_off.converged && !as_others.converged, "{load:?}");
        // Detection takes longer, because rounds that put blocks off do not show convergence, but it is bounded.
        let copied = |seen: &Seen| BLOCKS + seen.blocks;
        assert!(copied(&put_off) <= 2 * copied(&as_others), "{put_off:?} {as_others:?}");
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }
}
