//! The way of a client's requests into a volume: known to the volume's owner before the first of them, and each with the
//! client behind it, wherever it is sent on from here ([`crate::fencing`]).
//!
//! ```text
//!   a connection ──► session ──► requests ──► gate ──┬──► align ──► … store
//!                       │            └ whose client  └──► owner on another host: asked while the client is there
//!                       └ the first: the owner raises its fence
//!   another host ──► service ── bears a fence ──► gate ──┬──► align ──► … store: if the fence is the present one
//!                                                        └──► owner on another host: with the same fence
//! ```

use std::cell::Cell;
use std::rc::Rc;

use block::signal::Signal;
use block::{BlockDevice, Buffer, ByteRange, Change, Extent, Geometry, IoError, IoFuture, ZeroMode};
use futures_util::FutureExt;
use migration::planted::{Bug, broken};

use crate::clients::Client;
use crate::fencing::{Always, Changed, FencingToken, Presence};
use crate::peer::PeerVolume;
use crate::stack::{Access, Again, GateMode, Volume};

/// Bytes of a range that are zeroed or discarded at once: who connects meanwhile waits for no more. A store that has to write
/// zeroes takes a second or two for it.
const CHANGE_STEP_BYTES: u64 = 256 << 20;

/// Where a change comes from.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// A client of this host.
    Client(&'a LocalClient),
    /// Another host, which was told of this fencing token.
    Host(FencingToken),
    /// Another host, which knows nothing of fencing tokens.
    OldHost,
}

impl Origin<'_> {
    /// Has the volume's owner, on another host, make the change.
    async fn send_on(self, owner: &PeerVolume, change: Change) -> Result<Changed, IoError> {
        match self {
            Self::Client(client) => owner.ask_for_client(Rc::clone(&client.presence), change).await?,
            Self::OldHost => owner.ask_for_client(Rc::new(Always), change).await?,
            Self::Host(fence) => return owner.relay(fence, change).await,
        }
        Ok(Changed::Done)
    }
}

/// The client of a connection of this host.
pub(crate) struct LocalClient {
    presence: Rc<dyn Presence>,
    /// What [`FencingTokens::arrivals`](crate::fencing::FencingTokens::arrivals) was when the client was seen to be there last.
    arrivals_seen: Cell<u64>,
}

impl LocalClient {
    /// Tells whether the client may have come to another host, or here once more: since it was seen to be there last
    /// somebody has, and it is not there. What it left behind is not made then.
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

/// The way by which a client comes to the volume.
#[derive(Clone, Copy)]
pub(crate) enum Route<'a> {
    /// Its connection is here.
    Here(&'a dyn Presence),
    /// Its connection is at another host.
    AnotherHost,
}

impl Volume {
    /// Changes the volume, when its gate lets that through.
    pub(crate) async fn change(&self, origin: Origin<'_>, change: Change) -> Result<Changed, IoError> {
        let (_own, pass) = loop {
            // N.B. from before it waits at the gate: who comes waits for it.
            let own = matches!(origin, Origin::Client(_)).then(|| self.fencing().enter_own());
            let pass = self.gate().enter(Access::Change).await;
            let Some(owner) = pass.owner() else { break (own, pass) };
            let _sent_on = own.is_some().then(|| self.fencing().enter_sent_on());
            drop(own);
            let made = self.gate().unless_home(owner, origin.send_on(owner, change.clone()));
            // Boxed: what goes no further than to a store of this host needs a fraction of its memory.
            if let Some(made) = Box::pin(made).await {
                return made;
            }
        };
        let _entry = match origin {
            // N.B. both here, and not where it arrives: it may have waited at the gate. From here on whoever comes waits for it.
            Origin::Client(client) if client.may_be_elsewhere(self) => return Err(IoError::Closed),
            Origin::Host(fence) if !self.fencing().admits(fence) => {
                return Ok(Changed::Refused(self.fencing().tell()));
            }
            Origin::Client(_) => None,
            Origin::Host(_) | Origin::OldHost => Some(self.fencing().enter_forwarded()),
        };
        pass.device().change(change).await?;
        Ok(Changed::Done)
    }

    /// Reads, when the gate lets that through; from the owner on another host as long as the client is there.
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

    /// Flushes, likewise.
    pub(crate) async fn flush(&self, client: &LocalClient) -> Result<(), IoError> {
        let there = async |owner: &PeerVolume| owner.while_there(&*client.presence, owner.flush()).await;
        self.gate().look(async |device| device.flush().await, there).await
    }

    /// Describes a range, likewise.
    pub(crate) async fn allocation(
        &self,
        client: &LocalClient,
        range: ByteRange,
    ) -> Result<Vec<Extent>, IoError> {
        let there =
            async |owner: &PeerVolume| owner.while_there(&*client.presence, owner.allocation(range)).await;
        self.gate().look(async |device| device.allocation(range).await, there).await
    }

    /// A client begins to use the volume: resolves when nothing that it may have left behind, at whichever host, can land
    /// any more, with the owner's fencing token from then on. `None`: the owner knows nothing of fencing tokens.
    ///
    /// # Errors
    /// The owner, on another host, cannot be asked.
    pub(crate) async fn attach(&self, route: Route<'_>) -> Result<Option<FencingToken>, IoError> {
        loop {
            // N.B. not below the gate, for those may have to wait there.
            self.fencing().comes().await;
            let pass = self.gate().enter(Access::Attach).await;
            let Some(owner) = pass.owner().cloned() else { break };
            // It takes as long as the link does.
            drop(pass);
            self.fencing().goes_on().await;
            let asked = async {
                match route {
                    Route::Here(presence) => owner.while_there(presence, owner.attach()).await,
                    Route::AnotherHost => owner.attach().await,
                }
            };
            if let Some(answer) = self.gate().unless_home(&owner, asked).await {
                return answer;
            }
        }
        self.fencing().raise().await;
        Ok(matches!(route, Route::AnotherHost).then(|| self.fencing().tell()))
    }
}

/// The beginning of the way of one connection.
pub struct ClientSession {
    volume: Rc<Volume>,
    presence: Rc<dyn Presence>,
    below: Rc<dyn BlockDevice>,
    attachment: Cell<Attachment>,
    settled: Signal,
    /// It is one of the volume's clients.
    _client: Client,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attachment {
    Missing,
    UnderWay,
    Made,
}

/// Says that nothing came of an attachment, unless it was made.
struct Attaching<'a>(&'a ClientSession);

impl ClientSession {
    /// Makes the way of a connection from `presence`; `below` leads to the volume by a [`ClientRequests`].
    pub fn new(volume: Rc<Volume>, presence: Rc<dyn Presence>, below: Rc<dyn BlockDevice>) -> Self {
        let (attachment, settled) = (Cell::new(Attachment::Missing), Signal::default());
        let client = volume.clients().comes();
        Self { volume, presence, below, attachment, settled, _client: client }
    }

    /// Makes the client known to the volume's owner, once.
    ///
    /// # Errors
    /// As the request would fail.
    pub async fn attach(&self) -> Result<(), IoError> {
        loop {
            match self.attachment.get() {
                Attachment::Made => return Ok(()),
                Attachment::UnderWay => {
                    let is_over = || (self.attachment.get() != Attachment::UnderWay).then_some(());
                    self.settled.wait_for(is_over).await;
                }
                Attachment::Missing => {
                    self.attachment.set(Attachment::UnderWay);
                    let _attaching = Attaching(self);
                    // Boxed: once in the life of a connection, and every request would have to have room for it.
                    Box::pin(self.volume.attach(Route::Here(&*self.presence))).await?;
                    self.attachment.set(Attachment::Made);
                }
            }
        }
    }

    /// What reads need before they begin. A VM that waits for its volume reads it before anybody owns it here.
    async fn begin_read(&self) -> Result<(), IoError> {
        if self.attachment.get() == Attachment::Made {
            return Ok(());
        }
        self.volume.gate().lets_read().await;
        match self.volume.gate().mode() {
            GateMode::ReadsOnly => Ok(()),
            GateMode::Open | GateMode::Hold => self.attach().await,
        }
    }

    /// What changes need before they begin.
    async fn begin_change(&self) -> Result<(), IoError> {
        match self.attachment.get() {
            Attachment::Made => Ok(()),
            Attachment::Missing | Attachment::UnderWay => self.attach().await,
        }
    }
}

// Requests as plain futures, for who puts them into one of his own.
impl ClientSession {
    pub(crate) async fn reading(&self, offset: u64, buffer: Buffer) -> Result<Buffer, IoError> {
        self.begin_read().await?;
        self.below.read(offset, buffer).await
    }

    pub(crate) async fn changing(&self, change: Change) -> Result<(), IoError> {
        if change.steps(CHANGE_STEP_BYTES) > 1 {
            // Boxed: few are as long, and every request would have to have room for it.
            return Box::pin(self.changing_in_steps(change)).await;
        }
        self.begin_change().await?;
        self.below.change(change).await
    }

    /// Changes a long range part after part: whoever comes meanwhile, or closes the gate, waits for one of them.
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

/// The end of the way of one connection: into the volume, with the client behind each change.
pub struct ClientRequests {
    volume: Rc<Volume>,
    client: LocalClient,
}

impl ClientRequests {
    /// Makes the way of a connection from `presence` into a volume.
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
        // A client's change bears no fencing token, so it is made or fails.
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
