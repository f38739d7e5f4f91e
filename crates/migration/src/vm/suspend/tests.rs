//! Tests of every combination, and of every instant at which a daemon can be killed or a host can lose its power.

use super::*;

const RECORDS: [Record; 4] = [Record::Nothing, Record::Saved, Record::Suspended, Record::Restoring];
const GUESTS: [Guest; 3] = [Guest::Ended, Guest::Held, Guest::Free];
const FILES: [File; 2] = [File::Whole, File::Missing];

#[test]
fn every_combination_has_one_meaning() {
    for (record, guest, file) in RECORDS
        .into_iter()
        .flat_map(|record| GUESTS.map(|guest| (record, guest)))
        .flat_map(|(record, guest)| FILES.map(|file| (record, guest, file)))
    {
        let found = resolve(record, guest, file);
        let context = format!("{record:?} {guest:?} {file:?}: {found:?}");
        assert_eq!(found == Resolution::Ordinary, record == Record::Nothing, "{context}");
        if guest == Guest::Free {
            assert!(matches!(found, Resolution::Ordinary | Resolution::GoesOn), "{context}");
        }
        if found == Resolution::Suspended {
            assert!(guest == Guest::Ended && file == File::Whole, "{context}");
        }
        // The last copy of the memory is never given up.
        if record == Record::Saved && file == File::Missing && guest == Guest::Held {
            assert_eq!(found, Resolution::GoesOn, "{context}");
        }
        assert_eq!(
            found == Resolution::Lost,
            record != Record::Nothing && guest == Guest::Ended && file == File::Missing,
            "{context}"
        );
    }
}

#[test]
fn a_state_that_a_guest_reaches_only_by_running_is_not_held() {
    for state in ["running", "io-error", "shutdown", "suspended", "watchdog", "guest-panicked", "anything"] {
        for record in RECORDS {
            assert_eq!(guest(record, state), Guest::Free, "{record:?} {state}");
        }
    }
    assert_eq!(guest(Record::Saved, "paused"), Guest::Free, "it was resumed and paused again");
    assert_eq!(guest(Record::Saved, "postmigrate"), Guest::Held);
    assert_eq!(guest(Record::Restoring, "postmigrate"), Guest::Free);
    assert_eq!(guest(Record::Restoring, "inmigrate"), Guest::Held);
}

/// QEMU in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Qemu {
    Ended,
    Runs,
    Paused,
    /// It has sent its memory away.
    Sent,
    /// It waits for memory, or has it.
    Loads,
}

/// A VM in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct World {
    record: Record,
    file: File,
    qemu: Qemu,
    is_noted: bool,
    /// Whether the guest has run since the file was written.
    has_run_since: bool,
    disks_are_durable: bool,
}

impl World {
    const RUNS: Self = Self {
        record: Record::Nothing,
        file: File::Missing,
        qemu: Qemu::Runs,
        is_noted: false,
        has_run_since: false,
        disks_are_durable: false,
    };
    const SUSPENDED: Self = Self {
        record: Record::Suspended,
        file: File::Whole,
        qemu: Qemu::Ended,
        is_noted: false,
        has_run_since: false,
        disks_are_durable: true,
    };

    fn save(&mut self, step: SaveStep) {
        match step {
            SaveStep::Note => self.is_noted = true,
            SaveStep::Pause => self.qemu = Qemu::Paused,
            SaveStep::Write => (self.qemu, self.has_run_since) = (Qemu::Sent, false),
            SaveStep::Flush => self.disks_are_durable = true,
            SaveStep::Keep => self.file = File::Whole,
            SaveStep::RecordSaved => self.record = Record::Saved,
            SaveStep::End => self.qemu = Qemu::Ended,
            SaveStep::RecordSuspended => (self.record, self.is_noted) = (Record::Suspended, false),
        }
    }

    fn restore(&mut self, step: RestoreStep) {
        match step {
            RestoreStep::Launch => (self.record, self.qemu) = (Record::Restoring, Qemu::Loads),
            RestoreStep::Load => {}
            RestoreStep::Note => self.is_noted = true,
            RestoreStep::RecordNothing => self.record = Record::Nothing,
            RestoreStep::Run => self.run(),
            RestoreStep::Delete => self.file = File::Missing,
        }
    }

    fn run(&mut self) {
        (self.qemu, self.has_run_since, self.is_noted) = (Qemu::Runs, true, false);
    }

    /// What the next daemon does.
    fn settle(&mut self) {
        let seen = match self.qemu {
            Qemu::Ended => Guest::Ended,
            Qemu::Runs => guest(self.record, "running"),
            Qemu::Paused => guest(self.record, "paused"),
            Qemu::Sent => guest(self.record, "postmigrate"),
            Qemu::Loads => guest(self.record, "inmigrate"),
        };
        match resolve(self.record, seen, self.file) {
            Resolution::Ordinary => self.file = File::Missing,
            Resolution::Suspended => self.record = Record::Suspended,
            Resolution::End => (self.qemu, self.record) = (Qemu::Ended, Record::Suspended),
            Resolution::GoesOn => (self.file, self.record) = (File::Missing, Record::Nothing),
            Resolution::Lost => self.record = Record::Nothing,
        }
        if self.is_noted && matches!(self.qemu, Qemu::Paused | Qemu::Sent | Qemu::Loads) {
            self.run();
        }
    }

    /// Fails with what is wrong with a VM that a daemon has settled.
    fn check(&self, loses_power: bool) -> Result<(), String> {
        let is_suspended = self.record != Record::Nothing;
        if is_suspended && self.qemu != Qemu::Ended {
            return Err(format!("it runs, and its file is valid: {self:?}"));
        }
        if is_suspended && self.has_run_since {
            return Err(format!("its file is valid, and its guest has run since: {self:?}"));
        }
        if is_suspended && (self.file == File::Missing || !self.disks_are_durable) {
            return Err(format!("it cannot be restored: {self:?}"));
        }
        if !is_suspended && self.qemu != Qemu::Runs && !loses_power {
            return Err(format!("it neither runs nor is suspended: {self:?}"));
        }
        Ok(())
    }
}

/// Plays these steps to each instant, interrupts them there, and restarts the daemon up to twice.
fn interrupted<S: Copy>(begin: World, steps: &[S], step: impl Fn(&mut World, S)) -> Result<(), String> {
    for done in 0..=steps.len() {
        for loses_power in [false, true] {
            let mut world = begin;
            steps[..done].iter().for_each(|one| step(&mut world, *one));
            if loses_power {
                world.qemu = Qemu::Ended;
            }
            world.settle();
            world.check(loses_power)?;
            let settled = world;
            world.settle();
            if world != settled {
                return Err(format!("settled twice: {settled:?} {world:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn a_daemon_killed_at_any_instant_leaves_a_guest_that_runs_or_a_file_that_is_whole() {
    interrupted(World::RUNS, &SAVE, World::save).unwrap();
    interrupted(World::SUSPENDED, &RESTORE, World::restore).unwrap();
}

#[test]
fn a_restore_that_was_interrupted_can_be_repeated_until_the_guest_runs() {
    for done in 0..=3 {
        let mut world = World::SUSPENDED;
        RESTORE[..done].iter().for_each(|step| world.restore(*step));
        world.settle();
        assert_eq!((world.record, world.file), (Record::Suspended, File::Whole), "after {done}");
        RESTORE.iter().for_each(|step| world.restore(*step));
        assert_eq!(world.qemu, Qemu::Runs);
    }
}

#[test]
fn the_order_of_the_steps_matters() {
    let swapped = |one: usize, other: usize| {
        let mut steps = SAVE;
        steps.swap(one, other);
        interrupted(World::RUNS, &steps, World::save)
    };
    // Recorded before the disks are durable; ended before it is recorded; paused before it is noted.
    for (one, other) in [(3, 5), (5, 6), (0, 1)] {
        assert!(swapped(one, other).is_err(), "{one} {other}");
    }
    let mut steps = RESTORE;
    steps.swap(3, 4);
    assert!(
        interrupted(World::SUSPENDED, &steps, World::restore).is_err(),
        "it runs before the record is removed"
    );
    let mut steps = RESTORE;
    steps.swap(2, 3);
    assert!(interrupted(World::SUSPENDED, &steps, World::restore).is_err(), "nobody would let it run");
}
