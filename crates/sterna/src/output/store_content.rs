//! Text output of `sterna store scan`.

use std::fmt::Write as _;

use api::{FileRole, StoreContent, StoreFile, StoreKind};

use super::replicas::age;
use super::{dash, lines, table};
use console::units::bytes;

/// Returns the files of stores as a table, with advice below it.
pub(crate) fn list(stores: &Vec<StoreContent>) -> String {
    let header = ["FILE", "WHAT", "VOLUME", "MIGRATION", "SIZE", "USED", "FORMAT", "MODIFIED", "NOTE"];
    let mut table = table(&header, &[4, 5]);
    for (store, file) in stores.iter().flat_map(|store| store.files.iter().map(move |file| (store, file))) {
        table.add_row([
            spelled(store, file),
            file.role.name().to_owned(),
            file.volume.clone().unwrap_or_else(dash),
            file.migration.clone().unwrap_or_else(dash),
            file.size_bytes.map_or_else(dash, bytes),
            file.allocated_bytes.map_or_else(dash, bytes),
            file.format.map_or_else(dash, |format| format.name().to_owned()),
            file.modified_unix_ms.map_or_else(dash, |then| format!("{} ago", age(then))),
            file.note.as_deref().map(words::clean).unwrap_or_default(),
        ]);
    }
    let is_empty = stores.iter().all(|store| store.files.is_empty());
    let mut text = if is_empty { "nothing lies there\n".to_owned() } else { lines(&table) };
    for store in stores {
        // Formatting into a string does not fail.
        if store.files_left_out > 0 {
            let _ = writeln!(
                text,
                "\n!! {} more files in store {} were not examined",
                store.files_left_out, store.store
            );
        }
        if let Some(problem) = &store.problem {
            let _ = writeln!(text, "\n!! the content of store {} is unknown: {problem}", store.store);
        }
    }
    text + &advice(stores)
}

/// Returns the text about a deleted file.
pub(crate) fn dropped(file: &StoreFile) -> String {
    let freed = file.allocated_bytes.map(|freed| format!("; {} are free again", bytes(freed)));
    format!("{} is deleted{}\n", words::clean(&file.name), freed.unwrap_or_default())
}

/// Returns advice for the first file of each role that needs an action.
fn advice(stores: &[StoreContent]) -> String {
    let first = |role| {
        let mut all = stores.iter().filter(|store| store.kind == StoreKind::Folder).flat_map(|store| {
            store.files.iter().filter(move |file| file.role == role).map(move |file| spelled(store, file))
        });
        all.next()
    };
    let mut text = String::new();
    let mut add = |role, what: &str, command: &str| {
        if let Some(file) = first(role) {
            let _ = writeln!(text, "\n{what}:\n  sterna store {command} {file}");
        }
    };
    add(FileRole::Unclaimed, "unclaimed images that no other host uses become volumes by", "import");
    add(FileRole::HalfMade, "half-made targets that are not needed are deleted by", "drop");
    text
}

/// Returns the file's name as commands accept it.
fn spelled(store: &StoreContent, file: &StoreFile) -> String {
    match store.kind {
        StoreKind::Folder => format!("{}/{}", store.store, words::clean(&file.name)),
        StoreKind::Device | StoreKind::Nbd => file.name.clone(),
    }
}
