//! Migrations as people see them: the journal's history, and what lanes report of those under way.
//!
//! ```text
//!   lane thread ──Report──► Live (one a migration since this daemon began) ──change──► who watches
//!                                │
//!   journal: how far, durably ───┴──► api::Migration
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use api::Migration;
use lane::{DataPath, Report};
use migration::journal::{Outcome, Side, Summary};
use migration::queue::{Need, Party, UnderWay};
use migration::ticket::Ticket;
use migration::{HostId, MigrationId, Progress, VolumeId, VolumeIndex};
use tokio::sync::{mpsc, watch};

use crate::error::RequestError;
use crate::journal::Journal;
use crate::migrations::metadata::{Metadata, MetadataFolder};
use crate::migrations::queue::Queue;
use crate::migrations::view;
use crate::vms::moving::VmMoves;

/// Migrations since this daemon began.
#[derive(Default)]
pub(crate) struct Migrations {
    live: Mutex<BTreeMap<MigrationId, Tracked>>,
    /// Who this host is to others: part of its tickets.
    own: OnceLock<Box<dyn Fn() -> Option<HostId> + Send + Sync>>,
    /// What is known of VMs that go along.
    moving: OnceLock<Arc<VmMoves>>,
    /// Those that wait for their turn, and what goes with all of them.
    waiting: OnceLock<(Arc<Queue>, Arc<MetadataFolder>)>,
    /// Who accounts for those that have ended.
    accountant: OnceLock<mpsc::UnboundedSender<MigrationId>>,
}

/// A migration that a lane of this daemon runs, or has run.
#[derive(Debug)]
struct Tracked {
    volumes: Vec<VolumeId>,
    news: watch::Sender<Live>,
}

/// What is known of a migration besides the journal.
#[derive(Clone, Debug)]
pub(super) struct Live {
    /// Grows with every report.
    pub(super) change: u64,
    /// The latest report; `None` before the first.
    pub(super) progress: Option<Progress>,
    /// How it ended; `None` while it is under way. The same as in the journal, unless that could not be written.
    pub(super) ended: Option<(Outcome, Summary)>,
    /// How many still settle something that goes with it: until then it is not shown as ended.
    pub(super) settling: usize,
}

impl Live {
    /// Whether people are told that it has ended.
    fn is_over(&self) -> bool {
        self.ended.is_some() && self.settling == 0
    }
}

/// Keeps a migration from being shown as ended until this is dropped: who waits for its end finds everything in its place.
pub(crate) struct Settling {
    migrations: Arc<Migrations>,
    migration: MigrationId,
}

impl Drop for Settling {
    fn drop(&mut self) {
        self.migrations.change(self.migration, |live| live.settling = live.settling.saturating_sub(1));
    }
}

impl Migrations {
    /// Begins to track a migration. Reports about migrations that are not tracked are dropped.
    pub(crate) fn track(&self, migration: MigrationId, volumes: Vec<VolumeId>) {
        // Who watched it while it waited has seen changes of the queue.
        let change = self.waiting.get().map_or(0, |(queue, _)| *queue.turns().borrow()) + 1;
        let live = Live { change, progress: None, ended: None, settling: 0 };
        self.lock().insert(migration, Tracked { volumes, news: watch::Sender::new(live) });
    }

    /// Tracks a migration that goes on, unless it is tracked already.
    pub(crate) fn track_again(&self, migration: MigrationId, volumes: impl Iterator<Item = VolumeId>) {
        if self.subscribe(migration).is_none() {
            self.track(migration, volumes.collect());
        }
    }

    /// Shows a migration as ended that no lane has reported to have ended.
    pub(crate) fn conclude(&self, migration: MigrationId, outcome: &Outcome) {
        let is_reported = self.live(migration).is_none_or(|live| live.ended.is_some());
        if !is_reported {
            let outcome = outcome.clone();
            self.report(Report::Ended { migration, outcome, summary: Summary::default() });
        }
    }

    /// Says that something that goes with a migration is settled only when it has ended. What is not tracked is not shown by
    /// this either.
    pub(crate) fn settle(self: &Arc<Self>, migration: MigrationId) -> Settling {
        self.change(migration, |live| live.settling += 1);
        Settling { migrations: Arc::clone(self), migration }
    }

    fn change(&self, migration: MigrationId, change: impl FnOnce(&mut Live)) {
        if let Some(tracked) = self.lock().get(&migration) {
            tracked.news.send_modify(|live| {
                live.change += 1;
                change(live);
            });
        }
    }

    /// Takes a report; called on lane threads.
    pub(crate) fn report(&self, report: Report) {
        let (Report::Progress { migration, .. } | Report::Ended { migration, .. }) = report else {
            // Recordings are for the histories.
            return;
        };
        let has_ended = matches!(report, Report::Ended { .. });
        let is_news = has_ended && self.live(migration).is_some_and(|live| live.ended.is_none());
        self.take(migration, report);
        if let (true, Some(accountant)) = (is_news, self.accountant.get()) {
            // Nobody accounts for anything in a daemon that is stopping.
            let _ = accountant.send(migration);
        }
        if let (true, Some((queue, _))) = (has_ended, self.waiting.get()) {
            queue.turn();
        }
    }

    fn take(&self, migration: MigrationId, report: Report) {
        let live = self.lock();
        let Some(tracked) = live.get(&migration) else {
            tracing::error!(%migration, "a report about an unknown migration");
            return;
        };
        tracked.news.send_modify(|live| {
            live.change += 1;
            match report {
                Report::Progress { progress, .. } => live.progress = Some(progress),
                Report::Ended { outcome, summary, .. } => live.ended = Some((outcome, summary)),
                Report::DataPath { .. } | Report::Recorded { .. } | Report::RecordingEnded { .. } => {}
            }
        });
    }

    /// Takes note of the way that a volume's blocks take to another host; called on lane threads.
    pub(crate) fn note_way(
        self: &Arc<Self>,
        journal: &Journal,
        runtime: &tokio::runtime::Handle,
        migration: MigrationId,
        volume: VolumeIndex,
        way: DataPath,
    ) {
        let known = journal.read(|state| {
            let known = state.migrations.get(&migration)?;
            Some((known.started_unix_ms, known.volumes.get(volume.as_usize())?.volume.to_string()))
        });
        let (Some((begun, volume)), Some((_, metadata_folder))) = (known, self.waiting.get().cloned()) else {
            return;
        };
        tracing::info!(%migration, volume, ?way, "the way that blocks take");
        let migrations = Arc::clone(self);
        runtime.spawn(async move {
            let note = |metadata: &mut Metadata| {
                let shared = metadata.shared.iter_mut().filter(|shared| shared.volume == volume);
                shared.for_each(|shared| shared.is_used = Some(way == DataPath::Shared));
            };
            metadata_folder.note(migration, begun, note).await;
            migrations.take(migration, Report::DataPath { migration, volume: VolumeIndex(0), way });
        });
    }

    /// The migration of the volume that is under way.
    pub(crate) fn running_of(&self, volume: VolumeId) -> Option<MigrationId> {
        let live = self.lock();
        let mut running = live.iter().filter(|(_, tracked)| tracked.news.borrow().ended.is_none());
        running.find(|(_, tracked)| tracked.volumes.contains(&volume)).map(|(id, _)| *id)
    }

    /// How many are under way.
    pub(crate) fn running(&self) -> usize {
        self.lock().values().filter(|tracked| tracked.news.borrow().ended.is_none()).count()
    }

    /// What the migrations under way use, and the volumes that lack blocks.
    pub(crate) fn under_way(&self, journal: &Journal) -> Vec<UnderWay> {
        let running: Vec<(MigrationId, Vec<VolumeId>)> = {
            let live = self.lock();
            let running = live.iter().filter(|(_, tracked)| tracked.news.borrow().ended.is_none());
            running.map(|(id, tracked)| (*id, tracked.volumes.clone())).collect()
        };
        journal.read(|state| {
            let used = running.into_iter().map(|(id, volumes)| {
                let known = state.migrations.get(&id);
                let need = known.map(|known| Need::of(&known.volumes)).unwrap_or_default();
                let of = match known.map(|known| &known.side) {
                    Some(Side::Incoming { peer, .. }) => Party::Peer(*peer),
                    Some(Side::Outgoing { .. } | Side::OneHost) | None => Party::Own,
                };
                UnderWay::Migration { of, volumes, need }
            });
            // One that never comes is not waited for.
            let filled = state.fillings.iter().filter(|(_, filling)| !filling.is_given_up);
            let filled = filled.map(|(volume, filling)| UnderWay::Filling {
                volume: *volume,
                peer: filling.peer,
                from: filling.peer_name.clone(),
                together: state.came_with(filling),
            });
            used.chain(filled).collect()
        })
    }

    /// What may be a turn of one that waits has happened.
    pub(crate) fn turn(&self) {
        if let Some((queue, _)) = self.waiting.get() {
            queue.turn();
        }
    }

    /// Those that wait or are under way, oldest first.
    pub(crate) fn list_unfinished(&self, journal: &Journal) -> Vec<Migration> {
        let live = self.lock();
        let running = live.iter().filter(|(_, tracked)| !tracked.news.borrow().is_over());
        let mut ids: BTreeSet<_> = running.map(|(id, _)| *id).collect();
        drop(live);
        ids.extend(self.waiting.get().into_iter().flat_map(|(queue, _)| queue.ids()));
        ids.into_iter().filter_map(|id| self.get(journal, id).ok()).collect()
    }

    /// All migrations, oldest first.
    pub(crate) fn list(&self, journal: &Journal) -> Vec<Migration> {
        // One at a time: commits wait while the journal is read.
        let mut ids: BTreeSet<_> = journal.read(|state| state.migrations.keys().copied().collect());
        ids.extend(self.waiting.get().into_iter().flat_map(|(queue, _)| queue.ids()));
        ids.into_iter().filter_map(|id| self.get(journal, id).ok()).collect()
    }

    /// One migration.
    ///
    /// # Errors
    /// [`RequestError::MigrationNotFound`].
    pub(crate) fn get(&self, journal: &Journal, migration: MigrationId) -> Result<Migration, RequestError> {
        let recorded = journal.read(|state| state.migrations.get(&migration).cloned());
        match recorded {
            Some(state) => {
                let mut shown = view::migration(migration, &state, self.live(migration).as_ref());
                shown.ticket = self.ticket(journal, migration);
                let account = self.moving.get().and_then(|moving| moving.account(migration));
                shown.machine = account.as_ref().map(view::machine);
                account.iter().for_each(|account| view::add_rest(&mut shown, account));
                let metadata = self
                    .waiting
                    .get()
                    .and_then(|(_, metadata_folder)| metadata_folder.of(migration, state.started_unix_ms));
                metadata.iter().for_each(|metadata| view::add_metadata(&mut shown, metadata));
                Ok(shown)
            }
            None => {
                let queue = self.waiting.get().map(|(queue, _)| queue);
                let waits = queue.and_then(|queue| queue.show(migration, || self.under_way(journal)));
                waits.ok_or_else(|| RequestError::MigrationNotFound(migration.to_string()))
            }
        }
    }

    /// One migration as soon as it has changed since `after`, has ended, or `wait` is over.
    ///
    /// # Errors
    /// [`RequestError::MigrationNotFound`].
    pub(crate) async fn watch(
        &self,
        journal: &Journal,
        migration: MigrationId,
        after: u64,
        wait: Duration,
    ) -> Result<Migration, RequestError> {
        if let Some(mut news) = self.subscribe(migration) {
            let changed = news.wait_for(|live| live.change > after || live.is_over());
            // Neither the end of the wait nor that of all reports is an error: the answer says how it stands.
            let _ = tokio::time::timeout(wait, changed).await;
        } else if let Some((queue, _)) = self.waiting.get().filter(|(queue, _)| queue.has(migration)) {
            let mut turns = queue.turns();
            let _ = tokio::time::timeout(wait, turns.wait_for(|turns| *turns > after)).await;
        }
        self.get(journal, migration)
    }

    /// The ticket of a migration that is released to another host which has not answered.
    fn ticket(&self, journal: &Journal, migration: MigrationId) -> Option<String> {
        let own = (*self.own.get()?)()?;
        let ticket = journal.read(|state| Ticket::print(state, own, migration));
        ticket.ok().map(|ticket| ticket.to_string())
    }

    /// Says how this host is known to others, once it is.
    pub(crate) fn name(&self, own: impl Fn() -> Option<HostId> + Send + Sync + 'static) {
        // It is said once.
        let _ = self.own.set(Box::new(own));
    }

    /// Says who knows of VMs that go along.
    pub(crate) fn ask_of_vms(&self, moving: &Arc<VmMoves>) {
        // It is said once.
        let _ = self.moving.set(Arc::clone(moving));
    }

    /// Says what waits for its turn, and what goes with migrations.
    pub(crate) fn add_waiting(&self, queue: &Arc<Queue>, metadata_folder: &Arc<MetadataFolder>) {
        // It is said once.
        let _ = self.waiting.set((Arc::clone(queue), Arc::clone(metadata_folder)));
    }

    /// Each migration that ends from now on, as soon as it has; whoever asks first is told.
    pub(crate) fn ends(&self) -> mpsc::UnboundedReceiver<MigrationId> {
        let (accountant, ends) = mpsc::unbounded_channel();
        // It is asked for once.
        let _ = self.accountant.set(accountant);
        ends
    }

    /// Resolves when everything that goes with a migration is settled.
    pub(crate) async fn over(&self, migration: MigrationId) {
        if let Some(mut news) = self.subscribe(migration) {
            // One that is not tracked any more is over as well.
            let _ = news.wait_for(Live::is_over).await;
        }
    }

    /// The latest report of how far a migration is.
    pub(crate) fn progress(&self, migration: MigrationId) -> Option<Progress> {
        self.live(migration)?.progress
    }

    /// How a migration ended, once it has; `None` if it is not tracked.
    pub(crate) async fn outcome(&self, migration: MigrationId) -> Option<Outcome> {
        let mut news = self.subscribe(migration)?;
        let live = news.wait_for(|live| live.ended.is_some()).await.ok()?;
        live.ended.as_ref().map(|(outcome, _)| outcome.clone())
    }

    fn subscribe(&self, migration: MigrationId) -> Option<watch::Receiver<Live>> {
        self.lock().get(&migration).map(|tracked| tracked.news.subscribe())
    }

    fn live(&self, migration: MigrationId) -> Option<Live> {
        self.lock().get(&migration).map(|tracked| tracked.news.borrow().clone())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<MigrationId, Tracked>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a migration's identity as people write it, `m7`.
///
/// # Errors
/// [`RequestError::MigrationNotFound`]: no migration is called so.
pub(crate) fn parse_id(text: &str) -> Result<MigrationId, RequestError> {
    let number = text.strip_prefix('m').and_then(|number| number.parse().ok());
    // Neither "m007" nor "m+7" is how a migration is called.
    let id = number.map(MigrationId).filter(|id| id.to_string() == text);
    id.ok_or_else(|| RequestError::MigrationNotFound(text.to_owned()))
}

#[cfg(test)]
mod tests;
