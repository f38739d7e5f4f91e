//! Whether the host does all that it is to do, for whoever starts and watches daemons.

use api::{Part, Problem, Readiness};

use super::Host;
use crate::hosts::HostsError;
use crate::volumes::registry::Service;

impl Host {
    /// Says that the daemon is alive.
    pub(crate) fn health(&self) -> api::Health {
        api::Health { pid: std::process::id(), started_unix_ms: self.started_unix_ms }
    }

    /// Says what the host is to do and does not.
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
            // It has never been paired with anybody.
            Err(HostsError::NoIdentity) => {}
            Err(error) => problems.push(problem(Part::Hosts, None, &error.to_string())),
        }
        problems.extend(self.grants.problem().map(|message| problem(Part::Access, None, &message)));
        Readiness { ready: problems.is_empty(), problems }
    }
}
