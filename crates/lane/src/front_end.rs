//! How guests reach a volume: what accepts them, and what each of them is given.
//!
//! ```text
//!   guest ══ protocol ══► FrontEnd ── one a client ──► ClientStacks::of(): meter ─► client session ─► requests ─► gate
//! ```
//! A front end speaks a protocol, and knows of a volume only the device that it is given for each client. NBD is the one
//! there is ([`nbd`]); another is a file beside that one, a line in [`begin`], and a field of its own among the lane's
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

/// Accepts the guests of one volume, on the volume's thread.
pub(crate) trait FrontEnd {
    /// How many clients are connected at this moment.
    fn clients(&self) -> usize;

    /// The processes of this host that use the volume at this moment, one for each connection, as the kernel says.
    fn processes(&self) -> Vec<ClientProcess>;

    /// Accepts nobody any more and takes no further request; what is in flight ends and is answered. Clients that are not
    /// done `deadline` from now are cut: resolves with how many, when none is left.
    fn drain(&self, deadline: Duration) -> LaneFuture<usize>;

    /// Drains, and leaves connections open that another lane can go on with; resolves with how many were cut, and those.
    fn pass(&self, deadline: Duration) -> LaneFuture<(usize, Vec<PassedConnection>)>;
}

/// What becomes of the clients of a lane that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientsAtEnd {
    /// Their connections are closed.
    Closed,
    /// Their connections are left open, for another lane.
    PassedOn,
}

/// Begins to accept the guests of a volume: one front end for each kind of socket that they may come by.
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
