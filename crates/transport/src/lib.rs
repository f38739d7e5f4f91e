//! Bytes between two hosts: identities, links, sessions, frames, priorities. It knows nothing of volumes or migrations.
//!
//! ```text
//!   callers, on any thread                              Receiver, on transport threads
//!      │ Session::send(Message)                                 ▲ delivered(Delivery)
//!   ┌──▼──────────────────────── Endpoint ─────────────────────┴───────────────────┐
//!   │ session   Outgoing: queues by priority,      Incoming: delivered once, order, │
//!   │           what is not acknowledged           credit by what is still held     │
//!   │ connections  writer: packs, parts            reader: checks, assembles        │
//!   │ greeting     versions, Hello · Welcome · Ready; dial.rs and accept.rs         │
//!   └────────── TLS 1.3, keys pinned ── TCP over pairs of links ───────────────────┘
//! ```
//!
//! - A message is delivered **exactly once while both processes live**, whatever happens to connections: each has a number in its
//!   session, is kept until it is acknowledged, and is delivered only the first time that it arrives.
//! - All connections of a session pull from one set of queues: the most urgent priority first, each connection as much as its
//!   link carries. Guests' requests leave a part of the link to what is less urgent.
//! - What a peer may send is bounded by credit, which returns when a delivery is dropped.
//! - The peer is hostile until its key is known, and not trusted to keep the rules after that.

mod accept;
mod compression;
mod connection;
mod context;
mod credit;
mod dial;
mod endpoint;
mod frame;
mod greeting;
mod host_id;
pub mod hostile;
mod identity;
mod incoming;
mod invitation;
mod large_messages;
pub mod links;
mod listening;
mod message;
mod outgoing;
mod own_networks;
mod pairing;
mod peer;
pub mod pinned;
mod receiver;
mod sequence_set;
mod session;
mod settings;
mod socket;
mod tls;

pub use accept::network;
pub use compression::Compression;
pub use credit::{Credit, WINDOW_BYTES_MIN};
pub use endpoint::{Endpoint, PendingJoin, StartError};
pub use frame::Malformed;
pub use greeting::{HandshakeError, RefusalReason};
pub use host_id::{HostId, HostIdError};
pub use identity::{Identity, IdentityError, NAME_LENGTH_MAX, check_name};
pub use incoming::Violation;
pub use invitation::{GarbledToken, InvitationId, JoinError, Token};
pub use message::{
    ChannelId, Delivery, HEAD_BYTES_MAX, Message, MessageTooLong, Order, PAYLOAD_BYTES_MAX, Priority,
    PriorityBoost,
};
pub use pairing::Incarnation;
pub use peer::{LINKS_MAX, Link, Peer, Peers};
pub use receiver::Receiver;
pub use session::{ConnectionStatus, Session, SessionStatus};
pub use settings::{Limits, Settings, VERSION, Versions};
