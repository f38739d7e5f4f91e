//! Tests of hostile clients of the API.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::ensure;
use lab::workload::random::Random;

use crate::raw::{ask_api, connect, wait_for_end};
use crate::undisturbed;

/// More connections than the daemon serves at a time.
const CROWD: usize = 300;
/// Longest idle time of a client while no other client waits.
const IDLE_MAX: Duration = Duration::from_secs(10);

#[test]
fn clients_of_the_api_that_dawdle_are_cut_and_others_get_their_turn() {
    undisturbed(|scene, _| {
        let address = scene.address()?;
        let mut crowd = Vec::new();
        for number in 0..CROWD {
            let mut stream = connect(address.path())?;
            let words: [&[u8]; 4] = [
                b"",
                b"GET /v1/ho",
                b"POST /v1/volumes HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{",
                b"GET /v1/host HTTP/1.1\r\nhost: h\r\n\r\n",
            ];
            stream.write_all(words[number % words.len()])?;
            crowd.push(stream);
        }
        // It waits for its turn behind the crowd, and is served.
        expect_answer(address.path())?;
        crowd.into_iter().try_for_each(wait_for_end)
    });
}

#[test]
fn idle_clients_of_the_api_make_room_for_others_at_once() {
    undisturbed(|scene, _| {
        let address = scene.address()?;
        let began = Instant::now();
        let mut crowd = Vec::new();
        for _ in 0..2 * CROWD {
            crowd.push(connect(address.path())?);
        }
        expect_answer(address.path())?;
        // The last of the crowd would be disconnected after this time. The crowd is more than twice the number of places.
        ensure!(began.elapsed() < IDLE_MAX, "it waited for {:?}", began.elapsed());
        drop(crowd);
        Ok(())
    });
}

#[test]
fn requests_without_measure_or_sense_are_refused() {
    undisturbed(|scene, _| {
        let address = scene.address()?;
        let api = address.path();
        let head = "GET /v1/host HTTP/1.1\r\nhost: h\r\n";
        let large = |bytes: usize| "x".repeat(bytes);
        let refused = [
            ("a long header", format!("{head}x: {}\r\n\r\n", large(1 << 20)), "431"),
            ("a long path", format!("GET /{} HTTP/1.1\r\nhost: h\r\n\r\n", large(1 << 20)), "4"),
            ("many headers", format!("{head}{}\r\n", "x: y\r\n".repeat(10_000)), "431"),
            ("a long body", post(&large(8 << 20)), "413"),
            ("no JSON", post("{\"name\": \"v"), "400"),
            ("deep JSON", post(&"[".repeat(60_000)), "400"),
            (
                "no length",
                "POST /v1/volumes HTTP/1.1\r\nhost: h\r\ncontent-length: x\r\n\r\n".to_owned(),
                "400",
            ),
            (
                "a bad chunk",
                "POST /v1/volumes HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".to_owned(),
                "400",
            ),
            (
                "no such way",
                "BREW /v1/pot HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".to_owned(),
                "404",
            ),
            ("another protocol", "SSH-2.0-x\r\n\r\n".to_owned(), "400"),
        ];
        for (what, request, status) in refused {
            let answer = ask_api(api, request.as_bytes())?;
            let expected = format!("HTTP/1.1 {status}");
            // A connection with too many bytes may be closed before its answer can be read.
            let is_cut = answer.is_empty() && request.len() > 1 << 20;
            ensure!(is_cut || answer.starts_with(&expected), "{what}: {answer:.200}");
        }
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let length = random.below(2000) as usize;
            let garbage: Vec<u8> = (0..length).map(|_| random.below(256) as u8).collect();
            let mut stream = connect(api)?;
            let _ = stream.write_all(&garbage);
        }
        expect_answer(api)
    });
}

#[test]
fn answers_that_nobody_takes_cost_bounded_memory() {
    const GROWTH_MAX: u64 = 64 << 20;
    undisturbed(|scene, _| {
        let address = scene.address()?;
        let before = scene.resident_bytes()?;
        let pipelined = "GET /v1/volumes HTTP/1.1\r\nhost: h\r\n\r\n".repeat(5000);
        let mut silent: Vec<UnixStream> = Vec::new();
        for _ in 0..50 {
            let mut stream = connect(address.path())?;
            stream.set_write_timeout(Some(Duration::from_millis(50)))?;
            // The daemon stops reading when its answers are not read.
            let _ = stream.write_all(pipelined.as_bytes());
            silent.push(stream);
        }
        expect_answer(address.path())?;
        let growth = scene.resident_bytes()?.saturating_sub(before);
        ensure!(growth < GROWTH_MAX, "the daemon has grown by {growth} bytes");
        // It closes them by itself, after the sent answers.
        silent.into_iter().try_for_each(wait_for_end)
    });
}

fn post(body: &str) -> String {
    let length = body.len();
    format!(
        "POST /v1/volumes HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn expect_answer(api: &Path) -> anyhow::Result<()> {
    let answer = ask_api(api, b"GET /v1/host HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "the API answers {answer:?}");
    Ok(())
}
