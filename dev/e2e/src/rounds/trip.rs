//! Makes one trip from one host to the other with its faults, and checks the result.
//!
//! Only this thread acts on the hosts. So a daemon was ended here, or has killed itself at its fail point. Any
//! other end is a failure.

use std::fmt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::{Migration, MigrationState, Replica, Volume, VolumeState};
use lab::workload::{self, Content};
use testbed::nbd_client::{Address, Client, ClientOptions};
use testbed::{Host, until};

use super::foreign::Foreign;
use super::hosts::{Home, Hosts};
use super::plan::{Act, Leaves, Plan, Role};
use crate::vm;
use testbed::program::Running;

/// Longest time of a trip after its last fault, longer than every wait for another host in the product.
const SETTLES_MAX: Duration = Duration::from_secs(180);
/// Time between two checks, each of which runs one or two processes.
const LOOK: Duration = Duration::from_millis(40);
/// Largest number of kept images at a host, each of the disk's size.
const KEPT_MAX: usize = 3;

/// The record of one trip.
#[derive(Debug)]
pub struct Trip {
    /// Its number, counted from 1.
    pub number: u32,
    /// Name of its target host.
    pub to: &'static str,
    /// Time until the volume was at the target.
    pub took: Duration,
    /// Number of migrations that were begun for it.
    pub migrations: u32,
    /// Its events, in order.
    pub course: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// The volume `v`, which clients find at its owner. Connected clients at the other host are forwarded.
    Volume,
    /// The volume `v`, which the first host serves for good.
    VolumeServedByAlpha,
    /// The VM with the volume `v` as its disk.
    Machine,
}

pub(super) struct Journey<'a> {
    pub(super) hosts: Hosts<'a>,
    subject: Subject,
    pub(super) foreign: &'a mut Foreign,
    began: Instant,
    migrating: Option<Running>,
    migrations: u32,
    leaves: Leaves,
    course: Vec<String>,
}

impl<'a> Journey<'a> {
    pub(super) fn new(hosts: Hosts<'a>, subject: Subject, foreign: &'a mut Foreign) -> Self {
        Self {
            hosts,
            subject,
            foreign,
            began: Instant::now(),
            migrating: None,
            migrations: 0,
            leaves: Leaves::Nothing,
            course: Vec::new(),
        }
    }

    /// Makes the planned trip.
    ///
    /// # Errors
    /// If the volume does not arrive, or a daemon ends by itself.
    pub(super) fn make(&mut self, plan: &Plan) -> anyhow::Result<()> {
        self.play(&plan.at_rest)?;
        self.note(plan.bandwidth.as_deref().map_or("as fast as it goes".to_owned(), ToOwned::to_owned));
        self.leaves = plan.leaves;
        if plan.leaves == Leaves::Replica {
            self.note("a replica is kept");
        }
        self.migrate(plan.bandwidth.as_deref())?;
        self.play(&plan.acts)?;
        self.settle()
    }

    pub(super) fn told(self, number: u32) -> Trip {
        let to = match self.hosts.home {
            Home::Alpha => "beta",
            Home::Beta => "alpha",
        };
        let Self { began, migrations, course, .. } = self;
        Trip { number, to, took: began.elapsed(), migrations, course }
    }

    fn note(&mut self, what: impl fmt::Display) {
        self.course.push(format!("{:.2} {what}", self.began.elapsed().as_secs_f64()));
    }

    /// Carries out acts at their times, counted from now.
    fn play(&mut self, acts: &[(Duration, Act)]) -> anyhow::Result<()> {
        let began = Instant::now();
        for (at, act) in acts {
            while began.elapsed() < *at {
                self.revive()?;
                sleep(LOOK.min(at.saturating_sub(began.elapsed())));
            }
            self.carry_out(*act)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, act: Act) -> anyhow::Result<()> {
        self.note(act);
        let outcome = match act {
            Act::Pause => self.of_running(Role::Source, "pause")?,
            Act::Resume => self.of_running(Role::Source, "resume")?,
            Act::Cancel(role) => self.of_running(role, "cancel")?,
            Act::TouchImage => self.touch_image()?,
            Act::TouchKept => self.touch_kept()?,
            Act::Pair => {
                // A host with a full disk cannot store its permissions.
                for role in [Role::Source, Role::Target] {
                    self.hosts.host(role).free_data()?;
                }
                // Daemons may kill themselves meanwhile.
                until("the hosts are paired again", || {
                    self.revive()?;
                    Ok(self.hosts.pair_again()?.then_some(()))
                })?;
                None
            }
            act => {
                self.revive()?;
                self.hosts.carry_out(act)?
            }
        };
        if let Some(outcome) = outcome {
            self.note(outcome);
        }
        Ok(())
    }

    /// Starts daemons that have killed themselves.
    fn revive(&mut self) -> anyhow::Result<()> {
        for role in self.hosts.revive()? {
            self.note(format!("{role} killed itself"));
        }
        Ok(())
    }

    /// Ends the source's daemon in order. Then another program changes the volume's image, if the
    /// source certainly owns the volume.
    fn touch_image(&mut self) -> anyhow::Result<Option<String>> {
        self.revive()?;
        if let Some(outcome) = self.hosts.carry_out(Act::Stop(Role::Source))? {
            return Ok(Some(outcome));
        }
        if !self.source_owns() {
            return Ok(Some("not touched: the target may be the owner".to_owned()));
        }
        let image = self.hosts.host(Role::Source).path("a/v.img");
        self.foreign.touch_image(&image).map(Some)
    }

    /// Returns whether the ended source owns the volume, because the target is not prepared.
    fn source_owns(&mut self) -> bool {
        if !self.hosts.answers(Role::Target) {
            return false;
        }
        let target = self.hosts.host(Role::Target);
        let is_early = |migration: &Migration| {
            migration.state.has_ended()
                || matches!(migration.phase, api::Phase::Queued | api::Phase::Copying | api::Phase::Memory)
        };
        migrations(target).is_some_and(|all| all.iter().all(is_early)) && !serves(target)
    }

    /// Changes a kept image at the target, which the migration must then not reuse.
    fn touch_kept(&mut self) -> anyhow::Result<Option<String>> {
        let target = self.hosts.host(Role::Target);
        let kept = target.images("a")?.into_iter().rfind(|name| name.starts_with("v.img.moved-"));
        match kept {
            Some(name) => Foreign::touch_kept(&target.path("a").join(name)).map(Some),
            None => Ok(Some("there is none".to_owned())),
        }
    }

    fn migrate(&mut self, bandwidth: Option<&str>) -> anyhow::Result<()> {
        let home = self.hosts.home;
        let to = match home {
            Home::Alpha => "beta:a",
            Home::Beta => "alpha:a",
        };
        let name = if self.subject == Subject::Machine { vm::NAME } else { "v" };
        let mut arguments = vec!["migrate", name, "--to", to, "--detach", "--json"];
        if (home, self.subject) == (Home::Alpha, Subject::VolumeServedByAlpha) {
            arguments.push("--serve-here");
        }
        if self.leaves == Leaves::Replica {
            arguments.push("--keep-source");
        }
        arguments.extend(bandwidth.map(|rate| ["--bandwidth", rate]).into_iter().flatten());
        self.migrations += 1;
        self.migrating = Some(self.hosts.host(Role::Source).command(arguments)?.start()?);
        Ok(())
    }

    /// Runs a command on the migration under way, if there is one and it is not too late.
    fn of_running(&mut self, role: Role, what: &str) -> anyhow::Result<Option<String>> {
        self.revive()?;
        if !self.hosts.answers(role) {
            return Ok(Some("left out: it does not answer".to_owned()));
        }
        let host = self.hosts.host(role);
        let Some(running) = migrations(host).into_iter().flatten().find(is_running) else { return Ok(None) };
        let outcome = host.sterna(["migration", what, &running.id])?;
        Ok((outcome.code != 0).then(|| format!("{what}: {}{}", outcome.stdout.trim(), outcome.stderr.trim())))
    }

    /// Waits until the volume is at the target and no migration is under way. Migrations with another outcome are begun again.
    fn settle(&mut self) -> anyhow::Result<()> {
        let give_up_at = Instant::now() + SETTLES_MAX;
        loop {
            self.revive()?;
            if self.has_begun()? && self.is_quiet()? {
                if self.is_at(Role::Target) {
                    return Ok(());
                }
                if self.is_at(Role::Source) {
                    self.migrate(None)?;
                }
            }
            if Instant::now() >= give_up_at {
                let states = [Role::Source, Role::Target].map(|role| describe(self.hosts.host(role)));
                bail!("it has not arrived after {} s: {states:#?}", SETTLES_MAX.as_secs());
            }
            sleep(LOOK);
        }
    }

    /// Returns whether the command of the migration has ended, and records its error.
    fn has_begun(&mut self) -> anyhow::Result<bool> {
        let Some(mut migrating) = self.migrating.take() else { return Ok(true) };
        if migrating.is_running()? {
            self.migrating = Some(migrating);
            return Ok(false);
        }
        let outcome = migrating.wait()?;
        if outcome.code != 0 {
            self.note_once(format!("not begun: {}{}", outcome.stdout.trim(), outcome.stderr.trim()));
        }
        Ok(true)
    }

    /// Returns whether both hosts answer, and no migration is under way at either. Other outcomes than a move are recorded, and a
    /// failure must have a reason.
    fn is_quiet(&mut self) -> anyhow::Result<bool> {
        let mut all = Vec::new();
        for role in [Role::Source, Role::Target] {
            let Some(known) = migrations(self.hosts.host(role)) else { return Ok(false) };
            all.extend(known.into_iter().map(|migration| (role, migration)));
        }
        if all.iter().any(|(_, migration)| is_running(migration)) {
            return Ok(false);
        }
        let last = all.iter().filter(|(role, _)| *role == Role::Source).map(|(_, migration)| migration);
        let last = last.max_by_key(|migration| migration.started_unix_ms);
        if let Some(last) = last.filter(|last| last.state != MigrationState::Moved) {
            let why = last.message.as_deref().unwrap_or_default();
            ensure!(
                last.state != MigrationState::Failed || !why.is_empty(),
                "it failed without a word: {last:?}"
            );
            self.note_once(format!("{} {:?}: {why}", last.id, last.state));
        }
        Ok(true)
    }

    /// Records an event once, although it may be seen many times.
    fn note_once(&mut self, what: String) {
        if !self.course.iter().any(|line| line.ends_with(&what)) {
            self.note(what);
        }
    }

    fn is_at(&mut self, role: Role) -> bool {
        let host = self.hosts.host(role);
        let runs = || {
            let vms = vm::vms(host).unwrap_or_default();
            matches!(vms.as_slice(), [vm] if vm.state == api::VmState::Running)
        };
        serves(host) && (self.subject != Subject::Machine || runs())
    }

    /// Checks after a trip that there is one owner and nothing left over, and returns the generation.
    pub(super) fn check(&mut self, generation: u64) -> anyhow::Result<u64> {
        let owner = self.hosts.host(Role::Target).volume()?;
        ensure!(
            owner.generation > generation,
            "it changed hands, and its generation did not grow: {owner:?}"
        );
        let is_kept = |name: &String| name.starts_with("v.img.moved-");
        let mut images = self.hosts.host(Role::Target).images("a")?;
        images.retain(|name| !is_kept(name));
        ensure!(images == ["v.img"], "its new host has {images:?}");
        until("the old host's image is gone, or kept", || {
            Ok(self.hosts.host(Role::Source).images("a")?.iter().all(is_kept).then_some(()))
        })?;
        for role in [Role::Source, Role::Target] {
            let images = self.hosts.host(role).images("b")?;
            ensure!(images.is_empty(), "the {role} has {images:?} in a store that has nothing to do with it");
        }
        until("nothing is left at the old host but the way to the new one", || {
            let left: Option<Volume> = self.hosts.host(Role::Source).volume().ok();
            Ok(left.is_none_or(|left| left.state == VolumeState::Forwarding).then_some(()))
        })?;
        if self.subject == Subject::Machine {
            let (source, target) = self.hosts.both();
            vm::check_at(target, source)?;
        }
        for role in [Role::Source, Role::Target] {
            drop_kept(self.hosts.host(role)).with_context(|| format!("at the {role}"))?;
        }
        Ok(owner.generation)
    }

    /// Compares every block of the owner's volume with the expected content, while the guest is paused.
    pub(super) fn compare(&mut self, content: &Content) -> anyhow::Result<()> {
        let address: Address = self.hosts.host(Role::Target).volume()?.uri.parse()?;
        let mut client =
            Client::connect(&address, ClientOptions::default()).context("connect to the owner")?;
        let findings = workload::verify_export(&mut client, content, |_| {})?;
        let first: Vec<String> = findings.first().iter().map(ToString::to_string).collect();
        ensure!(findings.is_empty(), "at its owner, {} wrong: {first:#?}", findings.count());
        Ok(())
    }
}

/// Drops the oldest replicas, as an administrator with a full disk would.
fn drop_kept(scene: &Host) -> anyhow::Result<()> {
    let mut kept: Vec<Replica> = scene.ask(&["replica", "list"])?;
    kept.sort_by_key(|replica| replica.kept_unix_ms);
    let surplus = kept.len().saturating_sub(KEPT_MAX);
    for replica in &kept[..surplus] {
        let drop = ["replica", "drop", "v", "--migration", &replica.migration];
        scene.sterna(drop)?.success()?;
    }
    Ok(())
}

/// Returns the migrations that a host knows; `None` if it does not answer.
fn migrations(scene: &Host) -> Option<Vec<Migration>> {
    scene.ask(&["migration", "list"]).ok()
}

fn is_running(migration: &Migration) -> bool {
    !migration.state.has_ended()
}

fn serves(scene: &Host) -> bool {
    scene.volume().is_ok_and(|volume| volume.state == VolumeState::Serving)
}

/// Returns a host's volume, VMs and migrations as text, for an error.
fn describe(scene: &Host) -> String {
    let running: Vec<Migration> = migrations(scene).into_iter().flatten().filter(is_running).collect();
    format!("{:?} {:?} {running:?}", scene.volume(), vm::vms(scene))
}

impl fmt::Display for Trip {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, to, took, migrations, course } = self;
        let took = took.as_secs_f64();
        write!(formatter, "trip {number} to {to}: {took:.2} s, {migrations} begun | {}", course.join(" | "))
    }
}
