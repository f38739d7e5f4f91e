//! Handles a VM whose disks lack blocks of another host, and whose hypervisor stops it on I/O errors and repeats the request on
//! resume. Returns the steps at each check.
//!
//! ```text
//!            noted ──► waits limited        a read is refused, the guest is stopped        the refused blocks arrive
//!   Free ─────────────────────────► Limited ─────────────────────────────► Stopped (reported) ───────────────────────┐
//!     ▲                                │ nothing is missing                                                          │
//!     └──────────── forgotten ◄────────┴───────── forgotten ◄── resumed ◄── waits unlimited ◄────────────────────────┘
//! ```
//! **N.B.** Sterna stops the guest by an error, so Sterna must resume it, even after a kill. The note is durable before a read
//! may be refused, and is removed when none can be. A guest that was stopped for another reason is left as it is.

/// The observed state of a VM at one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Whether the VM is only at this host, and its hypervisor answers.
    pub is_here: bool,
    /// Whether one of its disks lacks blocks that another host has.
    pub lacks_blocks: bool,
    /// Whether its hypervisor stops it on I/O errors, and repeats the request on resume.
    pub stops_at_errors: bool,
    /// The note about the VM.
    pub note: Note,
    /// The guest's run state.
    pub guest: Guest,
    /// The state of its late reads.
    pub late: Late,
}

/// The note about a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// There is no note.
    None,
    /// The VM's reads may be refused.
    Ours,
    /// The VM is paused for another reason.
    Other,
}

/// The run state of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// The guest's processors run.
    Runs,
    /// An I/O error has stopped it.
    StoppedByError,
    /// It does not run, for another reason.
    Otherwise,
}

/// The state of reads that were refused at their time limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// There were none since the guest was last resumed.
    None,
    /// The blocks of these reads have not arrived.
    Owed,
    /// The blocks have arrived; or it is not known whether there were such reads.
    Came,
}

/// A step for the VM. A failed step ends the list; the rest is left to the next check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Note durably that its reads may be refused.
    Note,
    /// Limit the wait of reads for missing blocks.
    Limit,
    /// Remove the limit; after this step no read is refused.
    Lift,
    /// Report that the guest is stopped, and why.
    Say,
    /// Withdraw the report about the guest.
    Unsay,
    /// Resume the stopped guest.
    Continue,
    /// Remove the note about the VM.
    Forget,
}

/// Returns the steps for a VM, in order.
pub fn steps(seen: Seen) -> &'static [Step] {
    use Step::{Continue, Forget, Lift, Limit, Note as MakeNote, Say, Unsay};

    let is_ours_to_stop = seen.is_here && seen.note != Note::Other;
    match (seen.lacks_blocks, seen.note) {
        // The operation that moves the VM, or changes its disks, decides whether it runs.
        (true, _) if !is_ours_to_stop => &[Lift],
        (true, Note::Ours) => match (seen.guest, seen.late) {
            (Guest::StoppedByError, Late::Came) => &[Lift, Continue, Unsay, Forget],
            (Guest::StoppedByError, Late::Owed) => &[Limit, Say],
            _ => &[Limit, Unsay],
        },
        (true, _) if seen.stops_at_errors => &[MakeNote, Limit],
        (false, Note::Ours) if seen.is_here => match (seen.guest, seen.late) {
            (Guest::StoppedByError, Late::Came | Late::Owed) => &[Continue, Unsay, Forget],
            _ => &[Unsay, Forget],
        },
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Seen> {
        let mut all = Vec::new();
        for bits in 0..8 {
            let [is_here, lacks_blocks, stops_at_errors] = [1, 2, 4].map(|bit| bits & bit != 0);
            for note in [Note::None, Note::Ours, Note::Other] {
                for guest in [Guest::Runs, Guest::StoppedByError, Guest::Otherwise] {
                    for late in [Late::None, Late::Owed, Late::Came] {
                        all.push(Seen { is_here, lacks_blocks, stops_at_errors, note, guest, late });
                    }
                }
            }
        }
        all
    }

    #[test]
    fn reads_are_refused_only_while_that_is_noted_of_a_guest_that_is_stopped_by_errors() {
        for seen in all() {
            let (mut is_noted, mut is_limited) = (seen.note == Note::Ours, seen.lacks_blocks);
            for step in steps(seen) {
                match step {
                    Step::Note => {
                        assert!(seen.stops_at_errors && seen.note == Note::None, "{seen:?}");
                        is_noted = true;
                    }
                    Step::Limit => assert!(is_noted && seen.is_here, "{seen:?}"),
                    Step::Lift => is_limited = false,
                    Step::Forget => assert!(!is_limited, "{seen:?}"),
                    Step::Continue | Step::Say | Step::Unsay => {}
                }
            }
        }
    }

    #[test]
    fn only_a_guest_that_late_reads_have_stopped_goes_on_and_only_once_they_need_not_wait_again() {
        for seen in all() {
            let continues = steps(seen).contains(&Step::Continue);
            let is_stopped_by_us = seen.is_here
                && seen.note == Note::Ours
                && seen.guest == Guest::StoppedByError
                && (seen.late == Late::Came || seen.late == Late::Owed && !seen.lacks_blocks);
            assert_eq!(continues, is_stopped_by_us, "{seen:?}");
        }
    }

    #[test]
    fn a_guest_that_waits_is_told_of_and_only_then() {
        for seen in all() {
            let waits = seen.is_here
                && seen.lacks_blocks
                && (seen.note, seen.guest, seen.late) == (Note::Ours, Guest::StoppedByError, Late::Owed);
            assert_eq!(steps(seen).contains(&Step::Say), waits, "{seen:?}");
        }
    }
}
