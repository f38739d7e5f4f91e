//! A VM whose disks lack blocks that another host has, and whose hypervisor stops it when a disk fails and asks again when it goes
//! on: what is done for it, at each look.
//!
//! ```text
//!            noted ──► waits limited        a read is refused, the guest is stopped        what it was refused has come
//!   Free ─────────────────────────► Limited ─────────────────────────────► Stopped (said) ───────────────────────────┐
//!     ▲                                │ nothing is missing any more                                                   │
//!     └──────────── forgotten ◄────────┴───────── forgotten ◄── goes on ◄── waits unlimited ◄────────────────────────┘
//! ```
//! **N.B.** We stop the guest by an error, so that it is for us to let it go on, whoever is killed in between: the note is durable
//! before a read may be refused, and is removed when none can be any more. A guest that something else has stopped is left as it is.

/// What is seen of a VM at one look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Whether it is this host's alone, and its hypervisor answers.
    pub is_here: bool,
    /// Whether a disk of it lacks blocks that another host has.
    pub lacks_blocks: bool,
    /// Whether its hypervisor stops it at each error of a disk, and asks again.
    pub stops_at_errors: bool,
    /// What is noted of it.
    pub note: Note,
    /// What it does.
    pub guest: Guest,
    /// What has become of its late reads.
    pub late: Late,
}

/// What is noted of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// Nothing.
    None,
    /// That its reads may be refused.
    Ours,
    /// That it is paused for another reason.
    Other,
}

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// It runs.
    Runs,
    /// An error of a disk has stopped it.
    StoppedByError,
    /// It does not run for another reason.
    Otherwise,
}

/// What has become of reads that were refused because they had waited as long as they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// There were none since the guest was let go on.
    None,
    /// What they were refused for has not come.
    Owed,
    /// It has come; or nobody knows whether there were any.
    Came,
}

/// What is done. One that fails ends the list; what is left is for the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Note durably that its reads may be refused.
    Note,
    /// Have reads of what is missing wait so long at most.
    Limit,
    /// Have them wait for however long; from when it is done none is refused.
    Lift,
    /// Say that the guest is stopped, and for what.
    Say,
    /// Say nothing of it any more.
    Unsay,
    /// Let the guest go on.
    Continue,
    /// Remove the note.
    Forget,
}

/// What is to be done for a VM, in order.
pub fn steps(seen: Seen) -> &'static [Step] {
    use Step::{Continue, Forget, Lift, Limit, Note as MakeNote, Say, Unsay};

    let is_ours_to_stop = seen.is_here && seen.note != Note::Other;
    match (seen.lacks_blocks, seen.note) {
        // Who moves it, or does something to its disks, decides whether it runs.
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
