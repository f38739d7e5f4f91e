//! Carries out what [`HookBook`] decides: processes, records, answers. Nothing here outlasts the daemon; durable state is
//! recorded, and [`Hooks::open`] reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use migration::MigrationId;
use migration::hooks::{
    HookAction, HookBook, HookEnd, HookEvent, HookProcess, HookRecord, KillReason, Moment,
};
use tokio::sync::{Notify, mpsc, oneshot};

use super::process::{self, Found, Gated};
use super::{HookContext, record};
use crate::config::HooksConfig;

/// How often a stopping daemon checks whether running hooks have ended.
const STOP_POLL: Duration = Duration::from_millis(20);

/// Receives failures of hooks on which nothing depends.
type Warn = Box<dyn Fn(MigrationId, String) + Send + Sync>;

pub(crate) struct Hooks {
    config: HooksConfig,
    folder: PathBuf,
    began: Instant,
    inner: Mutex<Inner>,
    writes: mpsc::UnboundedSender<Write>,
    /// Notified when the next deadline may have changed.
    rearm: Notify,
    warn: OnceLock<Warn>,
    is_stopping: AtomicBool,
}

struct Inner {
    book: HookBook,
    contexts: BTreeMap<MigrationId, HookContext>,
    waiting: BTreeMap<(MigrationId, Moment), Vec<oneshot::Sender<HookEnd>>>,
    /// Processes behind their gates.
    gated: BTreeMap<(MigrationId, Moment), Gated>,
    /// Known processes, and why each was killed, if it was.
    processes: BTreeMap<(MigrationId, Moment), (HookProcess, Option<KillReason>)>,
}

/// A task of the writer; tasks are written in order.
enum Write {
    Record { migration: MigrationId, number: u64, context: Box<HookContext>, record: HookRecord },
    Forget(MigrationId),
}

impl Hooks {
    /// Reads the records of an earlier daemon, and waits for its processes.
    pub(crate) fn open(config: HooksConfig, folder: PathBuf) -> Arc<Self> {
        let (writes, to_write) = mpsc::unbounded_channel();
        let (mut book, mut contexts) = (HookBook::new(config.timeout), BTreeMap::new());
        for (migration, context, record) in record::read_all(&folder) {
            tracing::info!(%migration, vm = %context.vm, "found hooks of this migration from an earlier daemon");
            book.load(Duration::ZERO, migration, record);
            contexts.insert(migration, context);
        }
        let (waiting, gated, processes) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let inner = Mutex::new(Inner { book, contexts, waiting, gated, processes });
        let (rearm, warn, is_stopping) = (Notify::new(), OnceLock::new(), AtomicBool::new(false));
        let began = Instant::now();
        let hooks = Arc::new(Self { config, folder, began, inner, writes, rearm, warn, is_stopping });
        tokio::spawn(write(Arc::clone(&hooks), to_write));
        tokio::spawn(keep_time(Arc::clone(&hooks)));
        hooks.carry_out();
        hooks
    }

    /// Sets the receiver of failures of hooks on which nothing depends.
    pub(crate) fn warn_of(&self, warn: impl Fn(MigrationId, String) + Send + Sync + 'static) {
        // It is set once.
        let _ = self.warn.set(Box::new(warn));
    }

    pub(super) fn warn(&self, migration: MigrationId, warning: String) {
        if let Some(warn) = self.warn.get() {
            warn(migration, warning);
        }
    }

    /// Returns the migrations whose hooks have not ended.
    pub(crate) fn migrations(&self) -> Vec<MigrationId> {
        self.lock().book.migrations().collect()
    }

    /// Registers the context of a migration's hooks, unless it is known already.
    pub(super) fn expect(&self, context: HookContext) {
        let mut inner = self.lock();
        let migration = context.migration;
        inner.book.expect(migration, context.subject());
        inner.contexts.entry(migration).or_insert(context);
    }

    /// Runs a hook, unless it has run already, and waits for its end; `None`: the daemon stops.
    pub(super) async fn run(self: &Arc<Self>, migration: MigrationId, moment: Moment) -> Option<HookEnd> {
        let (told, ended) = oneshot::channel();
        {
            let mut inner = self.lock();
            if !inner.contexts.contains_key(&migration) {
                // Its hooks have all ended, or none was ever registered.
                return Some(HookEnd::Good);
            }
            inner.waiting.entry((migration, moment)).or_default().push(told);
        }
        self.tell(migration, HookEvent::Wanted(moment));
        ended.await.ok()
    }

    /// Records the outcome of a migration, for the hook after it.
    pub(super) fn note_outcome(&self, migration: MigrationId, outcome: &'static str) {
        if let Some(context) = self.lock().contexts.get_mut(&migration) {
            context.outcome.get_or_insert_with(|| outcome.to_owned());
        }
    }

    /// Abandons the hook before a migration. A stopping daemon leaves it to the next one.
    pub(super) fn give_up(self: &Arc<Self>, migration: MigrationId) {
        if !self.is_stopping.load(Ordering::SeqCst) {
            self.tell(migration, HookEvent::Unwanted);
        }
    }

    /// Stops beginning and killing hooks, and waits up to `wait_max` for running ones. The next daemon continues with the rest.
    pub(crate) async fn stop(&self, wait_max: Duration) {
        self.is_stopping.store(true, Ordering::SeqCst);
        let until = Instant::now() + wait_max;
        let running = || self.lock().processes.keys().copied().collect::<Vec<_>>();
        while !running().is_empty() && Instant::now() < until {
            tokio::time::sleep(STOP_POLL).await;
        }
        for (migration, moment) in running() {
            tracing::warn!(%migration, hook = moment_name(moment), "a hook still runs; it continues, and the next daemon waits \
                for it");
        }
    }

    fn tell(self: &Arc<Self>, migration: MigrationId, event: HookEvent) {
        let now = self.began.elapsed();
        self.lock().book.handle_event(now, migration, event);
        self.carry_out();
    }

    fn carry_out(self: &Arc<Self>) {
        loop {
            let action = self.lock().book.poll_action();
            let Some(action) = action else { break };
            self.act(action);
        }
        self.rearm.notify_one();
    }

    fn act(self: &Arc<Self>, action: HookAction) {
        let is_stopping = self.is_stopping.load(Ordering::SeqCst);
        match action {
            HookAction::Prepare(..) | HookAction::Kill(..) if is_stopping => {}
            HookAction::Prepare(migration, moment) => {
                let hooks = Arc::clone(self);
                tokio::spawn(async move { hooks.prepare(migration, moment) });
            }
            HookAction::Record(migration, number, record) => {
                let context = self.lock().contexts.get(&migration).cloned();
                let Some(context) = context.map(Box::new) else { return };
                // The writer lives as long as this.
                let _ = self.writes.send(Write::Record { migration, number, context, record });
            }
            HookAction::Release(migration, moment) => {
                let Some(gated) = self.lock().gated.remove(&(migration, moment)) else { return };
                let hooks = Arc::clone(self);
                tokio::spawn(async move {
                    let running = gated.open().await;
                    hooks.tell(migration, HookEvent::Begun(moment));
                    let end = running.ended().await;
                    hooks.has_ended(migration, moment, end);
                });
            }
            HookAction::Find(migration, moment, process) => {
                self.lock().processes.insert((migration, moment), (process, None));
                let (hooks, base) = (Arc::clone(self), self.base(migration, moment));
                tokio::spawn(async move {
                    match process::find(process, &base).await {
                        Found::Ended(end) => hooks.has_ended(migration, moment, end),
                        Found::NeverBegan => hooks.never_began(migration, moment),
                    }
                });
            }
            HookAction::Kill(migration, moment, reason) => self.kill(migration, moment, reason),
            HookAction::Tell(migration, moment, end) => {
                let waiting = self.lock().waiting.remove(&(migration, moment));
                for told in waiting.into_iter().flatten() {
                    // The requester may have given up.
                    let _ = told.send(end.clone());
                }
                if let (Moment::After, HookEnd::Bad(warning)) = (moment, end) {
                    tracing::warn!(%migration, %warning, "a hook failed");
                    self.warn(migration, warning);
                }
            }
            HookAction::Forget(migration) => {
                self.lock().contexts.remove(&migration);
                let _ = self.writes.send(Write::Forget(migration));
            }
        }
    }

    fn prepare(self: &Arc<Self>, migration: MigrationId, moment: Moment) {
        let context = self.lock().contexts.get(&migration).cloned();
        let program = match moment {
            Moment::Before => &self.config.before,
            Moment::After => &self.config.after,
        };
        let (Some(context), Some(program)) = (context, program) else {
            return self.tell(migration, HookEvent::NotPrepared(moment, HookEnd::Good));
        };
        let name = moment_name(moment);
        tracing::info!(%migration, vm = %context.vm, hook = %program.display(), moment = name, side = context.side.name(), "a hook is run");
        match Gated::start(program, &context.variables(name), &self.base(migration, moment)) {
            Ok(gated) => {
                let process = gated.process;
                let mut inner = self.lock();
                inner.gated.insert((migration, moment), gated);
                inner.processes.insert((migration, moment), (process, None));
                drop(inner);
                self.tell(migration, HookEvent::Prepared(moment, process));
            }
            Err(error) => {
                let fault = format!(
                    "the hook {} ({}) cannot be started: {error}",
                    program.display(),
                    context.side.name()
                );
                self.tell(migration, HookEvent::NotPrepared(moment, HookEnd::Bad(fault)));
            }
        }
    }

    fn kill(self: &Arc<Self>, migration: MigrationId, moment: Moment, reason: KillReason) {
        let mut inner = self.lock();
        if let Some((process, killed)) = inner.processes.get_mut(&(migration, moment)) {
            *killed = Some(reason);
            process::kill(*process);
        }
        let gated = inner.gated.remove(&(migration, moment));
        drop(inner);
        if let Some(gated) = gated {
            let hooks = Arc::clone(self);
            tokio::spawn(async move {
                gated.close().await;
                hooks.never_began(migration, moment);
            });
        }
    }

    /// Handles the end of a process that never passed its gate.
    fn never_began(self: &Arc<Self>, migration: MigrationId, moment: Moment) {
        self.lock().processes.remove(&(migration, moment));
        self.tell(migration, HookEvent::NeverBegan(moment));
    }

    fn has_ended(self: &Arc<Self>, migration: MigrationId, moment: Moment, end: HookEnd) {
        let mut inner = self.lock();
        let killed = inner.processes.remove(&(migration, moment)).and_then(|(_, killed)| killed);
        let side = inner.contexts.get(&migration).map_or("both", |context| context.side.name());
        drop(inner);
        let program = match moment {
            Moment::Before => &self.config.before,
            Moment::After => &self.config.after,
        };
        let program = program.as_ref().map_or_else(String::new, |program| program.display().to_string());
        let end = match (end, killed) {
            (HookEnd::Bad(how), Some(KillReason::Overdue)) => {
                let words = how.split_once(", and said last: ").map_or("", |(_, words)| words);
                HookEnd::Bad(format!(
                    "the hook {program} ({side}) was killed: it took longer than {} s (hooks.timeout_s){}",
                    self.config.timeout.as_secs(),
                    process::after_its_words(words)
                ))
            }
            (HookEnd::Bad(how), _) => HookEnd::Bad(format!("the hook {program} ({side}) {how}")),
            (HookEnd::Good, _) => HookEnd::Good,
        };
        self.tell(migration, HookEvent::Ended(moment, end));
    }

    /// Returns the common part of the names of a hook's files.
    fn base(&self, migration: MigrationId, moment: Moment) -> PathBuf {
        self.folder.join(format!("{migration}.{}", moment_name(moment)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HookContext {
    /// Returns the objects of a migration's hooks. Hooks with a common object run one at a time.
    fn subject(&self) -> BTreeSet<String> {
        match self.vm.is_empty() {
            true => self.volumes.iter().map(|volume| format!("volume {volume}")).collect(),
            false => [format!("vm {}", self.vm)].into(),
        }
    }
}

fn moment_name(moment: Moment) -> &'static str {
    match moment {
        Moment::Before => "before",
        Moment::After => "after",
    }
}

/// Writes records in their order, until the daemon ends.
async fn write(hooks: Arc<Hooks>, mut writes: mpsc::UnboundedReceiver<Write>) {
    while let Some(next) = writes.recv().await {
        let folder = hooks.folder.clone();
        match next {
            Write::Record { migration, number, context, record } => {
                let written = tokio::task::spawn_blocking(move || {
                    std::os::unix::fs::DirBuilderExt::mode(std::fs::DirBuilder::new().recursive(true), 0o700)
                        .create(&folder)?;
                    record::write(&folder, migration, *context, record)
                });
                let written = written.await.unwrap_or_else(|error| Err(std::io::Error::other(error)));
                if let Err(error) = &written {
                    tracing::warn!(%migration, %error, "cannot record the start of a hook; it waits");
                }
                hooks.tell(migration, HookEvent::Recorded { record: number, is_durable: written.is_ok() });
            }
            Write::Forget(migration) => {
                let bases = [Moment::Before, Moment::After].map(|moment| hooks.base(migration, moment));
                let forgotten = tokio::task::spawn_blocking(move || {
                    bases.iter().for_each(|base| process::forget(base));
                    record::forget(&folder, migration)
                });
                if let Ok(Err(error)) = forgotten.await {
                    tracing::warn!(%migration, %error, "cannot delete the record of ended hooks");
                }
            }
        }
    }
}

/// Calls the book at its deadlines, until the daemon ends.
async fn keep_time(hooks: Arc<Hooks>) {
    loop {
        let due = hooks.lock().book.poll_timeout().map(|(at, _)| hooks.began + at);
        let rearm = hooks.rearm.notified();
        match due {
            Some(at) => tokio::select! {
                () = rearm => continue,
                () = tokio::time::sleep_until(at.into()) => {}
            },
            None => {
                rearm.await;
                continue;
            }
        }
        let now = hooks.began.elapsed();
        hooks.lock().book.handle_timeout(now);
        hooks.carry_out();
    }
}
