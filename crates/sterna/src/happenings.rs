//! Derives events on a host from the difference of two overviews. It sends no requests.
//!
//! ```text
//!   Overview ──► look ──┐
//!   Migration ─► news_of ├──► [Happening] ──► a line of text, or of JSON
//!   no answer ─► lose ──┘
//! ```
//! After a restart of the daemon, the state before it is compared with the state after it.

use std::collections::BTreeMap;

use api::{Migration, Overview, VmState, VolumeState};
use serde::Serialize;

use crate::moments::moment;
use crate::top::sheet::{standby_state, vm_state, volume_place};
use crate::top::words::{clean, latency, place};
use console::units::{bytes, duration};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Happening {
    /// Time of the event by the daemon's clock, in milliseconds since 1970; `None` while the daemon does not answer.
    pub(crate) time_unix_ms: Option<u64>,
    /// Kind of the object.
    pub(crate) about: About,
    pub(crate) name: String,
    pub(crate) event: Event,
    pub(crate) message: String,
    /// The migration with its state; `None` for other objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) migration: Option<Box<Migration>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum About {
    Daemon,
    Migration,
    Volume,
    Vm,
    Standby,
    Host,
    Store,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Event {
    /// It existed at the start.
    Present,
    /// It is new on the host.
    Added,
    Removed,
    /// Its state, phase or place has changed.
    Changed,
    /// A migration has begun or is queued.
    Begun,
    /// A migration has ended.
    Ended,
    /// The daemon does not answer.
    Away,
    /// The daemon answers again.
    Back,
}

/// The state that was last seen.
#[derive(Default)]
pub(crate) struct Seen {
    latest: Option<Overview>,
    is_away: bool,
    /// Migrations that were under way, with their state. The overview has the ended ones.
    migrations: BTreeMap<(String, u64), Migration>,
    /// Identity and start of migrations whose end has been reported.
    told: Vec<(String, u64)>,
}

impl Happening {
    pub(crate) fn line(&self) -> String {
        let when = self.time_unix_ms.map_or_else(|| format!("{:<20}", "-"), moment);
        let about = match self.about {
            About::Daemon => "daemon",
            About::Migration => "migration",
            About::Volume => "volume",
            About::Vm => "vm",
            About::Standby => "standby",
            About::Host => "host",
            About::Store => "store",
        };
        let named = format!("{about} {}", self.name);
        clean(&format!("{when}  {named}: {}", self.message))
    }
}

impl Seen {
    /// Takes an overview and returns the events since the last one.
    pub(crate) fn look(&mut self, overview: Overview) -> Vec<Happening> {
        let time = overview.taken_unix_ms;
        let mut happened = Vec::new();
        self.look_at_daemon(&overview, &mut happened);
        let Some(before) = self.latest.take() else {
            self.begin(&overview, &mut happened);
            self.latest = Some(overview);
            return happened;
        };
        for told in &overview.migrations {
            happened.extend(self.migration_news(&told.migration, Some(time)));
        }
        let mut tell = |about, name: &str, event, message: String| {
            happened.push(Happening {
                time_unix_ms: Some(time),
                about,
                name: name.to_owned(),
                event,
                message,
                migration: None,
            });
        };
        let volume = |volume: &api::VolumeAtWork| (volume.name.clone(), volume_words(volume));
        differ(About::Volume, &before.volumes, &overview.volumes, volume, &mut tell);
        differ(About::Vm, &before.vms, &overview.vms, |vm| (vm.name.clone(), vm_words(vm)), &mut tell);
        let standby = |standby: &api::Standby| (standby.name.clone(), standby_words(standby));
        differ(About::Standby, &before.standbys, &overview.standbys, standby, &mut tell);
        let host = |told: &api::PeerAtWork| (told.peer.name.clone(), host_words(&told.peer));
        differ(About::Host, &before.peers, &overview.peers, host, &mut tell);
        let store = |store: &api::Store| (store.name.clone(), store_words(store));
        differ(About::Store, &before.stores, &overview.stores, store, &mut tell);
        self.forget(&overview);
        self.latest = Some(overview);
        happened
    }

    /// Takes the state of a migration and returns the events since its last one.
    pub(crate) fn news_of(&mut self, migration: &Migration) -> Vec<Happening> {
        let time = migration
            .ended_unix_ms
            .unwrap_or(migration.started_unix_ms + (migration.seconds * 1000.0) as u64);
        self.migration_news(migration, Some(time))
    }

    /// Notes that the daemon does not answer.
    pub(crate) fn lose(&mut self, reason: &str) -> Vec<Happening> {
        if std::mem::replace(&mut self.is_away, true) {
            return Vec::new();
        }
        let message = format!("it does not answer; waiting for it: {reason}");
        vec![Happening {
            time_unix_ms: None,
            about: About::Daemon,
            name: self.latest.as_ref().map(|latest| latest.name.clone()).unwrap_or_default(),
            event: Event::Away,
            message,
            migration: None,
        }]
    }

    /// Returns the migrations that are queued or under way, each with its latest change.
    pub(crate) fn under_way(&self) -> Vec<(String, u64)> {
        self.migrations.values().map(|migration| (migration.id.clone(), migration.change)).collect()
    }

    fn look_at_daemon(&mut self, overview: &Overview, happened: &mut Vec<Happening>) {
        let host = &overview.host;
        let (event, message) = match &self.latest {
            None => (Event::Present, format!("version {} has {}", host.version, what_there_is(overview))),
            Some(before) if before.host.started_unix_ms != host.started_unix_ms => {
                // A new daemon counts changes from the beginning.
                for migration in self.migrations.values_mut() {
                    migration.change = 0;
                }
                (Event::Back, format!("it was restarted; version {}", host.version))
            }
            Some(_) if self.is_away => (Event::Back, "it answers again".to_owned()),
            Some(_) => return,
        };
        self.is_away = false;
        happened.push(Happening {
            time_unix_ms: Some(overview.taken_unix_ms),
            about: About::Daemon,
            name: overview.name.clone(),
            event,
            message,
            migration: None,
        });
    }

    /// Takes the first overview: migrations under way are reported, ended ones are only recorded.
    fn begin(&mut self, overview: &Overview, happened: &mut Vec<Happening>) {
        for told in &overview.migrations {
            let migration = &told.migration;
            let key = (migration.id.clone(), migration.started_unix_ms);
            if migration.state.has_ended() {
                self.told.push(key);
                continue;
            }
            self.migrations.insert(key, migration.clone());
            let message = format!("{}, {}", order(migration), standing(migration));
            happened.push(of_migration(migration, Some(overview.taken_unix_ms), Event::Present, message));
        }
    }

    fn migration_news(&mut self, migration: &Migration, time: Option<u64>) -> Vec<Happening> {
        let key = (migration.id.clone(), migration.started_unix_ms);
        let mut happened = Vec::new();
        if self.told.contains(&key) {
            return happened;
        }
        let is_new = !self.migrations.contains_key(&key);
        if is_new {
            let retried = migration.retry_of.as_ref().map(|id| format!(", as a retry of {id}"));
            let message = format!("{}{}", order(migration), retried.unwrap_or_default());
            happened.push(of_migration(migration, Some(migration.started_unix_ms), Event::Begun, message));
        }
        let before = self.migrations.get(&key);
        // An overview may be older than the latest state of a single migration.
        if before.is_some_and(|before| before.change > migration.change && migration.change != 0) {
            return happened;
        }
        if migration.state.has_ended() {
            happened.push(of_migration(
                migration,
                migration.ended_unix_ms.or(time),
                Event::Ended,
                ending(migration),
            ));
            self.migrations.remove(&key);
            self.told.push(key);
            return happened;
        }
        let is_news = before.map(standing_of) != Some(standing_of(migration));
        if is_news {
            happened.push(of_migration(migration, time, Event::Changed, standing(migration)));
        }
        self.migrations.insert(key, migration.clone());
        happened
    }

    /// Forgets migrations that the daemon has forgotten.
    fn forget(&mut self, overview: &Overview) {
        let is_there = |(id, started): &(String, u64)| {
            overview
                .migrations
                .iter()
                .any(|told| told.migration.id == *id && told.migration.started_unix_ms == *started)
        };
        self.migrations.retain(|key, _| is_there(key));
        self.told.retain(is_there);
    }
}

/// Compares two lists by the name and the text that `describe` returns for each item.
fn differ<T>(
    about: About,
    before: &[T],
    now: &[T],
    describe: impl Fn(&T) -> (String, String),
    mut tell: impl FnMut(About, &str, Event, String),
) {
    let before: BTreeMap<String, String> = before.iter().map(&describe).collect();
    let now: BTreeMap<String, String> = now.iter().map(&describe).collect();
    for (name, words) in &now {
        match before.get(name) {
            None => tell(about, name, Event::Added, words.clone()),
            Some(earlier) if earlier != words => tell(about, name, Event::Changed, words.clone()),
            Some(_) => {}
        }
    }
    for name in before.keys().filter(|name| !now.contains_key(*name)) {
        tell(about, name, Event::Removed, "it is gone".to_owned());
    }
}

fn of_migration(migration: &Migration, time: Option<u64>, event: Event, message: String) -> Happening {
    Happening {
        time_unix_ms: time,
        about: About::Migration,
        name: migration.id.clone(),
        event,
        message,
        migration: Some(Box::new(migration.clone())),
    }
}

fn order(migration: &Migration) -> String {
    let vm = if migration.machine.is_some() { " with its VM" } else { "" };
    format!(
        "{}{vm} moves from {} to {}",
        migration.volume,
        place(&migration.source),
        place(&migration.target)
    )
}

/// Returns the parts of a migration's state whose change is an event.
fn standing_of(migration: &Migration) -> (api::MigrationState, api::Phase, u32, Option<&str>) {
    let attempt = migration.attempt.max(1);
    (migration.state, migration.phase, attempt, migration.suspended.as_deref())
}

fn standing(migration: &Migration) -> String {
    let phase = match migration.state {
        api::MigrationState::Running => migration.phase.name(),
        state => state.name(),
    };
    let mut words = format!("{phase}, {}", crate::output::share(migration));
    if migration.attempt > 1 {
        words += &format!(", attempt {}", migration.attempt);
    }
    if let Some(queue) = &migration.queue {
        words = format!("queued, {}", crate::output::turn(queue));
    }
    if let Some(reason) = &migration.suspended {
        words += &format!("; suspended: {reason}");
    }
    words
}

fn ending(migration: &Migration) -> String {
    let mut words = format!("{} in {}", migration.state.name(), duration(migration.seconds));
    if migration.bytes_moved > 0 {
        words += &format!(", {} moved", bytes(migration.bytes_moved));
    }
    if let Some(parts) = migration.switch_over {
        words += &format!(", guest held {}", latency(Some((parts.gate_closed_ms * 1000.0) as u64)));
    }
    if let Some(downtime) = migration.machine.as_ref().and_then(|machine| machine.downtime.as_ref()) {
        words += &format!(", VM paused for {}", latency(Some((downtime.total_ms * 1000.0) as u64)));
    }
    if let Some(message) = &migration.message {
        words += &format!(": {message}");
    }
    words
}

fn volume_words(volume: &api::VolumeAtWork) -> String {
    let place = volume_place(volume);
    let why = volume.message.as_ref().filter(|_| volume.state != VolumeState::Forwarding);
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    match volume.state {
        // The place names the host.
        VolumeState::Forwarding => format!("{} {place}", volume.state.name()),
        state => format!("{} in {place}, {}{why}", state.name(), bytes(volume.size_bytes)),
    }
}

fn vm_words(vm: &api::Vm) -> String {
    let (word, _) = vm_state(vm.state);
    match &vm.message {
        Some(message) if vm.state != VmState::Running => format!("{word}: {message}"),
        _ => word.to_owned(),
    }
}

/// Without its age, and why it is old: both change all the time.
fn standby_words(standby: &api::Standby) -> String {
    let (word, _) = standby_state(standby.state);
    format!("{word}, for {}", standby.volumes.join(", "))
}

fn host_words(peer: &api::Peer) -> String {
    match (&peer.last_error, peer.connected) {
        (_, true) => "connected".to_owned(),
        (Some(error), false) => format!("not connected: {error}"),
        (None, false) => "not connected".to_owned(),
    }
}

fn store_words(store: &api::Store) -> String {
    store
        .problem
        .as_ref()
        .map_or_else(|| "it can be used".to_owned(), |problem| format!("it cannot be used: {problem}"))
}

fn what_there_is(overview: &Overview) -> String {
    let count = |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    let moving = overview.migrations.iter().filter(|told| !told.migration.state.has_ended()).count();
    format!(
        "{}, {}, {}, {}, {} under way",
        count(overview.volumes.len(), "volume"),
        count(overview.vms.len(), "VM"),
        count(overview.stores.len(), "store"),
        count(overview.peers.len(), "other host"),
        count(moving, "migration"),
    )
}

#[cfg(test)]
mod tests;
