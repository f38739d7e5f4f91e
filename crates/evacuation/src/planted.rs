//! Rules broken on purpose, to prove that the campaign of this crate notices such bugs.
//!
//! Only tests compile the switch. Elsewhere [`broken`] is a constant `false`.

/// A rule that can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    /// Workloads begin in the order of their numbers.
    PriorityIgnored,
    /// A lower workload begins beside a higher one that needs the whole path.
    LateIsNotProtected,
    /// A drained or unreachable target is taken.
    ClosedTargetTaken,
    /// The room of a store is not counted down.
    RoomNotCounted,
    /// A workload whose target is lost waits for it for ever.
    LostTargetAwaited,
    /// A failed workload is not tried again, and does not end.
    FailureForgotten,
    /// A VM that will be late is stopped only at the deadline itself.
    StoppedTooLate,
    /// The number of transfers of a path is not limited.
    PlacesUnlimited,
    /// After the order to end workloads still begin.
    BegunAfterAbort,
}

#[cfg(test)]
impl Bug {
    pub(crate) const ALL: [Self; 9] = [
        Self::PriorityIgnored,
        Self::LateIsNotProtected,
        Self::ClosedTargetTaken,
        Self::RoomNotCounted,
        Self::LostTargetAwaited,
        Self::FailureForgotten,
        Self::StoppedTooLate,
        Self::PlacesUnlimited,
        Self::BegunAfterAbort,
    ];
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Breaks a rule on this thread from now on; `None`: none.
#[cfg(test)]
pub(crate) fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

#[cfg(test)]
pub(crate) fn broken(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

#[cfg(not(test))]
pub(crate) const fn broken(_: Bug) -> bool {
    false
}
