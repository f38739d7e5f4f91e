//! Tests copying in rounds: what a round copies, and the convergence check.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::time::Duration;

use chronicle::{BlockSize, ByteRange};
use migration::PacingSettings;
use migration::journal::FailureCode;
use migration::strategy::{
    ChunkId, Copied, Copying, CopyingSettings, Distance, FlushId, HotBlocks, Otherwise, Recording, Route,
    Strategy, VolumeAction, VolumeEvent, WriteId,
};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 4096;
/// The target's rate in blocks a second.
const RATE: u64 = 8192;
/// The permitted rest: this many blocks at that rate.
const WITHIN: u64 = 256;

/// A volume that is copied at a steady rate, block by block, while a guest writes.
struct Scene {
    copying: Copying,
    now: Duration,
    chunks: Vec<(ChunkId, ByteRange)>,
    copied: Vec<u64>,
    next_write: u64,
    mirrored: u64,
    converged: bool,
    synchronised: bool,
    failed: Option<(FailureCode, String)>,
}

impl Scene {
    fn new(recording: Recording) -> Self {
        Self::with(recording, HotBlocks::PutOff)
    }

    fn with(recording: Recording, hot: HotBlocks) -> Self {
        Self::or(recording, hot, Otherwise::Fail)
    }

    fn or(recording: Recording, hot: HotBlocks, otherwise: Otherwise) -> Self {
        let drain_max = Duration::from_secs_f64(WITHIN as f64 / RATE as f64);
        let settings = CopyingSettings {
            block_size: BlockSize::new(4096).unwrap(),
            size_bytes: BLOCKS * BLOCK,
            pacing: PacingSettings { depth: 2, chunk_bytes: BLOCK, bytes_per_second: None },
            wait_max: Duration::from_secs(1),
            no_progress_max: Duration::from_secs(300),
        };
        let mut scene = Self {
            copying: Copying::new(
                settings,
                Strategy::Tracking { recording, hot, distance: Distance::Far, drain_max, otherwise },
            ),
            now: Duration::ZERO,
            chunks: Vec::new(),
            copied: vec![0; BLOCKS as usize],
            next_write: 0,
            mirrored: 0,
            converged: false,
            synchronised: false,
            failed: None,
        };
        scene.event(VolumeEvent::Allocated(ByteRange::new(0, BLOCKS * BLOCK)));
        scene.event(VolumeEvent::AllocationKnown);
        scene
    }

    fn event(&mut self, event: VolumeEvent) {
        self.copying.handle_event(self.now, event);
        while let Some(action) = self.copying.poll_action() {
            match action {
                VolumeAction::Copy { chunk, range } => self.chunks.push((chunk, range)),
                VolumeAction::FlushTarget { flush } => self.flushed(flush),
                VolumeAction::Admit { write, route } => {
                    if route != Route::SourceOnly {
                        assert_eq!(self.copying.tally().rounds_given_up, 1, "rounds mirror nothing");
                        self.mirrored += 1;
                        self.event(VolumeEvent::TargetWritten { write, result: Ok(()) });
                    }
                    self.event(VolumeEvent::SourceWritten { write, result: Ok(()) });
                }
                VolumeAction::Complete { .. } => {}
                VolumeAction::Converged => self.converged = true,
                VolumeAction::Synchronised => (self.converged, self.synchronised) = (true, true),
                VolumeAction::Behind => (self.converged, self.synchronised) = (false, false),
                VolumeAction::Failed { code, detail } => self.failed = Some((code, detail)),
                other => panic!("{other:?}"),
            }
        }
    }

    fn flushed(&mut self, flush: FlushId) {
        self.event(VolumeEvent::TargetFlushed { flush, result: Ok(()) });
    }

    fn write(&mut self, block: u64) {
        let write = WriteId(self.next_write);
        self.next_write += 1;
        self.event(VolumeEvent::WriteArrived { write, range: ByteRange::new(block * BLOCK, BLOCK) });
    }

    fn copy_one(&mut self) -> bool {
        if self.chunks.is_empty() {
            return false;
        }
        self.now += Duration::from_secs(1) / u32::try_from(RATE).unwrap();
        let (chunk, range) = self.chunks.remove(0);
        self.copied[(range.offset / BLOCK) as usize] += 1;
        let result = Ok(Copied { bytes_written: range.length, ..Copied::default() });
        self.event(VolumeEvent::ChunkCopied { chunk, result });
        true
    }

    /// Copies until the rest is small enough or the copying fails. For each hundred blocks copied the guest writes
    /// `per_hundred` of `working_set` blocks.
    fn copy_while_guests_write(&mut self, per_hundred: u64, working_set: u64) {
        let mut random = Random(7);
        let mut due = 0;
        for _ in 0..100 * BLOCKS {
            if self.converged || self.failed.is_some() || !self.copy_one() {
                return;
            }
            due += per_hundred;
            while due >= 100 {
                due -= 100;
                let block = random.below(working_set);
                self.write(block);
            }
        }
        panic!("it neither converges nor gives up");
    }

    fn rounds(&mut self) -> Vec<migration::strategy::Round> {
        let now = self.now;
        self.copying.progress(now).rounds
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

#[test]
fn an_idle_volume_takes_one_round_and_is_equal_once_the_gate_closes() {
    let mut scene = Scene::new(Recording::Incremental);
    scene.copy_while_guests_write(0, BLOCKS);
    assert!(scene.converged && !scene.synchronised, "the gate is open");
    let rounds = scene.rounds();
    assert_eq!(rounds.len(), 1);
    assert_eq!((rounds[0].blocks, rounds[0].bytes, rounds[0].dirtied), (BLOCKS, BLOCKS * BLOCK, 0));
    scene.event(VolumeEvent::GateCloses);
    assert!(scene.synchronised);
}

#[test]
fn rounds_become_smaller_until_what_is_left_fits_behind_the_gate() {
    let mut scene = Scene::new(Recording::Incremental);
    scene.copy_while_guests_write(30, BLOCKS);
    assert!(scene.converged, "{:?}", scene.failed);
    let rounds = scene.rounds();
    assert!(rounds.len() > 1, "{rounds:?}");
    assert!(rounds.windows(2).all(|pair| pair[1].dirtied < pair[0].dirtied), "{rounds:?}");
    assert!(rounds.last().unwrap().dirtied <= WITHIN * BLOCK, "{rounds:?}");
    scene.event(VolumeEvent::GateCloses);
    let mut last_round = 0;
    while scene.copy_one() {
        last_round += 1;
    }
    assert!(scene.synchronised);
    assert!(last_round <= 2 * WITHIN, "{last_round} blocks were left");
    assert_eq!(scene.copying.costs().bytes_mirrored, 0);
}

#[test]
fn a_guest_that_writes_faster_than_is_copied_is_given_up_with_the_numbers() {
    let mut scene = Scene::new(Recording::Incremental);
    scene.copy_while_guests_write(200, BLOCKS);
    let (code, detail) = scene.failed.clone().unwrap();
    assert_eq!(code, FailureCode::NotConverging);
    for said in ["MiB a second", "--strategy mirror", "--max-downtime", "ms are allowed"] {
        assert!(detail.contains(said), "{said}: {detail}");
    }
    assert!(scene.rounds().len() >= 3, "one burst is no reason");
}

#[test]
fn rounds_that_do_not_converge_are_followed_by_a_mirror_of_what_is_left() {
    let far =
        Otherwise::AsynchronousMirror { buffer_bytes_max: 1 << 20, drain_max: Duration::from_millis(30) };
    for (otherwise, hot) in [Otherwise::Mirror, far]
        .into_iter()
        .flat_map(|otherwise| [(otherwise, HotBlocks::AsOthers), (otherwise, HotBlocks::PutOff)])
    {
        let mut scene = Scene::or(Recording::Incremental, hot, otherwise);
        // Nothing of a mirror is slow here, so guests write at any rate.
        scene.copy_while_guests_write(200, BLOCKS);
        assert!(scene.converged, "{otherwise:?} {hot:?}: {:?}", scene.failed);
        assert_eq!(scene.copying.tally().rounds_given_up, 1);
        assert!(scene.mirrored > 0, "{otherwise:?} {hot:?}");
        let rounds = scene.rounds().len();
        assert!(rounds >= 3, "what the rounds did is still reported: {rounds}");
        scene.event(VolumeEvent::GateCloses);
        while scene.copy_one() {}
        assert!(scene.synchronised, "{otherwise:?} {hot:?}");
        assert_eq!(scene.copying.blocks_remaining(), 0);
    }
}

#[test]
fn a_guest_that_rewrites_a_little_all_the_time_is_handed_over_with_that() {
    let mut scene = Scene::new(Recording::Incremental);
    scene.copy_while_guests_write(200, WITHIN / 2);
    assert!(scene.converged, "{:?}", scene.failed);
}

#[test]
fn a_burst_of_writes_in_one_round_is_no_reason_to_give_up() {
    let mut scene = Scene::new(Recording::Incremental);
    // The second round has fewer writes than the first, the third writes everything, and then there are none.
    for round in 0..3 {
        while scene.rounds().len() == round {
            if scene.chunks.len() == 1 {
                let written = [BLOCKS / 2, BLOCKS / 4, BLOCKS][round];
                (0..written).for_each(|block| scene.write(block));
            }
            assert!(scene.copy_one(), "{:?}", scene.failed);
        }
    }
    scene.copy_while_guests_write(0, BLOCKS);
    assert!(scene.converged, "{:?}", scene.failed);
}

#[test]
fn what_is_written_ahead_of_the_cursor_adds_nothing_unless_all_is_recorded() {
    let dirtied = |recording| {
        let mut scene = Scene::new(recording);
        let mut random = Random(1);
        while scene.rounds().is_empty() {
            let block = random.below(BLOCKS);
            scene.write(block);
            scene.copy_one();
        }
        scene.rounds()[0].dirtied as f64
    };
    let (incremental, full) = (dirtied(Recording::Incremental), dirtied(Recording::Full));
    let share = incremental / full;
    assert!((0.4..0.75).contains(&share), "{share} of {full}");
}

#[test]
fn a_block_that_is_written_while_it_is_copied_is_copied_in_the_next_round() {
    let mut scene = Scene::new(Recording::Incremental);
    let busy = scene.chunks[0].1.offset / BLOCK;
    scene.write(busy);
    scene.copy_while_guests_write(0, BLOCKS);
    assert_eq!(scene.copied[busy as usize], 1, "one block more does not need a round of its own");
    scene.event(VolumeEvent::GateCloses);
    assert!(!scene.synchronised);
    while scene.copy_one() {}
    assert_eq!((scene.copied[busy as usize], scene.synchronised), (2, true));
}

#[test]
fn a_round_reads_no_block_before_the_writes_of_the_round_before_have_ended() {
    let mut scene = Scene::new(Recording::Incremental);
    scene.copy_while_guests_write(0, BLOCKS);
    // Writes that the source has not completed yet: more than the permitted rest.
    for block in 0..4 * WITHIN {
        let write = WriteId(1_000_000 + block);
        let range = ByteRange::new(block * BLOCK, BLOCK);
        scene.copying.handle_event(scene.now, VolumeEvent::WriteArrived { write, range });
    }
    let copies = std::iter::from_fn(|| scene.copying.poll_action());
    assert_eq!(copies.filter(|action| matches!(action, VolumeAction::Copy { .. })).count(), 0);
    scene.event(VolumeEvent::SourceWritten { write: WriteId(1_000_000), result: Ok(()) });
    assert_eq!(scene.chunks.iter().map(|(_, range)| range.offset).collect::<Vec<_>>(), [0]);
}
