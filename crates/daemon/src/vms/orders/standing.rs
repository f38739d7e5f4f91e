//! Determines where a VM is that was to move: with its volumes, once their migration has ended.
//!
//! ```text
//!   was leaving   its volumes are here  → stayed          was arriving   its volumes are here  → arrived
//!                 they are elsewhere    → left                           they are elsewhere    → abandoned
//! ```
//! Until that is recorded no operation can move, start or stop the VM, so it is retried until the data folder accepts it.

use std::sync::Arc;
use std::time::Duration;

use migration::journal::Way;
use migration::session::VmPlace;
use migration::vm::hold::Reason;

use crate::host::VmOrders;
use crate::migrations::resumption::at_start;
use crate::vms::{Standing, VmError};

const SETTLE_INTERVAL: Duration = Duration::from_secs(1);

impl VmOrders {
    /// Settles after a start the VMs whose migration has ended or failed: they are where their volumes are.
    pub(crate) async fn settle_vms(self: &Arc<Self>) {
        for (name, standing) in self.vms.unsettled() {
            let (host, which) = (Arc::clone(self), name.clone());
            at_start(async move { host.settle_vm(&name, standing).await }, "a VM", &which).await;
        }
    }

    async fn settle_vm(self: &Arc<Self>, name: &str, standing: Standing) {
        let Ok(known) = self.vms.get(name) else { return };
        if self.is_under_way(&known.volumes, standing) {
            return;
        }
        let is_here = known.volumes.iter().all(|volume| self.owns(volume));
        if is_here && !known.is_cold {
            // N.B. Before it is settled: an adopted VM is not among the managed ones afterwards.
            self.vms.until_found(name).await;
            // A VM that was leaving has a note if it may be paused. A VM that arrived was loaded paused.
            let is_to_run = standing == Standing::Arriving && !self.vms.stays_paused(name);
            if is_to_run && let Err(error) = self.vms.holds.hold(name, Reason::MoveAhead, true).await {
                tracing::error!(vm = %name, %error, "cannot record whether the VM runs");
            }
            if let Err(error) = self.let_it_run(name).await {
                tracing::warn!(vm = %name, reason = error.message(), "cannot resume the VM");
            }
        }
        self.settle(name, standing, is_here).await;
    }

    /// Records where a VM with this standing is. If that fails, retries it in the background.
    pub(crate) async fn settle(self: &Arc<Self>, name: &str, standing: Standing, is_here: bool) {
        let Err(error) = self.try_to_settle(name, standing, is_here).await else { return };
        tracing::error!(
            vm = %name, %error,
            "cannot record at which host the VM is; trying again, and until then the VM cannot be moved, started or stopped"
        );
        let (host, name) = (Arc::clone(self), name.to_owned());
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = tokio::time::sleep(SETTLE_INTERVAL) => {}
                    // The next start checks this itself.
                    () = host.stopping.begins() => return,
                }
                let is_settled = match host.vms.get(&name) {
                    // N.B. Another task may have settled it, and it may be moving again since.
                    Ok(known) => known.standing != standing || host.is_under_way(&known.volumes, standing),
                    Err(_) => true,
                };
                if is_settled || host.try_to_settle(&name, standing, is_here).await.is_ok() {
                    tracing::info!(vm = %name, "recorded where the VM is");
                    return;
                }
            }
        });
    }

    /// Does the same as [`Self::settle`], without a retry.
    pub(crate) async fn note_vm(
        &self,
        name: &str,
        standing: Standing,
        place: VmPlace,
    ) -> Result<(), VmError> {
        self.try_to_settle(name, standing, place == VmPlace::Here).await.inspect_err(|error| {
            tracing::error!(
                vm = %name, %error,
                "cannot record at which host the VM is; trying again, and until then the VM cannot be moved, started or stopped"
            );
        })
    }

    async fn try_to_settle(&self, name: &str, standing: Standing, is_here: bool) -> Result<(), VmError> {
        if self.vms.get(name).is_ok_and(|known| known.standing != standing) {
            // Another task has settled it, and it may be moving again since.
            return Ok(());
        }
        let settled = match (standing, is_here) {
            (Standing::Home, _) => Ok(()),
            (Standing::Leaving, false) => self.vms.left(name).await,
            (Standing::Arriving, false) => self.vms.abandon_arrival(name).await,
            (Standing::Leaving, true) => self.vms.stayed(name).await,
            (Standing::Arriving, true) => self.vms.arrived(name).await,
        };
        match settled {
            // The VM was refused before it was here.
            Err(VmError::NotFound(_)) => Ok(()),
            settled => settled,
        }
    }

    fn is_under_way(&self, volumes: &[String], standing: Standing) -> bool {
        let way = if standing == Standing::Arriving { Way::Here } else { Way::Elsewhere };
        self.journal.read(|state| {
            state.is_under_way(volumes, way)
                // The owner of the volumes is in question since the journal was restored.
                || volumes.iter().any(|name| state.questioned_named(name).is_some())
        })
    }

    fn owns(&self, volume: &str) -> bool {
        self.journal.read(|state| state.volumes.values().any(|known| known.record.name == volume))
    }
}
