//! Round trips of a volume between two hosts, with a busy guest and bad luck from a seed.
//!
//! ```text
//!   trip:  migrate ──► mishaps, each mended ──► the volume is at the other host ──► the guest rests: checks ──► …
//!   guest: ───── works, connects again whenever its daemon was killed ─────────────► compares its whole disk
//! ```
//! With an even seed the volume is found at its owner, and the guest looks for it at either host; with an odd one the
//! first host serves it for good, and the guest knows no other.

mod plan;
mod trip;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use lab::nbd_client::{Address, Client, ClientOptions};
use lab::workload::random::Random;
use lab::workload::{self, Content, Guest, GuestOptions, StoppedGuest};

use self::plan::Plan;
use self::trip::{Home, Journey, Serving};
use crate::guest::BLOCK_BYTES;
use crate::pair::Pair;

pub use self::trip::Trip;

/// How long the guest tries for a new connection, and waits for an answer: longer than any mishap, and all that follows
/// from it.
const GUEST_WAITS_MAX: Duration = Duration::from_secs(200);

/// What is played.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many times there and back.
    pub rounds: u32,
    /// Decides the mishaps.
    pub seed: u64,
    /// Size of the disk in bytes; half of it is filled.
    pub disk_bytes: u64,
    /// Where the daemons' logs are kept if something is wrong; nowhere: the end of them is in the error.
    pub logs: Option<PathBuf>,
}

/// Makes the trips; `told` hears of each that has been made.
///
/// # Errors
/// If anything was wrong: with the seed, the trip, and the daemons' logs.
pub fn play_rounds(settings: &Settings, mut told: impl FnMut(&Trip)) -> anyhow::Result<()> {
    let mut pair = Pair::new()?;
    let played = Play::begin(&pair, settings).and_then(|mut play| {
        let mut random = Random::new(settings.seed);
        for number in 1..=settings.rounds * 2 {
            let home = if number % 2 == 1 { Home::Alpha } else { Home::Beta };
            let plan = Plan::draw(&mut random);
            let mut journey = Journey::new(&mut pair, home, play.serving);
            let made = journey.make(&plan).and_then(|()| play.rest_and_check(&mut journey));
            let trip = journey.told(number);
            made.with_context(|| format!("{trip}\nof {plan:?}"))?;
            told(&trip);
        }
        Ok(())
    });
    played.map_err(|error| {
        if let Some(folder) = &settings.logs {
            // That they cannot be kept is no reason to hide what they were to be kept for.
            let _ = keep_logs(&pair, folder);
        }
        let Settings { rounds, seed, .. } = settings;
        let error =
            error.context(format!("cargo run -p e2e --bin rounds -- --rounds {rounds} --seed {seed}"));
        pair.alpha.with_log(&pair.beta.with_log(&error))
    })
}

/// The guest, and what is known of its disk.
struct Play {
    serving: Serving,
    seed: u64,
    guest: Option<Guest>,
    generation: u64,
}

impl Play {
    fn begin(pair: &Pair, settings: &Settings) -> anyhow::Result<Self> {
        pair.alpha.create_volume(settings.disk_bytes)?;
        let serving = if settings.seed.is_multiple_of(2) { Serving::Owner } else { Serving::Alpha };
        let here = pair.alpha.export()?;
        let elsewhere = match serving {
            Serving::Owner => vec![Address::new(pair.beta.path("run/volumes/v.sock"), here.export())],
            Serving::Alpha => Vec::new(),
        };
        let options = ClientOptions {
            reconnect_deadline: GUEST_WAITS_MAX,
            answer_deadline: GUEST_WAITS_MAX,
            elsewhere,
            ..ClientOptions::default()
        };
        let mut client = Client::connect(&here, options)?;
        let mut content = Content::new(settings.disk_bytes, BLOCK_BYTES, settings.seed);
        workload::fill(&mut client, &mut content, settings.disk_bytes / 2, |_| {})?;
        let mut play = Self { serving, seed: settings.seed, guest: None, generation: 0 };
        play.let_work(client, content)?;
        Ok(play)
    }

    fn let_work(&mut self, client: Client, content: Content) -> anyhow::Result<()> {
        let options = GuestOptions { seed: self.seed ^ self.generation, ..GuestOptions::default() };
        self.guest = Some(Guest::start(client, content, options)?);
        Ok(())
    }

    /// Lets the guest come to rest, compares what it knows with what both hosts serve, and lets it go on.
    fn rest_and_check(&mut self, journey: &mut Journey<'_>) -> anyhow::Result<()> {
        let guest = self.guest.take().context("the guest has gone")?;
        let StoppedGuest { mut client, content, mut findings, .. } = guest.stop()?;
        self.generation = journey.check(self.generation, &content)?;
        findings.append(workload::verify_export(&mut client, &content, |_| {})?);
        let first: Vec<String> = findings.first().iter().map(ToString::to_string).collect();
        ensure!(findings.is_empty(), "the guest found {} wrong: {first:#?}", findings.count());
        self.let_work(client, content)
    }
}

fn keep_logs(pair: &Pair, folder: &std::path::Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)?;
    for (scene, name) in [(&pair.alpha, "alpha.log"), (&pair.beta, "beta.log")] {
        fs::write(folder.join(name), scene.log()?)?;
    }
    Ok(())
}
