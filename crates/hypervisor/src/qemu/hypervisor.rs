//! QEMU's implementation of [`crate::Hypervisor`], for a migration.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use super::block::BlockNode;
use super::error::PRODUCT;
use super::lifeline::Lifeline;
use super::process::Qemu;
use super::qmp::{Events, Heard};
use crate::{
    Hypervisor, HypervisorFuture, MemoryOptions, MemoryProgress, MemoryTransfer, MigrationStatus,
    PostCopyStart, RecoverMemory, RunChange, RunChanges, RunState,
};

/// QEMU's events when the processors stop: by itself, by an order, or by the guest's sleep.
const STOPS: [&str; 2] = ["STOP", "SUSPEND"];

impl Hypervisor for Qemu {
    fn product(&self) -> String {
        format!("{PRODUCT} {}", self.version())
    }

    fn process(&self) -> Option<i32> {
        self.process()
    }

    fn memory_socket(&self) -> PathBuf {
        memory_socket(self.socket())
    }

    fn closed(&self) -> Pin<Box<dyn Future<Output = String> + Send + '_>> {
        Box::pin(self.closed())
    }

    fn run_state(&self) -> HypervisorFuture<'_, RunState> {
        Box::pin(self.status())
    }

    fn run_changes(&self) -> Box<dyn RunChanges> {
        Box::new(self.events())
    }

    fn resume(&self) -> HypervisorFuture<'_, ()> {
        Box::pin(self.resume())
    }

    fn take_disks<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()> {
        Box::pin(self.take_disks(socket))
    }

    fn announce(&self) -> HypervisorFuture<'_, ()> {
        Box::pin(self.announce())
    }

    fn has_disk_over_nothing(&self) -> HypervisorFuture<'_, bool> {
        Box::pin(async {
            let devices = self.query_block().await?;
            let mut nodes = devices.iter().filter_map(|device| device.node.as_ref());
            Ok(nodes.any(BlockNode::is_over_nothing))
        })
    }

    fn memory_bytes(&self) -> HypervisorFuture<'_, u64> {
        Box::pin(self.memory_bytes())
    }

    fn migration_blockers(&self) -> HypervisorFuture<'_, Vec<String>> {
        Box::pin(async {
            let mut reasons = self.migration_blockers().await?;
            reasons.extend(self.memory_hazard().await?);
            Ok(reasons)
        })
    }

    fn post_copy_blocker(&self) -> HypervisorFuture<'_, Option<String>> {
        Box::pin(async {
            match self.post_copy_obstacle().await? {
                None => self.post_copy_hazard().await,
                obstacle => Ok(obstacle),
            }
        })
    }

    fn knows_side_streams(&self) -> HypervisorFuture<'_, bool> {
        Box::pin(self.knows_side_streams())
    }

    fn offer_memory<'a>(&'a self, stream: &'a Path, options: MemoryOptions) -> HypervisorFuture<'a, ()> {
        Box::pin(self.offer_memory(stream, options))
    }

    fn memory_progress(&self) -> HypervisorFuture<'_, MemoryProgress> {
        Box::pin(self.memory_progress())
    }

    fn await_status<'a>(
        &'a self,
        wanted: &'a [MigrationStatus],
        deadline: Duration,
    ) -> HypervisorFuture<'a, MigrationStatus> {
        Box::pin(self.await_status(wanted, deadline))
    }

    fn set_downtime_target(&self, downtime: Duration) -> HypervisorFuture<'_, ()> {
        Box::pin(self.set_downtime_target(downtime))
    }

    fn limit_memory(&self, bytes_per_s: Option<NonZeroU64>) -> HypervisorFuture<'_, ()> {
        Box::pin(self.limit_memory(bytes_per_s))
    }

    fn raise_throttle(&self, percent: u8) -> HypervisorFuture<'_, ()> {
        Box::pin(self.raise_throttle(percent))
    }

    fn begin_post_copy(&self) -> HypervisorFuture<'_, PostCopyStart> {
        Box::pin(self.begin_post_copy())
    }

    fn switch_over(&self) -> HypervisorFuture<'_, ()> {
        Box::pin(self.switch_over())
    }

    fn resend_memory<'a>(&'a self, stream: &'a Path) -> HypervisorFuture<'a, ()> {
        Box::pin(self.resend_memory(stream))
    }

    fn abandon(&self) -> HypervisorFuture<'_, ()> {
        Box::pin(self.abandon())
    }

    fn expect_memory<'a>(&'a self, socket: &'a Path, transfer: MemoryTransfer) -> HypervisorFuture<'a, ()> {
        Box::pin(self.expect_memory(socket, transfer))
    }

    fn await_loaded(&self, deadline: Duration) -> HypervisorFuture<'_, ()> {
        Box::pin(self.await_loaded(deadline))
    }
}

impl RecoverMemory for Qemu {
    fn recover_memory<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()> {
        Box::pin(self.recover_memory(socket))
    }
}

impl RecoverMemory for Lifeline {
    fn recover_memory<'a>(&'a self, socket: &'a Path) -> HypervisorFuture<'a, ()> {
        Box::pin(self.recover_memory(socket))
    }
}

impl RunChanges for Events {
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Option<RunChange>> + Send + '_>> {
        Box::pin(async {
            loop {
                match self.next().await {
                    Heard::Event(event) if STOPS.contains(&event.name.as_str()) => {
                        return Some(RunChange::Stopped);
                    }
                    Heard::Event(event) if event.name == "RESUME" => return Some(RunChange::Runs),
                    Heard::Event(_) | Heard::Missed(_) => {}
                    Heard::Gone => return None,
                }
            }
        })
    }
}

/// Returns the path for sockets of a VM's memory, beside its monitor.
pub fn memory_socket(monitor: &Path) -> PathBuf {
    monitor.with_extension("memory")
}
