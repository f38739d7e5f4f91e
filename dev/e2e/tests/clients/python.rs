//! Tests of the Python client of `contrib/python` with a real daemon, and of the API with unexpected requests.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use e2e::program;
use e2e::throw_away_root::repository;
use testbed::Host;
use testbed::program::Program;

/// Debian's Python, which `scripts/install-packages` installs.
const PYTHON: &str = "/usr/bin/python3";
/// Number of requests of each operation. They are the same in each run, so that failures repeat.
const ROUNDS: [&str; 4] = ["--rounds", "20", "--seed", "1"];

fn client() -> PathBuf {
    repository().join("contrib/python")
}

fn python() -> Option<Program> {
    if !Path::new(PYTHON).exists() {
        omission::machine_lacks("python3");
        return None;
    }
    Some(Program::of_package(PYTHON, "python3"))
}

/// Runs a daemon with two stores, with the client's environment.
fn daemon() -> (Host, String) {
    let mut host = Host::new(program::sterna().unwrap()).unwrap();
    host.start().unwrap();
    let address = format!("{}", host.address().unwrap());
    (host, address)
}

#[test]
fn the_client_is_what_the_document_makes_it() {
    let Some(python) = python() else { return };
    python.arg(client().join("generate.py")).arg("--check").succeed().unwrap();
}

#[test]
fn the_client_does_with_a_daemon_what_it_says() {
    let Some(python) = python() else { return };
    let (mut host, address) = daemon();
    let tests = client().join("tests");
    let run = python
        .args(["-m", "unittest", "discover", "--start-directory"])
        .arg(tests)
        .env("STERNA_HOST", &address);
    run.succeed().unwrap();
    host.ensure_alive().unwrap();
}

#[test]
fn whatever_is_asked_is_answered_as_the_document_says() {
    let Some(python) = python() else { return };
    let (mut host, address) = daemon();
    let run = python.arg(client().join("tests/fuzz.py")).args(ROUNDS).env("STERNA_HOST", &address);
    let asked = run.succeed().map_err(|error| host.with_log(error)).unwrap();
    println!("{asked}");
    host.ensure_alive().unwrap();
}
