//! A stopped VM that moves with its volumes: what its target keeps of it, and when its volumes may change hands.
//!
//! ```text
//!   source                                        target
//!     │ ── description, to copy ────────────────► │ examined ─► kept, durably ─► answer
//!     │    volumes are copied …                   │
//!     │ ── description, to hand over ───────────► │ kept, or the same is kept ─► hook ─► answer
//!     │    hook ─► volumes change hands           │
//! ```
//! A stopped VM has no memory, so no process holds anything of it. Either daemon may be killed: the source asks again, and the
//! target finds what it has kept. **N.B.** The source deletes the VM once its volumes are the target's, so the target keeps the VM
//! before it answers, and the source asks once more before the handover.

use crate::planted::{Bug, broken};

/// How a VM moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The VM moves with its memory: it has a hypervisor.
    #[default]
    Live,
    /// The VM has no memory: it is stopped, and stays stopped.
    Cold,
}

/// Whether a VM has a hypervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hypervisor {
    /// There is none: the VM is stopped, or has crashed.
    Ended,
    /// It is being started or searched, or it does not answer.
    Unknown,
    /// It answers, also for a guest that has shut down or crashed.
    Exists,
}

/// Returns how a VM moves; `None`: that is not known yet, and the VM does not move.
pub fn form(hypervisor: Hypervisor) -> Option<Form> {
    match hypervisor {
        Hypervisor::Ended => Some(Form::Cold),
        Hypervisor::Exists => Some(Form::Live),
        Hypervisor::Unknown => None,
    }
}

/// The reason why a source asks its target to keep a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The volumes are copied next.
    Copying,
    /// The volumes change hands next.
    Handover,
}

/// What a target has under the name of an arriving VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing has the name.
    Nothing,
    /// The described VM, complete.
    Same,
    /// This VM by an earlier description.
    Earlier,
    /// A VM that did not come by this migration.
    Another,
}

/// A step of a target that is asked to keep a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Check that the name is free and that the VM could run here.
    Examine,
    /// Forget what is kept of the VM.
    Forget,
    /// Make the VM durable: its definition, its files, the state of its TPM.
    Keep,
    /// Run the hook before the handover; later requests find it done.
    RunHook,
    /// Answer that the VM is kept.
    Answer,
    /// Answer that another VM has the name.
    Refuse,
}

/// Returns the steps of a target, in order; the first failure is its answer.
pub fn steps(found: Found, purpose: Purpose) -> Vec<Step> {
    let keeps: &[Step] = match found {
        Found::Nothing if broken(Bug::ColdVmKeptAfterAnswer) => &[Step::Answer, Step::Examine, Step::Keep],
        Found::Nothing => &[Step::Examine, Step::Keep],
        Found::Same => &[],
        Found::Earlier => &[Step::Forget, Step::Examine, Step::Keep],
        Found::Another => return vec![Step::Refuse],
    };
    let hook = (purpose == Purpose::Handover).then_some(Step::RunHook);
    keeps.iter().copied().chain(hook).chain([Step::Answer]).collect()
}

/// Returns whether the target must have kept the VM for this purpose before the source continues.
pub fn is_asked(purpose: Purpose) -> bool {
    !(purpose == Purpose::Handover && broken(Bug::ColdVmNotAskedAgain))
}

/// The place of a disk whose VM is to be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// The disk is at this host.
    Here,
    /// The disk is at another host, which serves clients of this one because the administrator ordered it.
    ServedFromThere,
    /// The disk is at another host. Clients that stayed connected may still be served from there.
    Elsewhere,
}

/// Returns whether a VM may be started with such a disk. **N.B.** A guest that begins over the link depends on another host, and
/// nobody has ordered that.
pub fn may_start_with(disk: Disk) -> bool {
    disk != Disk::Elsewhere
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_with_a_hypervisor_moves_live_and_an_unknown_one_not_at_all() {
        assert_eq!(form(Hypervisor::Ended), Some(Form::Cold));
        assert_eq!(form(Hypervisor::Exists), Some(Form::Live));
        assert_eq!(form(Hypervisor::Unknown), None);
    }

    #[test]
    fn a_target_answers_last_and_keeps_a_vm_once() {
        for found in [Found::Nothing, Found::Same, Found::Earlier] {
            for purpose in [Purpose::Copying, Purpose::Handover] {
                let steps = steps(found, purpose);
                assert_eq!(steps.last(), Some(&Step::Answer), "{found:?} {purpose:?}");
                assert_eq!(steps.iter().filter(|step| **step == Step::Answer).count(), 1);
                assert_eq!(steps.contains(&Step::Keep), found != Found::Same, "{found:?} {purpose:?}");
                assert_eq!(steps.contains(&Step::RunHook), purpose == Purpose::Handover);
            }
        }
        assert_eq!(steps(Found::Earlier, Purpose::Copying).first(), Some(&Step::Forget));
        assert_eq!(steps(Found::Another, Purpose::Handover), [Step::Refuse]);
    }

    #[test]
    fn a_target_is_asked_before_the_copying_and_again_before_the_handover() {
        assert!(is_asked(Purpose::Copying) && is_asked(Purpose::Handover));
    }

    #[test]
    fn a_vm_starts_over_the_link_only_if_its_disk_is_served_so_by_order() {
        assert!(may_start_with(Disk::Here) && may_start_with(Disk::ServedFromThere));
        assert!(!may_start_with(Disk::Elsewhere));
    }
}
