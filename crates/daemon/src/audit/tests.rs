//! Tests of the audit log with real files: what is written and kept, and that no order waits for it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use migration::HostId;
use serde_json::{Map, Value, json};

use super::writer::{FILE_BYTES_MAX, KEPT_FILES, numbered};
use super::{Audit, By, Entry, FILE, QUEUE_MAX};

fn entry(order: &str) -> Entry {
    let by = Some(By::Process { uid: 7, gid: 8, pid: Some(9) });
    let (details, outcome) = (Map::new(), "done".to_owned());
    Entry { by, order: order.to_owned(), path: None, details, status: Some(200), outcome, seconds: 0.5 }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn an_entry_is_a_line_that_only_the_owner_reads_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    for order in ["POST", "DELETE"] {
        let audit = Audit::begin(folder.path());
        audit.note(&entry(order));
        audit.flush();
        assert_eq!(audit.counts(), (1, 0));
        // Another program has changed its mode.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let host = Some(By::Host { id: HostId([1; 32]) });
        audit.note(&Entry { by: host, status: None, path: Some("a\nb".to_owned()), ..entry("offer") });
        audit.flush();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let lines = lines(&path);
    let orders: Vec<_> = lines.iter().map(|line| line["order"].as_str().unwrap()).collect();
    assert_eq!(orders, ["POST", "offer", "DELETE", "offer"]);
    assert_eq!(lines[0]["by"], json!({"uid": 7, "gid": 8, "pid": 9}));
    assert_eq!((&lines[0]["status"], &lines[0]["seconds"]), (&json!(200), &json!(0.5)));
    assert!(lines[0]["time_unix_ms"].as_u64().unwrap() > 0);
    assert!(lines[1]["by"]["host"].is_string() && lines[1].get("status").is_none(), "{}", lines[1]);
}

#[test]
fn files_are_full_at_their_limit_and_as_many_are_kept_as_may() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    let audit = Audit::begin(folder.path());
    let number_of = |file: &Path| std::fs::read_to_string(file).unwrap().len() as u64;
    for round in 0..KEPT_FILES + 3 {
        let file = std::fs::File::options().create(true).append(true).open(&path).unwrap();
        file.set_len(FILE_BYTES_MAX).unwrap();
        audit.note(&entry(&round.to_string()));
        audit.flush();
        assert_eq!(lines(&path)[0]["order"], round.to_string());
    }
    assert!((1..=KEPT_FILES).all(|number| number_of(&numbered(&path, number)) == FILE_BYTES_MAX));
    assert!(!numbered(&path, KEPT_FILES + 1).exists());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count() as u32, KEPT_FILES + 1);
}

#[test]
fn what_cannot_be_written_is_counted_and_what_comes_after_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let audit = Audit::begin(folder.path());
    audit.note(&entry("POST"));
    audit.flush();
    assert_eq!(audit.counts(), (0, 1));
    std::fs::remove_file(&path).unwrap();
    audit.note(&entry("DELETE"));
    audit.flush();
    assert_eq!(audit.counts(), (1, 1));
    assert_eq!(lines(&path)[0]["order"], "DELETE");
}

#[test]
fn a_disk_that_hangs_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    // Opening it for writing blocks until it has a reader.
    rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    let audit = Audit::begin(folder.path());
    let beyond = 10;
    // The thread may hold one batch.
    for _ in 0..2 * QUEUE_MAX + beyond {
        audit.note(&entry("POST"));
    }
    let (written, lost) = audit.counts();
    assert!(written == 0 && lost >= beyond as u64, "{written} {lost}");
    // The thread ends: the pipe has a reader, and no sender is left.
    drop(audit);
    drop(std::fs::File::open(&path).unwrap());
}
