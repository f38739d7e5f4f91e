//! The path of a client's requests into a volume. The volume's owner knows the client before its first request. Each change
//! carries its client, even if it is forwarded to another host ([`crate::fencing`]).
//!
//! ```text
//!   a connection ──► session ──► requests ──► gate ──┬──► align ──► … store
//!                       │            └ whose client  └──► owner on another host: asked while the client is there
//!                       └ the first, and the first change: the owner raises its fence
//!   another host ──► service ── bears a fence ──► gate ──┬──► align ──► … store: if the fence is the present one
//!                                                        └──► owner on another host: with the same fence
//! ```
//! A client may connect and read long before it changes anything, while another one still writes: a VM that is migrated over a
//! shared disk does. So the owner is told once more before the first change. What the former client has left behind by then is
//! not made afterwards; what it sends while it is connected is made.

use std::cell::Cell;
use std::rc::Rc;

use block::signal::Signal;
use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use futures_util::FutureExt;
use migration::planted::{Bug, broken};

use crate::clients::Client;
use crate::fencing::{Changed, FencingToken, Presence};
use crate::peer::PeerVolume;
use crate::stack::{Access, Again, GateMode, Volume};

/// Bytes that are zeroed or discarded at once: a client that connects meanwhile waits for at most one such step. A store that has
/// to write zeroes takes a second or two for it.
const CHANGE_STEP_BYTES: u64 = 256 << 20;

#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    Client(&'a LocalClient),
    /// Another host, with the fencing token that it was given.
    Host(FencingToken),
}

impl Origin<'_> {
    /// Forwards the change to the volume's owner on another host.
    async fn send_on(self, owner: &PeerVolume, change: Change) -> Result<Changed, IoError> {
        match self {
            Self::Client(client) => owner.ask_for_client(Rc::clone(&client.presence), change).await?,
            Self::Host(fence) => return owner.relay(fence, change).await,
        }
        Ok(Changed::Done)
    }
}

pub(crate) struct LocalClient {
    presence: Rc<dyn Presence>,
    /// The value of [`FencingTokens::arrivals`](crate::fencing::FencingTokens::arrivals) when the client was last
    /// known to be connected.
    arrivals_seen: Cell<u64>,
}

impl LocalClient {
    /// Returns whether the client may have connected elsewhere, or again here. That is so if a client has arrived since the last
    /// check, and this one is gone. Its remaining changes are then not made.
    fn may_be_elsewhere(&self, volume: &Volume) -> bool {
        let arrivals = volume.fencing().arrivals();
        if arrivals == self.arrivals_seen.get() {
            return false;
        }
        let is_there = self.presence.is_there();
        if is_there {
            self.arrivals_seen.set(arrivals);
        }
        !is_there && !broken(Bug::FenceNotChecked)
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Route<'a> {
    Here(&'a dyn Presence),
    AnotherHost,
}

impl Volume {
    /// Makes a change to the volume, once its gate admits it.
    pub(crate) async fn change(&self, origin: Origin<'_>, change: Change) -> Result<Changed, IoError> {
        let (_own, pass) = loop {
            // N.B. counted before the wait at the gate, because new clients wait for it.
            let own = matches!(origin, Origin::Client(_)).then(|| self.fencing().enter_own());
            let pass = self.gate().enter(Access::Change).await;
            let Some(owner) = pass.owner() else { break (own, pass) };
            let _sent_on = own.is_some().then(|| self.fencing().enter_sent_on());
            drop(own);
            let made = self.gate().unless_home(origin.send_on(owner, change.clone()));
            // Boxed: a request to a store of this host needs only a fraction of its memory.
            if let Some(made) = Box::pin(made).await {
                return made;
            }
        };
        let _entry = match origin {
            // N.B. both checked here, after the wait at the gate. From here on new clients wait for the change.
            Origin::Client(client) if client.may_be_elsewhere(self) => return Err(IoError::Closed),
            Origin::Host(fence) if !self.fencing().admits(fence) => {
                return Ok(Changed::Refused(self.fencing().tell()));
            }
            Origin::Client(_) => None,
            Origin::Host(_) => Some(self.fencing().enter_forwarded()),
        };
        pass.device().change(change).await?;
        Ok(Changed::Done)
    }

    /// Reads, once the gate admits it; from the owner on another host as long as the client is connected.
    pub(crate) async fn read(
        &self,
        client: &LocalClient,
        offset: u64,
        buffer: Buffer,
    ) -> Result<Buffer, IoError> {
        let (gate, buffer) = (self.gate(), Again::new(buffer));
        let there = async |owner: &PeerVolume| {
            owner.while_there(&*client.presence, owner.read(offset, buffer.take())).await
        };
        gate.look(async |device| device.read(offset, buffer.take()).await, there).await
    }

    pub(crate) async fn flush(&self, client: &LocalClient) -> Result<(), IoError> {
        let there = async |owner: &PeerVolume| owner.while_there(&*client.presence, owner.flush()).await;
        self.gate().look(async |device| device.flush().await, there).await
    }

    pub(crate) async fn allocation(
        &self,
        client: &LocalClient,
        range: ByteRange,
    ) -> Result<Vec<Extent>, IoError> {
        let there =
            async |owner: &PeerVolume| owner.while_there(&*client.presence, owner.allocation(range)).await;
        self.gate().look(async |device| device.allocation(range).await, there).await
    }

    /// Announces a client. Resolves when none of its earlier changes, at any host, can land, with the owner's new fencing token.
    /// `None`: the owner does not know fencing tokens. Fails if the owner, on another host, cannot be reached.
    pub(crate) async fn attach(&self, route: Route<'_>) -> Result<Option<FencingToken>, IoError> {
        loop {
            // N.B. above the gate, because those changes may be waiting there.
            self.fencing().comes().await;
            let pass = self.gate().enter(Access::Attach).await;
            let Some(owner) = pass.owner().cloned() else { break };
            // This takes as long as the link does.
            drop(pass);
            self.fencing().goes_on().await;
            let asked = async {
                match route {
                    Route::Here(presence) => owner.while_there(presence, owner.attach()).await,
                    Route::AnotherHost => owner.attach().await,
                }
            };
            if let Some(answer) = self.gate().unless_home(asked).await {
                return answer.map(Some);
            }
        }
        self.fencing().raise().await;
        Ok(matches!(route, Route::AnotherHost).then(|| self.fencing().tell()))
    }
}

/// The upper part of one connection's path.
pub struct ClientSession {
    volume: Rc<Volume>,
    presence: Rc<dyn Presence>,
    below: Rc<dyn BlockDevice>,
    attachment: Cell<Attachment>,
    settled: Signal,
    _client: Client,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attachment {
    Missing,
    UnderWay,
    /// The client was announced before its first request, and has changed nothing yet.
    ToRead,
    /// The client was announced before its first change.
    ToChange,
}

/// Undoes an attachment on drop, unless it was completed.
struct Attaching<'a>(&'a ClientSession);

impl ClientSession {
    /// Makes the upper part for a connection with `presence`; `below` leads to the volume by a [`ClientRequests`].
    pub fn new(volume: Rc<Volume>, presence: Rc<dyn Presence>, below: Rc<dyn BlockDevice>) -> Self {
        let (attachment, settled) = (Cell::new(Attachment::Missing), Signal::default());
        let client = volume.clients().comes();
        Self { volume, presence, below, attachment, settled, _client: client }
    }

    /// Announces the client to the volume's owner before its first request.
    ///
    /// # Errors
    /// The error that the request would get.
    pub async fn attach(&self) -> Result<(), IoError> {
        self.announce(Attachment::ToRead).await
    }

    /// Announces the client, unless that was done for requests of this kind. Others that come meanwhile wait for it, reads as well:
    /// they are not answered with what a change that was left behind is about to overwrite.
    async fn announce(&self, wanted: Attachment) -> Result<(), IoError> {
        loop {
            match (self.attachment.get(), wanted) {
                (Attachment::ToChange, _) | (Attachment::ToRead, Attachment::ToRead) => return Ok(()),
                (Attachment::UnderWay, _) => {
                    let is_over = || (self.attachment.get() != Attachment::UnderWay).then_some(());
                    self.settled.wait_for(is_over).await;
                }
                (Attachment::Missing | Attachment::ToRead, _) => {
                    self.attachment.set(Attachment::UnderWay);
                    let _attaching = Attaching(self);
                    // Boxed: it happens twice per connection, and every request would need room for it.
                    Box::pin(self.volume.attach(Route::Here(&*self.presence))).await?;
                    self.attachment.set(wanted);
                }
            }
        }
    }

    /// Prepares for a read. A VM that waits for its volume reads before this host owns it.
    async fn begin_read(&self) -> Result<(), IoError> {
        if matches!(self.attachment.get(), Attachment::ToRead | Attachment::ToChange) {
            return Ok(());
        }
        self.volume.gate().lets_read().await;
        match self.volume.gate().mode() {
            GateMode::ReadsOnly => Ok(()),
            GateMode::Open | GateMode::Hold => self.attach().await,
        }
    }

    /// Prepares for a change. Before the first one the client is announced again if it has only read so far.
    async fn begin_change(&self) -> Result<(), IoError> {
        match self.attachment.get() {
            Attachment::ToChange => Ok(()),
            Attachment::ToRead if broken(Bug::FencedOnceOnly) => Ok(()),
            _ => self.announce(Attachment::ToChange).await,
        }
    }
}

// The futures are not boxed, because callers embed them in futures of their own.
impl ClientSession {
    pub(crate) async fn reading(&self, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.begin_read().await?;
        self.below.read(offset, buffer).await
    }

    pub(crate) async fn changing(&self, change: Change) -> Result<(), IoError> {
        if change.steps(CHANGE_STEP_BYTES) > 1 {
            // Boxed: few changes are as long, and every request would need room for it.
            return Box::pin(self.changing_in_steps(change)).await;
        }
        self.begin_change().await?;
        self.below.change(change).await
    }

    /// Changes a long range step by step: a new client, or a gate that closes, waits for one step only.
    async fn changing_in_steps(&self, change: Change) -> Result<(), IoError> {
        for step in change.in_steps(CHANGE_STEP_BYTES) {
            self.begin_change().await?;
            self.below.change(step).await?;
        }
        Ok(())
    }

    pub(crate) async fn flushing(&self) -> Result<(), IoError> {
        self.begin_read().await?;
        self.below.flush().await
    }
}

impl BlockDevice for ClientSession {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.reading(offset, buffer))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(self.changing(change))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.flushing())
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.below.zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            self.begin_read().await?;
            self.below.allocation(range).await
        })
    }
}

impl Drop for Attaching<'_> {
    fn drop(&mut self) {
        if self.0.attachment.get() == Attachment::UnderWay {
            self.0.attachment.set(Attachment::Missing);
        }
        self.0.settled.notify();
    }
}

/// The lower part of one connection's path: adds the client to each change.
pub struct ClientRequests {
    volume: Rc<Volume>,
    client: LocalClient,
}

impl ClientRequests {
    /// Makes the lower part for a connection with `presence` into a volume.
    pub fn new(volume: Rc<Volume>, presence: Rc<dyn Presence>) -> Self {
        let client = LocalClient { presence, arrivals_seen: Cell::new(volume.fencing().arrivals()) };
        Self { volume, client }
    }
}

impl BlockDevice for ClientRequests {
    fn geometry(&self) -> Geometry {
        self.volume.gate().geometry()
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(self.volume.read(&self.client, offset, buffer))
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        let made = self.volume.change(Origin::Client(&self.client), change);
        // A client's change bears no fencing token, so it is either made or fails.
        Box::pin(made.map(|changed| changed.map(drop)))
    }

    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(self.volume.flush(&self.client))
    }

    fn zeroes_fast(&self, mode: ZeroMode) -> bool {
        self.volume.gate().zeroes_fast(mode)
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(self.volume.allocation(&self.client, range))
    }
}
