//! Two volumes move among three hosts under busy guests, which connect to any host. Daemons are killed, ended and stopped at
//! random steps of the migrations, all from a seed.
//!
//! ```text
//!   step:  a volume begins to move │ a daemon is killed, or ended, and started again │ a daemon is stopped, and continued
//!   every few steps: all migrations end ─► the guests pause ─► each compares its whole disk, also at the owner ─► …
//! ```

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use api::{Migration, Volume, VolumeState};
use lab::workload::random::Random;
use lab::workload::{self, Content, Guest, GuestOptions, StoppedGuest};
use rustix::process::Signal;
use testbed::Host;
use testbed::nbd_client::{Address, Client, ClientOptions};

use crate::guest::BLOCK_BYTES;
use crate::rounds::FAIL_POINTS;
use crate::trio::{NAMES, three_hosts};

/// The volumes. Each begins at the host with its index.
const VOLUMES: [&str; 2] = ["v", "w"];
/// Size of a volume, which moves within a fraction of a second.
const DISK_BYTES: u64 = 16 << 20;
const STEPS_BETWEEN: u32 = 6;
/// Longest time for a guest to reconnect or to get an answer, and for all migrations to end.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time between two checks, each of which runs some processes.
const LOOK: Duration = Duration::from_millis(50);
/// Exit code of a daemon that is killed, or kills itself.
const KILLED: i32 = 137;

/// Plays a tour of `steps` steps, and reports each to `told`.
///
/// # Errors
/// If a check fails; the message has the steps so far, and the daemons' logs.
pub fn play_tour(seed: u64, steps: u32, mut told: impl FnMut(&str)) -> anyhow::Result<()> {
    let mut tour = Tour::begin(seed)?;
    let mut course = String::new();
    let mut random = Random::new(seed);
    for number in 1..=steps {
        let step = Step::draw(&mut random);
        let began = Instant::now();
        let mut done = tour.carry_out(&step);
        if done.is_ok() && (number % STEPS_BETWEEN == 0 || number == steps) {
            done = tour.compare();
        }
        let line = format!("step {number}: {step:?}, {:.2} s", began.elapsed().as_secs_f64());
        told(&line);
        // Writing to a string cannot fail.
        let _ = writeln!(course, "{line}");
        if let Err(error) = done {
            let replay = format!("cargo run -p e2e --bin tour -- --seed {seed} --steps {steps}");
            let error = error.context(format!("{replay}\n{course}"));
            return Err(tour.hosts.iter().fold(error, |error, host| host.with_log(error)));
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A volume begins to move to the other host that `turn` selects.
    Move {
        volume: usize,
        turn: usize,
        serve_here: bool,
        keep_source: bool,
        slowly: bool,
    },
    /// A daemon ends by this signal, and is restarted after a time, perhaps with a fail point.
    End {
        host: usize,
        signal: Signal,
        away: Duration,
        fail_point: Option<&'static str>,
    },
    /// A daemon is stopped, and continued.
    Freeze {
        host: usize,
        length: Duration,
    },
    Wait {
        length: Duration,
    },
}

impl Step {
    fn draw(random: &mut Random) -> Self {
        let mut below = |limit: u64| random.below(limit);
        // The number is below a small limit.
        let host = below(3) as usize;
        match below(12) {
            0..6 => Self::Move {
                volume: below(2) as usize,
                turn: 1 + below(2) as usize,
                serve_here: below(2) == 0,
                keep_source: below(2) == 0,
                slowly: below(2) == 0,
            },
            kind @ 6..9 => Self::End {
                host,
                signal: if kind == 8 { Signal::TERM } else { Signal::KILL },
                away: Duration::from_millis(below(1000)),
                fail_point: (below(2) == 0).then(|| FAIL_POINTS[below(FAIL_POINTS.len() as u64) as usize]),
            },
            9 => Self::Freeze { host, length: Duration::from_millis(500 + below(3500)) },
            _ => Self::Wait { length: Duration::from_millis(below(1500)) },
        }
    }
}

struct Tour {
    hosts: Vec<Host>,
    seed: u64,
    /// The guest of each volume; `None` while its knowledge is compared.
    guests: Vec<Option<Guest>>,
}

impl Tour {
    fn begin(seed: u64) -> anyhow::Result<Self> {
        let hosts = Vec::from(three_hosts()?);
        let mut tour = Self { hosts, seed, guests: Vec::new() };
        for (place, name) in VOLUMES.iter().enumerate() {
            let size = DISK_BYTES.to_string();
            tour.hosts[place]
                .sterna(["volume", "create", name, "--store", "a", "--size", &size])?
                .success()?;
            let volume: Volume = tour.hosts[place].ask(&["volume", "show", name])?;
            let here: Address = volume.uri.parse()?;
            let others = tour.hosts.iter().enumerate().filter(|(number, _)| *number != place);
            let socket = |host: &Host| host.path(&format!("run/volumes/{name}.sock"));
            let elsewhere = others.map(|(_, host)| Address::new(socket(host), here.export())).collect();
            let options = ClientOptions {
                reconnect_deadline: PATIENCE,
                answer_deadline: PATIENCE,
                elsewhere,
                ..ClientOptions::default()
            };
            let client = Client::connect(&here, options)?;
            let content = Content::new(DISK_BYTES, BLOCK_BYTES, seed);
            tour.guests.push(None);
            tour.let_work(place, client, content)?;
        }
        Ok(tour)
    }

    fn let_work(&mut self, volume: usize, client: Client, content: Content) -> anyhow::Result<()> {
        self.seed = self.seed.wrapping_add(1);
        let options = GuestOptions { seed: self.seed, ..GuestOptions::default() };
        self.guests[volume] = Some(Guest::start(client, content, options)?);
        Ok(())
    }

    fn carry_out(&mut self, step: &Step) -> anyhow::Result<()> {
        self.revive()?;
        match *step {
            Step::Move { volume, turn, serve_here, keep_source, slowly } => {
                let (name, at) = (VOLUMES[volume], self.owner(volume)?);
                let to = format!("{}:a", NAMES[(at + turn) % NAMES.len()]);
                let mut words = vec!["migrate", name, "--to", &to, "--detach"];
                words.extend(serve_here.then_some("--serve-here"));
                words.extend(keep_source.then_some("--keep-source"));
                words.extend(slowly.then_some(["--bandwidth", "16MiB/s"]).into_iter().flatten());
                // The order is refused if the source's daemon has just killed itself. It waits for the target's daemon.
                let mut ordering = self.hosts[at].command(words)?.start()?;
                while ordering.is_running()? {
                    self.revive()?;
                    sleep(LOOK);
                }
                ordering.wait()?;
            }
            Step::End { host, signal, away, fail_point } => {
                self.hosts[host].signal(signal)?;
                let code = self.hosts[host].wait_for_end()?;
                ensure!(code == KILLED || code == 0, "the daemon of {} ended with {code}", NAMES[host]);
                sleep(away);
                let environment = fail_point.map(|step| ("STERNA_FAIL_POINT", step));
                if let Err(error) = self.hosts[host].start_with(environment.as_slice())
                    && self.revive()? == 0
                {
                    return Err(error);
                }
            }
            Step::Freeze { host, length } => {
                self.hosts[host].signal(Signal::STOP)?;
                sleep(length);
                self.hosts[host].signal(Signal::CONT)?;
            }
            Step::Wait { length } => sleep(length),
        }
        Ok(())
    }

    /// Restarts daemons that have killed themselves, and returns their number.
    fn revive(&mut self) -> anyhow::Result<usize> {
        let mut revived = 0;
        for (host, name) in self.hosts.iter_mut().zip(NAMES) {
            if let Some(code) = host.take_end()? {
                ensure!(code == KILLED, "the daemon of {name} ended by itself, with {code}");
                host.start()?;
                revived += 1;
            }
        }
        Ok(revived)
    }

    /// Waits until no migration is under way and one host serves a volume, and returns that host.
    fn owner(&mut self, volume: usize) -> anyhow::Result<usize> {
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            self.revive()?;
            let states: Vec<_> = self.hosts.iter().map(|host| look(host, VOLUMES[volume])).collect();
            let serving = |state: &Look| state.volume == Some(VolumeState::Serving);
            if states.iter().all(|state| state.is_quiet)
                && states.iter().filter(|state| serving(state)).count() == 1
            {
                return states.iter().position(serving).context("one host serves it");
            }
            if Instant::now() >= give_up_at {
                bail!(
                    "after {} s {} is at no host, or still moves: {states:#?}",
                    PATIENCE.as_secs(),
                    VOLUMES[volume]
                );
            }
            sleep(LOOK);
        }
    }

    /// Pauses the guests, compares their knowledge with their volumes, and resumes them.
    fn compare(&mut self) -> anyhow::Result<()> {
        for (volume, name) in VOLUMES.iter().enumerate() {
            let owner = self.owner(volume)?;
            let guest = self.guests[volume].take().context("the guest has gone")?;
            let StoppedGuest { mut client, content, mut findings, .. } = guest.stop()?;
            findings.append(workload::verify_export(&mut client, &content, |_| {})?);
            let found: Volume = self.hosts[owner].ask(&["volume", "show", name])?;
            let mut direct = Client::connect(&found.uri.parse()?, ClientOptions::default())?;
            findings.append(workload::verify_export(&mut direct, &content, |_| {})?);
            let first: Vec<String> = findings.first().iter().map(ToString::to_string).collect();
            ensure!(
                findings.is_empty(),
                "{name} at {}: {} wrong: {first:#?}",
                NAMES[owner],
                findings.count()
            );
            self.drop_kept(name)?;
            self.let_work(volume, client, content)?;
        }
        Ok(())
    }

    /// Drops all replicas of a volume but the last at each host, because they would fill the disk.
    fn drop_kept(&self, name: &str) -> anyhow::Result<()> {
        for host in &self.hosts {
            let mut kept: Vec<api::Replica> = host.ask(&["replica", "list"])?;
            kept.retain(|replica| replica.volume == name);
            kept.sort_by_key(|replica| replica.kept_unix_ms);
            kept.pop();
            for replica in kept {
                host.sterna(["replica", "drop", name, "--migration", &replica.migration])?.success()?;
            }
        }
        Ok(())
    }
}

impl Drop for Tour {
    fn drop(&mut self) {
        // A stopped daemon does not end, and neither do the guests that wait for it.
        for host in &self.hosts {
            let _ = host.signal(Signal::CONT);
        }
    }
}

/// A host's state of a volume.
#[derive(Debug)]
struct Look {
    /// Whether the host answers, and no migration from or to it is under way.
    is_quiet: bool,
    volume: Option<VolumeState>,
}

fn look(host: &Host, volume: &str) -> Look {
    let migrations: Option<Vec<Migration>> = host.ask(&["migration", "list"]).ok();
    let is_quiet = migrations.is_some_and(|all| all.iter().all(|migration| migration.state.has_ended()));
    let volume: Option<Volume> = host.ask(&["volume", "show", volume]).ok();
    Look { is_quiet, volume: volume.map(|volume| volume.state) }
}
