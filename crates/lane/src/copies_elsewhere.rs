//! Sends the missing sets of copies at other hosts along with a volume, so that it can move to any of them incrementally.
//!
//! ```text
//!   source: the target serves the volume, and clients here are forwarded ─► tell() ──calls──► target: Learner ─► chronicler
//! ```
//! This runs beside the handover, and nothing waits for it. A missing set that does not arrive costs a full copy later.
//! [`migration::stay::Stay`] makes and reads the missing sets.

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
use crate::peer::{PAYLOAD_BYTES_MAX, Question, RequestPriority, RpcChannel};
use crate::signal::Signal;
use crate::stack::Volume;

/// How long the channel is kept for the missing sets after the migration has ended.
const TELLING_MAX: Duration = Duration::from_secs(10);

/// Sends the missing sets of copies at other hosts to the host that a volume has left for.
///
/// **N.B.** Only once that host serves the volume: computing the sets takes a while on this thread.
pub(crate) fn tell(
    handle: &Handle,
    volume: &Volume,
    departed: Option<Departed>,
    index: VolumeIndex,
    rpc: Rc<RpcChannel>,
) {
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
            info!(volume = %id, copies = copies.len(), "the new owner does not know all copies at other hosts; moves to those \
                hosts will copy everything");
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

/// Receives the missing sets from the host that a volume has come from.
pub struct Learner {
    volume: Rc<Volume>,
    stay: StayId,
    copies: Cell<usize>,
    is_all_told: Cell<bool>,
    news: Signal,
}

impl Learner {
    /// Makes a learner for a volume whose residency has begun.
    pub fn new(volume: &Rc<Volume>) -> Rc<Self> {
        Rc::new(Self {
            volume: Rc::clone(volume),
            stay: volume.chronicler().stay(),
            copies: Cell::default(),
            is_all_told: Cell::default(),
            news: Signal::default(),
        })
    }

    /// Records a copy at another host. Fails with [`IoError`]: the copy is not recorded here.
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
        // A limit, whatever the other host sends.
        if self.copies.replace(self.copies.get() + 1) >= COPIES_MAX {
            return Err(IoError::Unsupported);
        }
        // N.B. the size in this residency: until this host owns the volume, its stack may have the size with which it left.
        let size_bytes = chronicler.size_bytes();
        let runs = decode_runs(runs, size_bytes).ok_or(IoError::Unsupported)?;
        let block_size = chronicler.block_size();
        let mut at_departure = LayeredBitmap::new(block_size.blocks_of(size_bytes));
        for run in runs {
            let range = ByteRange::new(run.start.0 * UNIT_BYTES, run.len() * UNIT_BYTES);
            at_departure.insert(block_size.covering(range.offset, range.length));
        }
        let lacking = || is_of_now().then(|| chronicler.lacking_since_arrival(&at_departure)).flatten();
        // N.B. no flush: blocks here beyond that come from the source, which has made them durable, or are
        // fetched again from there.
        if let Err(error) = chronicler.refer_to(of, generation, || None, lacking).await {
            warn!(volume = %volume.id(), %error, "cannot record a copy at another host: a move there will copy everything");
            return Err(IoError::Unsupported);
        }
        debug!(volume = %volume.id(), ?of, %generation, "a copy at another host is known");
        Ok(())
    }

    pub(crate) fn all_told(&self) {
        self.is_all_told.set(true);
        self.news.notify();
    }

    /// Resolves when the other host has sent all sets, or had the time to.
    pub(crate) async fn has_learnt(&self, handle: &Handle) {
        let told = self.news.wait_for(|| self.is_all_told.get().then_some(()));
        select(pin!(told), handle.sleep(TELLING_MAX)).await;
    }
}
