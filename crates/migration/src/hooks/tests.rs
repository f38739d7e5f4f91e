//! Tests the hooks of single migrations step by step. The simulator tries kills at every instant.

use super::*;

const LIMIT: Duration = Duration::from_secs(30);
const ONE: MigrationId = MigrationId(1);
const TWO: MigrationId = MigrationId(2);

fn process(id: i32) -> HookProcess {
    HookProcess { id, started: 7, boot: 1 }
}

fn about(vm: &str) -> BTreeSet<String> {
    [vm.to_owned()].into()
}

struct Scene {
    book: HookBook,
    now: Duration,
}

impl Scene {
    fn new() -> Self {
        let mut book = HookBook::new(LIMIT);
        book.expect(ONE, about("web"));
        Self { book, now: Duration::ZERO }
    }

    fn say(&mut self, migration: MigrationId, event: HookEvent) -> Vec<HookAction> {
        self.book.handle_event(self.now, migration, event);
        self.actions()
    }

    fn actions(&mut self) -> Vec<HookAction> {
        std::iter::from_fn(|| self.book.poll_action()).collect()
    }

    fn runs(&mut self, migration: MigrationId, moment: Moment) {
        self.say(migration, HookEvent::Wanted(moment));
        let recording = self.say(migration, HookEvent::Prepared(moment, process(10)));
        let [HookAction::Record(_, record, _)] = recording[..] else { panic!("{recording:?}") };
        let released = self.say(migration, HookEvent::Recorded { record, is_durable: true });
        assert_eq!(released, [HookAction::Release(migration, moment)]);
    }
}

use Moment::{After, Before};

#[test]
fn a_hook_is_let_go_only_once_it_is_durable_which_process_runs_it() {
    let mut scene = Scene::new();
    assert_eq!(scene.say(ONE, HookEvent::Wanted(Before)), [HookAction::Prepare(ONE, Before)]);
    let begun = HookRecord {
        subject: about("web"),
        before: HookCourse::Begun(process(3)),
        after: HookCourse::NotBegun,
    };
    let recording = scene.say(ONE, HookEvent::Prepared(Before, process(3)));
    assert_eq!(recording, [HookAction::Record(ONE, 0, begun.clone())]);
    assert_eq!(scene.say(ONE, HookEvent::Recorded { record: 0, is_durable: false }), []);
    let (at, _) = scene.book.poll_timeout().unwrap();
    scene.book.handle_timeout(at);
    assert_eq!(scene.actions(), [HookAction::Record(ONE, 1, begun)]);
    assert_eq!(scene.say(ONE, HookEvent::Recorded { record: 0, is_durable: true }), [], "of another try");
    assert_eq!(
        scene.say(ONE, HookEvent::Recorded { record: 1, is_durable: true }),
        [HookAction::Release(ONE, Before)]
    );
    // A second request does not run the hook again.
    assert_eq!(scene.say(ONE, HookEvent::Wanted(Before)), []);
    let ended = scene.say(ONE, HookEvent::Ended(Before, HookEnd::Good));
    assert!(ended.contains(&HookAction::Tell(ONE, Before, HookEnd::Good)));
    assert_eq!(scene.say(ONE, HookEvent::Wanted(Before)), [HookAction::Tell(ONE, Before, HookEnd::Good)]);
}

#[test]
fn what_is_after_waits_for_what_is_before_and_ends_the_record() {
    let mut scene = Scene::new();
    scene.runs(ONE, Before);
    assert_eq!(scene.say(ONE, HookEvent::Wanted(After)), []);
    let ended = scene.say(ONE, HookEvent::Ended(Before, HookEnd::Bad("no route".to_owned())));
    assert_eq!(ended.last(), Some(&HookAction::Prepare(ONE, After)));
    scene.runs_prepared(ONE);
    let ended = scene.say(ONE, HookEvent::Ended(After, HookEnd::Good));
    assert_eq!(ended, [HookAction::Tell(ONE, After, HookEnd::Good), HookAction::Forget(ONE)]);
    assert_eq!(scene.book.migrations().count(), 0);
}

impl Scene {
    fn runs_prepared(&mut self, migration: MigrationId) {
        let recording = self.say(migration, HookEvent::Prepared(After, process(11)));
        let [HookAction::Record(_, record, _)] = recording[..] else { panic!("{recording:?}") };
        // The end of the hook before was recorded meanwhile; that record is not this one's.
        assert_eq!(self.say(migration, HookEvent::Recorded { record: record - 1, is_durable: true }), []);
        let released = self.say(migration, HookEvent::Recorded { record, is_durable: true });
        assert_eq!(released, [HookAction::Release(migration, After)]);
    }
}

#[test]
fn without_anything_before_nothing_is_after() {
    let mut scene = Scene::new();
    let said = scene.say(ONE, HookEvent::Wanted(After));
    assert_eq!(said, [HookAction::Tell(ONE, After, HookEnd::Good), HookAction::Forget(ONE)]);
}

#[test]
fn of_one_vm_one_hook_runs_at_a_time_and_of_others_as_well() {
    let mut scene = Scene::new();
    scene.runs(ONE, Before);
    scene.book.expect(TWO, about("web"));
    assert_eq!(scene.say(TWO, HookEvent::Wanted(Before)), []);
    scene.book.expect(MigrationId(3), about("db"));
    assert_eq!(
        scene.say(MigrationId(3), HookEvent::Wanted(Before)),
        [HookAction::Prepare(MigrationId(3), Before)]
    );
    scene.say(ONE, HookEvent::Wanted(After));
    let ended = scene.say(ONE, HookEvent::Ended(Before, HookEnd::Good));
    // The undo of the first migration is older.
    assert_eq!(ended.last(), Some(&HookAction::Prepare(ONE, After)));
    scene.runs_prepared(ONE);
    let ended = scene.say(ONE, HookEvent::Ended(After, HookEnd::Good));
    assert_eq!(ended.last(), Some(&HookAction::Prepare(TWO, Before)));
}

#[test]
fn the_next_daemon_waits_for_what_runs_before_it_undoes_anything() {
    let mut scene = Scene { book: HookBook::new(LIMIT), now: Duration::ZERO };
    let record = HookRecord {
        subject: about("web"),
        before: HookCourse::Begun(process(5)),
        after: HookCourse::NotBegun,
    };
    scene.book.load(scene.now, ONE, record);
    assert_eq!(scene.actions(), [HookAction::Find(ONE, Before, process(5))]);
    assert_eq!(scene.say(ONE, HookEvent::Wanted(After)), []);
    // The hook exceeds its time limit.
    scene.book.handle_timeout(LIMIT);
    assert_eq!(scene.actions(), [HookAction::Kill(ONE, Before, KillReason::Overdue)]);
    let ended = scene.say(ONE, HookEvent::Ended(Before, HookEnd::Bad("killed".to_owned())));
    assert_eq!(ended.last(), Some(&HookAction::Prepare(ONE, After)));
}

#[test]
fn a_process_that_never_passed_its_gate_has_run_nothing() {
    let mut scene = Scene { book: HookBook::new(LIMIT), now: Duration::ZERO };
    let record = HookRecord {
        subject: about("web"),
        before: HookCourse::Begun(process(5)),
        after: HookCourse::NotBegun,
    };
    scene.book.load(scene.now, ONE, record);
    scene.actions();
    assert_eq!(scene.say(ONE, HookEvent::NeverBegan(Before)), []);
    assert_eq!(scene.say(ONE, HookEvent::Wanted(Before)), [HookAction::Prepare(ONE, Before)]);
}

#[test]
fn what_nobody_waits_for_any_more_is_killed_wherever_it_is() {
    let mut scene = Scene::new();
    scene.say(ONE, HookEvent::Wanted(Before));
    assert_eq!(scene.say(ONE, HookEvent::Unwanted), []);
    assert_eq!(
        scene.say(ONE, HookEvent::Prepared(Before, process(3))),
        [HookAction::Kill(ONE, Before, KillReason::Unwanted)]
    );
    let mut scene = Scene::new();
    scene.runs(ONE, Before);
    assert_eq!(scene.say(ONE, HookEvent::Unwanted), [HookAction::Kill(ONE, Before, KillReason::Unwanted)]);
}

#[test]
fn the_time_of_a_hook_counts_from_when_its_gate_opens() {
    let mut scene = Scene::new();
    scene.runs(ONE, Before);
    scene.now = 2 * LIMIT;
    scene.book.handle_timeout(scene.now);
    assert_eq!(scene.actions(), [], "it waits behind its gate");
    assert_eq!(scene.say(ONE, HookEvent::Begun(Before)), []);
    assert_eq!(scene.book.poll_timeout(), Some((3 * LIMIT, "a hook to end")));
    scene.book.handle_timeout(3 * LIMIT);
    assert_eq!(scene.actions(), [HookAction::Kill(ONE, Before, KillReason::Overdue)]);
}

#[test]
fn what_never_began_is_begun_anew_as_long_as_it_is_wanted() {
    // After: always.
    let mut scene = Scene::new();
    scene.runs(ONE, Before);
    scene.say(ONE, HookEvent::Ended(Before, HookEnd::Good));
    scene.say(ONE, HookEvent::Wanted(After));
    scene.runs_prepared(ONE);
    assert_eq!(scene.say(ONE, HookEvent::NeverBegan(After)), [HookAction::Prepare(ONE, After)]);
    // Before: while somebody waits for it, also at the next daemon.
    let begun = HookRecord {
        subject: about("web"),
        before: HookCourse::Begun(process(5)),
        after: HookCourse::NotBegun,
    };
    let mut scene = Scene { book: HookBook::new(LIMIT), now: Duration::ZERO };
    scene.book.load(scene.now, ONE, begun.clone());
    scene.actions();
    assert_eq!(scene.say(ONE, HookEvent::Wanted(Before)), []);
    assert_eq!(scene.say(ONE, HookEvent::NeverBegan(Before)), [HookAction::Prepare(ONE, Before)]);
    // Nothing is undone that was not begun.
    let mut scene = Scene { book: HookBook::new(LIMIT), now: Duration::ZERO };
    scene.book.load(scene.now, ONE, begun);
    scene.actions();
    assert_eq!(scene.say(ONE, HookEvent::Wanted(After)), []);
    let said = scene.say(ONE, HookEvent::NeverBegan(Before));
    assert_eq!(said, [HookAction::Tell(ONE, After, HookEnd::Good), HookAction::Forget(ONE)]);
}
