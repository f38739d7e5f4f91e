//! Tests of two hosts that speak about a stopped VM, over a link that may lose a question, and with daemons that are restarted.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_channel::mpsc::{UnboundedSender, unbounded};
use futures_util::FutureExt as _;
use migration::MigrationId;

use super::*;
use crate::config::HooksConfig;
use crate::hooks::tests::alone;
use crate::hooks::{HookContext, HookSide};

/// One direction of the link.
struct Wire {
    to: UnboundedSender<ChannelEvent>,
    /// How many of the next messages are lost.
    loses: AtomicUsize,
}

impl Send for Wire {
    fn send(&self, _: Priority, head: Bytes, payload: Bytes) {
        let lose = |left: usize| left.checked_sub(1);
        if self.loses.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose).is_err() {
            // The other end may be gone.
            let _ = self.to.unbounded_send(message(head, payload));
        }
    }
}

fn message(head: Bytes, payload: Bytes) -> ChannelEvent {
    ChannelEvent::Message { head, payload, credit: Box::new(()) }
}

fn context() -> HookContext {
    HookContext {
        migration: MigrationId(7),
        vm: "m".to_owned(),
        volumes: vec!["root".to_owned()],
        side: HookSide::Target,
        own: "here".to_owned(),
        other: "there".to_owned(),
        outcome: None,
    }
}

fn lines(loses: usize) -> (ColdChannel, ColdChannel) {
    let (to_target, at_target) = unbounded();
    let (to_source, at_source) = unbounded();
    let wire = |to, loses| Arc::new(Wire { to, loses: AtomicUsize::new(loses) }) as Arc<dyn Send>;
    ((wire(to_target, loses), at_source), (wire(to_source, 0), at_target))
}

/// Keeps what begins with the letter k.
#[derive(Default)]
struct Shelf(Mutex<Vec<(Vec<u8>, Purpose)>>);

impl ColdKeeper for Shelf {
    fn keep(&self, description: Vec<u8>, purpose: Purpose) -> BoxFuture<'_, Result<(), MoveFault>> {
        async move {
            if !description.starts_with(b"k") {
                return Err(MoveFault::Unfit("no room".to_owned()));
            }
            self.0.lock().await.push((description, purpose));
            Ok(())
        }
        .boxed()
    }
}

/// Quick for a test; the other end answers at once.
const PATIENCE: Patience = Patience { again: Duration::from_millis(20), limit: Duration::from_secs(20) };

async fn asked(description: &[u8], purpose: Purpose, loses: usize) -> (Result<(), String>, Arc<Shelf>) {
    let (here, there) = lines(loses);
    let shelf = Arc::new(Shelf::default());
    let answers = tokio::spawn(answer(there, Arc::clone(&shelf) as Arc<dyn ColdKeeper>));
    let asked = ask(here, description.to_vec(), purpose, PATIENCE).await;
    answers.abort();
    (asked.map_err(|fault| fault.to_string()), shelf)
}

#[tokio::test]
async fn a_question_is_asked_until_it_is_answered_and_is_kept_whole() {
    let large = vec![b'k'; PIECE_BYTES + 1];
    for purpose in [Purpose::Copying, Purpose::Handover] {
        // The beginning of the question is lost, or all of it.
        for loses in [0, 1, 2, 3] {
            let (asked, shelf) = asked(&large, purpose, loses).await;
            assert_eq!(asked, Ok(()), "{loses}");
            let kept = shelf.0.lock().await;
            assert!(!kept.is_empty() && kept.iter().all(|kept| *kept == (large.clone(), purpose)), "{loses}");
        }
        let (refused, _) = asked(b"other", purpose, 0).await;
        assert_eq!(refused, Err("no room".to_owned()));
    }
    let (here, _there) = lines(0);
    let patience = Patience { limit: Duration::ZERO, ..PATIENCE };
    let late = ask(here, b"k".to_vec(), Purpose::Copying, patience).await.unwrap_err();
    assert!(late.to_string().contains("keep the VM"), "{late}");
}

#[tokio::test]
async fn nothing_is_kept_once_the_migration_has_ended() {
    let (_here, there) = lines(0);
    let turn = Arc::new(Mutex::new(Turn::Open));
    let keeper = (Arc::new(Shelf::default()) as Arc<dyn ColdKeeper>, Arc::clone(&turn));
    let hooks = alone(HooksConfig { before: None, after: None, timeout: Duration::from_secs(60) }, context());
    let arrival = ColdArrival::begin(&tokio::runtime::Handle::current(), there, keeper, hooks);
    let keeps = turn.lock().await;
    let ends = tokio::spawn(arrival.end());
    tokio::task::yield_now().await;
    assert!(!ends.is_finished(), "something is being kept");
    drop(keeps);
    ends.await.unwrap();
    assert!(*turn.lock().await == Turn::Over);
}

fn said(said: &VmMessage, payload: &[u8]) -> ChannelEvent {
    message(said.encode().into(), Bytes::copy_from_slice(payload))
}

fn keep(bytes: usize) -> ChannelEvent {
    said(&VmMessage::Keep { hands_over: false, bytes: u32::try_from(bytes).unwrap() }, b"")
}

#[test]
fn a_description_is_one_question_of_one_process() {
    let mut description = Description::default();
    let piece = said(&VmMessage::Manifest, b"half");
    assert_eq!(description.take(&piece), Ok(None));
    assert_eq!(description.take(&ChannelEvent::PeerRestarted), Ok(None));
    assert_eq!(description.take(&said(&VmMessage::Manifest, b"whole")), Ok(None));
    assert_eq!(description.take(&keep(5)), Ok(Some((b"whole".to_vec(), Purpose::Copying))));
    assert_eq!(description.take(&piece), Ok(None));
    assert_eq!(description.take(&keep(5)), Ok(None), "its beginning was lost");
    // A message that is none ends what came before it.
    assert_eq!(description.take(&piece), Ok(None));
    assert!(description.take(&message(Bytes::from_static(&[9]), Bytes::new())).is_err());
    assert_eq!(description.take(&keep(4)), Ok(None));
}

#[test]
fn more_than_a_vm_can_need_is_dropped_and_refused() {
    let mut description = Description::default();
    let piece = vec![0; MANIFEST_BYTES_MAX / 2 + 1];
    for _ in 0..3 {
        assert_eq!(description.take(&said(&VmMessage::Manifest, &piece)), Ok(None));
        assert!(description.0.len() <= MANIFEST_BYTES_MAX);
    }
    assert!(description.take(&keep(piece.len() * 3)).is_err());
    assert!(description.0.is_empty());
}
