//! Tests of VMs that move between two hosts, with hypervisors inside this process.

use std::num::NonZeroU64;
use std::pin::Pin;

use futures_channel::oneshot;
use hypervisor::RunState;
use hypervisor::fake::FakeVm;
use migration::MigrationId;
use tempfile::TempDir;

use std::collections::BTreeSet;

use migration::vm::shape::Difference;

use super::*;
use crate::config::HooksConfig;
use crate::hooks::tests::alone;
use crate::hooks::{HookContext, HookSide};
use crate::vms::moving::channel::tests::ends;
use crate::vms::moving::incoming::{IncomingVm, Keeper};

/// A target host that runs every VM, and keeps its files.
struct Host(Arc<FakeVm>, Arc<Mutex<Vec<u8>>>);

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

    fn renew(&self, files: Vec<u8>) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>> {
        *self.1.lock().unwrap() = files;
        Box::pin(std::future::ready(Ok(())))
    }

    fn stays_paused(&self) -> Pin<Box<dyn Future<Output = Result<(), MoveFault>> + Send>> {
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

/// What a test lets the source see of the VM.
struct Eyes {
    vm: Arc<FakeVm>,
    /// How many comparisons find nothing before one finds a running job.
    clean: Mutex<u32>,
    files: Mutex<Vec<u8>>,
}

impl Witness for Eyes {
    fn look(&self) -> BoxFuture<'_, Result<Found, MoveFault>> {
        async {
            let does = Does::of(self.vm.run_state().await?.as_str());
            let mut clean = self.clean.lock().unwrap();
            let job = (*clean == 0).then(|| Difference::Work("a job".to_owned()));
            *clean = clean.saturating_sub(1);
            Ok(Found { does, differences: job.into_iter().collect::<BTreeSet<_>>() })
        }
        .boxed()
    }

    fn files(&self) -> BoxFuture<'_, Result<(u64, Vec<u8>), MoveFault>> {
        let files = self.files.lock().unwrap().clone();
        std::future::ready(Ok((files.len() as u64, files))).boxed()
    }

    fn sum(&self, manifest: &[u8]) -> Result<u64, MoveFault> {
        Ok(manifest.len() as u64)
    }
}

/// The limit of its migration, in bytes a second.
const LIMIT: u64 = 100 << 20;

/// A VM at two hosts, in a folder with the sockets of both.
struct Scene {
    folder: TempDir,
    leaving: Arc<OutgoingVm>,
    coming: Arc<IncomingVm>,
    source: Arc<FakeVm>,
    target: Arc<FakeVm>,
    eyes: Arc<Eyes>,
    renewed: Arc<Mutex<Vec<u8>>>,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = Arc::new(FakeVm::running(folder.path().join("source.memory")));
        let target = Arc::new(FakeVm::waiting(folder.path().join("target.memory")));
        let (here, there) = ends();
        let vm: Arc<dyn Hypervisor> = Arc::<FakeVm>::clone(&source);
        let wishes = Wishes {
            downtime_max: Duration::from_millis(300),
            budget: Budget::of(Some(LIMIT)),
            terms: Terms::default(),
        };
        let named = ("web1".to_owned(), vm, Holds::open(folder.path()));
        let files = Mutex::new(b"web1".to_vec());
        let eyes = Arc::new(Eyes { vm: Arc::clone(&source), clean: Mutex::new(u32::MAX), files });
        let witness: Arc<dyn Witness> = Arc::<Eyes>::clone(&eyes);
        let hooks = no_hooks(HookSide::Source);
        let leaving = Arc::new(OutgoingVm::new(named, Arc::new(here), wishes, witness, hooks));
        let coming = IncomingVm::new(VmChannel::new(Arc::new(there)), no_hooks(HookSide::Target));
        Self { folder, leaving, coming: Arc::new(coming), source, target, eyes, renewed: Arc::default() }
    }

    /// Runs the target's part, as long as the scene exists.
    fn take_part(&self) {
        let (coming, host) =
            (Arc::clone(&self.coming), Host(Arc::clone(&self.target), Arc::clone(&self.renewed)));
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
    // At the beginning, and for what might follow later.
    assert_eq!(scene.source.memory_limits(), [NonZeroU64::new(LIMIT); 2]);
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
async fn what_somebody_has_paused_stays_paused_where_it_comes_to() {
    for paused_at in [RunState::Paused, RunState::Running] {
        let scene = Scene::new();
        scene.take_part();
        scene.source.be(paused_at);
        scene.leaving.check(b"web1".to_vec()).await.unwrap();
        scene.source.be(RunState::Paused);
        let (told, _paused) = oneshot::channel();
        scene.leaving.stop(told).await.unwrap();
        let note = Holds::open(scene.folder.path()).get("web1").unwrap();
        assert!(!note.was_running, "a daemon that is killed now would let it run");
        scene.coming.run().await.unwrap();
        assert_eq!(scene.target.run_state().await.unwrap(), RunState::Paused);
    }
}

#[tokio::test]
async fn what_has_shut_down_does_not_move_and_is_not_let_run() {
    let scene = Scene::new();
    scene.source.be(RunState::Shutdown);
    let reason = scene.leaving.check(b"web1".to_vec()).await.unwrap_err().to_string();
    assert!(reason.contains("has shut down"), "{reason}");
    scene.source.be(RunState::Running);
    scene.take_part();
    scene.leaving.check(b"web1".to_vec()).await.unwrap();
    scene.source.be(RunState::Shutdown);
    let (told, _paused) = oneshot::channel();
    let reason = scene.leaving.stop(told).await.unwrap_err().to_string();
    assert!(reason.contains("has shut down"), "{reason}");
    scene.leaving.go_on().await.unwrap();
    assert_eq!(scene.source.run_state().await.unwrap(), RunState::Shutdown);
}

#[tokio::test]
async fn what_works_on_a_vm_is_found_at_each_look_and_the_vm_goes_on() {
    for looks in 0..3 {
        let scene = Scene::new();
        scene.take_part();
        *scene.eyes.clean.lock().unwrap() = looks;
        let (told, _paused) = oneshot::channel();
        let moved = match scene.leaving.check(b"web1".to_vec()).await {
            Ok(()) => scene.leaving.stop(told).await,
            refused => refused,
        };
        assert!(moved.unwrap_err().to_string().contains("a job"), "look {looks}");
        scene.leaving.go_on().await.unwrap();
        assert_eq!(scene.source.run_state().await.unwrap(), RunState::Running);
        assert_ne!(scene.target.run_state().await.unwrap(), RunState::Paused);
    }
}

#[tokio::test]
async fn files_that_have_changed_since_the_order_go_once_more() {
    for written in ["web1", "web1 and more"] {
        let scene = Scene::new();
        scene.take_part();
        scene.leaving.check(b"web1".to_vec()).await.unwrap();
        *scene.eyes.files.lock().unwrap() = written.into();
        let (told, _paused) = oneshot::channel();
        scene.leaving.stop(told).await.unwrap();
        let expected = if written == "web1" { "" } else { written };
        assert_eq!(*scene.renewed.lock().unwrap(), expected.as_bytes());
    }
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
    assert!(late.contains("does not report its status"), "{late}");
}
