//! A volume on another NBD server: `qemu-nbd`, `nbdkit`, another Sterna, any server of the protocol.
//!
//! ```text
//!   RemoteImage::connect     control thread; may sleep: dials, negotiates, checks what is offered
//!        │
//!   RemoteStore              lane's thread: a `BlockDevice`; splits requests as the server demands, orders writes
//!        │                   that overlap, stops waiting at a deadline
//!   link                     the session: its connections, and what follows when they break
//!        ├── ledger          answered changes that are not known durable, to be repeated to a restarted server
//!   connection               one socket: requests out, replies in, matched by cookie
//!        └── receiver        sans-IO: decodes replies, checks every field before it acts on it or allocates
//! ```
//!
//! # When the connection breaks
//! The link dials again on a helper thread, with back-off, as long as the store lives. A compatible server first gets the ledger,
//! in the order of the answers. Then requests in flight are repeated. So a server that was killed with writes in its cache serves
//! every byte that was answered, and a flush keeps its promise. Overlapping writes are never in flight together: the order is
//! decided here, and repeating cannot change it. Requests that are not answered within [`RemoteOptions::answer_deadline`] fail. A
//! write that has failed so keeps its range until its fate is known or its connection is gone.
//!
//! **N.B.** NBD cannot fence a server off. A server that continues a request of a lost connection, while a new one is already
//! used, can apply an old write over a newer one. See decision 0022.
//!
//! TLS is not supported yet. It belongs between dialling and negotiating.

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
mod request;
mod store;
mod terms;

pub use error::RemoteError;
pub use image::{Abilities, RemoteImage, RemoteOptions};
pub use nbd_protocol::NbdUri;
pub use store::RemoteStore;
