//! Faults: their kinds, the planned ones by phase, and the active ones.
//!
//! A fault is drawn with a kind, a phase, the number of the entry into that phase, and a delay. When it is due, a kill, a power
//! cut or a cancellation happens at once. The others open a *window* in which disks, the journal and the messengers ask
//! [`FaultBoard::take`] whether they are struck.

use std::cell::RefCell;
use std::time::Duration;

use migration::Phase;

use crate::random::Random;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// `kill -9` of the daemon; writes in flight may still land.
    Kill,
    PowerCut,
    SourceError,
    TargetError,
    TargetFull,
    /// The target's disk does not answer for seconds, or for ever.
    TargetHang,
    TargetSlow,
    /// The target's disk loses its cache and continues.
    TargetRestart,
    /// The journal cannot be written, or the result is unknown.
    JournalError,
    /// A message comes late, out of order, twice or never.
    MessageMishap,
    /// The migration is cancelled, perhaps too late.
    Cancel,
    /// The target's disk fails its trial, so the volumes are handed back.
    HandBack,
    SourceSlow,
    JournalSlow,
    KillTarget,
    /// `kill -9` of the daemon of an uninvolved host.
    KillOther,
    PowerCutTarget,
    PowerCutOther,
    /// The link between both hosts breaks, and both learn of it.
    LinkCut,
    /// The link swallows all messages, unnoticed for a while.
    LinkSilent,
    /// The link breaks for longer than any wait.
    LinkGone,
    /// The link of source or target to an uninvolved host breaks.
    OtherLinkCut,
    CancelThere,
    /// Another program writes to a kept image.
    ImageTouched,
    /// A host's time of day is set, by hours.
    ClockJump,
}

impl Fault {
    pub(crate) const COUNT: usize = Self::ClockJump as usize + 1;

    pub(crate) const OF_ONE_HOST: [Self; 14] = [
        Self::Kill,
        Self::PowerCut,
        Self::SourceError,
        Self::SourceSlow,
        Self::TargetError,
        Self::TargetFull,
        Self::TargetHang,
        Self::TargetSlow,
        Self::TargetRestart,
        Self::HandBack,
        Self::JournalError,
        Self::JournalSlow,
        Self::MessageMishap,
        Self::Cancel,
    ];

    pub(crate) const BETWEEN_HOSTS: [Self; 23] = [
        Self::Kill,
        Self::KillTarget,
        Self::KillOther,
        Self::PowerCut,
        Self::PowerCutTarget,
        Self::PowerCutOther,
        Self::LinkCut,
        Self::LinkSilent,
        Self::LinkGone,
        Self::OtherLinkCut,
        Self::SourceError,
        Self::SourceSlow,
        Self::TargetError,
        Self::TargetFull,
        Self::TargetHang,
        Self::TargetSlow,
        Self::HandBack,
        Self::JournalError,
        Self::JournalSlow,
        Self::Cancel,
        Self::CancelThere,
        Self::ImageTouched,
        Self::ClockJump,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill -9",
            Self::PowerCut => "power cut",
            Self::SourceError => "source EIO",
            Self::SourceSlow => "source slow",
            Self::TargetError => "target EIO",
            Self::TargetFull => "target full",
            Self::TargetHang => "target hangs",
            Self::TargetSlow => "target slow",
            Self::TargetRestart => "target restart",
            Self::HandBack => "trial fails",
            Self::JournalError => "journal fault",
            Self::JournalSlow => "journal slow",
            Self::MessageMishap => "message fault",
            Self::Cancel => "cancel",
            Self::KillTarget => "kill -9 target",
            Self::KillOther => "kill -9 third",
            Self::PowerCutTarget => "power target",
            Self::PowerCutOther => "power third",
            Self::LinkCut => "link cut",
            Self::LinkSilent => "link silent",
            Self::LinkGone => "link gone",
            Self::OtherLinkCut => "link to third",
            Self::CancelThere => "cancel there",
            Self::ImageTouched => "image touched",
            Self::ClockJump => "clock jumps",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) fault: Fault,
    pub(crate) phase: Phase,
    /// How many entries into the phase are skipped first.
    pub(crate) skip: u32,
    pub(crate) delay: Duration,
    /// How long its window is open; meaningless for immediate faults.
    pub(crate) window: Duration,
    pub(crate) strikes_max: u32,
    pub(crate) percent: u64,
}

pub(crate) struct FaultBoard {
    planned: RefCell<Vec<Planned>>,
    windows: RefCell<Vec<Window>>,
    random: RefCell<Random>,
}

#[derive(Debug)]
struct Window {
    fault: Fault,
    until: Duration,
    strikes_left: u32,
    percent: u64,
}

impl FaultBoard {
    pub(crate) fn new(random: Random) -> Self {
        Self { planned: RefCell::default(), windows: RefCell::default(), random: RefCell::new(random) }
    }

    pub(crate) fn plan(&self, planned: Planned) {
        self.planned.borrow_mut().push(planned);
    }

    pub(crate) fn due(&self, phase: Phase) -> Vec<Planned> {
        let mut due = Vec::new();
        self.planned.borrow_mut().retain_mut(|planned| {
            if planned.phase != phase {
                return true;
            }
            if planned.skip > 0 {
                planned.skip -= 1;
                return true;
            }
            due.push(*planned);
            false
        });
        due
    }

    pub(crate) fn open(&self, planned: &Planned, now: Duration) {
        self.windows.borrow_mut().push(Window {
            fault: planned.fault,
            until: now + planned.window,
            strikes_left: planned.strikes_max,
            percent: planned.percent,
        });
    }

    pub(crate) fn take(&self, fault: Fault, now: Duration) -> bool {
        let mut windows = self.windows.borrow_mut();
        if windows.is_empty() {
            return false;
        }
        windows.retain(|window| window.until >= now && window.strikes_left > 0);
        let Some(window) = windows.iter_mut().find(|window| window.fault == fault) else { return false };
        let strikes = self.random.borrow_mut().percent(window.percent);
        if strikes {
            window.strikes_left -= 1;
        }
        strikes
    }

    pub(crate) fn end(&self) {
        self.planned.borrow_mut().clear();
        self.windows.borrow_mut().clear();
    }
}
