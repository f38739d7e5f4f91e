//! Reports whether the host works completely, for service managers and monitoring.

use std::sync::Arc;
use std::time::Duration;

use api::{Part, Problem, Readiness, Vm, VmState};
use migration::journal::{Side, Stage};
use migration::{HostId, MigrationId};

use super::metrics::SeenStore;
use crate::host::Description;
use crate::hosts::HostsError;
use crate::journal::now_unix_ms;
use crate::stores::Space;
use crate::volumes::registry::Service;

/// A disk is nearly full below both of these.
const FREE_PERCENT_MIN: u64 = 5;
const FREE_BYTES_MIN: u64 = 256 << 20;

/// How long a paired host may be absent before it is reported: servers take several minutes to restart.
const ABSENT_MAX: Duration = Duration::from_secs(15 * 60);

/// How much a condition matters.
enum Attention {
    None,
    Warning(Problem),
    Problem(Problem),
}

impl Description {
    pub(crate) fn health(&self) -> api::Health {
        api::Health { pid: std::process::id(), started_unix_ms: self.started_unix_ms }
    }

    /// Describes what the host should do and does not.
    pub(crate) async fn readiness(self: &Arc<Self>) -> Readiness {
        let (vms, stores, data) =
            tokio::join!(self.vm_orders.describe_vms(), self.stores_seen(), self.data_folder_seen());
        self.readiness_with(&vms, &stores, data)
    }

    /// Does the same with answers of VMs and disks that are some seconds old.
    pub(crate) async fn attention(self: &Arc<Self>) -> Readiness {
        let told = self.told_by_the_slow().await;
        self.readiness_with(&told.vms, told.spaces(), told.data())
    }

    /// Does the same with what VMs and disks have answered.
    pub(crate) fn readiness_with(&self, vms: &[Vm], stores: &[SeenStore], data: Option<Space>) -> Readiness {
        let mut readiness = self.services();
        readiness.problems.extend(self.idle_arrivals());
        for standby in self.standbys.sources() {
            readiness.problems.extend(late_standby(&standby));
            readiness.warnings.extend(uncompared(&standby));
            readiness.warnings.extend(standby.vms.iter().filter_map(|vm| unstartable_vm(&standby, vm)));
        }
        let stuck = self.standbys.stuck().into_iter();
        readiness.problems.extend(stuck.map(|(name, what)| {
            let see = format!("{what}; see: sterna standby show {name}");
            problem(Part::Standby, Some(&name), &see)
        }));
        let promoted = self.standbys.promoted_here().into_iter();
        readiness.warnings.extend(promoted.map(|name| {
            let text = format!(
                "it was promoted here, and its volumes have no standby at their former host since; when that host is back: sterna standby \
                 reprotect {name}"
            );
            problem(Part::Standby, Some(&name), &text)
        }));
        let unreadable = self.standbys.unreadable().into_iter();
        readiness.problems.extend(unreadable.map(|what| {
            let text = format!(
                "{what}; its standby is not kept, and volumes that may have been promoted elsewhere wait: restore that file, and restart \
                 the daemon; without it nobody knows of a promotion"
            );
            problem(Part::Standby, None, &text)
        }));
        readiness.warnings.extend(self.obstructed());
        readiness.warnings.extend(self.absent_hosts());
        readiness.problems.extend(stores.iter().filter_map(|(name, space)| store_problem(name, *space)));
        readiness.problems.extend(data.filter(is_nearly_full).map(|space| {
            problem(
                Part::DataFolder,
                None,
                &format!("{}: make room, or no order can be recorded", left(space)),
            )
        }));
        for vm in vms {
            match vm_attention(vm) {
                Attention::None => {}
                Attention::Warning(told) => readiness.warnings.push(told),
                Attention::Problem(told) => readiness.problems.push(told),
            }
        }
        readiness.ready = readiness.problems.is_empty();
        readiness
    }

    fn services(&self) -> Readiness {
        let mut problems = Vec::new();
        if self.stopping.has_begun() {
            problems.push(problem(Part::Daemon, None, "it is stopping"));
        }
        if !self.journal.figures().is_writable {
            problems.push(problem(Part::Journal, None, "the latest commit could not be made durable"));
        }
        for (name, _, service) in self.views.all_volumes() {
            match service {
                Service::Starting => {
                    problems.push(problem(Part::Volume, Some(&name), "its image is being opened"));
                }
                Service::Waiting(reason) | Service::Failed(reason) | Service::Unconfirmed(reason) => {
                    problems.push(problem(Part::Volume, Some(&name), &reason));
                }
                Service::Creating(_) | Service::Arriving(..) | Service::Serving(_) | Service::Removing => {}
            }
        }
        match self.hosts.describe_identity() {
            Ok(identity) => {
                problems.extend(identity.problem.map(|message| problem(Part::Hosts, None, &message)));
            }
            // This host has never been paired.
            Err(HostsError::NoIdentity) => {}
            Err(error) => problems.push(problem(Part::Hosts, None, &error.to_string())),
        }
        problems.extend(self.grants.problem().map(|message| problem(Part::Access, None, &message)));
        problems.extend(self.draining.unknown_because().map(|reason| {
            let text = format!(
                "it is unknown whether an evacuation was under way, and none goes on: {reason}; look what is still here, then delete that file \
                 and restart the daemon, or order it again: sterna evacuate"
            );
            problem(Part::Daemon, None, &text)
        }));
        let mut warnings = Vec::new();
        if self.queue.has_used_up_the_host(|| self.migrations.under_way(&self.journal)) {
            let message = "new migrations wait: limits.migrations_per_host allows no more at a time; see: sterna migration list";
            warnings.push(problem(Part::Migration, None, message));
        }
        if self.draining.is_evacuating() {
            let message =
                "everything is leaving this host, and nothing new comes; see: sterna evacuate --status";
            warnings.push(problem(Part::Daemon, None, message));
        } else if self.draining.is_drained() {
            let message = "this host is drained: nothing new comes; when it may take volumes and VMs again: sterna host undrain";
            warnings.push(problem(Part::Daemon, None, message));
        }
        Readiness { ready: problems.is_empty(), problems, warnings }
    }

    /// Returns arrivals that make no progress.
    fn idle_arrivals(&self) -> Vec<Problem> {
        let mut idle_ones = Vec::new();
        let silent_max = self.limits.now().patience.silent_max;
        for (migration, peer, remote, is_promised) in self.arrivals() {
            // A migration that a restart has resumed gets at least the full time again.
            let idle = self.peers.idle_for(peer, remote).unwrap_or_else(|| self.under_way_for(migration));
            if idle < silent_max {
                continue;
            }
            let (host, minutes) = (self.hosts.name_of(peer), idle.as_secs() / 60);
            let message = match is_promised {
                false => format!(
                    "nothing has arrived from host {host} for {minutes} min; it continues when that host does; to end it: sterna \
                     migration cancel {migration}"
                ),
                true => format!(
                    "it has waited for host {host} for {minutes} min; if that host is lost for good: sterna volume promote"
                ),
            };
            idle_ones.push(problem(Part::Migration, Some(&migration.to_string()), &message));
        }
        idle_ones
    }

    /// Returns paired hosts that have had no connection for longer than a restart takes.
    fn absent_hosts(&self) -> Vec<Problem> {
        // A list that cannot be read is a problem of its own.
        let hosts = self.hosts.describe_all().unwrap_or_default();
        // A host that was not dialled yet has been absent since this daemon began.
        let up = Duration::from_millis(now_unix_ms().saturating_sub(self.started_unix_ms));
        hosts.iter().filter_map(|host| absent_host(host, up)).collect()
    }

    /// Returns migrations of an earlier daemon that cannot continue.
    pub(crate) fn obstructed(&self) -> Vec<Problem> {
        let mut obstacles = self.migrations.obstacles();
        self.journal.read(|state| {
            obstacles.retain(|id, _| state.unfinished().any(|(unfinished, _)| unfinished == *id));
        });
        let told = |(id, why): (MigrationId, String)| {
            problem(Part::Migration, Some(&id.to_string()), &format!("it cannot continue: {why}"))
        };
        obstacles.into_iter().map(told).collect()
    }

    /// Returns incoming migrations: their numbers here and at their hosts, and whether *prepared* was sent.
    fn arrivals(&self) -> Vec<(MigrationId, HostId, MigrationId, bool)> {
        self.journal.read(|state| {
            let arrivals = state.unfinished().filter_map(|(id, known)| match (&known.side, &known.stage) {
                (Side::Incoming { peer, remote, .. }, Stage::Copying) => Some((id, *peer, *remote, false)),
                (Side::Incoming { peer, remote, .. }, Stage::Prepared(_)) => Some((id, *peer, *remote, true)),
                _ => None,
            });
            arrivals.collect()
        })
    }

    fn under_way_for(&self, migration: MigrationId) -> Duration {
        let since = self.journal.begun_unix_ms(migration).unwrap_or_default().max(self.started_unix_ms);
        Duration::from_millis(now_unix_ms().saturating_sub(since))
    }
}

fn problem(part: Part, name: Option<&str>, message: &str) -> Problem {
    Problem { part, name: name.map(str::to_owned), message: message.to_owned() }
}

/// Describes a host that is absent for too long. `up`: how long this daemon has been running.
fn absent_host(host: &api::Peer, up: Duration) -> Option<Problem> {
    let absent = host.since_ms.map_or(up, Duration::from_millis);
    if host.connected || absent < ABSENT_MAX {
        return None;
    }
    let why = host.last_error.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let (name, minutes) = (&host.name, absent.as_secs() / 60);
    let message = format!(
        "it has not been connected for {minutes} min{why}: nothing moves to or from it; see: sterna host show {name}; if it is gone \
         for good: sterna host remove {name}"
    );
    Some(problem(Part::Hosts, Some(name), &message))
}

/// Describes a VM that a promotion of its standby could not start.
fn unstartable_vm(standby: &api::Standby, vm: &api::StandbyVm) -> Option<Problem> {
    let why = vm.problem.as_ref()?;
    let message = format!("VM {} would not start at host {}: {why}", vm.name, standby.host);
    Some(problem(Part::Standby, Some(&standby.name), &message))
}

/// Describes a standby whose last comparison was interrupted, and is tried again by itself.
fn uncompared(standby: &api::Standby) -> Option<Problem> {
    standby.verify_seconds?;
    let check = standby.check.as_ref().filter(|check| !check.failed)?;
    let message = format!(
        "the comparison of everything was interrupted: {}; it is tried again within an hour",
        check.interrupted.as_ref()?
    );
    Some(problem(Part::Standby, Some(&standby.name), &message))
}

/// Describes a standby that is not what it has to be.
fn late_standby(standby: &api::Standby) -> Option<Problem> {
    use api::StandbyState as State;
    let is_old = standby.age_seconds.zip(standby.rpo_seconds).is_some_and(|(age, rpo)| age > rpo);
    let what = match standby.state {
        State::Behind => "it is older than it may be",
        State::NoRecoveryPoint => "it has no recovery point",
        State::Promoted => "it was promoted at the other host",
        State::Diverged => {
            let volume = standby.volumes.first().map(String::as_str).unwrap_or_default();
            let message = format!(
                "it was promoted at host \"{}\", and both hosts serve its volumes; at the host whose content is not needed: sterna \
                 volume yield {volume}",
                standby.host
            );
            return Some(problem(Part::Standby, Some(&standby.name), &message));
        }
        State::Paused if is_old => "it is paused, and older than it may be",
        State::Waiting if is_old => "it does not run",
        State::Seeding | State::Current | State::Paused | State::Used | State::Waiting => return None,
    };
    let why = standby.reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let name = &standby.name;
    Some(problem(Part::Standby, Some(name), &format!("{what}{why}; see: sterna standby show {name}")))
}

fn is_nearly_full(space: &Space) -> bool {
    space.free < FREE_BYTES_MIN
        && space.free.saturating_mul(100) < space.total.saturating_mul(FREE_PERCENT_MIN)
}

fn left(space: Space) -> String {
    format!("it is nearly full: {} MiB of {} MiB are free", space.free >> 20, space.total >> 20)
}

fn store_problem(name: &str, space: Result<Option<Space>, ()>) -> Option<Problem> {
    let message = match space {
        Err(()) => "it cannot be used, or its disk does not answer; see: sterna store list".to_owned(),
        Ok(Some(space)) if space.is_read_only => {
            "it takes no writes: its file system or device is read-only, or became so after an error; guests there get I/O errors; \
             see the kernel's log (dmesg)"
                .to_owned()
        }
        Ok(space) => {
            let left = left(space.filter(is_nearly_full)?);
            format!(
                "{left}: guests of sparse images there may get I/O errors; make room, or move volumes away"
            )
        }
    };
    Some(problem(Part::Store, Some(name), &message))
}

/// Returns whether an administrator has to act on a VM.
fn vm_attention(vm: &Vm) -> Attention {
    let told = || {
        let why = vm.message.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        problem(Part::Vm, Some(&vm.name), &format!("{}{why}", vm.state.words()))
    };
    // It could not be started since the host has booted.
    if vm.awaited_start.as_ref().is_some_and(|awaited| awaited.failed_attempts > 0) {
        return Attention::Problem(told());
    }
    match vm.state {
        VmState::Crashed | VmState::IoError => Attention::Problem(told()),
        VmState::Paused | VmState::ShutDown | VmState::Unknown => Attention::Warning(told()),
        VmState::Running
        | VmState::Stopped
        | VmState::Suspended
        | VmState::Starting
        | VmState::Arriving
        | VmState::Leaving => Attention::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_restarts_is_not_reported_and_one_that_stays_away_is() {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        let message = |connected: bool, since: Option<Duration>, up: Duration| {
            let since = since.map(|since| u64::try_from(since.as_millis()).unwrap());
            let host = serde_json::json!({
                "name": "beta", "id": "00", "links": [], "connected": connected, "since_ms": since,
            });
            let host = serde_json::from_value(host).unwrap();
            absent_host(&host, up).map(|told: Problem| told.message)
        };
        assert_eq!(message(true, Some(minutes(60)), minutes(60)), None);
        assert_eq!(message(false, Some(minutes(14)), minutes(60)), None, "it restarts");
        assert_eq!(message(false, None, minutes(14)), None, "this daemon was started with it");
        for absent in [message(false, Some(minutes(15)), minutes(60)), message(false, None, minutes(15))] {
            let told = absent.unwrap();
            assert!(told.contains("for 15 min") && told.contains("sterna host show beta"), "{told}");
        }
    }
}
