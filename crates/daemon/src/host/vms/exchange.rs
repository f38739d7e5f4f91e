//! Disks of a running VM change between their files and their volumes, step by step.
//!
//! What comes next is said by [`migration::vm::exchange`], of what QEMU and the journal say at that moment; here it is carried
//! out, until all disks are on one side. Then the VM runs: [`crate::vms::Holds`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{NewVolume, RemoveVolume, VolumeSource};
use hypervisor::qemu::{BlockNode, ExportAddress, Qemu, RECONNECT_SECONDS};
use hypervisor::{HypervisorError, RunState};
use migration::journal::ImageFormat;
use migration::vm::exchange::{Exchange, Goal, Over, SeenDisk, Step};

use crate::error::RequestError;
use crate::fail_point::{self, Step as FailPoint};
use crate::host::Host;
use crate::vms::{Adopted, AdoptedDisk, VmError};

/// How an exchange has ended.
pub(in crate::host) struct Exchanged {
    /// Where all disks are.
    pub(in crate::host) goal: Goal,
    /// Why they are not where they were to be first.
    pub(in crate::host) failure: Option<RequestError>,
}

/// The VM's QEMU has ended while its disks changed hands.
pub(in crate::host) struct QemuEnded;

/// What a node is of a VM's disk, and what is to be done.
struct Look {
    is_running: bool,
    disks: Vec<SeenDisk>,
    nodes: Vec<Option<BlockNode>>,
}

impl Host {
    /// Brings the disks of a VM to one side; the VM may be paused then. It takes as long as it takes: what goes wrong
    /// is tried the other way round, and then again.
    ///
    /// # Errors
    /// [`QemuEnded`].
    pub(in crate::host) async fn exchange_disks(
        self: &Arc<Self>,
        adopted: &Adopted,
        goal: Goal,
        is_new: IsNew,
    ) -> Result<Exchanged, QemuEnded> {
        let name = &adopted.name;
        let mut exchange = (is_new == IsNew::Yes).then(|| Exchange::towards(goal));
        let mut failure = None;
        let mut qemu = None;
        loop {
            let connected = match qemu.take() {
                Some(qemu) => Ok(qemu),
                None => self.monitor_of(adopted).await,
            };
            let taken = match connected {
                Ok(connected) => {
                    let taken = self.take_step(adopted, &connected, goal, &mut exchange).await;
                    qemu = Some(connected);
                    taken
                }
                Err(error) if self.has_ended_qemu(adopted, &error) => return Err(QemuEnded),
                Err(error) => Err(VmError::of(name)(error).into()),
            };
            match taken {
                Ok(None) => {}
                Ok(Some(goal)) => return Ok(Exchanged { goal, failure }),
                Err(error) => {
                    let reason = error.message();
                    tracing::warn!(vm = %name, reason, "a step of the exchange of its disks failed; the other way is tried");
                    self.vms.holds.tell(name, Some(format!("paused while its disks change hands: {reason}")));
                    failure.get_or_insert(error);
                    // A silent QEMU may have ended, and its monitor with it.
                    qemu = None;
                    let pause = exchange.as_mut().map(Exchange::failed).unwrap_or_default();
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn take_step(
        self: &Arc<Self>,
        adopted: &Adopted,
        qemu: &Qemu,
        goal: Goal,
        exchange: &mut Option<Exchange>,
    ) -> Result<Option<Goal>, RequestError> {
        let failed = |error| RequestError::from(VmError::of(&adopted.name)(error));
        let Look { is_running, disks, nodes } = self.look_at_disks(adopted, qemu).await.map_err(failed)?;
        let exchange = exchange.get_or_insert_with(|| Exchange::after_restart(goal, &disks));
        let step = exchange.next_step(is_running, &disks);
        let of = |index: usize| {
            let kept = adopted.disks.get(index)?;
            Some((kept, nodes.get(index)?.as_ref()?))
        };
        fail_point::before(FailPoint::Exchange);
        match step {
            Step::Complete(goal) => return Ok(Some(goal)),
            Step::Pause => qemu.stop().await.map_err(failed)?,
            Step::LeadToNothing(index) => {
                if let Some((kept, node)) = of(index) {
                    qemu.lead_to_nothing(&kept.disk(node), kept.number).await.map_err(failed)?;
                }
            }
            Step::LeadToExport(index) => {
                if let Some((kept, node)) = of(index) {
                    let export = self.export_named(&kept.volume);
                    qemu.lead_over_export(&kept.disk(node), &export, kept.number).await.map_err(failed)?;
                }
            }
            Step::LeadToFile(index) => {
                if let Some((kept, node)) = of(index) {
                    if kept.node != node.name {
                        // A daemon that was killed while it adopted the disk may have left it, with QEMU's locks.
                        qemu.drop_node(&kept.node).await;
                    }
                    let image = kept.image(kept.file.clone(), kept.format.clone());
                    qemu.lead_to_file(&kept.disk(node), &image, kept.number).await.map_err(failed)?;
                }
            }
            Step::Serve(index) => {
                if let Some(kept) = adopted.disks.get(index) {
                    self.serve_disk(kept).await?;
                }
            }
            Step::StopServing(index) => {
                if let Some(kept) = adopted.disks.get(index) {
                    let how = RemoveVolume { force: true, keep_image: true, delete_image: false };
                    Arc::clone(self).remove_unused_volume(kept.volume.clone(), how).await?;
                }
            }
        }
        fail_point::after(FailPoint::Exchange);
        Ok(None)
    }

    /// What the disks of a VM are over, as QEMU and the journal say.
    async fn look_at_disks(&self, adopted: &Adopted, qemu: &Qemu) -> Result<Look, HypervisorError> {
        let is_running = qemu.status().await? == RunState::Running;
        let devices = qemu.query_block().await?;
        let node_of = |kept: &AdoptedDisk| {
            let mut found = devices.iter().filter(|device| device.device.as_deref() == Some(&kept.device));
            found.next().and_then(|device| device.node.clone())
        };
        let nodes: Vec<_> = adopted.disks.iter().map(node_of).collect();
        let seen = |(kept, node): (&AdoptedDisk, &Option<BlockNode>)| SeenDisk {
            over: match node {
                None => Over::Gone,
                Some(node) if node.is_over_nothing() => Over::Nothing,
                Some(node) if is_over(node, &self.export_named(&kept.volume)) => Over::Export,
                Some(_) => Over::File,
            },
            is_served: self.serves(kept),
        };
        let disks = adopted.disks.iter().zip(&nodes).map(seen).collect();
        Ok(Look { is_running, disks, nodes })
    }

    /// Whether a disk of a VM is over nothing.
    pub(in crate::host) async fn has_lost_a_disk(
        &self,
        adopted: &Adopted,
        qemu: &Qemu,
    ) -> Result<bool, HypervisorError> {
        let look = self.look_at_disks(adopted, qemu).await?;
        Ok(look.disks.iter().any(|disk| disk.over == Over::Nothing))
    }

    /// Whether the volume of an adopted disk is there. One of another image has taken the name meanwhile.
    fn serves(&self, kept: &AdoptedDisk) -> bool {
        let record = self.record_named(&kept.volume);
        record.is_ok_and(|record| record.image.place.file().map(Path::new) == Some(&kept.file))
    }

    /// Where a volume is served.
    pub(in crate::host) fn export_named(&self, volume: &str) -> ExportAddress {
        ExportAddress {
            socket: self.sockets.volume_socket(volume),
            export: volume.to_owned(),
            reconnect_s: RECONNECT_SECONDS,
        }
    }

    /// Serves an image as an adopted disk's volume.
    async fn serve_disk(self: &Arc<Self>, kept: &AdoptedDisk) -> Result<(), RequestError> {
        let text = kept.file.to_str().ok_or_else(|| not_utf8(&kept.file))?;
        let source = VolumeSource::Add {
            image: Some(text.to_owned()),
            device: None,
            nbd: None,
            format: Some(shown(format_named(&kept.format))),
            fenced: false,
        };
        let order = NewVolume { name: kept.volume.clone(), source, export: api::ExportSettings::default() };
        Arc::clone(self).create_volume(order).await.map(drop)
    }

    /// Gives the images of a VM back whose QEMU has ended: nobody reads or writes.
    pub(in crate::host) async fn stop_serving(
        self: &Arc<Self>,
        adopted: &Adopted,
    ) -> Result<(), RequestError> {
        for kept in adopted.disks.iter().filter(|kept| self.serves(kept)) {
            let how = RemoveVolume { force: true, keep_image: true, delete_image: false };
            Arc::clone(self).remove_unused_volume(kept.volume.clone(), how).await?;
        }
        Ok(())
    }
}

/// Whether an exchange begins, or goes on that an earlier daemon began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::host) enum IsNew {
    Yes,
    No,
}

/// Whether a node is over an export, however QEMU writes its address.
fn is_over(node: &BlockNode, export: &ExportAddress) -> bool {
    export.socket.to_str().is_some_and(|socket| node.file.contains(socket))
}

/// QEMU's name of a format.
pub(in crate::host) fn name_of(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    }
}

/// The format that QEMU calls so; it adopts no others.
pub(in crate::host) fn format_named(name: &str) -> ImageFormat {
    if name == name_of(ImageFormat::Qcow2) { ImageFormat::Qcow2 } else { ImageFormat::Raw }
}

fn shown(format: ImageFormat) -> api::ImageFormat {
    match format {
        ImageFormat::Raw => api::ImageFormat::Raw,
        ImageFormat::Qcow2 => api::ImageFormat::Qcow2,
    }
}

fn not_utf8(path: &Path) -> RequestError {
    RequestError::ImageUnsuitable { path: PathBuf::from(path), detail: "its path is not UTF-8".to_owned() }
}
