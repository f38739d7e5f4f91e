//! Reports whether the host works completely, for service managers and monitoring.

use std::time::Duration;

use api::{Part, Problem, Readiness};
use migration::journal::{Side, Stage};
use migration::{HostId, MigrationId};

use super::Host;
use crate::hosts::HostsError;
use crate::journal::now_unix_ms;
use crate::volumes::registry::Service;

impl Host {
    pub(crate) fn health(&self) -> api::Health {
        api::Health { pid: std::process::id(), started_unix_ms: self.started_unix_ms }
    }

    /// Describes what the host should do and does not.
    pub(crate) fn readiness(&self) -> Readiness {
        let problem = |part, name: Option<&str>, message: &str| Problem {
            part,
            name: name.map(str::to_owned),
            message: message.to_owned(),
        };
        let mut problems = Vec::new();
        if self.is_stopping() {
            problems.push(problem(Part::Daemon, None, "it is stopping"));
        }
        if !self.journal.figures().is_writable {
            problems.push(problem(Part::Journal, None, "the latest commit could not be made durable"));
        }
        for (name, _, service) in self.all_volumes() {
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
        Readiness { ready: problems.is_empty(), problems, warnings: self.warnings() }
    }

    /// Returns problems that an administrator should look at.
    fn warnings(&self) -> Vec<Problem> {
        let mut warnings = Vec::new();
        if self.queue.has_used_up_the_host(|| self.migrations.under_way(&self.journal)) {
            let message = "new migrations wait: limits.migrations_per_host allows no more at a time; see: sterna migration list";
            warnings.push(Problem { part: Part::Migration, name: None, message: message.to_owned() });
        }
        let silent_max = self.limits().patience.silent_max;
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
            warnings.push(Problem { part: Part::Migration, name: Some(migration.to_string()), message });
        }
        warnings
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
        let since = self.begun_unix_ms(migration).unwrap_or_default().max(self.started_unix_ms);
        Duration::from_millis(now_unix_ms().saturating_sub(since))
    }
}
