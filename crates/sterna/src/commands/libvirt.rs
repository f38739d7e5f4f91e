//! `sterna libvirt migrate`: moves a domain whose disks are volumes to another host, step after step.
//!
//! ```text
//!   look at both libvirts and the daemon (sight.rs) ─► next step (steps.rs) ─► carried out ─► look again … done
//!                                                                                 └── the memory, by virsh (memory.rs)
//! ```

mod error;
mod memory;
mod sight;
mod steps;
mod virsh;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use api::{
    AttachVolume, Client, ClientError, DetachVolume, ErrorCode, MigrateVolume, Migration, MigrationState,
    Named, RemoveVolume,
};
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) use self::error::{LibvirtError, Obstacle};
use self::sight::Domain;
use self::steps::{Place, Seen, Step};
use self::virsh::Virsh;
use super::migrate;
use crate::args::{LibvirtCommand, MigrateDomainArguments, PaceArguments};
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, domains};
use crate::progress::Display;

/// The longest wait for clients that have left.
const CLIENTS_GONE_MAX: Duration = Duration::from_secs(15);
const ASKED_EVERY: Duration = Duration::from_millis(200);
/// Options of virsh that would contradict what this command decides.
const DECIDED: [&str; 4] = ["--domain", "--desturi", "--xml", "--persistent-xml"];

pub(super) async fn run(
    client: &Client,
    command: LibvirtCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    let LibvirtCommand::Migrate(arguments) = command;
    let decided = |option: &&String| DECIDED.contains(&option.split('=').next().unwrap_or_default());
    if let Some(option) = arguments.options.iter().find(decided) {
        return Err(LibvirtError::Option { option: words::clean(option) }.into());
    }
    let (host, _) = arguments.to.split_once(':').unwrap_or((&arguments.to, ""));
    let there = Virsh { uri: uri_of(client, host, arguments.to_uri.as_deref()).await? };
    let here = Virsh { uri: arguments.connect.clone() };
    let domain = Domain::find(&arguments.domain, host, here, there).await?;
    if arguments.dry_run {
        return look_ahead(client, &domain, &arguments, format).await;
    }
    let interrupt = signal(SignalKind::interrupt()).map_err(CommandError::Signals)?;
    let MigrateDomainArguments { to, memory_first, sockets, pace, options, .. } = arguments;
    let order = Order { to, memory_first, sockets, pace, options };
    Move { client, domain, order, interrupt, format, attached: Vec::new() }.run().await
}

/// Returns the URI of the other host's libvirt.
async fn uri_of(client: &Client, host: &str, given: Option<&str>) -> Result<String, CommandError> {
    let peer = client.peer(host).await?;
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let address = peer.links.first().and_then(|link| Some(link.address.rsplit_once(':')?.0.to_owned()));
    let address = address.ok_or_else(|| LibvirtError::NoAddress { host: host.to_owned() })?;
    Ok(format!("qemu+ssh://{address}/system"))
}

/// What a move was ordered with.
struct Order {
    to: String,
    memory_first: bool,
    sockets: Option<PathBuf>,
    pace: PaceArguments,
    options: Vec<String>,
}

/// What would be done, or was.
#[derive(Debug, Serialize)]
pub(crate) struct DomainMove {
    pub(crate) domain: String,
    pub(crate) uuid: String,
    pub(crate) host: String,
    pub(crate) volumes: Vec<String>,
    /// The steps, in words.
    pub(crate) steps: Vec<String>,
    /// The migration of the disks that would be made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) disks: Option<api::MigrationPlan>,
}

/// Prints the steps, and the plan of the disks.
async fn look_ahead(
    client: &Client,
    domain: &Domain,
    arguments: &MigrateDomainArguments,
    format: Format,
) -> Result<Exit, CommandError> {
    let seen = domain.look(client).await?;
    let steps = steps::plan(&seen, arguments.memory_first).map_err(|obstacle| domain.obstacle(obstacle))?;
    let mut disks = None;
    for step in &steps {
        if let Step::MoveDisks { volumes, serve_here } = step {
            let request = request_of(&arguments.to, &arguments.pace, volumes, *serve_here);
            disks = Some(client.plan_migration(&volumes[0], &request).await?);
        }
    }
    let can_begin = disks.as_ref().is_none_or(|plan| plan.can_begin);
    output::print(format, &told(domain, &seen, &steps, disks), domains::planned)?;
    Ok(if can_begin { Exit::Success } else { Exit::Refused })
}

fn told(domain: &Domain, seen: &Seen, steps: &[Step], disks: Option<api::MigrationPlan>) -> DomainMove {
    DomainMove {
        domain: domain.name.clone(),
        uuid: domain.uuid.clone(),
        host: domain.host.clone(),
        volumes: seen.volumes.iter().map(|(name, _)| name.clone()).collect(),
        steps: steps.iter().map(|step| words_of(step, &domain.host)).collect(),
        disks,
    }
}

fn words_of(step: &Step, host: &str) -> String {
    let list = |names: &[String]| names.join(", ");
    match step {
        Step::Follow(id) => format!("waiting for {id}, which is under way"),
        Step::Attach(names) => format!("attaching {} at {host}", list(names)),
        Step::MoveDisks { volumes, .. } => format!("moving {} to {host}", list(volumes)),
        Step::MoveDomain { is_running: true } => format!("moving the memory to {host}"),
        Step::MoveDomain { is_running: false } => format!("moving the definition to {host}"),
        Step::Release(vm) => format!("releasing {vm} from sterna here"),
        Step::Forget(names) => format!("ending the forwarding of {}", list(names)),
        Step::GiveBack(names) => format!("detaching {} from here", list(names)),
        Step::Done => format!("everything is at {host}"),
    }
}

fn request_of(to: &str, pace: &PaceArguments, volumes: &[String], serve_here: bool) -> MigrateVolume {
    MigrateVolume {
        bandwidth_bytes_per_second: pace.bandwidth,
        impact_percent: pace.impact,
        deadline_unix_ms: pace.deadline,
        begin_unix_ms: pace.at,
        serve_here,
        together_with: volumes.get(1..).unwrap_or_default().to_vec(),
        named: Named::Volume,
        ..MigrateVolume::to(to)
    }
}

/// A move under way.
struct Move<'a> {
    client: &'a Client,
    domain: Domain,
    order: Order,
    interrupt: Signal,
    format: Format,
    /// The volumes that this command has attached, to be detached if the domain stays.
    attached: Vec<String>,
}

impl Move<'_> {
    async fn run(mut self) -> Result<Exit, CommandError> {
        let mut done: Vec<Step> = Vec::new();
        loop {
            let seen = tokio::select! {
                seen = self.domain.look(self.client) => seen?,
                _ = self.interrupt.recv() => return Ok(stopped()),
            };
            let step = steps::next(&seen, self.order.memory_first)
                .map_err(|obstacle| self.domain.obstacle(obstacle))?;
            if step == Step::Done {
                output::print(self.format, &told(&self.domain, &seen, &done, None), domains::moved)?;
                return Ok(Exit::Success);
            }
            let words = words_of(&step, &self.domain.host);
            if done.last() == Some(&step) {
                let stands = self.standing(&seen).await;
                return Err(LibvirtError::NoProgress { domain: self.domain.name, step: words, stands }.into());
            }
            if self.format == Format::Text {
                output::say(&words);
            }
            if let Some(exit) = self.carry_out(&step, &seen).await? {
                return Ok(exit);
            }
            done.push(step);
        }
    }

    /// Carries out a step; returns the exit code of a command that ends with it.
    async fn carry_out(&mut self, step: &Step, seen: &Seen) -> Result<Option<Exit>, CommandError> {
        match step {
            Step::Follow(id) => {
                let migration = self.client.migration(id, api::Watch::default()).await?;
                self.see_through(migration).await
            }
            Step::MoveDisks { volumes, serve_here } => {
                let request = request_of(&self.order.to, &self.order.pace, volumes, *serve_here);
                let migration = self.client.migrate(&volumes[0], &request).await?;
                self.see_through(migration).await
            }
            Step::MoveDomain { is_running } => self.move_domain(*is_running).await,
            Step::Attach(_) | Step::Release(_) | Step::Forget(_) | Step::GiveBack(_) | Step::Done => {
                let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::Signals)?;
                let done = tokio::select! {
                    done = self.ask_daemon(step, seen) => Some(done),
                    _ = interrupt.recv() => None,
                };
                match done {
                    Some(done) => done.map(|()| None),
                    None => {
                        self.detach().await;
                        Ok(Some(stopped()))
                    }
                }
            }
        }
    }

    /// Carries out a step that the daemon does at once.
    async fn ask_daemon(&mut self, step: &Step, seen: &Seen) -> Result<(), CommandError> {
        match step {
            Step::Attach(names) => self.attach(names, seen).await?,
            Step::Release(vm) => drop(self.client.release_vm(vm).await?),
            Step::Forget(names) => {
                for name in names {
                    self.forget(name).await?;
                }
            }
            Step::GiveBack(names) => {
                for name in names {
                    self.client.detach_volume(name, &DetachVolume::default()).await?;
                }
            }
            Step::Follow(_) | Step::MoveDisks { .. } | Step::MoveDomain { .. } | Step::Done => {}
        }
        Ok(())
    }

    /// Attaches volumes, after a look whether all disks could follow the memory.
    async fn attach(&mut self, names: &[String], seen: &Seen) -> Result<(), CommandError> {
        let all: Vec<String> = seen.volumes.iter().map(|(name, _)| name.clone()).collect();
        let request = request_of(&self.order.to, &self.order.pace, &all, false);
        let plan = self.client.plan_migration(&all[0], &request).await?;
        if let Some(refusal) = plan.refusals.first().filter(|_| !plan.can_begin) {
            let (domain, refusal) = (self.domain.name.clone(), refusal.message.clone());
            return Err(LibvirtError::DisksStay { domain, refusal }.into());
        }
        for name in names {
            let order = AttachVolume { host: self.domain.host.clone(), read_only: false };
            if let Err(error) = self.client.attach_volume(name, &order).await {
                self.detach().await;
                return Err(error.into());
            }
            self.attached.push(name.clone());
        }
        Ok(())
    }

    /// Ends the forwarding of a volume. It may end by itself, and its last client may still be counted.
    async fn forget(&self, name: &str) -> Result<(), ClientError> {
        let until = Instant::now() + CLIENTS_GONE_MAX;
        loop {
            // **N.B.** The volume may have come back meanwhile: only the daemon can tell, at the moment at which it removes it.
            let how = RemoveVolume { only_forwarding: true, ..RemoveVolume::default() };
            match self.client.remove_volume(name, how).await {
                Ok(_) => return Ok(()),
                Err(error) if error.code() == Some(ErrorCode::VolumeNotFound) => return Ok(()),
                Err(error) if is_still_used(&error) && Instant::now() < until => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(ASKED_EVERY).await;
        }
    }

    /// Waits for the end of the disks' migration.
    async fn see_through(&mut self, migration: Migration) -> Result<Option<Exit>, CommandError> {
        let mut display = Display::for_people(self.format);
        let waited = migrate::wait(self.client, migration, &mut self.interrupt, &mut display).await;
        display.close();
        let waited = waited?;
        let Some(ended) = waited.ended else { return Ok(Some(Exit::Interrupted)) };
        if ended.state == MigrationState::Moved && waited.was_interrupted {
            output::say("the disks had moved already");
            return Ok(Some(stopped()));
        }
        if ended.state == MigrationState::Moved {
            return Ok(None);
        }
        output::print(self.format, &ended, output::ended)?;
        Ok(Some(Exit::of_migration(&ended)))
    }

    /// Ends what this command has attached. The domain is here.
    async fn detach(&mut self) {
        for name in std::mem::take(&mut self.attached) {
            let host = Some(self.domain.host.clone());
            let order = DetachVolume { host, force: false };
            if let Err(error) = self.client.detach_volume(&name, &order).await {
                output::say(&format!("volume {name} is still attached: {}", output::with_causes(&error)));
            }
        }
    }

    /// Says where the disks of a domain are that has not moved, and what a user can do.
    async fn standing(&self, seen: &Seen) -> String {
        let is_gone = |place: &Place| matches!(place, Place::Forwarded | Place::Borrowed);
        let gone: Vec<_> =
            seen.volumes.iter().filter(|(_, place)| is_gone(place)).map(|(name, _)| name.as_str()).collect();
        if gone.is_empty() {
            return "It is here as before; to go on, give the same order again".to_owned();
        }
        let own =
            self.client.identity().await.map_or_else(|_| "THIS-HOST".to_owned(), |identity| identity.name);
        format!(
            "It is here, and uses {} at {host} over the link. To go on, give the same order again; or bring the disks back, at {host}: \
             sterna migrate volume:{} --to {own}",
            gone.join(", "),
            gone.join(" "),
            host = self.domain.host,
        )
    }
}

/// Returns whether a volume has clients that are about to leave, or its migration is about to end.
fn is_still_used(error: &ClientError) -> bool {
    matches!(error.code(), Some(ErrorCode::VolumeInUse | ErrorCode::VolumeBusy))
}

/// Says how to go on after Ctrl-C between two steps.
fn stopped() -> Exit {
    output::say("stopped between two steps; to go on, give the same order again");
    Exit::Interrupted
}
