//! Standbys: copies of volumes at other hosts that are seconds old, kept while the guests write.
//!
//! ```text
//!   the host that serves the volumes                          the host that keeps the standby
//!     orders ─► Source: a task, the group of the lanes          received ─► Copy: a thread, images, spools, recovery points
//!                 └── frames over one channel ───────────────────────┘         └─► promotion: volumes of this host
//!     book: what survives a restart                             book
//! ```
//! The machines of both sides are in the crate `standby`, and decide. This room carries out.

mod asking;
pub(crate) mod book;
pub(crate) mod copy;
mod exporting;
pub(crate) mod following;
mod former;
pub(crate) mod frames;
mod making;
mod orders;
pub(crate) mod permissions;
mod promotion;
mod reprotecting;
mod returning;
mod seeding;
pub(crate) mod source;
mod testing;
mod turns;
mod use_by_migration;
mod verifying;
mod views;
mod vms;
mod yielding;

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use migration::HostId;
use standby::StandbyId;
use standby::asking::{Question, Word};
use standby::whereabouts::Whereabouts;
use standby::wire::{Answer, StreamId, ToOwner, ToStandby};

use self::asking::Asker;
use self::book::{Book, CopyConfig, Noted, Side, SourceConfig, Unreadable, parse};
use self::copy::{Copy, Ending, Input, Named};
use self::exporting::Exporting;
use self::frames::{ANSWER_MAX, Frame, Line, is_about};
use self::permissions::Permissions;
use self::source::{Source, Surroundings, host_of};
use self::testing::Testing;
use self::turns::Turns;
use crate::custody::Custody;
use crate::error::{RequestError, StandbyError};
use crate::files::sockets::SocketFolder;
use crate::host::{Draining, Parts, Serving, Stopping, VmOrders, VolumeOrders, blocking};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::peers::Peers;
use crate::stores::{StoreKind, Stores};
use crate::vms::Vms;
use crate::volumes::chronicles::Chronicles;
use crate::volumes::registry::Volumes;

/// How long the end of the daemon waits for the keepers of standbys.
const END_MAX: Duration = Duration::from_secs(5);

/// The standbys of both roles.
pub(crate) struct Standbys {
    /// The files about standbys; the error says why there are none.
    book: Result<Book, String>,
    data_dir: PathBuf,
    journal: Journal,
    custody: Custody,
    stores: Arc<Stores>,
    volumes: Arc<Volumes>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    permissions: Arc<Permissions>,
    chronicles: Chronicles,
    asker: Asker,
    vms: Arc<Vms>,
    volume_orders: Arc<VolumeOrders>,
    vm_orders: Arc<VmOrders>,
    /// How often everything is compared with each standby; `None`: only if it is ordered.
    verify: Option<Duration>,
    stopping: Stopping,
    draining: Arc<Draining>,
    serving: Arc<Serving>,
    sources: Mutex<BTreeMap<StandbyId, Arc<Source>>>,
    /// The last export of each standby since the daemon began.
    exports: Mutex<BTreeMap<StandbyId, Arc<Exporting>>>,
    copies: Mutex<BTreeMap<StandbyId, Arc<Kept>>>,
    /// Standbys that were promoted and removed here. Their sources still hear that they were promoted.
    departed: Mutex<BTreeMap<StandbyId, CopyConfig>>,
    /// Held while a standby is made, removed or promoted.
    changing: tokio::sync::Mutex<()>,
    /// Held while what is noted of a standby is changed.
    noting: tokio::sync::Mutex<()>,
    /// Held while what is remembered of groups that were given up is changed.
    formers: tokio::sync::Mutex<()>,
    /// Questions of one host wait for one another.
    asked: Turns,
    /// Descriptions for one host wait for one another: it checks them in turn, and an answer must not take too long.
    describing: Turns,
    /// Files that cannot be read, and why.
    unreadable: Mutex<Vec<String>>,
}

/// A standby that is kept here.
struct Kept {
    /// As it was made. **N.B.** What is noted of it since is not here.
    config: CopyConfig,
    noted: Mutex<Noted>,
    copy: Copy,
    /// Its test: the present one, or the last.
    test: Mutex<Option<Arc<Testing>>>,
    /// What the checks of its described VMs have found since the daemon began, by name.
    problems: Mutex<BTreeMap<String, String>>,
}

impl Kept {
    fn noted(&self) -> Noted {
        lock(&self.noted).clone()
    }

    /// Returns all that is known of it at present.
    fn present(&self) -> CopyConfig {
        CopyConfig { noted: self.noted(), ..self.config.clone() }
    }

    fn host(&self) -> HostId {
        host_of(&lock(&self.noted).host)
    }

    /// Returns which hosts may have its volumes.
    fn whereabouts(&self) -> Whereabouts<HostId> {
        let noted = lock(&self.noted);
        let leaving_for = noted.leaving_for.as_ref().map(|to| host_of(&to.host));
        Whereabouts { at: host_of(&noted.host), leaving_for }
    }

    /// Returns the name that a volume has here after a promotion.
    fn name_here(&self, volume: &str) -> String {
        lock(&self.noted).names.get(volume).map_or(volume, String::as_str).to_owned()
    }
}

impl Standbys {
    pub(crate) fn new(
        parts: &Parts,
        serving: &Arc<Serving>,
        volume_orders: &Arc<VolumeOrders>,
        vm_orders: &Arc<VmOrders>,
    ) -> Arc<Self> {
        let Parts {
            config,
            journal,
            custody,
            stores,
            volumes,
            sockets,
            hosts,
            peers,
            permissions,
            chronicles,
            vms,
            stopping,
            draining,
            ..
        } = parts.clone();
        let book = Book::open(&config.data_dir).map_err(|error| error.to_string());
        Arc::new(Self {
            asker: Asker::new(&hosts, &peers),
            book,
            data_dir: config.data_dir.clone(),
            journal,
            custody,
            stores,
            volumes,
            sockets,
            hosts,
            peers,
            permissions,
            chronicles,
            vms,
            volume_orders: Arc::clone(volume_orders),
            vm_orders: Arc::clone(vm_orders),
            verify: config.standby.verify.0,
            stopping,
            draining,
            serving: Arc::clone(serving),
            sources: Mutex::default(),
            exports: Mutex::default(),
            copies: Mutex::default(),
            departed: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
            noting: tokio::sync::Mutex::default(),
            formers: tokio::sync::Mutex::default(),
            asked: Turns::default(),
            describing: Turns::default(),
            unreadable: Mutex::default(),
        })
    }

    /// Goes on with the standbys of both roles after a start.
    pub(crate) fn begin(self: &Arc<Self>) {
        if let Err(error) = self.try_to_begin() {
            tracing::error!(%error, "standbys are not kept");
        }
        if let Some(every) = self.verify {
            tokio::spawn(Arc::clone(self).verify(every));
        }
    }

    fn try_to_begin(self: &Arc<Self>) -> Result<(), StandbyError> {
        let unreadable = |error: io::Error| StandbyError::Unreadable(error.to_string());
        let book = self.book()?;
        let (copies, damaged) = book.configs::<CopyConfig>(Side::Copy).map_err(unreadable)?;
        self.report(damaged);
        for config in copies {
            if let Err(error) = self.keep(config) {
                tracing::error!(%error, "a standby is not kept");
            }
        }
        let (sources, damaged) = book.configs::<SourceConfig>(Side::Source).map_err(unreadable)?;
        self.report(damaged);
        for config in sources {
            self.begin_source(config);
        }
        self.finish_promotions();
        self.resume_leaving();
        self.resume_lending();
        self.resume_tests();
        self.resume_returns();
        self.finish_turning();
        Ok(())
    }

    /// Reports files that cannot be read. Each is left as it is; other standbys go on.
    fn report(&self, damaged: Vec<Unreadable>) {
        for Unreadable { path, error } in damaged {
            tracing::error!(path = %path.display(), %error, "the standby of this file is not kept");
            lock(&self.unreadable).push(format!("{} cannot be read: {error}", path.display()));
        }
    }

    /// Returns what is wrong with the files about standbys.
    pub(crate) fn unreadable(&self) -> Vec<String> {
        let book =
            self.book.as_ref().err().map(|error| format!("the folder of standbys cannot be used: {error}"));
        book.into_iter().chain(lock(&self.unreadable).iter().cloned()).collect()
    }

    fn begin_source(self: &Arc<Self>, config: SourceConfig) -> Option<Arc<Source>> {
        let (standby, book) = (parse(&config.id)?, self.book.clone().ok()?);
        let with = Surroundings {
            book,
            journal: self.journal.clone(),
            hosts: Arc::clone(&self.hosts),
            peers: Arc::clone(&self.peers),
            volumes: Arc::clone(&self.volumes),
            permissions: Arc::clone(&self.permissions),
            asker: self.asker.clone(),
            stopping: self.stopping.clone(),
        };
        self.permissions.know(config.clone());
        let source = Source::begin(config, with);
        lock(&self.sources).insert(standby, Arc::clone(&source));
        tokio::spawn(Arc::clone(self).describe_vms(Arc::clone(&source)));
        Some(source)
    }

    /// Starts the keeper of a standby that the book has.
    fn keep(&self, config: CopyConfig) -> Result<(), StandbyError> {
        let unreadable = |error: String| StandbyError::Unreadable(error);
        let book = self.book()?.clone();
        let standby = parse(&config.id).ok_or_else(|| unreadable(format!("{} is no identity", config.id)))?;
        if config.is_removed {
            lock(&self.departed).insert(standby, config);
            return Ok(());
        }
        let (stores, name) = (Arc::clone(&self.stores), config.store.clone());
        // One whose store is not there is listed, and says so.
        let locate = Box::new(move || folder_in(&stores, &name));
        let copy =
            Copy::start(config.clone(), locate, book).map_err(|error| unreadable(error.to_string()))?;
        let kept = Kept {
            noted: Mutex::new(config.noted.clone()),
            config: CopyConfig { noted: Noted::default(), ..config },
            copy,
            test: Mutex::default(),
            problems: Mutex::default(),
        };
        lock(&self.copies).insert(standby, Arc::new(kept));
        Ok(())
    }

    /// Takes a message about a standby from the host that has its volumes.
    pub(crate) fn received(
        self: &Arc<Self>,
        peer: HostId,
        line: Line,
        head: &[u8],
        payload: Bytes,
        credit: Box<dyn Any + Send>,
    ) {
        match Frame::decode(head) {
            Some(Frame::ToStandby(stream, message)) => match self.kept_for(peer, &line) {
                Some(kept) => kept.copy.give(Input::Frame { line, stream, message, payload, credit }),
                None => match self.departed_for(peer, &line) {
                    Some(departed) => self.tell_promoted(&line, stream, &message, &departed),
                    None => {
                        line.send(&Frame::Fault("that host keeps no such standby".to_owned()), Bytes::new());
                    }
                },
            },
            Some(
                ref frame @ (Frame::Named { stream, number, volume, blocks }
                | Frame::Compare { stream, number, volume, blocks }),
            ) => {
                // The source names it again on another stream if nobody answers.
                if let Some(kept) = self.kept_for(peer, &line) {
                    let is_taken = matches!(frame, Frame::Named { .. });
                    let named =
                        Named { line, stream, number, volume, blocks, hashes: payload, is_taken, credit };
                    kept.copy.give(Input::Named(Box::new(named)));
                }
            }
            Some(Frame::Terms(terms)) => {
                if let Some(kept) = self.kept_for(peer, &line) {
                    kept.copy.note(terms);
                }
            }
            Some(Frame::Question(question)) => self.answer_question(peer, line, question, credit),
            Some(Frame::Ask(number, ask)) => {
                let this = Arc::clone(self);
                tokio::spawn(async move {
                    let arrived = Instant::now();
                    let _turn = this.asked.of(peer).await;
                    if arrived.elapsed() > ANSWER_MAX {
                        // Nobody waits for the answer: that host has given up.
                        return;
                    }
                    let answer = this.asked(peer, &line, ask, &payload).await;
                    // N.B. Its host may ask more only now: questions that wait are few.
                    drop(credit);
                    line.send(&Frame::Answer(number, answer.map_err(|error| error.message())), Bytes::new());
                });
            }
            // What only a standby's host says, and garbage.
            Some(_) | None => tracing::warn!(%peer, "ignored an invalid message about a standby"),
        }
    }

    /// Says to the host that has the volumes whether they were promoted here.
    fn answer_question(&self, peer: HostId, line: Line, question: Question, credit: Box<dyn Any + Send>) {
        let Some(kept) = self.kept_about(peer, &line, |kept| kept.whereabouts().may_be_at(peer)) else {
            // One that nobody knows is not one that was never promoted.
            let departed = self.departed_for(peer, &line);
            let word = departed.map_or(Word::Unsure, |departed| match departed.is_yielded {
                true => Word::Yielded,
                false => Word::Promoted,
            });
            return line.send(&Frame::Word(word), Bytes::new());
        };
        let (answer, answered) = tokio::sync::oneshot::channel();
        kept.copy.give(Input::Question { question, answer });
        tokio::spawn(async move {
            let word = answered.await.unwrap_or(Word::Unsure);
            // N.B. Its host may ask more only now: questions that wait are few.
            drop(credit);
            line.send(&Frame::Word(word), Bytes::new());
        });
    }

    /// Tells a source that its volumes were promoted here.
    fn tell_promoted(&self, line: &Line, stream: StreamId, message: &ToStandby, departed: &CopyConfig) {
        let frame = match message {
            ToStandby::Offer { .. } if departed.is_yielded => {
                Frame::ToOwner(stream, ToOwner::Answer(Answer::GivenUp))
            }
            ToStandby::Offer { .. } => Frame::ToOwner(stream, ToOwner::Answer(Answer::Promoted)),
            // Its next stream begins with an offer.
            _ => Frame::Fault("the volumes were promoted at the standby's host".to_owned()),
        };
        line.send(&frame, Bytes::new());
    }

    /// Notes that a host is not connected.
    pub(crate) fn lost(&self, peer: HostId) {
        for kept in lock(&self.copies).values().filter(|kept| kept.host() == peer) {
            kept.copy.give(Input::Lost);
        }
    }

    /// Returns the standby that a channel of another host is about: of that host alone.
    fn kept_for(&self, peer: HostId, line: &Line) -> Option<Arc<Kept>> {
        self.kept_about(peer, line, |kept| kept.host() == peer)
    }

    /// Returns the standby that a channel of another host is about, if that host has such a part in it.
    fn kept_about(&self, peer: HostId, line: &Line, has_part: impl Fn(&Kept) -> bool) -> Option<Arc<Kept>> {
        let own = self.peers.own();
        let copies = lock(&self.copies);
        let is_meant =
            |standby: StandbyId, kept: &Kept| has_part(kept) && is_about(line.channel, standby, peer, own);
        copies.iter().find(|(standby, kept)| is_meant(**standby, kept)).map(|(_, kept)| Arc::clone(kept))
    }

    /// Returns the promoted standby that a channel of another host is about, and that was removed here.
    fn departed_for(&self, peer: HostId, line: &Line) -> Option<CopyConfig> {
        let own = self.peers.own();
        let departed = lock(&self.departed);
        let is_meant = |standby: StandbyId, config: &CopyConfig| {
            host_of(&config.noted.host) == peer && is_about(line.channel, standby, peer, own)
        };
        departed
            .iter()
            .find(|(standby, config)| is_meant(**standby, config))
            .map(|(_, config)| config.clone())
    }

    /// Changes what is noted of a standby that is kept here, durably. **N.B.** Changes wait for one another.
    async fn note(&self, kept: &Kept, change: impl FnOnce(&mut Noted)) -> Result<(), RequestError> {
        let _noting = self.noting.lock().await;
        let is_kept = parse(&kept.config.id).is_some_and(|standby| lock(&self.copies).contains_key(&standby));
        if !is_kept {
            return Err(StandbyError::NotFound(kept.config.name.clone()).into());
        }
        let mut noted = kept.noted();
        change(&mut noted);
        if noted == *lock(&kept.noted) {
            return Ok(());
        }
        let config = CopyConfig { noted: noted.clone(), ..kept.config.clone() };
        self.on_book(move |book| book.write_config(Side::Copy, &config.id, &config)).await?;
        *lock(&kept.noted) = noted;
        Ok(())
    }

    /// Does work on the files about standbys, which may block.
    async fn on_book<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Book) -> io::Result<T> + Send + 'static,
    ) -> Result<T, RequestError> {
        let book = self.book()?.clone();
        let unusable = |error: io::Error| StandbyError::Record(error.to_string()).into();
        blocking(move || work(&book).map_err(unusable)).await
    }

    fn book(&self) -> Result<&Book, StandbyError> {
        self.book.as_ref().map_err(|error| StandbyError::Unreadable(error.clone()))
    }

    /// Returns the folder of a store.
    fn folder_of(&self, store: &str) -> Result<PathBuf, String> {
        folder_in(&self.stores, store)
    }

    /// Ends all keepers in order: their images are flushed, and it is noted how they are left.
    pub(crate) async fn end(&self) {
        let kept: Vec<Arc<Kept>> = lock(&self.copies).values().cloned().collect();
        let ended = futures_util::future::join_all(kept.iter().map(|kept| kept.copy.end(Ending::InOrder)));
        if tokio::time::timeout(END_MAX, ended).await.is_err() {
            tracing::warn!("a standby is still being written; it goes on from its last record");
        }
    }
}

/// Returns the folder of a store.
fn folder_in(stores: &Stores, store: &str) -> Result<PathBuf, String> {
    let store = stores.get(store).map_err(|error| error.message())?;
    match store.kind() {
        StoreKind::Folder { folder, .. } => Ok(Path::to_owned(folder.path())),
        StoreKind::Single(_) => {
            Err(format!("the store \"{}\" is no folder; a standby needs one", store.name()))
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
