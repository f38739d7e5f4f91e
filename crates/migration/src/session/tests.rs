//! Tests sessions with all events, in every order that matters, and at random.

use std::time::Duration;

use proptest::prelude::*;

use super::{Action, Answer, Event, MigrationSession, Patience, Role, Step, Undo, VmPlace};
use crate::Attempt;
use crate::failure::{CommitFault, Failure};
use crate::journal::{FailureCode, Outcome, Stage};
use crate::vm::cold::Form;

const PATIENCE: Patience = Patience {
    offer_max: Duration::from_secs(60),
    resume_interval: Duration::from_secs(5),
    repeat_interval: Duration::from_secs(1),
};

fn new(role: Role, has_vm: bool) -> MigrationSession {
    MigrationSession::new(role, has_vm, PATIENCE)
}

fn asked(session: &mut MigrationSession) -> Vec<Action> {
    std::iter::from_fn(|| session.poll_action()).collect()
}

fn tell(session: &mut MigrationSession, at: u64, event: Event) -> Vec<Action> {
    session.handle_event(Duration::from_secs(at), event);
    asked(session)
}

fn done(step: Step) -> Event {
    Event::Done(step, Ok(()))
}

fn failure() -> Failure {
    Failure { code: FailureCode::HostRefused, detail: "no room".to_owned() }
}

fn failed() -> Outcome {
    failure().into()
}

fn moved() -> Outcome {
    Outcome::Moved { left_over: String::new() }
}

fn done_until(session: &mut MigrationSession, until: Step) {
    while let Some(step) = session.doing().filter(|step| *step != until) {
        tell(session, 0, done(step));
    }
}

fn under_way(role: Role, has_vm: bool) -> MigrationSession {
    let mut session = new(role, has_vm);
    while let Some(step) = session.doing() {
        tell(&mut session, 0, done(step));
    }
    assert!(session.is_under_way());
    session
}

#[test]
fn each_step_is_asked_for_when_the_one_before_it_is_done() {
    for (role, has_vm) in
        [(Role::Source, false), (Role::Source, true), (Role::Target, true), (Role::Local, false)]
    {
        let mut session = new(role, has_vm);
        for step in role.steps(has_vm) {
            assert_eq!(asked(&mut session), [Action::Do(*step)]);
            session.handle_event(Duration::ZERO, done(*step));
        }
        assert_eq!(asked(&mut session), [Action::Answer(Answer::Begun)]);
        assert!(session.is_under_way());
    }
}

#[test]
fn what_the_target_may_have_taken_is_given_back_before_the_end_is_durable() {
    let mut session = new(Role::Source, true);
    done_until(&mut session, Step::ExamineVm);
    let refused = tell(&mut session, 1, Event::Done(Step::ExamineVm, Err(failure())));
    assert_eq!(refused, [Action::Undo(Undo::Offer)]);
    let undone = tell(&mut session, 1, Event::Undone { left_over: String::new() });
    assert_eq!(undone, [Action::End(failed())]);
    let ended = tell(&mut session, 1, Event::Ended(Ok(())));
    assert_eq!(ended, [Action::PlaceVolumes(failed()), Action::Note(VmPlace::Here)]);
    let noted = tell(&mut session, 1, Event::Noted(Ok(())));
    assert_eq!(noted, [Action::Conclude(failed()), Action::Answer(Answer::Refused)]);
    assert!(session.is_over());
}

#[test]
fn room_of_which_no_journal_knows_is_given_back_and_nothing_is_recorded() {
    let mut session = new(Role::Target, false);
    done_until(&mut session, Step::Record);
    let refused = tell(&mut session, 0, Event::Done(Step::Record, Err(failure())));
    assert_eq!(refused, [Action::Undo(Undo::Room)]);
    let undone = tell(&mut session, 0, Event::Undone { left_over: String::new() });
    assert_eq!(undone, [Action::Answer(Answer::Refused)]);
    assert!(session.is_over());
}

#[test]
fn images_that_the_journal_knows_are_deleted_when_it_is_durable_that_they_will_be() {
    let mut session = new(Role::Target, false);
    done_until(&mut session, Step::MakeImages);
    let refused = tell(&mut session, 0, Event::Done(Step::MakeImages, Err(failure())));
    assert_eq!(refused, [Action::Abandon(failed())]);
    let refused = tell(&mut session, 0, Event::Abandoned(Err(CommitFault::NotWritten)));
    assert_eq!(refused, [Action::Answer(Answer::Refused)]);
    session.handle_timeout(Duration::from_secs(1));
    assert_eq!(asked(&mut session), [Action::Abandon(failed())]);
    assert_eq!(tell(&mut session, 1, Event::Abandoned(Ok(()))), [Action::Undo(Undo::Images)]);
    let undone = tell(&mut session, 0, Event::Undone { left_over: "a file".to_owned() });
    assert_eq!(undone, [Action::End(failed().with_left_over("a file"))]);
}

#[test]
fn nothing_is_touched_of_what_may_be_in_the_journal_or_not() {
    let mut session = new(Role::Target, false);
    done_until(&mut session, Step::Record);
    asked(&mut session);
    assert_eq!(tell(&mut session, 0, Event::Undecided), [Action::Answer(Answer::Refused)]);
    assert!(session.is_over());
}

#[test]
fn an_end_that_is_not_durable_is_tried_again_and_whoever_asked_is_told_meanwhile() {
    let mut session = new(Role::Source, false);
    done_until(&mut session, Step::Offer);
    tell(&mut session, 0, Event::Done(Step::Offer, Err(failure())));
    tell(&mut session, 0, Event::Undone { left_over: String::new() });
    for at in [0, 1, 2] {
        let told = tell(&mut session, at, Event::Ended(Err(CommitFault::NotWritten)));
        let expected = if at == 0 { vec![Action::Answer(Answer::Refused)] } else { Vec::new() };
        assert_eq!(told, expected);
        assert_eq!(session.poll_timeout().map(|(due, _)| due), Some(Duration::from_secs(at + 1)));
        session.handle_timeout(Duration::from_secs(at + 1));
        assert_eq!(asked(&mut session), [Action::End(failed())]);
    }
    let ended = tell(&mut session, 9, Event::Ended(Ok(())));
    assert_eq!(ended, [Action::PlaceVolumes(failed()), Action::Conclude(failed())]);
}

#[test]
fn where_the_vm_is_is_noted_until_it_is_durable() {
    for (role, outcome, place) in [
        (Role::Source, moved(), VmPlace::Elsewhere),
        (Role::Source, Outcome::Cancelled, VmPlace::Here),
        (Role::Target, moved(), VmPlace::Here),
        (Role::Target, failed(), VmPlace::Elsewhere),
    ] {
        let mut session = under_way(role, true);
        let ended = tell(&mut session, 1, Event::DriverEnded(outcome.clone()));
        assert_eq!(ended, [Action::PlaceVolumes(outcome.clone()), Action::Note(place)], "{role:?}");
        assert_eq!(tell(&mut session, 1, Event::Noted(Err("a full folder".to_owned()))), []);
        session.handle_timeout(Duration::from_secs(2));
        assert_eq!(asked(&mut session), [Action::Note(place)]);
        assert_eq!(tell(&mut session, 2, Event::Noted(Ok(()))), [Action::Conclude(outcome)]);
    }
}

#[test]
fn an_offer_is_not_waited_for_without_end() {
    let mut session = new(Role::Source, false);
    done_until(&mut session, Step::Offer);
    asked(&mut session);
    session.handle_timeout(Duration::from_secs(59));
    assert_eq!(session.doing(), Some(Step::Offer));
    session.handle_timeout(Duration::from_secs(60));
    assert_eq!(asked(&mut session), [Action::Undo(Undo::Offer)]);
    assert_eq!(tell(&mut session, 61, done(Step::Offer)), [], "it comes too late");
}

#[test]
fn who_cancels_does_not_wait_for_a_host_that_is_not_there() {
    let mut session = new(Role::Source, false);
    done_until(&mut session, Step::Offer);
    asked(&mut session);
    assert_eq!(tell(&mut session, 1, Event::Cancel), [Action::Undo(Undo::Offer)]);
    let undone = tell(&mut session, 1, Event::Undone { left_over: String::new() });
    assert_eq!(undone, [Action::End(Outcome::Cancelled)]);
}

#[test]
fn a_cancel_waits_for_the_step_that_is_being_done_and_goes_to_the_driver_after_the_last() {
    let mut session = new(Role::Source, true);
    done_until(&mut session, Step::LetVmLeave);
    asked(&mut session);
    assert_eq!(tell(&mut session, 1, Event::Cancel), []);
    assert_eq!(tell(&mut session, 1, done(Step::LetVmLeave)), [Action::Undo(Undo::Offer)]);

    let mut session = new(Role::Source, false);
    done_until(&mut session, Step::Begin);
    asked(&mut session);
    assert_eq!(tell(&mut session, 1, Event::Cancel), []);
    let begun = tell(&mut session, 1, done(Step::Begin));
    assert_eq!(begun, [Action::Answer(Answer::Begun), Action::Cancel]);
}

fn resumed(role: Role, has_vm: bool, stage: Stage) -> MigrationSession {
    let mut session = MigrationSession::resume(role, has_vm, PATIENCE);
    assert_eq!(asked(&mut session), [Action::Recall]);
    assert_eq!(tell(&mut session, 0, Event::Recalled(Some(stage))), [Action::Do(Step::Begin)]);
    session
}

#[test]
fn a_vm_stays_whose_memory_went_with_the_daemon_unless_its_volumes_are_released() {
    let mut session = resumed(Role::Source, true, Stage::Copying);
    assert_eq!(tell(&mut session, 0, done(Step::Begin)), [Action::KeepVm]);
    for (role, has_vm, stage) in [
        (Role::Source, true, Stage::Released(Attempt(1))),
        (Role::Source, false, Stage::Copying),
        (Role::Target, true, Stage::Copying),
    ] {
        let mut session = resumed(role, has_vm, stage);
        assert_eq!(tell(&mut session, 0, done(Step::Begin)), []);
    }
}

#[test]
fn a_stopped_vm_goes_on_after_a_restart_and_its_move_can_be_given_up() {
    for stage in [Stage::Copying, Stage::Released(Attempt(1))] {
        let mut session = MigrationSession::resume(Role::Source, true, PATIENCE).with_form(Form::Cold);
        asked(&mut session);
        assert_eq!(tell(&mut session, 0, Event::Recalled(Some(stage))), [Action::Do(Step::Begin)]);
        assert_eq!(tell(&mut session, 0, done(Step::Begin)), []);
    }
    for (role, first) in
        [(Role::Source, Action::Undo(Undo::Offer)), (Role::Target, Action::Abandon(Outcome::Cancelled))]
    {
        let mut session = MigrationSession::resume(role, true, PATIENCE).with_form(Form::Cold);
        asked(&mut session);
        assert_eq!(tell(&mut session, 0, Event::Cancel), []);
        assert_eq!(tell(&mut session, 0, Event::Recalled(Some(Stage::Copying))), [first]);
        tell(&mut session, 0, Event::Abandoned(Ok(())));
        tell(&mut session, 0, Event::Undone { left_over: String::new() });
        let place = if role == Role::Source { VmPlace::Here } else { VmPlace::Elsewhere };
        let cancelled = Outcome::Cancelled;
        let ended = tell(&mut session, 0, Event::Ended(Ok(())));
        assert_eq!(ended, [Action::PlaceVolumes(cancelled), Action::Note(place)]);
    }
}

#[test]
fn what_cannot_go_on_is_looked_at_again_and_found_as_it_is_by_then() {
    let mut session = resumed(Role::Target, false, Stage::Prepared(Attempt(1)));
    let refused = Event::Done(Step::Begin, Err(failure()));
    assert_eq!(tell(&mut session, 10, refused), [Action::LetGo]);
    assert_eq!(session.poll_timeout().map(|(due, _)| due), Some(Duration::from_secs(15)));
    session.handle_timeout(Duration::from_secs(15));
    assert_eq!(asked(&mut session), [Action::Recall]);
    // The copy was promoted meanwhile.
    let found = tell(&mut session, 15, Event::Recalled(Some(Stage::Ended(moved()))));
    assert_eq!(found, [Action::PlaceVolumes(moved()), Action::Conclude(moved())]);
}

#[test]
fn what_no_driver_can_go_on_with_and_was_not_released_ends_if_somebody_wishes_that() {
    for cancelled_first in [true, false] {
        let mut session = resumed(Role::Source, false, Stage::Copying);
        let refused = Event::Done(Step::Begin, Err(failure()));
        let (first, then) = if cancelled_first { (Event::Cancel, refused) } else { (refused, Event::Cancel) };
        let mut all = tell(&mut session, 1, first);
        all.extend(tell(&mut session, 2, then));
        assert_eq!(all, [Action::LetGo, Action::Undo(Undo::Offer)]);
        let undone = tell(&mut session, 2, Event::Undone { left_over: String::new() });
        assert_eq!(undone, [Action::End(Outcome::Cancelled)]);
    }
    // The other host may have released volumes, and a lost driver may have released them.
    let mut session = resumed(Role::Source, false, Stage::Released(Attempt(1)));
    tell(&mut session, 1, Event::Done(Step::Begin, Err(failure())));
    assert_eq!(tell(&mut session, 2, Event::Cancel), []);
    let mut session = resumed(Role::Source, false, Stage::Copying);
    tell(&mut session, 1, done(Step::Begin));
    tell(&mut session, 2, Event::DriverLost);
    assert_eq!(tell(&mut session, 3, Event::Cancel), []);
    // A VM may be paused, and only a driver resumes it.
    let mut session = resumed(Role::Source, true, Stage::Copying);
    tell(&mut session, 1, Event::Done(Step::Begin, Err(failure())));
    assert_eq!(tell(&mut session, 2, Event::Cancel), []);
}

#[test]
fn a_start_ends_what_somebody_has_cancelled_and_copies_no_more() {
    let mut state = crate::journal::State::default();
    let started = |side| crate::journal::Record::MigrationStarted {
        migration: crate::MigrationId(1),
        volumes: Vec::new(),
        keep_source: false,
        side,
    };
    let cancelled = crate::journal::Record::CancelOrdered { migration: crate::MigrationId(1) };
    let records = vec![started(crate::journal::Side::OneHost), cancelled];
    state.apply(&crate::journal::Entry { at_unix_ms: 0, records }).unwrap();
    let recorded = &state.migrations[&crate::MigrationId(1)];
    for (role, has_vm, first) in [
        (Role::Source, false, Action::Undo(Undo::Offer)),
        (Role::Target, false, Action::Abandon(Outcome::Cancelled)),
        (Role::Local, false, Action::Abandon(Outcome::Cancelled)),
        // A VM may be paused, and only a driver resumes it.
        (Role::Source, true, Action::Do(Step::Begin)),
    ] {
        let mut session = MigrationSession::resume(role, has_vm, PATIENCE).with_orders(recorded);
        assert_eq!(asked(&mut session), [Action::Recall]);
        assert_eq!(tell(&mut session, 0, Event::Recalled(Some(Stage::Copying))), [first]);
    }
    let mut session = MigrationSession::resume(Role::Source, true, PATIENCE).with_orders(recorded);
    asked(&mut session);
    tell(&mut session, 0, Event::Recalled(Some(Stage::Copying)));
    assert_eq!(tell(&mut session, 1, done(Step::Begin)), [Action::KeepVm, Action::Cancel]);
}

#[test]
fn an_arrival_that_nothing_was_promised_of_ends_if_it_cannot_go_on() {
    let mut session = resumed(Role::Target, false, Stage::Copying);
    let refused = tell(&mut session, 0, Event::Done(Step::Begin, Err(failure())));
    assert_eq!(refused, [Action::Abandon(failed())]);
    let mut session = MigrationSession::resume(Role::Target, false, PATIENCE);
    asked(&mut session);
    let found = tell(&mut session, 0, Event::Recalled(Some(Stage::Discarding(Outcome::Cancelled))));
    assert_eq!(found, [Action::Undo(Undo::Images)]);
}

#[test]
fn a_copy_on_one_host_is_deleted_when_it_is_durable_that_it_will_be() {
    let unbelieved = Failure { code: FailureCode::DaemonStopped, detail: "it was touched".to_owned() };
    let mut session = resumed(Role::Local, false, Stage::Copying);
    let refused = tell(&mut session, 0, Event::Done(Step::Begin, Err(unbelieved.clone())));
    assert_eq!(refused, [Action::Abandon(unbelieved.clone().into())]);
    assert_eq!(tell(&mut session, 0, Event::Abandoned(Ok(()))), [Action::Undo(Undo::Images)]);
    let undone = tell(&mut session, 0, Event::Undone { left_over: String::new() });
    assert_eq!(undone, [Action::End(unbelieved.into())]);
    let mut session = new(Role::Local, false);
    done_until(&mut session, Step::Begin);
    let refused = tell(&mut session, 0, Event::Done(Step::Begin, Err(failure())));
    assert_eq!(refused, [Action::Abandon(failed())]);
}

#[test]
fn a_copy_on_one_host_that_is_out_of_reach_is_looked_at_again_and_may_be_cancelled() {
    let mut session = resumed(Role::Local, false, Stage::Copying);
    assert_eq!(tell(&mut session, 0, Event::Done(Step::Begin, Err(failure()))), [Action::LetGo]);
    session.handle_timeout(Duration::from_secs(5));
    assert_eq!(asked(&mut session), [Action::Recall]);
    assert_eq!(tell(&mut session, 5, Event::Recalled(Some(Stage::Copying))), [Action::Do(Step::Begin)]);
    assert_eq!(tell(&mut session, 5, Event::Done(Step::Begin, Err(failure()))), [Action::LetGo]);
    assert_eq!(tell(&mut session, 6, Event::Cancel), [Action::Abandon(Outcome::Cancelled)]);
    assert_eq!(tell(&mut session, 6, Event::Abandoned(Ok(()))), [Action::Undo(Undo::Images)]);
}

#[test]
fn a_driver_that_is_lost_is_begun_again_from_what_the_journal_says() {
    let mut session = under_way(Role::Source, false);
    assert_eq!(tell(&mut session, 1, Event::DriverLost), [Action::LetGo]);
    session.handle_timeout(Duration::from_secs(6));
    assert_eq!(asked(&mut session), [Action::Recall]);
    let found = tell(&mut session, 6, Event::Recalled(Some(Stage::Copying)));
    assert_eq!(found, [Action::Do(Step::Begin)]);
    assert_eq!(tell(&mut session, 6, done(Step::Begin)), [], "whoever asked was told the first time");
    assert!(session.is_under_way());
}

fn any_event() -> impl Strategy<Value = Event> {
    let steps = prop_oneof![
        Just(Step::MakeRoom),
        Just(Step::Record),
        Just(Step::Offer),
        Just(Step::LetVmLeave),
        Just(Step::ExamineVm),
        Just(Step::MakeImages),
        Just(Step::Begin),
    ];
    let stages = prop_oneof![
        Just(None),
        Just(Some(Stage::Copying)),
        Just(Some(Stage::Released(Attempt(1)))),
        Just(Some(Stage::Discarding(Outcome::Cancelled))),
        Just(Some(Stage::Ended(moved()))),
    ];
    prop_oneof![
        4 => (steps, any::<bool>())
            .prop_map(|(step, ok)| Event::Done(step, if ok { Ok(()) } else { Err(failure()) })),
        1 => Just(Event::Undecided),
        1 => stages.prop_map(Event::Recalled),
        1 => Just(Event::DriverEnded(moved())),
        1 => Just(Event::DriverLost),
        1 => Just(Event::Undone { left_over: String::new() }),
        1 => any::<bool>().prop_map(|ok| Event::Abandoned(if ok { Ok(()) } else { Err(CommitFault::Unknown) })),
        1 => any::<bool>().prop_map(|ok| Event::Ended(if ok { Ok(()) } else { Err(CommitFault::Unknown) })),
        1 => any::<bool>().prop_map(|ok| Event::Noted(if ok { Ok(()) } else { Err(String::new()) })),
        1 => Just(Event::Cancel),
    ]
}

#[test]
fn a_departure_that_was_taken_back_says_nothing_of_where_its_vm_is() {
    let mut session = MigrationSession::resume(Role::Source, true, PATIENCE);
    assert_eq!(asked(&mut session), [Action::Recall]);
    session.handle_event(Duration::ZERO, Event::Recalled(Some(Stage::Ended(Outcome::TakenBack))));
    assert_eq!(asked(&mut session), [Action::Conclude(Outcome::TakenBack)]);
    assert!(session.is_over());
}

proptest! {
    /// Random events: the client is answered once, and the session concludes once. It never does so before its end is durable,
    /// and no action follows.
    #[test]
    fn it_is_concluded_once_and_not_before_its_end_is_durable(
        role in prop_oneof![Just(Role::Source), Just(Role::Target), Just(Role::Local)],
        has_vm: bool,
        events in proptest::collection::vec(any_event(), 0..60),
    ) {
        let mut session = new(role, has_vm);
        let (mut answers, mut conclusions, mut has_ended) = (0, 0, false);
        for (second, event) in (0..).zip(events) {
            let now = Duration::from_secs(100 * second);
            session.handle_timeout(now);
            has_ended |= matches!(
                event,
                Event::Ended(Ok(())) | Event::DriverEnded(_) | Event::Recalled(Some(Stage::Ended(_)))
            );
            session.handle_event(now, event);
            for action in asked(&mut session) {
                prop_assert!(conclusions == 0 || matches!(action, Action::Answer(_)));
                match action {
                    Action::Answer(_) => answers += 1,
                    Action::Conclude(_) => {
                        prop_assert!(has_ended);
                        conclusions += 1;
                    }
                    _ => {}
                }
            }
            prop_assert!(answers <= 1);
        }
    }
}
