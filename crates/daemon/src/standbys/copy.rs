//! A standby that is kept here, for volumes that another host serves.
//!
//! ```text
//!   a frame ─► Keeper, a thread of its own: Standby, the machine ─► Files: spools, images, recovery points
//!                                                              └──► answers to the source
//! ```
//! One thread does everything about one standby, in order: what an epoch does to the files is done before the next message is read.
//! The transport holds the source back meanwhile.

mod cloning;
pub(crate) mod divergence;
pub(crate) mod exported;
mod extents;
mod files;
mod folder;
mod found;
mod input;
mod keeper;
mod lending;
mod messages;
mod room;
#[cfg(test)]
mod tests;
mod undo;
mod view;

pub(crate) use cloning::{Progress, delete_clone, has_room_in, name_clone};
pub(crate) use files::text;
pub(super) use folder::folder_of;
pub(crate) use input::{Carried, Ending, Input, LendingEnd, Named, NotPromoted};
pub(crate) use keeper::{Copy, Seen, delete_files};
pub(super) use messages::words_of;
pub(crate) use view::CopyView;
