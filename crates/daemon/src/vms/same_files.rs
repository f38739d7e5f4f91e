//! Compares files that a VM's command names by path and that do not move along: both hosts must have the same.
//!
//! ```text
//!   source: command ──► Fingerprint of each ──► description ──► target: its own file at that path ──► fault │ warning │ the same
//! ```
//! [`files::missing`] finds files that do not exist at all. Files that move along are not compared: the target
//! gets those from the source.

use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use block::held::{self, User};
use hypervisor::qemu::command_line::files::{self, NamedFile, Use};
use ring::digest::{Context, SHA256};
use rustix::fs::{FileType, OFlags};
use serde::{Deserialize, Serialize};

/// How many files are compared. A command names far fewer, and both sides read each of them.
const FILES_MAX: usize = 32;
/// How many bytes of a file are read: all of a smaller file, and evenly spread pieces of a larger one. Reading a whole DVD
/// image would delay the move, and images that differ do so in several places.
const READ_BYTES_MAX: u64 = 64 << 20;
const PIECE_BYTES: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fingerprint {
    option: String,
    path: String,
    used: Used,
    bytes: u64,
    /// The SHA-256 of the bytes that are read of it, in hexadecimal.
    hash: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Used {
    /// The VM reads it while it runs, so a guest would find another disk.
    WhileItRuns,
    /// The VM has it in its memory, whose parts must have the same sizes at the target: firmware.
    InMemory,
    /// The VM reads it at its start: a kernel, tables.
    AtStart,
}

/// The differences, in sentences that say what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Differences {
    /// The VM cannot run there with these.
    pub(crate) faults: Vec<String>,
    /// The VM can run there, and the user should know.
    pub(crate) warnings: Vec<String>,
}

/// Returns the fingerprints of this host's files that a command names and its QEMU's user may read. Leaves out unreadable
/// files: QEMU has reported them at its start. May block.
pub(super) fn fingerprints(command: &[String], user: &User) -> Vec<Fingerprint> {
    let named = files::named(command).into_iter().take(FILES_MAX);
    let taken = named.filter_map(|NamedFile { option, path, used }| {
        let (bytes, hash) = read(Path::new(&path), user).ok()??;
        Some(Fingerprint { option, path, used: used.into(), bytes, hash })
    });
    taken.collect()
}

/// Does the same for a VM without a hypervisor, whose firmware and kernel are read anew at its next start: the files that its
/// guest finds as disks.
pub(super) fn fingerprints_of_disks(command: &[String], user: &User) -> Vec<Fingerprint> {
    let found = fingerprints(command, user).into_iter();
    found.filter(|found| found.used == Used::WhileItRuns).collect()
}

/// Compares this host's files at the paths that a command names with the other host's fingerprints, as far as they exist here.
/// May block. **N.B.** The command must have been parsed here: the other host's fingerprints of other files are ignored. A file
/// that `user`, as whom QEMU would run, may not read counts as missing, and nothing is said of it.
pub(super) fn differences(command: &[String], theirs: &[Fingerprint], user: &User) -> Differences {
    let mut differences = Differences::default();
    for NamedFile { option, path, used } in files::named(command).into_iter().take(FILES_MAX) {
        let Some(theirs) = theirs.iter().find(|theirs| theirs.path == path) else { continue };
        let (what, path) = (format!("{option} {path}"), Path::new(&path));
        let (bytes, hash) = match read(path, user) {
            Ok(Some(read)) => read,
            Ok(None) => continue,
            Err(error) => {
                differences.faults.push(format!("{what}: that file cannot be read there ({error})"));
                continue;
            }
        };
        if (bytes, &hash) == (theirs.bytes, &theirs.hash) {
            continue;
        }
        let sizes = format!("{bytes} bytes there, {} at the source", theirs.bytes);
        match used {
            Use::WhileItRuns => differences.faults.push(format!(
                "{what}: there it is another file ({sizes}), and the VM reads it while it runs: put the same one there, \
                 or restart the VM once without it"
            )),
            Use::InMemory if bytes != theirs.bytes => differences.faults.push(format!(
                "{what}: there it has another size ({sizes}), and so would the VM's memory: install the same version on \
                 both hosts"
            )),
            Use::InMemory | Use::AtStart => differences.warnings.push(format!(
                "{what}: there it is another file ({sizes}); the VM keeps the content in its memory, and uses the other file at \
                 its next start: install the same version on both hosts if that matters"
            )),
        }
    }
    differences
}

impl From<Use> for Used {
    fn from(used: Use) -> Self {
        match used {
            Use::WhileItRuns => Self::WhileItRuns,
            Use::InMemory => Self::InMemory,
            Use::AtStart => Self::AtStart,
        }
    }
}

/// Returns the size and the hash of a file; `None`: it is not a regular file, or the user may not read it.
fn read(path: &Path, user: &User) -> io::Result<Option<(u64, String)>> {
    // Checked before it is opened, because opening a pipe may block for ever. A file that is not found may exist for root alone.
    let Ok(found) = held::find(path) else { return Ok(None) };
    if found.kind() != FileType::RegularFile || !found.lets_read(user) {
        return Ok(None);
    }
    let file = found.open(OFlags::RDONLY)?;
    let bytes = file.metadata()?.len();
    let (mut hash, mut piece) = (Context::new(&SHA256), vec![0; PIECE_BYTES as usize]);
    for start in pieces(bytes) {
        let length = PIECE_BYTES.min(bytes - start) as usize;
        let Some(piece) = piece.get_mut(..length) else { break };
        file.read_exact_at(piece, start)?;
        hash.update(piece);
    }
    let digest = hash.finish();
    Ok(Some((bytes, digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect())))
}

/// Returns where pieces begin: all pieces of a small file, and evenly spread ones of a large file, with its first and last bytes.
fn pieces(bytes: u64) -> impl Iterator<Item = u64> {
    let count = bytes.div_ceil(PIECE_BYTES).min(READ_BYTES_MAX / PIECE_BYTES);
    let is_whole = bytes <= READ_BYTES_MAX;
    (0..count).map(move |piece| match is_whole {
        true => piece * PIECE_BYTES,
        // There are at least two, and the product fits: a file has less than 2^63 bytes, so it is divided first.
        false => {
            (bytes - PIECE_BYTES) / (count - 1) * piece
                + (bytes - PIECE_BYTES) % (count - 1) * piece / (count - 1)
        }
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn root() -> User {
        User { user: rustix::process::geteuid().as_raw(), groups: vec![rustix::process::getegid().as_raw()] }
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn what_differs_is_refused_or_said_with_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let put = |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
        for name in ["cd", "code", "kernel"] {
            put(name, "one");
        }
        let command = format!("qemu -cdrom {} -bios {} -kernel {}", path("cd"), path("code"), path("kernel"));
        let command = words(&command);
        let theirs = fingerprints(&command, &root());
        assert_eq!(theirs.len(), 3);
        let told = || {
            let Differences { faults, warnings } = differences(&command, &theirs, &root());
            (faults.join("; "), warnings.join("; "))
        };
        assert_eq!(told(), Default::default());
        let (faults, warnings) = (vec![], vec![]);
        assert_eq!(
            differences(&words("qemu -m 1"), &theirs, &root()),
            Differences { faults, warnings },
            "it names none"
        );
        put("kernel", "two");
        put("code", "two");
        let (faults, warnings) = told();
        assert_eq!(faults, "");
        assert!(warnings.contains("-kernel") && warnings.contains("-bios"), "{warnings}");
        put("code", "longer");
        put("cd", "two");
        let (faults, warnings) = told();
        assert!(faults.contains("-cdrom") && faults.contains("while it runs"), "{faults}");
        assert!(faults.contains("-bios") && faults.contains("6 bytes there, 3 at the source"), "{faults}");
        assert!(!warnings.contains("-bios"), "{warnings}");
        // A missing file, or something else than a file, is not compared.
        std::fs::remove_file(path("cd")).unwrap();
        std::fs::remove_file(path("code")).unwrap();
        std::fs::create_dir(path("code")).unwrap();
        assert_eq!(told().0, "");
    }

    #[test]
    fn nothing_is_said_of_files_that_were_not_checked_or_that_root_alone_may_read() {
        if !rustix::process::geteuid().is_root() {
            return omission::machine_lacks("root, to read what others may not");
        }
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        open(folder.path(), 0o711);
        let path = folder.path().join("secret");
        std::fs::write(&path, "guess").unwrap();
        let command = words(&format!("qemu -kernel {}", path.display()));
        let guesses = fingerprints(&command, &root());
        std::fs::write(&path, "root's").unwrap();
        let user = User { user: 24_005, groups: vec![24_005] };
        let told = |command: &[String]| differences(command, &guesses, &user).warnings.len();
        open(&path, 0o600);
        assert_eq!((told(&command), fingerprints(&command, &user)), (0, Vec::new()));
        open(&path, 0o644);
        assert_eq!((told(&command), told(&words("qemu -kernel /other"))), (1, 0));
    }

    #[test]
    fn of_a_large_file_pieces_from_its_first_to_its_last_byte_are_read() {
        let large = 5 * READ_BYTES_MAX + 17;
        let starts: Vec<u64> = pieces(large).collect();
        assert_eq!(starts.len() as u64, READ_BYTES_MAX / PIECE_BYTES);
        assert_eq!((starts[0], starts[starts.len() - 1]), (0, large - PIECE_BYTES));
        assert!(starts.is_sorted());
        assert_eq!(pieces(0).count(), 0);
        assert_eq!(pieces(PIECE_BYTES + 1).collect::<Vec<_>>(), [0, PIECE_BYTES]);
        // Nothing overflows, whatever a file system says.
        assert_eq!(pieces(u64::MAX).last(), Some(u64::MAX - PIECE_BYTES));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large");
        File::create(&path).unwrap().set_len(large).unwrap();
        let before = read(&path, &root()).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"x", large - 1).unwrap();
        assert_ne!(read(&path, &root()).unwrap(), before);
    }
}
