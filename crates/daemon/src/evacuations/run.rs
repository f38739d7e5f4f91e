//! Carries out what the planner decides, by the orders that users give, until everything has ended.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use api::{Memory, MigrationState, StopVm};
use evacuation::{Action, End, Event, Fault, Planner, Strategy, Why, WorkloadIndex};
use lane::Rest;
use migration::wire::RefusalCode;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::Instant;

use super::Evacuations;
use super::record::{Entry, Kind, Order, Record, State};
use super::survey::{Survey, request};
use super::targets::Targets;
use super::view::Live;
use crate::error::RequestError;
use crate::journal::now_unix_ms;
use crate::migrations::registry::parse_id;

/// How often migrations are looked at.
const TICK: Duration = Duration::from_millis(250);
/// The time before an end that could not be recorded is recorded again.
const KEEP_AGAIN: Duration = Duration::from_secs(5);
/// How long a survey that fails is put off.
const SURVEY_AGAIN: Duration = Duration::from_secs(5);

/// What a task of the run reports.
enum Report {
    /// The number of the migration, as `m7`.
    Ordered(WorkloadIndex, Result<String, RequestError>),
    CancelRefused(WorkloadIndex),
    Stopped(WorkloadIndex, Result<(), RequestError>),
}

/// An evacuation that runs.
struct Run {
    evacuations: Arc<Evacuations>,
    planner: Planner,
    record: Record,
    targets: Targets,
    routes: Vec<Vec<String>>,
    /// The place of each workload of the planner in the record.
    places: Vec<usize>,
    /// The numbers of migrations that are under way.
    migrations: BTreeMap<WorkloadIndex, String>,
    /// Transfers that are to be cancelled as soon as they have a number.
    cancelled: Vec<WorkloadIndex>,
    began: Instant,
    reports: UnboundedSender<Report>,
}

impl Evacuations {
    /// Runs an evacuation in the background.
    pub(super) fn spawn(self: &Arc<Self>, record: Record) {
        let this = Arc::clone(self);
        tokio::spawn(async move {
            if let Some(run) = this.begin_run(record).await {
                run.to_the_end().await;
            }
        });
    }

    /// Asks the other hosts, and makes the planner; `None`: the daemon stops.
    async fn begin_run(self: &Arc<Self>, record: Record) -> Option<(Run, UnboundedReceiver<Report>)> {
        let (asked_at, survey) = loop {
            // N.B. The time to the deadline counts from here on, however long the hosts take to answer.
            let asked_at = Instant::now();
            match self.survey_unless_aborted(&record).await {
                Ok(survey) => break (asked_at, survey),
                Err(error) => {
                    tracing::warn!(reason = %error.message(), "the other hosts cannot be asked yet");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(SURVEY_AGAIN) => {}
                () = self.stopping.begins() => return None,
            }
        };
        let mut run = Run::new(self, record, survey, asked_at);
        run.0.settle_earlier();
        self.lock().is_asking = false;
        Some(run)
    }

    /// Asks the other hosts; none of them if the evacuation is to end, because nothing begins then.
    async fn survey_unless_aborted(self: &Arc<Self>, record: &Record) -> Result<Survey, RequestError> {
        let aborted = async {
            while !self.is_aborted() {
                self.aborted.notified().await;
            }
        };
        tokio::select! {
            biased;
            () = aborted => {
                let order = Order { to: Vec::new(), ..record.order.clone() };
                self.survey(&Record { order, ..record.clone() }, now_unix_ms()).await
            }
            survey = self.survey(record, now_unix_ms()) => survey,
        }
    }
}

trait ToTheEnd {
    async fn to_the_end(self);
}

impl ToTheEnd for (Run, UnboundedReceiver<Report>) {
    async fn to_the_end(self) {
        let (mut run, mut reports) = self;
        // An order to end may have come while the other hosts were asked, or before a restart.
        if run.evacuations.is_aborted() {
            run.tell(Event::Abort);
        }
        run.planner.handle_timeout(run.now());
        loop {
            let has_finished = run.act().await;
            run.show();
            if has_finished {
                return run.finish().await;
            }
            let evacuations = Arc::clone(&run.evacuations);
            tokio::select! {
                () = evacuations.stopping.begins() => return,
                // It may have been an order to end an earlier evacuation.
                () = evacuations.aborted.notified() => if evacuations.is_aborted() { run.tell(Event::Abort) },
                report = reports.recv() => match report {
                    Some(report) => run.take(report),
                    // The run has a sender itself.
                    None => return,
                },
                () = tokio::time::sleep(TICK) => run.look(),
            }
        }
    }
}

impl Run {
    fn new(
        evacuations: &Arc<Evacuations>,
        mut record: Record,
        survey: Survey,
        began: Instant,
    ) -> (Self, UnboundedReceiver<Report>) {
        let Survey { setup, entries, targets, routes, adopted } = survey;
        let mut places = Vec::new();
        let was_held: Vec<String> = record
            .workloads
            .iter()
            .filter(|entry| entry.is_held)
            .filter_map(|entry| entry.migration.clone())
            .collect();
        for entry in entries {
            let known = record
                .workloads
                .iter()
                .position(|known| known.name == entry.name && known.kind == entry.kind);
            match known {
                Some(place) => {
                    record.workloads[place] = entry;
                    places.push(place);
                }
                None => {
                    record.workloads.push(entry);
                    places.push(record.workloads.len() - 1);
                }
            }
        }
        let (reports, received) = unbounded_channel();
        let mut run = Self {
            evacuations: Arc::clone(evacuations),
            planner: Planner::new(setup),
            record,
            targets,
            routes,
            places,
            migrations: BTreeMap::new(),
            cancelled: Vec::new(),
            began,
            reports,
        };
        for (workload, route, migration) in adopted {
            run.planner.adopt(Duration::ZERO, workload, route);
            let was_held = was_held.contains(&migration);
            run.migrations.insert(workload, migration);
            if was_held {
                // The planner of the former daemon held it; this one says so again if it wants to.
                run.rest(workload, Rest::Resume);
            }
        }
        (run, received)
    }

    /// Settles the workloads that an earlier daemon has left in the middle, and that are not here any more.
    fn settle_earlier(&mut self) {
        let all = self.evacuations.migrations.list(&self.evacuations.journal);
        let known: Vec<usize> = self.places.clone();
        let since = self.record.started_unix_ms;
        for (place, entry) in self.record.workloads.iter_mut().enumerate() {
            if entry.state.is_over() || known.contains(&place) {
                continue;
            }
            let moved = all.iter().rev().find(|migration| {
                migration.name == entry.name
                    && migration.state == MigrationState::Moved
                    && migration.started_unix_ms >= since
            });
            match moved {
                Some(moved) => {
                    entry.state = State::Left;
                    entry.target = moved.target.store.clone().or(entry.target.take());
                    entry.migration = Some(moved.id.clone());
                }
                None => {
                    entry.state = State::Stays;
                    entry.reason = Some(
                        "it is not at this host any more, and did not leave by this evacuation".to_owned(),
                    );
                }
            }
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn tell(&mut self, event: Event) {
        self.planner.handle_event(self.now(), event);
    }

    fn entry(&mut self, workload: WorkloadIndex) -> Option<&mut Entry> {
        let place = *self.places.get(workload.as_usize())?;
        self.record.workloads.get_mut(place)
    }

    /// Carries out what the planner wants; returns whether everything has ended.
    async fn act(&mut self) -> bool {
        let mut has_finished = false;
        let (mut begun, mut rested) = (Vec::new(), Vec::new());
        while let Some(action) = self.planner.poll_action() {
            match action {
                Action::Begin { workload, route, strategy } => {
                    self.note_beginning(workload, route, strategy);
                    begun.push((workload, route, strategy));
                }
                Action::Hold { workload } => rested.push((workload, Rest::Pause)),
                Action::Resume { workload } => rested.push((workload, Rest::Resume)),
                Action::Cancel { workload } => self.cancel(workload),
                Action::Stop { workload } => self.stop(workload),
                Action::Finish => has_finished = true,
            }
        }
        self.note_ends();
        for (workload, rest) in &rested {
            if let Some(entry) = self.entry(*workload) {
                entry.is_held = *rest == Rest::Pause;
            }
        }
        // N.B. Durable before an order is given: after a crash its migration is looked for.
        // It goes on also if that fails: the journal has what counts, and a restart looks for it there.
        let _ = self.keep().await;
        for (workload, rest) in rested {
            self.rest(workload, rest);
        }
        for (workload, route, strategy) in begun {
            self.begin(workload, route, strategy);
        }
        has_finished
    }

    fn note_beginning(&mut self, workload: WorkloadIndex, route: usize, strategy: Strategy) {
        let target = self.routes.get(workload.as_usize()).and_then(|routes| routes.get(route)).cloned();
        if let Some(entry) = self.entry(workload) {
            (entry.state, entry.target, entry.migration) = (State::Moving, target, None);
            entry.is_post_copy = strategy == Strategy::PostCopy;
        }
    }

    fn begin(&mut self, workload: WorkloadIndex, route: usize, strategy: Strategy) {
        let order = self.record.order.clone();
        let to = self.routes.get(workload.as_usize()).and_then(|routes| routes.get(route)).cloned();
        let Some((entry, to)) = self.entry(workload).map(|entry| entry.clone()).zip(to) else { return };
        let mut request = request(&entry, &order, &to);
        if strategy == Strategy::PostCopy {
            // Its disks are complete before it runs there.
            request.memory = Memory::PostCopy;
        }
        tracing::info!(name = %entry.name, %to, ?strategy, "leaves this host");
        let (orders, reports) = (Arc::clone(&self.evacuations.migration_orders), self.reports.clone());
        tokio::spawn(async move {
            let ordered = orders.migrate(entry.name, request).await;
            // The run has ended if nothing receives this; its successor finds the migration.
            let _ = reports.send(Report::Ordered(workload, ordered.map(|migration| migration.id)));
        });
    }

    fn take(&mut self, report: Report) {
        match report {
            Report::Ordered(workload, Ok(id)) => {
                if let Some(entry) = self.entry(workload) {
                    entry.migration = Some(id.clone());
                }
                self.migrations.insert(workload, id);
                if self.cancelled.contains(&workload) {
                    self.cancel(workload);
                }
            }
            Report::Ordered(workload, Err(error)) => {
                if let Some(other) = self.moved_otherwise(workload) {
                    return self.take(Report::Ordered(workload, Ok(other)));
                }
                self.cancelled.retain(|other| *other != workload);
                tracing::warn!(reason = %error.message(), "a migration of the evacuation does not begin");
                if let Some(entry) = self.entry(workload) {
                    entry.reason = Some(error.message());
                    entry.state = State::Waiting;
                }
                self.close_if_drained(workload, &error);
                self.tell(Event::Failed { workload, fault: Fault::Transfer });
            }
            Report::CancelRefused(workload) => self.tell(Event::CancelRefused { workload }),
            Report::Stopped(workload, Ok(())) => self.tell(Event::Stopped { workload }),
            Report::Stopped(workload, Err(error)) => {
                if let Some(entry) = self.entry(workload) {
                    entry.reason = Some(format!("it was not shut down: {}", error.message()));
                }
                self.tell(Event::StopFailed { workload });
            }
        }
    }

    /// Returns the migration by which a workload leaves, or has left, that this run has not ordered: an administrator has, or an
    /// earlier daemon.
    fn moved_otherwise(&mut self, workload: WorkloadIndex) -> Option<String> {
        let since = self.record.started_unix_ms;
        let evacuations = Arc::clone(&self.evacuations);
        let entry = self.entry(workload)?.clone();
        let all = evacuations.migrations.list(&evacuations.journal);
        let is_it = |migration: &&api::Migration| {
            let is_good = !migration.state.has_ended() || migration.state == MigrationState::Moved;
            is_good && migration.started_unix_ms >= since && evacuations.leaves_by(&entry, migration)
        };
        all.iter().rev().find(is_it).map(|migration| migration.id.clone())
    }

    /// Closes a target that takes nothing new.
    fn close_if_drained(&mut self, workload: WorkloadIndex, error: &RequestError) {
        let RequestError::HostRefused { host, refusal } = error else { return };
        if refusal.code != RefusalCode::NotAllowed {
            return;
        }
        let target = self.routes.get(workload.as_usize()).and_then(|_| self.target_named(host));
        if let Some(target) = target {
            let closed = self.targets.close(target);
            self.tell(closed);
        }
    }

    fn target_named(&self, host: &str) -> Option<evacuation::TargetIndex> {
        let count = u32::try_from(self.targets.all().len()).unwrap_or(u32::MAX);
        (0..count).map(evacuation::TargetIndex).find(|target| self.targets.name(*target) == host)
    }

    fn rest(&self, workload: WorkloadIndex, rest: Rest) {
        let Some(id) = self.migrations.get(&workload).cloned() else { return };
        let orders = Arc::clone(&self.evacuations.migration_orders);
        tokio::spawn(async move {
            if let Err(error) = orders.rest_migration(id.clone(), rest).await {
                // It goes on as it is: a hold is a favour to others.
                tracing::info!(migration = %id, reason = %error.message(), ?rest, "a migration is not changed");
            }
        });
    }

    fn cancel(&mut self, workload: WorkloadIndex) {
        let Some(id) = self.migrations.get(&workload).cloned() else {
            // Its order has not been answered yet.
            self.cancelled.push(workload);
            return;
        };
        self.cancelled.retain(|other| *other != workload);
        let (orders, reports) = (Arc::clone(&self.evacuations.migration_orders), self.reports.clone());
        tokio::spawn(async move {
            if let Err(error) = orders.cancel_migration(id.clone()).await {
                tracing::info!(migration = %id, reason = %error.message(), "a migration is not cancelled");
                let _ = reports.send(Report::CancelRefused(workload));
            }
        });
    }

    fn stop(&mut self, workload: WorkloadIndex) {
        let Some(entry) = self.entry(workload) else { return };
        entry.state = State::Stopping;
        let name = entry.name.clone();
        let left_ms =
            self.record.order.deadline_unix_ms.map(|deadline| deadline.saturating_sub(now_unix_ms()));
        let wait_s = left_ms.map(|left| (left / 1000).clamp(1, StopVm::WAIT_S_DEFAULT));
        tracing::info!(vm = %name, "shut down, because it will not have left at the deadline");
        let (orders, reports) = (Arc::clone(&self.evacuations.vm_orders), self.reports.clone());
        tokio::spawn(async move {
            let stopped = orders.stop_vm(name, StopVm { now: false, wait_s }).await;
            let _ = reports.send(Report::Stopped(workload, stopped.map(drop)));
        });
    }

    /// Looks at migrations and targets, and lets time pass.
    fn look(&mut self) {
        // A stopping daemon ends migrations that its successor begins again.
        if self.evacuations.stopping.has_begun() {
            return;
        }
        for (workload, id) in self.migrations.clone() {
            self.look_at(workload, &id);
        }
        let now = self.now();
        for change in self.targets.look(&self.evacuations, now) {
            self.tell(change);
        }
        if self.planner.poll_timeout().is_some_and(|(at, _)| at <= now) {
            self.planner.handle_timeout(now);
        }
    }

    fn look_at(&mut self, workload: WorkloadIndex, id: &str) {
        let Ok(migration) = parse_id(id).and_then(|id| self.evacuations.migration_orders.describe(id)) else {
            return;
        };
        if !migration.state.has_ended() {
            let memory = migration.machine.as_ref().and_then(|machine| machine.memory.as_ref());
            let sent_bytes = migration.bytes_moved + memory.map_or(0, |memory| memory.sent_bytes);
            let remaining_bytes = self.remaining(workload, &migration);
            return self.tell(Event::Progress { workload, sent_bytes, remaining_bytes });
        }
        if let Some(next) = migration.retried_as.filter(|_| migration.state != MigrationState::Moved) {
            if let Some(entry) = self.entry(workload) {
                entry.migration = Some(next.clone());
            }
            self.migrations.insert(workload, next);
            return;
        }
        if migration.goes_on && migration.state != MigrationState::Moved {
            return;
        }
        self.migrations.remove(&workload);
        let place = migration.target.store.clone();
        if migration.state == MigrationState::Moved {
            if let Some(entry) = self.entry(workload) {
                entry.target = place.or(entry.target.take());
                entry.reason = None;
            }
            return self.tell(Event::Left { workload });
        }
        let reason = migration.message.unwrap_or_else(|| format!("{id} has failed"));
        if let Some(entry) = self.entry(workload) {
            (entry.state, entry.reason) = (State::Waiting, Some(format!("{id}: {reason}")));
        }
        let fault = match migration.state {
            MigrationState::Cancelled => Fault::Cancelled,
            _ => Fault::Transfer,
        };
        self.tell(Event::Failed { workload, fault });
    }

    fn remaining(&mut self, workload: WorkloadIndex, migration: &api::Migration) -> u64 {
        let all = self.entry(workload).map_or(0, |entry| entry.bytes);
        let of_all = ((1.0 - migration.fraction.clamp(0.0, 1.0)) * all as f64) as u64;
        let memory = migration.machine.as_ref().and_then(|machine| machine.memory.as_ref());
        match (migration.bytes_missing, memory) {
            (Some(missing), Some(memory)) => missing + memory.remaining_bytes,
            (Some(missing), None) if migration.machine.is_none() => missing,
            _ => of_all,
        }
    }

    /// Notes what has ended since.
    fn note_ends(&mut self) {
        for number in 0..self.places.len() {
            let workload = WorkloadIndex(u32::try_from(number).unwrap_or(u32::MAX));
            let Some(end) = self.planner.end_of(workload) else { continue };
            let Some(entry) = self.entry(workload).filter(|entry| !entry.state.is_over()) else { continue };
            let why = match end {
                End::Left(_) => {
                    entry.state = State::Left;
                    continue;
                }
                End::Stopped(why) => {
                    entry.state = State::Stopped;
                    why
                }
                End::Stays(why) => {
                    entry.state = State::Stays;
                    why
                }
            };
            if why != Why::HandedOver {
                entry.target = None;
            }
            let last = entry.reason.take();
            entry.reason = Some(reason(why, last, entry));
        }
    }

    async fn keep(&mut self) -> Result<(), RequestError> {
        let own = self.record.clone();
        // An abort is recorded by the order itself.
        let change = move |record: &mut Record| *record = Record { is_aborted: record.is_aborted, ..own };
        let kept = self.evacuations.change(change).await;
        if let Err(error) = &kept {
            tracing::error!(reason = %error.message(), "the evacuation cannot be recorded");
        }
        kept
    }

    /// Shows what is not durable: progress and forecast.
    fn show(&mut self) {
        let now = self.now();
        let expected = self.planner.forecast(now);
        let began_unix_ms = now_unix_ms().saturating_sub(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        let mut live = BTreeMap::new();
        for (expected, place) in expected.iter().zip(&self.places) {
            let migration = self.migrations.get(&expected.workload).and_then(|id| parse_id(id).ok());
            let migration = migration.and_then(|id| self.evacuations.migration_orders.describe(id).ok());
            let fraction = migration.map(|migration| migration.fraction);
            let is_held = self.planner.is_held(expected.workload);
            live.insert(*place, Live::new(expected, began_unix_ms, fraction, is_held));
        }
        self.evacuations.lock().live = live;
    }

    async fn finish(mut self) {
        self.record.ended_unix_ms = Some(now_unix_ms());
        let count = |state: State| self.record.workloads.iter().filter(|entry| entry.state == state).count();
        let (left, stopped, stay) = (count(State::Left), count(State::Stopped), count(State::Stays));
        tracing::info!(left, stopped, stay, "the evacuation has ended");
        // N.B. Without that a restart would go on with it.
        while self.keep().await.is_err() {
            tokio::select! {
                () = tokio::time::sleep(KEEP_AGAIN) => {}
                () = self.evacuations.stopping.begins() => return,
            }
        }
        self.evacuations.draining.set_evacuating(false);
    }
}

/// Returns why a workload stays, in words.
fn reason(why: Why, last: Option<String>, entry: &Entry) -> String {
    let what = match entry.kind {
        Kind::Vm => "VM",
        Kind::Volume => "volume",
    };
    match why {
        Why::NoTarget => last.unwrap_or_else(|| format!("no target takes this {what}")),
        Why::NoRoom => format!("no target has room for this {what}"),
        Why::TooLate => "the deadline came first".to_owned(),
        Why::Failed => last.unwrap_or_else(|| "its migrations have failed".to_owned()),
        Why::Aborted => "the evacuation, or its migration, was cancelled".to_owned(),
        Why::HandedOver => format!(
            "it was handed over to a host that does not answer; see: sterna migration show {}",
            entry.migration.as_deref().unwrap_or("ID")
        ),
        Why::NotStopped => last.unwrap_or_else(|| "it was not shut down".to_owned()),
    }
}
