//! Custody: who uses the images and devices of this host, and which steps on them are permitted.
//!
//! ```text
//!   journal ───────────────► Book::of_journal ─┐
//!   daemon: identities,      Book::identify    ├──► Book::ask(step, owner, object) ──► Permit │ Refused
//!           chains, marks,   Book::add         │
//!           kept records,                      │
//!           locks, descriptors ────────────────┘
//!
//!   Handling:  open ► lock ► claims ► compare ► act ► sync     the order in which a step is carried out
//! ```
//! One image can have several names, and a name can come to mean another image. So a claim is on an identity and on a name, and a
//! match of either counts. An identity is a file's device and inode, a device's number or an export's URI.
//!
//! An image that could not be inspected has a claim as well: *unknown* refuses every step (design §5.37). Nothing here reads a
//! disk. The daemon gathers the facts and carries out permitted steps; the simulator does the same with images of its own.

mod advice;
mod book;
mod claim;
mod handling;
mod lasting;
mod marks;
mod rules;
mod stack;
mod step;
#[cfg(test)]
mod tests;

pub use advice::{Remedy, remedy_for_size};
pub use book::{Book, Found, Identity, Object, Permit, Refused};
pub use claim::{Claim, Kind};
pub use handling::{Ending, Event, Handling, Todo};
pub use lasting::{
    DeviceName, KnownImage, Lasting, Opening, Purpose, Verdict, is_gone, judge, may_promise, opening,
};
pub use marks::{completed_by, completes, is_complete};
pub use stack::Stack;
pub use step::{Advice, Owner, Step, Word};
