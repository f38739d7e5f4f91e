//! Takes snapshots: read-only volumes that are copies of others at one instant, and know of which.
//!
//! ```text
//!   names claimed ─► copied and cut off together (clone.rs) ─► one commit: volumes, and what they are of ─► served
//! ```
//! A snapshot is removed, read and listed as any volume. Nothing else is kept of it than the relation in the journal.

use std::collections::BTreeSet;
use std::sync::Arc;

use migration::journal::{ExportAccess, ExportSettings, SnapshotOf};

use super::clone::NewClone;
use super::create::{Placed, random_bytes};
use crate::error::{RequestError, SnapshotError, with_causes};
use crate::fail_point::{self, Step};
use crate::files::descriptors;
use crate::host::{VolumeOrders, blocking};
use crate::journal::now_unix_ms;
use crate::names;

/// The most snapshots of a volume: each is a volume, with a thread and an open image.
const SNAPSHOTS_MAX: usize = 64;
/// The most volumes of an order.
const VOLUMES_MAX: usize = 16;

impl VolumeOrders {
    /// Takes snapshots of volumes, all at one instant. After an error there is none of them, except after
    /// [`RequestError::VolumeUnavailable`].
    pub(crate) async fn take_snapshots(
        self: Arc<Self>,
        order: api::NewSnapshot,
    ) -> Result<Vec<api::Volume>, RequestError> {
        self.draining.refuse_new()?;
        let api::NewSnapshot { volumes, vm, label, store } = order;
        let volumes = self.volumes_of_order(volumes, vm.as_deref())?;
        let taken_unix_ms = now_unix_ms();
        let label = match label {
            Some(label) => label,
            None => self.free_label(&volumes, &label_of(taken_unix_ms)),
        };
        blocking(descriptors::require_for_volume).await?;
        let group = random_bytes();
        let export = ExportSettings { access: ExportAccess::ReadOnly, ..ExportSettings::default() };
        let mut claimed = Vec::new();
        for of in &volumes {
            let name = format!("{of}@{label}");
            let record = self.claims.record_named(of)?;
            self.check_may_have_another(of, record.volume)?;
            check_label(of, &label)?;
            self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
            let label = label.clone();
            let taken = SnapshotOf { volume: record.volume, name: of.clone(), label, taken_unix_ms, group };
            let (claim, creation) = self.volumes.claim_new(&name)?;
            claimed.push((claim, creation, name, taken));
        }
        let orders = claimed.iter().map(|(_, creation, name, taken)| {
            let (of, name, store) = (taken.name.clone(), name.clone(), store.clone());
            (NewClone { of, name, store, format: None, export: export.clone() }, &**creation)
        });
        let staged = self.copy_volumes(orders.collect()).await?;
        fail_point::after(Step::CreateImage);
        let placed = claimed.iter().zip(staged).map(|((claim, _, name, taken), staged)| {
            let (name, export) = (name.clone(), export.clone());
            Placed { claim, name, staged, export, taken: Some(taken.clone()) }
        });
        self.place_staged(placed.collect()).await?;
        let mut shown = Vec::new();
        for (claim, _, name, _) in claimed {
            tracing::info!(volume = %name, "snapshot taken");
            self.serving.serve_in_background(&name);
            self.first_service(&name).await?;
            drop(claim);
            shown.push(self.views.describe_volume(&name).await?);
        }
        Ok(shown)
    }

    /// Returns the volumes that an order names, by themselves or by their VM: each once.
    pub(super) fn volumes_of_order(
        &self,
        volumes: Vec<String>,
        vm: Option<&str>,
    ) -> Result<Vec<String>, RequestError> {
        let volumes = match vm {
            None => volumes,
            Some(_) if !volumes.is_empty() => {
                return Err(RequestError::Invalid("name volumes, or a VM, and not both".to_owned()));
            }
            Some(vm) => match self.vms.adoptions()?.get(vm) {
                Some(adopted) => adopted.disks.into_iter().map(|disk| disk.volume).collect(),
                None => self.vms.get(vm)?.volumes,
            },
        };
        let distinct: BTreeSet<&String> = volumes.iter().collect();
        if volumes.is_empty() || distinct.len() < volumes.len() {
            return Err(SnapshotError::NoVolumes.into());
        }
        if volumes.len() > VOLUMES_MAX {
            return Err(SnapshotError::TooManyVolumes(VOLUMES_MAX).into());
        }
        Ok(volumes)
    }

    /// Returns the label, with a number behind it if one of the volumes has such a snapshot: a label is of a second.
    pub(super) fn free_label(&self, volumes: &[String], label: &str) -> String {
        let is_free = |label: &String| {
            volumes.iter().all(|of| self.volumes.service(&format!("{of}@{label}")).is_none())
        };
        let numbered = (2..).map(|number| format!("{label}-{number}"));
        std::iter::once(label.to_owned())
            .chain(numbered.take(SNAPSHOTS_MAX))
            .find(is_free)
            .unwrap_or_default()
    }

    fn check_may_have_another(&self, name: &str, volume: migration::VolumeId) -> Result<(), RequestError> {
        let (is_snapshot, count) = self
            .journal
            .read(|state| (state.snapshots.contains_key(&volume), state.snapshots_of(volume).count()));
        if is_snapshot {
            return Err(SnapshotError::OfSnapshot(name.to_owned()).into());
        }
        if count >= SNAPSHOTS_MAX {
            return Err(SnapshotError::TooMany { volume: name.to_owned(), most: SNAPSHOTS_MAX }.into());
        }
        Ok(())
    }
}

fn check_label(of: &str, label: &str) -> Result<(), SnapshotError> {
    if names::label_bytes_max(of) == 0 {
        return Err(SnapshotError::NameTooLong(of.to_owned()));
    }
    let (volume, clean) = (of.to_owned(), words::clean(label));
    names::check(label)
        .and_then(|()| names::check_snapshot(&format!("{of}@{label}")))
        .map_err(|reason| SnapshotError::Label { volume, label: clean, reason })
}

/// Returns the label of a moment: `20261130T050102`, in UTC.
pub(super) fn label_of(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000;
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date_of(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}")
}

/// Returns year, month and day of a day since 1970 in the Gregorian calendar. Years are counted from March on, so that the leap day
/// is the last one of a year.
fn date_of(days: u64) -> (u64, u64, u64) {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    /// From the first of March of the year 0 to 1970.
    const DAYS_BEFORE_1970: u64 = 719_468;
    let days = days + DAYS_BEFORE_1970;
    let (era, day) = (days / DAYS_OF_400_YEARS, days % DAYS_OF_400_YEARS);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let from_march = (5 * day + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let day = day - (153 * from_march + 2) / 5 + 1;
    (400 * era + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::label_of;

    #[test]
    fn a_label_is_the_moment_in_utc() {
        for (seconds, label) in [
            (0, "19700101T000000"),
            (951_782_400, "20000229T000000"),
            (1_709_251_199, "20240229T235959"),
            (1_796_014_862, "20261130T050102"),
            (4_107_542_400, "21000301T000000"),
        ] {
            assert_eq!(label_of(seconds * 1000 + 999), label);
        }
    }
}
