//! The NBD server: fixed newstyle negotiation, simple, structured and extended replies, many requests in flight.
//!
//! ```text
//!   Server            accepts, counts, shuts down
//!     │ one task each
//!   connection        negotiates, then moves bytes: receive ─► intake ─► request set ─► outbox ─► send
//!     │                                                          │            │
//!   negotiation, transmission, intake, reply                     │      BlockDevice
//!                     sans-IO: byte slices in, values out        └── at most `Limits` of them
//! ```
//!
//! All bytes from a peer pass through the sans-IO decoders. These never panic, check a length against its limit before they
//! allocate, and are fuzzed. [`Limits`] bounds the memory of a connection.
//!
//! `stream` adds TLS if the listener has it and the client begins it. `docs/nbd.md` lists the supported commands.

mod budget;
mod caller;
mod client;
mod connection;
mod error_code;
mod execute;
mod export;
mod limits;
mod outbox;
mod passing;
mod request_set;
mod server;
mod stream;
#[cfg(test)]
mod test_device;
mod timeline;
mod tls;

pub mod intake;
pub mod negotiation;
pub mod reply;
pub mod transmission;

pub use caller::Caller;
pub use client::{Client, ClientProcess};
pub use error_code::ErrorCode;
pub use export::{Access, Connect, Export, Exports, Offer, ReplyStyle};
pub use limits::Limits;
pub use nbd_protocol as protocol;
pub use passing::{CannotGoOn, PassedConnection, PassedSession};
pub use server::{ConnectionInfo, ConnectionPhase, Drained, Server};
pub use tls::{ClientCertificates, CredentialFiles, Credentials, CredentialsError, Encryption};
