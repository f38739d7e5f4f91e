//! Tests a target with a silent source: without a promise it ends by itself, with a promise it never does.

use std::time::Duration;

use migration::journal::Outcome;
use migration::message::{ToSource, ToTarget};
use migration::target::{FlushResult, SourcePatience, TargetAction, TargetEvent};
use migration::{Attempt, MigrationId, Target, VolumeIndex};

const PATIENCE: SourcePatience =
    SourcePatience { silent_max: Duration::from_secs(600), away_max: Duration::from_secs(86_400) };

struct Scene {
    target: Target,
    now: Duration,
    told: Vec<ToSource>,
    ended: Option<Outcome>,
}

impl Scene {
    /// Returns a target that begins long after its host did.
    fn new() -> Self {
        let target = Target::between_hosts(MigrationId(1), 1).with_patience(PATIENCE);
        Self { target, now: Duration::from_secs(1_000_000), told: Vec::new(), ended: None }
    }

    fn say(&mut self, event: TargetEvent) {
        self.target.handle_event(self.now, event);
        self.carry_out();
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some((at, _)) = self.target.poll_timeout().filter(|(at, _)| *at <= until) {
            self.now = self.now.max(at);
            self.target.handle_timeout(self.now);
            self.carry_out();
        }
        self.now = until;
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.target.poll_action() {
            let now = self.now;
            match action {
                TargetAction::Commit { commit, .. } => {
                    self.target.handle_event(now, TargetEvent::Committed { commit, result: Ok(()) });
                }
                TargetAction::Flush { volume, attempt } => {
                    let result = FlushResult::Durable;
                    self.target.handle_event(now, TargetEvent::Flushed { volume, attempt, result });
                }
                TargetAction::Discard => {
                    self.target.handle_event(now, TargetEvent::Discarded { left_over: String::new() });
                }
                TargetAction::Send(message) => self.told.push(message),
                TargetAction::End { outcome } => self.ended = Some(outcome),
                _ => {}
            }
        }
    }
}

#[test]
fn an_arrival_whose_source_says_nothing_ends_and_one_that_is_promised_does_not() {
    let mut scene = Scene::new();
    scene.wait(Duration::from_secs(599));
    assert_eq!(scene.ended, None);
    scene.wait(Duration::from_secs(2));
    let Some(Outcome::Failed { detail, .. }) = scene.ended.take() else { unreachable!("{:?}", scene.told) };
    assert!(detail.contains("said nothing for 600 s"), "{detail}");

    let mut scene = Scene::new();
    scene.say(TargetEvent::Received(ToTarget::Prepare(Attempt(1))));
    assert_eq!(scene.target.prepared(), Some(Attempt(1)));
    scene.wait(Duration::from_secs(30 * 86_400));
    assert_eq!((scene.ended, scene.target.prepared()), (None, Some(Attempt(1))));
    assert_eq!(VolumeIndex::all(1).count(), 1);
}

#[test]
fn a_source_that_answers_or_is_away_is_waited_for() {
    // A source that continues, or is paused, answers each question.
    let mut scene = Scene::new();
    for _ in 0..1000 {
        scene.wait(Duration::from_secs(31));
        assert!(scene.told.drain(..).any(|told| told == ToSource::Query(Attempt::NONE)));
        scene.say(TargetEvent::Received(ToTarget::Abort(Attempt::NONE)));
    }
    assert_eq!(scene.ended, None);
    scene.say(TargetEvent::LinkLost);
    scene.wait(Duration::from_secs(86_000));
    assert_eq!(scene.ended, None);
    scene.say(TargetEvent::LinkBack);
    scene.wait(Duration::from_secs(590));
    assert_eq!(scene.ended, None);
    scene.say(TargetEvent::LinkLost);
    scene.wait(Duration::from_secs(86_500));
    let detail = scene.ended.map(|outcome| format!("{outcome:?}")).unwrap();
    assert!(detail.contains("could not be reached for 86400 s"), "{detail}");
}
