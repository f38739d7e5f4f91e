//! What comes next when a domain moves: decided by what is seen, each time anew. So a command that was killed is given again, and goes
//! on; nothing is recorded.
//!
//! ```text
//!   disks first:   disks move ──► memory moves ──────────────────► domain released here ─► forwarding ends
//!   memory first:  attached ──► memory moves ──► disks move ───►        "                        "
//! ```

use super::error::Obstacle;

/// The state of a domain at one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DomainState {
    /// libvirt does not know it.
    Absent,
    /// It is defined, and does not run.
    Off,
    Running,
    /// Its processors are stopped: by a user, by an error, or by a migration under way.
    Paused,
}

impl DomainState {
    fn has_process(self) -> bool {
        matches!(self, Self::Running | Self::Paused)
    }
}

/// The place of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// This host has it.
    Here {
        /// Whether it is attached at the other host.
        is_attached: bool,
    },
    /// The other host has it, and this one forwards its clients.
    Forwarded,
    /// The other host has it, and it is attached here.
    Borrowed,
    /// The other host has it, and this one has forgotten it.
    There,
}

/// The domain, as both hosts show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) here: DomainState,
    pub(super) there: DomainState,
    /// The volumes that are its disks, by name.
    pub(super) volumes: Vec<(String, Place)>,
    /// A migration of its volumes that is under way.
    pub(super) migration: Option<String>,
    /// The VM that the domain is for the daemon here, if it is adopted.
    pub(super) adopted: Option<String>,
}

/// One step of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A migration of volumes that was begun earlier is waited for.
    Follow(String),
    /// Volumes are attached at the other host.
    Attach(Vec<String>),
    /// Volumes move to the other host, together.
    MoveDisks {
        volumes: Vec<String>,
        /// Whether the domain is here: its clients are forwarded afterwards, new ones, too, and this host remembers where its disks are.
        serve_here: bool,
    },
    /// libvirt moves the memory and the definition; or, of a domain that is shut off, the definition.
    MoveDomain { is_running: bool },
    /// The daemon here forgets the VM.
    Release(String),
    /// This host ends the forwarding of volumes.
    Forget(Vec<String>),
    /// This host gives back volumes of the other one that are attached here.
    GiveBack(Vec<String>),
    /// Everything is at the other host.
    Done,
}

/// Returns the next step.
///
/// # Errors
/// [`Obstacle`]: a user has to decide.
pub(super) fn next(seen: &Seen, memory_first: bool) -> Result<Step, Obstacle> {
    use DomainState::{Absent, Off, Paused, Running};
    if let Some(migration) = &seen.migration {
        return Ok(Step::Follow(migration.clone()));
    }
    match (seen.here, seen.there) {
        (Absent, Absent) => Err(Obstacle::NoDomain),
        (Running, Running) => Err(Obstacle::RunsTwice),
        (Running, Paused) => Err(Obstacle::UnderWay),
        (Paused, Running) => Err(Obstacle::LeftPaused),
        (Paused, Paused) => Err(Obstacle::PausedTwice),
        (Paused, Absent | Off) => Err(Obstacle::Paused),
        (Off, Paused) => Err(Obstacle::PausedThere),
        (Off, Off) => Err(Obstacle::DefinedTwice),
        (Running, Absent | Off) => Ok(to_leave(seen, memory_first, true)),
        (Off, Absent) => Ok(to_leave(seen, false, false)),
        (Absent | Off, Running) | (Absent, Paused | Off) => Ok(to_follow(seen)),
    }
}

/// The domain is here.
fn to_leave(seen: &Seen, memory_first: bool, is_running: bool) -> Step {
    let here = |wanted: fn(bool) -> bool| {
        seen.names(|place| matches!(place, Place::Here { is_attached } if wanted(*is_attached)))
    };
    let (all, unattached) = (here(|_| true), here(|is_attached| !is_attached));
    match (memory_first, all.is_empty()) {
        (true, _) if !unattached.is_empty() => Step::Attach(unattached),
        (false, false) => Step::MoveDisks { volumes: all, serve_here: true },
        (true, _) | (false, true) => Step::MoveDomain { is_running },
    }
}

/// The domain is at the other host.
fn to_follow(seen: &Seen) -> Step {
    let here = seen.names(|place| matches!(place, Place::Here { .. }));
    if !here.is_empty() {
        return Step::MoveDisks { volumes: here, serve_here: false };
    }
    if let Some(vm) = &seen.adopted {
        return Step::Release(vm.clone());
    }
    let forwarded = seen.names(|place| *place == Place::Forwarded);
    let borrowed = seen.names(|place| *place == Place::Borrowed);
    match (forwarded.is_empty(), borrowed.is_empty()) {
        (false, _) => Step::Forget(forwarded),
        (true, false) => Step::GiveBack(borrowed),
        (true, true) => Step::Done,
    }
}

impl Seen {
    fn names(&self, is_wanted: impl Fn(&Place) -> bool) -> Vec<String> {
        self.volumes.iter().filter(|(_, place)| is_wanted(place)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns whether the domain is at the other host, and not here.
    pub(super) fn has_left(&self) -> bool {
        use DomainState::{Absent, Off, Running};
        self.here == Absent && self.there != Absent || (self.here, self.there) == (Off, Running)
    }

    /// Returns whether the domain is here as it was before its move, running or shut off.
    pub(super) fn has_stayed(&self, was_running: bool) -> bool {
        use DomainState::{Absent, Off, Running};
        match was_running {
            true => self.here == Running && !self.there.has_process(),
            false => self.here == Off && self.there == Absent,
        }
    }

    /// Does a step in mind: what is seen if it succeeds.
    pub(super) fn after(mut self, step: &Step) -> Self {
        let of = |names: &[String], name: &String| names.contains(name);
        match step {
            Step::Follow(_) => self.migration = None,
            Step::Attach(names) => {
                self.place(|name, _| of(names, name).then_some(Place::Here { is_attached: true }));
            }
            Step::MoveDisks { volumes, .. } => {
                self.place(|name, _| of(volumes, name).then_some(Place::Forwarded));
            }
            Step::MoveDomain { is_running } => {
                self.there = if *is_running { DomainState::Running } else { DomainState::Off };
                self.here = DomainState::Absent;
            }
            Step::Release(_) => self.adopted = None,
            Step::Forget(names) | Step::GiveBack(names) => {
                self.place(|name, _| of(names, name).then_some(Place::There));
            }
            Step::Done => {}
        }
        self
    }

    fn place(&mut self, new: impl Fn(&String, &Place) -> Option<Place>) {
        for (name, place) in &mut self.volumes {
            if let Some(new) = new(name, place) {
                *place = new;
            }
        }
    }
}

/// Returns all steps from here on, if each succeeds.
///
/// # Errors
/// Those of [`next`].
pub(super) fn plan(seen: &Seen, memory_first: bool) -> Result<Vec<Step>, Obstacle> {
    let (mut seen, mut steps) = (seen.clone(), Vec::new());
    loop {
        let step = next(&seen, memory_first)?;
        if step == Step::Done {
            return Ok(steps);
        }
        seen = seen.after(&step);
        steps.push(step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [DomainState; 4] =
        [DomainState::Absent, DomainState::Off, DomainState::Running, DomainState::Paused];

    fn places() -> [Place; 5] {
        let here = |is_attached| Place::Here { is_attached };
        [here(false), here(true), Place::Forwarded, Place::Borrowed, Place::There]
    }

    /// Everything that can be seen of a domain with two disks.
    fn all_sights() -> Vec<Seen> {
        let mut sights = Vec::new();
        for (here, there) in STATES.iter().flat_map(|here| STATES.iter().map(move |there| (*here, *there))) {
            for (first, second) in
                places().iter().flat_map(|first| places().map(|second| (first.clone(), second)))
            {
                for (migration, adopted) in [(None, None), (None, Some("d")), (Some("m1"), Some("d"))] {
                    sights.push(Seen {
                        here,
                        there,
                        volumes: vec![("v".to_owned(), first.clone()), ("w".to_owned(), second.clone())],
                        migration: migration.map(str::to_owned),
                        adopted: adopted.map(str::to_owned),
                    });
                }
            }
        }
        sights
    }

    #[test]
    fn from_whatever_is_seen_it_ends_with_everything_there_or_asks_a_user() {
        for (seen, memory_first) in
            all_sights().into_iter().flat_map(|seen| [(seen.clone(), false), (seen, true)])
        {
            let Ok(steps) = plan(&seen, memory_first) else { continue };
            assert!(steps.len() <= 7, "{seen:?}: {steps:?}");
            let end = steps.iter().fold(seen.clone(), Seen::after);
            assert!(end.volumes.iter().all(|(_, place)| *place == Place::There), "{seen:?}: {steps:?}");
            assert!(!end.here.has_process() && end.there != DomainState::Absent, "{seen:?}: {steps:?}");
            assert_eq!((end.migration, end.adopted), (None, None));
        }
    }

    #[test]
    fn no_step_is_decided_while_two_processes_are_seen() {
        for seen in all_sights().into_iter().filter(|seen| seen.migration.is_none()) {
            if seen.here.has_process() && seen.there.has_process() {
                assert!(next(&seen, false).is_err() && next(&seen, true).is_err(), "{seen:?}");
            }
        }
    }

    #[test]
    fn a_domain_moves_only_where_its_disks_are_within_reach() {
        for (seen, memory_first) in
            all_sights().into_iter().flat_map(|seen| [(seen.clone(), false), (seen, true)])
        {
            if let Ok(Step::MoveDomain { is_running }) = next(&seen, memory_first) {
                assert!(!seen.there.has_process(), "{seen:?}");
                let is_in_reach = |place: &Place| !matches!(place, Place::Here { is_attached } if !(is_running && *is_attached));
                assert!(seen.volumes.iter().all(|(_, place)| is_in_reach(place)), "{seen:?}");
            }
        }
    }

    #[test]
    fn whether_a_domain_has_moved_is_said_of_one_host_only() {
        for seen in all_sights() {
            for was_running in [true, false] {
                assert!(!(seen.has_left() && seen.has_stayed(was_running)), "{seen:?}");
            }
            assert!(!(seen.has_left() && seen.here.has_process()), "{seen:?}");
        }
    }

    #[test]
    fn disks_that_a_domain_uses_here_are_served_here_until_it_has_left() {
        for seen in all_sights() {
            if let Ok(Step::MoveDisks { serve_here, .. }) = next(&seen, false) {
                assert_eq!(
                    serve_here,
                    seen.here.has_process() || seen.there == DomainState::Absent,
                    "{seen:?}"
                );
            }
            if let Ok(Step::Forget(_) | Step::Release(_) | Step::GiveBack(_)) = next(&seen, false) {
                assert!(!seen.here.has_process(), "{seen:?}");
            }
        }
    }
}
