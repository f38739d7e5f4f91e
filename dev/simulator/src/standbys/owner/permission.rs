//! How a host of an owner asks before it serves.

use std::time::Duration;

use standby::asking::{Action, Asking, Event, Known, PERMIT_MAX, Permission, Question, SILENT_MAX, Word};

use super::{Knows, OwnerTask, STANDBY};
use crate::standbys::met::Fault;
use crate::standbys::world::{EVERY, Task, World};

/// How long another program has the images locked, at most.
pub(in crate::standbys) const LOCKED_MAX: Duration = PERMIT_MAX.saturating_mul(3);

impl World {
    /// Returns the permission of a group that is served already: its standby was ordered, or it was handed over.
    pub(super) fn served_already(&self) -> Asking {
        let known = Known { away: Some(Duration::ZERO), ..self.known(None) };
        let mut asking = Asking::begin(self.now, known);
        while asking.poll_action().is_some() {}
        asking
    }

    fn known(&self, host: Option<usize>) -> Known {
        let host = host.map(|host| &self.owners[host]);
        Known {
            is_given_up: false,
            away: host.and_then(|host| host.ended_at).map(|ended| self.now - ended),
            every: EVERY,
            is_replaced: host.is_some_and(|host| host.is_replaced),
            knows_history: host.is_none_or(|host| host.knows != Some(Knows::Nothing)),
            if_silent: self.shape.if_silent,
        }
    }

    /// A process of an owner begins.
    pub(in crate::standbys) fn start_owner(&mut self, host: usize) {
        if self.owners[host].is_up() {
            return;
        }
        self.meet(Fault::Asked);
        self.in_about(Duration::from_millis(300), Task::Connect(host));
        self.begin_to_ask(host);
    }

    /// Asks whether a group may be served.
    fn begin_to_ask(&mut self, host: usize) {
        let known = self.known(Some(host));
        let owner = &mut self.owners[host];
        owner.began_at = self.now;
        owner.may_serve = known.away.is_some_and(|away| away <= EVERY * 2);
        owner.may_serve_until = self.now + PERMIT_MAX;
        owner.asking = Some(Asking::begin(self.now, known));
        self.tell(|_| format!("owner {host} asks: {known:?}"));
        self.drain_asking(host);
    }

    pub(super) fn asking_event(&mut self, host: usize, event: Event) {
        let now = self.now;
        if let Some(asking) = &mut self.owners[host].asking {
            asking.handle_event(now, event);
        }
        self.drain_asking(host);
    }

    pub(super) fn asking_timeout(&mut self, host: usize) {
        let now = self.now;
        if let Some(asking) = self.owners[host].asking.as_mut()
            && asking.poll_timeout().is_some_and(|at| at <= now)
        {
            asking.handle_timeout(now);
        }
        self.drain_asking(host);
    }

    /// Permits to serve although the standby's host is silent, or although its standby was promoted.
    pub(in crate::standbys) fn serve_unasked(&mut self, host: usize) {
        let knows_of_promotion = self.random.percent(10);
        let is_replaced = self.owners[host].permission() == Some(Permission::Replaced);
        let Some(asking) = &mut self.owners[host].asking else { return };
        let ordered = asking.order(knows_of_promotion);
        if is_replaced && !knows_of_promotion && ordered.is_ok() {
            self.violate("a group that was replaced is served although the order does not know of it");
        }
        if ordered.is_ok() {
            (self.owners[host].may_serve, self.owners[host].may_serve_until) = (true, Duration::MAX);
        }
        self.drain_asking(host);
    }

    fn drain_asking(&mut self, host: usize) {
        while let Some(action) = self.owners[host].asking.as_mut().and_then(Asking::poll_action) {
            match action {
                Action::Ask if self.links[host].is_up => {
                    let Some(record) = &self.owners[host].record else { continue };
                    // A life that is drawn anew agrees with nothing.
                    let is_own = self.owners[host].knows != Some(Knows::Nothing);
                    let acknowledged = record.acknowledged.filter(|_| is_own);
                    self.ask(host, Question { standby: STANDBY, life: record.life, acknowledged });
                }
                Action::Ask => {}
                Action::Record { is_replaced } => {
                    self.owner_after_disk(host, OwnerTask::Replaced(is_replaced));
                }
                Action::Permit => self.permit(host),
            }
        }
    }

    fn permit(&mut self, host: usize) {
        let owner = &self.owners[host];
        let was_silent = self.shape.if_silent == standby::asking::IfSilent::Serve
            && !owner.has_heard
            && self.now >= owner.began_at + SILENT_MAX;
        if !owner.may_serve && !was_silent {
            self.violate("a host that has started serves before it has asked");
        }
        if was_silent {
            self.owners[host].may_serve_until = self.now + PERMIT_MAX;
        }
        // Another program has the images locked.
        if self.random.percent(10) && !self.is_calm {
            return self.owner_later(host, LOCKED_MAX, OwnerTask::Unlocked);
        }
        self.serve(host);
    }

    /// Serves a group whose images were locked, if it still may.
    pub(super) fn unlocked(&mut self, host: usize) {
        let (now, owner) = (self.now, &self.owners[host]);
        let may_begin = owner.asking.as_ref().is_some_and(|asking| asking.may_begin(now));
        if owner.is_serving {
            return;
        }
        if !may_begin {
            return self.begin_to_ask(host);
        }
        if now > owner.may_serve_until {
            self.violate("a group is served by a permission that has ended");
        }
        self.serve(host);
    }

    /// A word of the standby's host arrives. It was said when `was_promoted`.
    pub(in crate::standbys) fn owner_hears(&mut self, host: usize, word: Word, was_promoted: bool) {
        self.tell(|_| format!("{host} ◄─ {word:?}"));
        let denies = word == Word::NotPromoted;
        if denies && was_promoted {
            self.violate("a host says that it has not promoted what it has promoted");
        }
        let is_used = word == Word::Used && self.owners[host].knows != Some(Knows::Nothing);
        let owner = &mut self.owners[host];
        if (denies || is_used) && !owner.has_heard {
            owner.may_serve = true;
            // An order of before permits for longer.
            owner.may_serve_until = owner.may_serve_until.max(self.now + PERMIT_MAX);
        }
        self.asking_event(host, Event::Said(word));
    }
}
