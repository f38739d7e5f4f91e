//! One branch of the volumes' history, with the guests that write it. There is one until a forced promotion.
//!
//! ```text
//!   trunk      guests ──► home ──► … forwarded, host by host … ──► owner
//!   a branch   other guests, which began with the content of the promoted copy
//! ```

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::place::Place;
use crate::guest::Guest;

pub(super) const TRUNK: usize = 0;

pub(super) struct Branch {
    pub(super) number: usize,
    pub(super) guests: Vec<Rc<Guest>>,
    home: Cell<Place>,
    /// The last host of its volumes; none at first.
    pub(super) seen_at: Cell<Option<Place>>,
    /// How often the volumes have arrived at another host, the first one included.
    pub(super) arrivals: Cell<u32>,
    pub(super) been_at: RefCell<BTreeSet<Place>>,
    pub(super) goes: Cell<Option<Place>>,
    is_over: Cell<bool>,
    /// Power was cut under the guests, and the loss was not checked yet.
    pub(super) power_was_cut: Cell<bool>,
}

#[derive(Default)]
pub(super) struct Branches(RefCell<Vec<Rc<Branch>>>);

impl Branch {
    pub(super) fn home(&self) -> Place {
        self.home.get()
    }

    pub(super) fn move_home(&self, home: Place) {
        self.home.set(home);
    }

    pub(super) fn end(&self) {
        self.is_over.set(true);
        self.guests.iter().for_each(|guest| guest.power_cut());
    }

    pub(super) fn is_idle(&self) -> bool {
        self.guests.iter().all(|guest| guest.is_idle())
    }
}

impl Branches {
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

    pub(super) fn get(&self, number: usize) -> Option<Rc<Branch>> {
        self.0.borrow().get(number).cloned()
    }

    pub(super) fn all(&self) -> Vec<Rc<Branch>> {
        self.0.borrow().iter().filter(|branch| !branch.is_over.get()).cloned().collect()
    }
}
