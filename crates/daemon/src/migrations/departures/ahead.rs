//! The preflight check of a migration to another host: finds everything that is in the way before anything is begun.
//!
//! ```text
//!   here: hooks, the downtime of the VM ─────┐
//!   target host: Survey ──► Surveyed ────────┴─► Ahead: refusals, warnings, where the images would be
//! ```
//! A dry run shows all of it ([`crate::migrations::orders::plan`]). A migration with a refusal is not begun. The findings may
//! change, so the target checks the offer again when the source makes it.

use std::sync::Arc;
use std::time::Duration;

use api::MigrateVolume;
use migration::VolumeId;
use migration::journal::VolumeRecord;
use migration::vm::cold::Form;
use migration::wire::{OfferedVm, Refusal, RefusalCode, Survey, Surveyed};
use transport::Session;

use crate::error::RequestError;
use crate::host::{Departures, blocking};
use crate::migrations::departures::leave::offer;
use crate::migrations::orders::migrate::allocated_bytes;
use crate::peers::host_id;
use crate::peers::veil::veiled;
use crate::volumes::claims::Elsewhere;

/// The time that the remote host has for a dry run's check. It starts a QEMU, and may query slow stores.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// The time that the remote host has for the check before an offer. It is short because the target checks the offer again: a
/// slow host delays nothing for long.
const ANSWER_BEFORE_OFFER_MAX: Duration = Duration::from_secs(5);
/// How long a round trip that is too long is measured again: on a busy link a single measurement may be above the minimum.
const MEASURE_MAX: Duration = Duration::from_millis(1500);
const MEASURE_PAUSE: Duration = Duration::from_millis(50);
/// The size in bytes of a small VM's device state, which is sent while the VM stands still.
const DEVICES_BYTES_MIN: u64 = 32 << 10;
/// The typical downtime besides the network: the last memory, flushes, journals.
const STAND_TYPICAL: Duration = Duration::from_millis(50);

/// A VM that is to move along, for the preflight check.
pub(crate) struct AheadVm {
    pub name: String,
    /// The longest downtime; `None`: it is stopped.
    pub downtime_max: Option<Duration>,
    /// The needs of the VM, without its files. Before an offer these are only the files that the target must find; the target
    /// checks everything else itself, before anything is copied.
    pub manifest: Vec<u8>,
}

pub(crate) struct Ahead {
    pub refusals: Vec<RequestError>,
    pub warnings: Vec<String>,
    /// The remote host's answer; `None`: it has not answered.
    pub surveyed: Option<Surveyed>,
    pub held_bytes: Vec<u64>,
    /// The shortest downtime of an idle VM; `None`: there is no VM, or nothing was measured.
    pub stand_min: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Thoroughness {
    /// A dry run: checks everything.
    DryRun,
    /// A migration: skips what it checks itself before it copies.
    BeforeOffer,
}

impl Departures {
    /// Runs the preflight check of these volumes over `session`.
    pub(crate) async fn look_ahead(
        self: &Arc<Self>,
        session: &Session,
        records: &[VolumeRecord],
        elsewhere: &Elsewhere,
        order: &MigrateVolume,
        vm: Option<&AheadVm>,
        thoroughness: Thoroughness,
    ) -> Ahead {
        let host = elsewhere.peer.name.clone();
        let mut ahead = Ahead {
            refusals: Vec::new(),
            warnings: Vec::new(),
            surveyed: None,
            held_bytes: self.held_bytes(records).await,
            stand_min: None,
        };
        self.look_at_hooks(&mut ahead).await;
        let volumes: Vec<_> = records.iter().map(|record| record.volume).collect();
        let untold = self.standbys.refuse_to_leave(&volumes, host_id(elsewhere.peer.id));
        ahead.refusals.extend(untold.filter(|_| !order.standby_untold));
        if let Some((vm, downtime_max)) = vm.and_then(|vm| Some((vm, vm.downtime_max?))) {
            self.look_at_stand(session, (&vm.name, downtime_max), &mut ahead).await;
        }
        let offered = vm.map(|vm| {
            let form = if vm.downtime_max.is_some() { Form::Live } else { Form::Cold };
            OfferedVm { name: vm.name.clone(), form }
        });
        let mut offer = offer(records, &elsewhere.store, order, offered);
        offer.volumes.iter_mut().for_each(|offered| offered.volume = veiled(offered.volume));
        let called: Vec<VolumeId> = offer.volumes.iter().map(|offered| offered.volume).collect();
        let survey = Survey {
            offer,
            held_bytes: ahead.held_bytes.clone(),
            vm: vm.map(|vm| vm.manifest.clone()).unwrap_or_default(),
        };
        let limit = match thoroughness {
            Thoroughness::DryRun => ANSWER_MAX,
            Thoroughness::BeforeOffer => ANSWER_BEFORE_OFFER_MAX,
        };
        match tokio::time::timeout(limit, self.peers.survey(session, survey)).await.ok().flatten() {
            Some(mut surveyed) => {
                for place in &mut surveyed.places {
                    let mut volumes = called.iter().zip(records);
                    let record = volumes.find(|(called, _)| **called == place.volume);
                    place.volume = record.map_or(place.volume, |(_, record)| record.volume);
                }
                let refused = |refusal: &Refusal| RequestError::HostRefused {
                    host: host.clone(),
                    refusal: refusal.clone(),
                };
                ahead.refusals.extend(surveyed.refusals.iter().map(refused));
                ahead.warnings.extend(surveyed.warnings.iter().map(|text| format!("at {host}: {text}")));
                ahead.surveyed = Some(surveyed);
            }
            None if thoroughness == Thoroughness::DryRun => {
                let reason = format!("it has not answered the preflight check within {} s", limit.as_secs());
                ahead.refusals.push(RequestError::HostUnreachable { host, reason });
            }
            // The offer has a deadline of its own.
            None => {}
        }
        ahead
    }

    /// Returns the allocated bytes of each volume, or its size where they are not known.
    pub(crate) async fn held_bytes(&self, records: &[VolumeRecord]) -> Vec<u64> {
        let records = records.to_vec();
        let sizes: Vec<u64> = records.iter().map(|record| record.size_bytes).collect();
        let held = blocking(move || {
            let held = records.iter().map(|record| match record.image.place.file() {
                Some(_) => allocated_bytes(record).unwrap_or(record.size_bytes),
                None => record.size_bytes,
            });
            Ok(held.collect())
        });
        held.await.unwrap_or(sizes)
    }

    pub(crate) async fn look_at_hooks(&self, ahead: &mut Ahead) {
        let hooks = self.config.hooks.clone();
        let looked = blocking(move || Ok((hooks.before_problem(), hooks.after_problem())));
        if let Ok((before, after)) = looked.await {
            ahead.refusals.extend(before.map(RequestError::Invalid));
            ahead.warnings.extend(after);
        }
    }

    /// Checks whether the VM's downtime limit can be met.
    async fn look_at_stand(
        &self,
        session: &Session,
        (vm, downtime_max): (&str, Duration),
        ahead: &mut Ahead,
    ) {
        let deadline = tokio::time::Instant::now() + MEASURE_MAX;
        let mut least = stand_min(session);
        while let Some(stand) = least
            && stand > downtime_max
            && tokio::time::Instant::now() < deadline
        {
            tokio::time::sleep(MEASURE_PAUSE).await;
            least = stand_min(session).into_iter().chain(least).min();
        }
        ahead.stand_min = least;
        let Some(stand) = least else { return };
        if stand > downtime_max {
            let (vm, least, wanted) = (vm.to_owned(), stand, downtime_max);
            ahead.refusals.push(RequestError::DowntimeUnreachable { vm, least, wanted });
        } else if stand * 2 + STAND_TYPICAL > downtime_max {
            ahead.warnings.push(format!(
                "the VM may pause for {} ms, and the distance alone takes {:.0} ms of that: it may pause for longer, or the move \
                 may be given up; --max-downtime {} is safer",
                downtime_max.as_millis(),
                milliseconds(stand),
                roomy(stand).as_millis()
            ));
        }
    }
}

impl Ahead {
    /// Returns the warnings, or one error that joins all refusals of the remote host. A refusal of this host comes alone.
    pub(crate) fn into_result(self) -> Result<Vec<String>, RequestError> {
        let mut refusals = self.refusals.into_iter();
        let Some(first) = refusals.next() else { return Ok(self.warnings) };
        let RequestError::HostRefused { host, mut refusal } = first else { return Err(first) };
        for other in refusals {
            if let RequestError::HostRefused { refusal: other, .. } = other {
                refusal.detail = format!("{}; {}", refusal.detail, other.detail);
            }
        }
        if refusal.code == RefusalCode::Busy {
            // A busy host is no obstacle: the later offer waits until the host has room.
            return Ok(self.warnings);
        }
        Err(RequestError::HostRefused { host, refusal })
    }
}

/// Returns the shortest downtime of any VM: three one-way trips, and its devices' state. The trips are the last of its state,
/// the acknowledgement, and the permission to run (hard case 27). `None`: the round trip has not been measured.
pub(crate) fn stand_min(session: &Session) -> Option<Duration> {
    let status = session.status();
    let up = || status.connections.iter().filter(|connection| connection.is_up);
    let round_trip = up().filter_map(|connection| connection.round_trip).min()?;
    let speed: u64 = up().filter_map(|connection| connection.bytes_per_second).sum();
    let devices = match speed {
        0 => Duration::ZERO,
        speed => Duration::from_secs_f64(DEVICES_BYTES_MIN as f64 / speed as f64),
    };
    Some(round_trip * 3 / 2 + devices)
}

/// Returns a downtime limit with a reserve, in steps of 100 ms.
pub(crate) fn roomy(stand: Duration) -> Duration {
    let milliseconds = (stand * 2 + STAND_TYPICAL).as_millis().div_ceil(100) * 100;
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or(u64::MAX))
}

pub(crate) fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_stand_still_leaves_room() {
        assert_eq!(roomy(Duration::from_millis(270)), Duration::from_millis(600));
        assert_eq!(roomy(Duration::ZERO), Duration::from_millis(100));
    }

    #[test]
    fn a_vm_that_cannot_move_is_refused_by_its_state_and_not_a_mistake_in_the_order() {
        let vm = || "m".to_owned();
        let wanted = Duration::from_millis(1);
        for error in [
            RequestError::VmUnmovable { vm: vm(), reason: String::new() },
            RequestError::DowntimeUnreachable { vm: vm(), least: wanted * 2, wanted },
        ] {
            assert_eq!(error.code(), api::ErrorCode::VmUnsuitable, "{error}");
        }
    }

    #[test]
    fn what_the_other_host_says_is_one_answer_and_what_passes_is_none() {
        let refused = |code, detail: &str| RequestError::HostRefused {
            host: "beta".to_owned(),
            refusal: Refusal { code, detail: detail.to_owned() },
        };
        let ahead = |refusals| Ahead {
            refusals,
            warnings: vec!["slow".to_owned()],
            surveyed: None,
            held_bytes: Vec::new(),
            stand_min: None,
        };
        assert_eq!(ahead(Vec::new()).into_result().unwrap(), ["slow"]);
        let both = vec![refused(RefusalCode::NoSpace, "full"), refused(RefusalCode::NameTaken, "taken")];
        let error = ahead(both).into_result().unwrap_err();
        assert!(error.to_string().ends_with("full; taken"), "{error}");
        assert!(ahead(vec![refused(RefusalCode::Busy, "later")]).into_result().is_ok());
        let here = vec![RequestError::Invalid("hook".to_owned()), refused(RefusalCode::NoSpace, "full")];
        assert_eq!(ahead(here).into_result().unwrap_err().to_string(), "hook");
    }
}
