//! Compares a parsed command of another host with a real QEMU's use of the rewritten command: the same files, sockets, nodes,
//! character devices and devices, and no others.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hypervisor::qemu::command_line::understood::{Allowed, Argument, Understood, Value};
use hypervisor::qemu::command_line::{Template, Variable};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

const QEMU: &str = "qemu-system-x86_64";
const DEADLINE: Duration = Duration::from_secs(60);
const BEGIN: &str =
    "qemu-system-x86_64 -accel tcg -m 32 -nodefaults -display none -qmp unix:{qmp},server=on,wait=off";

/// What the firmware of a machine and of its cards has at the most.
const FIRMWARE: u64 = 8 << 20;

/// Definitions, without their common beginning: each has something that the others do not.
const DEFINITIONS: [&str; 11] = [
    "-device virtio-rng-pci,id=r -object rng-builtin,id=unused -vga std -name {name} -no-reboot -usb",
    "-blockdev driver=nbd,node-name=d,server.type=unix,server.path={disk:d},export={export:d},reconnect-delay=60 -blockdev \
     raw,node-name=top,file=d,cache.direct=on -device virtio-blk-pci,drive=top,id=root,serial=s -device virtio-balloon-pci",
    "-drive if=virtio,format=raw,file.driver=nbd,file.server.type=unix,file.server.path={disk:d},file.export={export:d} -drive \
     if=none,id=cd,media=cdrom,file={file:a} -device ide-cd,drive=cd,id=cd0 -drive index=3,media=cdrom",
    "-drive file=nbd+unix:///{export:d}?socket={disk:d},if=none,id=x -device virtio-scsi-pci,id=s -device \
     scsi-hd,drive=x,bus=s.0,id=y -drive if=pflash,file={file:flash}",
    r#"-blockdev {"driver":"raw","node-name":"n","read-only":true,"file":{"driver":"file","filename":"{file:a}"}} -device
     {"driver":"virtio-blk-pci","drive":"n","id":"j","bootindex":1} -object {"qom-type":"iothread","id":"i"}"#,
    "-chardev socket,id=a,path={path:a},server,nowait -chardev null,id=b -chardev ringbuf,id=c,size=64K -serial chardev:a -serial \
     unix:{path:b},server=on,wait=off -parallel null -device virtio-serial-pci,id=v -device virtserialport,chardev=b,name=org.x",
    "-netdev user,id=n -device virtio-net-pci,netdev=n,mac=52:54:00:00:00:01,romfile= -nic user,model=e1000 -object \
     rng-random,id=r,filename=/dev/urandom -device virtio-rng-pci,rng=r",
    "-machine pc,usb=off -cpu qemu64,+x2apic,-svm -smp 1,maxcpus=2 -rtc base=utc -boot menu=off -smbios type=1,serial=a:b -fw_cfg \
     opt/a,string=b -global PIIX4_PM.disable_s3=1 -object memory-backend-memfd,id=m,size=1M,share=on -device \
     piix3-usb-uhci,id=usb -device usb-tablet,bus=usb.0,id=tablet -device VGA,id=vga,vgamem_mb=8",
    "-audiodev none,id=au -device AC97,audiodev=au,id=a1 -device ES1370,audiodev=au,id=a2 -device sb16,audiodev=au,id=a3 -device \
     intel-hda,id=h -device hda-duplex,audiodev=au,id=a4 -device hda-micro,audiodev=au,id=a5 -device hda-output,audiodev=au,id=a6 \
     -device piix3-usb-uhci,id=u -device usb-audio,bus=u.0,audiodev=au,id=a7 -machine pcspk-audiodev=au",
    "-m slots=2,maxmem=1G -object memory-backend-ram,id=m1,size=128M -device pc-dimm,memdev=m1,id=d1 -object \
     memory-backend-memfd,id=m2,size=0.5G,share=on -chardev ringbuf,id=c,size=1M -device \
     VGA,id=q,vgamem_mb=32 -device virtio-gpu-pci,id=g -device e1000,id=e,romsize=8388608",
    "-vga std -object memory-backend-ram,id=m,size=32M -machine memory-backend=m -device vmware-svga,vgamem_mb=64,id=w -device \
     bochs-display,id=b",
];

struct Scene {
    folder: TempDir,
    server: Child,
}

impl Scene {
    /// `None` if a program is missing, which is reported.
    fn new() -> Option<Self> {
        for program in [QEMU, "qemu-nbd"] {
            if Command::new(program).arg("--version").output().is_err() {
                omission::machine_lacks(program);
                return None;
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (name, bytes) in [("image", 1 << 20), ("a", 1 << 20), ("flash", 256 << 10)] {
            std::fs::File::create(path(name)).unwrap().set_len(bytes).unwrap();
        }
        let mut server = Command::new("qemu-nbd");
        server.args(["-t", "-e", "16", "-f", "raw", "-x", "d", "-k"]).arg(path("disk")).arg(path("image"));
        let server = server.stdin(Stdio::null()).spawn().unwrap();
        let scene = Self { folder, server };
        scene.wait_for(&scene.path("disk"));
        Some(scene)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn wait_for(&self, path: &Path) {
        let begun = Instant::now();
        while !path.exists() {
            assert!(begun.elapsed() < DEADLINE, "{} is not there", path.display());
            std::thread::yield_now();
        }
    }

    fn fill(&self, place: &Variable) -> String {
        match (place.kind.as_str(), place.name.as_str()) {
            ("qmp", _) => self.path("qmp").display().to_string(),
            ("disk", _) => self.path("disk").display().to_string(),
            ("file", name) => self.path(name).display().to_string(),
            ("path", name) => self.path(&format!("own-{name}")).display().to_string(),
            ("export", name) => name.to_owned(),
            _ => "vm".to_owned(),
        }
    }

    fn filled(&self, value: &Value) -> String {
        match value {
            Value::Place(place) => self.fill(place),
            other => other.to_string(),
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Has {
    nodes: BTreeSet<(String, String)>,
    files: BTreeSet<String>,
    character_devices: BTreeSet<String>,
    listens: BTreeSet<String>,
    connections: usize,
    on_networks: usize,
    devices: BTreeSet<String>,
    devices_without_name: usize,
    is_memory_counted: bool,
}

fn understood(scene: &Scene, understood: &Understood) -> Has {
    let mut has = Has { is_memory_counted: true, ..Has::default() };
    let mut ports = [("-serial", 0), ("-parallel", 0)];
    for argument in understood.arguments() {
        let word = |key: &str| argument.get(key).map(|value| scene.filled(value)).unwrap_or_default();
        match argument.option() {
            "-drive" | "-blockdev" => nodes(scene, argument, &mut has),
            "-chardev" => {
                has.character_devices.insert(word("id"));
                if argument.get("server") == Some(&Value::Switch(true)) {
                    has.listens.insert(word("path"));
                }
            }
            "-qmp" => {
                has.character_devices.insert("compat_monitor0".to_owned());
                has.listens.insert(word(""));
            }
            "-object" if word("filename") == "/dev/urandom" => drop(has.files.insert(word("filename"))),
            "-device" if argument.get("id").is_some() => drop(has.devices.insert(word("id"))),
            "-device" => has.devices_without_name += 1,
            option => {
                let Some((_, number)) = ports.iter_mut().find(|(port, _)| *port == option) else { continue };
                let own = format!("{}{number}", option.trim_start_matches('-'));
                *number += 1;
                match argument.get("") {
                    Some(Value::Place(place)) => {
                        has.listens.insert(scene.fill(place));
                        has.character_devices.insert(own);
                    }
                    Some(Value::Word(word)) if word == "null" => drop(has.character_devices.insert(own)),
                    _ => {}
                }
            }
        }
    }
    has
}

fn nodes(scene: &Scene, argument: &Argument, has: &mut Has) {
    for (key, value) in argument.values() {
        let is_file =
            matches!(value, Value::Path(_)) || matches!(value, Value::Place(place) if place.kind == "file");
        if is_file {
            has.nodes.insert(("file".to_owned(), scene.filled(value)));
            has.files.insert(scene.filled(value));
        } else if key.ends_with("server.path") {
            has.nodes.insert(("nbd".to_owned(), scene.filled(value)));
            has.connections += 1;
        }
    }
    if argument.get("if").is_some_and(|kind| kind.to_string() == "virtio") {
        has.devices_without_name += 1;
    }
}

fn real(scene: &Scene, process: u32, counted: u64) -> Has {
    let mut monitor = Monitor::connect(&scene.path("qmp"));
    let bytes = monitor.memory_bytes();
    let mut has = Has { is_memory_counted: bytes <= counted + FIRMWARE, ..Has::default() };
    assert!(has.is_memory_counted, "{bytes} bytes are taken, and {counted} were counted");
    for node in monitor.list("query-named-block-nodes", &json!({})) {
        let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
        let file = text("file");
        let reached = match text("drv").as_str() {
            "nbd" => file.split_once("socket=").map_or(file.clone(), |(_, socket)| socket.to_owned()),
            _ => file.clone(),
        };
        let is_format = ["raw", "qcow2", "throttle"].contains(&text("drv").as_str());
        if !is_format {
            has.nodes.insert((text("drv"), reached));
        }
    }
    let devices = monitor.list("query-chardev", &json!({}));
    has.character_devices =
        devices.iter().map(|device| device["label"].as_str().unwrap().to_owned()).collect();
    let named = monitor.list("qom-list", &json!({ "path": "/machine/peripheral" }));
    let unnamed = monitor.list("qom-list", &json!({ "path": "/machine/peripheral-anon" }));
    let is_device =
        |property: &&Json| property["type"].as_str().is_some_and(|kind| kind.starts_with("child<"));
    has.devices =
        named.iter().filter(is_device).map(|found| found["name"].as_str().unwrap().to_owned()).collect();
    has.devices_without_name = unnamed.iter().filter(is_device).count();
    let mut sockets = BTreeSet::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().flatten() {
        let Ok(link) = std::fs::read_link(entry.path()) else { continue };
        let link = link.display().to_string();
        if let Some(socket) = link.strip_prefix("socket:[") {
            sockets.insert(socket.trim_end_matches(']').to_owned());
        } else if link.starts_with('/')
            && !["/dev/null", "/memfd:"].iter().any(|known| link.starts_with(known))
        {
            has.files.insert(link);
        }
    }
    let unix = std::fs::read_to_string(format!("/proc/{process}/net/unix")).unwrap();
    for line in unix.lines().skip(1) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if !fields.get(6).is_some_and(|inode| sockets.remove(*inode)) {
            continue;
        }
        // A listening socket has a flag in its state; a connected client has no name.
        match (fields[3], fields.get(7)) {
            ("00010000", Some(path)) => drop(has.listens.insert((*path).to_owned())),
            (_, None) => has.connections += 1,
            (_, Some(_)) => {}
        }
    }
    has.on_networks = sockets.len();
    has
}

struct Monitor(BufReader<UnixStream>);

impl Monitor {
    fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut monitor = Self(BufReader::new(stream));
        monitor.0.read_line(&mut String::new()).unwrap();
        monitor.execute("qmp_capabilities", &json!({}));
        monitor
    }

    fn execute(&mut self, command: &str, arguments: &Json) -> Json {
        let order = json!({ "execute": command, "arguments": arguments });
        self.0.get_mut().write_all(format!("{order}\n").as_bytes()).unwrap();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).unwrap();
            let answer: Json = serde_json::from_str(&line).unwrap();
            if answer.get("event").is_none() {
                return answer.get("return").ok_or(&answer).unwrap().clone();
            }
        }
    }

    /// What its memory, that of its devices and its backends come to: the blocks that QEMU has, and backends that nothing uses.
    fn memory_bytes(&mut self) -> u64 {
        let arguments = json!({ "command-line": "info ramblock" });
        let text = self.execute("human-monitor-command", &arguments);
        let lines = text.as_str().unwrap().lines().skip(1);
        // Name, page size and its unit, offset, used, total.
        let blocks: Vec<(String, u64)> = lines
            .map(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let used = fields[4].trim_start_matches("0x");
                (fields[0].to_owned(), u64::from_str_radix(used, 16).unwrap())
            })
            .collect();
        assert!(!blocks.is_empty(), "{text}");
        blocks.iter().map(|(_, bytes)| bytes).sum()
    }

    fn list(&mut self, command: &str, arguments: &Json) -> Vec<Json> {
        self.execute(command, arguments).as_array().unwrap().clone()
    }
}

#[test]
fn a_real_qemu_has_what_was_understood_and_nothing_else() {
    let Some(scene) = Scene::new() else { return };
    for definition in DEFINITIONS {
        let command: Vec<String> =
            BEGIN.split_whitespace().chain(definition.split_whitespace()).map(str::to_owned).collect();
        let read = Understood::read(&command, Allowed::default());
        let read = read.unwrap_or_else(|refused| panic!("{definition}: {refused}"));
        let written = read.write();
        let words = written.iter().map(|word| Template::parse(word).fill(|place| scene.fill(place)));
        let words: Vec<String> = words.collect();
        let _ = std::fs::remove_file(scene.path("qmp"));
        let mut qemu = Command::new(QEMU)
            .args(&words[1..])
            .arg("-S")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while UnixStream::connect(scene.path("qmp")).is_err() {
            let ended = qemu.try_wait().unwrap();
            assert!(ended.is_none() && begun.elapsed() < DEADLINE, "{ended:?}: {}", words.join(" "));
            std::thread::yield_now();
        }
        let found = real(&scene, qemu.id(), read.memory_bytes());
        qemu.kill().unwrap();
        qemu.wait().unwrap();
        assert_eq!(found, understood(&scene, &read), "{}", words.join(" "));
    }
}
