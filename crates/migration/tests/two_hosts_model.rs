//! Two hosts with a journal each, over a link that delays, reorders, repeats and loses messages. Either host crashes at any
//! point, even during a commit. At most one host ever serves the volumes, and in the end exactly one does.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "two_hosts_model/books.rs"]
mod books;
#[path = "two_hosts_model/hosts.rs"]
mod hosts;
#[path = "two_hosts_model/random.rs"]
mod random;

use hosts::{Bringing, Giving, Guest, Message};
use migration::journal::{Outcome, Stage};
use migration::source::Moves;
use proptest::prelude::*;
use random::Random;

/// The steps with faults, and those without at the end, in which everything must complete.
const FAULTY_STEPS: u32 = 600;
const CALM_STEPS: u32 = 6000;

struct Model {
    source: Giving,
    target: Bringing,
    link: Vec<Message>,
    random: Random,
    moves: Moves,
    /// Crashes of either host, for the statistics of a run.
    crashes: (u32, u32),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    On,
    Off,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let volumes = 1 + random.below(3) as u8;
        let moves = match random.below(4) {
            0 => Moves::Volumes,
            1 => Moves::VolumesAfterHooks,
            _ => Moves::Vm,
        };
        Self {
            source: Giving::new(volumes, moves),
            target: Bringing::new(volumes, moves),
            moves,
            link: Vec::new(),
            random,
            crashes: (0, 0),
        }
    }

    fn run(&mut self) {
        let faulty = self.random.below(u64::from(FAULTY_STEPS)) as u32;
        for step in 0..faulty + CALM_STEPS {
            let faults = if step < faulty { Faults::On } else { Faults::Off };
            if step == faulty {
                self.source.restart_if_down(&mut self.link);
                self.target.restart_if_down(&mut self.link);
                // The volume stays synchronised from now on.
                self.source.synchronise();
                self.target.link_back(&mut self.link);
            }
            self.step(faults);
            self.check();
            if faults == Faults::Off && self.is_at_rest() {
                self.check_end();
                return;
            }
        }
        panic!(
            "it does not end: source {:?} {:?}, target {:?} {:?}, link {:?}",
            self.source.stage(),
            self.source.machine(),
            self.target.stage(),
            self.target.machine(),
            self.link
        );
    }

    fn step(&mut self, faults: Faults) {
        let flushes = self.target.flushes;
        self.happen(faults);
        if self.target.flushes > flushes {
            self.target.flushed = self.source.version();
        }
    }

    fn happen(&mut self, faults: Faults) {
        let on = faults == Faults::On;
        let random = &mut self.random;
        if on && random.below(80) == 0 {
            if random.below(2) == 0 {
                self.source.crash(random);
                self.crashes.0 += 1;
            } else {
                self.target.crash(random);
                self.crashes.1 += 1;
            }
            return;
        }
        match random.below(10) {
            0..=3 => self.carry(faults),
            4..=6 => {
                let random = &mut self.random;
                self.source.act(random, on, &mut self.link);
            }
            _ => {
                let random = &mut self.random;
                self.target.act(random, on, &mut self.link);
            }
        }
    }

    /// Delivers, repeats or loses one of the messages on the link.
    fn carry(&mut self, faults: Faults) {
        if self.link.is_empty() {
            return;
        }
        let index = self.random.below(self.link.len() as u64) as usize;
        let message = self.link.swap_remove(index);
        // Messages are carried as bytes.
        let bytes = migration::wire::encode(&message.0).unwrap();
        assert_eq!(migration::wire::decode(&bytes).as_ref(), Ok(&message.0));
        match self.random.below(8) {
            0 if faults == Faults::On => return,
            1 if faults == Faults::On => self.link.push(message.clone()),
            _ => {}
        }
        self.source.receive(&message, &mut self.link);
        self.target.receive(&message, &mut self.link);
    }

    fn check(&self) {
        let (source, target) = (self.source.serves(), self.target.serves());
        assert!(!(source && target), "both hosts let writes through");
        if self.moves == Moves::Vm {
            let run = (self.source.guest, self.target.guest);
            assert_ne!(run, (Guest::Runs, Guest::Runs), "the VM runs at both hosts");
            assert_ne!(
                run,
                (Guest::Runs, Guest::Broken),
                "it goes on at the source from before what it wrote at the target"
            );
        }
        let (given, taken) = (self.source.stage(), self.target.stage());
        match given {
            Stage::Copying | Stage::HandedBack => {}
            Stage::Released(_) => assert!(!source, "released, and served from the source's stores"),
            Stage::Ended(Outcome::Moved { .. }) => {
                assert!(!source);
                assert!(
                    matches!(taken, Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. })),
                    "the source has ended, and the target is {taken:?}"
                );
            }
            _ => {}
        }
        if let Stage::Owned(_) | Stage::Ended(Outcome::Moved { .. }) = taken {
            let released = matches!(given, Stage::Released(_) | Stage::Ended(Outcome::Moved { .. }));
            assert!(released, "the target owns what the source has not released: {given:?}");
            assert_eq!(self.target.flushed, self.source.version(), "the target promised an earlier state");
        }
        // At most one journal has the volume, and its generation counts the handovers.
        let owners = usize::from(self.source.owns()) + usize::from(self.target.owns());
        assert!(owners <= 1, "both journals say that their host owns the volumes");
        if self.target.image_is_gone() {
            assert!(
                matches!(taken, Stage::Discarding(_) | Stage::Ended(_))
                    && !matches!(taken, Stage::Ended(Outcome::Moved { .. })),
                "an image is gone that the journal counts upon: {taken:?}"
            );
            assert!(!matches!(given, Stage::Released(_)), "released, and the target's image is gone");
        }
    }

    fn is_at_rest(&self) -> bool {
        let ended = |stage: Stage| matches!(stage, Stage::Ended(_));
        ended(self.source.stage()) && ended(self.target.stage()) && self.link.is_empty()
    }

    fn check_end(&self) {
        assert!(self.source.serves() != self.target.serves(), "exactly one host serves the volumes");
        let (given, taken) = (self.source.stage(), self.target.stage());
        let (Stage::Ended(given), Stage::Ended(taken)) = (given, taken) else { panic!("not ended") };
        let moved = |outcome: &Outcome| matches!(outcome, Outcome::Moved { .. });
        assert_eq!(moved(&given), moved(&taken), "{given:?} at the source, {taken:?} at the target");
        assert_eq!(moved(&given), self.target.serves());
        if self.moves == Moves::Vm {
            let there = moved(&given);
            assert_eq!(self.source.guest == Guest::Runs, !there, "the VM is where its volumes are");
            assert_eq!(self.target.guest != Guest::Stands, there, "the VM is where its volumes are");
        }
        self.source.check_books(&given);
        self.target.check_books(&taken);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn at_most_one_host_serves_whatever_breaks_and_exactly_one_in_the_end(seed in any::<u64>()) {
        Model::new(seed).run();
    }
}
