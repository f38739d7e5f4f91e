//! Text output of `sterna volume snapshots`.

use api::Volume;
use console::units::bytes;

use super::{dash, lines, table};

/// Returns snapshots as a table, with the time of each by `moment`.
pub(crate) fn list(snapshots: &[Volume], moment: impl Fn(u64) -> String) -> String {
    if snapshots.is_empty() {
        return "no snapshots; take one with: sterna volume snapshot NAME\n".to_owned();
    }
    let mut table = table(&["SNAPSHOT", "TAKEN", "SIZE", "USED", "STORE", "STATE", "CLIENTS"], &[2, 3, 6]);
    for snapshot in snapshots {
        let taken = snapshot.snapshot_of.as_ref().map(|taken| moment(taken.taken_unix_ms));
        let clients = snapshot.statistics.as_ref().map(|statistics| statistics.connections.to_string());
        table.add_row([
            snapshot.name.clone(),
            taken.unwrap_or_else(dash),
            bytes(snapshot.size_bytes),
            snapshot.allocated_bytes.map_or_else(dash, bytes),
            snapshot.store.clone().unwrap_or_else(dash),
            snapshot.state.name().to_owned(),
            clients.unwrap_or_else(dash),
        ]);
    }
    lines(&table)
}
