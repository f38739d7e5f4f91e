//! Steps at which a test kills the daemon, so that it knows exactly what `kill -9` or a power cut leaves.
//! `STERNA_FAIL_POINT=before-released` makes the process kill itself just before a *released* record is written,
//! `after-released` just after it is durable; `after-discard@2` when this step is passed for the second time.
//! Fail points are always compiled in, so tests kill the very program that is shipped. Passing one costs one atomic load on
//! paths that end in a disk write. A user who can set the daemon's environment can kill it anyway.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Signal, getpid, kill_process};

/// The environment variable that names a fail point.
pub const VARIABLE: &str = "STERNA_FAIL_POINT";

/// A step that changes what is found after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The journal records an added volume.
    Added,
    /// The journal records the removal of a volume.
    Removed,
    /// The journal records the start of a migration.
    Started,
    /// The journal records a target's promise to wait.
    Prepared,
    /// The journal records the end of an attempt at the handover.
    Aborted,
    /// The journal records that a target's images are about to be deleted.
    Discarding,
    /// The journal records the release: the commit point.
    Released,
    /// The journal records the new ownership.
    Owned,
    /// The journal records that a volume was handed back.
    HandedBack,
    /// The journal records the end of a migration.
    Ended,
    /// The journal records that a volume is about to grow.
    ResizeBegun,
    /// The journal records a volume's new size, or that it keeps the old one.
    Resized,
    /// The journal records that volumes are to be reverted.
    RevertBegun,
    /// The journal records that a volume is reverted.
    Reverted,
    /// The image of an interrupted growth is brought to its size.
    Grow,
    /// An image file is made.
    CreateImage,
    /// A half-made target is deleted.
    Discard,
    /// A source image after a move is deleted or renamed.
    Retire,
    /// A compacted journal replaces the old one.
    Compact,
    /// The process of a VM is started.
    Launch,
    /// A stopped VM that arrives is recorded.
    Keep,
    /// One step suspends a VM.
    Suspend,
    /// One step restores a suspended VM.
    Restore,
    /// One step of an adoption or a release switches a disk of the VM.
    Exchange,
    /// An ended daemon passes its clients on.
    PassOn,
    /// The next daemon adopts those clients.
    TakeUp,
}

/// The armed fail point, if there is one.
#[derive(Debug)]
struct Armed {
    side: Side,
    step: Step,
    /// The number of passes before it takes effect.
    passes_left: AtomicU32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Before,
    After,
    /// The lane that passes the step panics; the daemon survives.
    Lane,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

/// The value of [`VARIABLE`] names no step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{VARIABLE}=\"{text}\" names no step: write before-STEP, after-STEP or lane-STEP, with @N for the N-th time; steps: {steps}"
)]
pub struct UnknownFailPoint {
    text: String,
    steps: String,
}

/// Reads [`VARIABLE`]. Before this call, and without the variable, no step has an effect.
///
/// # Errors
/// [`UnknownFailPoint`]: the variable names no step, so a test with it would test nothing.
pub fn arm_from_environment() -> Result<(), UnknownFailPoint> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let text = text.to_string_lossy();
    let armed = parse(&text).ok_or_else(|| UnknownFailPoint {
        text: text.into_owned(),
        steps: Step::ALL.map(Step::name).join(", "),
    })?;
    tracing::warn!(point = ?armed, "this daemon will kill itself: {VARIABLE} is set");
    // A second daemon in the same process is armed already.
    let _ = ARMED.set(Some(armed));
    Ok(())
}

/// Ends the process here if the fail point is armed.
pub(crate) fn before(step: Step) {
    pass(Side::Before, step);
}

/// Ends the process here if the fail point is armed.
pub(crate) fn after(step: Step) {
    pass(Side::After, step);
}

/// Ends the lane on the calling thread if the fail point is armed.
#[expect(clippy::panic, reason = "a test asks for it, to see that the daemon survives a defect of a lane")]
pub(crate) fn in_lane(step: Step) {
    if is_reached(Side::Lane, step) {
        panic!("the fail point of {step:?}");
    }
}

fn is_reached(side: Side, step: Step) -> bool {
    let Some(Some(armed)) = ARMED.get() else { return false };
    let is_it = armed.side == side && armed.step == step;
    is_it && armed.passes_left.fetch_sub(1, Ordering::SeqCst) == 1
}

fn pass(side: Side, step: Step) {
    if is_reached(side, step) {
        tracing::error!(?side, ?step, "killing this process: {VARIABLE} asked for it");
        // SIGKILL rather than `abort`: no handler, no destructor, no core file.
        let _ = kill_process(getpid(), Signal::KILL);
        loop {
            std::thread::park();
        }
    }
}

fn parse(text: &str) -> Option<Armed> {
    let (point, passes) = match text.split_once('@') {
        Some((point, passes)) => (point, passes.parse().ok().filter(|passes| *passes > 0)?),
        None => (text, 1),
    };
    let (side, name) = point.split_once('-')?;
    let side = match side {
        "before" => Side::Before,
        "after" => Side::After,
        "lane" => Side::Lane,
        _ => return None,
    };
    let step = Step::ALL.into_iter().find(|step| step.name() == name)?;
    Some(Armed { side, step, passes_left: AtomicU32::new(passes) })
}

impl Step {
    /// All steps in their order.
    pub const ALL: [Self; 26] = [
        Self::Added,
        Self::Removed,
        Self::Started,
        Self::Prepared,
        Self::Aborted,
        Self::Discarding,
        Self::Released,
        Self::Owned,
        Self::HandedBack,
        Self::Ended,
        Self::ResizeBegun,
        Self::Resized,
        Self::RevertBegun,
        Self::Reverted,
        Self::Grow,
        Self::CreateImage,
        Self::Discard,
        Self::Retire,
        Self::Compact,
        Self::Launch,
        Self::Keep,
        Self::Suspend,
        Self::Restore,
        Self::Exchange,
        Self::PassOn,
        Self::TakeUp,
    ];

    /// Returns the step's name in [`VARIABLE`].
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Started => "started",
            Self::Prepared => "prepared",
            Self::Aborted => "aborted",
            Self::Discarding => "discarding",
            Self::Released => "released",
            Self::Owned => "owned",
            Self::HandedBack => "handed-back",
            Self::Ended => "ended",
            Self::ResizeBegun => "resize-begun",
            Self::Resized => "resized",
            Self::RevertBegun => "revert-begun",
            Self::Reverted => "reverted",
            Self::Grow => "grow",
            Self::CreateImage => "create-image",
            Self::Discard => "discard",
            Self::Retire => "retire",
            Self::Compact => "compact",
            Self::Launch => "launch",
            Self::Keep => "keep",
            Self::Suspend => "suspend",
            Self::Restore => "restore",
            Self::Exchange => "exchange",
            Self::PassOn => "pass-on",
            Self::TakeUp => "take-up",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Side, Step, parse};

    #[test]
    fn points_are_read_by_side_step_and_pass() {
        for step in Step::ALL {
            let armed = parse(&format!("after-{}@3", step.name())).unwrap();
            assert_eq!((armed.side, armed.step, armed.passes_left.into_inner()), (Side::After, step, 3));
        }
        assert_eq!(parse("before-owned").unwrap().passes_left.into_inner(), 1);
        for text in ["", "owned", "during-owned", "before-owner", "before-owned@0", "before-owned@x"] {
            assert!(parse(text).is_none(), "{text}");
        }
    }
}
