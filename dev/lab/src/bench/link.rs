//! `bench link`: how much of a link a migration uses, beside plain TCP and QEMU's mirror.
//!
//! ```text
//!   copy    TCP │ Sterna │ QEMU's mirror ── compare the images
//!   guest   Sterna │ QEMU's mirror, both modes ── compare what the guest has not written since the switch
//!
//!   host a                                              host b
//!   image ► daemon of the source ► TCP ► WideAreaLink ► TCP ► daemon of the target ► image
//! ```
//!
//! Hosts are network namespaces ([`crate::network`]), so this needs root. Both images are on one disk. It must be much faster
//! than the link, so that the link is what limits.

mod stage;

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::json;
use tokio::time::sleep;

use self::stage::{Stage, Way};
use super::copying::{
    BYTES_BEFORE, BYTES_DURING, ENDED, Guested, P99, SECOND_HALF, SECONDS, SPEED, WORST, idle_sample,
};
use super::fio::{Job, Pattern};
use super::guest::{Limit, Load};
use super::metric::{Metric, Unit};
use super::report::{Comparison, Sample, Section};
use super::runner::{About, Ground, Part, Scenario, Turn};
use super::server::CopyMode;
use super::tools::{FIO, STORAGE_DAEMON};
use super::{Common, chosen, one_of};
use crate::demo::Progress;
use crate::network::BitRate;
use crate::network::measure::Flow;

/// Measures how well migrations use a link between two hosts, beside plain TCP and QEMU's mirror.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct LinkOptions {
    #[command(flatten)]
    common: Common,
    /// How long the guest works before its disk begins to move.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measure this alone; may be given several times.
    #[arg(long, value_name = "PART", value_parser = one_of(ROUTES.iter().map(|route| (route.name, route.title))))]
    only: Vec<String>,
}

const HELP: &str = "\
Examples:
  sterna bench link
  sterna bench link --size 4GiB --html link.html
  sterna bench link --only metro --only far --rounds 1 --size 512MiB
  sterna bench link --only guest --json > link.json

Two hosts are made on this machine, with links that carry so much and take so long, and an image goes from one to the other: \
over plain TCP, by temporary daemons, and by qemu-storage-daemon. Then the same while a guest writes more than \
the link carries. Every copy is compared with its source. It needs root, for hosts are network namespaces, and leaves nothing \
behind; it needs ip and tc, fio and qemu-storage-daemon (Debian: iproute2, fio, qemu-system-common), and two processors. \
Let the machine be idle meanwhile. The image has 2 GiB, and there are 3 rounds, unless you say otherwise. All of it takes the time \
of about 50 copies at 1 Gbit/s: half an hour for 2 GiB.";

/// Links between the hosts, and what goes over them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    name: &'static str,
    title: &'static str,
    /// The links' rates, the fastest first.
    rates: &'static [BitRate],
    round_trip: Duration,
    goes: Goes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goes {
    UnusedImage,
    /// The image of a guest that writes faster than the link carries.
    Guest,
}

const ONE: &[BitRate] = &[BitRate::megabits(1000)];
const TWO: &[BitRate] = &[BitRate::megabits(1000), BitRate::megabits(500)];
const NEAR: Duration = Duration::from_micros(500);
/// Within a metropolis: the longest distance that vSphere 5.1 supports.
const METRO: Duration = Duration::from_millis(10);
const FAR: Duration = Duration::from_millis(180);

const fn route(
    name: &'static str,
    title: &'static str,
    rates: &'static [BitRate],
    round_trip: Duration,
    goes: Goes,
) -> Route {
    Route { name, title, rates, round_trip, goes }
}

const ROUTES: [Route; 5] = [
    route("near", "1 Gbit/s, round trip 0.5 ms", ONE, NEAR, Goes::UnusedImage),
    route("metro", "1 Gbit/s, round trip 10 ms", ONE, METRO, Goes::UnusedImage),
    route("far", "1 Gbit/s, round trip 180 ms", ONE, FAR, Goes::UnusedImage),
    route("two-links", "1 and 0.5 Gbit/s, round trip 0.5 ms", TWO, NEAR, Goes::UnusedImage),
    route(
        "guest",
        "a guest that writes at twice the link's rate: 1 Gbit/s, round trip 10 ms",
        ONE,
        METRO,
        Goes::Guest,
    ),
];

impl Route {
    fn bytes_per_second(self) -> f64 {
        self.rates.iter().map(|rate| rate.bytes_per_second()).sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// One TCP connection over each link, from memory to memory: the limit.
    Tcp,
    Sterna(Way),
    /// QEMU's mirror, to an export of another QEMU.
    Mirror(CopyMode),
}

const STERNA: (&str, Carrier) = ("sterna", Carrier::Sterna(Way::Host));
const STERNA_NBD: (&str, Carrier) = ("sterna, to an nbd store", Carrier::Sterna(Way::NbdStore));
const BACKGROUND: (&str, Carrier) = ("qemu mirror, background", Carrier::Mirror(CopyMode::Background));
const BLOCKING: (&str, Carrier) = ("qemu mirror, write-blocking", Carrier::Mirror(CopyMode::WriteBlocking));
/// The contenders for an unused image. There the modes of QEMU's mirror do not differ.
const COPY: [(&str, Carrier); 4] = [("tcp", Carrier::Tcp), STERNA, STERNA_NBD, BACKGROUND];
const GUEST: [(&str, Carrier); 4] = [STERNA, STERNA_NBD, BACKGROUND, BLOCKING];

const OF_LINK: Metric = Metric::more("of_link", "OF LINK", Unit::Ratio);
const TO_TCP: Metric = Metric::more("to_tcp", "OF TCP", Unit::Ratio);
const SECOND_HALF_TO_TCP: Metric = Metric::more("second_half_to_tcp", "SECOND HALF", Unit::Ratio);
const ROUND_TRIP: Metric = Metric::less("round_trip_ms", "ROUND TRIP ms", Unit::Milliseconds);

/// The guest writes all over its disk, with requests as large as those of file systems.
const JOB: Job = Job { pattern: Pattern::RandomWrites, block_bytes: 64 << 10, depth: 8 };
/// The guest's limit, as a multiple of the link's rate.
const LINK_RATES: u64 = 2;
/// A migration is given up after this many times the time that the link needs for the image.
const TIMES_MAX: f64 = 4.0;
/// An addition to the time limit, in seconds, for small images.
const GIVE_UP_AFTER_MIN: f64 = 10.0;
/// Pause between checks whether TCP is done: a ten-thousandth of the time it takes.
const PAUSE: Duration = Duration::from_millis(2);

impl Scenario for LinkOptions {
    type Case = Route;
    type Stage = Stage;
    type Variant = Carrier;

    fn about(&self) -> anyhow::Result<About> {
        crate::network::check().context("the benchmark needs two hosts with a link")?;
        Ok(About {
            name: "link",
            title: "Migrations over links, beside plain TCP and QEMU's mirror",
            words: "What is made of the link when the image goes to another host. Hosts are network namespaces, TCP is the \
                    kernel's, links are emulated. Every copy was compared with its source."
                .to_owned(),
            tools: &[FIO, STORAGE_DAEMON],
            images: 2,
            usual: (3, 2 << 30),
            settings: json!({ "seconds": self.seconds, "congestion_control": stage::congestion_control()? }),
        })
    }

    fn common(&self) -> &Common {
        &self.common
    }

    fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<Route, Carrier>>> {
        let part = |route: Route| {
            let section =
                Section { name: route.name.to_owned(), title: route.title.to_owned(), ..Section::default() };
            let (section, variants) = match route.goes {
                Goes::UnusedImage => {
                    let beside_tcp = |of, gives| Comparison { of, rows: &[], beside: &["tcp"], gives };
                    let section = Section {
                        columns: vec![SECONDS, SPEED, OF_LINK, TO_TCP, SECOND_HALF_TO_TCP, ROUND_TRIP],
                        comparisons: vec![
                            beside_tcp(SPEED, TO_TCP),
                            beside_tcp(SECOND_HALF, SECOND_HALF_TO_TCP),
                        ],
                        ..section
                    };
                    (section, COPY.to_vec())
                }
                Goes::Guest => {
                    let section = Section {
                        columns: vec![SECONDS, ENDED, BYTES_BEFORE, BYTES_DURING, OF_LINK, WORST, P99],
                        note: format!(
                            "The link carries {} MiB/s. A migration that has not ended when the image could have been brought \
                             over four times is given up.",
                            Unit::BytesPerSecond.show(route.bytes_per_second())
                        ),
                        ..section
                    };
                    (section, GUEST.to_vec())
                }
            };
            vec![Part { section, points: vec![(None, route)], variants }]
        };
        chosen(&ROUTES, |route| route.name, &self.only).map(part).collect()
    }

    async fn set(&self, ground: &Ground<'_>, route: Route, progress: &mut Progress) -> anyhow::Result<Stage> {
        Stage::set(ground, route, progress).await
    }

    async fn play(
        &self,
        ground: &Ground<'_>,
        stage: &mut Stage,
        turn: Turn<'_, Route, Carrier>,
    ) -> anyhow::Result<Vec<Sample>> {
        let copying = match turn.variant {
            Carrier::Tcp => return Ok(vec![tcp(ground, stage).await?]),
            Carrier::Sterna(way) => stage.sternas(ground, way).await?,
            Carrier::Mirror(mode) => stage.storage_daemons(ground, mode).await?,
        };
        let link = turn.case.bytes_per_second();
        let sample = match turn.case.goes {
            Goes::UnusedImage => copying.idle(&stage.images, ground.size_bytes).await?,
            Goes::Guest => {
                let load = Load { job: JOB, limit: Some(Limit::Bytes(LINK_RATES * link as u64)) };
                let seconds = ground.size_bytes as f64 / link * TIMES_MAX + GIVE_UP_AFTER_MIN;
                let guest = Guested {
                    load,
                    before: Duration::from_secs(self.seconds.into()),
                    after: Duration::ZERO,
                    give_up_after: Duration::from_secs_f64(seconds),
                };
                copying.loaded(ground, &stage.images, guest).await?
            }
        };
        let carried = sample.value(SPEED).or(sample.value(BYTES_DURING));
        Ok(vec![sample.and(OF_LINK, carried.map(|bytes| bytes / link))])
    }
}

/// Sends as many bytes as the image has from memory to memory. Each link carries its share; the time ends with the last.
async fn tcp(ground: &Ground<'_>, stage: &Stage) -> anyhow::Result<Sample> {
    let round_trip = stage.round_trip().await?;
    let all = stage.route.bytes_per_second();
    let begun = Instant::now();
    let mut flows = Vec::new();
    for (rate, address) in stage.links() {
        let share = ground.size_bytes as f64 * (rate.bytes_per_second() / all);
        let [source, target] = stage.hosts.clone();
        let start = move || Flow::start(&source, &target, address, Some(share as u64));
        flows.push(tokio::task::spawn_blocking(start).await??);
    }
    let seen = |flows: &[Flow]| (begun.elapsed().as_secs_f64(), flows.iter().map(Flow::received_bytes).sum());
    let mut pace = Vec::new();
    while !flows.iter().all(Flow::has_ended) {
        pace.push(seen(&flows));
        sleep(PAUSE).await;
    }
    pace.push(seen(&flows));
    let seconds = begun.elapsed().as_secs_f64();
    let received = flows.into_iter().map(Flow::wait).sum::<Result<u64, _>>()?;
    // Shares are rounded down to whole bytes.
    ensure!(received + 2 >= ground.size_bytes, "TCP has brought {received} bytes of {}", ground.size_bytes);
    let speed = ground.size_bytes as f64 / seconds;
    let sample = idle_sample(&stage.images, seconds, ground.size_bytes, &pace);
    Ok(sample.with([(OF_LINK, speed / all), (ROUND_TRIP, round_trip.as_secs_f64() * 1e3)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_link_of_a_route_is_its_fastest() {
        for Route { name, rates, .. } in ROUTES {
            assert!(rates.is_sorted_by(|first, second| first >= second), "{name}");
        }
    }
}
