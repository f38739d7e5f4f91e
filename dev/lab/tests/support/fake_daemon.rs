//! A program that looks like the daemon to the demo, but keeps its only volume in memory and "migrates" by writing it to
//! a file at its end.
//!
//! The test's own executable is the program: [`program`] makes a script that starts it again, with the
//! one test that calls [`main`].

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use api::{
    GuestLocation, ImageFormat, ImageKind, ImageLocation, Migration, MigrationHistory, MigrationState,
    NewVolume, Phase, SwitchOver, Volume, VolumeSource, VolumeState,
};
use tokio::signal::unix::{SignalKind, signal};

use crate::support::{Fault, Server, Style};

pub(crate) const TEST: &str = "the_fake_daemon";
/// Carries the command line, which the test harness would otherwise parse.
const ARGUMENTS: &str = "FAKE_DAEMON_ARGUMENTS";
const BEHAVIOUR: &str = "FAKE_DAEMON_BEHAVIOUR";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Good,
    /// One bit of the target's image is wrong.
    CorruptImage,
    Fails,
    Dies,
    /// The fake ends the demo with a SIGTERM, and never answers.
    Interrupts,
}

const ALL: [Behaviour; 5] =
    [Behaviour::Good, Behaviour::CorruptImage, Behaviour::Fails, Behaviour::Dies, Behaviour::Interrupts];

pub(crate) fn program(folder: &Path, behaviour: Behaviour) -> PathBuf {
    let path = folder.join("sterna");
    let executable = std::env::current_exe().unwrap();
    let script = format!(
        "#!/bin/sh\nexport {ARGUMENTS}=\"$*\" {BEHAVIOUR}={behaviour:?}\nexec '{}' --exact {TEST} --ignored --nocapture\n",
        executable.display()
    );
    // Another process writes the script. If this process had it open, so would, for a moment, a program that another test is
    // starting; and a file that is open for writing cannot be executed.
    let write = "printf %s \"$1\" >\"$2\" && chmod 755 \"$2\"";
    let written = Command::new("sh").args(["-c", write, "sh", &script]).arg(&path).status();
    assert!(written.unwrap().success());
    path
}

/// Serves until SIGTERM; does nothing unless [`program`] has started it.
pub(crate) fn main() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else { return };
    let words: Vec<&str> = arguments.split(' ').collect();
    let value = |name: &str| words[words.iter().position(|word| *word == name).unwrap() + 1];
    assert_eq!(words[0], "serve");
    let config = std::fs::read_to_string(value("--config")).unwrap();
    assert!(config.contains("[stores.first]") && config.contains("[stores.second]"), "{config}");
    let configured = |key: &str| {
        let line = config.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = ")).unwrap();
        line.trim_matches('"').to_owned()
    };
    let data_dir = PathBuf::from(configured("data_dir"));
    std::fs::create_dir(&data_dir).unwrap();
    let socket = PathBuf::from(configured("api").strip_prefix("unix:").unwrap());
    std::fs::create_dir(socket.parent().unwrap()).unwrap();
    let behaviour = std::env::var(BEHAVIOUR).unwrap();
    let behaviour = ALL.into_iter().find(|one| format!("{one:?}") == behaviour).unwrap();

    let daemon = Arc::new(FakeDaemon { behaviour, data_dir, volume: Mutex::new(None) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let serving = Arc::clone(&daemon);
        std::thread::spawn(move || listener.incoming().flatten().for_each(|stream| serving.answer(&stream)));
        terminate.recv().await;
    });
    daemon.write_image();
}

struct FakeDaemon {
    behaviour: Behaviour,
    data_dir: PathBuf,
    volume: Mutex<Option<(Server, Volume)>>,
}

impl FakeDaemon {
    fn answer(&self, mut stream: &UnixStream) {
        let mut reader = BufReader::new(stream);
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if line.trim_end().is_empty() {
                break;
            }
            head.push(line);
        }
        let length = head
            .iter()
            .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body).unwrap();
        let request = head[0].split(" HTTP").next().unwrap();
        let answer = self.respond(request, &body);
        let length = answer.len();
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
        // An interrupted demo does not read the answer.
        let _ = stream.write_all(&[head.into_bytes(), answer].concat());
    }

    fn respond(&self, request: &str, body: &[u8]) -> Vec<u8> {
        match request.split_once('?').map_or(request, |(path, _)| path) {
            "GET /v1/host" => br#"{"version":"","pid":1,"started_unix_ms":0,"data_dir":"","runtime_dir":"","engine":"","volumes":0,"migrations_running":0}"#.to_vec(),
            "POST /v1/volumes" => self.create(&serde_json::from_slice(body).unwrap()),
            "GET /v1/volumes/demo" => {
                let volume = self.volume.lock().unwrap();
                serde_json::to_vec(&volume.as_ref().unwrap().1).unwrap()
            }
            "POST /v1/volumes/demo/migrate" => self.migrate(),
            "GET /v1/migrations/m1" => {
                let state = if self.behaviour == Behaviour::Fails { MigrationState::Failed } else { MigrationState::Moved };
                serde_json::to_vec(&migration(state)).unwrap()
            }
            "GET /v1/migrations/m1/history" => {
                let migration = migration(MigrationState::Moved);
                serde_json::to_vec(&MigrationHistory { migration, recording: None }).unwrap()
            }
            other => unreachable!("the demo asks for {other}"),
        }
    }

    fn create(&self, new: &NewVolume) -> Vec<u8> {
        let VolumeSource::Create {
            size_bytes: Some(size_bytes),
            store: Some(store),
            image: None,
            format: None,
        } = &new.source
        else {
            unreachable!("the demo asks for {new:?}");
        };
        let server = Server::start_in(&self.data_dir, *size_bytes as usize, Style::Structured, Fault::None);
        let volume = Volume {
            name: new.name.clone(),
            id: String::new(),
            size_bytes: *size_bytes,
            allocated_bytes: None,
            block_size_bytes: 65536,
            store: Some(store.clone()),
            host: None,
            image: String::new(),
            kind: ImageKind::File,
            format: ImageFormat::Raw,
            read_only: false,
            generation: 0,
            uri: server.address().to_string(),
            socket: server.address().socket().display().to_string(),
            tcp_uri: None,
            state: VolumeState::Serving,
            message: None,
            creation: None,
            migration: None,
            added_unix_ms: 0,
            clients_elsewhere: Vec::new(),
            attachments: Vec::new(),
            attached_by: None,
            snapshot_of: None,
            filling: None,
            statistics: None,
        };
        let answer = serde_json::to_vec(&volume).unwrap();
        *self.volume.lock().unwrap() = Some((server, volume));
        answer
    }

    fn migrate(&self) -> Vec<u8> {
        match self.behaviour {
            Behaviour::Dies => {
                eprintln!("the fake daemon dies as it was told");
                std::process::exit(9);
            }
            Behaviour::Interrupts => {
                let demo = rustix::process::getppid().unwrap();
                rustix::process::kill_process(demo, rustix::process::Signal::TERM).unwrap();
                loop {
                    std::thread::park();
                }
            }
            Behaviour::Good | Behaviour::CorruptImage | Behaviour::Fails => {}
        }
        let mut volume = self.volume.lock().unwrap();
        let (_, volume) = volume.as_mut().unwrap();
        volume.store = Some("second".to_owned());
        volume.image = self.data_dir.with_file_name("second").join("demo.raw").display().to_string();
        serde_json::to_vec(&migration(MigrationState::Running)).unwrap()
    }

    fn write_image(&self) {
        if let Some((server, volume)) =
            self.volume.lock().unwrap().as_ref().filter(|(_, volume)| !volume.image.is_empty())
        {
            if self.behaviour == Behaviour::CorruptImage {
                server.tamper(|disk| disk[4000] ^= 1);
            }
            std::fs::copy(server.dump(), &volume.image).unwrap();
        }
    }
}

fn migration(state: MigrationState) -> Migration {
    let location = |store: &str| ImageLocation {
        store: Some(store.to_owned()),
        image: String::new(),
        kind: ImageKind::File,
        format: ImageFormat::Raw,
    };
    Migration {
        id: "m1".to_owned(),
        name: "demo".to_owned(),
        volume: "demo".to_owned(),
        source: location("first"),
        target: location("second"),
        keep_source: false,
        strategy: None,
        strategy_reason: String::new(),
        mirrored_instead: false,
        rounds: Vec::new(),
        state,
        phase: Phase::Copying,
        fraction: 0.5,
        bytes_copied: 1000,
        bytes_mirrored: 234,
        bytes_zero: 0,
        bytes_cloned: 0,
        bytes_moved: 1234,
        bytes_missing: Some(0),
        bytes_per_second: 0.0,
        seconds: 0.25,
        remaining_seconds: None,
        attempt: 1,
        waiting_for: None,
        suspended: None,
        pace: None,
        limited_by: None,
        deadline: None,
        forecast: None,
        ticket: None,
        queue: None,
        shared: false,
        replica: None,
        retry_of: None,
        retried_as: None,
        goes_on: false,
        machine: None,
        switch_over: Some(SwitchOver { gate_closed_ms: 0.5, ..SwitchOver::default() }),
        failure: None,
        message: (state == MigrationState::Failed).then(|| "the moon was too bright".to_owned()),
        guest: GuestLocation::Target,
        started_unix_ms: 0,
        ended_unix_ms: None,
        change: 1,
    }
}
