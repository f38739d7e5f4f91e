//! Tests of VMs without disks in real QEMU processes: started, found again, ended, and moved between two hosts' lists.

use std::fs::Permissions;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};

use hypervisor::{MemoryOptions, MemoryTransfer, MigrationStatus, RunState};
use migration::vm::cold::{Form, Found};
use tempfile::TempDir;

use super::*;
use crate::config::{QemuUser, RunsAs, SocketAccess, VmUsers};
use crate::take_over::{Estate, Listening, ServiceManager};
use crate::vms::moving::Terms;

/// Longer than any step takes on fully loaded processors.
const DEADLINE: Duration = Duration::from_secs(120);
/// A VM whose firmware finds nothing to boot.
const DEFINITION: &str = r#"
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "32", "-nodefaults", "-no-user-config", "-display", "none",
        "-name", "{name}", "-qmp", "unix:{qmp},server=on,wait=off", "-drive", "if=pflash,format=raw,file={file:vars}"]
    [files]
    vars = "VARS"
"#;

/// The parts of a daemon that these tests need.
struct Host {
    folder: TempDir,
    sockets: SocketFolder,
    vms: Arc<Vms>,
}

impl Host {
    /// Returns `None`, and reports it, if there is no QEMU.
    fn new() -> Option<Self> {
        const QEMU: &str = "qemu-system-x86_64";
        if std::process::Command::new(QEMU).arg("--version").output().is_err() {
            omission::machine_lacks(QEMU);
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let sockets = SocketFolder::open(
            &folder.path().join("run/volumes"),
            Listening::new(ServiceManager::Absent, Estate::default()),
        )
        .unwrap();
        // Flash must have this size.
        std::fs::write(folder.path().join("vars"), vec![0xff; 256 << 10]).unwrap();
        let vms = Vms::open(folder.path(), &sockets, &MachinesConfig::default());
        Some(Self { folder, sockets, vms })
    }

    fn add(&self, name: &str) {
        self.vms.add(name, &self.definition()).unwrap();
    }

    fn definition(&self) -> String {
        DEFINITION.replace("VARS", self.folder.path().join("vars").to_str().unwrap())
    }

    async fn start(&self, name: &str) -> Alive {
        self.vms.start(name, &self.sockets).await.unwrap();
        self.vms.alive(name).unwrap()
    }

    /// Loses everything that a killed daemon loses. Its tasks must have ended with its runtime.
    fn restart(&mut self) {
        self.vms = Vms::open(self.folder.path(), &self.sockets, &MachinesConfig::default());
    }

    async fn state(&self, name: &str) -> RunState {
        self.vms.qemu(name).unwrap().status().await.unwrap()
    }

    /// Waits until a VM has ended, and returns its last words if it has crashed.
    async fn until_ended(&self, name: &str) -> Option<String> {
        loop {
            let changed = self.vms.changed.notified();
            match self.vms.life(name).unwrap() {
                Life::Stopped => return None,
                Life::Crashed(message) => return Some(message),
                Life::Suspended(_) => return None,
                Life::Starting | Life::Alive(_) => changed.await,
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let entries = self.vms.entries();
        for entry in entries.values() {
            if let Life::Alive(alive) = &entry.life {
                alive.process.kill();
            }
        }
    }
}

#[tokio::test]
async fn files_that_a_machine_finds_at_the_other_host_are_compared_before_all_else() {
    let Some(mut host) = Host::new() else { return };
    let folder = host.folder.path().to_owned();
    host.vms = Vms::open(
        &folder,
        &host.sockets,
        &MachinesConfig { folders: vec![folder.clone()], ..Default::default() },
    );
    let image = folder.join("code.fd");
    std::fs::write(&image, "one").unwrap();
    let image = image.to_str().unwrap();
    let command = ["qemu", "-bios", image].map(str::to_owned);
    let needs = needs::Needs {
        files: same_files::fingerprints(&command, &MachinesConfig::default().runs_as.user()),
        ..needs::Needs::default()
    };
    let files = vec![("vars".to_owned(), vec![1; 100])];
    let definition = format!(
        "command = ['qemu-system-x86_64', '-nodefaults', '-qmp', 'unix:{{qmp}},server=on,wait=off', '-bios', '{image}']"
    );
    let name = "web1".to_owned();
    let manifest =
        Manifest { name, definition, files, needs, tpm_state: None, preferences: Preferences::default() }
            .encode()
            .unwrap();
    let (same, scope) = host.vms.compare_files(&manifest).await.unwrap();
    assert_eq!((same, scope), (Differences::default(), Scope::Everything));
    std::fs::write(image, "other").unwrap();
    let alone = Vms::files_alone(&manifest).unwrap();
    assert!(alone.len() < manifest.len(), "what goes along is left out");
    let (Differences { faults, warnings }, scope) = host.vms.compare_files(&alone).await.unwrap();
    assert!(faults.len() == 1 && faults[0].contains("code.fd: there it has another size"), "{faults:?}");
    assert_eq!((warnings.len(), scope), (0, Scope::Files));
    assert!(host.vms.compare_files(b"junk").await.is_err());
    // A host where it may not be named says nothing of it.
    let Some(other) = Host::new() else { return };
    let refused = other.vms.compare_files(&alone).await.unwrap_err().to_string();
    assert!(refused.contains("a VM from another host may not use the file"), "{refused}");
}

#[tokio::test]
async fn a_machine_is_added_started_stopped_and_removed() {
    let Some(host) = Host::new() else { return };
    host.add("m");
    assert!(matches!(host.vms.add("m", &host.definition()), Err(VmError::Exists(_))));
    assert!(matches!(host.vms.stop("m", Ending::AtOnce).await, Err(VmError::NotRunning(_))));
    host.start("m").await;
    assert_eq!(host.state("m").await, RunState::Running);
    assert!(matches!(host.vms.start("m", &host.sockets).await, Err(VmError::RunsAlready(_))));
    assert!(matches!(host.vms.remove("m"), Err(VmError::Running(_))));
    // Firmware alone ignores a power button.
    let refused = host.vms.stop("m", Ending::PowerButton(Duration::from_millis(10))).await;
    assert!(matches!(refused, Err(VmError::RunsOn { .. })), "{refused:?}");
    assert_eq!(host.state("m").await, RunState::Running);
    host.vms.stop("m", Ending::AtOnce).await.unwrap();
    assert!(matches!(host.vms.life("m").unwrap(), Life::Stopped));
    host.vms.remove("m").unwrap();
    assert!(host.vms.list().is_empty());
    assert!(!host.folder.path().join("vms/m").exists());
}

#[tokio::test]
async fn a_machine_that_is_killed_has_crashed_and_can_be_started_again() {
    let Some(mut host) = Host::new() else { return };
    host.add("m");
    host.start("m").await.process.kill();
    assert!(host.until_ended("m").await.is_some());
    host.restart();
    assert!(matches!(host.vms.life("m").unwrap(), Life::Crashed(_)));
    host.start("m").await;
    assert_eq!(host.state("m").await, RunState::Running);
}

#[tokio::test]
async fn a_qemu_that_does_not_start_says_why() {
    let Some(host) = Host::new() else { return };
    let text = host.definition().replace("\"-m\", \"32\"", "\"-machine\", \"teapot\"");
    host.vms.add("m", &text).unwrap();
    let ended = host.vms.start("m", &host.sockets).await.unwrap_err();
    assert!(ended.to_string().contains("machine type"), "{ended}");
    host.vms.remove("m").unwrap();
    host.vms.add("m", &host.definition().replace("qemu-system-x86_64", "/no/qemu")).unwrap();
    let missing = host.vms.start("m", &host.sockets).await.unwrap_err();
    assert!(missing.to_string().contains("/no/qemu"), "{missing}");
    assert!(matches!(host.vms.life("m").unwrap(), Life::Stopped));
}

/// Runs the life of one daemon: its connections and tasks end with it.
fn life<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

#[test]
fn a_machine_outlives_the_daemon_and_is_found_again() {
    let Some(mut host) = Host::new() else { return };
    host.add("m");
    let before = life(async { host.start("m").await.process_id() });
    host.restart();
    assert!(matches!(host.vms.life("m").unwrap(), Life::Starting));
    life(async {
        host.vms.find_running();
        host.vms.until_found("m").await;
        assert_eq!(host.vms.alive("m").unwrap().process_id(), before);
        assert_eq!(host.state("m").await, RunState::Running);
        host.vms.alive("m").unwrap().process.kill();
        assert!(host.until_ended("m").await.is_some());
    });
}

#[test]
fn a_machine_that_never_answers_again_can_be_ended() {
    let Some(mut host) = Host::new() else { return };
    host.add("m");
    let process = life(async { host.start("m").await.process_id() });
    let process = rustix::process::Pid::from_raw(process).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::STOP).unwrap();
    host.restart();
    life(async {
        host.vms.find_running();
        let asked = host.vms.stop("m", Ending::PowerButton(Duration::ZERO)).await;
        assert!(matches!(asked, Err(VmError::Silent(_))), "{asked:?}");
        host.vms.stop("m", Ending::AtOnce).await.unwrap();
        assert!(matches!(host.vms.life("m").unwrap(), Life::Crashed(_)));
        host.start("m").await;
        host.vms.stop("m", Ending::AtOnce).await.unwrap();
    });
}

#[test]
fn a_machine_that_ended_while_nobody_looked_has_crashed() {
    let Some(mut host) = Host::new() else { return };
    host.add("m");
    let alive = life(host.start("m"));
    alive.process.kill();
    host.restart();
    life(async {
        host.vms.find_running();
        assert!(host.until_ended("m").await.unwrap().contains("while the daemon was away"));
    });
}

/// Moves a VM from `source` until its memory is at `target` and neither runs.
async fn move_memory(source: &Host, target: &Host, name: &str) {
    let leaving = source.vms.leaving(name).await.unwrap();
    let manifest = source.vms.definition(name, Vec::new()).await.unwrap();
    assert_eq!(Vms::announced(&manifest).unwrap(), (name.to_owned(), vec![]));
    let arrival = target.vms.prepare_arrival(&manifest, Terms::default(), &target.sockets).await.unwrap();
    assert_eq!(arrival.name, name);
    let stream = target.folder.path().join("memory");
    arrival.vm.expect_memory(&stream, MemoryTransfer::default()).await.unwrap();
    let options = MemoryOptions::for_downtime(Duration::from_millis(300));
    leaving.offer_memory(&stream, options).await.unwrap();
    leaving.await_status(&[MigrationStatus::PreSwitchover], DEADLINE).await.unwrap();
    leaving.switch_over().await.unwrap();
    leaving.await_status(&[MigrationStatus::Completed], DEADLINE).await.unwrap();
    arrival.vm.await_loaded(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn a_machine_goes_to_another_host_and_comes_home() {
    let (Some(here), Some(there)) = (Host::new(), Host::new()) else { return };
    here.add("m");
    here.start("m").await;
    for (source, target) in [(&here, &there), (&there, &here)] {
        move_memory(source, target, "m").await;
        assert!(matches!(source.vms.stop("m", Ending::AtOnce).await, Err(VmError::Busy { .. })));
        assert!(matches!(target.vms.remove("m"), Err(VmError::Busy { .. })));
        target.vms.arrived("m").await.unwrap();
        target.vms.qemu("m").unwrap().resume().await.unwrap();
        source.vms.left("m").await.unwrap();
        assert!(source.vms.list().is_empty());
        assert_eq!(target.state("m").await, RunState::Running);
        let vars = target.folder.path().join("vms/m/files/vars");
        assert_eq!(std::fs::metadata(vars).unwrap().len(), 256 << 10);
    }
    // Repeating a step has no effect.
    there.vms.left("m").await.unwrap();
}

#[tokio::test]
async fn a_machine_that_does_not_arrive_goes_on_at_home_and_leaves_nothing_there() {
    let (Some(here), Some(there)) = (Host::new(), Host::new()) else { return };
    here.add("m");
    here.start("m").await;
    move_memory(&here, &there, "m").await;
    assert_eq!(there.vms.unsettled(), [("m".to_owned(), Standing::Arriving)]);
    assert_eq!(here.vms.unsettled(), [("m".to_owned(), Standing::Leaving)]);
    there.vms.abandon_arrival("m").await.unwrap();
    there.vms.abandon_arrival("m").await.unwrap();
    assert!(there.vms.list().is_empty() && !there.folder.path().join("vms/m").exists());
    here.vms.qemu("m").unwrap().resume().await.unwrap();
    here.vms.stayed("m").await.unwrap();
    assert_eq!(here.state("m").await, RunState::Running);
    assert!(here.vms.unsettled().is_empty());
    here.vms.stop("m", Ending::AtOnce).await.unwrap();
}

#[tokio::test]
async fn what_a_machine_needs_is_looked_for_before_it_comes() {
    let (Some(here), Some(there)) = (Host::new(), Host::new()) else { return };
    here.add("m");
    here.start("m").await;
    let volumes = vec![("root".to_owned(), 7)];
    let sent = here.vms.definition("m", volumes.clone()).await.unwrap();
    let wished = Terms { side_streams: 3, ..Terms::default() };
    assert_eq!(there.vms.examine(&sent, wished).await.unwrap(), (volumes, wished));
    let manifest = Manifest::decode(&sent).unwrap();
    let needs = manifest.needs.clone();
    assert!(needs.machine_type.as_ref().is_some_and(|name| name.contains('-')), "its full name: {needs:?}");
    assert_eq!(needs.memory_bytes, Some(32 << 20));
    let greater = needs::Needs { version: Some((999, 0)), memory_bytes: Some(u64::MAX), ..needs };
    let definition = manifest.definition.replace("\"-m\"", "\"-kernel\", \"/usr/no/kernel\", \"-m\"");
    let sent = Manifest { needs: greater, definition, ..manifest }.encode().unwrap();
    let refused = there.vms.examine(&sent, wished).await.unwrap_err().to_string();
    for expected in ["older than the 999.0", "are free there", "-kernel /usr/no/kernel"] {
        assert!(refused.contains(expected), "{refused}");
    }
    assert!(there.vms.list().is_empty());
}

#[tokio::test]
async fn a_stopped_vm_is_kept_with_what_its_definition_names_and_nothing_else() {
    let (Some(here), Some(mut there)) = (Host::new(), Host::new()) else { return };
    let state = here.folder.path().join("state");
    std::fs::create_dir(&state).unwrap();
    std::fs::write(state.join("tpm2-00.permall"), b"keys").unwrap();
    let words = r#"-chardev", "socket,id=t,path={tpm}", "-tpmdev", "emulator,id=t,chardev=t", "-device", "tpm-tis,tpmdev=t"#;
    let text = here.definition().replace("-nodefaults", &format!("-nodefaults\", \"{words}"));
    here.vms.add("m", &format!("{text}[tpm]\nstate = '{}'\n", state.display())).unwrap();
    assert_eq!(here.vms.form("m").unwrap(), Form::Cold);
    here.vms.leaving_cold("m").await.unwrap();
    for refused in
        [here.vms.start("m", &here.sockets).await, here.vms.remove("m"), here.vms.leaving_cold("m").await]
    {
        assert!(refused.unwrap_err().to_string().contains("is on its way to another host"));
    }
    let sent = here.vms.describe_cold("m", Vec::new(), Extent::Everything).await.unwrap();
    assert!(here.vms.describe_cold("m", Vec::new(), Extent::Needs).await.unwrap().len() < sent.len());
    let manifest = Manifest::decode(&sent).unwrap();
    // Files that are not the VM's, or not all of them, are not kept, and nothing of the VM is.
    let other = |files: &[&str], tpm_state: Option<&[u8]>, definition: &str| {
        let files = files.iter().map(|name| ((*name).to_owned(), vec![1; 100])).collect();
        let (tpm_state, definition) = (tpm_state.map(<[u8]>::to_vec), definition.to_owned());
        Manifest { files, tpm_state, definition, ..manifest.clone() }.encode().unwrap()
    };
    for wrong in [
        other(&[], None, &manifest.definition),
        other(&["vars", "other"], None, &manifest.definition),
        other(&["vars", "vars"], None, &manifest.definition),
        other(&["vars"], Some(b"keys"), &here.definition()),
        sent[1..].to_vec(),
    ] {
        assert!(there.vms.keep_cold(&wrong).await.is_err());
        assert!(there.vms.list().is_empty() && !there.folder.path().join("vms/m").exists());
    }
    assert_eq!(there.vms.what_is_kept(&sent).await.unwrap(), Found::Nothing);
    there.vms.keep_cold(&sent).await.unwrap();
    there.restart();
    assert_eq!(there.vms.unsettled(), [("m".to_owned(), Standing::Arriving)]);
    assert_eq!(there.vms.what_is_kept(&sent).await.unwrap(), Found::Same);
    for changed in [
        other(&["vars"], Some(b"keys"), &manifest.definition),
        Manifest { tpm_state: None, ..manifest.clone() }.encode().unwrap(),
    ] {
        assert_eq!(there.vms.what_is_kept(&changed).await.unwrap(), Found::Earlier);
    }
    there.vms.arrived("m").await.unwrap();
    here.vms.left("m").await.unwrap();
    assert!(here.vms.list().is_empty() && !here.folder.path().join("vms/m").exists());
    assert_eq!(there.vms.what_is_kept(&sent).await.unwrap(), Found::Another);
    assert!(!there.vms.is_cold("m") && there.vms.unsettled().is_empty());
    let kept = |path: &str| std::fs::read(there.folder.path().join("vms/m").join(path)).unwrap();
    assert_eq!((kept("files/vars"), kept("tpm/tpm2-00.permall")), (vec![0xff; 256 << 10], b"keys".to_vec()));
}

#[tokio::test]
async fn a_vm_that_runs_does_not_move_as_a_stopped_one_and_one_that_stays_is_at_home() {
    let Some(here) = Host::new() else { return };
    here.add("m");
    here.vms.leaving_cold("m").await.unwrap();
    here.vms.stayed("m").await.unwrap();
    assert!(!here.vms.is_cold("m"));
    here.start("m").await;
    assert_eq!(here.vms.form("m").unwrap(), Form::Live);
    assert!(here.vms.leaving_cold("m").await.unwrap_err().to_string().contains("started meanwhile"));
    here.vms.stop("m", Ending::AtOnce).await.unwrap();
}

#[tokio::test]
async fn what_came_and_cannot_be_started_is_not_kept() {
    let (Some(here), Some(there)) = (Host::new(), Host::new()) else { return };
    let text = here.definition().replace("\"-m\", \"32\"", "\"-machine\", \"teapot\"");
    here.vms.add("m", &text).unwrap();
    let manifest = here.vms.describe_cold("m", Vec::new(), Extent::Everything).await.unwrap();
    let refused = there.vms.prepare_arrival(&manifest, Terms::default(), &there.sockets).await.err().unwrap();
    assert!(refused.to_string().contains("machine type"), "{refused}");
    assert!(there.vms.list().is_empty());
    assert!(there.vms.prepare_arrival(&manifest[1..], Terms::default(), &there.sockets).await.is_err());
}

/// Returns whether a process with the user and the groups of a VM may use a file, by an operator of test(1).
fn may(user: &QemuUser, what: &str, path: &Path) -> bool {
    let words = ["test", what, path.to_str().unwrap()].map(str::to_owned).to_vec();
    let words = user.command(words);
    std::process::Command::new(&words[0]).args(&words[1..]).status().unwrap().success()
}

#[tokio::test]
async fn a_machine_can_open_nothing_that_is_another_ones() {
    if !rustix::process::geteuid().is_root() {
        return omission::machine_lacks("root, to run QEMU as other users");
    }
    let Some(mut host) = Host::new() else { return };
    let folder = host.folder.path().to_owned();
    std::fs::set_permissions(&folder, Permissions::from_mode(0o711)).unwrap();
    std::fs::set_permissions(folder.join("run"), Permissions::from_mode(0o711)).unwrap();
    let base = QemuUser::parse("65534:65534").unwrap();
    let machines = MachinesConfig { runs_as: RunsAs::Other(base.clone()), ..MachinesConfig::default() };
    host.vms = Vms::open(&folder, &host.sockets, &machines);
    let words = "\"-chardev\", \"socket,id=c,path={path:own},server=on,wait=off\", \"-blockdev\", \
        \"nbd,node-name=d,server.type=unix,server.path={disk:d},export={export:d},reconnect-delay=60\", \"-drive\"";
    let mut users = Vec::new();
    for name in ["a", "b"] {
        let disk = host.sockets.bind_volume(name, &SocketAccess::default()).unwrap();
        let disk = UnixListener::from(disk);
        std::thread::spawn(move || export_of_zeroes(&disk));
        let text = host.definition().replace("\"-drive\"", words) + &format!("[disks]\nd = \"{name}\"\n");
        host.vms.add(name, &text).unwrap();
        let alive = host.start(name).await;
        let user = qemu_sockets::user_of_process(alive.process_id()).unwrap();
        assert!(matches!(&machines.users, VmUsers::Each(numbers) if numbers.contains(&user)), "{user}");
        users.push((base.of_vm(user), alive));
    }
    let of = |name: &str| {
        [
            "run/volumes/NAME.sock",
            "run/vms/NAME.qmp",
            "run/vms/NAME.d",
            "data/files/vars",
            "data/own/own",
            "data/log",
        ]
        .map(|path| folder.join(path.replace("NAME", name).replace("data", &format!("vms/{name}"))))
    };
    let [(a, alive_a), (b, alive_b)] = users.try_into().ok().unwrap();
    for (user, own, others) in [(&a, "a", "b"), (&b, "b", "a")] {
        assert!(may(user, "-w", &host.sockets.volume_socket(own)), "its own disk");
        for path in
            of(others).iter().chain(&[folder.join(format!("vms/{others}/own")), folder.join("vms.json")])
        {
            // The right to write is what counts for a socket.
            let is_socket = std::fs::metadata(path).unwrap().file_type().is_socket();
            for what in if is_socket { &["-w"][..] } else { &["-r", "-w", "-x"] } {
                assert!(!may(user, what, path), "{user} {what} {}", path.display());
            }
        }
    }
    // Signalling and inspecting it is denied as well.
    for (user, other) in [(&a, &alive_b), (&b, &alive_a)] {
        let other = other.process_id();
        assert!(!may(user, "-r", Path::new(&format!("/proc/{other}/mem"))));
        let words = user.command(["sh", "-c", &format!("kill -0 {other}")].map(str::to_owned).to_vec());
        let killed = std::process::Command::new(&words[0]).args(&words[1..]).output().unwrap();
        assert!(!killed.status.success());
    }
    // Started again, it has the same number.
    host.vms.stop("a", Ending::AtOnce).await.unwrap();
    let again = host.start("a").await;
    assert_eq!(qemu_sockets::user_of_process(again.process_id()), Some(a.user));
    for name in ["a", "b"] {
        host.vms.stop(name, Ending::AtOnce).await.unwrap();
    }
}

/// Serves clients as an NBD server with one megabyte of zeroes, as far as QEMU asks when it opens a disk.
fn export_of_zeroes(listener: &UnixListener) {
    for client in listener.incoming() {
        let Ok(mut client) = client else { return };
        std::thread::spawn(move || serve_zeroes(&mut client));
    }
}

fn serve_zeroes(client: &mut UnixStream) -> std::io::Result<()> {
    const BYTES: u64 = 1 << 20;
    client.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    client.read_exact(&mut [0; 4])?;
    loop {
        let mut head = [0; 16];
        client.read_exact(&mut head)?;
        let option = u32::from_be_bytes(head[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(head[12..].try_into().unwrap()) as usize];
        client.read_exact(&mut data)?;
        let reply = |kind: u32, data: &[u8]| {
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            let length = (data.len() as u32).to_be_bytes();
            [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length, data].concat()
        };
        match option {
            // GO: one export, with flags that say that there are flags.
            7 => {
                let info = [&[0, 0][..], &BYTES.to_be_bytes(), &[0, 1]].concat();
                client.write_all(&reply(3, &info))?;
                client.write_all(&reply(1, &[]))?;
                break;
            }
            // No other option is known here.
            _ => client.write_all(&reply(0x8000_0001, &[]))?,
        }
    }
    loop {
        let mut request = [0; 28];
        client.read_exact(&mut request)?;
        let (kind, length) = (request[7], u32::from_be_bytes(request[24..].try_into().unwrap()));
        let zeroes = if kind == 0 { vec![0; length as usize] } else { Vec::new() };
        client
            .write_all(&[&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &request[8..16], &zeroes].concat())?;
    }
}
