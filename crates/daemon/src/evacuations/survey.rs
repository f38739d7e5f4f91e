//! What is to leave, and what each target could take: a dry run of each workload to each target.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{
    ErrorCode, MigrateVolume, Migration, MigrationPlan, Named, Standby, StandbyRole, Vm, VmState, VolumeState,
};
use evacuation::{
    Kind, Origin, Path, PathIndex, Room, Route, Setup, StoreIndex, Terms, Way, Workload, WorkloadIndex,
};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};

use super::Evacuations;
use super::record::{self, Entry, Order, Record, State};
use super::targets::Targets;
use crate::error::RequestError;
use crate::vms::orders::move_vm::check_post_copy;

/// How many dry runs are made at a time: each starts a QEMU at its target, which limits them as well.
const DRY_RUNS: usize = 8;
/// How long before the deadline VMs are shut down that stay. A guest may take a minute to shut down, and the rest is for the
/// daemon and its disks.
const STOP_BEFORE: Duration = Duration::from_secs(90);

/// What a planner begins with, and the names of all of it.
pub(super) struct Survey {
    pub(super) setup: Setup,
    pub(super) entries: Vec<Entry>,
    pub(super) targets: Targets,
    /// Where each route of each workload leads, as `HOST:STORE`.
    pub(super) routes: Vec<Vec<String>>,
    /// The workloads that are moving already, with the route and the migration.
    pub(super) adopted: Vec<(WorkloadIndex, usize, String)>,
}

/// A workload with the dry runs to all targets.
struct Found {
    entry: Entry,
    is_running: bool,
    may_post_copy: bool,
    plans: Vec<(String, Result<MigrationPlan, String>)>,
    /// Its migration to another host that is under way.
    migration: Option<Migration>,
}

/// The targets that have not answered, and what that means. Nobody waits for one of them a second time.
#[derive(Default)]
struct Silent(Mutex<BTreeMap<String, String>>);

impl Silent {
    fn reason(&self, target: &str) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(target).cloned()
    }

    fn note(&self, target: &str, reason: &str) {
        let mut silent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        silent.insert(target.to_owned(), reason.to_owned());
    }
}

impl Evacuations {
    /// Finds the workloads that are here and have not ended in the record, and asks every target about each.
    pub(super) async fn survey(
        self: &Arc<Self>,
        record: &Record,
        now_unix_ms: u64,
    ) -> Result<Survey, RequestError> {
        let order = &record.order;
        let is_over = |entry: &Entry| {
            let is_same = |known: &&Entry| known.name == entry.name && known.kind == entry.kind;
            record.workloads.iter().find(is_same).is_some_and(|known| known.state.is_over())
        };
        // After a restart what has come since the order was given does not leave by it.
        let is_new = |entry: &Entry| {
            let is_same = |known: &Entry| known.name == entry.name && known.kind == entry.kind;
            !record.workloads.is_empty() && !record.workloads.iter().any(is_same)
        };
        let present = self.present().await.into_iter();
        let present = present.filter(|entry| !is_over(entry) && !is_new(entry)).collect::<Vec<_>>();
        let unfinished = self.migrations.list_unfinished(&self.journal);
        let standbys = self.standbys.sources();
        let silent = Silent::default();
        let mut found: Vec<Found> = futures_util::stream::iter(present)
            .map(|entry| self.examine(entry, order, &unfinished, &silent))
            .buffered(DRY_RUNS)
            .collect()
            .await;
        for known in &mut found {
            let bytes = known.plans.iter().filter_map(|(_, plan)| Some(plan.as_ref().ok()?.bytes_max)).max();
            known.entry.bytes = bytes.unwrap_or(0);
        }
        let has_standby = |entry: &Entry| standbys.iter().any(|standby| covers(standby, entry));
        found.sort_by_key(|known| {
            let entry = &known.entry;
            let (priority, bytes) = (std::cmp::Reverse(entry.priority), std::cmp::Reverse(entry.bytes));
            (priority, !has_standby(entry), bytes, entry.name.clone())
        });
        let terms = terms(order, now_unix_ms);
        Ok(Draft::new(self, terms).complete(found, &standbys))
    }

    /// Returns the VMs and volumes of this host, but for those of tests of standbys, which are clones.
    async fn present(&self) -> Vec<Entry> {
        let standbys = self.standbys.list().await;
        let tests =
            || standbys.iter().filter_map(|standby| standby.test.as_ref()).filter(|test| !has_ended(test));
        let tested: BTreeSet<&String> =
            tests().flat_map(|test| &test.volumes).map(|volume| &volume.name).collect();
        let tested_vms: BTreeSet<&String> = tests().flat_map(|test| &test.vms).map(|vm| &vm.name).collect();
        let mut vms = self.vm_orders.describe_vms().await;
        vms.retain(|vm| !tested_vms.contains(&vm.name));
        let disks: BTreeSet<&String> = vms.iter().flat_map(|vm| &vm.volumes).collect();
        let is_here = |volume: &api::Volume| volume.host.is_none() && volume.state != VolumeState::Removing;
        let volumes = self.views.describe_volumes().await.into_iter();
        let volumes: Vec<Entry> = volumes
            .filter(|volume| {
                is_here(volume) && !disks.contains(&volume.name) && !tested.contains(&volume.name)
            })
            .map(|volume| Entry {
                volumes: vec![volume.name.clone()],
                ..entry(volume.name, record::Kind::Volume, api::SetVm::PRIORITY_DEFAULT)
            })
            .collect();
        // One that is arriving stays, and is named.
        let machines = vms.iter().map(|vm| Entry {
            volumes: vm.volumes.clone(),
            is_running: runs(vm),
            ..entry(vm.name.clone(), record::Kind::Vm, vm.priority)
        });
        machines.chain(volumes).collect()
    }

    async fn examine(
        self: &Arc<Self>,
        entry: Entry,
        order: &Order,
        unfinished: &[Migration],
        silent: &Silent,
    ) -> Found {
        let migration = unfinished.iter().find(|migration| self.leaves_by(&entry, migration)).cloned();
        let targets = order.to.iter().filter(|_| migration.is_none());
        let asked: Vec<BoxFuture<'_, _>> =
            targets.map(|to| self.ask_target(&entry, order, to, silent).boxed()).collect();
        let plans = futures_util::future::join_all(asked).await;
        let is_running = entry.is_running;
        let may_post_copy =
            is_running && order.deadline_unix_ms.is_some() && self.may_post_copy(&entry).await;
        Found { entry, is_running, may_post_copy, plans, migration }
    }

    /// Asks a target about a workload, unless it has not answered about another one.
    async fn ask_target(
        self: &Arc<Self>,
        entry: &Entry,
        order: &Order,
        to: &str,
        silent: &Silent,
    ) -> (String, Result<MigrationPlan, String>) {
        if let Some(reason) = silent.reason(to) {
            return (to.to_owned(), Err(reason));
        }
        let request = request(entry, order, to);
        let plan = Arc::clone(&self.migration_orders).plan_migration(entry.name.clone(), request).await;
        let mut refusals = plan.iter().flat_map(|plan| &plan.refusals);
        if let Some(refusal) = refusals.find(|refusal| refusal.code == ErrorCode::HostUnreachable) {
            silent.note(to, &refusal.message);
        }
        (to.to_owned(), plan.map_err(|error| error.message()))
    }

    /// Returns whether a migration moves a workload to another host.
    pub(super) fn leaves_by(&self, entry: &Entry, migration: &Migration) -> bool {
        let host = migration.target.store.as_deref().and_then(|store| store.split(':').next());
        let moves_it = migration.name == entry.name
            || migration.volume.split(", ").any(|volume| entry.volumes.iter().any(|name| name == volume));
        moves_it && host.is_some_and(|host| self.hosts.find(host).is_some())
    }

    async fn may_post_copy(&self, entry: &Entry) -> bool {
        match self.vms.qemu(&entry.name) {
            Ok(qemu) => check_post_copy(&entry.name, &*qemu).await.is_ok(),
            Err(_) => false,
        }
    }
}

/// Returns the order that moves a workload.
pub(super) fn request(entry: &Entry, order: &Order, to: &str) -> MigrateVolume {
    MigrateVolume {
        named: match entry.kind {
            record::Kind::Vm => Named::Vm,
            record::Kind::Volume => Named::Volume,
        },
        // Against a deadline the copying does not give way to guests.
        impact_percent: order.deadline_unix_ms.map(|_| api::FULL_SPEED_PERCENT),
        // The host of a standby may have no power either. It learns of the move when it answers.
        standby_untold: true,
        ..MigrateVolume::to(to)
    }
}

fn entry(name: String, kind: record::Kind, priority: u8) -> Entry {
    Entry {
        name,
        kind,
        volumes: Vec::new(),
        priority,
        is_running: false,
        bytes: 0,
        state: State::Waiting,
        target: None,
        origin: None,
        is_post_copy: false,
        migration: None,
        is_held: false,
        reason: None,
    }
}

fn has_ended(test: &api::StandbyTest) -> bool {
    test.state == api::StandbyTestState::Ended
}

fn runs(vm: &Vm) -> bool {
    !matches!(vm.state, VmState::Stopped | VmState::Crashed | VmState::Suspended)
}

fn terms(order: &Order, now_unix_ms: u64) -> Terms {
    let left = |deadline: u64| Duration::from_millis(deadline.saturating_sub(now_unix_ms));
    let deadline = order.deadline_unix_ms.map(left);
    // A short deadline leaves time for both.
    // After the deadline nothing begins, and nothing is stopped: the daemon may have started long after it.
    let stop_before = deadline.filter(|left| order.stop_rest && !left.is_zero());
    let stop_before = stop_before.map(|left| STOP_BEFORE.min(left / 3));
    Terms { deadline, stop_before }
}

/// Returns whether a standby has all volumes of a workload.
fn covers(standby: &Standby, entry: &Entry) -> bool {
    standby.role == StandbyRole::Source
        && !entry.volumes.is_empty()
        && entry.volumes.iter().all(|volume| standby.volumes.contains(volume))
}

/// A setup that is being made.
struct Draft<'a> {
    evacuations: &'a Evacuations,
    setup: Setup,
    targets: Targets,
    stores: BTreeMap<String, (StoreIndex, PathIndex)>,
    into: BTreeMap<u32, PathIndex>,
}

impl<'a> Draft<'a> {
    fn new(evacuations: &'a Evacuations, terms: Terms) -> Self {
        // Everything leaves this host by one path. Its number of transfers is limited as that of all migrations.
        let out = Path { rate: None, transfers_max: evacuations.config.limits.queue.per_host };
        let setup = Setup { terms, paths: vec![out], ..Setup::default() };
        Self {
            evacuations,
            setup,
            targets: Targets::default(),
            stores: BTreeMap::new(),
            into: BTreeMap::new(),
        }
    }

    fn complete(mut self, found: Vec<Found>, standbys: &[Standby]) -> Survey {
        let (mut entries, mut routes, mut adopted) = (Vec::new(), Vec::new(), Vec::new());
        let mut sources = BTreeSet::new();
        for (number, known) in (0_u32..).zip(found) {
            let mut workload = Workload {
                kind: Kind::Volume,
                priority: known.entry.priority,
                writes_per_second: 0,
                may_post_copy: known.may_post_copy,
                routes: Vec::new(),
            };
            let (mut entry, mut names, mut memory_bytes) = (known.entry, Vec::new(), 0);
            for (to, plan) in known.plans {
                let plan = plan.and_then(possible);
                match plan {
                    Ok(plan) => {
                        memory_bytes =
                            plan.machine.as_ref().and_then(|vm| vm.memory_bytes).unwrap_or(memory_bytes);
                        workload.writes_per_second = workload.writes_per_second.max(writes_per_second(&plan));
                        sources.extend(plan.volumes.iter().filter_map(|volume| volume.source.store.clone()));
                        if let Some((route, name)) = self.route(&entry, &to, &plan, standbys) {
                            workload.routes.push(route);
                            names.push(name);
                        }
                    }
                    Err(reason) => drop(entry.reason.get_or_insert(reason)),
                }
            }
            if let Some(migration) = known.migration
                && let Some((route, name)) = self.route_of(&migration)
            {
                adopted.push((WorkloadIndex(number), workload.routes.len(), migration.id.clone()));
                entry.state = State::Moving;
                (entry.target, entry.migration) = (Some(name.clone()), Some(migration.id));
                workload.routes.push(route);
                names.push(name);
            }
            workload.kind = match (entry.kind, known.is_running) {
                (record::Kind::Vm, true) => Kind::RunningVm { memory_bytes },
                (record::Kind::Vm, false) => Kind::StoppedVm,
                (record::Kind::Volume, _) => Kind::Volume,
            };
            if !workload.routes.is_empty() {
                entry.reason = None;
            }
            self.setup.workloads.push(workload);
            entries.push(entry);
            routes.push(names);
        }
        let per_store = self.evacuations.config.limits.queue.per_store;
        if let Some(out) = self.setup.paths.first_mut() {
            let sources = u32::try_from(sources.len()).unwrap_or(u32::MAX).max(1);
            out.transfers_max = out.transfers_max.min(per_store.saturating_mul(sources));
        }
        self.setup.targets = self.targets.all();
        Survey { setup: self.setup, entries, targets: self.targets, routes, adopted }
    }

    /// Returns the route of a dry run, and where it leads.
    fn route(
        &mut self,
        entry: &Entry,
        to: &str,
        plan: &MigrationPlan,
        standbys: &[Standby],
    ) -> Option<(Route, String)> {
        let place = plan.volumes.first().and_then(|volume| volume.target.as_ref()?.store.clone());
        let name = place.unwrap_or_else(|| to.to_owned());
        let free = plan.volumes.iter().filter_map(|volume| volume.free_bytes).min();
        let (target, store, way) = self.place(&name, free)?;
        let held: u64 = plan.volumes.iter().map(|volume| volume.held_bytes).sum();
        let memory = plan.machine.as_ref().and_then(|vm| vm.memory_bytes).unwrap_or(0);
        let is_kept = !plan.volumes.is_empty() && plan.volumes.iter().all(|volume| volume.replica);
        let is_there = |standby: &&Standby| name == format!("{}:{}", standby.host, standby.store);
        let standby = standbys.iter().filter(|standby| covers(standby, entry)).find(is_there);
        let (origin, disks) = match standby {
            Some(standby) => (Origin::Standby, standby.bytes_waiting.unwrap_or(held).min(held)),
            // How much a kept image lacks is found out when the migration begins.
            None if is_kept => (Origin::KeptImage, held),
            None => (Origin::Nothing, held),
        };
        self.note_rate(plan);
        let room_bytes = if is_kept { 0 } else { held };
        let route = Route { target, store, way, bytes: disks.saturating_add(memory), room_bytes, origin };
        Some((route, name))
    }

    /// Returns the route of a migration that is under way.
    fn route_of(&mut self, migration: &Migration) -> Option<(Route, String)> {
        let name = migration.target.store.clone()?;
        let (target, store, way) = self.place(&name, None)?;
        let bytes = migration.bytes_missing.unwrap_or(0);
        Some((Route { target, store, way, bytes, room_bytes: 0, origin: Origin::Nothing }, name))
    }

    /// Returns the host, the store and the paths of a `HOST:STORE`.
    fn place(&mut self, name: &str, free: Option<u64>) -> Option<(evacuation::TargetIndex, StoreIndex, Way)> {
        let host = name.split_once(':').map_or(name, |(host, _)| host);
        let peer = self.evacuations.hosts.find(host)?;
        let target = self.targets.index_of(&peer);
        let limits = self.evacuations.config.limits.queue;
        let paths = &mut self.setup.paths;
        let mut path = |transfers_max| {
            paths.push(Path { rate: None, transfers_max });
            PathIndex(u32::try_from(paths.len() - 1).unwrap_or(u32::MAX))
        };
        let into = *self.into.entry(target.0).or_insert_with(|| path(limits.per_host));
        let stores = &mut self.setup.stores;
        let (store, store_path) = *self.stores.entry(name.to_owned()).or_insert_with(|| {
            stores.push(Room { free_bytes: None });
            (StoreIndex(u32::try_from(stores.len() - 1).unwrap_or(u32::MAX)), path(limits.per_store))
        });
        if let Some(room) = stores.get_mut(store.as_usize()) {
            room.free_bytes = match (room.free_bytes, free) {
                (Some(before), Some(free)) => Some(before.min(free)),
                (before, free) => before.or(free),
            };
        }
        Some((target, store, Way { out: PathIndex(0), into, store: store_path }))
    }

    /// Takes the rate of the way out from a dry run: as measured or stated, or as forecast of earlier migrations.
    fn note_rate(&mut self, plan: &MigrationPlan) {
        let forecast = plan.forecast.filter(|forecast| forecast.seconds.middle > 0.0);
        let learned = forecast.map(|forecast| forecast.bytes.middle / forecast.seconds.middle);
        let rate = plan.bytes_per_second.map(|rate| rate as f64).or(learned).filter(|rate| *rate > 0.0);
        if let (Some(out), Some(rate)) = (self.setup.paths.first_mut(), rate) {
            out.rate = Some(out.rate.map_or(rate, |before| before.max(rate)));
        }
    }
}

/// Returns a plan that can begin, or the reason why it cannot.
fn possible(plan: MigrationPlan) -> Result<MigrationPlan, String> {
    match plan.refusals.first() {
        None => Ok(plan),
        Some(refusal) => Err(refusal.message.clone()),
    }
}

/// Returns what guests are expected to write while it is copied, in bytes a second.
fn writes_per_second(plan: &MigrationPlan) -> u64 {
    let Some(forecast) = plan.forecast.filter(|forecast| forecast.seconds.middle > 0.0) else { return 0 };
    let written = (forecast.bytes.middle - plan.bytes_max as f64).max(0.0);
    (written / forecast.seconds.middle) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_stopped_after_the_deadline_and_little_before_a_short_one() {
        let at = |deadline: Option<u64>, stop_rest| {
            terms(&Order { to: Vec::new(), deadline_unix_ms: deadline, stop_rest }, 1_000_000)
        };
        let stops_before = |deadline| at(Some(deadline), true).stop_before;
        assert_eq!(stops_before(1_000_000 + 900_000), Some(STOP_BEFORE));
        assert_eq!(stops_before(1_000_000 + 30_000), Some(Duration::from_secs(10)));
        // A daemon that starts after the deadline.
        assert_eq!(stops_before(900_000), None);
        assert_eq!(at(Some(900_000), true).deadline, Some(Duration::ZERO));
        assert_eq!((at(Some(2_000_000), false).stop_before, at(None, false).deadline), (None, None));
    }
}
