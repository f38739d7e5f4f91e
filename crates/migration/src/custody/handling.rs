//! The order in which a step is carried out. It ensures that the permitted image is the one that is changed.
//!
//! ```text
//!   Open ──► Lock ──► Claims ──► Compare ──► Act ──► Sync ──► done
//!     │ gone            │ refused   │ another image has the name
//!     └──► Sync ──► gone └──────────┴──► refused
//! ```
//! *Open* opens the folder and the image once, without following a link. *Lock* takes the locks of Sterna and QEMU, which are
//! held until the end. *Claims* asks the [`Book`] with facts gathered after the lock. *Compare* looks the name up once more.

use super::book::{Book, Found, Object, Refused};
use super::claim::{Claim, Kind};
use super::lasting::Lasting;
use super::step::{Owner, Step};
use crate::journal::Place;
use crate::planted::{Bug, broken};

/// One step, from its order to its end.
#[derive(Debug)]
pub struct Handling {
    step: Step,
    owner: Owner,
    object: Object,
    holder: Option<String>,
    at: At,
}

#[derive(Debug)]
enum At {
    Doing(Todo),
    Ended(Result<Ending, Refused>),
}

/// The next thing that the caller has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Todo {
    /// Open the folder and the image.
    Open,
    /// Try to lock the image.
    Lock,
    /// Gather the claims after the lock.
    Claims,
    /// Look the name up once more.
    Compare,
    /// Carry out the step itself.
    Act,
    /// Make the folder durable.
    Sync,
}

/// The result of the caller's last action.
#[derive(Debug)]
pub enum Event {
    /// The image that the name led to, by the open descriptor, with its identity across restarts.
    Opened(Found, Option<Lasting>),
    /// The image is locked, or a part of Sterna that counts as a claim holds it.
    Locked,
    /// A program other than this daemon holds it.
    Held(String),
    /// The claims that were gathered.
    Gathered(Book),
    /// The image to which the name leads at the second lookup.
    Compared(Found),
    /// The step was carried out.
    Acted,
    /// The folder is durable.
    Synced,
}

/// The end of a step that was not refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The step was carried out.
    Taken,
    /// No image had that name.
    Gone,
}

impl Handling {
    /// Begins a step on the image at `place`.
    pub fn new(step: Step, owner: Owner, place: Place) -> Self {
        let object = Object { place, found: Found::Gone, lasting: None };
        Self { step, owner, object, holder: None, at: At::Doing(Todo::Open) }
    }

    /// Returns the next action; `Err` once the step has ended.
    ///
    /// # Errors
    /// The end: whether the step was carried out, or which claims refused it.
    pub fn next(&self) -> Result<Todo, Result<Ending, Refused>> {
        match &self.at {
            At::Doing(todo) => Ok(*todo),
            At::Ended(end) => Err(end.clone()),
        }
    }

    /// Handles an event. An event that does not match the current action changes nothing.
    pub fn handle_event(&mut self, event: Event) {
        let At::Doing(todo) = self.at else { return };
        self.at = match (todo, event) {
            (Todo::Open, Event::Opened(found, lasting)) => {
                (self.object.found, self.object.lasting) = (found, lasting);
                match &self.object.found {
                    Found::Gone => At::Doing(Todo::Sync),
                    Found::Unknown(why) => At::Ended(Err(self.refused(Kind::Unknown { why: why.clone() }))),
                    Found::There(_) if broken(Bug::CustodyLockNotHeld) => At::Doing(Todo::Claims),
                    Found::There(_) => At::Doing(Todo::Lock),
                }
            }
            (Todo::Lock, Event::Locked) => At::Doing(Todo::Claims),
            (Todo::Lock, Event::Held(holder)) => {
                self.holder = Some(holder);
                At::Doing(Todo::Claims)
            }
            (Todo::Claims, Event::Gathered(book)) => self.decide(book),
            (Todo::Compare, Event::Compared(found)) if found == self.object.found => At::Doing(Todo::Act),
            (Todo::Compare, Event::Compared(_)) => {
                let why = "another image has taken its place meanwhile; order it again".to_owned();
                At::Ended(Err(self.refused(Kind::Unknown { why })))
            }
            (Todo::Act, Event::Acted) => At::Doing(Todo::Sync),
            (Todo::Sync, Event::Synced) if self.object.found == Found::Gone => At::Ended(Ok(Ending::Gone)),
            (Todo::Sync, Event::Synced) => At::Ended(Ok(Ending::Taken)),
            (todo, _) => At::Doing(todo),
        };
    }

    fn decide(&self, mut book: Book) -> At {
        if let Some(holder) = self.holder.clone() {
            let Object { place, found, .. } = self.object.clone();
            book.add(Claim { kind: Kind::Foreign { holder }, place, found });
        }
        match book.ask(self.step, &self.owner, &self.object) {
            Ok(_) if broken(Bug::IdentityNotCompared) => At::Doing(Todo::Act),
            Ok(_) => At::Doing(Todo::Compare),
            Err(refused) => At::Ended(Err(refused)),
        }
    }

    fn refused(&self, kind: Kind) -> Refused {
        Refused { step: self.step, claims: vec![kind] }
    }
}
