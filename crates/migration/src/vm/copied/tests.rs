//! Sequences of faults for a VM with two disks: each ends with both disks, and their bytes, on one side.

use super::*;

/// A VM with two disks, as its hypervisor and the journal see it.
#[derive(Clone, Debug)]
struct World {
    domain: Domain,
    disks: Vec<SeenDisk>,
    /// Whether the disk's bytes are in its file, and in its volume's image.
    has_bytes: Vec<(bool, bool)>,
}

impl World {
    fn new(is_adopted: bool) -> Self {
        let over = if is_adopted { Over::Export } else { Over::File };
        let disk = SeenDisk { volume: volume_of(is_adopted), ..seen(over) };
        Self { domain: Domain::Runs, disks: vec![disk; 2], has_bytes: vec![(!is_adopted, is_adopted); 2] }
    }

    fn take(&mut self, step: Step) -> Option<()> {
        let is_running = self.domain == Domain::Runs;
        match step {
            Step::Complete(_) => return None,
            Step::Wait => {
                for (disk, (file, image)) in self.disks.iter_mut().zip(&mut self.has_bytes) {
                    match disk.job {
                        Job::Copying => {
                            assert!(disk.volume == Volume::Here, "it copies to or from nothing");
                            (*file, *image, disk.job) = (true, true, Job::CaughtUp);
                        }
                        Job::Foreign => disk.job = Job::None,
                        _ => {}
                    }
                }
            }
            Step::Serve(index) => {
                let disk = &mut self.disks[index];
                assert!(disk.volume == Volume::Absent && disk.over == Over::File);
                disk.volume = Volume::Here;
                self.has_bytes[index].1 = false;
            }
            Step::Copy(index) => {
                let disk = &mut self.disks[index];
                assert!(is_running && disk.volume == Volume::Here && disk.job == Job::None);
                assert!(disk.copy == CopyMade::No, "half a copy of before is there");
                disk.job = Job::Copying;
                if disk.over == Over::Export {
                    (disk.copy, self.has_bytes[index].0) = (CopyMade::Unused, false);
                }
            }
            Step::Pivot(index) => {
                let disk = &mut self.disks[index];
                assert!(is_running && disk.job == Job::CaughtUp);
                disk.job = Job::None;
                disk.over = if disk.over == Over::File { Over::Export } else { Over::File };
                disk.next = disk.over;
                if disk.copy == CopyMade::Unused {
                    disk.copy = CopyMade::Pivoted;
                }
            }
            Step::Cancel(index) => self.disks[index].job = Job::None,
            Step::ClearFile(index, image) => {
                let disk = &mut self.disks[index];
                assert!(disk.over != Over::File && disk.job == Job::None, "a disk is over it");
                assert!(disk.copy != CopyMade::No, "nobody has made a copy there");
                assert!(image == Image::Keep || disk.copy == CopyMade::Unused, "it may be the disk");
                (disk.copy, self.has_bytes[index].0) = (CopyMade::No, false);
            }
            Step::StopServing(index, image) => {
                let disk = &mut self.disks[index];
                assert!(disk.volume == Volume::Here && disk.job == Job::None);
                assert!(disk.over != Over::Export || !is_running, "its disk would be gone");
                if image == Image::Discard {
                    assert!(disk.over == Over::File && self.has_bytes[index].0, "the disk would be lost");
                    self.has_bytes[index].1 = false;
                }
                let is_given = image == Image::Keep && disk.over == Over::Export;
                disk.volume = if is_given { Volume::GivenBack } else { Volume::Absent };
            }
            Step::WriteDown(index) => {
                let disk = &mut self.disks[index];
                assert!(!is_running && disk.volume == Volume::GivenBack && self.has_bytes[index].1);
                (disk.over, disk.next, disk.volume) = (Over::File, Over::File, Volume::Absent);
                // The image has become the file.
                self.has_bytes[index] = (true, false);
            }
        }
        Some(())
    }

    fn shut_off(&mut self) {
        self.domain = Domain::Off;
        self.disks.iter_mut().for_each(|disk| disk.job = Job::None);
    }

    fn check(&self, goal: Goal) {
        let over = if goal == Goal::Volumes { Over::Export } else { Over::File };
        let volume = volume_of(goal == Goal::Volumes);
        let is_right = |disk: &SeenDisk| {
            let is_half = disk.over != Over::File && disk.copy != CopyMade::No;
            disk.over == over && disk.job == Job::None && disk.volume == volume && !is_half
        };
        assert!(self.disks.iter().all(is_right), "{goal:?}: {self:?}");
        for (file, image) in &self.has_bytes {
            assert!(if goal == Goal::Volumes { *image } else { *file }, "{goal:?}: {self:?}");
        }
    }
}

/// Simulates a change of sides. `fates` chooses what happens at each step: 0 done, 1 refused, 2 done and the daemon killed, 3
/// the copies fail, 4 a foreign job, 5 the VM is shut off.
fn play(goal: Goal, fates: &[u8]) -> Goal {
    let mut world = World::new(goal == Goal::Files);
    let mut copied = Copied::towards(goal);
    for turn in 0..200 {
        // Every step after the last fate succeeds.
        match fates.get(turn).copied().unwrap_or(0) {
            1 => {
                let step = copied.next_step(world.domain, &world.disks);
                if !matches!(step, Step::Complete(_)) {
                    copied.failed(world.domain, &world.disks);
                    continue;
                }
            }
            3 => world.disks.iter_mut().for_each(|disk| disk.job = Job::None),
            4 if world.domain == Domain::Runs && world.disks[1].job == Job::None => {
                world.disks[1].job = Job::Foreign;
            }
            5 => world.shut_off(),
            2 => {
                let step = copied.next_step(world.domain, &world.disks);
                if world.take(step).is_some() {
                    copied = Copied::towards(copied.goal());
                    continue;
                }
            }
            _ => {}
        }
        let step = copied.next_step(world.domain, &world.disks);
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
    let caught_up = SeenDisk { job: Job::CaughtUp, ..served(Over::File) };
    let behind = SeenDisk { job: Job::Copying, ..caught_up };
    let mut copied = Copied::towards(Goal::Volumes);
    assert_eq!(copied.next_step(Domain::Runs, &[caught_up, behind]), Step::Wait);
    assert_eq!(copied.next_step(Domain::Runs, &[caught_up, caught_up]), Step::Pivot(0));
    assert_eq!(copied.next_step(Domain::Runs, &[served(Over::Export), caught_up]), Step::Pivot(1));
}

#[test]
fn a_copy_that_ends_by_itself_turns_the_adoption_back() {
    let mut copied = Copied::towards(Goal::Volumes);
    assert_eq!(copied.next_step(Domain::Runs, &[served(Over::File)]), Step::Copy(0));
    copied.copy_begun(0);
    let next = copied.next_step(Domain::Runs, &[served(Over::File)]);
    assert_eq!((next, copied.goal()), (Step::StopServing(0, Image::Discard), Goal::Files));
}

#[test]
fn what_is_somebody_elses_by_now_is_left_to_them() {
    let step = |disk: SeenDisk| Copied::towards(Goal::Files).next_step(Domain::Runs, &[disk]);
    assert_eq!(step(served(Over::Elsewhere)), Step::StopServing(0, Image::Keep));
    assert_eq!(step(SeenDisk { job: Job::Foreign, ..served(Over::File) }), Step::Wait);
}

#[test]
fn on_what_is_unknown_or_stands_on_a_volume_nothing_is_touched() {
    let export = served(Over::Export);
    let away = SeenDisk { volume: Volume::Remote, ..export };
    let lost = SeenDisk { volume: Volume::Absent, ..export };
    let cases = [
        (Domain::Off, served(Over::Above), Obstacle::Above(0)),
        (Domain::Runs, served(Over::Above), Obstacle::Above(0)),
        (Domain::Runs, SeenDisk { next: Over::Above, ..export }, Obstacle::Above(0)),
        (Domain::Runs, SeenDisk { next: Over::Unknown, ..export }, Obstacle::DiskUnknown(0)),
        (Domain::Saved, export, Obstacle::Saved),
        (Domain::Off, away, Obstacle::Remote(0)),
    ];
    for (domain, disk, obstacle) in cases {
        let mut copied = Copied::towards(Goal::Files);
        assert_eq!(copied.next_step(domain, &[disk]), Step::Complete(Goal::Volumes), "{disk:?}");
        assert_eq!(copied.obstacle(), Some(obstacle));
        // If a disk has changed sides already, there is no way back: it waits, and names the reason.
        let done = SeenDisk { volume: Volume::Absent, ..served(Over::File) };
        let mut copied = Copied::towards(Goal::Files);
        assert_eq!(copied.next_step(domain, &[disk, done]), Step::Wait, "{disk:?}");
    }
    let unknown = [served(Over::Unknown)];
    for goal in [Goal::Volumes, Goal::Files] {
        for domain in [Domain::Runs, Domain::Off, Domain::Saved] {
            assert_eq!(Copied::towards(goal).next_step(domain, &unknown), Step::Wait, "{domain:?}");
        }
    }
    assert_eq!(obstacle_to_release(Domain::Runs, &unknown), Some(Obstacle::DiskUnknown(0)));
    for goal in [Goal::Volumes, Goal::Files] {
        for over in [Over::File, Over::Export, Over::Above, Over::Elsewhere, Over::Gone, Over::Unknown] {
            let mut copied = Copied::towards(goal);
            assert_eq!(copied.next_step(Domain::Unknown, &[served(over)]), Step::Wait, "{over:?}");
            assert_eq!(copied.obstacle(), Some(Obstacle::StateUnknown));
        }
    }
    assert_eq!(obstacle_to_release(Domain::Off, &[lost]), Some(Obstacle::NoVolume(0)));
    assert_eq!(obstacle_to_release(Domain::Runs, &[away]), None);
}

#[test]
fn only_a_copy_that_no_disk_was_ever_over_is_deleted() {
    for copy in [CopyMade::No, CopyMade::Unused, CopyMade::Pivoted] {
        for over in [Over::File, Over::Export, Over::Above, Over::Elsewhere, Over::Gone, Over::Unknown] {
            for domain in [Domain::Runs, Domain::Off, Domain::Saved, Domain::Gone, Domain::Unknown] {
                for goal in [Goal::Volumes, Goal::Files] {
                    let disk = SeenDisk { copy, ..served(over) };
                    let step = Copied::towards(goal).next_step(domain, &[disk]);
                    let discards = step == Step::ClearFile(0, Image::Discard);
                    let may = copy == CopyMade::Unused && matches!(over, Over::Export | Over::Gone);
                    assert!(!discards || may, "{domain:?} {disk:?}");
                    let keeps = step == Step::ClearFile(0, Image::Keep);
                    assert!(!keeps || copy == CopyMade::Pivoted && over == Over::Export, "{disk:?}");
                }
            }
        }
    }
}

#[test]
fn a_volume_that_a_disk_is_over_at_its_next_start_is_not_removed() {
    let disk = SeenDisk { next: Over::Export, ..served(Over::File) };
    assert_eq!(Copied::towards(Goal::Files).next_step(Domain::Runs, &[disk]), Step::WriteDown(0));
}

#[test]
fn a_removal_that_fails_leaves_the_disk_as_it_was() {
    for domain in [Domain::Off, Domain::Runs] {
        let disk = [served(Over::Export)];
        let mut copied = Copied::towards(Goal::Files);
        assert!(!matches!(copied.next_step(domain, &disk), Step::Complete(_)));
        copied.failed(domain, &disk);
        assert_eq!(copied.next_step(domain, &disk), Step::Complete(Goal::Volumes));
    }
}

#[test]
fn failures_are_tried_again_ever_more_slowly() {
    let disk = seen(Over::File);
    let mut copied = Copied::towards(Goal::Volumes);
    assert_eq!((copied.failed(Domain::Runs, &[disk]), copied.goal()), (PAUSE_LEAST, Goal::Files));
    assert_eq!((copied.failed(Domain::Runs, &[disk]), copied.goal()), (PAUSE_LEAST * 2, Goal::Files));
    assert_eq!((0..100).map(|_| copied.failed(Domain::Runs, &[])).last(), Some(PAUSE_MOST));
}

fn seen(over: Over) -> SeenDisk {
    SeenDisk { over, next: over, job: Job::None, volume: Volume::Absent, copy: CopyMade::No }
}

fn served(over: Over) -> SeenDisk {
    SeenDisk { volume: Volume::Here, ..seen(over) }
}

fn volume_of(is_served: bool) -> Volume {
    if is_served { Volume::Here } else { Volume::Absent }
}
