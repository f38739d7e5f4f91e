//! Text output of `sterna replica`.

use std::time::{Duration, SystemTime};

use api::{ImageKind, Replica};

use super::{dash, lines, table};
use console::units::{bytes, duration};

/// Returns the kept images as a table.
pub(crate) fn list(replicas: &Vec<Replica>) -> String {
    if replicas.is_empty() {
        return "no images are kept; to keep one: sterna migrate VOLUME --to … --keep-source\n".to_owned();
    }
    let header = ["VOLUME", "LEFT BY", "WENT TO", "STORE", "SIZE", "USED", "AGE", "WAY HOME", "IMAGE"];
    let mut table = table(&header, &[4, 5, 6]);
    for replica in replicas {
        table.add_row([
            replica.volume.clone(),
            replica.migration.clone(),
            replica.went_to.clone().unwrap_or_else(dash),
            replica.store.clone().unwrap_or_else(|| "(in place)".to_owned()),
            replica.size_bytes.map_or_else(dash, bytes),
            replica.allocated_bytes.map_or_else(dash, bytes),
            replica.kept_unix_ms.map_or_else(dash, age),
            if replica.shortens_return { "changes only" } else { "whole copy" }.to_owned(),
            replica.image.clone(),
        ]);
    }
    lines(&table)
}

/// Returns the text about a deleted image.
pub(crate) fn dropped(replica: &Replica) -> String {
    let (image, migration) = (&replica.image, &replica.migration);
    match (replica.kind, replica.allocated_bytes) {
        (ImageKind::File, Some(freed)) => {
            format!("deleted {image}, which {migration} left; {} are free again\n", bytes(freed))
        }
        (ImageKind::File, None) => format!("deleted {image}, which {migration} left\n"),
        _ => {
            format!("{image} is free for another volume; the image that {migration} left there is given up\n")
        }
    }
}

pub(crate) fn age(unix_ms: u64) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    duration(now.saturating_sub(Duration::from_millis(unix_ms)).as_secs_f64())
}
