//! One branch of the volumes' history: the guests that write it. There is one, until somebody forces a promotion.
//!
//! ```text
//!   trunk      guests ──► home ──► … forwarded, host by host … ──► owner
//!   a branch   other guests, which began with what the promoted copy held
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::place::Place;
use crate::guest::Guest;

/// The branch that all volumes begin on.
pub(super) const TRUNK: usize = 0;

pub(super) struct Branch {
    pub(super) number: usize,
    pub(super) guests: Vec<Rc<Guest>>,
    /// The host that the guests are connected to.
    home: Cell<Place>,
    /// Where its volumes rested last; nowhere at first.
    pub(super) seen_at: Cell<Option<Place>>,
    /// How often they have come to rest at another host than before, the first included.
    pub(super) arrivals: Cell<u32>,
    /// Where they have been.
    pub(super) been_at: RefCell<BTreeSet<Place>>,
    /// Where the guests are about to go.
    pub(super) goes: Cell<Option<Place>>,
    /// The copy that it began with did not answer, and the volumes stayed where they were.
    is_over: Cell<bool>,
    /// Power was cut under the guests, and what was lost has yet to be looked at.
    pub(super) power_was_cut: Cell<bool>,
}

#[derive(Default)]
pub(super) struct Branches(RefCell<Vec<Rc<Branch>>>);

impl Branch {
    /// The host that the guests are connected to.
    pub(super) fn home(&self) -> Place {
        self.home.get()
    }

    /// The guests are connected to another host from now on.
    pub(super) fn move_home(&self, home: Place) {
        self.home.set(home);
    }

    /// Nothing comes of it: its guests have no disks.
    pub(super) fn end(&self) {
        self.is_over.set(true);
        self.guests.iter().for_each(|guest| guest.power_cut());
    }

    /// Tells whether no guest waits for anything.
    pub(super) fn is_idle(&self) -> bool {
        self.guests.iter().all(|guest| guest.is_idle())
    }
}

impl Branches {
    /// Opens a branch; returns its number.
    pub(super) fn open(&self, guests: Vec<Rc<Guest>>, home: Place) -> usize {
        let mut branches = self.0.borrow_mut();
        let number = branches.len();
        branches.push(Rc::new(Branch {
            number,
            guests,
            home: Cell::new(home),
            seen_at: Cell::default(),
            arrivals: Cell::default(),
            been_at: RefCell::default(),
            goes: Cell::default(),
            is_over: Cell::default(),
            power_was_cut: Cell::default(),
        }));
        number
    }

    /// The branch of that number.
    pub(super) fn get(&self, number: usize) -> Option<Rc<Branch>> {
        self.0.borrow().get(number).cloned()
    }

    /// All of which something came.
    pub(super) fn all(&self) -> Vec<Rc<Branch>> {
        self.0.borrow().iter().filter(|branch| !branch.is_over.get()).cloned().collect()
    }
}
