//! VMs that move between two hosts with hypervisors that exist in this process alone.

use std::pin::Pin;

use futures_channel::oneshot;
use hypervisor::RunState;
use hypervisor::fake::FakeVm;
use migration::MigrationId;
use tempfile::TempDir;

use super::*;
use crate::config::HooksConfig;
use crate::hooks::tests::alone;
use crate::hooks::{HookContext, HookSide};
use crate::vms::moving::channel::tests::ends;
use crate::vms::moving::incoming::{IncomingVm, Keeper};

/// A target's host that runs whatever comes.
struct Host(Arc<FakeVm>);

impl Keeper for Host {
    fn check(
        &self,
        manifest: &[u8],
        wished: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Terms, MoveFault>> + Send>> {
        assert_eq!(manifest, b"web1");
        Box::pin(std::future::ready(Ok(wished)))
    }

    fn lose(&self, reason: String) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        unreachable!("{reason}")
    }

    fn keep(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn start(
        &self,
        _manifest: Vec<u8>,
        _terms: Terms,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<dyn Hypervisor>, MoveFault>> + Send>> {
        let vm: Arc<dyn Hypervisor> = Arc::<FakeVm>::clone(&self.0);
        Box::pin(std::future::ready(Ok(vm)))
    }
}

/// A VM at two hosts, in a folder with the sockets of both.
struct Scene {
    folder: TempDir,
    leaving: Arc<OutgoingVm>,
    coming: Arc<IncomingVm>,
    source: Arc<FakeVm>,
    target: Arc<FakeVm>,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = Arc::new(FakeVm::running(folder.path().join("source.memory")));
        let target = Arc::new(FakeVm::waiting(folder.path().join("target.memory")));
        let (here, there) = ends();
        let vm: Arc<dyn Hypervisor> = Arc::<FakeVm>::clone(&source);
        let wishes = Wishes { downtime_max: Duration::from_millis(300), terms: Terms::default() };
        let named = ("web1".to_owned(), vm, Holds::open(folder.path()));
        let leaving = Arc::new(OutgoingVm::new(named, Arc::new(here), wishes, no_hooks(HookSide::Source)));
        let coming = IncomingVm::new(VmChannel::new(Arc::new(there)), no_hooks(HookSide::Target));
        Self { folder, leaving, coming: Arc::new(coming), source, target }
    }

    /// The target's host takes part, as long as the scene is there.
    fn take_part(&self) {
        let (coming, host) = (Arc::clone(&self.coming), Host(Arc::clone(&self.target)));
        tokio::spawn(async move { coming.take_part(&host).await });
    }
}

fn no_hooks(side: HookSide) -> Arc<HookRunner> {
    let context = HookContext {
        migration: MigrationId(7),
        vm: "web1".to_owned(),
        volumes: Vec::new(),
        side,
        own: "here".to_owned(),
        other: "there".to_owned(),
        outcome: None,
    };
    let config = HooksConfig { before: None, after: None, timeout: Duration::from_secs(60) };
    alone(config, context)
}

#[tokio::test]
async fn a_vm_is_loaded_at_the_target_and_runs_there_when_it_is_told_to() {
    let scene = Scene::new();
    scene.take_part();
    scene.leaving.check(b"web1".to_vec()).await.unwrap();
    let (told, paused) = oneshot::channel();
    scene.leaving.stop(told).await.unwrap();
    paused.await.unwrap();
    assert_eq!(scene.source.run_state().await.unwrap(), RunState::PostMigrate);
    assert_eq!(scene.target.run_state().await.unwrap(), RunState::Paused);
    scene.coming.run().await.unwrap();
    assert_eq!(scene.target.run_state().await.unwrap(), RunState::Running);
    scene.leaving.runs_there();
    let downtime = scene.leaving.account().downtime();
    assert!(downtime.is_some());
    scene.leaving.runs_there();
    assert_eq!(scene.leaving.account().downtime(), downtime, "it has been running all the time");
    // A daemon that is killed now knows that the VM was paused.
    assert!(Holds::open(scene.folder.path()).get("web1").is_some());
}

#[tokio::test]
async fn a_vm_that_does_not_leave_goes_on() {
    let scene = Scene::new();
    scene.take_part();
    scene.leaving.check(b"web1".to_vec()).await.unwrap();
    scene.source.block("a device of the host");
    let (told, _paused) = oneshot::channel();
    let reason = scene.leaving.stop(told).await.unwrap_err().to_string();
    assert!(reason.contains("a device of the host"), "{reason}");
    scene.leaving.go_on().await.unwrap();
    assert_eq!(scene.source.run_state().await.unwrap(), RunState::Running);
    assert!(Holds::open(scene.folder.path()).get("web1").is_none());
}

#[tokio::test]
async fn what_is_missing_is_named_when_a_vm_is_not_loaded_in_time() {
    let scene = Scene::new();
    let late = scene.leaving.not_loaded(Duration::from_secs(5)).await.to_string();
    assert!(late.contains("5 s were not enough") && late.contains("is in status none"), "{late}");
    assert!(late.contains("the target has not said"), "{late}");
    scene.take_part();
    scene.leaving.check(b"web1".to_vec()).await.unwrap();
    let (told, _paused) = oneshot::channel();
    scene.leaving.stop(told).await.unwrap();
    let late = scene.leaving.not_loaded(Duration::from_secs(5)).await.to_string();
    assert!(late.contains("is in status completed") && late.contains("the target has said"), "{late}");
    scene.source.end();
    let late = scene.leaving.not_loaded(Duration::from_secs(5)).await.to_string();
    assert!(late.contains("does not tell its status"), "{late}");
}
