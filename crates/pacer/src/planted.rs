//! Rules of the pacer broken on purpose, to prove that the simulator notices such bugs.
//!
//! Only the feature `planted-bugs` compiles the switch. A bug is chosen per thread, because a simulation runs on one thread.

/// A rule that can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The movers never pause: the first latency that was measured counts for ever.
    NoPauses,
    /// Each mover pauses alone, while others go on.
    PausesOutOfStep,
    /// A guest whose requests are not completed counts as idle.
    StuckIsIdle,
    /// A lower class waits as long as a higher one has anything to do.
    ClassStarves,
}

impl Bug {
    /// All rules that can be broken.
    pub const ALL: [Self; 4] = [Self::NoPauses, Self::PausesOutOfStep, Self::StuckIsIdle, Self::ClassStarves];

    /// Returns its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoPauses => "pacer-no-pauses",
            Self::PausesOutOfStep => "pacer-pauses-out-of-step",
            Self::StuckIsIdle => "pacer-stuck-is-idle",
            Self::ClassStarves => "pacer-class-starves",
        }
    }
}

/// Breaks a rule on this thread from now on; `None`: none.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

#[cfg(feature = "planted-bugs")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

#[cfg(feature = "planted-bugs")]
pub(crate) fn broken(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

#[cfg(not(feature = "planted-bugs"))]
pub(crate) const fn broken(_: Bug) -> bool {
    false
}
