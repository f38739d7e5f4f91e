//! Restores journals at random moments, and promotes copies by force, among three hosts. Lists of hosts are lost, and hosts are
//! silent, removed or restored themselves, all from a seed.
//!
//! ```text
//!   return:     a volume goes from host to host, and is written at each ─► a journal of some moment is restored at one of them
//!               ─► the hosts decide ─► the administrator decides the rest ─► checked
//!   promotion:  a source is killed before or after it has released ─► its copy is promoted by force ─► the source comes back ─► checked
//!   checked:    at most one host serves the volume, with the last write │ no image is gone (by inode)
//! ```
//! A return never uses force, so two owners are always wrong there. A promotion by force may leave two copies of a volume.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use api::{Volume, VolumeState};
use lab::workload::random::Random;
use testbed::nbd_client::{Address, Client, ClientOptions, Operation, WriteDurability};
use testbed::{Host, Outcome, until};

use crate::trio::{NAMES, three_hosts};

const DISK_BYTES: usize = 1 << 20;
/// Bytes of the stamp, which has the number of the write.
const STAMP_BYTES: usize = 4096;
/// Time for the hosts to ask each other twice.
const SETTLED: Duration = Duration::from_secs(4);
/// Longest wait for a connection.
const PATIENCE: Duration = Duration::from_secs(30);

/// The results of the rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Rounds after which the volume was served, by itself or by order.
    pub served: u32,
    /// Rounds after which no host serves the volume, because its owner is unknown or its image is missing.
    pub waits: u32,
    /// Number of refused orders.
    pub refused: u32,
}

/// Restores `rounds` journals, and reports each to `told`.
///
/// # Errors
/// If two hosts serve the volume, or without the last write, or an image is gone.
pub fn play_returns(seed: u64, rounds: u32, told: impl FnMut(&str)) -> anyhow::Result<Shown> {
    play(seed, rounds, Round::play_return, told)
}

/// Promotes `rounds` copies by force, and reports each to `told`.
///
/// # Errors
/// Those of [`play_returns`].
pub fn play_promotions(seed: u64, rounds: u32, told: impl FnMut(&str)) -> anyhow::Result<Shown> {
    play(seed, rounds, Round::play_promotion, told)
}

fn play(
    seed: u64,
    rounds: u32,
    round: fn(&mut Round) -> anyhow::Result<()>,
    mut told: impl FnMut(&str),
) -> anyhow::Result<Shown> {
    let mut shown = Shown::default();
    for number in 0..u64::from(rounds) {
        let mut scene = Round::begin(seed.wrapping_mul(1000).wrapping_add(number))?;
        let played = round(&mut scene);
        let course = scene.course.join("; ");
        told(&format!("round {number}: {course}"));
        if let Err(error) = played {
            let error = error.context(format!("seed {seed}, round {number}: {course}"));
            return Err(scene.hosts.iter().fold(error, |error, host| host.with_log(error)));
        }
        shown.served += scene.shown.served;
        shown.waits += scene.shown.waits;
        shown.refused += scene.shown.refused;
    }
    Ok(shown)
}

/// One volume among three hosts.
struct Round {
    hosts: Vec<Host>,
    random: Random,
    owner: usize,
    /// Number of its writes.
    written: u8,
    course: Vec<String>,
    shown: Shown,
}

/// The list of hosts at the host whose journal is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListFate {
    Kept,
    Lost,
    Broken,
    /// A list from before all hosts were paired.
    OfBefore,
    FolderLost,
}

impl Round {
    fn begin(seed: u64) -> anyhow::Result<Self> {
        let mut random = Random::new(seed);
        let owner = random.below(3) as usize;
        let hosts = Vec::from(three_hosts()?);
        let format = if random.below(2) == 0 { "raw" } else { "qcow2" };
        let size = DISK_BYTES.to_string();
        hosts[owner]
            .sterna(["volume", "create", "v", "--store", "a", "--size", &size, "--format", format])?
            .success()?;
        let mut round =
            Self { hosts, random, owner, written: 0, course: Vec::new(), shown: Shown::default() };
        round.write()?;
        Ok(round)
    }

    fn say(&mut self, what: String) {
        self.course.push(what);
    }

    fn write(&mut self) -> anyhow::Result<()> {
        self.written += 1;
        let data = vec![self.written; STAMP_BYTES];
        let mut client = client(&self.hosts[self.owner])?;
        client.perform(Operation::Write { offset: 0, data, durability: WriteDurability::Durable })?;
        Ok(())
    }

    /// Moves the volume to another host, or another store, and writes to it there.
    fn go(&mut self) -> anyhow::Result<()> {
        let to = (self.owner + self.random.below(3) as usize) % 3;
        let store = if self.random.below(2) == 0 { "a" } else { "b" };
        let target = format!("{}:{store}", NAMES[to]);
        let mut order = vec!["migrate", "v", "--to", if to == self.owner { store } else { &target }];
        if to != self.owner && self.random.below(2) == 0 {
            order.push("--serve-here");
        }
        if self.random.below(3) == 0 {
            order.push("--keep-source");
        }
        let done = self.hosts[self.owner].sterna(&order)?;
        self.course.push(format!("to {target}: {}", done.code));
        if done.code == 0 {
            self.owner = to;
        }
        self.write()
    }

    fn play_return(&mut self) -> anyhow::Result<()> {
        let host = self.random.below(3) as usize;
        for _ in 0..self.random.below(2) {
            self.go()?;
        }
        let backup = self.export(host)?;
        let saved = self.hosts[host].path("saved-hosts.json");
        for _ in 0..self.random.below(3) {
            self.go()?;
        }
        // A removed host may have the volume or not.
        let removed = (self.random.below(4) == 0).then(|| (host + 1 + self.random.below(2) as usize) % 3);
        if let Some(removed) = removed {
            let done = self.hosts[host].sterna(["host", "remove", NAMES[removed], "--force"])?;
            self.say(format!("{} removes {}: {}", NAMES[host], NAMES[removed], done.code));
        }
        let silent = (self.random.below(3) == 0).then(|| (host + 1 + self.random.below(2) as usize) % 3);
        if let Some(silent) = silent {
            self.say(format!("{} is silent", NAMES[silent]));
            self.hosts[silent].stop()?;
        }
        self.put_back(host, &backup, &saved)?;
        let before = self.images()?;
        self.hosts[host].start()?;
        sleep(SETTLED);
        self.check(&before)?;
        self.people_say(host, removed.is_none() && silent.is_none())?;
        self.check(&before)?;
        if let Some(silent) = silent {
            self.hosts[silent].start()?;
            sleep(SETTLED);
            self.check(&before)?;
        }
        self.count();
        Ok(())
    }

    fn export(&mut self, host: usize) -> anyhow::Result<String> {
        let data = self.hosts[host].folder().data();
        let export =
            self.hosts[host].sterna([Path::new("journal"), Path::new("export"), &data])?.success()?;
        let path = self.hosts[host].path("journal.json");
        std::fs::write(&path, export)?;
        std::fs::copy(data.join("hosts.json"), self.hosts[host].path("saved-hosts.json"))?;
        self.say(format!("journal of {} exported", NAMES[host]));
        Ok(path.display().to_string())
    }

    fn put_back(&mut self, host: usize, backup: &str, saved: &Path) -> anyhow::Result<()> {
        let fates =
            [ListFate::Kept, ListFate::Lost, ListFate::Broken, ListFate::OfBefore, ListFate::FolderLost];
        let fate = fates[self.random.below(fates.len() as u64) as usize];
        let here = &mut self.hosts[host];
        if self.random.below(2) == 0 {
            here.stop()?;
        } else {
            here.kill()?;
        }
        let data = here.folder().data();
        match fate {
            ListFate::Kept => {}
            ListFate::Lost => std::fs::remove_file(data.join("hosts.json"))?,
            ListFate::Broken => std::fs::write(data.join("hosts.json"), "{")?,
            ListFate::OfBefore => drop(std::fs::copy(saved, data.join("hosts.json"))?),
            ListFate::FolderLost => {
                std::fs::remove_dir_all(&data)?;
                std::fs::create_dir(&data)?;
            }
        }
        let data = data.display().to_string();
        here.sterna(["journal", "restore", backup, "--replace", "--data-dir", &data])?.success()?;
        self.say(format!("put back at {}, its list is {fate:?}", NAMES[host]));
        Ok(())
    }

    /// The administrator decides: the volume is here, if that is true; or, if all hosts could be asked, wrongly that
    /// no other host has it.
    fn people_say(&mut self, host: usize, all_are_there: bool) -> anyhow::Result<()> {
        let shown = self.hosts[host].sterna(["volume", "show", "v", "--json"])?;
        let waits = shown.code == 0 && shown.json::<Volume>()?.state == VolumeState::Unconfirmed;
        if !waits || (host != self.owner && !all_are_there) {
            return Ok(());
        }
        let message = shown.json::<Volume>()?.message.unwrap_or_default();
        let is_asked = !message.contains("list of hosts");
        if host != self.owner && !is_asked {
            return Ok(());
        }
        let ordered: Outcome = self.hosts[host].sterna(["volume", "promote", "v", "--restored"])?;
        self.say(format!("promote --restored: {}", ordered.code));
        self.shown.refused += u32::from(ordered.code != 0);
        ensure!(
            host == self.owner || ordered.code != 0,
            "a volume of another host is taken, and all were asked: {message}"
        );
        Ok(())
    }

    fn play_promotion(&mut self) -> anyhow::Result<()> {
        let source = self.owner;
        let to = (source + 1 + self.random.below(2) as usize) % 3;
        let points = ["before-prepared", "after-prepared", "before-released", "after-released"];
        let point = points[self.random.below(points.len() as u64) as usize];
        // The step is one of the target or of the source, whose daemon kills itself there.
        let killed = if point.ends_with("prepared") && self.random.below(2) == 0 { to } else { source };
        let other = (0..3).find(|host| *host != source && *host != to).context("there are three")?;
        self.hosts[killed].stop()?;
        self.hosts[killed].start_with(&[("STERNA_FAIL_POINT", point)])?;
        drop(client(&self.hosts[source])?);
        until("the hosts are connected", || {
            let listed = self.hosts[source].sterna(["host", "show", NAMES[to], "--json"])?;
            Ok(listed.stdout.contains("\"connected\": true").then_some(()))
        })?;
        let target = format!("{}:b", NAMES[to]);
        drop(self.hosts[source].sterna(["migrate", "v", "--to", &target, "--detach"])?);
        self.say(format!("{} to {}, {} is killed {point}", NAMES[source], NAMES[to], NAMES[killed]));
        sleep(SETTLED / 2);
        // The fail point has ended one daemon, at either host.
        for host in [source, to] {
            self.hosts[host].take_end()?;
        }
        let is_silent = self.random.below(2) == 0;
        for host in [source, other] {
            if (host == source || is_silent) && self.hosts[host].runs() {
                self.hosts[host].kill()?;
            }
        }
        if !self.hosts[to].runs() {
            self.hosts[to].start()?;
            sleep(SETTLED / 2);
        }
        let before = self.images()?;
        let ordered = self.hosts[to].sterna(["volume", "promote", "v", "--force"])?;
        self.say(format!("promote --force: {}", ordered.code));
        self.shown.refused += u32::from(ordered.code != 0);
        let is_taken = ordered.code == 0;
        for host in [source, other] {
            if !self.hosts[host].runs() {
                self.hosts[host].start()?;
            }
        }
        sleep(SETTLED);
        let serving = self.serving()?;
        self.say(format!("served at {serving:?}"));
        // After a promotion by force there may be two.
        ensure!(
            serving.len() <= 1 || is_taken,
            "two hosts serve the volume, and nobody insisted: {serving:?}"
        );
        for host in &serving {
            self.check_content(*host)?;
        }
        ensure!(!serving.is_empty() || !is_taken, "a volume that was promoted is served nowhere");
        if is_taken {
            // The images of the promotion and of the source exist. Only images that a move retires were deleted.
            let gone: Vec<_> = before.difference(&self.images()?).cloned().collect();
            let is_retired = |image: &(u64, String)| image.1.starts_with(NAMES[source]) && serving == [to];
            ensure!(gone.iter().all(is_retired), "images are gone: {gone:?}");
        }
        self.count();
        Ok(())
    }

    fn count(&mut self) {
        match self.serving().is_ok_and(|serving| !serving.is_empty()) {
            true => self.shown.served += 1,
            false => self.shown.waits += 1,
        }
    }

    fn serving(&self) -> anyhow::Result<Vec<usize>> {
        let mut serving = Vec::new();
        for (number, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.runs()) {
            let shown = host.sterna(["volume", "show", "v", "--json"])?;
            if shown.code == 0 && shown.json::<Volume>()?.state == VolumeState::Serving {
                serving.push(number);
            }
        }
        Ok(serving)
    }

    fn check(&mut self, before: &BTreeSet<(u64, String)>) -> anyhow::Result<()> {
        let serving = self.serving()?;
        self.say(format!("served at {serving:?}"));
        ensure!(serving.len() <= 1, "two hosts serve the volume: {serving:?}");
        for host in serving {
            self.check_content(host)?;
        }
        let gone: Vec<_> = before.difference(&self.images()?).cloned().collect();
        ensure!(gone.is_empty(), "images are gone: {gone:?}");
        Ok(())
    }

    fn check_content(&self, host: usize) -> anyhow::Result<()> {
        let read = client(&self.hosts[host])?
            .perform(Operation::Read { offset: 0, buffer: vec![0; STAMP_BYTES] })?;
        let Operation::Read { buffer, .. } = read else { return Ok(()) };
        let found = buffer.first().copied().unwrap_or(0);
        ensure!(found == self.written, "{} serves write {found} of {}", NAMES[host], self.written);
        Ok(())
    }

    /// Returns all images of all hosts, by inode and host.
    fn images(&self) -> anyhow::Result<BTreeSet<(u64, String)>> {
        let mut images = BTreeSet::new();
        for (host, name) in self.hosts.iter().zip(NAMES) {
            for store in host.folder().stores() {
                for entry in std::fs::read_dir(host.path(store))? {
                    let (entry, path) = entry.map(|entry| (entry.metadata(), entry.path()))?;
                    let file = path.file_name().unwrap_or_default().to_string_lossy();
                    // Locks, marks and tokens do not count.
                    if file.starts_with("v.") && !file.contains("sterna-") {
                        images.insert((entry?.ino(), format!("{name} {store}")));
                    }
                }
            }
        }
        Ok(images)
    }
}

fn client(host: &Host) -> anyhow::Result<Client> {
    let volume: Volume = until("the volume is served", || {
        let volume: Volume = host.ask(&["volume", "show", "v"])?;
        Ok((volume.state == VolumeState::Serving).then_some(volume))
    })?;
    let here: Address = volume.uri.parse()?;
    let options =
        ClientOptions { reconnect_deadline: PATIENCE, answer_deadline: PATIENCE, ..ClientOptions::default() };
    Ok(Client::connect(&here, options)?)
}
