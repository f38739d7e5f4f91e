//! Tests of standbys: a clone of a recovery point becomes volumes and VMs of this host under other names, for a time.
//!
//! ```text
//!   ordered ─► recorded: making ─► clone, volumes, VMs ─► recorded: running ─► time over, told to end, no room
//!                  │                                                           │
//!                  └── a restart, an error ─► recorded: ending ◄───────────────┘
//!                                                └─► everything deleted ─► recorded: ended
//! ```
//! A task carries out what [`plan`] decides. The standby goes on receiving: only its recovery point stays while the clone is made.

mod making;
mod plan;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use self::plan::{Look, Step};
use super::book::{BootCheck, DescribedVm, Stage, TestNetworks, TestRecord, TestVm, TestVolume, Why};
use super::copy::{Progress, has_room_in};
use super::orders::Found;
use super::promotion::parse_point;
use super::{Kept, Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::files::descriptors;
use crate::files::sockets::volume_uri;
use crate::host::blocking;
use crate::journal::now_unix_ms;
use crate::names;
use crate::vms::ConsoleSearch;
use crate::volumes::orders::create::random_bytes;

/// How long a test goes on if the order says nothing.
const FOR: Duration = Duration::from_secs(3600);
/// How long it waits for a text on the console if the order says nothing.
const BOOT: Duration = Duration::from_secs(120);
/// The longest such text.
const TEXT_BYTES_MAX: usize = 4096;
const FOR_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// Time until something is tried again that has failed.
const AGAIN: Duration = Duration::from_secs(10);

/// A test, and its task.
pub(super) struct Testing {
    record: Mutex<TestRecord>,
    progress: Arc<Progress>,
    /// The search on each console.
    searches: tokio::sync::Mutex<BTreeMap<String, ConsoleSearch>>,
    /// Why it is to end.
    told: watch::Sender<Option<Why>>,
    /// What the task has come to.
    attempt: watch::Sender<Attempt>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Attempt {
    Underway,
    /// Something of the test could not be deleted, or recorded. It is tried again.
    Failed(String),
    Over,
}

impl Testing {
    fn new(record: TestRecord) -> Arc<Self> {
        let is_over = matches!(record.stage, Stage::Ended { .. });
        let attempt = if is_over { Attempt::Over } else { Attempt::Underway };
        Arc::new(Self {
            record: Mutex::new(record),
            progress: Arc::default(),
            searches: tokio::sync::Mutex::default(),
            told: watch::Sender::new(None),
            attempt: watch::Sender::new(attempt),
        })
    }

    fn record(&self) -> TestRecord {
        lock(&self.record).clone()
    }

    fn is_over(&self) -> bool {
        *self.attempt.borrow() == Attempt::Over
    }

    /// Resolves once the test is to end.
    async fn told_to_end(&self) {
        // The sender lives as long as this.
        let _ = self.told.subscribe().wait_for(Option::is_some).await;
    }
}

impl Standbys {
    /// Begins a test of a standby that is kept here. Answers once that is durable; the clone is made afterwards.
    pub(crate) async fn test(
        self: Arc<Self>,
        name: String,
        order: api::TestStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let found = self.find(&name)?;
        let kept = self.kept_here(&found, &name)?;
        let unfinished = lock(&kept.test).clone().filter(|testing| !testing.is_over());
        if let Some(testing) = unfinished {
            return Err(StandbyError::TestRuns { name, test: testing.record().name }.into());
        }
        self.require_point(&kept, &name, order.point.as_deref()).await?;
        // N.B. It may have been permitted when the VMs were described.
        let brings_vms = !self.hosts.refuses_vms_of(kept.host());
        let described = if brings_vms { self.described(&kept).await? } else { Vec::new() };
        let record = self.new_test(&kept, &described, order)?;
        blocking(descriptors::require_for_volume).await?;
        let (id, written) = (kept.config.id.clone(), record.clone());
        // N.B. Before anything is made: a start deletes what this names.
        self.on_book(move |book| book.write_test(&id, &written)).await?;
        tracing::info!(standby = %name, test = %record.name, "a test of a standby begins");
        let testing = Testing::new(record);
        *lock(&kept.test) = Some(Arc::clone(&testing));
        tokio::spawn(Arc::clone(&self).run_test(kept, testing));
        Ok(self.view(&found).await)
    }

    /// Ends a test. Answers once nothing of it is left.
    pub(crate) async fn end_test(self: Arc<Self>, name: String) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let found = self.find(&name)?;
        let kept = self.kept_here(&found, &name)?;
        if lock(&kept.test).as_ref().is_none_or(|testing| testing.is_over()) {
            return Err(StandbyError::NoTest(name).into());
        }
        self.end_test_of(&kept, Why::Ordered).await?;
        Ok(self.view(&found).await)
    }

    /// Ends the test of a standby, if there is one. After an error it goes on being deleted.
    pub(super) async fn end_test_of(&self, kept: &Kept, why: Why) -> Result<(), RequestError> {
        let testing = lock(&kept.test).clone();
        let Some(testing) = testing.filter(|testing| !testing.is_over()) else { return Ok(()) };
        testing.attempt.send_replace(Attempt::Underway);
        let mut attempt = testing.attempt.subscribe();
        testing.told.send_replace(Some(why));
        // The sender lives as long as this.
        let ended = attempt.wait_for(|attempt| *attempt != Attempt::Underway).await;
        match ended.as_deref() {
            Ok(Attempt::Failed(reason)) => {
                let (name, reason) = (kept.config.name.clone(), reason.clone());
                Err(StandbyError::TestNotEnded { name, reason }.into())
            }
            _ => Ok(()),
        }
    }

    /// Goes on with the tests of the daemon before.
    pub(super) fn resume_tests(self: &Arc<Self>) {
        let kept: Vec<Arc<Kept>> = lock(&self.copies).values().cloned().collect();
        for kept in kept {
            let test = self.book().ok().map(|book| book.test(&kept.config.id));
            match test {
                Some(Ok(Some(record))) => {
                    let stage = plan::after_start(record.stage.clone());
                    let testing = Testing::new(TestRecord { stage, ..record });
                    *lock(&kept.test) = Some(Arc::clone(&testing));
                    tokio::spawn(Arc::clone(self).run_test(kept, testing));
                }
                Some(Err(error)) => {
                    let text = format!("the test of standby {} cannot be read: {error}", kept.config.name);
                    tracing::error!("{text}");
                    lock(&self.unreadable).push(text);
                }
                Some(Ok(None)) | None => {}
            }
        }
    }

    /// Carries a test out until it has ended, or until the daemon does.
    async fn run_test(self: Arc<Self>, kept: Arc<Kept>, testing: Arc<Testing>) {
        let mut told = testing.told.subscribe();
        while !self.stopping.has_begun() {
            let (test, look) = (testing.record(), self.look_at_test(&kept, &testing).await);
            let (wait, result) = match plan::next(&test, &look) {
                Step::Nothing => break,
                Step::Wait(time) => (time, Ok(())),
                Step::Note(booted) => {
                    let check =
                        test.boot_check.clone().map(|check| BootCheck { found: Some(booted), ..check });
                    tracing::info!(standby = %kept.config.name, test = %test.name, booted.is_seen, "the consoles of a test were checked");
                    let noted = TestRecord { boot_check: check, ..test };
                    (Duration::ZERO, self.note_test(&kept, &testing, noted).await)
                }
                Step::Make => (Duration::ZERO, self.make_and_note(&kept, &testing).await),
                Step::End(why) => {
                    tracing::info!(standby = %kept.config.name, test = %test.name, ?why, "a test of a standby ends");
                    let ending = TestRecord { stage: Stage::Ending { why }, ..test };
                    (Duration::ZERO, self.note_test(&kept, &testing, ending).await)
                }
                Step::Clear(why) => match self.clear_test(&kept, &test).await {
                    Ok(()) => {
                        let stage = Stage::Ended { why, at_unix_ms: now_unix_ms() };
                        (Duration::ZERO, self.note_test(&kept, &testing, TestRecord { stage, ..test }).await)
                    }
                    Err(reason) => (AGAIN, Err(reason)),
                },
            };
            let wait = if result.is_err() { AGAIN } else { wait };
            if let Err(reason) = result {
                tracing::warn!(standby = %kept.config.name, reason, "a test of a standby cannot go on; it is tried again");
                testing.attempt.send_replace(Attempt::Failed(reason));
            }
            if !wait.is_zero() {
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    _ = told.changed() => {}
                    () = self.stopping.begins() => return,
                }
            }
        }
        if matches!(testing.record().stage, Stage::Ended { .. }) {
            testing.attempt.send_replace(Attempt::Over);
        }
    }

    async fn make_and_note(self: &Arc<Self>, kept: &Arc<Kept>, testing: &Testing) -> Result<(), String> {
        let made = self.make_test(kept, testing).await;
        if self.stopping.has_begun() {
            // A start clears away what was made.
            return Ok(());
        }
        let test = match made {
            Ok(made) => TestRecord { stage: Stage::Running, made_unix_ms: Some(now_unix_ms()), ..made },
            Err(reason) => {
                tracing::warn!(standby = %kept.config.name, reason, "a test of a standby was not made");
                let why = testing.told.borrow().clone().unwrap_or(Why::NotMade { reason });
                TestRecord { stage: Stage::Ending { why }, ..testing.record() }
            }
        };
        self.note_test(kept, testing, test).await
    }

    /// Makes durable how far a test is.
    async fn note_test(&self, kept: &Kept, testing: &Testing, test: TestRecord) -> Result<(), String> {
        let (id, written) = (kept.config.id.clone(), test.clone());
        let noted = self.on_book(move |book| book.write_test(&id, &written)).await;
        noted.map_err(|error| error.message())?;
        *lock(&testing.record) = test;
        Ok(())
    }

    async fn look_at_test(&self, kept: &Kept, testing: &Testing) -> Look {
        let (store, id) = (self.folder_of(&kept.config.store), kept.config.id.clone());
        // A store that is away has room: what it lacks is another question.
        let has_room = blocking(move || Ok(store.is_err() || has_room_in(&store.unwrap_or_default(), &id)));
        Look {
            now_unix_ms: now_unix_ms(),
            has_room: has_room.await.unwrap_or(true),
            is_seen: self.search_consoles(testing).await,
            told: testing.told.borrow().clone(),
        }
    }

    /// Returns whether the text that a running test waits for is on a console.
    async fn search_consoles(&self, testing: &Testing) -> bool {
        let test = testing.record();
        let waits = |check: &BootCheck| check.found.is_none() && test.stage == Stage::Running;
        let Some(check) = test.boot_check.clone().filter(waits) else { return false };
        let mut searches = testing.searches.lock().await;
        for vm in &test.vms {
            let search = searches.remove(&vm.name).unwrap_or_else(|| ConsoleSearch::new(&check.text));
            let (search, is_seen) = self.vms.search_consoles(&vm.name, &vm.consoles, search).await;
            searches.insert(vm.name.clone(), search);
            if is_seen {
                return true;
            }
        }
        false
    }

    fn kept_here(&self, found: &Found, name: &str) -> Result<Arc<Kept>, RequestError> {
        match found {
            Found::Kept(kept) => Ok(Arc::clone(kept)),
            Found::Source(source) => {
                let (name, host) = (name.to_owned(), self.hosts.name_of(source.host()));
                Err(StandbyError::NotThere { name, host }.into())
            }
        }
    }

    /// Checks that there is something to test.
    async fn require_point(&self, kept: &Kept, name: &str, point: Option<&str>) -> Result<(), RequestError> {
        let refused = |reason: &str| {
            RequestError::from(StandbyError::NotTested { name: name.to_owned(), reason: reason.to_owned() })
        };
        let look = Self::look(kept).await;
        if look.is_promoted || look.is_consumed {
            return Err(refused("it was promoted, or a migration uses it"));
        }
        if let Some(fault) = &look.fault {
            return Err(refused(fault));
        }
        if look.points.is_empty() {
            return Err(refused("it has no recovery point yet"));
        }
        let Some(point) = point else { return Ok(()) };
        let at = parse_point(kept, point);
        if look.points.iter().any(|(known, _)| Some(*known) == at) {
            Ok(())
        } else {
            Err(refused(&format!("it has no recovery point \"{point}\"; list them: sterna standby show")))
        }
    }

    /// Returns the record of a test whose names are free here.
    fn new_test(
        &self,
        kept: &Kept,
        described: &[DescribedVm],
        order: api::TestStandby,
    ) -> Result<TestRecord, RequestError> {
        let time = time_of(order.for_seconds, FOR)?;
        let boot_check = boot_check(&order)?;
        if boot_check.is_some() && described.is_empty() {
            let text = "it has no VM that was described, so nothing can appear on a console";
            return Err(RequestError::Invalid(text.to_owned()));
        }
        let copied = &kept.config.volumes;
        let ordered = order.name.as_deref();
        let volumes = copied.iter().map(|volume| TestVolume {
            volume: format!("{:032x}", u128::from_le_bytes(random_bytes())),
            name: plan::name_of(ordered, &volume.name, copied.len()),
            of: volume.name.clone(),
        });
        let volumes: Vec<TestVolume> = volumes.collect();
        self.stores.get(&kept.config.store)?.require_writable()?;
        for TestVolume { name, .. } in &volumes {
            names::check(name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
            if copied.iter().any(|volume| volume.name == *name) {
                let reason =
                    format!("a promotion gives its volume the name \"{name}\": give the test another one");
                return Err(StandbyError::NotTested { name: kept.config.name.clone(), reason }.into());
            }
            self.require_free(&kept.config.store, name)?;
        }
        let vms = described.iter().map(|vm| TestVm {
            name: plan::name_of(ordered, &vm.name, described.len()),
            of: vm.name.clone(),
            consoles: Vec::new(),
        });
        let vms: Vec<TestVm> = vms.collect();
        vms.iter().try_for_each(|vm| self.vm_orders.check_vm_name(&vm.name))?;
        let begun_unix_ms = now_unix_ms();
        Ok(TestRecord {
            name: order.name.unwrap_or_else(|| format!("{}-test", kept.config.name)),
            ordered_point: order.point,
            point: None,
            volumes,
            vms,
            networks: match order.networks {
                api::TestNetworks::None => TestNetworks::Apart,
                api::TestNetworks::Keep => TestNetworks::AsTheyAre,
            },
            boot_check,
            begun_unix_ms,
            made_unix_ms: None,
            ends_unix_ms: begun_unix_ms.saturating_add(time.as_millis() as u64),
            stage: Stage::Making,
        })
    }

    /// Returns why the test of a standby cannot be deleted, if it has to be.
    pub(super) fn stuck_test(kept: &Kept) -> Option<String> {
        let testing = lock(&kept.test).clone()?;
        let attempt = testing.attempt.borrow().clone();
        match attempt {
            Attempt::Failed(reason) => Some(format!("its test cannot be deleted: {reason}")),
            Attempt::Underway | Attempt::Over => None,
        }
    }

    /// Describes the test of a standby: the present one, or the last.
    pub(super) fn view_test(&self, kept: &Kept) -> Option<api::StandbyTest> {
        let testing = lock(&kept.test).clone()?;
        let test = testing.record();
        let (state, why) = match test.stage {
            Stage::Making => (api::StandbyTestState::Making, None),
            Stage::Running => (api::StandbyTestState::Running, None),
            Stage::Ending { why } => (api::StandbyTestState::Ending, Some(why)),
            Stage::Ended { why, .. } => (api::StandbyTestState::Ended, Some(why)),
        };
        let is_making = state == api::StandbyTestState::Making;
        let failed = match &*testing.attempt.borrow() {
            Attempt::Failed(reason) => Some(format!("it cannot be deleted yet: {reason}")),
            Attempt::Underway | Attempt::Over => None,
        };
        let bytes = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        let total = bytes(&testing.progress.bytes_total);
        let volumes = test.volumes.into_iter().map(|volume| api::StandbyTestVolume {
            uri: volume_uri(&volume.name, &self.sockets.volume_socket(&volume.name)),
            name: volume.name,
            of: volume.of,
        });
        Some(api::StandbyTest {
            name: test.name,
            state,
            reason: failed.or(why.map(words_of)),
            point: test.point,
            volumes: volumes.collect(),
            vms: test.vms.into_iter().map(|vm| api::StandbyTestVm { name: vm.name, of: vm.of }).collect(),
            boot_check: test.boot_check.map(view_check),
            begun_unix_ms: test.begun_unix_ms,
            ends_unix_ms: test.ends_unix_ms,
            bytes_done: is_making.then(|| bytes(&testing.progress.bytes_done)),
            bytes_total: (is_making && total > 0).then_some(total),
        })
    }
}

/// Returns a time that was ordered, in seconds.
fn time_of(seconds: Option<f64>, otherwise: Duration) -> Result<Duration, RequestError> {
    let time = seconds.map_or(Ok(otherwise), Duration::try_from_secs_f64);
    let time = time.map_err(|error| RequestError::Invalid(error.to_string()))?;
    if time.is_zero() || time > FOR_MAX {
        return Err(RequestError::Invalid("a test goes on for 30 days at most".to_owned()));
    }
    Ok(time)
}

fn boot_check(order: &api::TestStandby) -> Result<Option<BootCheck>, RequestError> {
    let Some(text) = order.boot_check.clone() else { return Ok(None) };
    if text.is_empty() || text.len() > TEXT_BYTES_MAX {
        let text = format!("the text on the console has 1 byte to {TEXT_BYTES_MAX}");
        return Err(RequestError::Invalid(text));
    }
    let timeout = time_of(order.boot_check_timeout_seconds, BOOT)?;
    let (timeout_ms, ends_test) = (timeout.as_millis() as u64, order.for_seconds.is_none());
    Ok(Some(BootCheck { text, timeout_ms, ends_test, found: None }))
}

fn view_check(check: BootCheck) -> api::BootCheck {
    let state = match check.found {
        None => api::BootCheckState::Waiting,
        Some(booted) if booted.is_seen => api::BootCheckState::Passed,
        Some(_) => api::BootCheckState::Failed,
    };
    let seconds = check.found.map(|booted| booted.after_ms as f64 / 1000.0);
    api::BootCheck { text: check.text, state, seconds }
}

fn words_of(why: Why) -> String {
    match why {
        Why::Ordered => "it was ended by order".to_owned(),
        Why::Over => "its time was over".to_owned(),
        Why::Interrupted => "the daemon ended while it was made".to_owned(),
        Why::NotMade { reason } => format!("it could not be made: {reason}"),
        Why::Booted => "its console was checked".to_owned(),
        Why::NotBooted => "what it waited for did not appear on its console in time".to_owned(),
        Why::NoRoom => "the store had no room left for it".to_owned(),
        Why::Promoted => "the standby was promoted".to_owned(),
        Why::Removed => "the standby was removed".to_owned(),
    }
}
