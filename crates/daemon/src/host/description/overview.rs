//! A repeated overview of the whole host, for clients that watch it.
//!
//! ```text
//!   page, top, watch ──► overview() ──► the latest, if it is young ─────────────────────────────────► JSON
//!                             └─ else one takes a new one, the others wait for it:
//!                                 lanes (by message), journal, sessions: each time
//!                                 stores, VMs, space of images: by a task of their own, some seconds old
//! ```
//! The host is observed at most once a second, however many clients watch, and only while one does. Rates are differences to
//! the previous observation. Secrets are left out here, so that callers can pass the overview on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::{Activity, ConnectionAtWork, MigrationAtWork, Overview, PeerAtWork, VolumeAtWork};
use bytes::Bytes;
use lane::LaneStatus;
use migration::MigrationId;

use super::metrics::SeenStore;
use crate::error::RequestError;
use crate::host::Description;
use crate::journal::now_unix_ms;
use crate::stores::Space;

/// The shortest time between two observations. It is a little less than a second, so that a client that asks once a second
/// always gets a new one.
const INTERVAL_MIN: Duration = Duration::from_millis(900);
/// An observation that took long is repeated only after this many times its duration, so that watching takes at most
/// a twentieth of one processor.
const REST_FACTOR: u32 = 20;
/// How old the answers of disks and hypervisors may become. Asking them costs more than reading memory.
const SLOW_INTERVAL: Duration = Duration::from_secs(5);
/// The longest time span of a rate: an older observation says nothing about the present.
const RATE_SPAN_MAX: Duration = Duration::from_secs(15);
/// The number of samples shown of a migration's recording: two and a half observations' worth.
const SAMPLES_MAX: usize = 25;
/// The number of ended migrations shown, a screen or two. All of them: `GET /v1/migrations`.
const ENDED_MAX: usize = 40;

#[derive(Default)]
pub(crate) struct Overviews {
    /// Held while an observation is made, so that other clients wait for it.
    latest: tokio::sync::Mutex<Option<Taken>>,
    slow: Mutex<Slow>,
}

struct Taken {
    at: Instant,
    /// When the next observation may be made.
    stale_at: Instant,
    counted: Counted,
    json: Bytes,
}

#[derive(Default)]
struct Counted {
    volumes: BTreeMap<String, LaneStatus>,
    /// Bytes sent and received, by the name of the host and both ends.
    connections: BTreeMap<[String; 3], (u64, u64)>,
}

/// Answers that are requested less often.
#[derive(Default)]
struct Slow {
    asked: Option<Instant>,
    told: Arc<Told>,
}

/// The answers of disks and hypervisors.
#[derive(Default)]
pub(crate) struct Told {
    stores: Vec<api::Store>,
    spaces: Vec<SeenStore>,
    /// The space of the data folder; `None`: its disk does not answer.
    data: Option<Space>,
    pub(crate) vms: Vec<api::Vm>,
    standbys: Vec<api::Standby>,
    /// The allocated bytes of images, by volume.
    allocated: BTreeMap<String, u64>,
    recorded: std::collections::BTreeSet<MigrationId>,
}

impl Told {
    pub(super) fn spaces(&self) -> &[SeenStore] {
        &self.spaces
    }

    pub(super) fn data(&self) -> Option<Space> {
        self.data
    }
}

impl Description {
    /// Returns the overview, JSON of [`api::Overview`], at most one second old.
    pub(crate) async fn overview(self: &Arc<Self>) -> Result<Bytes, RequestError> {
        let mut latest = self.overviews.latest.lock().await;
        if let Some(taken) = latest.as_ref().filter(|taken| Instant::now() < taken.stale_at) {
            return Ok(taken.json.clone());
        }
        let begun = Instant::now();
        let (overview, counted) = self.look(latest.as_ref()).await;
        let json =
            serde_json::to_vec(&overview).map_err(|error| RequestError::Internal(error.to_string()))?;
        let json = Bytes::from(json);
        let rest = INTERVAL_MIN.max(begun.elapsed() * REST_FACTOR);
        *latest = Some(Taken { at: begun, stale_at: begun + rest, counted, json: json.clone() });
        Ok(json)
    }

    async fn look(self: &Arc<Self>, before: Option<&Taken>) -> (Overview, Counted) {
        let told = self.told_by_the_slow().await;
        let taken_unix_ms = now_unix_ms();
        // The time between the two observations; `None`: a rate over it would mean nothing.
        let before = before.and_then(|taken| {
            let span = taken.at.elapsed();
            (span <= RATE_SPAN_MAX).then_some((&taken.counted, span.as_secs_f64()))
        });
        let looks = self.views.all_volumes().into_iter();
        let looks = looks.map(|(name, volume, service)| self.views.look_at(name, volume, service));
        let seen = futures_util::future::join_all(looks).await;
        let mut counted = Counted::default();
        let volumes = seen.into_iter().map(|(volume, status)| {
            let earlier = before.and_then(|(counted, span)| Some((counted.volumes.get(&volume.name)?, span)));
            let activity = status.as_ref().and_then(|now| activity(now, earlier?));
            let allocated = told.allocated.get(&volume.name).copied();
            counted.volumes.extend(status.map(|status| (volume.name.clone(), status)));
            at_work(volume, allocated, activity)
        });
        let volumes = volumes.collect();
        let peers = self.hosts.describe_all().unwrap_or_default();
        let peers = peers.into_iter().map(|peer| peer_at_work(peer, before, &mut counted)).collect();
        let (migrations, migrations_ended) = self.migrations_at_work(&told);
        let overview = Overview {
            taken_unix_ms,
            name: self.own_name(),
            host: self.describe(),
            readiness: self.readiness_with(&told.vms, &told.spaces, told.data),
            peers,
            stores: told.stores.clone(),
            volumes,
            vms: told.vms.clone(),
            standbys: told.standbys.clone(),
            migrations,
            migrations_ended,
        };
        (overview, counted)
    }

    /// Returns its name for other hosts, or else the system's host name.
    pub(crate) fn own_name(&self) -> String {
        self.hosts.describe_identity().map_or_else(|_| name_of_system(), |identity| identity.name)
    }

    fn migrations_at_work(&self, told: &Told) -> (Vec<MigrationAtWork>, u64) {
        let unfinished = self.migrations.list_unfinished(&self.journal);
        let numbers: Vec<MigrationId> = self.journal.read(|state| state.migrations.keys().copied().collect());
        let is_unfinished = |id: &MigrationId| {
            let id = id.to_string();
            unfinished.iter().any(|migration| migration.id == id)
        };
        let ended: Vec<MigrationId> = numbers.into_iter().filter(|id| !is_unfinished(id)).collect();
        let latest = &ended[ended.len().saturating_sub(ENDED_MAX)..];
        let shown = latest.iter().filter_map(|id| {
            let migration = self.migrations.get(&self.journal, *id).ok()?;
            Some(self.migration_at_work(*id, migration, told))
        });
        let mut shown: Vec<MigrationAtWork> = shown.collect();
        shown.extend(unfinished.into_iter().filter_map(|migration| {
            let id = crate::migrations::registry::parse_id(&migration.id).ok()?;
            Some(self.migration_at_work(id, migration, told))
        }));
        (shown, ended.len() as u64)
    }

    fn migration_at_work(
        &self,
        id: MigrationId,
        mut migration: api::Migration,
        told: &Told,
    ) -> MigrationAtWork {
        // The ticket would let its reader promote the volume.
        migration.ticket = None;
        let samples =
            if migration.state.has_ended() { Vec::new() } else { self.histories.latest(id, SAMPLES_MAX) };
        MigrationAtWork { recorded: !samples.is_empty() || told.recorded.contains(&id), migration, samples }
    }

    /// Returns the answers of disks and hypervisors. The first call waits for them; later calls return the previous answers and
    /// refresh them in the background.
    pub(crate) async fn told_by_the_slow(self: &Arc<Self>) -> Arc<Told> {
        let was_asked = {
            let mut slow = self.overviews.slow.lock().unwrap_or_else(PoisonError::into_inner);
            if slow.asked.is_some_and(|asked| asked.elapsed() < SLOW_INTERVAL) {
                return Arc::clone(&slow.told);
            }
            slow.asked.replace(Instant::now()).is_some()
        };
        let host = Arc::clone(self);
        let asking = tokio::spawn(async move {
            let told = Arc::new(host.ask_the_slow().await);
            host.overviews.slow.lock().unwrap_or_else(PoisonError::into_inner).told = Arc::clone(&told);
        });
        // A task that panics leaves the previous answers.
        if !was_asked {
            let _ = asking.await;
        }
        Arc::clone(&self.overviews.slow.lock().unwrap_or_else(PoisonError::into_inner).told)
    }

    async fn ask_the_slow(self: &Arc<Self>) -> Told {
        let host = Arc::clone(self);
        let recorded = tokio::task::spawn_blocking(move || host.histories.recorded());
        let (stores, mut vms, mut standbys, volumes, recorded, spaces, data) = tokio::join!(
            self.views.describe_stores(),
            self.vm_orders.describe_vms(),
            self.standbys.list(),
            self.views.describe_volumes(),
            recorded,
            self.stores_seen(),
            self.data_folder_seen()
        );
        for vm in &mut vms {
            // A command line may contain passwords, for example of a display.
            vm.definition = None;
        }
        for standby in &mut standbys {
            // There may be many, and nobody looks at them all the time.
            standby.points.clear();
            standby.test = None;
        }
        let allocated = volumes.into_iter().filter_map(|volume| Some((volume.name, volume.allocated_bytes?)));
        let (allocated, recorded) = (allocated.collect(), recorded.unwrap_or_default());
        Told { stores, spaces, data, vms, standbys, allocated, recorded }
    }
}

/// Returns what guests did since an earlier observation; `None`: the lane has been restarted since.
fn activity(now: &LaneStatus, (earlier, seconds): (&LaneStatus, f64)) -> Option<Activity> {
    let rate = |count: fn(&LaneStatus) -> u64| {
        let grown = count(now).checked_sub(count(earlier))?;
        Some(grown as f64 / seconds.max(f64::EPSILON))
    };
    let latencies = now.latencies.since(&earlier.latencies);
    let quantile = |permille| {
        let latency = latencies.quantile(permille)?;
        Some(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX))
    };
    Some(Activity {
        reads_per_second: rate(|status| status.reads)?,
        writes_per_second: rate(|status| status.writes)?,
        flushes_per_second: rate(|status| status.flushes)?,
        bytes_read_per_second: rate(|status| status.bytes_read)?,
        bytes_written_per_second: rate(|status| status.bytes_written)?,
        requests_in_flight: now.requests_in_flight as u64,
        median_us: quantile(500),
        p99_us: quantile(990),
    })
}

fn at_work(volume: api::Volume, allocated: Option<u64>, activity: Option<Activity>) -> VolumeAtWork {
    let elsewhere = volume.clients_elsewhere.iter().map(|led| u64::from(led.clients)).sum();
    let statistics = volume.statistics;
    VolumeAtWork {
        name: volume.name,
        size_bytes: volume.size_bytes,
        allocated_bytes: allocated.filter(|_| volume.state != api::VolumeState::Forwarding),
        store: volume.store,
        host: volume.host,
        image: volume.image,
        kind: volume.kind,
        format: volume.format,
        read_only: volume.read_only,
        state: volume.state,
        message: volume.message,
        creation: volume.creation,
        migration: volume.migration,
        connections: statistics.as_ref().map_or(0, |counted| counted.connections as u64),
        clients_elsewhere: elsewhere,
        filling: volume.filling,
        errors: statistics.as_ref().map_or(0, |counted| counted.errors),
        last_error: statistics.and_then(|counted| counted.last_error),
        activity,
    }
}

fn peer_at_work(mut peer: api::Peer, before: Option<(&Counted, f64)>, counted: &mut Counted) -> PeerAtWork {
    let connections = std::mem::take(&mut peer.connections).into_iter().map(|connection| {
        let key = [peer.name.clone(), connection.local.clone(), connection.remote.clone()];
        let now = (connection.bytes_sent, connection.bytes_received);
        let earlier = before.and_then(|(counted, span)| Some((*counted.connections.get(&key)?, span)));
        let rate = |now: u64, earlier: u64, seconds: f64| {
            Some(now.checked_sub(earlier)? as f64 / seconds.max(f64::EPSILON))
        };
        counted.connections.insert(key, now);
        ConnectionAtWork {
            connection,
            bytes_sent_per_second: earlier.and_then(|((sent, _), span)| rate(now.0, sent, span)),
            bytes_received_per_second: earlier.and_then(|((_, received), span)| rate(now.1, received, span)),
        }
    });
    let connections = connections.collect();
    PeerAtWork { peer, connections }
}

fn name_of_system() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn status(requests: u64, latency_ms: u64) -> LaneStatus {
        let mut latencies = lane::Latencies::default();
        (0..requests).for_each(|_| latencies.add(Duration::from_millis(latency_ms)));
        LaneStatus { reads: requests, bytes_read: requests * 4096, latencies, ..LaneStatus::default() }
    }

    #[test]
    fn what_guests_do_is_what_was_counted_between_two_looks() {
        let now = activity(&status(300, 1), (&status(100, 1), 2.0)).unwrap();
        assert_eq!((now.reads_per_second, now.writes_per_second), (100.0, 0.0));
        assert_eq!(now.bytes_read_per_second, 409_600.0);
        assert!(now.p99_us.is_some_and(|latency| (1000..1126).contains(&latency)), "{now:?}");
    }

    #[test]
    fn a_lane_that_has_begun_anew_has_no_rates_yet_and_an_idle_guest_no_latency() {
        assert_eq!(activity(&status(10, 1), (&status(100, 1), 1.0)), None);
        let idle = activity(&status(100, 1), (&status(100, 1), 1.0)).unwrap();
        assert_eq!((idle.requests_per_second(), idle.median_us), (0.0, None));
    }
}
