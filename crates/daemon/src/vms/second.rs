//! Second instances of a described VM: the same guest under another name, with other volumes, beside the first or in its place.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use block::held;
use hypervisor::qemu::command_line::apart::Networks;
use rustix::fs::{FileType, OFlags};

use super::arrival::blocking;
use super::manifest::{self, Manifest};
use super::{VmError, Vms};

/// The most bytes of a log that are searched at a time.
const PIECE_BYTES_MAX: u64 = 1 << 20;

/// A search for a text in the logs of a VM's consoles, each from its beginning.
#[derive(Debug)]
pub(crate) struct ConsoleSearch {
    text: Vec<u8>,
    /// Where the search goes on, by log.
    places: BTreeMap<PathBuf, u64>,
}

impl Vms {
    /// Makes a described VM one of this host, stopped, under another name and apart from everything outside. Volumes get the names
    /// that `volumes` has for theirs. Returns the logs of its consoles. After an error nothing of it is left here.
    pub(crate) async fn keep_second(
        self: &Arc<Self>,
        bytes: &[u8],
        name: &str,
        volumes: &BTreeMap<String, String>,
        networks: Networks,
    ) -> Result<Vec<String>, VmError> {
        let manifest = Manifest::decode(bytes)?;
        // N.B. Only what was parsed is kept.
        let (definition, _) = self.understand(&manifest)?;
        let (definition, consoles) = definition.apart(volumes, networks)?;
        self.keep_whole(Manifest { name: name.to_owned(), ..manifest }, definition).await?;
        Ok(consoles)
    }

    /// Searches what the consoles have written since the last search. Returns whether the text is there.
    pub(crate) async fn search_consoles(
        self: &Arc<Self>,
        vm: &str,
        consoles: &[String],
        mut search: ConsoleSearch,
    ) -> (ConsoleSearch, bool) {
        let folder = self.vm_folder(vm);
        let logs: Vec<PathBuf> =
            consoles.iter().map(|console| manifest::own_path(&folder, console)).collect();
        let text = search.text.clone();
        let found = blocking(move || {
            let found = logs.iter().any(|log| search.look(log));
            Ok((search, found))
        });
        // A thread that has ended searches again from the beginning.
        found.await.unwrap_or((ConsoleSearch { text, places: BTreeMap::new() }, false))
    }
}

impl ConsoleSearch {
    pub(crate) fn new(text: &str) -> Self {
        Self { text: text.as_bytes().to_vec(), places: BTreeMap::new() }
    }

    /// Searches a log. One that cannot be read has nothing.
    fn look(&mut self, log: &std::path::Path) -> bool {
        use std::os::unix::fs::FileExt as _;

        // N.B. QEMU can write to its folder, so links that it may have put there are not followed.
        let Ok(found) = held::find_entry(log) else { return false };
        if found.kind() != FileType::RegularFile {
            return false;
        }
        let Ok(file) = found.open(OFlags::RDONLY) else { return false };
        let place = self.places.entry(log.to_owned()).or_default();
        loop {
            let mut bytes = vec![0; PIECE_BYTES_MAX as usize];
            let Ok(count) = file.read_at(&mut bytes, *place) else { return false };
            bytes.truncate(count);
            if bytes.windows(self.text.len().max(1)).any(|window| window == self.text) {
                return true;
            }
            // The text may have begun at the end.
            let done = count.saturating_sub(self.text.len().saturating_sub(1));
            *place += done as u64;
            if done == 0 || count < PIECE_BYTES_MAX as usize {
                return false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_text_is_found_that_is_written_in_parts_and_no_link_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (log, link) = (folder.path().join("log"), folder.path().join("link"));
        let mut search = ConsoleSearch::new("login:");
        assert!(!search.look(&log), "there is no log yet");
        let mut file = std::fs::File::create(&log).unwrap();
        for (part, is_found) in [("web1 log", false), ("in", false), (": ", true)] {
            file.write_all(part.as_bytes()).unwrap();
            assert_eq!(search.look(&log), is_found, "{part}");
        }
        file.write_all(&vec![b'x'; 3 << 20]).unwrap();
        file.write_all(b"ready").unwrap();
        assert!(ConsoleSearch::new("ready").look(&log));
        std::os::unix::fs::symlink(&log, &link).unwrap();
        assert!(!ConsoleSearch::new("ready").look(&link));
    }
}
