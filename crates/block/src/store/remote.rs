//! A volume on an NBD server elsewhere: `qemu-nbd`, `nbdkit`, another Sterna, any server of the protocol.
//!
//! ```text
//!   RemoteImage::connect     control thread; may sleep: dials, negotiates, judges what is offered
//!        │
//!   RemoteStore              lane's thread: a `BlockDevice`; cuts requests to what the server takes, orders writes
//!        │                   that overlap, gives up waiting at a deadline
//!   link                     the session: which connections there are, and what is done when they break
//!        ├── ledger          what was answered and is not known durable, to be written again to a server that restarted
//!   connection               one socket: requests out, replies in, matched by cookie
//!        └── receiver        sans-IO: decodes replies, checks every field before it acts on it or allocates
//! ```
//!
//! # When the connection breaks
//! The link dials again on a helper thread, with back-off, for as long as the store lives. To a server that fits, first
//! the ledger is written, in the order in which it was answered; then what was in flight is repeated. So a server that
//! was killed with writes in its cache serves every byte that was answered, and a flush keeps its promise. Overlapping
//! writes are never in flight together: the order is decided here, and repeating cannot turn it around. Requests that are
//! not answered within [`RemoteOptions::answer_deadline`] fail; a write that has failed so keeps its range until its fate
//! is known or its connection is gone.
//!
//! N.B. NBD has no way to fence a server off: one that goes on with a request of a connection that is gone, while a new
//! one is already used, can apply an old write over a newer one. See decision 0022.
//!
//! TLS is not here yet. It belongs between dialling and negotiating.

mod connection;
mod dial;
mod error;
mod handshake;
#[doc(hidden)]
pub mod hostile;
mod image;
mod in_flight;
mod ledger;
mod link;
mod receiver;
mod reply;
mod request;
mod store;
mod terms;

pub use error::RemoteError;
pub use image::{Abilities, RemoteImage, RemoteOptions};
pub use nbd_protocol::NbdUri;
pub use store::RemoteStore;
