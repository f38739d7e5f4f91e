//! `sterna libvirt migrate`: moves a domain whose disks are volumes to another host, step after step.
//!
//! ```text
//!   look at both libvirts and the daemon (sight.rs) ─► next step (steps.rs) ─► carried out ─► look again … done
//! ```

mod error;
mod sight;
mod steps;
mod virsh;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::{
    AttachVolume, Client, ClientError, DetachVolume, ErrorCode, MigrateVolume, Migration, MigrationState,
    Named, RemoveVolume,
};
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) use self::error::{LibvirtError, Obstacle};
use self::sight::Domain;
use self::steps::{Seen, Step};
use self::virsh::{TextFile, Virsh};
use super::migrate;
use crate::args::{LibvirtCommand, MigrateDomainArguments, PaceArguments};
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, domains};
use crate::progress::Display;

/// Time between two reports of the memory's progress.
const SAID_EVERY: Duration = Duration::from_secs(1);
/// The longest wait for clients that have left.
const CLIENTS_GONE_MAX: Duration = Duration::from_secs(15);
const ASKED_EVERY: Duration = Duration::from_millis(200);

pub(super) async fn run(
    client: &Client,
    command: LibvirtCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    let LibvirtCommand::Migrate(arguments) = command;
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
            let seen = self.domain.look(self.client).await?;
            let step = steps::next(&seen, self.order.memory_first);
            let step = match step {
                Ok(step) => step,
                Err(obstacle) => return Err(self.stay(obstacle).await.into()),
            };
            if step == Step::Done {
                output::print(self.format, &told(&self.domain, &seen, &done, None), domains::moved)?;
                return Ok(Exit::Success);
            }
            let words = words_of(&step, &self.domain.host);
            if done.last() == Some(&step) {
                return Err(LibvirtError::NoProgress { domain: self.domain.name, step: words }.into());
            }
            if self.format == Format::Text {
                output::say(&words);
            }
            if let Some(exit) = self.carry_out(&step).await? {
                return Ok(exit);
            }
            done.push(step);
        }
    }

    /// Carries out a step; returns the exit code of a command that ends with it.
    async fn carry_out(&mut self, step: &Step) -> Result<Option<Exit>, CommandError> {
        match step {
            Step::Follow(id) => {
                let migration = self.client.migration(id, api::Watch::default()).await?;
                return self.see_through(migration).await;
            }
            Step::MoveDisks { volumes, serve_here } => {
                let request = request_of(&self.order.to, &self.order.pace, volumes, *serve_here);
                let migration = self.client.migrate(&volumes[0], &request).await?;
                return self.see_through(migration).await;
            }
            Step::Attach(names) => {
                for name in names {
                    let order = AttachVolume { host: self.domain.host.clone(), read_only: false };
                    self.attached.push(name.clone());
                    if let Err(error) = self.client.attach_volume(name, &order).await {
                        self.detach().await;
                        return Err(error.into());
                    }
                }
            }
            Step::MoveDomain { is_running } => return self.move_domain(*is_running).await,
            Step::Release(vm) => drop(self.client.release_vm(vm).await?),
            Step::Forget(names) => {
                for name in names {
                    self.forget(name).await?;
                }
            }
            Step::Done => {}
        }
        Ok(None)
    }

    /// Ends the forwarding of a volume. It may end by itself, and its last client may still be counted.
    async fn forget(&self, name: &str) -> Result<(), ClientError> {
        let until = Instant::now() + CLIENTS_GONE_MAX;
        loop {
            match self.client.remove_volume(name, RemoveVolume::default()).await {
                Ok(_) => return Ok(()),
                Err(error) if error.code() == Some(ErrorCode::VolumeNotFound) => return Ok(()),
                Err(error) if error.code() == Some(ErrorCode::VolumeInUse) && Instant::now() < until => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(ASKED_EVERY).await;
        }
    }

    /// Waits for the end of the disks' migration.
    async fn see_through(&mut self, migration: Migration) -> Result<Option<Exit>, CommandError> {
        let mut display = Display::for_people(self.format);
        let ended = migrate::wait(self.client, migration, &mut self.interrupt, &mut display).await;
        display.close();
        let Some(ended) = ended? else { return Ok(Some(Exit::Interrupted)) };
        if ended.state == MigrationState::Moved {
            return Ok(None);
        }
        output::print(self.format, &ended, output::ended)?;
        Ok(Some(Exit::of_migration(&ended)))
    }

    /// Lets libvirt move the domain. Whether it has is seen afterwards: virsh may fail in spite of it.
    async fn move_domain(&mut self, is_running: bool) -> Result<Option<Exit>, CommandError> {
        let uuid = self.domain.uuid.clone();
        let is_persistent = self.domain.here.is_persistent(&uuid).await?;
        let files = self.definitions(is_persistent).await?;
        let mut words = vec!["migrate", if is_running { "--live" } else { "--offline" }];
        if is_persistent {
            words.extend(["--persistent", "--undefinesource"]);
        }
        if is_running {
            words.push("--verbose");
        }
        let paths: Vec<_> = files.iter().map(|(option, file)| (*option, file.path())).collect();
        words.extend(paths.iter().flat_map(|(option, path)| [*option, path.as_str()]));
        words.extend(self.order.options.iter().map(String::as_str));
        words.extend(["--domain", &uuid, "--desturi", &self.domain.there.uri]);
        let mut virsh = self.domain.here.begin(&words)?;
        let mut is_aborted = false;
        let succeeded = loop {
            tokio::select! {
                ended = virsh.ended() => break ended.map_err(LibvirtError::NoVirsh)?,
                () = tokio::time::sleep(SAID_EVERY) => {
                    if let Some(percent) = virsh.percent().filter(|_| self.format == Format::Text) {
                        output::say_in_place(&format!("memory: {percent} %"));
                    }
                }
                _ = self.interrupt.recv() => {
                    if std::mem::replace(&mut is_aborted, true) {
                        output::say("libvirt goes on; see: virsh domjobinfo");
                        return Ok(Some(Exit::Interrupted));
                    }
                    output::say("cancelling; press Ctrl-C again to stop waiting");
                    if let Err(error) = self.domain.here.ask(&["domjobabort", &uuid]).await {
                        output::say(&output::with_causes(&error));
                    }
                }
            }
        };
        output::say_in_place("");
        if succeeded {
            self.attached.clear();
            return Ok(None);
        }
        let errors = virsh.errors();
        let seen = self.domain.look(self.client).await?;
        if seen.has_left() {
            output::say(&format!("libvirt reported: {errors}; the domain runs at {}", self.domain.host));
            self.attached.clear();
            return Ok(None);
        }
        if let Err(obstacle @ (Obstacle::RunsTwice | Obstacle::LeftPaused | Obstacle::PausedTwice)) =
            steps::next(&seen, self.order.memory_first)
        {
            output::say(&format!("libvirt reported: {errors}"));
            return Err(self.domain.obstacle(obstacle).into());
        }
        self.detach().await;
        let stands = standing(&seen, &self.domain.host);
        let not_moved = LibvirtError::NotMoved { domain: self.domain.name.clone(), words: errors, stands };
        if is_aborted {
            output::say(&not_moved.to_string());
            return Ok(Some(Exit::Cancelled));
        }
        Err(not_moved.into())
    }

    /// Returns the options of virsh that change the definition, each with its file.
    async fn definitions(&self, is_persistent: bool) -> Result<Vec<(&'static str, TextFile)>, CommandError> {
        let Some(folder) = &self.order.sockets else { return Ok(Vec::new()) };
        let mut files = vec![("--xml", self.definition(&["--migratable"], folder).await?)];
        if is_persistent {
            files.push(("--persistent-xml", self.definition(&["--migratable", "--inactive"], folder).await?));
        }
        Ok(files)
    }

    async fn definition(&self, options: &[&str], folder: &Path) -> Result<TextFile, LibvirtError> {
        let words = [&["dumpxml", self.domain.uuid.as_str()], options].concat();
        let definition = self.domain.here.ask(&words).await?;
        TextFile::of(&self.domain.moved(&definition, folder)?).map_err(LibvirtError::NoVirsh)
    }

    async fn stay(&mut self, obstacle: Obstacle) -> LibvirtError {
        if obstacle == Obstacle::Paused {
            self.detach().await;
        }
        self.domain.obstacle(obstacle)
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
}

/// Says where the disks of a domain are that has not moved, and what a user can do.
fn standing(seen: &Seen, host: &str) -> String {
    let gone: Vec<_> = seen
        .volumes
        .iter()
        .filter(|(_, place)| *place == steps::Place::Forwarded)
        .map(|(name, _)| name.as_str())
        .collect();
    if gone.is_empty() {
        return "It works here as before; give the same order again once that is repaired".to_owned();
    }
    format!(
        "It works here, and uses {} at {host} over the link. Give the same order again once that is repaired; or bring the disks \
         back, at {host}: sterna migrate {}",
        gone.join(", "),
        gone.iter().map(|name| format!("volume:{name}")).collect::<Vec<_>>().join(" ")
    )
}
