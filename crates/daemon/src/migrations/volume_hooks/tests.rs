//! Tests of two hosts that ask each other to run their hooks, over a link that may lose the first question.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_channel::mpsc::{UnboundedSender, unbounded};
use futures_util::FutureExt as _;
use migration::MigrationId;

use super::*;
use crate::config::HooksConfig;
use crate::hooks::tests::alone;
use crate::hooks::{HookContext, HookSide};

struct Wire {
    to: UnboundedSender<ChannelEvent>,
    loses_next: AtomicBool,
}

impl Send for Wire {
    fn send(&self, _: Priority, head: Bytes, payload: Bytes) {
        if !self.loses_next.swap(false, Ordering::SeqCst) {
            // The other end may be gone.
            let _ = self.to.unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) });
        }
    }
}

fn lines(loses_first: bool) -> (HooksChannel, HooksChannel) {
    let (to_target, at_target) = unbounded();
    let (to_source, at_source) = unbounded();
    let wire = |to, loses: bool| Arc::new(Wire { to, loses_next: AtomicBool::new(loses) }) as Arc<dyn Send>;
    ((wire(to_target, loses_first), at_source), (wire(to_source, false), at_target))
}

fn hooks(side: HookSide, before: &str) -> Arc<HookRunner> {
    let context = HookContext {
        migration: MigrationId(7),
        vm: String::new(),
        volumes: vec!["root".to_owned()],
        side,
        own: "here".to_owned(),
        other: "there".to_owned(),
        outcome: None,
    };
    let before = Some(PathBuf::from(before));
    let hooks = HooksConfig { before, after: None, timeout: Duration::from_secs(60) };
    alone(hooks, context)
}

/// Returns the result of a migration whose hosts have these hooks.
async fn run(source: &str, target: &str, loses_first: bool) -> Result<(), String> {
    let (here, there) = lines(loses_first);
    let answers = tokio::spawn(answer(there, hooks(HookSide::Target, target)));
    let volume_hooks = VolumeHooks::new(tokio::runtime::Handle::current());
    volume_hooks.leaves(MigrationId(7), hooks(HookSide::Source, source), Some(ask(here).boxed()));
    let outcome = volume_hooks.run(MigrationId(7)).await;
    answers.abort();
    outcome.map_err(|fault| fault.to_string())
}

#[tokio::test]
async fn both_hosts_run_theirs_and_either_may_fail() {
    assert_eq!(run("/bin/true", "/bin/true", false).await, Ok(()));
    let refused = run("/bin/true", "/bin/false", false).await.unwrap_err();
    assert!(refused.contains("/bin/false (target) ended with exit status 1"), "{refused}");
    let refused = run("/bin/false", "/bin/true", false).await.unwrap_err();
    assert!(refused.contains("/bin/false (source) ended with exit status 1"), "{refused}");
}

#[tokio::test]
async fn a_host_that_has_forgotten_the_question_is_asked_again() {
    assert_eq!(run("/bin/true", "/bin/true", true).await, Ok(()));
}

#[tokio::test]
async fn what_runs_is_given_up_with_its_migration() {
    let volume_hooks = VolumeHooks::new(tokio::runtime::Handle::current());
    // The other host does not answer.
    let (here, _there) = lines(false);
    volume_hooks.leaves(MigrationId(7), hooks(HookSide::Source, "/bin/true"), Some(ask(here).boxed()));
    let runs = volume_hooks.run(MigrationId(7));
    volume_hooks.entered(MigrationId(7), Phase::Copying);
    volume_hooks.entered(MigrationId(7), Phase::Discarding);
    assert_eq!(runs.await.unwrap_err().to_string(), "it was given up");
    assert!(volume_hooks.forget(MigrationId(7)).is_some());
    assert!(volume_hooks.run(MigrationId(8)).await.is_err());
}
