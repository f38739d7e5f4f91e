//! Checks that only one module of the daemon deletes, renames, sizes and replaces images.

use crate::tree::{Finding, RustFile, Tree};

const DAEMON: &str = "crates/daemon/src/";
/// The modules that may change images, because they check all claims.
const CUSTODY: [&str; 2] = ["crates/daemon/src/custody.rs", "crates/daemon/src/custody/"];

/// Calls that change a file or its name.
const CALLS: [&str; 10] = [
    "fs::remove_file(",
    "fs::rename(",
    "fs::renameat(",
    "fs::renameat_with(",
    "fs::unlinkat(",
    "fs::fallocate(",
    "fs::ftruncate(",
    ".set_len(",
    ".truncate(true)",
    "remove_dir_all(",
];

/// Files and folders that change other files than images, with the kind of these files.
const OTHERS: [(&str, &str); 27] = [
    ("audit/writer.rs", "its log"),
    ("files/lock.rs", "its lock file"),
    ("files/sockets.rs", "sockets"),
    ("files/whole_file.rs", "records in the data folder"),
    ("hooks/", "records of hooks in the data folder"),
    ("images/half_made.rs", "marks beside images"),
    ("images/replicas.rs", "records in the data folder"),
    ("journal/file.rs", "the journal"),
    ("migrations/history/file.rs", "records in the data folder"),
    ("migrations/metadata.rs", "records in the data folder"),
    ("standbys/book.rs", "records in the data folder"),
    ("standbys/book/", "records in the data folder"),
    ("standbys/copy/", "the folder of a standby, which only its keeper uses"),
    ("standbys/permissions/served.rs", "its file beside the sockets"),
    ("stores/folder.rs", "tokens beside images"),
    ("take_over/channel.rs", "a socket"),
    ("vms.rs", "folders of VMs in the data folder"),
    ("vms/lifelines.rs", "a socket"),
    ("vms/manifest.rs", "folders of VMs in the data folder"),
    ("vms/moving.rs", "a socket"),
    ("vms/moving/", "sockets"),
    ("vms/probe.rs", "a socket"),
    ("vms/qemu_sockets.rs", "sockets"),
    ("vms/suspended.rs", "the memory of VMs, in a folder of its own"),
    ("vms/tpm.rs", "sockets, and the state of TPMs in the data folder"),
    ("volumes/chronicles/files.rs", "records in the data folder"),
    ("volumes/chronicles/presence.rs", "records in the data folder"),
];

/// Finds calls that change files outside of custody, except in tests.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    tree.rust().filter(|file| other_of(&file.path).is_none()).flat_map(|file| calls(&file)).collect()
}

pub(crate) fn check_exceptions(tree: &Tree) -> Vec<Finding> {
    let is_needed =
        |name: &str| tree.rust().any(|file| is_under(&file.path, name) && !calls(&file).is_empty());
    let unneeded = OTHERS.iter().filter(|(name, _)| !is_needed(name));
    unneeded
        .map(|(name, _)| {
            Finding::in_file(&format!("{DAEMON}{name}"), "changes no file: delete its exception".to_owned())
        })
        .collect()
}

fn other_of(path: &str) -> Option<&'static str> {
    OTHERS.iter().find(|(name, _)| is_under(path, name)).map(|(_, what)| *what)
}

/// Returns whether a file of the daemon is this one, or in this folder.
fn is_under(path: &str, name: &str) -> bool {
    path.strip_prefix(DAEMON)
        .is_some_and(|rest| rest == name || name.ends_with('/') && rest.starts_with(name))
}

fn calls(file: &RustFile) -> Vec<Finding> {
    let is_watched = file.path.starts_with(DAEMON)
        && !CUSTODY.iter().any(|custody| file.path.starts_with(custody))
        && file.name() != "tests.rs";
    if !is_watched {
        return Vec::new();
    }
    let lines = file.layers.code.lines().enumerate();
    let code = lines.take_while(|(_, line)| line.trim() != "mod tests {");
    let is_call = |line: &str| CALLS.iter().any(|call| line.contains(call) && !line.contains("fn "));
    let message = "let `custody` do it, if it is about an image; if it is not, say so in tidy/custody.rs";
    code.filter(|(_, line)| is_call(line))
        .map(|(index, _)| Finding::in_line(&file.path, index, message))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_is_deleted_anywhere_else_is_found() {
        let text = "//! Text.\nfn f(p: &Path) {\n    std::fs::remove_file(p);\n}\nmod tests {\n    fs::rename(a, b);\n}\n";
        let tree = Tree::of(&[
            ("crates/daemon/src/volumes/orders/remove.rs", text),
            ("crates/daemon/src/custody/steps.rs", text),
            ("crates/daemon/src/vms/tpm.rs", text),
            ("crates/lane/src/token.rs", text),
        ]);
        let found = check(&tree);
        let message = "let `custody` do it, if it is about an image; if it is not, say so in tidy/custody.rs";
        assert_eq!(found, [Finding::in_line("crates/daemon/src/volumes/orders/remove.rs", 2, message)]);
        assert!(!check_exceptions(&tree).is_empty());
    }
}
