//! Sequences of faults against a VM with two disks: all of them end on one side, with their bytes.

use super::*;

/// A VM with two disks, as its hypervisor and the journal have it.
#[derive(Clone, Debug)]
struct World {
    is_running: bool,
    disks: Vec<SeenDisk>,
    /// Whether the bytes of the disk are in its file, and in its volume's image.
    has_bytes: Vec<(bool, bool)>,
}

impl World {
    fn new(is_adopted: bool) -> Self {
        let over = if is_adopted { Over::Export } else { Over::File };
        let disk = SeenDisk { over, job: Job::None, is_served: is_adopted };
        Self { is_running: true, disks: vec![disk; 2], has_bytes: vec![(!is_adopted, is_adopted); 2] }
    }

    /// Carries a step out; `None`: all is done.
    fn take(&mut self, step: Step) -> Option<()> {
        let is_running = self.is_running;
        let of = |index: usize| index;
        match step {
            Step::Complete(_) => return None,
            Step::Wait => {
                for (disk, (file, image)) in self.disks.iter_mut().zip(&mut self.has_bytes) {
                    match disk.job {
                        Job::Copying => {
                            assert!(disk.is_served, "it copies to or from nothing");
                            (*file, *image, disk.job) = (true, true, Job::CaughtUp);
                        }
                        Job::Foreign => disk.job = Job::None,
                        _ => {}
                    }
                }
            }
            Step::Serve(index) => {
                let disk = &mut self.disks[of(index)];
                assert!(!disk.is_served && disk.over == Over::File);
                disk.is_served = true;
                self.has_bytes[index].1 = false;
            }
            Step::Copy(index) => {
                let disk = &mut self.disks[index];
                assert!(is_running && disk.is_served && disk.job == Job::None);
                disk.job = Job::Copying;
            }
            Step::Pivot(index) => {
                let disk = &mut self.disks[index];
                assert!(is_running && disk.job == Job::CaughtUp);
                disk.job = Job::None;
                disk.over = if disk.over == Over::File { Over::Export } else { Over::File };
            }
            Step::Cancel(index) => self.disks[index].job = Job::None,
            Step::StopServing(index, image) => {
                let disk = &mut self.disks[index];
                assert!(disk.is_served && disk.job == Job::None);
                assert!(disk.over != Over::Export || !is_running, "its disk would be gone");
                if image == Image::Discard {
                    assert!(disk.over == Over::File && self.has_bytes[index].0, "the disk would be lost");
                    self.has_bytes[index].1 = false;
                }
                disk.is_served = false;
            }
            Step::WriteDown(index) => {
                assert!(!is_running && !self.disks[index].is_served && self.has_bytes[index].1);
                self.disks[index].over = Over::File;
                // The image is the file by now.
                self.has_bytes[index] = (true, false);
            }
        }
        Some(())
    }

    /// Its QEMU ends.
    fn shut_off(&mut self) {
        self.is_running = false;
        self.disks.iter_mut().for_each(|disk| disk.job = Job::None);
    }

    fn check(&self, goal: Goal) {
        let over = if goal == Goal::Volumes { Over::Export } else { Over::File };
        let wanted = SeenDisk { over, job: Job::None, is_served: goal == Goal::Volumes };
        assert!(self.disks.iter().all(|disk| *disk == wanted), "{goal:?}: {self:?}");
        for (file, image) in &self.has_bytes {
            assert!(if goal == Goal::Volumes { *image } else { *file }, "{goal:?}: {self:?}");
        }
    }
}

/// Plays a change of sides; what happens at each step comes from `fates`: 0 done, 1 refused, 2 done and the daemon killed, 3 the
/// copies fail, 4 somebody else's job, 5 the VM is shut off.
fn play(goal: Goal, fates: &[u8]) -> Goal {
    let mut world = World::new(goal == Goal::Files);
    let mut copied = Copied::towards(goal);
    for turn in 0..200 {
        // After what goes wrong all goes well.
        match fates.get(turn).copied().unwrap_or(0) {
            1 => {
                let step = copied.next_step(world.is_running, &world.disks);
                if !matches!(step, Step::Complete(_)) {
                    copied.failed(&world.disks);
                    continue;
                }
            }
            3 => world.disks.iter_mut().for_each(|disk| disk.job = Job::None),
            4 if world.is_running && world.disks[1].job == Job::None => world.disks[1].job = Job::Foreign,
            5 => world.shut_off(),
            2 => {
                let step = copied.next_step(world.is_running, &world.disks);
                if world.take(step).is_some() {
                    copied = Copied::towards(copied.goal());
                    continue;
                }
            }
            _ => {}
        }
        let step = copied.next_step(world.is_running, &world.disks);
        if world.take(step).is_none() {
            world.check(copied.goal());
            return copied.goal();
        }
        if let Step::Copy(index) = step {
            copied.copy_begun(index);
        }
    }
    panic!("{goal:?} {fates:?} does not end: {world:?}");
}

#[test]
fn whatever_fails_and_whoever_is_killed_all_disks_end_on_one_side_with_their_bytes() {
    for goal in [Goal::Volumes, Goal::Files] {
        for number in 0..6_u32.pow(8) {
            let fates: Vec<u8> = (0..8).map(|place| (number / 6_u32.pow(place) % 6) as u8).collect();
            play(goal, &fates);
        }
    }
}

#[test]
fn without_trouble_disks_end_where_they_are_to_be() {
    assert_eq!(play(Goal::Volumes, &[]), Goal::Volumes);
    assert_eq!(play(Goal::Files, &[]), Goal::Files);
    assert_eq!(play(Goal::Files, &[5]), Goal::Files);
}

#[test]
fn no_disk_changes_sides_before_all_have_caught_up() {
    let caught_up = SeenDisk { over: Over::File, job: Job::CaughtUp, is_served: true };
    let behind = SeenDisk { job: Job::Copying, ..caught_up };
    let mut copied = Copied::towards(Goal::Volumes);
    assert_eq!(copied.next_step(true, &[caught_up, behind]), Step::Wait);
    assert_eq!(copied.next_step(true, &[caught_up, caught_up]), Step::Pivot(0));
    let over = SeenDisk { over: Over::Export, job: Job::None, is_served: true };
    assert_eq!(copied.next_step(true, &[over, caught_up]), Step::Pivot(1));
}

#[test]
fn a_copy_that_ends_by_itself_turns_the_adoption_back() {
    let served = SeenDisk { over: Over::File, job: Job::None, is_served: true };
    let mut copied = Copied::towards(Goal::Volumes);
    assert_eq!(copied.next_step(true, &[served]), Step::Copy(0));
    copied.copy_begun(0);
    assert_eq!(copied.next_step(true, &[served]), Step::StopServing(0, Image::Discard));
    assert_eq!(copied.goal(), Goal::Files);
}

#[test]
fn what_is_somebody_elses_by_now_is_left_to_them() {
    let gone = SeenDisk { over: Over::Elsewhere, job: Job::None, is_served: true };
    assert_eq!(Copied::towards(Goal::Files).next_step(true, &[gone]), Step::StopServing(0, Image::Keep));
    let foreign = SeenDisk { over: Over::File, job: Job::Foreign, is_served: true };
    assert_eq!(Copied::towards(Goal::Files).next_step(true, &[foreign]), Step::Wait);
}

#[test]
fn failures_are_tried_again_ever_more_slowly() {
    let disk = SeenDisk { over: Over::File, job: Job::None, is_served: false };
    let mut copied = Copied::towards(Goal::Volumes);
    assert_eq!((copied.failed(&[disk]), copied.goal()), (PAUSE_LEAST, Goal::Files));
    assert_eq!((copied.failed(&[disk]), copied.goal()), (PAUSE_LEAST * 2, Goal::Files));
    assert_eq!((0..100).map(|_| copied.failed(&[])).last(), Some(PAUSE_MOST));
}
