//! Round trips between two hosts under a busy guest, with faults from a seed.
//!
//! ```text
//!   trip:  faults at rest ──► migrate ──► faults, each ends ──► it is at the other host ──► the guest pauses: checks ──► …
//!   guest: ───── works, reconnects whenever its daemon has ended ─────────────────────────► compares its whole disk
//! ```
//! With an even seed the guest connects to either host, and finds the volume at its owner. With an odd seed the first host serves
//! it for good, and the guest knows no other host. A VM moves as a whole. It checks its reads meanwhile, and its
//! whole disk at the end.

mod fault;
mod foreign;
mod hosts;
mod plan;
mod trip;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use lab::workload::random::Random;
use lab::workload::{self, Content, Guest, GuestOptions, StoppedGuest};
use testbed::nbd_client::{Address, Client, ClientOptions};

use self::foreign::{FOREIGN_BLOCKS, Foreign};
use self::hosts::{Home, Hosts};
use self::plan::Plan;
use self::trip::{Journey, Subject};
use crate::guest::BLOCK_BYTES;
use crate::pair::Pair;
use crate::vm;

pub(crate) use self::fault::FAIL_POINTS;
pub use self::trip::Trip;

/// Longest time for which the guest reconnects, or waits for an answer. It is longer than any fault with its consequences.
const GUEST_WAITS_MAX: Duration = Duration::from_secs(200);
/// Size of the disks of the data folders, which a fault fills, little more than a daemon needs.
const DATA_BYTES: u64 = 48 << 20;
/// Least number of requests of a VM between two trips.
const REQUESTS: u64 = 100;

/// Settings of the rounds.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of round trips.
    pub rounds: u32,
    /// Seed of the faults.
    pub seed: u64,
    /// Size of the disk in bytes; half of it is filled.
    pub disk_bytes: u64,
    /// Folder for the daemons' logs after a failure; `None`: the error has the end of them.
    pub logs: Option<PathBuf>,
}

/// Moves a volume, and reports each trip to `told`.
///
/// # Errors
/// If a check fails; the message has the seed, the trip, and the daemons' logs.
pub fn play_rounds(settings: &Settings, told: impl FnMut(&Trip)) -> anyhow::Result<()> {
    play("rounds", settings, told, |pair| {
        let subject =
            if settings.seed.is_multiple_of(2) { Subject::Volume } else { Subject::VolumeServedByAlpha };
        let guest = DiskGuest::begin(pair, settings, subject)?;
        let foreign = Foreign::writes(&guest.content, settings.seed);
        Ok((subject, guest, foreign))
    })
}

/// Moves a VM with its disk, and reports each trip to `told`.
///
/// # Errors
/// Those of [`play_rounds`].
pub fn play_vm_rounds(settings: &Settings, told: impl FnMut(&Trip)) -> anyhow::Result<()> {
    play("vm-rounds", settings, told, |pair| {
        pair.alpha.create_volume(settings.disk_bytes)?;
        let guest = vm::start(&pair.alpha, settings.disk_bytes / 2)?;
        Ok((Subject::Machine, guest, Foreign::Rewrites))
    })
}

/// The guest that uses the disk.
trait RoundsGuest {
    /// Makes the checks after a trip, and continues to work.
    fn check(&mut self, journey: &mut Journey<'_>) -> anyhow::Result<()>;

    /// Compares the whole disk, which is at alpha, for the last time.
    fn end(self, pair: &Pair) -> anyhow::Result<()>;
}

fn play<G: RoundsGuest>(
    program: &str,
    settings: &Settings,
    mut told: impl FnMut(&Trip),
    begin: impl FnOnce(&Pair) -> anyhow::Result<(Subject, G, Foreign)>,
) -> anyhow::Result<()> {
    let mut pair = Pair::with_data_disks(DATA_BYTES)?;
    let played = begin(&pair).and_then(|(subject, mut guest, mut foreign)| {
        let mut random = Random::new(settings.seed);
        let mut generation = 0;
        for number in 1..=settings.rounds * 2 {
            let home = if number % 2 == 1 { Home::Alpha } else { Home::Beta };
            let plan = Plan::draw(&mut random);
            let mut journey = Journey::new(Hosts::new(&mut pair, home), subject, &mut foreign);
            let made = journey.make(&plan).and_then(|()| {
                generation = journey.check(generation)?;
                guest.check(&mut journey)
            });
            let trip = journey.told(number);
            made.with_context(|| format!("{trip}\nof {plan:?}"))?;
            told(&trip);
        }
        guest.end(&pair)
    });
    played.map_err(|error| {
        if let Some(folder) = &settings.logs {
            // A failure to keep the logs must not hide the original error.
            let _ = keep_logs(&pair, folder);
        }
        let Settings { rounds, seed, disk_bytes, .. } = settings;
        let disk_mib = disk_bytes >> 20;
        let error = error.context(format!(
            "cargo run -p e2e --bin {program} -- --rounds {rounds} --seed {seed} --disk-mib {disk_mib}"
        ));
        pair.alpha.with_log(pair.beta.with_log(error))
    })
}

/// A guest of the lab, which uses the disk except its end, with its knowledge of the disk.
struct DiskGuest {
    seed: u64,
    guest: Option<Guest>,
    /// Content of the disk when the guest last began to work.
    content: Content,
    working_set_bytes: u64,
}

impl DiskGuest {
    fn begin(pair: &Pair, settings: &Settings, subject: Subject) -> anyhow::Result<Self> {
        pair.alpha.create_volume(settings.disk_bytes)?;
        let here = pair.alpha.export()?;
        let elsewhere = match subject {
            Subject::VolumeServedByAlpha => Vec::new(),
            _ => vec![Address::new(pair.beta.path("run/volumes/v.sock"), here.export())],
        };
        let options = ClientOptions {
            reconnect_deadline: GUEST_WAITS_MAX,
            answer_deadline: GUEST_WAITS_MAX,
            elsewhere,
            ..ClientOptions::default()
        };
        let mut client = Client::connect(&here, options)?;
        let mut content = Content::new(settings.disk_bytes, BLOCK_BYTES, settings.seed);
        let working_set_bytes = settings.disk_bytes - FOREIGN_BLOCKS * u64::from(BLOCK_BYTES);
        workload::fill(&mut client, &mut content, settings.disk_bytes / 2, |_| {})?;
        let mut guest = Self { seed: settings.seed, guest: None, content, working_set_bytes };
        guest.let_work(client)?;
        Ok(guest)
    }

    fn let_work(&mut self, client: Client) -> anyhow::Result<()> {
        self.seed = self.seed.wrapping_add(1);
        let options = GuestOptions {
            seed: self.seed,
            working_set_bytes: std::num::NonZeroU64::new(self.working_set_bytes),
            ..GuestOptions::default()
        };
        self.guest = Some(Guest::start(client, self.content.clone(), options)?);
        Ok(())
    }
}

impl RoundsGuest for DiskGuest {
    /// Pauses the guest, compares its knowledge with the volumes of both hosts, and resumes it.
    fn check(&mut self, journey: &mut Journey<'_>) -> anyhow::Result<()> {
        let guest = self.guest.take().context("the guest has gone")?;
        let StoppedGuest { mut client, mut content, mut findings, .. } = guest.stop()?;
        journey.foreign.tell(&mut content);
        journey.compare(&content)?;
        findings.append(workload::verify_export(&mut client, &content, |_| {})?);
        let first: Vec<String> = findings.first().iter().map(ToString::to_string).collect();
        ensure!(findings.is_empty(), "the guest found {} wrong: {first:#?}", findings.count());
        self.content = content;
        self.let_work(client)
    }

    /// Does nothing more, because each trip was compared.
    fn end(mut self, _pair: &Pair) -> anyhow::Result<()> {
        let guest = self.guest.take().context("the guest has gone")?;
        guest.stop().map(drop)
    }
}

impl RoundsGuest for vm::Vm {
    fn check(&mut self, _journey: &mut Journey<'_>) -> anyhow::Result<()> {
        self.work_on(REQUESTS)
    }

    fn end(self, pair: &Pair) -> anyhow::Result<()> {
        let verdict = self.verdict()?;
        vm::verify_image(self.options(), verdict, &pair.alpha.path("a/v.img"))
    }
}

fn keep_logs(pair: &Pair, folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    for (scene, name) in [(&pair.alpha, "alpha.log"), (&pair.beta, "beta.log")] {
        fs::write(folder.join(name), scene.log()?)?;
    }
    Ok(())
}
