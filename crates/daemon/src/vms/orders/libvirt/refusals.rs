//! Explains why the disks of a domain stay where they are, and what to do.

use hypervisor::libvirt::{DomainState, Presence};
use migration::vm::copied::Obstacle;

use crate::error::RequestError;
use crate::vms::{Adopted, AdoptedDisk, VmError};

/// Returns why the disks of a domain cannot be released at present.
pub(crate) fn explain(adopted: &Adopted, presence: Option<Presence>, obstacle: Obstacle) -> RequestError {
    let domain = adopted.libvirt.as_ref().map_or(adopted.name.as_str(), |domain| &domain.name);
    let disk = |index: usize| adopted.disks.get(index);
    let (target, volume) = match obstacle {
        Obstacle::StateUnknown | Obstacle::Saved => ("", ""),
        Obstacle::Above(index)
        | Obstacle::DiskUnknown(index)
        | Obstacle::Remote(index)
        | Obstacle::NoVolume(index) => {
            disk(index).map_or(("", ""), |kept| (kept.device.as_str(), kept.volume.as_str()))
        }
    };
    let why = match obstacle {
        Obstacle::StateUnknown => {
            let state = match presence {
                Some(Presence::Unknown(state) | Presence::There(state)) => state,
                _ => DomainState::NoState,
            };
            format!(
                "libvirt says that the domain {domain} is \"{state}\", which does not show whether it has a QEMU: virsh domstate \
                 {domain} --reason; start it, or shut it off (virsh destroy {domain}), then release it"
            )
        }
        Obstacle::Saved => format!(
            "the domain {domain} has a managed save, which continues with the volumes; start it and release it while it runs \
             (virsh start {domain}), or give its memory up (virsh managedsave-remove {domain})"
        ),
        Obstacle::Above(index) => {
            return disk(index).map_or_else(
                || VmError::NotFound(adopted.name.clone()).into(),
                |kept| stands_above(adopted, kept, "an overlay uses the volume as its backing file"),
            );
        }
        Obstacle::DiskUnknown(_) => format!(
            "{target}: its source is not recognised, so the volume {volume} may be in use: virsh dumpxml {domain}, virsh dumpxml \
             {domain} --inactive; point {target} to the volume again, or detach the disk that uses it"
        ),
        Obstacle::Remote(_) => format!(
            "{target}: the volume {volume} is at another host; move it back first, or start the domain: it is copied while it \
             runs"
        ),
        Obstacle::NoVolume(_) => format!(
            "{target} is over the volume {volume}, which this host does not have: sterna volume list; if it is gone for good, \
             point the disk to another source (virsh edit {domain})"
        ),
    };
    VmError::Disk { vm: adopted.name.clone(), why }.into()
}

/// Returns the error for something unknown on the volume of a disk.
pub(crate) fn stands_above(adopted: &Adopted, kept: &AdoptedDisk, found: &str) -> RequestError {
    let domain = adopted.libvirt.as_ref().map_or(adopted.name.as_str(), |domain| &domain.name);
    let (target, volume) = (&kept.device, &kept.volume);
    let why = format!(
        "{target} is not just over its volume {volume}: {found}; commit the overlay first, while it runs: virsh blockcommit \
         {domain} {target} --active --pivot; an overlay that was added without libvirt must be removed in the same way"
    );
    VmError::Disk { vm: adopted.name.clone(), why }.into()
}

/// Returns the error for a crashed guest whose QEMU was kept.
pub(crate) fn crashed(name: &str, domain: &str) -> RequestError {
    let why = format!(
        "the guest of the domain {domain} has crashed, and libvirt keeps its QEMU, which has the disks open (on_crash=preserve); let it \
         run again (virsh reset {domain}) or end it (virsh destroy {domain}), then release it"
    );
    VmError::Disk { vm: name.to_owned(), why }.into()
}

/// Returns the error for a change of sides that failed although no step did.
pub(crate) fn ended(name: &str) -> RequestError {
    let why = "the copy ended before it was complete: the store may be full, or the domain was shut off or started again; this daemon's \
               log, or libvirt's, says why";
    VmError::Disk { vm: name.to_owned(), why: why.to_owned() }.into()
}
