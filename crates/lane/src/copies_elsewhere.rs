//! What copies at other hosts lack goes along with the volume, which then comes home, or goes on to any of them, with that alone.
//!
//! ```text
//!   source: the target serves the volume, and clients here are led there ─► tell() ──calls──► target: Learner ─► chronicler
//! ```
//! It goes beside the handover: nobody waits for it, and what does not arrive costs a whole copy later. What is told and how it is
//! to be read is [`migration::stay::Stay`]'s.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use block::{Handle, IoError};
use bytes::Bytes;
use chronicle::{BlockSize, ByteRange, Generation, LayeredBitmap, ReplicaOf, StayId};
use futures_util::future::{Either, select};
use migration::VolumeIndex;
use migration::filling::{UNIT_BYTES, decode_runs, encode_runs, to_units};
use migration::stay::{COPIES_MAX, CopyElsewhere, Departed};
use tracing::{debug, info, warn};

use crate::peer::head::{Address, Operation};
use crate::peer::{Capabilities, PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel};
use crate::signal::Signal;
use crate::stack::Volume;

/// How long the channel is kept for what is told after the migration has ended.
const TELLING_MAX: Duration = Duration::from_secs(10);

/// Tells the host that a volume has left for what copies of it elsewhere lack.
///
/// **N.B.** Once that host serves it: to find out what they lack takes a while on this thread.
pub(crate) fn tell(
    handle: &Handle,
    volume: &Volume,
    departed: Option<Departed>,
    index: VolumeIndex,
    rpc: Rc<RpcChannel>,
) {
    if rpc.capabilities() < Capabilities::Copies {
        return;
    }
    let (id, size_bytes, block_size) = (volume.id(), volume.size(), volume.block_size());
    let timeout = handle.sleep(TELLING_MAX);
    handle.spawn(async move {
        let copies = departed.map(Departed::copies).unwrap_or_default();
        let telling = async {
            for copy in &copies {
                if let Some((operation, payload)) = said_of(copy, block_size, size_bytes) {
                    ask(&rpc, index, operation, payload).await?;
                }
            }
            ask(&rpc, index, Operation::CopiesTold, Bytes::new()).await
        };
        let is_told = matches!(select(pin!(telling), timeout).await, Either::Left((Ok(()), _)));
        if !is_told && !copies.is_empty() {
            info!(volume = %id, copies = copies.len(), "where it has gone, not all is known of the copies at other hosts; to those it will go as a whole");
        }
    });
}

async fn ask(
    rpc: &RpcChannel,
    index: VolumeIndex,
    operation: Operation,
    payload: Bytes,
) -> Result<(), IoError> {
    let question = Question { address: Address::Copies(index.0), operation, fence: None };
    rpc.call(RequestPriority::Mirrored, question, payload, None).await.map(drop)
}

fn said_of(copy: &CopyElsewhere, block_size: BlockSize, size_bytes: u64) -> Option<(Operation, Bytes)> {
    let units = to_units(&copy.lacking, block_size.bytes(), size_bytes);
    let mut pieces = encode_runs(units.runs(), PAYLOAD_BYTES_MAX);
    let (Some(runs), true) = (pieces.pop(), pieces.is_empty()) else { return None };
    let CopyElsewhere { host, departure, generation, .. } = copy;
    let operation = Operation::Copy { host: *host, departure: *departure, generation: generation.0 };
    Some((operation, runs.into()))
}

/// Takes what the host tells that a volume has come from.
pub struct Learner {
    volume: Rc<Volume>,
    /// The stay that it is told for.
    stay: StayId,
    copies: Cell<usize>,
    is_all_told: Cell<bool>,
    news: Signal,
}

impl Learner {
    /// For a volume whose stay has begun.
    pub fn new(volume: &Rc<Volume>) -> Rc<Self> {
        Rc::new(Self {
            volume: Rc::clone(volume),
            stay: volume.chronicler().stay(),
            copies: Cell::default(),
            is_all_told: Cell::default(),
            news: Signal::default(),
        })
    }

    /// Takes note of a copy.
    ///
    /// # Errors
    /// [`IoError`]: it is not known here.
    pub(crate) async fn learn(
        &self,
        of: ReplicaOf,
        generation: Generation,
        runs: &[u8],
    ) -> Result<(), IoError> {
        let (volume, chronicler) = (&self.volume, self.volume.chronicler());
        let is_of_now = || chronicler.stay() == self.stay;
        if !is_of_now() {
            return Err(IoError::Closed);
        }
        // Whatever the other host sends.
        if self.copies.replace(self.copies.get() + 1) >= COPIES_MAX {
            return Err(IoError::Unsupported);
        }
        // N.B. of the stay: until the volume is this host's it may be known here by the size with which it left.
        let size_bytes = chronicler.size_bytes();
        let runs = decode_runs(runs, size_bytes).ok_or(IoError::Unsupported)?;
        let block_size = chronicler.block_size();
        let mut at_departure = LayeredBitmap::new(block_size.blocks_of(size_bytes));
        for run in runs {
            let range = ByteRange::new(run.start.0 * UNIT_BYTES, run.len() * UNIT_BYTES);
            at_departure.insert(block_size.covering(range.offset, range.length));
        }
        let lacking = || is_of_now().then(|| chronicler.lacking_since_arrival(&at_departure)).flatten();
        // N.B. no flush: what is here beyond that comes from the source, which has made it durable, or is fetched from there again.
        if let Err(error) = chronicler.refer_to(of, generation, || None, lacking).await {
            warn!(volume = %volume.id(), %error, "a copy at another host is not recorded: it will be a whole copy there");
            return Err(IoError::Unsupported);
        }
        debug!(volume = %volume.id(), ?of, %generation, "a copy at another host is known");
        Ok(())
    }

    /// The other host has told everything.
    pub(crate) fn all_told(&self) {
        self.is_all_told.set(true);
        self.news.notify();
    }

    /// Resolves when the other host has told everything, or had the time to, or does not know how.
    pub(crate) async fn has_learnt(&self, handle: &Handle, rpc: &RpcChannel) {
        if rpc.capabilities() < Capabilities::Copies {
            return;
        }
        let told = self.news.wait_for(|| self.is_all_told.get().then_some(()));
        select(pin!(told), handle.sleep(TELLING_MAX)).await;
    }
}
