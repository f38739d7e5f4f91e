//! Descriptions of migrations: the journal's history, and the lanes' reports of running ones.
//!
//! ```text
//!   lane thread ──Report──► Live (one for each migration since this daemon began) ──change──► watchers
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
use crate::migrations::budgets::Budgets;
use crate::migrations::metadata::{Metadata, MetadataFolder};
use crate::migrations::queue::Queue;
use crate::migrations::view;
use crate::vms::moving::VmMoves;

#[derive(Default)]
pub(crate) struct Migrations {
    /// The limits of the migrations that run.
    pub(crate) budgets: Budgets,
    live: Mutex<BTreeMap<MigrationId, Tracked>>,
    /// Why migrations of an earlier daemon cannot continue at the moment.
    obstacles: Mutex<BTreeMap<MigrationId, String>>,
    /// Returns the identity of this host, which is part of its tickets.
    own: OnceLock<Box<dyn Fn() -> Option<HostId> + Send + Sync>>,
    /// The state of VMs that move along.
    moving: OnceLock<Arc<VmMoves>>,
    /// The waiting migrations, and the metadata of all.
    waiting: OnceLock<(Arc<Queue>, Arc<MetadataFolder>)>,
    /// The receiver of ended migrations for audit records.
    accountant: OnceLock<mpsc::UnboundedSender<MigrationId>>,
}

/// A migration that a lane of this daemon runs, or has run.
#[derive(Debug)]
struct Tracked {
    volumes: Vec<VolumeId>,
    news: watch::Sender<Live>,
}

/// The state of a migration besides the journal.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    /// Grows with every report.
    pub(crate) change: u64,
    /// The latest report; `None` before the first.
    pub(crate) progress: Option<Progress>,
    /// How it ended; `None` while it runs. The same as in the journal, unless that could not be written.
    pub(crate) ended: Option<(Outcome, Summary)>,
    /// How many tasks still finish something of it: until then it is not shown as ended.
    pub(crate) settling: usize,
}

impl Live {
    /// Returns whether it is shown as ended.
    fn is_over(&self) -> bool {
        self.ended.is_some() && self.settling == 0
    }
}

/// Keeps a migration from being shown as ended until this is dropped, so that a waiting client finds everything completed.
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
        // A client that watched it while it waited has seen the queue's change numbers.
        let change = self.waiting.get().map_or(0, |(queue, _)| *queue.turns().borrow()) + 1;
        let live = Live { change, progress: None, ended: None, settling: 0 };
        self.lock().insert(migration, Tracked { volumes, news: watch::Sender::new(live) });
    }

    /// Tracks a resumed migration, unless it is tracked already.
    pub(crate) fn track_again(&self, migration: MigrationId, volumes: impl Iterator<Item = VolumeId>) {
        if self.subscribe(migration).is_none() {
            self.track(migration, volumes.collect());
        }
    }

    /// Shows a migration as ended whose end no lane has reported.
    pub(crate) fn conclude(&self, migration: MigrationId, outcome: &Outcome) {
        let is_reported = self.live(migration).is_none_or(|live| live.ended.is_some());
        if !is_reported {
            let outcome = outcome.clone();
            self.report(Report::Ended { migration, outcome, summary: Summary::default() });
        }
    }

    /// Delays the shown end of a migration until the result is dropped. Ignores a migration that is not tracked.
    pub(crate) fn settle(self: &Arc<Self>, migration: MigrationId) -> Settling {
        self.change(migration, |live| live.settling += 1);
        Settling { migrations: Arc::clone(self), migration }
    }

    /// Notes why a migration cannot continue at the moment; `None`: it continues.
    pub(crate) fn obstruct(&self, migration: MigrationId, obstacle: Option<String>) {
        let mut obstacles = self.obstacles.lock().unwrap_or_else(PoisonError::into_inner);
        match obstacle {
            Some(obstacle) => obstacles.insert(migration, obstacle),
            None => obstacles.remove(&migration),
        };
    }

    /// Returns the migrations that could not continue when it was tried last, and why.
    pub(crate) fn obstacles(&self) -> BTreeMap<MigrationId, String> {
        self.obstacles.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, migration: MigrationId, change: impl FnOnce(&mut Live)) {
        if let Some(tracked) = self.lock().get(&migration) {
            tracked.news.send_modify(|live| {
                live.change += 1;
                change(live);
            });
        }
    }

    /// Processes a report; called on lane threads.
    pub(crate) fn report(&self, report: Report) {
        let (Report::Progress { migration, .. } | Report::Ended { migration, .. }) = report else {
            // Recordings are for the histories.
            return;
        };
        let has_ended = matches!(report, Report::Ended { .. });
        let is_news = has_ended && self.live(migration).is_some_and(|live| live.ended.is_none());
        self.take(migration, report);
        if let (true, Some(accountant)) = (is_news, self.accountant.get()) {
            // Nothing receives this in a stopping daemon.
            let _ = accountant.send(migration);
        }
        if let (true, Some((queue, _))) = (has_ended, self.waiting.get()) {
            queue.turn();
        }
    }

    fn take(&self, migration: MigrationId, report: Report) {
        let live = self.lock();
        let Some(tracked) = live.get(&migration) else {
            tracing::error!(%migration, "a lane reports about an unknown migration; this is a defect");
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

    /// Records the way of a volume's blocks to another host; called on lane threads.
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

    pub(crate) fn running_of(&self, volume: VolumeId) -> Option<MigrationId> {
        let live = self.lock();
        let mut running = live.iter().filter(|(_, tracked)| tracked.news.borrow().ended.is_none());
        running.find(|(_, tracked)| tracked.volumes.contains(&volume)).map(|(id, _)| *id)
    }

    pub(crate) fn running(&self) -> usize {
        self.lock().values().filter(|tracked| tracked.news.borrow().ended.is_none()).count()
    }

    /// Returns what the running migrations use, and the volumes that lack blocks.
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
            // Blocks that were given up are not waited for.
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

    /// Notifies the queue of a possible turn.
    pub(crate) fn turn(&self) {
        if let Some((queue, _)) = self.waiting.get() {
            queue.turn();
        }
    }

    /// Returns the waiting and the running migrations, oldest first.
    pub(crate) fn list_unfinished(&self, journal: &Journal) -> Vec<Migration> {
        let live = self.lock();
        let running = live.iter().filter(|(_, tracked)| !tracked.news.borrow().is_over());
        let mut ids: BTreeSet<_> = running.map(|(id, _)| *id).collect();
        drop(live);
        ids.extend(self.waiting.get().into_iter().flat_map(|(queue, _)| queue.ids()));
        ids.into_iter().filter_map(|id| self.get(journal, id).ok()).collect()
    }

    pub(crate) fn list(&self, journal: &Journal) -> Vec<Migration> {
        // One at a time: commits wait while the journal is read.
        let mut ids: BTreeSet<_> = journal.read(|state| state.migrations.keys().copied().collect());
        ids.extend(self.waiting.get().into_iter().flat_map(|(queue, _)| queue.ids()));
        ids.into_iter().filter_map(|id| self.get(journal, id).ok()).collect()
    }

    pub(crate) fn get(&self, journal: &Journal, migration: MigrationId) -> Result<Migration, RequestError> {
        let recorded = journal.read(|state| state.migrations.get(&migration).cloned());
        match recorded {
            Some(state) => {
                let mut shown = view::migration(migration, &state, self.live(migration).as_ref());
                view::add_obstacle(&mut shown, self.obstacles().remove(&migration));
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

    /// Returns a migration as soon as it has changed since `after`, has ended, or
    /// `wait` is over. Errors: [`RequestError::MigrationNotFound`].
    pub(crate) async fn watch(
        &self,
        journal: &Journal,
        migration: MigrationId,
        after: u64,
        wait: Duration,
    ) -> Result<Migration, RequestError> {
        if let Some(mut news) = self.subscribe(migration) {
            let changed = news.wait_for(|live| live.change > after || live.is_over());
            // Neither a timeout nor the end of all reports is an error: the answer describes the present state.
            let _ = tokio::time::timeout(wait, changed).await;
        } else if let Some((queue, _)) = self.waiting.get().filter(|(queue, _)| queue.has(migration)) {
            let mut turns = queue.turns();
            let _ = tokio::time::timeout(wait, turns.wait_for(|turns| *turns > after)).await;
        }
        self.get(journal, migration)
    }

    /// Returns the ticket of a released migration whose target has not answered.
    fn ticket(&self, journal: &Journal, migration: MigrationId) -> Option<String> {
        let own = (*self.own.get()?)()?;
        let ticket = journal.read(|state| Ticket::print(state, own, migration));
        ticket.ok().map(|ticket| ticket.to_string())
    }

    pub(crate) fn name(&self, own: impl Fn() -> Option<HostId> + Send + Sync + 'static) {
        // An error means that it is set already: the daemon sets it once, at its start.
        let _ = self.own.set(Box::new(own));
    }

    /// Sets the source of VMs' states.
    pub(crate) fn ask_of_vms(&self, moving: &Arc<VmMoves>) {
        let _ = self.moving.set(Arc::clone(moving));
    }

    pub(crate) fn add_waiting(&self, queue: &Arc<Queue>, metadata_folder: &Arc<MetadataFolder>) {
        let _ = self.waiting.set((Arc::clone(queue), Arc::clone(metadata_folder)));
    }

    /// Returns a receiver of each migration that ends; only the first caller's receiver works.
    pub(crate) fn ends(&self) -> mpsc::UnboundedReceiver<MigrationId> {
        let (accountant, ends) = mpsc::unbounded_channel();
        // An error means that there is a receiver already.
        let _ = self.accountant.set(accountant);
        ends
    }

    /// Resolves when a migration is shown as ended.
    pub(crate) async fn over(&self, migration: MigrationId) {
        if let Some(mut news) = self.subscribe(migration) {
            // A migration that is not tracked is over as well.
            let _ = news.wait_for(Live::is_over).await;
        }
    }

    pub(crate) fn progress(&self, migration: MigrationId) -> Option<Progress> {
        self.live(migration)?.progress
    }

    /// Waits for the outcome of a migration; `None` if it is not tracked.
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

/// Parses a migration's identity in the form `m7`.
pub(crate) fn parse_id(text: &str) -> Result<MigrationId, RequestError> {
    let number = text.strip_prefix('m').and_then(|number| number.parse().ok());
    // Neither "m007" nor "m+7" is an identity.
    let id = number.map(MigrationId).filter(|id| id.to_string() == text);
    id.ok_or_else(|| RequestError::MigrationNotFound(text.to_owned()))
}

#[cfg(test)]
mod tests;
