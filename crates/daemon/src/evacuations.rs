//! Evacuations: everything that this host has leaves it, in order, against a deadline.
//!
//! ```text
//!   order ─► record, durably ─► survey: dry runs to each target ─► the planner of the crate `evacuation` ─► run
//!              ▲    │                                                  actions: the orders that users give:
//!              └────┴── each step, durably: a restart goes on with what is left    migrate, pause, cancel, stop
//! ```
//! One evacuation runs at a time. While it does, nothing new comes ([`Draining`]).

mod record;
mod run;
mod survey;
mod targets;
mod view;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use self::record::{Order, Record};
use self::view::Live;
use crate::config::Config;
use crate::error::{EvacuationError, RequestError};
use crate::host::{Draining, MigrationOrders, Parts, Standbys, Stopping, VmOrders, VolumeViews, blocking};
use crate::hosts::Hosts;
use crate::journal::{Journal, now_unix_ms};
use crate::migrations::registry::Migrations;
use crate::vms::Vms;

/// The largest number of targets of one evacuation: each workload is compared with each of them.
const TARGETS_MAX: usize = 64;

/// Empties the host by order.
pub(crate) struct Evacuations {
    path: PathBuf,
    config: Arc<Config>,
    journal: Journal,
    migrations: Arc<Migrations>,
    hosts: Arc<Hosts>,
    vms: Arc<Vms>,
    draining: Arc<Draining>,
    stopping: Stopping,
    views: Arc<VolumeViews>,
    vm_orders: Arc<VmOrders>,
    migration_orders: Arc<MigrationOrders>,
    standbys: Arc<Standbys>,
    /// The evacuation that runs, or the last one.
    latest: Mutex<Latest>,
    /// Notified when the evacuation that runs is to end.
    aborted: Notify,
    /// Held while an evacuation is ordered.
    ordering: tokio::sync::Mutex<()>,
    /// Held while the record is changed: an order to abort and the run both change it.
    changing: tokio::sync::Mutex<()>,
}

/// The evacuation that runs, or the last one.
#[derive(Default)]
struct Latest {
    record: Option<Record>,
    /// Why the file cannot be read.
    problem: Option<String>,
    /// What is known of its workloads besides the record, by their places there.
    live: BTreeMap<usize, Live>,
    /// Whether the other hosts are being asked.
    is_asking: bool,
}

impl Evacuations {
    pub(crate) fn new(
        parts: &Parts,
        views: &Arc<VolumeViews>,
        vm_orders: &Arc<VmOrders>,
        migration_orders: &Arc<MigrationOrders>,
        standbys: &Arc<Standbys>,
    ) -> Arc<Self> {
        let Parts { config, journal, migrations, hosts, vms, draining, stopping, .. } = parts.clone();
        let path = config.data_dir.join(record::FILE);
        let mut latest = Latest::default();
        match Record::read(&path) {
            Ok(record) => latest.record = record,
            Err(error) => {
                draining.note_unknown(error.to_string());
                latest.problem = Some(error.to_string());
            }
        }
        Arc::new(Self {
            path,
            config,
            journal,
            migrations,
            hosts,
            vms,
            draining,
            stopping,
            views: Arc::clone(views),
            vm_orders: Arc::clone(vm_orders),
            migration_orders: Arc::clone(migration_orders),
            standbys: Arc::clone(standbys),
            latest: Mutex::new(latest),
            aborted: Notify::new(),
            ordering: tokio::sync::Mutex::new(()),
            changing: tokio::sync::Mutex::new(()),
        })
    }

    /// Goes on with an evacuation that had not ended when the last daemon did.
    pub(crate) async fn resume(self: &Arc<Self>) {
        let record = self.lock().record.clone();
        if let Some(problem) = &self.lock().problem {
            tracing::error!(%problem, "the record of the evacuation cannot be read: it does not go on");
        }
        let Some(record) = record.filter(|record| record.ended_unix_ms.is_none()) else { return };
        tracing::info!(to = ?record.order.to, "the evacuation goes on");
        self.draining.set_evacuating(true);
        self.spawn(record);
    }

    /// Begins an evacuation. Errors: [`EvacuationError`]; nothing is begun then.
    pub(crate) async fn begin(
        self: Arc<Self>,
        order: api::NewEvacuation,
    ) -> Result<api::Evacuation, RequestError> {
        let _ordering = self.ordering.lock().await;
        if self.runs() {
            return Err(EvacuationError::Runs.into());
        }
        let order = self.check(order)?;
        let record = Record::new(order, now_unix_ms());
        self.lock().live.clear();
        // N.B. Durable before anything new is refused and anything moves.
        let changing = self.changing.lock().await;
        self.keep(record.clone()).await?;
        drop(changing);
        self.draining.set_evacuating(true);
        tracing::info!(to = ?record.order.to, deadline_unix_ms = record.order.deadline_unix_ms, "everything leaves this host");
        self.lock().is_asking = true;
        self.spawn(record);
        self.show()
    }

    /// Returns what an evacuation would do.
    pub(crate) async fn plan(
        self: Arc<Self>,
        order: api::NewEvacuation,
    ) -> Result<api::Evacuation, RequestError> {
        let order = self.check(order)?;
        let record = Record::new(order, now_unix_ms());
        let survey = self.survey(&record, record.started_unix_ms).await?;
        Ok(view::planned(record, survey))
    }

    /// Aborts the evacuation that runs. Errors: [`EvacuationError::None`], [`EvacuationError::Over`].
    pub(crate) async fn abort(self: Arc<Self>) -> Result<api::Evacuation, RequestError> {
        let record = self.lock().record.clone().ok_or(EvacuationError::None)?;
        if record.ended_unix_ms.is_some() {
            return Err(EvacuationError::Over.into());
        }
        // N.B. Durable first: a restart does not go on with an evacuation whose end was answered.
        self.change(|record| record.is_aborted = true).await?;
        tracing::info!("the evacuation is aborted");
        self.aborted.notify_one();
        self.show()
    }

    /// Describes the evacuation that runs, or the last one. Errors: [`EvacuationError::None`].
    pub(crate) fn show(&self) -> Result<api::Evacuation, RequestError> {
        let latest = self.lock();
        match (&latest.record, &latest.problem) {
            (Some(record), _) => Ok(view::shown(record, &latest.live, latest.is_asking)),
            (None, Some(problem)) => Err(EvacuationError::Unreadable(problem.clone()).into()),
            (None, None) => Err(EvacuationError::None.into()),
        }
    }

    /// Marks this host as one that takes nothing new, or removes the mark, durably.
    pub(crate) async fn set_drained(self: Arc<Self>, drained: bool) -> Result<(), RequestError> {
        blocking(move || self.draining.set_drained(drained)).await
    }

    fn runs(&self) -> bool {
        self.lock().record.as_ref().is_some_and(|record| record.ended_unix_ms.is_none())
    }

    /// Checks an order, and names its targets if it names none.
    fn check(&self, order: api::NewEvacuation) -> Result<Order, RequestError> {
        let api::NewEvacuation { mut to, deadline_unix_ms, stop_rest } = order;
        if deadline_unix_ms.is_some_and(|deadline| deadline <= now_unix_ms()) {
            return Err(EvacuationError::DeadlinePassed.into());
        }
        if stop_rest && deadline_unix_ms.is_none() {
            return Err(EvacuationError::NoDeadline.into());
        }
        if to.len() > TARGETS_MAX {
            return Err(EvacuationError::TooManyTargets(TARGETS_MAX).into());
        }
        if to.is_empty() {
            let connected = self.hosts.describe_all()?.into_iter().filter(|peer| peer.connected);
            to = connected.map(|peer| peer.name).take(TARGETS_MAX).collect();
        }
        if to.is_empty() {
            return Err(EvacuationError::NoTarget.into());
        }
        for name in &to {
            let host = name.split_once(':').map_or(name.as_str(), |(host, _)| host);
            if self.hosts.find(host).is_none() {
                return Err(EvacuationError::NotAHost(format!("\"{}\"", words::clean(name))).into());
            }
        }
        Ok(Order { to, deadline_unix_ms, stop_rest })
    }

    /// Writes the record, and shows it. The caller holds `changing`.
    async fn keep(&self, record: Record) -> Result<(), RequestError> {
        let (path, written) = (self.path.clone(), record.clone());
        blocking(move || written.write(&path).map_err(|error| RequestError::storage("write", &path, &error)))
            .await?;
        let mut latest = self.lock();
        (latest.record, latest.problem) = (Some(record), None);
        Ok(())
    }

    /// Changes the record durably, if that changes it.
    async fn change(&self, change: impl FnOnce(&mut Record)) -> Result<(), RequestError> {
        let _changing = self.changing.lock().await;
        let Some(before) = self.lock().record.clone() else { return Ok(()) };
        let mut record = before.clone();
        change(&mut record);
        if record == before {
            return Ok(());
        }
        self.keep(record).await
    }

    /// Returns whether the evacuation that runs is to end.
    fn is_aborted(&self) -> bool {
        self.lock().record.as_ref().is_some_and(|record| record.is_aborted)
    }

    fn lock(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
