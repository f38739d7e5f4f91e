//! Text about domains of libvirt that move.

use super::plan;
use crate::commands::DomainMove;

/// Returns the steps that a move would have, and what moving the disks means.
pub(crate) fn planned(planned: &DomainMove) -> String {
    let DomainMove { domain, host, steps, disks, .. } = planned;
    if steps.is_empty() {
        return format!("everything of {domain} is at {host}\n");
    }
    let mut text = format!("domain {domain} to {host}:\n");
    for (number, step) in (1..).zip(steps) {
        text += &format!("  {number}. {step}\n");
    }
    if let Some(disks) = disks {
        text += "\n";
        text += &plan(disks);
    }
    text
}

/// Returns what a move has done, and what is left for a user.
pub(crate) fn moved(moved: &DomainMove) -> String {
    let DomainMove { domain, host, volumes, .. } = moved;
    let volumes = volumes.join(", ");
    format!(
        "domain {domain} is at {host} with its disks: {volumes}\n\
         so that sterna there knows it as a VM: sterna vm adopt --libvirt {domain}\n"
    )
}
