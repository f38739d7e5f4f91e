//! Tests with two channels that are each other's remote ends.

use std::collections::HashMap;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::super::stream::Turn;
use super::super::window::BYTES_MIN;
use super::*;

struct Wire(arriving::UnboundedSender<ChannelEvent>);

impl Send for Wire {
    fn send(&self, _: Priority, head: Bytes, payload: Bytes) {
        // The other end may be gone.
        let _ = self.0.unbounded_send(ChannelEvent::Message { head, payload, credit: Box::new(()) });
    }
}

/// One end of the channels of two hosts, by stream number.
#[derive(Default)]
pub(in crate::vms::moving) struct Ends {
    sending: HashMap<u8, arriving::UnboundedSender<ChannelEvent>>,
    arriving: Mutex<HashMap<u8, arriving::UnboundedReceiver<ChannelEvent>>>,
}

impl VmStreams for Ends {
    fn open(&self, stream: u8) -> (Arc<dyn Send>, arriving::UnboundedReceiver<ChannelEvent>) {
        let arrivals = self.arriving.lock().unwrap().remove(&stream).unwrap();
        (Arc::new(Wire(self.sending[&stream].clone())), arrivals)
    }
}

const SIDE_STREAMS: u8 = 3;

pub(in crate::vms::moving) fn ends() -> (Ends, Ends) {
    let (mut source, mut target) = (Ends::default(), Ends::default());
    for stream in 0..=SIDE_STREAMS {
        let (to_target, at_target) = arriving::unbounded();
        let (to_source, at_source) = arriving::unbounded();
        source.sending.insert(stream, to_target);
        target.sending.insert(stream, to_source);
        source.arriving.get_mut().unwrap().insert(stream, at_source);
        target.arriving.get_mut().unwrap().insert(stream, at_target);
    }
    (source, target)
}

fn channels() -> (VmChannel, VmChannel) {
    let (source, target) = ends();
    (VmChannel::new(Arc::new(source)), VmChannel::new(Arc::new(target)))
}

#[tokio::test]
async fn the_main_stream_is_connected_first_and_each_other_one_when_it_has_begun() {
    let (source, target) = channels();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("memory");
    let hypervisor = UnixListener::bind(&socket).unwrap();
    let sides: Vec<_> =
        source.side_streams(SIDE_STREAMS).into_iter().zip(target.side_streams(SIDE_STREAMS)).collect();
    let (is_connected, connects) = watch::channel(false);
    let carries = futures_util::future::try_join_all(
        sides
            .iter()
            .map(|(_, side)| side.stream.connect_and_carry(&socket, Turn::AfterMain(connects.clone()))),
    );
    let carries = async {
        tokio::try_join!(target.main().connect_and_carry(&socket, Turn::Main(is_connected)), carries)
    };
    let pairs: Vec<_> = (0..=SIDE_STREAMS).map(|_| UnixStream::pair().unwrap()).collect();
    let (mut ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let sends = async {
        // The side streams begin first, and the last one never sends anything.
        for (number, ours) in ours.iter_mut().enumerate().rev().skip(1) {
            ours.write_all(&[number as u8; 10]).await.unwrap();
        }
        ours.iter_mut().for_each(|ours| drop(std::mem::replace(ours, UnixStream::pair().unwrap().0)));
    };
    let mut theirs = theirs.into_iter();
    let main = source.main().carry(theirs.next().unwrap());
    let others = futures_util::future::try_join_all(
        sides.iter().zip(theirs).map(|((side, _), theirs)| side.stream.carry(theirs)),
    );
    let takes = async {
        let mut came = Vec::new();
        for _ in 0..SIDE_STREAMS {
            let (mut stream, _) = hypervisor.accept().await.unwrap();
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).await.unwrap();
            came.push(bytes);
        }
        came
    };
    let (carried, main, others, (), mut came) = tokio::join!(carries, main, others, sends, takes);
    assert!(carried.is_ok() && main.is_ok() && others.is_ok(), "{carried:?} {main:?} {others:?}");
    assert_eq!(came.remove(0), [0; 10], "the main one is first");
    came.sort();
    assert_eq!(came, [[1; 10], [2; 10]]);
}

#[tokio::test]
async fn terms_are_named_before_what_they_are_about() {
    let (source, target) = channels();
    source.offer(b"parcel".to_vec(), Terms { side_streams: 3, ..Terms::default() });
    target.wait_for(&PeerStatus::Check).await.unwrap();
    assert_eq!(target.terms().side_streams, 3);
    target.accept(Terms { side_streams: 2, ..Terms::default() });
    source.wait_for(&PeerStatus::Fits).await.unwrap();
    assert_eq!(source.terms().side_streams, 2);
}

#[tokio::test]
async fn more_than_the_window_passes_and_the_answer_comes_back() {
    let (source, target) = channels();
    let (mut hypervisor, here) = UnixStream::pair().unwrap();
    let (mut other, there) = UnixStream::pair().unwrap();
    let sent: Vec<u8> = (0..(64 << 20) + 77_usize).map(|at| (at / 1000) as u8).collect();
    let expected = sent.clone();
    let sends = async move {
        hypervisor.write_all(&sent).await.unwrap();
        hypervisor.shutdown().await.unwrap();
        let mut answer = Vec::new();
        hypervisor.read_to_end(&mut answer).await.unwrap();
        answer
    };
    let takes = async move {
        let mut came = Vec::new();
        other.read_to_end(&mut came).await.unwrap();
        other.write_all(b"loaded").await.unwrap();
        other.shutdown().await.unwrap();
        came
    };
    let (carried, brought, answer, came) =
        tokio::join!(source.main().carry(here), target.main().carry(there), sends, takes);
    carried.unwrap();
    brought.unwrap();
    assert_eq!(answer, b"loaded");
    assert!(came == expected, "the memory came as it was sent");
}

#[tokio::test]
async fn no_more_than_the_window_is_sent_to_a_host_that_takes_nothing_or_lies() {
    let (source, target) = ends();
    let to_source = target.sending[&0].clone();
    let (_, mut at_target) = target.open(0);
    let source = VmChannel::new(Arc::new(source));
    // It confirms data that it was never sent.
    Wire(to_source.clone()).send(
        Priority::Control,
        VmMessage::Taken { bytes: u32::MAX }.encode().into(),
        Bytes::new(),
    );
    Wire(to_source).send(Priority::Control, VmMessage::Waiting.encode().into(), Bytes::new());
    source.wait_for(&PeerStatus::Waiting).await.unwrap();
    let (mut hypervisor, here) = UnixStream::pair().unwrap();
    let writes = tokio::spawn(async move {
        loop {
            if hypervisor.write_all(&[1; 65536]).await.is_err() {
                return;
            }
        }
    });
    let mut sent = 0;
    {
        let carried = source.main().carry(here);
        let arrives = async {
            while sent < BYTES_MIN - PIECE_BYTES {
                if let Some(ChannelEvent::Message { payload, .. }) = at_target.next().await {
                    sent += payload.len();
                }
            }
        };
        tokio::select! { _ = carried => panic!("it waits"), () = arrives => {} }
    }
    while let Ok(ChannelEvent::Message { payload, .. }) = at_target.try_recv() {
        sent += payload.len();
    }
    assert!(sent <= BYTES_MIN);
    // The socket is broken by then.
    writes.await.unwrap();
}

#[tokio::test]
async fn a_manifest_comes_whole_and_no_larger_than_it_may_be() {
    let (source, target) = channels();
    let manifest: Vec<u8> = (0..PIECE_BYTES * 3 + 5).map(|at| (at / 7) as u8).collect();
    source.offer(manifest.clone(), Terms::default());
    target.wait_for(&PeerStatus::Check).await.unwrap();
    assert!(target.manifest() == manifest, "it came as it was sent");
    source.offer(vec![0; MANIFEST_BYTES_MAX + 1], Terms::default());
    assert!(target.failed().await.0.contains("more than a VM can need"));
}

#[tokio::test]
async fn what_is_lost_is_heard_also_after_something_has_failed_and_nothing_after_it() {
    let (source, target) = channels();
    for message in [
        VmMessage::failed("broken"),
        VmMessage::Complete,
        VmMessage::lost("gone"),
        VmMessage::failed("again"),
    ] {
        target.send(&message);
    }
    let mut heard = PeerStatus::Nothing;
    while !matches!(heard, PeerStatus::Lost(_)) {
        heard = source.peer_changed(&heard).await;
    }
    assert_eq!(source.wait_for(&PeerStatus::Complete).await, Err(PeerFault("gone".to_owned())));
}

#[tokio::test]
async fn whoever_waits_for_a_vm_to_be_loaded_hears_it_of_one_that_was_complete_at_once() {
    let (source, target) = channels();
    target.send(&VmMessage::Loaded);
    target.send(&VmMessage::Complete);
    while source.peer_status() != PeerStatus::Complete {
        tokio::task::yield_now().await;
    }
    let waits = source.wait_for(&PeerStatus::Loaded);
    assert_eq!(tokio::time::timeout(std::time::Duration::from_secs(10), waits).await, Ok(Ok(())));
}

#[tokio::test]
async fn a_reason_reaches_whoever_waits_and_stays() {
    let (source, target) = channels();
    target.send(&VmMessage::failed("no such machine type"));
    target.send(&VmMessage::Waiting);
    assert_eq!(
        source.wait_for(&PeerStatus::Waiting).await,
        Err(PeerFault("no such machine type".to_owned()))
    );
    assert_eq!(source.failed().await, PeerFault("no such machine type".to_owned()));
}
