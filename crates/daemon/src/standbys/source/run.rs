//! The task of a standby at its source.

mod comparing;

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chronicle::{BlockRange, ReplicaOf};
use futures_channel::mpsc as lanes;
use futures_util::StreamExt as _;
use futures_util::future::{join_all, select_all};
use futures_util::stream::FuturesUnordered;
use lane::capture::{BLOCK_BYTES, Group, Task, extent};
use lane::peer::ChannelEvent;
use lane::{CaptureOrder, LaneHandle};
use standby::asking::Word;
use standby::owner::{Event, Outcome, ReadId, State};
use standby::record::OwnerRecord;
use standby::wire::{Answer, Content, StreamId, ToOwner, ToStandby};
use standby::{StandbyId, VolumeIndex};
use tokio::sync::mpsc;
use tokio::time::{Instant as TokioInstant, sleep, sleep_until};
use transport::Priority;

use super::beginning::{arrive, begin, join, lanes_of, wait_to_learn};
use super::checking::{Check, Portion};
use super::lacking::turned;
use super::naming::Naming;
use super::reading::{Run, read_runs};
use super::{Order, Source, Surroundings};
use crate::error::RequestError;
use crate::host::blocking;
use crate::standbys::book::{Side, SourceConfig};
use crate::standbys::frames::{Frame, Terms, cleaned};
use crate::vms::moving;
use crate::volumes::orders::create::random_number;

/// The number of blocks of one message: 256 KiB.
pub(super) const EXTENT_BLOCKS: u64 = 64;
/// The number of blocks that are under way: 16 MiB, for 1 Gbit/s over 100 ms.
const WINDOW_BLOCKS: u64 = 4096;
/// Time between two tries to begin.
const RETRY: Duration = Duration::from_secs(1);
/// Time before a new stream begins after the standby's host had a fault.
const STREAM_RETRY: Duration = Duration::from_secs(5);
/// Time before a host that has promoted the standby is asked whether it has given that up.
const PROMOTED_RETRY: Duration = Duration::from_secs(10);
/// How often a limited rate gives its share.
const RATE_STEP: Duration = Duration::from_millis(50);

/// What a source says of a standby whose promotion was given up.
const GIVEN_UP: &str = "that host has given up what it had promoted: remove the standby, and add it again";

/// Sends messages to the standby's host in order, whatever its session is.
pub(in crate::standbys) type SourceLine = Arc<dyn moving::channel::Send>;

/// Work beside the task, with its result.
type Pending<'a> = std::pin::Pin<Box<dyn Future<Output = Done> + Send + 'a>>;

/// Why a group has ended.
enum End {
    /// The daemon stops, or the standby is removed.
    ForGood,
    /// It begins again when it can; the text says what it waits for.
    Again(String),
}

pub(super) async fn run(source: Arc<Source>, with: Surroundings, mut orders: mpsc::UnboundedReceiver<Order>) {
    source.recall_comparisons(&with).await;
    loop {
        match serve(&source, &with, &mut orders).await {
            End::ForGood => return,
            End::Again(reason) => {
                source.note_interruption(&with, &reason).await;
                source.show(|shown| {
                    let group = shown.group.take();
                    let age = group.and_then(|group| {
                        group.look(|machine, now| Some(now.saturating_sub(machine.as_of()?))).flatten()
                    });
                    let as_of = age.and_then(|age| Instant::now().checked_sub(age));
                    shown.older_than = as_of.or(shown.older_than).or_else(|| Some(Instant::now()));
                    shown.waiting_since.get_or_insert_with(Instant::now);
                    // Its volumes have left, or begin again to be served, which asks again.
                    shown.state = shown.state.filter(|state| *state == State::Used);
                    shown.reason = Some(reason);
                });
            }
        }
        let changed = with.volumes.changed();
        tokio::select! {
            () = with.stopping.begins() => return,
            order = orders.recv() => if matches!(order, None | Some(Order::End)) { return },
            () = async {
                let _ = tokio::time::timeout(RETRY, changed).await;
                // Lanes begin one after the other.
                sleep(RETRY / 4).await;
            } => {}
        }
    }
}

/// Returns the copy's name in the chronicles of the volumes: a departure number that no migration has.
pub(crate) fn copy_of(standby: StandbyId, host: migration::HostId) -> ReplicaOf {
    ReplicaOf::Host { host: host.0, departure: departure_of(standby) }
}

/// Returns a number in place of a migration's, for what the standby's host keeps.
pub(crate) fn departure_of(standby: StandbyId) -> u64 {
    (1 << 62) | (standby.0 as u64 >> 3)
}

/// Serves a standby until its group ends.
async fn serve(
    source: &Arc<Source>,
    with: &Surroundings,
    orders: &mut mpsc::UnboundedReceiver<Order>,
) -> End {
    let config = source.streamed();
    let (lanes, sizes) = match lanes_of(&config, with) {
        Ok(found) => found,
        Err(reason) => return End::Again(reason),
    };
    if let Err(reason) = arrive(source, with, &config).await {
        return End::Again(reason);
    }
    let turned = match turned(source, with, &config).await {
        Ok(turned) => turned,
        Err(reason) => return End::Again(reason),
    };
    let (origin, of) = (Instant::now(), copy_of(source.standby(), source.host()));
    let (group, tasks) = Group::new(&sizes, Arc::new(move || origin.elapsed()));
    let ends = Ends(Arc::clone(&group));
    let mut joined = join(&group, &lanes, of).await;
    if let (Some(turned), Ok(lacks)) = (&turned, &mut joined)
        && let Err(reason) = turned.add(&lanes, lacks).await
    {
        joined = Err(reason);
    }
    let joined = joined.and_then(|lacks| wait_to_learn(&config, lacks));
    let end = match joined {
        Err(reason) => End::Again(reason),
        Ok(lacks) => match begin(source, with, &config, &group, lacks).await {
            Err(reason) => End::Again(reason),
            Ok(()) => {
                let mut running = Running::new(source, with, &config, &group, &lanes, of, origin);
                running.run(tasks, orders).await
            }
        },
    };
    drop(ends);
    // Lanes that have ended capture nothing.
    join_all(lanes.iter().map(|lane| lane.capture(CaptureOrder { member: None, of }))).await;
    end
}

/// A group that runs.
pub(super) struct Running<'a> {
    source: &'a Arc<Source>,
    with: &'a Surroundings,
    config: SourceConfig,
    pub(super) group: &'a Arc<Group>,
    lanes: &'a [LaneHandle],
    of: ReplicaOf,
    origin: Instant,
    stream: StreamId,
    /// Blocks that the standby's host has not taken.
    under_way: u64,
    /// Blocks that a limited rate has left, and when it gives the next.
    share: f64,
    given_at: Instant,
    new_stream_at: Option<TokioInstant>,
    pub(super) naming: Naming,
    /// The comparison of everything that is under way.
    check: Option<Check>,
    /// The number of its question that has no answer.
    check_asked: Option<u64>,
    /// Whether blocks are being read for its next question, or its beginning is being noted.
    is_hashing: bool,
    /// The newest record that is not durable, and whether one is being written.
    to_record: Option<(u64, OwnerRecord)>,
    is_recording: bool,
}

/// Ends a group with the task that serves it, however that ends: no write waits for it any longer.
struct Ends(Arc<Group>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A read, a flush or a record that has ended.
enum Done {
    Read {
        stream: StreamId,
        read: ReadId,
        volume: VolumeIndex,
        blocks: BlockRange,
        result: Result<Vec<Run>, String>,
    },
    /// Blocks that are compared: their hashes.
    Hashed(StreamId, Portion, Result<Bytes, String>),
    /// A comparison was noted.
    Noted,
    Flushed(bool),
    Forgotten(bool),
    Recorded(u64, Result<(), String>),
}

impl<'a> Running<'a> {
    fn new(
        source: &'a Arc<Source>,
        with: &'a Surroundings,
        config: &SourceConfig,
        group: &'a Arc<Group>,
        lanes: &'a [LaneHandle],
        of: ReplicaOf,
        origin: Instant,
    ) -> Self {
        Self {
            source,
            with,
            config: config.clone(),
            group,
            lanes,
            of,
            origin,
            stream: StreamId(0),
            under_way: 0,
            share: 0.0,
            given_at: Instant::now(),
            new_stream_at: None,
            naming: Naming::default(),
            check: None,
            check_asked: None,
            is_hashing: false,
            to_record: None,
            is_recording: false,
        }
    }

    async fn run(
        &mut self,
        mut tasks: lanes::UnboundedReceiver<Task>,
        orders: &mut mpsc::UnboundedReceiver<Order>,
    ) -> End {
        let (line, mut arrivals) = match self.source.open_line(self.with) {
            Ok(opened) => opened,
            Err(reason) => return End::Again(reason),
        };
        let mut done = FuturesUnordered::new();
        let mut ended = pin!(select_all(self.lanes.iter().map(|lane| Box::pin(lane.ended()))));
        let stopping = self.with.stopping.clone();
        let mut stops = pin!(stopping.begins());
        self.begin_stream();
        loop {
            // Everything that the machine has given before it gets another share.
            while let Ok(task) = tasks.try_recv() {
                match self.carry_out(&line, task).await {
                    Ok(Some(future)) => done.push(future),
                    Ok(None) => {}
                    Err(end) => return end,
                }
            }
            // N.B. A share of which the machine makes no use is not given again before something has happened.
            if self.give_share()
                && let Ok(task) = tasks.try_recv()
            {
                match self.carry_out(&line, task).await {
                    Ok(Some(future)) => done.push(future),
                    Ok(None) => {}
                    Err(end) => return end,
                }
                continue;
            }
            let timeout = TokioInstant::from_std(self.origin + self.group.next_timeout());
            let timeout = if self.config.bandwidth.is_some() {
                timeout.min(TokioInstant::now() + RATE_STEP)
            } else {
                timeout
            };
            let timeout = self.new_stream_at.map_or(timeout, |at| at.min(timeout));
            tokio::select! {
                () = &mut stops => return End::ForGood,
                _ = &mut ended => return End::Again("a volume is not served".to_owned()),
                order = orders.recv() => match order {
                    None | Some(Order::End) => return End::ForGood,
                    Some(Order::Led) => return End::Again("its streams lead elsewhere".to_owned()),
                    Some(Order::Changed) => if let Some(end) = self.change() { return end },
                    Some(Order::Check { is_ordered }) => done.extend(self.begin_check(is_ordered)),
                },
                task = tasks.next() => {
                    let Some(task) = task else { return End::Again("its group has ended".to_owned()) };
                    match self.carry_out(&line, task).await {
                        Ok(Some(future)) => done.push(future),
                        Ok(None) => {}
                        Err(end) => return end,
                    }
                }
                Some(ended) = done.next(), if !done.is_empty() => done.extend(self.end(&line, ended)),
                arrival = arrivals.next() => match arrival {
                    None => return End::Again("the line to the standby's host has ended".to_owned()),
                    Some(arrival) => match self.arrived(&line, arrival) {
                        Ok(next) => done.extend(next),
                        Err(end) => return end,
                    },
                },
                () = sleep_until(timeout) => {
                    if self.new_stream_at.is_some_and(|at| at <= TokioInstant::now()) {
                        self.begin_stream();
                    }
                    self.group.handle_timeout();
                }
            }
        }
    }

    fn begin_stream(&mut self) {
        self.new_stream_at = None;
        self.stream = StreamId(random_number());
        self.under_way = 0;
        self.forget_named();
        self.group.handle(Event::StreamBegins(self.stream));
    }

    /// Lets the machine send as much as the window and the ordered rate allow. Returns whether it was given a share.
    fn give_share(&mut self) -> bool {
        if let Some(rate) = self.config.bandwidth {
            let blocks_per_second = (rate / BLOCK_BYTES).max(1) as f64;
            let now = Instant::now();
            let earned = blocks_per_second * now.duration_since(self.given_at).as_secs_f64();
            self.share = (self.share + earned).min(blocks_per_second.max(EXTENT_BLOCKS as f64));
            self.given_at = now;
        } else {
            self.share = WINDOW_BLOCKS as f64;
        }
        let room = WINDOW_BLOCKS.saturating_sub(self.under_way).min(self.share as u64);
        let wants = self.group.look(|machine, _| machine.wants_to_send()).unwrap_or(false);
        if room < EXTENT_BLOCKS || !wants {
            return false;
        }
        self.group.handle(Event::MaySend(room));
        true
    }

    /// Carries out a task. Returns what is awaited beside other tasks.
    async fn carry_out(&mut self, line: &SourceLine, task: Task) -> Result<Option<Pending<'a>>, End> {
        match task {
            Task::Send(stream, message, payload) => {
                self.send(line, stream, message, payload.into());
                Ok(None)
            }
            Task::SendFromDisk { stream, read, volume, blocks } => {
                self.under_way += blocks.len();
                let (lane, is_named) = (&self.lanes[volume.index()], self.naming.is_wanted());
                Ok(Some(Box::pin(async move {
                    let result = read_runs(lane, blocks, is_named).await;
                    Done::Read { stream, read, volume, blocks, result }
                })))
            }
            Task::FlushStores => {
                let lanes = self.lanes;
                Ok(Some(Box::pin(async move {
                    let flushed = join_all(lanes.iter().map(LaneHandle::flush_for_standby)).await;
                    Done::Flushed(flushed.into_iter().all(|flushed| flushed))
                })))
            }
            Task::MakeDurable(number, record) => {
                // Each record replaces the one before.
                self.to_record = Some((number, record));
                Ok(self.record(Duration::ZERO))
            }
            // The time of the next deadline has changed.
            Task::Wake => Ok(None),
            Task::Forget => {
                let (lanes, of) = (self.lanes, self.of);
                Ok(Some(Box::pin(async move {
                    let forgotten = join_all(lanes.iter().map(|lane| lane.forget_for_standby(of))).await;
                    Done::Forgotten(forgotten.iter().all(Result::is_ok))
                })))
            }
            Task::Tell(state) => {
                tracing::info!(standby = %self.config.name, host = %self.with.hosts.name_of(self.source.host()), ?state, "a standby's state");
                self.source.show(|shown| shown.enter(state));
                Ok(None)
            }
            Task::Left => Err(End::Again("a volume has left this host".to_owned())),
        }
    }

    /// Begins to make the newest record durable, after a pause, unless one is being written.
    fn record(&mut self, pause: Duration) -> Option<Pending<'a>> {
        if self.is_recording {
            return None;
        }
        let (number, record) = self.to_record.clone()?;
        self.is_recording = true;
        let (book, id) = (self.with.book.clone(), self.config.id.clone());
        Some(Box::pin(async move {
            sleep(pause).await;
            let written = blocking(move || {
                let written = book.write_record(Side::Source, &id, &record);
                written.map_err(|error| RequestError::Internal(error.to_string()))
            });
            Done::Recorded(number, written.await.map_err(|error| error.message()))
        }))
    }

    /// Handles the end of a record; returns the next one.
    fn recorded(&mut self, number: u64, result: Result<(), String>) -> Option<Pending<'a>> {
        self.is_recording = false;
        match result {
            Ok(()) => {
                self.to_record.take_if(|(newest, _)| *newest == number);
                self.group.handle(Event::Durable(number));
                self.record(Duration::ZERO)
            }
            Err(error) => {
                tracing::warn!(standby = %self.config.name, error, "cannot record a standby; trying again");
                self.source
                    .show(|shown| shown.reason = Some(format!("the data folder cannot be written: {error}")));
                self.record(RETRY)
            }
        }
    }

    fn send(&mut self, line: &SourceLine, stream: StreamId, message: ToStandby, payload: Bytes) {
        if stream != self.stream {
            return;
        }
        let blocks = match &message {
            ToStandby::Extent { content: Content::Payload, blocks, .. } => blocks.len(),
            ToStandby::Extent { content: Content::Zeroes, .. } => 1,
            _ => 0,
        };
        self.under_way += blocks;
        self.share -= (payload.len() as u64 / BLOCK_BYTES) as f64;
        let sealed = u64::from(matches!(message, ToStandby::Seal { .. }));
        self.source.show(|shown| {
            shown.bytes_sent += payload.len() as u64;
            shown.epochs += sealed;
        });
        if matches!(message, ToStandby::Offer { .. }) {
            let terms = Terms { every_ms: self.config.every_ms, rpo_ms: self.config.rpo_ms };
            line.send(Priority::Bulk, Frame::Terms(terms).encode(), Bytes::new());
        }
        line.send(Priority::Bulk, Frame::ToStandby(stream, message).encode(), payload);
    }

    /// Handles the end of work; returns what follows it.
    fn end(&mut self, line: &SourceLine, done: Done) -> Option<Pending<'a>> {
        match done {
            Done::Recorded(number, result) => return self.recorded(number, result),
            Done::Hashed(stream, portion, hashes) => return self.compare(line, stream, portion, hashes),
            Done::Noted => return self.noted(),
            Done::Read { stream, read, volume, blocks, result } => {
                if stream == self.stream {
                    self.under_way = self.under_way.saturating_sub(blocks.len());
                }
                let outcome = match result {
                    Ok(runs) => {
                        let mut is_named = false;
                        for run in runs {
                            // On another stream it is not sent at all.
                            if run.hashes.is_empty() || stream != self.stream {
                                self.send(line, stream, extent(volume, run.blocks, run.content), run.bytes);
                            } else {
                                self.name(line, read, volume, run);
                                is_named = true;
                            }
                        }
                        if is_named {
                            return None;
                        }
                        Outcome::Done
                    }
                    Err(error) => {
                        self.source.show(|shown| shown.reason = Some(error));
                        Outcome::Failed
                    }
                };
                // N.B. After the message: the machine sends the seal only then.
                self.group.handle(Event::ReadEnded { read, outcome });
            }
            Done::Flushed(true) => self.group.handle(Event::StoresFlushed),
            Done::Flushed(false) => self.group.handle(Event::FlushFailed),
            Done::Forgotten(is_forgotten) => {
                if !is_forgotten {
                    tracing::warn!(standby = %self.config.name, "cannot record what a standby has: a restart sends more than it lacks");
                }
            }
        }
        None
    }

    /// Handles what has arrived; returns what follows it.
    fn arrived(&mut self, line: &SourceLine, arrival: ChannelEvent) -> Result<Option<Pending<'a>>, End> {
        match arrival {
            ChannelEvent::Message { head, .. } => match Frame::decode(&head) {
                Some(Frame::ToOwner(stream, message)) => {
                    if matches!(
                        message,
                        ToOwner::Answer(_) | ToOwner::Ready { .. } | ToOwner::Acknowledged { .. }
                    ) {
                        self.source.show(|shown| shown.reason = None);
                    }
                    self.source.hear_of_room(&message);
                    if self.has_arrived(&message) {
                        return Err(End::Again("the folder that was exported has arrived".to_owned()));
                    }
                    self.hear_of_promotion(&message);
                    let is_agreed = matches!(message, ToOwner::Answer(Answer::Receiving { .. }));
                    self.group.handle(Event::Received(stream, message));
                    if is_agreed {
                        let lacks = self.group.look(|machine, _| machine.lacks_everything()).unwrap_or(false);
                        self.naming.agreed(lacks);
                        return Ok(self.compare_next());
                    }
                }
                Some(Frame::HasContent(stream)) if stream == self.stream => self.naming.note_content(),
                Some(Frame::Wanted { stream, number, runs }) if stream == self.stream => {
                    if self.check_asked.take_if(|asked| *asked == number).is_some() {
                        return Ok(self.end_portion(&runs));
                    }
                    match self.naming.answered(number, &runs) {
                        Some(wanted) => self.send_wanted(line, wanted),
                        None => {
                            self.end_stream("the standby's host has answered another question".to_owned());
                        }
                    }
                }
                Some(Frame::Taken(stream, blocks)) if stream == self.stream => {
                    self.under_way = self.under_way.saturating_sub(blocks);
                }
                Some(Frame::Fault(text)) => self.end_stream(cleaned(&text)),
                _ => {}
            },
            ChannelEvent::Lost(reason) => self.source.show(|shown| shown.reason = Some(reason)),
            // N.B. The standby may have been promoted meanwhile, or used: a new offer is answered with that.
            ChannelEvent::Restored => {
                self.source.show(|shown| shown.reason = None);
                self.begin_stream();
            }
            ChannelEvent::PeerRestarted => {
                self.source.show(|shown| shown.reason = None);
                self.begin_stream();
            }
        }
        Ok(None)
    }

    /// Ends the stream after a fault. What the standby's host has refused is not in its epoch: nothing more of this stream is sent.
    fn end_stream(&mut self, reason: String) {
        self.source.show(|shown| shown.reason = Some(reason));
        self.stream = StreamId(0);
        self.forget_named();
        self.new_stream_at = Some(TokioInstant::now() + STREAM_RETRY);
    }

    /// Tells on that the standby was promoted, and asks again later whether that was given up.
    fn hear_of_promotion(&mut self, message: &ToOwner) {
        let word = match message {
            ToOwner::Answer(Answer::Promoted) => Word::Promoted,
            ToOwner::Answer(Answer::GivenUp) => Word::Yielded,
            _ => return,
        };
        self.with.permissions.said(self.source.standby(), word);
        match word {
            Word::Promoted => self.new_stream_at = Some(TokioInstant::now() + PROMOTED_RETRY),
            _ => self.source.show(|shown| shown.reason = Some(GIVEN_UP.to_owned())),
        }
    }

    /// Takes the changed configuration; returns an end if the group has to begin anew.
    fn change(&mut self) -> Option<End> {
        let config = self.source.streamed();
        if config.is_paused != self.config.is_paused {
            self.group.handle(if config.is_paused { Event::Paused } else { Event::Resumed });
        }
        let is_same = config.every_ms == self.config.every_ms && config.rpo_ms == self.config.rpo_ms;
        self.config = config;
        (!is_same).then(|| End::Again("it begins anew with other settings".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_migration_has_the_number_of_a_standby() {
        assert!(departure_of(StandbyId(u128::MAX)) >= 1 << 62 && departure_of(StandbyId(0)) == 1 << 62);
        assert_ne!(departure_of(StandbyId(u128::MAX)), u64::MAX);
    }
}
