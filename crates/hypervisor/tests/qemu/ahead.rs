//! Tests VMs that run at the target before all of their memory has arrived, with real QEMU.

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use hypervisor::qemu::{Lifeline, QmpError};
use hypervisor::{
    HypervisorError, MemoryMode, MemoryOptions, MemoryTransfer, MigrationStatus, PostCopyStart, RunState,
};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::scene::{DEADLINE, Scene, Started};

/// So slow that memory is missing seconds later on a busy machine: a VM that has hardly begun has pages of zeroes, nine bytes
/// each, and some hundred KiB of firmware.
const BYTES_PER_S: u64 = 32 << 10;
/// The content of a VM's memory for a long transfer: twenty times what sockets hold, ten seconds of a relay.
const CONTENT_BYTES: usize = 8 << 20;
/// Bytes that a relay carries at a time, and how often: slower still.
const PIECE_BYTES: usize = 4 << 10;
const PIECE_INTERVAL: Duration = Duration::from_millis(5);
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// The silence after which a main thread counts as hanging.
const SILENCE: Duration = Duration::from_secs(1);

/// Returns a stopped source, with memory that its target lacks; `None`: this kernel does not support that.
async fn pair(scene: &Scene) -> Option<(Started, Started)> {
    let (source, target) = (scene.start("source", &[]).await, scene.start_target("target").await);
    offer(source, target, None).await
}

async fn offer(source: Started, target: Started, relay: Option<&Path>) -> Option<(Started, Started)> {
    if target.qemu.post_copy_obstacle().await.unwrap().is_some() {
        omission::machine_lacks("userfaultfd");
        return None;
    }
    assert_eq!(source.qemu.post_copy_hazard().await.unwrap(), None);
    let transfer = MemoryTransfer { mode: MemoryMode::PostCopy, ..MemoryTransfer::default() };
    target.qemu.expect_memory(&target.memory, transfer).await.unwrap();
    let bandwidth_max_bytes_per_s = NonZeroU64::new(BYTES_PER_S);
    let downtime_target = Duration::from_millis(1);
    let options = MemoryOptions { downtime_target, bandwidth_max_bytes_per_s, transfer };
    source.qemu.offer_memory(relay.unwrap_or(&target.memory), options).await.unwrap();
    source.qemu.await_status(&[MigrationStatus::Active], DEADLINE).await.unwrap();
    assert_eq!(source.qemu.begin_post_copy().await.unwrap(), PostCopyStart::Begun);
    source.qemu.await_status(&[MigrationStatus::PreSwitchover], DEADLINE).await.unwrap();
    Some((source, target))
}

fn loaded(scene: &Scene) -> [String; 2] {
    let content = scene.path("content");
    std::fs::write(&content, vec![0x5a; CONTENT_BYTES]).unwrap();
    let loader = format!("loader,file={},addr=0x800000,force-raw=on", content.display());
    ["-device".to_owned(), loader]
}

/// As [`relay`], but takes everything from the source, and keeps it.
fn deep_relay(from: &Path, to: &Path) -> JoinHandle<()> {
    let (listener, to) = (UnixListener::bind(from).unwrap(), to.to_owned());
    tokio::spawn(async move {
        let (source, _) = listener.accept().await.unwrap();
        let (mut reader, mut writer) = source.into_split();
        let (mut back, mut forth) = UnixStream::connect(to).await.unwrap().into_split();
        let (sender, mut kept) = mpsc::unbounded_channel();
        let returns = async { drop(tokio::io::copy(&mut back, &mut writer).await) };
        let takes = async {
            let mut piece = vec![0; PIECE_BYTES];
            while let Ok(bytes @ 1..) = reader.read(&mut piece).await {
                sender.send(piece[..bytes].to_vec()).unwrap();
            }
        };
        let gives = async {
            let mut pace = tokio::time::interval(PIECE_INTERVAL);
            while let Some(piece) = kept.recv().await {
                pace.tick().await;
                forth.write_all(&piece).await.unwrap();
            }
        };
        tokio::join!(returns, takes, gives);
    })
}

/// Carries a stream of memory slowly until it is aborted: most of it is then missing.
fn relay(from: &Path, to: &Path) -> JoinHandle<()> {
    let (listener, to) = (UnixListener::bind(from).unwrap(), to.to_owned());
    tokio::spawn(async move {
        let (source, _) = listener.accept().await.unwrap();
        let (mut reader, mut writer) = source.into_split();
        let (mut back, mut forth) = UnixStream::connect(to).await.unwrap().into_split();
        let returns = async { drop(tokio::io::copy(&mut back, &mut writer).await) };
        let carries = async {
            let mut piece = vec![0; PIECE_BYTES];
            let mut pace = tokio::time::interval(PIECE_INTERVAL);
            while let Ok(bytes @ 1..) = reader.read(&mut piece).await {
                pace.tick().await;
                forth.write_all(&piece[..bytes]).await.unwrap();
            }
        };
        tokio::join!(returns, carries);
    })
}

#[tokio::test]
async fn a_target_that_hangs_in_what_it_misses_takes_the_rest_over_its_lifeline_whoever_holds_that() {
    let Some(scene) = Scene::new() else { return };
    let (pipes, wire) = (scene.path("lifeline"), scene.path("wire"));
    let words = Lifeline::make(&pipes).unwrap();
    assert!(Lifeline::open(&pipes).is_err(), "nobody is there");
    let words: Vec<&str> = words.iter().map(String::as_str).chain(["-incoming", "defer", "-S"]).collect();
    // A source that has sent everything before its stream breaks would not notice that.
    let content = loaded(&scene);
    let content: Vec<&str> = content.iter().map(String::as_str).collect();
    let (source, target) = (scene.start("source", &content).await, scene.start("target", &words).await);
    let lifeline = Lifeline::open(&pipes).unwrap();
    lifeline.agree().await.unwrap();
    // Its intended user is killed.
    drop(lifeline);
    let carries = relay(&wire, &target.memory);
    let Some((source, target)) = offer(source, target, Some(&wire)).await else { return };
    source.qemu.switch_over().await.unwrap();
    target.qemu.await_loaded(DEADLINE).await.unwrap();
    let paused = [MigrationStatus::PostcopyPaused];
    let broken = async {
        carries.abort();
        source.qemu.await_status(&paused, DEADLINE).await.unwrap();
    };
    let (noticed, ()) = tokio::join!(target.qemu.await_status(&paused, DEADLINE), broken);
    noticed.unwrap();
    // Its main thread reads all of the memory, and hangs in the first missing page.
    let reads = json!({ "val": 0, "size": 32 << 20, "filename": scene.path("dump") });
    let silent = target.qemu.qmp().execute("pmemsave", reads, SILENCE).await.unwrap_err();
    assert!(matches!(silent, QmpError::Silent { .. }), "{silent:?}");
    let lifeline = Lifeline::open(&pipes).unwrap();
    let again = scene.path("again");
    lifeline.recover_memory(&again).await.unwrap();
    source.qemu.resend_memory(&again).await.unwrap();
    source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.qemu.resume().await.unwrap();
    assert_eq!(target.qemu.status().await.unwrap(), RunState::Running);
    let refused = lifeline.recover_memory(&again).await.unwrap_err();
    assert!(matches!(refused, HypervisorError::Refused(_)), "{refused:?}");
}

#[tokio::test]
async fn a_source_that_has_sent_everything_sends_nothing_twice_when_not_all_of_it_has_come() {
    let Some(scene) = Scene::new() else { return };
    let wire = scene.path("wire");
    let (source, target) = (scene.start("source", &[]).await, scene.start_target("target").await);
    let carries = deep_relay(&wire, &target.memory);
    let Some((source, target)) = offer(source, target, Some(&wire)).await else { return };
    source.qemu.switch_over().await.unwrap();
    target.qemu.await_loaded(DEADLINE).await.unwrap();
    let mut events = source.qemu.events();
    while source.qemu.memory_progress().await.unwrap().remaining_bytes > 0 {
        let _ = tokio::time::timeout(LOOK_INTERVAL, events.next()).await;
    }
    carries.abort();
    let paused = [MigrationStatus::PostcopyPaused];
    target.qemu.await_status(&paused, DEADLINE).await.unwrap();
    // The caller must find out otherwise what has arrived: 7.2 does not notice, 10.0 fails.
    let ended = source.qemu.await_status(&paused, SILENCE).await.unwrap_err();
    let is_deaf = ended.to_string().ends_with("still postcopy-active");
    let has_failed = matches!(ended, HypervisorError::MigrationEnded { status: MigrationStatus::Failed, .. });
    assert!(is_deaf || has_failed, "{ended}");
    let again = scene.path("again");
    target.qemu.recover_memory(&again).await.unwrap();
    source.qemu.resend_memory(&again).await.unwrap_err();
    assert_ne!(source.qemu.status().await.unwrap(), RunState::Running);
}

#[tokio::test]
async fn a_vm_runs_ahead_of_its_memory_and_at_the_source_never_again() {
    let Some(scene) = Scene::new() else { return };
    let Some((source, target)) = pair(&scene).await else { return };
    source.qemu.switch_over().await.unwrap();
    target.qemu.await_loaded(DEADLINE).await.unwrap();
    target.qemu.resume().await.unwrap();
    assert_eq!(target.qemu.status().await.unwrap(), RunState::Running);
    source.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    target.qemu.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    assert_ne!(source.qemu.status().await.unwrap(), RunState::Running);
}

#[tokio::test]
async fn a_vm_whose_memory_was_to_follow_goes_on_if_nothing_was_switched_over() {
    let Some(scene) = Scene::new() else { return };
    let Some((source, mut target)) = pair(&scene).await else { return };
    // N.B. it never runs by itself, whatever QEMU makes of the broken stream.
    target.process.kill().await.unwrap();
    source.qemu.abandon().await.unwrap();
    let ends = [MigrationStatus::Cancelled, MigrationStatus::Failed];
    source.qemu.await_status(&ends, DEADLINE).await.unwrap();
    assert_ne!(source.qemu.status().await.unwrap(), RunState::Running);
    source.qemu.resume().await.unwrap();
    assert_eq!(source.qemu.status().await.unwrap(), RunState::Running);
}
