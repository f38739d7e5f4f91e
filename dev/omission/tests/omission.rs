//! Runs tests that leave something out as processes of their own, as cargo does.

#![expect(clippy::unwrap_used, reason = "the whole file is tests")]

use std::path::Path;
use std::process::Command;

use omission::{LEFT_OUT, MUST_RUN};

#[test]
fn what_the_machine_lacks_is_left_out_and_listed_unless_all_must_run() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("list");
    let line = "left out: omission: lacks_a_machine: the machine lacks a quantum computer";
    assert_eq!(run("lacks_a_machine", "1", &list), (false, String::new()));
    assert_eq!(run("lacks_a_machine", "0", &list), (true, format!("{line}\n")));
}

#[test]
fn what_the_kernel_lacks_is_left_out_and_listed_anyway() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("list");
    let line = "left out: omission: lacks_a_kernel: the kernel lacks time travel\n".to_owned();
    assert_eq!(run("lacks_a_kernel", "1", &list), (true, line.clone()));
    assert_eq!(run("lacks_a_kernel", "0", &list), (true, format!("{line}{line}")));
}

#[test]
#[ignore = "the other tests start it as a process of its own"]
fn lacks_a_machine() {
    omission::machine_lacks("a quantum computer");
}

#[test]
#[ignore = "the other tests start it as a process of its own"]
fn lacks_a_kernel() {
    omission::kernel_lacks("time travel");
}

/// Runs a test of this file; returns whether it succeeded, and what is in the list then.
fn run(test: &str, must_run: &str, list: &Path) -> (bool, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored"])
        .env(MUST_RUN, must_run)
        .env(LEFT_OUT, list)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said.contains("provide it"), !output.status.success(), "{said}");
    (output.status.success(), std::fs::read_to_string(list).unwrap_or_default())
}
