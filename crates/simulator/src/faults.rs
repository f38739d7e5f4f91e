//! Faults: which kinds there are, which are planned for which phase, and which are at work.
//!
//! A fault is drawn as "this kind, once that phase has been entered for the n-th time, and so much later". When it
//! falls due, a kill, a power cut or a cancel happens at once; the others open a *window* in which disks, the journal
//! and the messengers ask [`FaultBoard::take`] whether they are struck.

use std::cell::RefCell;
use std::time::Duration;

use migration::Phase;

use crate::random::Random;

/// A kind of fault, as the table of coverage knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// `kill -9` of the daemon; writes in flight may still land.
    Kill,
    /// The host loses power, and with it everything volatile.
    PowerCut,
    /// The source's disk answers with EIO.
    SourceError,
    /// The target's disk answers with EIO.
    TargetError,
    /// The target's store is full.
    TargetFull,
    /// The target's disk does not answer for seconds, or for ever.
    TargetHang,
    /// The target's disk is a hundred times slower.
    TargetSlow,
    /// The target's disk loses its cache and goes on.
    TargetRestart,
    /// The journal cannot be written, or nobody knows whether it was.
    JournalError,
    /// A message comes late, out of order, twice or never.
    MessageMishap,
    /// Somebody cancels the migration, or tries to.
    Cancel,
    /// The target's disk does not pass its trial, so the volumes are given back.
    HandBack,
    /// The source's disk is a hundred times slower.
    SourceSlow,
    /// The journal takes long.
    JournalSlow,
    /// `kill -9` of the target's daemon.
    KillTarget,
    /// `kill -9` of the daemon of a host that takes no part.
    KillOther,
    /// The target's host loses power.
    PowerCutTarget,
    /// A host that takes no part loses power.
    PowerCutOther,
    /// The link between both hosts breaks, and both are told.
    LinkCut,
    /// The link swallows what it is given, and nobody is told for a while.
    LinkSilent,
    /// The link breaks for longer than anybody waits.
    LinkGone,
    /// The link of one of both to a host that takes no part breaks.
    OtherLinkCut,
    /// Somebody cancels the migration at the target.
    CancelThere,
    /// Somebody writes to an image that was kept.
    ImageTouched,
    /// A host's time of day is set, by hours.
    ClockJump,
}

impl Fault {
    /// How many kinds there are.
    pub(crate) const COUNT: usize = Self::ClockJump as usize + 1;

    /// Those of one host, in the order of the table.
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

    /// Those between hosts, in the order of the table.
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

    /// The name that people see.
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

/// A fault that is to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planned {
    pub(crate) fault: Fault,
    /// The phase that brings it.
    pub(crate) phase: Phase,
    /// How many entries into the phase are let go by first.
    pub(crate) skip: u32,
    /// How long after the entry.
    pub(crate) delay: Duration,
    /// How long its window is open; of no meaning for what happens at once.
    pub(crate) window: Duration,
    /// How often it strikes within the window at most.
    pub(crate) strikes_max: u32,
    /// In how many of a hundred cases it strikes whom it meets.
    pub(crate) percent: u64,
}

/// The faults planned and at work.
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
    /// A board without faults.
    pub(crate) fn new(random: Random) -> Self {
        Self { planned: RefCell::default(), windows: RefCell::default(), random: RefCell::new(random) }
    }

    /// Adds a fault that is to come.
    pub(crate) fn plan(&self, planned: Planned) {
        self.planned.borrow_mut().push(planned);
    }

    /// Takes the faults that the entry into `phase` brings.
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

    /// Opens the window of a fault.
    pub(crate) fn open(&self, planned: &Planned, now: Duration) {
        self.windows.borrow_mut().push(Window {
            fault: planned.fault,
            until: now + planned.window,
            strikes_left: planned.strikes_max,
            percent: planned.percent,
        });
    }

    /// Tells whether somebody who can be struck by `fault` is.
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

    /// Nothing is broken any more: closes all windows and forgets what was planned.
    pub(crate) fn end(&self) {
        self.planned.borrow_mut().clear();
        self.windows.borrow_mut().clear();
    }
}
