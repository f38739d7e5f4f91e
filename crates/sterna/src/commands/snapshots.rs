//! `sterna volume snapshot`, `snapshots` and `revert`, and the same of VMs.

use api::{Client, NewSnapshot, RevertVolumes, Volume};
use console::units::bytes;

use crate::args::HowToKeep;
use crate::commands::CommandError;
use crate::moments::moment;
use crate::output::{self, Format, snapshots};

/// Returns an order for snapshots of nothing yet.
pub(super) fn order(how: HowToKeep) -> NewSnapshot {
    NewSnapshot { label: how.label, store: how.store, ..NewSnapshot::default() }
}

pub(super) async fn take(client: &Client, order: NewSnapshot, format: Format) -> Result<(), CommandError> {
    let taken = client.take_snapshots(&order).await?;
    output::print(format, &taken, |taken| {
        let line = |snapshot: &Volume| {
            let own =
                snapshot.allocated_bytes.map_or_else(String::new, |used| format!(", {} used", bytes(used)));
            format!("{}: {}{own}\n", snapshot.name, bytes(snapshot.size_bytes))
        };
        taken.iter().map(line).collect()
    })?;
    Ok(())
}

pub(super) async fn list(client: &Client, of: Option<&str>, format: Format) -> Result<(), CommandError> {
    // An error says that there is no such volume. One of this name that is gone is another.
    let of = match of {
        Some(of) => Some(client.volume(of).await?.id),
        None => None,
    };
    let is_of = |volume: &Volume| {
        let taken = volume.snapshot_of.as_ref();
        taken.is_some_and(|taken| of.as_ref().is_none_or(|of| taken.volume_id == *of))
    };
    let mut found: Vec<Volume> = client.volumes().await?.into_iter().filter(is_of).collect();
    found.sort_by_key(|volume| volume.snapshot_of.as_ref().map(|taken| taken.taken_unix_ms));
    Ok(output::print(format, &found, |found| snapshots::list(found, moment))?)
}

pub(super) async fn revert(
    client: &Client,
    order: &RevertVolumes,
    format: Format,
) -> Result<(), CommandError> {
    let reverted = client.revert_volumes(order).await?;
    let line = |volume: &Volume| format!("{} is what it was at {}\n", volume.name, order.snapshot);
    Ok(output::print(format, &reverted, |reverted| reverted.iter().map(line).collect())?)
}
