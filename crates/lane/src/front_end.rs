//! How guests reach a volume: accepts clients, and gives each a device.
//!
//! ```text
//!   guest ══ protocol ══► FrontEnd ── one a client ──► ClientStacks::of(): meter ─► client session ─► requests ─► gate
//! ```
//! A front end speaks a protocol. It knows only the device that it gets for each client. The only one is NBD ([`nbd`]). Another
//! one needs a file beside it, a line in [`begin`], and a field in the lane's
//! [listeners](crate::Listeners).

pub(crate) mod nbd;

use std::rc::Rc;
use std::time::Duration;

use block::Handle;
use block::engine::Engine;

use crate::control::LaneFuture;
use crate::handle::{LaneSettings, Listeners};
use crate::stack::ClientStacks;

use self::nbd::NbdFrontEnd;

pub use nbd::{
    Access, AllocationContext, ClientCertificates, ClientProcess, CredentialFiles, Credentials,
    CredentialsError, Encryption, Offer, PassedConnection, PassedSession, ReplyStyle,
};

/// Accepts the clients of a volume, by one protocol.
pub trait FrontEnd {
    /// Returns the number of connected clients.
    fn clients(&self) -> usize;

    /// Returns the processes of this host that use the volume, one for each connection, as the kernel reports them.
    fn processes(&self) -> Vec<ClientProcess>;

    /// Stops accepting clients and requests; requests in flight end and are answered. Clients that still have some after
    /// `deadline` are cut. Resolves with the number of cut clients, when none is left.
    fn drain(&self, deadline: Duration) -> LaneFuture<usize>;

    /// Drains, but leaves connections open that another lane can adopt. Resolves with the number of cut clients,
    /// and the open connections.
    fn pass(&self, deadline: Duration) -> LaneFuture<(usize, Vec<PassedConnection>)>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientsAtEnd {
    Closed,
    PassedOn,
}

pub(crate) fn begin(
    handle: &Handle,
    engine: &Rc<dyn Engine>,
    settings: &LaneSettings,
    stacks: &ClientStacks,
    listeners: Listeners,
) -> Vec<Box<dyn FrontEnd>> {
    let Listeners { nbd } = listeners;
    vec![Box::new(NbdFrontEnd::begin(handle, engine, settings, stacks.clone(), nbd))]
}
