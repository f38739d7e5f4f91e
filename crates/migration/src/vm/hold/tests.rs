//! Tries every interleaving of hypervisor, journal and kills for a guest, up to a depth.

use super::*;

const STEP: Duration = Duration::from_millis(50);

/// A guest, its note, and the daemon, which may be killed at any point.
struct World {
    hold: Hold,
    now: Duration,
    is_noted: bool,
    is_paused: bool,
    memory: Memory,
    is_told: bool,
    /// Whether a disk fails, which stops the guest as soon as it runs; and how often the guest was resumed.
    disk_fails: bool,
    let_run: u32,
    /// Whether the guest was to be paused, and to run again.
    is_over: bool,
}

impl World {
    fn new() -> Self {
        Self {
            hold: Hold::free(),
            now: Duration::ZERO,
            is_noted: false,
            is_paused: false,
            memory: Memory::Still,
            is_told: false,
            disk_fails: false,
            let_run: 0,
            is_over: false,
        }
    }

    fn tell(&mut self, event: Event) {
        self.hold.handle_event(self.now, event);
    }

    /// Carries out an action with one of these fates: 0 done, 1 refused, 2 the daemon is killed before it, 3 after it.
    fn act(&mut self, fate: u8) {
        let Some(action) = self.hold.poll_action() else {
            self.now += STEP;
            let (until, _) = self.hold.poll_timeout().unwrap_or((self.now, ""));
            self.now = self.now.max(until);
            return self.hold.handle_timeout(self.now);
        };
        if fate == 2 {
            return self.restart();
        }
        let refused = Event::Refused("no".to_owned());
        let is_done = fate != 1;
        let event = match action {
            Action::Note(_) => {
                self.is_noted |= is_done;
                Some(if is_done { Event::Noted } else { Event::NotNoted })
            }
            Action::MayPause => {
                self.is_paused = is_done;
                self.memory = if is_done { Memory::Moving } else { Memory::Still };
                None
            }
            Action::Look if is_done => {
                let running = if self.is_paused { Running::No } else { Running::Yes };
                Some(Event::Seen(Seen { running, memory: self.memory, is_over_nothing: false }))
            }
            Action::Abandon if is_done => {
                self.memory = Memory::Still;
                Some(Event::Done)
            }
            Action::Continue if is_done => {
                self.is_paused = self.disk_fails;
                self.let_run += 1;
                Some(Event::Done)
            }
            Action::Look | Action::Abandon | Action::Continue => Some(refused),
            Action::Forget => {
                assert!(!self.is_paused, "forgotten while it is paused");
                self.is_noted = false;
                Some(Event::Forgotten)
            }
            Action::Tell(_) | Action::MustNotRun => {
                self.is_told = true;
                None
            }
        };
        assert!(!self.is_paused || self.is_noted, "paused without a note");
        if fate == 3 {
            return self.restart();
        }
        if let Some(event) = event {
            self.tell(event);
        }
    }

    /// A killed daemon knows only what is durable.
    fn restart(&mut self) {
        self.hold = if self.is_noted { Hold::found(Reason::Resume) } else { Hold::free() };
        self.is_over = true;
        self.tell(Event::LetRun);
    }
}

#[test]
fn whatever_is_refused_and_whenever_the_daemon_is_killed_a_guest_that_we_paused_runs_in_the_end() {
    const DEPTH: u32 = 8;
    for number in 0..4_u32.pow(DEPTH) {
        for over_at in 0..DEPTH {
            let mut world = World::new();
            world.tell(Event::Hold(Reason::Move));
            for turn in 0..DEPTH + 40 {
                if turn == over_at {
                    world.is_over = true;
                    world.tell(Event::LetRun);
                }
                let fate = if turn < DEPTH { (number >> (2 * turn) & 3) as u8 } else { 0 };
                world.act(fate);
            }
            assert!(
                world.is_over && !world.is_paused && !world.is_noted && world.hold.is_free(),
                "{number} {over_at}"
            );
        }
    }
}

fn held() -> World {
    let mut world = World::new();
    world.tell(Event::Hold(Reason::Adopt));
    (0..3).for_each(|_| world.act(0));
    world.memory = Memory::Still;
    world
}

fn seen(running: Running, memory: Memory) -> Event {
    Event::Seen(Seen { running, memory, is_over_nothing: false })
}

#[test]
fn an_hour_of_refusals_ends_in_a_guest_that_runs_and_is_told_once() {
    let mut world = held();
    world.tell(Event::LetRun);
    let mut told = 0;
    while world.now < Duration::from_secs(3600) {
        world.act(1);
        told += u32::from(std::mem::take(&mut world.is_told));
    }
    assert_eq!((world.is_paused, told), (true, 1));
    (0..10).for_each(|_| world.act(0));
    assert!(!world.is_paused && !world.is_noted);
}

#[test]
fn one_whose_disk_stops_it_again_is_let_run_now_and_then_and_runs_when_the_disk_works() {
    let mut world = held();
    world.disk_fails = true;
    world.tell(Event::LetRun);
    while world.now < Duration::from_secs(600) {
        world.act(0);
    }
    assert!(world.is_paused && world.is_told && world.is_noted);
    // Six times a second at first, later every five seconds.
    assert!((100..300).contains(&world.let_run), "{}", world.let_run);
    world.disk_fails = false;
    (0..10).for_each(|_| world.act(0));
    assert!(!world.is_paused && !world.is_noted);
}

#[test]
fn one_that_may_run_at_its_target_is_never_let_run_here() {
    let mut world = held();
    world.tell(Event::LetRun);
    assert_eq!(world.hold.poll_action(), Some(Action::Look));
    world.tell(seen(Running::No, Memory::Ahead));
    let actions: Vec<_> = std::iter::from_fn(|| world.hold.poll_action()).collect();
    assert_eq!(actions, [Action::MustNotRun, Action::Forget]);
}

#[test]
fn one_over_nothing_stays_paused_until_it_has_its_disk() {
    let mut world = held();
    world.tell(Event::LetRun);
    assert_eq!(world.hold.poll_action(), Some(Action::Look));
    world.tell(Event::Seen(Seen { running: Running::No, memory: Memory::Still, is_over_nothing: true }));
    assert_eq!(world.hold.poll_action(), None);
    (0..10).for_each(|_| world.act(0));
    assert!(!world.is_paused);
}

#[test]
fn one_that_is_gone_is_forgotten_in_any_phase() {
    for turns in 0..6 {
        let mut world = held();
        world.tell(Event::LetRun);
        (0..turns).for_each(|_| world.act(1));
        world.is_paused = false;
        world.tell(Event::Gone);
        (0..20).for_each(|_| world.act(0));
        assert!(!world.is_noted && world.hold.is_free(), "{turns}");
    }
}

#[test]
fn what_somebody_else_has_paused_while_it_moved_is_left_as_it_is() {
    let seen = |running| Event::Seen(Seen { running, memory: Memory::Still, is_over_nothing: false });
    // Its hypervisor stops it for the move. A guest in the state *paused* was paused by an order.
    for (reason, running, event, runs) in [
        (Reason::Move, Running::Paused, Event::LetRun, false),
        (Reason::Move, Running::No, Event::LetRun, true),
        (Reason::Move, Running::No, Event::LetStay, false),
        (Reason::MoveAhead, Running::Paused, Event::LetRun, true),
        (Reason::Adopt, Running::Paused, Event::LetRun, true),
    ] {
        let mut world = World::new();
        world.hold = Hold::found(reason);
        world.tell(event);
        assert_eq!(world.hold.poll_action(), Some(Action::Look));
        world.tell(seen(running));
        let expected = if runs { Action::Continue } else { Action::Forget };
        assert_eq!(world.hold.poll_action(), Some(expected), "{reason:?} {running:?}");
    }
}

#[test]
fn what_stays_is_given_up_all_the_same_while_it_moves() {
    let mut world = World::new();
    world.hold = Hold::found(Reason::Move);
    world.tell(Event::LetStay);
    assert_eq!(world.hold.poll_action(), Some(Action::Look));
    world.tell(Event::Seen(Seen { running: Running::No, memory: Memory::Moving, is_over_nothing: false }));
    assert_eq!(world.hold.poll_action(), Some(Action::Abandon));
}
