//! Whether a domain has a QEMU, and its state: from all of libvirt's answers, with the unknown cases.

/// `VIR_DOMAIN_SHUTOFF_SAVED`: the domain is shut off because its memory was saved to a file.
const REASON_SAVED: i32 = 5;

/// The state of a domain, as libvirt reports it (`virDomainState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainState {
    /// libvirt reports no state.
    NoState,
    /// Its processors are running.
    Running,
    /// It waits for something; QEMU's domains never do.
    Blocked,
    /// Its processors are stopped.
    Paused,
    /// Its guest is shutting down.
    ShuttingDown,
    /// It is not running.
    ShutOff,
    /// Its guest has crashed, and its QEMU may have been kept (`on_crash=preserve`).
    Crashed,
    /// Its guest has suspended it.
    Suspended,
    /// An unknown number of a state.
    Unknown(i32),
}

impl DomainState {
    pub(super) fn of(number: i32) -> Self {
        match number {
            0 => Self::NoState,
            1 => Self::Running,
            2 => Self::Blocked,
            3 => Self::Paused,
            4 => Self::ShuttingDown,
            5 => Self::ShutOff,
            6 => Self::Crashed,
            7 => Self::Suspended,
            other => Self::Unknown(other),
        }
    }
}

impl std::fmt::Display for DomainState {
    /// Writes the state as virsh does.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoState => f.write_str("no state"),
            Self::Running => f.write_str("running"),
            Self::Blocked => f.write_str("idle"),
            Self::Paused => f.write_str("paused"),
            Self::ShuttingDown => f.write_str("in shutdown"),
            Self::ShutOff => f.write_str("shut off"),
            Self::Crashed => f.write_str("crashed"),
            Self::Suspended => f.write_str("pmsuspended"),
            Self::Unknown(number) => write!(f, "state {number}"),
        }
    }
}

/// The known state of a domain's QEMU and of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Its QEMU exists, in this state.
    There(DomainState),
    /// It has no QEMU and no saved memory.
    Absent,
    /// It has no QEMU; the next start continues from a memory that libvirt has saved (`virsh managedsave`).
    ManagedSave,
    /// It has no QEMU; its memory was saved to a file that libvirt does not keep (`virsh save`).
    Saved,
    /// libvirt's answers are inconsistent, or unknown here.
    Unknown(DomainState),
}

impl Presence {
    /// Combines libvirt's answers: a domain has no QEMU only if both its state and its activity say so.
    pub(super) fn of(state: DomainState, is_active: bool, is_saved: SavedMemory) -> Self {
        match (state, is_active, is_saved) {
            (DomainState::ShutOff, false, SavedMemory::None) => Self::Absent,
            (DomainState::ShutOff, false, SavedMemory::Managed) => Self::ManagedSave,
            (DomainState::ShutOff, false, SavedMemory::InFile) => Self::Saved,
            (DomainState::ShutOff | DomainState::NoState | DomainState::Unknown(_), _, _) | (_, false, _) => {
                Self::Unknown(state)
            }
            (_, true, _) => Self::There(state),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SavedMemory {
    None,
    Managed,
    /// Its memory is in a file that the administrator keeps.
    InFile,
}

impl SavedMemory {
    /// Interprets the reason of a state. libvirt forgets reasons when it is restarted.
    pub(super) fn of_reason(state: DomainState, reason: i32) -> Self {
        let is_saved = state == DomainState::ShutOff && reason == REASON_SAVED;
        if is_saved { Self::InFile } else { Self::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_has_no_qemu_only_if_its_state_and_its_activity_say_so() {
        for number in -1..=20 {
            let state = DomainState::of(number);
            for is_active in [false, true] {
                let presence = Presence::of(state, is_active, SavedMemory::None);
                let is_absent = presence == Presence::Absent;
                assert_eq!(is_absent, number == 5 && !is_active, "{number} {is_active}");
                let is_there = matches!(presence, Presence::There(_));
                assert_eq!(is_there, is_active && matches!(number, 1..=4 | 6 | 7), "{number} {is_active}");
            }
        }
        // A crashed guest has a QEMU if libvirt was configured to keep it.
        assert_eq!(
            Presence::of(DomainState::Crashed, true, SavedMemory::None),
            Presence::There(DomainState::Crashed)
        );
        let saved = Presence::of(DomainState::ShutOff, false, SavedMemory::Managed);
        assert_eq!(saved, Presence::ManagedSave);
        assert_eq!(SavedMemory::of_reason(DomainState::ShutOff, 5), SavedMemory::InFile);
        assert_eq!(SavedMemory::of_reason(DomainState::Paused, 5), SavedMemory::None);
        assert_eq!(DomainState::of(9).to_string(), "state 9");
    }
}
