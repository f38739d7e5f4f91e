//! One migration of a volume, or of a VM with its volume: the guest's figures during it, and the cut of the link.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use api::{MigrateVolume, Migration, MigrationHistory};
use testbed::Daemon;
use tokio::sync::watch;
use tokio::time::sleep;

use super::link::Link;
use crate::demo::{DemoGuest, Felt, Live, Progress};
use crate::workload::Window;

/// The time and length of a cut of the link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CutPlan {
    /// The link is cut once this part of the copying is done, 0 to 1.
    pub fraction: f64,
    /// How long the link stays cut.
    pub length: Duration,
}

/// The figures of a cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cut {
    /// The part of the copying that was done at the cut, 0 to 1.
    pub fraction: f64,
    /// How long the link was cut.
    pub length: Duration,
    /// Bytes that had been copied when the link was restored.
    pub bytes_copied: u64,
    /// Bytes that the target missed when the link was restored.
    pub bytes_missing: u64,
}

#[derive(Debug)]
pub(super) struct Way {
    pub(super) migration: Migration,
    /// The daemon's record; `None` if unavailable.
    pub(super) history: Option<MigrationHistory>,
    pub(super) felt: Felt,
    pub(super) windows: Vec<Window>,
    /// The longest time between two arrivals.
    pub(super) longest_gap: Duration,
    /// `None` if the link was not cut while blocks were missing.
    pub(super) cut: Option<Cut>,
}

/// Moves the volume or VM `name` as `order` says. Meanwhile it cuts the link, if there is a plan for that.
pub(super) async fn travel<G: DemoGuest>(
    (daemon, name, order): (&Daemon, &str, &MigrateVolume),
    guest: &G,
    link: &mut Link,
    plan: Option<CutPlan>,
    progress: &mut Progress,
) -> anyhow::Result<Way> {
    let step = Cell::new(None);
    let (seen, mut sees) = watch::channel(None::<Migration>);
    let mut gaps = Gaps::new(Instant::now());
    let first = guest.mark();
    let mut live = Live::new(guest);
    let migrating = daemon.migrate(name, order, |migration| {
        if let Some(step) = step.take() {
            progress.begin(step);
        }
        live.show(migration, progress);
        gaps.see(migration.bytes_moved, Instant::now());
        seen.send_replace(Some(migration.clone()));
    });
    let cutting = async {
        let Some(plan) = plan else { return std::future::pending().await };
        let reached = |seen: &Option<Migration>| {
            seen.as_ref().is_some_and(|migration| migration.fraction >= plan.fraction)
        };
        sees.wait_for(reached).await.context("the migration is no longer watched")?;
        link.cut().context("cut the link")?;
        let began = Instant::now();
        step.set(Some("the link is cut"));
        sleep(plan.length).await;
        let cut = sees.borrow().as_ref().map(|migration| Cut {
            fraction: migration.fraction,
            length: began.elapsed(),
            bytes_copied: migration.bytes_copied,
            bytes_missing: migration.bytes_missing.unwrap_or(0),
        });
        link.restore().context("restore the link")?;
        step.set(Some("migrating, the link is whole again"));
        anyhow::Ok(cut.filter(|cut| cut.bytes_missing > 0))
    };
    let (migration, cut) = {
        tokio::pin!(migrating);
        tokio::select! {
            migration = &mut migrating => (migration?, None),
            cut = cutting => {
                let cut = cut?;
                (migrating.await?, cut)
            }
        }
    };
    let last = guest.mark();
    let (felt, windows) = (guest.between(&first, &last), guest.windows(&first, &last));
    let history = daemon.history(&migration.id).await;
    Ok(Way { migration, history, felt, windows, longest_gap: gaps.longest, cut })
}

/// The times between arrivals. The time after the last arrival is not one of them: the switch has its own row.
#[derive(Debug)]
struct Gaps {
    bytes: u64,
    since: Instant,
    longest: Duration,
}

impl Gaps {
    fn new(now: Instant) -> Self {
        Self { bytes: 0, since: now, longest: Duration::ZERO }
    }

    fn see(&mut self, bytes: u64, now: Instant) {
        if bytes > self.bytes {
            self.longest = self.longest.max(now.saturating_duration_since(self.since));
            (self.bytes, self.since) = (bytes, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_lies_between_two_arrivals() {
        let began = Instant::now();
        let mut gaps = Gaps::new(began);
        for (second, bytes) in [(1, 10), (2, 20), (3, 20), (5, 21), (6, 30), (20, 30)] {
            gaps.see(bytes, began + Duration::from_secs(second));
        }
        assert_eq!(gaps.longest, Duration::from_secs(3));
    }
}
