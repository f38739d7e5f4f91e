//! One trip of the volume from one host to the other, through its bad luck, and what must be true afterwards.
//!
//! Only this thread does anything to the hosts, so a daemon that ends was killed here, or has killed itself where it was
//! told to; any other end is a failure.

use std::fmt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::{Migration, MigrationState, Volume, VolumeState};
use lab::nbd_client::{Address, Client, ClientOptions};
use lab::workload::{self, Content};

use super::plan::{Act, Plan, Role};
use crate::pair::Pair;
use crate::program::Running;
use crate::scene::Scene;
use crate::wait::until;

/// How long a trip may take from its last mishap on: longer than everything in the product that waits for another host.
const SETTLES_MAX: Duration = Duration::from_secs(180);
/// Time between two looks: each is a process or two.
const LOOK: Duration = Duration::from_millis(40);
/// How a daemon ends that is killed, or kills itself.
const KILLED: i32 = 137;

/// What one trip was like.
#[derive(Debug)]
pub struct Trip {
    /// Its number, from 1 on.
    pub number: u32,
    /// Where it led.
    pub to: &'static str,
    /// How long it took until the volume was there.
    pub took: Duration,
    /// How many migrations were begun for it.
    pub migrations: u32,
    /// What happened, in order.
    pub course: Vec<String>,
}

/// A trip that is being made.
pub(super) struct Journey<'a> {
    pub(super) pair: &'a mut Pair,
    pub(super) home: Home,
    /// Whether the first host goes on serving the volume when it is away.
    pub(super) serving: Serving,
    began: Instant,
    migrating: Option<Running>,
    migrations: u32,
    course: Vec<String>,
}

/// Which host the volume is at when a trip begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Alpha,
    Beta,
}

/// Where clients find the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Serving {
    /// At its owner; those that stay connected elsewhere are served from there.
    Owner,
    /// Always at the first host.
    Alpha,
}

impl<'a> Journey<'a> {
    pub(super) fn new(pair: &'a mut Pair, home: Home, serving: Serving) -> Self {
        let began = Instant::now();
        Self { pair, home, serving, began, migrating: None, migrations: 0, course: Vec::new() }
    }

    /// Makes the trip.
    pub(super) fn make(&mut self, plan: &Plan) -> anyhow::Result<()> {
        self.note(plan.bandwidth.as_deref().map_or("as fast as it goes".to_owned(), ToOwned::to_owned));
        self.migrate(plan.bandwidth.as_deref())?;
        for (at, act) in &plan.acts {
            while self.began.elapsed() < *at {
                self.revive()?;
                sleep(LOOK.min(at.saturating_sub(self.began.elapsed())));
            }
            self.carry_out(*act)?;
        }
        self.settle()
    }

    /// What is to be told of it.
    pub(super) fn told(self, number: u32) -> Trip {
        let to = match self.home {
            Home::Alpha => "beta",
            Home::Beta => "alpha",
        };
        let Self { began, migrations, course, .. } = self;
        Trip { number, to, took: began.elapsed(), migrations, course }
    }

    pub(super) fn host(&mut self, role: Role) -> &mut Scene {
        match (self.home, role) {
            (Home::Alpha, Role::Source) | (Home::Beta, Role::Target) => &mut self.pair.alpha,
            (Home::Alpha, Role::Target) | (Home::Beta, Role::Source) => &mut self.pair.beta,
        }
    }

    fn note(&mut self, what: impl fmt::Display) {
        self.course.push(format!("{:.2} {what}", self.began.elapsed().as_secs_f64()));
    }

    fn migrate(&mut self, bandwidth: Option<&str>) -> anyhow::Result<()> {
        let to = match self.home {
            Home::Alpha => "beta:a",
            Home::Beta => "alpha:a",
        };
        let mut arguments = vec!["migrate", "v", "--to", to, "--detach", "--json"];
        if (self.home, self.serving) == (Home::Alpha, Serving::Alpha) {
            arguments.push("--serve-here");
        }
        arguments.extend(bandwidth.map(|rate| ["--bandwidth", rate]).into_iter().flatten());
        self.migrations += 1;
        self.migrating = Some(self.host(Role::Source).command(arguments)?.start()?);
        Ok(())
    }

    fn carry_out(&mut self, act: Act) -> anyhow::Result<()> {
        self.note(act);
        match act {
            Act::Link(state) => self.pair.wire.set(state),
            Act::Kill(role) => {
                self.revive()?;
                // An earlier mishap may have it killed already.
                if self.host(role).runs() {
                    self.host(role).kill()?;
                }
            }
            Act::Start(role, fail_point) => self.start(role, fail_point)?,
            Act::Pause => self.of_running(Role::Source, "pause")?,
            Act::Resume => self.of_running(Role::Source, "resume")?,
            Act::Cancel(role) => self.of_running(role, "cancel")?,
        }
        Ok(())
    }

    /// Starts a daemon; one that kills itself before it answers is started once more.
    fn start(&mut self, role: Role, fail_point: Option<&'static str>) -> anyhow::Result<()> {
        let environment = fail_point.map(|step| ("STERNA_FAIL_POINT", step));
        // It may have been killed twice, and started in between.
        if self.host(role).runs() {
            return Ok(());
        }
        if self.host(role).start_with(environment.as_slice()).is_err() {
            self.revive()?;
        }
        Ok(())
    }

    /// Starts daemons that have killed themselves.
    fn revive(&mut self) -> anyhow::Result<()> {
        for role in [Role::Source, Role::Target] {
            if !self.host(role).runs() {
                continue;
            }
            if let Some(code) = self.host(role).take_end()? {
                ensure!(code == KILLED, "the daemon of the {role} ended by itself, with {code}");
                self.note(format!("{role} killed itself"));
                self.host(role).start()?;
            }
        }
        Ok(())
    }

    /// Has something done to the migration that is under way, if there is one, and if it is not too late for that.
    fn of_running(&mut self, role: Role, what: &str) -> anyhow::Result<()> {
        if let Some(running) = migrations(self.host(role)).into_iter().flatten().find(is_running) {
            let outcome = self.host(role).sterna(["migration", what, &running.id])?;
            if outcome.code != 0 {
                self.note(format!("{what}: {}{}", outcome.stdout.trim(), outcome.stderr.trim()));
            }
        }
        Ok(())
    }

    /// Waits until the volume is at the target and nothing is under way; migrations that have ended otherwise are begun
    /// again.
    fn settle(&mut self) -> anyhow::Result<()> {
        let give_up_at = Instant::now() + SETTLES_MAX;
        loop {
            self.revive()?;
            if self.has_begun()? && self.is_quiet() {
                if self.is_served_by(Role::Target) {
                    return Ok(());
                }
                if self.is_served_by(Role::Source) {
                    self.migrate(None)?;
                }
            }
            if Instant::now() >= give_up_at {
                let states = [Role::Source, Role::Target].map(|role| describe(self.host(role)));
                bail!("the volume has not arrived after {} s: {states:#?}", SETTLES_MAX.as_secs());
            }
            sleep(LOOK);
        }
    }

    /// Whether the command that asks for the migration has ended; what it said if it failed is noted.
    fn has_begun(&mut self) -> anyhow::Result<bool> {
        let Some(mut migrating) = self.migrating.take() else { return Ok(true) };
        if migrating.is_running()? {
            self.migrating = Some(migrating);
            return Ok(false);
        }
        let outcome = migrating.wait()?;
        if outcome.code != 0 {
            self.note(format!("not begun: {}{}", outcome.stdout.trim(), outcome.stderr.trim()));
        }
        Ok(true)
    }

    /// Whether both hosts answer, and no migration is under way at either. How one ended is noted when it is not by the
    /// volume's arrival.
    fn is_quiet(&mut self) -> bool {
        let mut all = Vec::new();
        for role in [Role::Source, Role::Target] {
            let Some(known) = migrations(self.host(role)) else { return false };
            all.extend(known.into_iter().map(|migration| (role, migration)));
        }
        if all.iter().any(|(_, migration)| is_running(migration)) {
            return false;
        }
        let last = all.iter().filter(|(role, _)| *role == Role::Source).map(|(_, migration)| migration);
        let last = last.max_by_key(|migration| migration.started_unix_ms);
        if let Some(last) = last.filter(|last| last.state != MigrationState::Moved) {
            let ended = format!("{} {:?}: {}", last.id, last.state, last.message.clone().unwrap_or_default());
            if !self.course.iter().any(|line| line.ends_with(&ended)) {
                self.note(ended);
            }
        }
        true
    }

    fn is_served_by(&mut self, role: Role) -> bool {
        self.host(role).volume().is_ok_and(|volume| volume.state == VolumeState::Serving)
    }

    /// Checks what must be true when a trip is over and the guest rests: one owner, its content, nothing left over.
    pub(super) fn check(&mut self, generation: u64, content: &Content) -> anyhow::Result<u64> {
        let owner = self.host(Role::Target).volume()?;
        ensure!(
            owner.generation > generation,
            "it changed hands, and its generation did not grow: {owner:?}"
        );
        let images = self.host(Role::Target).images("a")?;
        ensure!(images == ["v.img"], "its new host has {images:?}");
        until("the old host's image is gone", || {
            Ok(self.host(Role::Source).images("a")?.is_empty().then_some(()))
        })?;
        for role in [Role::Source, Role::Target] {
            let images = self.host(role).images("b")?;
            ensure!(images.is_empty(), "the {role} has {images:?} in a store that has nothing to do with it");
        }
        until("nothing is left at the old host but the way to the new one", || {
            let left: Option<Volume> = self.host(Role::Source).volume().ok();
            Ok(left.is_none_or(|left| left.state == VolumeState::Forwarding).then_some(()))
        })?;
        let address: Address = owner.uri.parse()?;
        let mut client =
            Client::connect(&address, ClientOptions::default()).context("connect to the owner")?;
        let findings = workload::verify_export(&mut client, content, |_| {})?;
        let first: Vec<String> = findings.first().iter().map(ToString::to_string).collect();
        ensure!(findings.is_empty(), "at its owner, {} wrong: {first:#?}", findings.count());
        Ok(owner.generation)
    }
}

/// The migrations that a host knows; `None`: it does not answer.
fn migrations(scene: &Scene) -> Option<Vec<Migration>> {
    scene.ask(&["migration", "list"]).ok()
}

fn is_running(migration: &Migration) -> bool {
    !migration.state.has_ended()
}

/// What a host says of the volume and its migrations, for people.
fn describe(scene: &Scene) -> String {
    let running: Vec<Migration> = migrations(scene).into_iter().flatten().filter(is_running).collect();
    format!("{:?} {running:?}", scene.volume())
}

impl fmt::Display for Trip {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, to, took, migrations, course } = self;
        let took = took.as_secs_f64();
        write!(formatter, "trip {number} to {to}: {took:.2} s, {migrations} begun | {}", course.join(" | "))
    }
}
