//! Switches the disks of a running VM between their files and their volumes, step by step.
//! [`migration::vm::exchange`] chooses each step from the present state of QEMU and the journal. This file carries the steps
//! out until all disks are on one side. Then the VM is resumed: [`crate::vms::Holds`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{NewVolume, RemoveVolume, VolumeSource};
use block::held::{self, Held};
use hypervisor::RunState;
use hypervisor::qemu::{BlockNode, ExportUse, Launched, Qemu, Use};
use migration::journal::ImageFormat;
use migration::vm::exchange::{Exchange, Goal, Over, SeenDisk, Step};

use crate::error::RequestError;
use crate::fail_point::{self, Step as FailPoint};
use crate::host::VmOrders;
use crate::vms::{Adopted, AdoptedDisk, VmError, launched};

pub(crate) struct Exchanged {
    /// The side on which all disks are.
    pub(crate) goal: Goal,
    /// Why the disks are not on the side that was requested.
    pub(crate) failure: Option<RequestError>,
}

pub(crate) struct QemuEnded;

/// The state of a VM's disks, for the choice of the next step.
struct Look {
    is_running: bool,
    disks: Vec<SeenDisk>,
    nodes: Vec<Option<BlockNode>>,
    /// For each disk, what in QEMU uses its volume.
    uses: Vec<ExportUse>,
}

impl VmOrders {
    /// Brings the disks of a VM to one side; the VM may be paused meanwhile. Has no time limit: after a failure it tries the
    /// other side, and then this one again. Fails only with [`QemuEnded`].
    pub(crate) async fn exchange_disks(
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
                    tracing::warn!(vm = %name, reason, "a step of the exchange of its disks failed; undoing the exchange");
                    self.vms
                        .holds
                        .tell(name, Some(format!("paused during the exchange of its disks: {reason}")));
                    failure.get_or_insert(error);
                    // A QEMU that does not answer may have ended, and its monitor with it.
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
        let Look { is_running, disks, nodes, uses } = self.look_at_disks(adopted, qemu).await?;
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
                    let export = self.exports.export_named(&kept.volume);
                    qemu.lead_over_export(&kept.disk(node), &export, kept.number).await.map_err(failed)?;
                }
            }
            Step::LeadToFile(index) => {
                if let Some((kept, node)) = of(index) {
                    if kept.node != node.name {
                        // A daemon that was killed while it adopted the disk may have left this node, with QEMU's locks.
                        qemu.drop_node(&kept.node).await;
                    }
                    let image = kept.image(kept.file.clone(), kept.format.clone());
                    qemu.lead_to_file(&kept.disk(node), &image, kept.number).await.map_err(failed)?;
                }
            }
            Step::Serve(index) => {
                if let Some(kept) = adopted.disks.get(index) {
                    self.serve_disk(adopted, kept).await?;
                }
            }
            Step::StopServing(index) => {
                if let (Some(kept), Some(used)) = (adopted.disks.get(index), uses.get(index)) {
                    if let Some(node) = used.nodes.first() {
                        let why =
                            format!("{}: the node {node} of its QEMU still uses the volume", kept.device);
                        return Err(VmError::Disk { vm: adopted.name.clone(), why }.into());
                    }
                    self.remove_given_back(kept).await?;
                }
            }
        }
        fail_point::after(FailPoint::Exchange);
        Ok(None)
    }

    /// Returns the state of a VM's disks, from QEMU and the journal.
    async fn look_at_disks(&self, adopted: &Adopted, qemu: &Qemu) -> Result<Look, RequestError> {
        let failed = |error| RequestError::from(VmError::of(&adopted.name)(error));
        let is_running = qemu.status().await.map_err(failed)? == RunState::Running;
        let devices = qemu.query_block().await.map_err(failed)?;
        let process = launched(&adopted.name, qemu).await?;
        let (mut disks, mut nodes, mut uses) = (Vec::new(), Vec::new(), Vec::new());
        for kept in &adopted.disks {
            let device = devices.iter().find(|device| device.device.as_deref() == Some(&kept.device));
            let node = device.and_then(|device| device.node.clone());
            let used =
                qemu.export_use(&self.exports.export_named(&kept.volume).socket).await.map_err(failed)?;
            let over = over_of(kept, node.as_ref(), &used, &process);
            disks.push(SeenDisk { over, is_served: self.serves(kept) });
            nodes.push(node);
            uses.push(used);
        }
        Ok(Look { is_running, disks, nodes, uses })
    }

    /// Refuses to release the disks of a VM if something unknown uses a volume, or if a volume cannot be removed.
    pub(crate) async fn prove_exchangeable(
        self: &Arc<Self>,
        adopted: &Adopted,
        qemu: &Qemu,
    ) -> Result<(), RequestError> {
        let look = self.look_at_disks(adopted, qemu).await?;
        for ((kept, seen), used) in adopted.disks.iter().zip(&look.disks).zip(&look.uses) {
            if seen.over == Over::Unknown && seen.is_served {
                let found = used.only_disk().err().unwrap_or_else(|| "another device is over it".to_owned());
                let why = format!(
                    "{} is not just over its volume {}: {found}; a backup tool may have put an overlay or a filter there: remove it first \
                     (QMP: block-commit, then block-job-complete), or stop the VM and release it then",
                    kept.device, kept.volume
                );
                return Err(VmError::Disk { vm: adopted.name.clone(), why }.into());
            }
            if seen.is_served {
                let (claim, volume) =
                    self.claims.claim_to_remove(&kept.volume, RemoveVolume::default()).await?;
                self.claims.require_unordered(volume, &kept.volume)?;
                drop(claim);
            }
        }
        Ok(())
    }

    /// Returns whether a disk of a VM has no image.
    pub(crate) async fn has_lost_a_disk(&self, adopted: &Adopted, qemu: &Qemu) -> Result<bool, RequestError> {
        let look = self.look_at_disks(adopted, qemu).await?;
        Ok(look.disks.iter().any(|disk| disk.over == Over::Nothing))
    }

    /// Returns whether the volume of an adopted disk exists. Another volume may have its name.
    fn serves(&self, kept: &AdoptedDisk) -> bool {
        let record = self.claims.record_named(&kept.volume);
        record.is_ok_and(|record| record.image.place.file().map(Path::new) == Some(&kept.file))
    }

    /// Serves the image of a disk as its volume, at a socket of its QEMU's user.
    async fn serve_disk(self: &Arc<Self>, adopted: &Adopted, kept: &AdoptedDisk) -> Result<(), RequestError> {
        if let Some(user) = adopted.user {
            self.sockets.grants().give(&kept.volume, user);
        }
        let text = kept.file.to_str().ok_or_else(|| not_utf8(&kept.file))?;
        let source = VolumeSource::Add {
            image: Some(text.to_owned()),
            device: None,
            nbd: None,
            format: Some(shown(format_named(&kept.format))),
            fenced: false,
        };
        let order = NewVolume { name: kept.volume.clone(), source, export: api::ExportSettings::default() };
        Arc::clone(&self.volume_orders).create_volume(order).await.map(drop)
    }

    /// Releases the images of a VM whose QEMU has ended.
    pub(crate) async fn stop_serving(self: &Arc<Self>, adopted: &Adopted) -> Result<(), RequestError> {
        for kept in adopted.disks.iter().filter(|kept| self.serves(kept)) {
            self.remove_given_back(kept).await?;
        }
        Ok(())
    }

    /// Removes the volume of a disk and keeps its image.
    async fn remove_given_back(self: &Arc<Self>, kept: &AdoptedDisk) -> Result<(), RequestError> {
        // N.B. Without force: a connected client uses the volume, whatever its QEMU says, and also if QEMU seems to have ended.
        let how = RemoveVolume { keep_image: true, ..RemoveVolume::default() };
        Arc::clone(&self.volume_orders).remove_unused_volume(kept.volume.clone(), how).await?;
        // A later volume of this name does not belong to that user.
        self.sockets.grants().take(&kept.volume);
        Ok(())
    }
}

/// Whether an exchange begins, or continues one of an earlier daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IsNew {
    Yes,
    No,
}

/// Returns what a disk is over. Only its volume's export and its very own file are recognised.
fn over_of(kept: &AdoptedDisk, node: Option<&BlockNode>, used: &ExportUse, process: &Launched) -> Over {
    let is_unused = used.nodes.is_empty() && used.disks.is_empty();
    match node {
        Some(node) if node.is_over_nothing() => Over::Nothing,
        _ if used.only_disk().is_ok_and(|disk| disk.device == kept.device) => Over::Export,
        _ if !is_unused => Over::Unknown,
        None => Over::Gone,
        Some(node) if is_top(kept, node) && has_open(process, &kept.file) => Over::File,
        Some(_) => Over::Elsewhere,
    }
}

/// Returns whether a node is the layer of the disk's own file. If another program has made a snapshot, QEMU has the file open as
/// well, but below an overlay, which has the latest writes and must not be dropped.
fn is_top(kept: &AdoptedDisk, node: &BlockNode) -> bool {
    let is_file = || {
        let found = held::find(Path::new(&node.file));
        found.is_ok_and(|found| held::find(&kept.file).is_ok_and(|file| numbers(&file) == numbers(&found)))
    };
    node.name == kept.node || node.is_of_exchange(kept.number) || is_file()
}

fn has_open(process: &Launched, file: &Path) -> bool {
    held::find(file).is_ok_and(|found| process.descriptors_of(numbers(&found), Use::Read) > 0)
}

fn numbers(found: &Held) -> (u64, u64) {
    (found.identity().device, found.identity().inode)
}

pub(crate) fn name_of(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Raw => "raw",
        ImageFormat::Qcow2 => "qcow2",
    }
}

/// Returns the format with this QEMU name. Other formats are not adopted.
pub(crate) fn format_named(name: &str) -> ImageFormat {
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

#[cfg(test)]
mod tests {
    use hypervisor::qemu::{DiskOptions, LocalDisk};

    use super::*;

    fn adopted(file: PathBuf) -> AdoptedDisk {
        let options = DiskOptions {
            is_read_only: false,
            cache_direct: false,
            cache_no_flush: false,
            detect_zeroes: "off".to_owned(),
        };
        let disk = LocalDisk {
            device: "/machine/peripheral/d/virtio-backend".to_owned(),
            drive: String::new(),
            node: "root".to_owned(),
            is_named: true,
            format: "raw".to_owned(),
            file_node: None,
            file,
            backing: Vec::new(),
            size_bytes: 4096,
            options,
        };
        AdoptedDisk::of(&disk, "v".to_owned(), 3)
    }

    #[test]
    fn a_disk_below_an_overlay_of_another_program_is_not_over_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let [base, overlay] = ["base.raw", "overlay.qcow2"].map(|name| folder.path().join(name));
        std::fs::write(&base, "base").unwrap();
        std::fs::write(&overlay, "overlay").unwrap();
        let kept = adopted(base.clone());
        let is_top = |name: &str, file: &Path| {
            let node = BlockNode {
                name: name.to_owned(),
                driver: "raw".to_owned(),
                file: file.display().to_string(),
                is_read_only: false,
                is_inactive: false,
                size_bytes: None,
                bitmaps: Vec::new(),
            };
            is_top(&kept, &node)
        };
        assert!(
            is_top("root", &base) && is_top("#block7", &base) && is_top("sterna-fmt-3", Path::new("json:{}"))
        );
        for name in ["#block7", "snap", "sterna-fmt-4"] {
            assert!(!is_top(name, &overlay), "{name}");
        }
        assert!(!is_top("snap", Path::new("json:{}")));
    }
}
