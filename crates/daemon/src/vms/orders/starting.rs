//! Starts VMs in their order: after a boot of the host, when all are ordered to start, and after a promotion.
//! [`migration::vm::start`] decides which is next.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{StartVm, Vm, VmState};
use migration::vm::start::{Candidate, Retry};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::error::RequestError;
use crate::host::{VmOrders, blocking};
use crate::vms::starts::AwaitedStarts;
use crate::vms::{ConsoleSearch, Known, Life, VmError, WaitFor};

/// Time between two looks at whether a VM is ready.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The longest that a connection may take.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// The longest that an order waits for an attempt that is under way.
const ATTEMPT_MAX: Duration = Duration::from_secs(35);
/// Time between two looks at a VM that is being started or searched.
const SEARCH_EVERY: Duration = Duration::from_millis(200);

impl VmOrders {
    /// Begins to start the VMs that start at a boot of the host, if it has booted since they were started or stopped.
    pub(crate) fn start_at_boot(self: &Arc<Self>) {
        let due = self.vms.list().into_iter().filter(|known| known.is_due_at_boot);
        let candidates: Vec<Candidate> = due.map(|known| candidate(&known)).collect();
        if !candidates.is_empty() {
            tracing::info!(vms = candidates.len(), "the host has booted: VMs are started");
            self.begin_starts(candidates);
        }
    }

    /// Begins to start all VMs that start at a boot and do not run. Returns these.
    pub(crate) async fn start_all(self: Arc<Self>) -> Result<Vec<Vm>, RequestError> {
        let is_meant = |known: &Known| {
            known.preferences.start.at_boot
                && matches!(known.life, Life::Stopped | Life::Crashed(_) | Life::Suspended(_))
        };
        let meant: Vec<Known> = self.vms.list().into_iter().filter(is_meant).collect();
        self.begin_starts(meant.iter().map(candidate).collect());
        let described = meant.iter().map(|known| self.describe_vm(&known.name));
        futures_util::future::join_all(described).await.into_iter().collect()
    }

    /// Starts these VMs in their order, each of them once, and returns when they are ready or have failed: the reason of each failure.
    pub(crate) async fn start_in_order(self: &Arc<Self>, names: Vec<String>) -> BTreeMap<String, String> {
        let known = names.iter().filter_map(|name| self.vms.get(name).ok());
        let starts = Arc::new(AwaitedStarts::new(Retry::Never));
        starts.add(known.map(|known| candidate(&known)).collect());
        self.carry_out(&starts).await;
        let failed = names.into_iter().filter_map(|name| starts.reason(&name).map(|reason| (name, reason)));
        failed.collect()
    }

    /// Adds to a description that the VM is still to be started, and why it is not yet.
    pub(super) fn with_awaited_start(&self, mut vm: Vm) -> Vm {
        vm.awaited_start = self.starts.awaited(&vm.name);
        let Some(awaited) = vm.awaited_start.as_ref().filter(|_| is_down(vm.state)) else {
            if vm.state == VmState::Running && vm.message.is_none() {
                vm.message = self.not_ready(&vm);
            }
            return vm;
        };
        vm.message = Some(match &awaited.reason {
            None => "it is about to be started".to_owned(),
            Some(reason) => format!(
                "it could not be started, and is tried again ({} so far): {reason}; to end that: sterna vm stop {}",
                awaited.failed_attempts, vm.name
            ),
        });
        vm
    }

    /// Returns what is said of a running VM that is not ready yet.
    fn not_ready(&self, vm: &Vm) -> Option<String> {
        let wait = vm.start.as_ref()?.wait_for.as_ref()?;
        match (self.starts.is_watched(&vm.name), self.starts.is_late(&vm.name)) {
            (true, _) => Some(format!("VMs of a higher order wait until it is ready: {wait}")),
            (_, true) => {
                Some(format!("it was not ready in time ({wait}), and others were started without it"))
            }
            _ => None,
        }
    }

    /// Notes that a VM has started, in its turn or by an order, and describes it.
    pub(super) async fn has_started(self: &Arc<Self>, name: &str) -> Result<Vm, RequestError> {
        self.starts.started(name);
        self.settle_boot(name).await;
        self.describe_vm(name).await
    }

    /// Waits until no attempt to start a VM is under way. QEMU has a time limit to answer, and so has this.
    pub(super) async fn until_attempt_ends(&self, name: &str) {
        let deadline = Instant::now() + ATTEMPT_MAX;
        while Instant::now() < deadline {
            let is_starting = matches!(self.vms.get(name).map(|known| known.life), Ok(Life::Starting));
            if !is_starting && !matches!(self.vms.operate(name), Err(VmError::Busy { .. })) {
                return;
            }
            sleep(SEARCH_EVERY).await;
        }
    }

    pub(super) async fn settle_boot(self: &Arc<Self>, name: &str) {
        let (host, settled) = (Arc::clone(self), name.to_owned());
        let noted = blocking(move || Ok(host.vms.settle_boot(&settled)?)).await;
        if let Err(error) = noted {
            // A daemon that starts before the next boot would start it once more: it runs then, or says so.
            tracing::warn!(vm = %name, error = %error.message(), "it is not noted that the VM was started or stopped");
        }
    }

    fn begin_starts(self: &Arc<Self>, candidates: Vec<Candidate>) {
        if candidates.is_empty() || !self.starts.add(candidates) {
            return;
        }
        let orders = Arc::clone(self);
        tokio::spawn(async move {
            let starts = Arc::clone(&orders.starts);
            tokio::select! {
                () = orders.carry_out(&starts) => tracing::info!("all VMs are started that were to be"),
                () = orders.stopping.begins() => {}
            }
        });
    }

    async fn carry_out(self: &Arc<Self>, starts: &Arc<AwaitedStarts>) {
        loop {
            let next = starts.next();
            for name in next.start {
                let (orders, starts) = (Arc::clone(self), Arc::clone(starts));
                tokio::spawn(async move { orders.attempt(&name, &starts).await });
            }
            for name in next.watch {
                let (orders, starts) = (Arc::clone(self), Arc::clone(starts));
                tokio::spawn(async move { orders.watch_until_ready(&name, &starts).await });
            }
            if next.is_over {
                return;
            }
            let passes = async {
                match next.wait {
                    // Some more, so that the time has passed for sure.
                    Some(wait) => sleep(wait + Duration::from_millis(1)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = starts.changed() => {}
                () = passes => {}
            }
        }
    }

    async fn attempt(self: &Arc<Self>, name: &str, starts: &AwaitedStarts) {
        // A QEMU that ran before the boot is looked for first, and one that outlived the daemon is found.
        while matches!(self.vms.get(name).map(|known| known.life), Ok(Life::Starting)) {
            sleep(SEARCH_EVERY).await;
        }
        if self.stopping.has_begun() || !starts.is_to_start(name) {
            return;
        }
        match Arc::clone(self).start_vm(name.to_owned(), StartVm::default()).await {
            Ok(_) => tracing::info!(vm = %name, "VM started in its turn"),
            Err(RequestError::Vm(VmError::RunsAlready(_))) => self.settle_boot(name).await,
            Err(RequestError::Vm(VmError::NotFound(_))) => {
                starts.withdraw(name);
                return;
            }
            Err(error) => {
                let reason = error.message();
                tracing::warn!(vm = %name, %reason, "a VM is not started");
                starts.failed(name, reason);
                return;
            }
        }
        starts.started(name);
    }

    /// Looks whether a VM is ready, until it is ready or nobody waits for it.
    async fn watch_until_ready(self: &Arc<Self>, name: &str, starts: &AwaitedStarts) {
        let Ok(known) = self.vms.get(name) else { return };
        let Some(wait) = &known.preferences.start.wait_for else { return starts.ready(name) };
        let mut search = match wait {
            WaitFor::Tcp(_) => None,
            WaitFor::Console(text) => Some(ConsoleSearch::new(text)),
        };
        while starts.is_watched(name) && !self.stopping.has_begun() {
            let is_ready = match wait {
                WaitFor::Tcp(address) => {
                    matches!(timeout(CONNECT_MAX, TcpStream::connect(address)).await, Ok(Ok(_)))
                }
                WaitFor::Console(text) => {
                    let present = search.take().unwrap_or_else(|| ConsoleSearch::new(text));
                    let (further, is_found) = self.vms.search_consoles(name, &known.logs, present).await;
                    search = Some(further);
                    is_found
                }
            };
            if is_ready {
                tracing::info!(vm = %name, "VM is ready");
                return starts.ready(name);
            }
            sleep(LOOK_EVERY).await;
        }
        if starts.is_late(name) {
            tracing::warn!(vm = %name, %wait, "a VM was not ready in time; others are started without it");
        }
    }
}

impl Known {
    /// Returns whether the VM has what this waits for: a text needs a log.
    pub(super) fn can_be_watched(&self, wait: Option<&WaitFor>) -> bool {
        !matches!(wait, Some(WaitFor::Console(_))) || !self.logs.is_empty()
    }
}

fn candidate(known: &Known) -> Candidate {
    known.preferences.start.candidate(&known.name)
}

fn is_down(state: VmState) -> bool {
    matches!(state, VmState::Stopped | VmState::Suspended | VmState::Crashed | VmState::Starting)
}
