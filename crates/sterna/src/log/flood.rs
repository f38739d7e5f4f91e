//! Limits how many lines one place of the program writes about one host, address or client, and how many about all of them.
//!
//! The budgets suffice for a busy host without faults. Suppressed lines are counted, and reported once a second.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use daemon::log::count_suppressed;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use words::{Budget, Limiter, Suppressed, Verdict};

/// Budget of one place about one host, address or client.
const OF_ONE: Budget = Budget { burst: 50, per_s: 2 };
/// Budget of all places about one host, address or client.
const ABOUT_ONE: Budget = Budget { burst: 200, per_s: 10 };
/// Budget of one place about all hosts.
const OF_PLACE: Budget = Budget { burst: 500, per_s: 20 };
/// Largest number of budgets that are kept.
const KINDS_MAX: usize = 1024;
/// Fields that name the subject of a line; the first one counts.
const ABOUT: [&str; 5] = ["peer", "host", "from", "address", "remote"];
/// Interval of the reports about suppressed lines.
const TELL_INTERVAL: Duration = Duration::from_secs(1);
/// Target of these reports, which are not limited.
const OWN_TARGET: &str = "sterna::log";

/// A place in the program, and whether its lines are warnings.
type Place = (&'static str, bool);

/// A layer that stops events beyond the limits.
pub(super) struct Flood {
    shared: Arc<Shared>,
}

struct Shared {
    began: Instant,
    limiters: Mutex<Limiters>,
    owes: Condvar,
}

struct Limiters {
    of_one: Limiter<(Place, String)>,
    about_one: Limiter<String>,
    of_place: Limiter<Place>,
}

impl Flood {
    /// Makes the layer, and starts the thread that reports suppressed lines.
    pub(super) fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::new());
        let teller = Arc::clone(&shared);
        std::thread::Builder::new().name("log-limits".to_owned()).spawn(move || tell(&teller))?;
        Ok(Self { shared })
    }
}

impl<S: Subscriber> Layer<S> for Flood {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if metadata.target() == OWN_TARGET {
            return true;
        }
        let mut about = About::default();
        event.record(&mut about);
        let passes = self.shared.pass(place(metadata), about.found);
        if !passes {
            count_suppressed();
        }
        passes
    }
}

impl Shared {
    fn new() -> Self {
        let limiters = Limiters {
            of_one: Limiter::new(OF_ONE, KINDS_MAX),
            about_one: Limiter::new(ABOUT_ONE, KINDS_MAX),
            of_place: Limiter::new(OF_PLACE, KINDS_MAX),
        };
        Self { began: Instant::now(), limiters: Mutex::new(limiters), owes: Condvar::new() }
    }

    /// Returns whether a line is written.
    fn pass(&self, place: Place, about: Option<(usize, String)>) -> bool {
        let now = self.began.elapsed();
        let mut limiters = self.lock();
        let mut passes = true;
        if let Some((_, about)) = about {
            passes = limiters.of_one.ask(now, &(place, about.clone())) == Verdict::Pass
                && limiters.about_one.ask(now, &about) == Verdict::Pass;
        }
        // A suppressed line does not use the budget of its place.
        passes = passes && limiters.of_place.ask(now, &place) == Verdict::Pass;
        if !passes {
            self.owes.notify_one();
        }
        passes
    }

    fn lock(&self) -> MutexGuard<'_, Limiters> {
        self.limiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Limiters {
    fn owes(&self) -> bool {
        self.of_one.owes() || self.about_one.owes() || self.of_place.owes()
    }

    /// Returns the number of suppressed lines for each place and subject.
    fn drain(&mut self) -> Vec<(Option<Place>, Option<String>, u64)> {
        let mut told = Vec::new();
        for Suppressed { kind, count } in self.of_one.drain() {
            let (place, about) = kind.unzip();
            told.push((place, about, count));
        }
        told.extend(self.about_one.drain().into_iter().map(|Suppressed { kind, count }| (None, kind, count)));
        told.extend(self.of_place.drain().into_iter().map(|Suppressed { kind, count }| (kind, None, count)));
        told
    }
}

/// Reports suppressed lines once a second, for ever.
fn tell(shared: &Shared) {
    loop {
        let mut limiters = shared.lock();
        while !limiters.owes() {
            limiters = shared.owes.wait(limiters).unwrap_or_else(PoisonError::into_inner);
        }
        drop(limiters);
        std::thread::sleep(TELL_INTERVAL);
        let told = shared.lock().drain();
        for (place, about, count) in told {
            let (of, is_warning) = place.unwrap_or(("several places", false));
            let about = about.as_deref().unwrap_or("all");
            match is_warning {
                true => tracing::warn!(target: OWN_TARGET, of, about, "{count} more suppressed"),
                false => tracing::info!(target: OWN_TARGET, of, about, "{count} more suppressed"),
            }
        }
    }
}

fn place(metadata: &'static Metadata<'static>) -> Place {
    (metadata.name(), *metadata.level() <= Level::WARN)
}

/// Finds the subject of an event.
#[derive(Default)]
struct About {
    /// The position of its field in [`ABOUT`], and its value.
    found: Option<(usize, String)>,
}

impl Visit for About {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let Some(position) = ABOUT.iter().position(|name| *name == field.name()) else { return };
        if self.found.as_ref().is_none_or(|(found, _)| position < *found) {
            self.found = Some((position, without_port(&format!("{value:?}"))));
        }
    }
}

/// Returns an address without its port, which differs for each connection. For IPv6 it returns the network, because a host can
/// have all of its addresses.
fn without_port(value: &str) -> String {
    match value.parse::<std::net::SocketAddr>() {
        Ok(address) => transport::network(address.ip()).to_string(),
        Err(_) => words::clean(value),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const REFUSED: Place = ("refused", false);

    fn passed(shared: &Shared, about: &str, lines: usize) -> usize {
        (0..lines).filter(|_| shared.pass(REFUSED, Some((0, without_port(about))))).count()
    }

    #[test]
    fn a_loud_peer_takes_no_lines_from_others_and_is_told_of() {
        let shared = Shared::new();
        let through: usize =
            (0..5000).map(|port| passed(&shared, &format!("10.0.0.1:{}", port + 1), 1)).sum();
        assert!((50..60).contains(&through), "{through}");
        assert_eq!(passed(&shared, "10.0.0.2:7", 10), 10);
        let told = shared.lock().drain();
        let counts: Vec<_> = told.iter().map(|(place, about, _)| (*place, about.as_deref())).collect();
        assert_eq!(counts, [(Some(REFUSED), Some("10.0.0.1"))]);
        assert_eq!(told[0].2 as usize, 5000 - through);
    }

    #[test]
    fn peers_without_number_do_not_fill_the_log_together() {
        let shared = Shared::new();
        let through: usize = (0..5000).map(|peer| passed(&shared, &format!("peer {peer}"), 1)).sum();
        assert!((500..600).contains(&through), "{through}");
    }

    #[test]
    fn what_a_busy_host_does_in_order_passes() {
        let shared = Shared::new();
        for volume in 0..400 {
            assert!(shared.pass(("a volume arrives", false), None), "{volume}");
        }
        let distinct: BTreeSet<_> =
            ["10.0.0.1:1", "[2001:db8::1]:9", "[2001:db8::2]:7"].map(without_port).into();
        assert_eq!(distinct.len(), 2);
    }
}
