//! Replays the corpora of fuzzing in every test run.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "the whole file is tests")]

use std::path::{Path, PathBuf};

use hostile::{TARGETS, Target};

/// Largest size of a corpus, which is in the repository.
const CORPUS_BYTES_MAX: u64 = 200 << 10;

#[test]
fn nbd_decoders_take_their_corpus() {
    replay("nbd_decoders");
}

#[test]
fn nbd_connections_take_their_corpus() {
    replay("nbd_connection");
}

#[test]
fn the_http_api_takes_its_corpus() {
    replay("http_api");
}

#[test]
fn the_configuration_takes_its_corpus() {
    replay("config");
}

#[test]
fn the_journal_takes_its_corpus() {
    replay("journal");
}

#[test]
fn the_decoders_of_remote_servers_take_their_corpus() {
    replay("remote_decoders");
}

#[test]
fn remote_stores_take_their_corpus() {
    replay("remote_store");
}

#[test]
fn qcow2_images_take_their_corpus() {
    replay("qcow2_image");
}

#[test]
fn the_frames_of_other_hosts_take_their_corpus() {
    replay("transport_frames");
}

#[test]
fn texts_that_people_paste_take_their_corpus() {
    replay("pasted_texts");
}

#[test]
fn commands_of_other_hosts_take_their_corpus() {
    replay("vm_commands");
}

#[test]
fn every_target_is_fuzzed_and_has_a_small_corpus() {
    for Target { name, .. } in TARGETS {
        let program = folder().join("fuzz_targets").join(name).with_extension("rs");
        assert!(program.is_file(), "{} is missing", program.display());
        let sizes: Vec<u64> = corpus(name).iter().map(|path| path.metadata().unwrap().len()).collect();
        assert!(!sizes.is_empty(), "the corpus of {name} is empty");
        let bytes: u64 = sizes.iter().sum();
        assert!(bytes <= CORPUS_BYTES_MAX, "the corpus of {name} has {bytes} bytes: minimise it");
    }
}

fn replay(name: &str) {
    for path in corpus(name) {
        let bytes = std::fs::read(&path).unwrap();
        // A panic would not name the file.
        println!("feeding {}", path.display());
        hostile::feed(name, &bytes);
    }
}

fn corpus(name: &str) -> Vec<PathBuf> {
    let entries = folder().join("corpus").join(name).read_dir().expect("each target has a corpus");
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz")
}
