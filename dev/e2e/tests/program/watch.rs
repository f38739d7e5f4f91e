//! Tests of `sterna watch`: it prints events across restarts of the daemon, and its reader may end early.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use crate::scene::{DEADLINE, Scene, program};

struct Watch {
    child: Child,
    lines: Receiver<String>,
}

impl Watch {
    fn start(scene: &Scene, arguments: &[&str]) -> Self {
        let address = format!("unix:{}", scene.path("run/api.sock").display());
        let mut command = Command::new(program());
        command.arg("watch").args(arguments).env("STERNA_HOST", address);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (told, lines) = channel();
        let printed = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            // The pipe is closed, so its next line fails.
            let _ = printed.lines().map_while(Result::ok).try_for_each(|line| told.send(line));
        });
        Self { child, lines }
    }

    fn next_line(&mut self) -> String {
        self.lines.recv_timeout(DEADLINE).unwrap()
    }

    /// Returns the first of the next lines that matches.
    fn until(&mut self, is_so: impl Fn(&Value) -> bool) -> Value {
        loop {
            let told: Value = serde_json::from_str(&self.next_line()).unwrap();
            if is_so(&told) {
                return told;
            }
        }
    }

    /// Waits until each of these events was printed, in any order.
    fn until_all(&mut self, mut wanted: Vec<Box<dyn Fn(&Value) -> bool>>) {
        while !wanted.is_empty() {
            let told: Value = serde_json::from_str(&self.next_line()).unwrap();
            wanted.retain(|is_so| !is_so(&told));
        }
    }

    fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        testbed::signal(self.child.id(), signal).unwrap();
        let code = self.child.wait().unwrap().code();
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (code, said)
    }
}

fn is(about: &'static str, name: &'static str, event: &'static str) -> impl Fn(&Value) -> bool {
    move |told| told["about"] == about && told["name"] == name && told["event"] == event
}

#[test]
fn what_happens_is_told_as_objects_across_a_restart_of_the_daemon() {
    let mut scene = Scene::started();
    let mut watch = Watch::start(&scene, &["--json"]);
    watch.until(|told| told["about"] == "daemon" && told["event"] == "present");
    scene.create_volume();
    watch.until(is("volume", "v", "added"));
    scene.succeed(&["migrate", "v", "--to", "b"]);
    let begun = watch.until(is("migration", "m0", "begun"));
    assert_eq!(begun["migration"]["volume"], "v", "{begun}");
    let says = |told: &Value, words: &str| told["message"].as_str().unwrap().contains(words);
    let began_ms = begun["time_unix_ms"].as_u64();
    watch.until_all(vec![
        Box::new(move |told| {
            is("migration", "m0", "ended")(told)
                && says(told, "moved in ")
                && told["time_unix_ms"].as_u64() >= began_ms
        }),
        Box::new(move |told| is("volume", "v", "changed")(told) && says(told, "in b")),
    ]);
    scene.kill();
    let away = watch.until(|told| told["event"] == "away");
    assert!(away["time_unix_ms"].is_null(), "{away}");
    scene.start(None);
    watch.until(|told| told["about"] == "daemon" && told["event"] == "back");
    scene.succeed(&["volume", "remove", "v"]);
    watch.until(is("volume", "v", "removed"));
    assert_eq!(watch.end(Signal::INT), (Some(0), String::new()));
}

#[test]
fn lines_for_people_have_the_time_and_who_reads_no_more_ends_it_well() {
    let scene = Scene::started();
    let mut watch = Watch::start(&scene, &[]);
    let line = watch.next_line();
    assert!(line.contains("Z  daemon ") && line.contains(" has 0 volumes, 0 VMs, 2 stores"), "{line}");
    // This is what `head -1` does.
    let Watch { mut child, lines } = watch;
    drop(lines);
    // Later lines have no reader.
    let begun = Instant::now();
    let ended = loop {
        scene.succeed(&["volume", "create", "w", "--store", "a", "--size", "1MiB"]);
        scene.succeed(&["volume", "remove", "w"]);
        if let Some(ended) = child.try_wait().unwrap() {
            break ended;
        }
        assert!(begun.elapsed() < DEADLINE);
    };
    assert_eq!(ended.code(), Some(0));
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said, "");
}

#[test]
fn a_daemon_that_is_not_there_at_first_is_not_waited_for() {
    let mut scene = Scene::started();
    scene.stop();
    let outcome = scene.run(&["watch"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (7, ""), "{outcome:?}");
    assert!(outcome.stderr.contains("no daemon answers at"), "{outcome:?}");
}
