//! Tests of QEMU as a user of its own, which has access to its VM's resources at every host, and to nothing else of the daemon.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState};
use e2e::by_hand::ByHand;
use e2e::{Host, Pair, until, vm};

const DISK_BYTES: u64 = 64 << 20;
const FILL_BYTES: u64 = 16 << 20;
const REQUESTS: u64 = 200;
/// The user whose group QEMU has; it exists on every system.
const USER: &str = "nobody";
/// The range of numbers for VMs' users.
const NUMBERS: std::ops::RangeInclusive<u32> = 2_100_000_000..=2_100_065_535;

/// Returns the processes of the VM's folder, with their names and users.
fn processes(scene: &Host) -> anyhow::Result<Vec<(String, u32)>> {
    let folder = scene.path("data/vms").join(vm::NAME).canonicalize()?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?.path();
        if std::fs::read_link(entry.join("cwd")).is_ok_and(|at| at == folder) {
            found.push(name_and_user(&entry)?);
        }
    }
    found.sort();
    Ok(found)
}

/// Returns a process's name and user, and checks that all of its user ids are equal.
fn name_and_user(process: &Path) -> anyhow::Result<(String, u32)> {
    let status = std::fs::read_to_string(process.join("status"))?;
    let line = |key: &str| {
        let said = status.lines().find_map(|line| line.strip_prefix(key));
        said.map(str::trim).with_context(|| format!("no {key} in {status}"))
    };
    let mut users = line("Uid:")?.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>()?;
    users.dedup();
    ensure!(users.len() == 1, "{status}");
    ensure!(u64::from_str_radix(line("CapEff:")?, 16)? == 0, "{status}");
    let name = line("Name:")?.to_owned();
    ensure!(!name.starts_with("qemu") || line("Seccomp:")? == "2", "{status}");
    Ok((name, users[0]))
}

/// Checks that the VM's processes run as one user, who owns its socket and its folder, and returns the user's number.
fn check_unprivileged(scene: &Host) -> anyhow::Result<u32> {
    let user = check_users(scene)?;
    for (path, mode) in
        [("run/volumes/v.sock", 0o600), ("run/vms/web1.d", 0o700), ("data/vms/web1/own", 0o700)]
    {
        let found = std::fs::metadata(scene.path(path)).context(path)?;
        ensure!(found.uid() == user && found.mode() & 0o777 == mode, "{path}: {found:?}");
    }
    for path in ["data", "data/vms/web1", "run/vms", "run/volumes"] {
        let found = std::fs::metadata(scene.path(path)).context(path)?;
        ensure!(found.uid() == 0 && found.mode() & 0o022 == 0, "{path}: {found:?}");
    }
    ensure!(std::fs::metadata(scene.path("data"))?.mode() & 0o077 == 0, "the data folder is the daemon's");
    Ok(user)
}

/// Checks that the VM's processes run as one user of their own, and returns its number.
fn check_users(scene: &Host) -> anyhow::Result<u32> {
    let found = processes(scene)?;
    let qemu = found.iter().find(|(name, _)| name.starts_with("qemu"));
    let (_, user) = qemu.with_context(|| format!("no QEMU: {found:?}"))?;
    ensure!(NUMBERS.contains(user) && found.iter().all(|(_, owner)| owner == user), "{found:?}");
    Ok(*user)
}

/// Configures the daemon to start QEMU as [`USER`].
fn configure(scene: &mut Host) -> anyhow::Result<()> {
    scene.stop()?;
    let file = scene.path("sterna.toml");
    let text = std::fs::read_to_string(&file)?;
    std::fs::write(&file, text.replacen("[machines]\n", &format!("[machines]\nuser = '{USER}'\n"), 1))?;
    // Folders of tests are not passable for others by default.
    for folder in ["", "run"] {
        std::fs::set_permissions(scene.path(folder), std::fs::Permissions::from_mode(0o711))?;
    }
    scene.start()
}

fn migrate(from: &Host, to: &str) -> anyhow::Result<()> {
    let moved: Migration = until("the hosts see each other", || {
        let asked = from.sterna(["migrate", vm::NAME, "--to", to, "--json"])?;
        match asked.code {
            0 => Ok(Some(serde_json::from_str(&asked.stdout)?)),
            _ if asked.stderr.contains("not connected") || asked.stdout.contains("host_unreachable") => {
                Ok(None)
            }
            _ => anyhow::bail!("{asked:?}"),
        }
    })?;
    ensure!(moved.state == MigrationState::Moved, "{moved:?}");
    Ok(())
}

#[test]
fn a_machine_runs_as_a_user_of_its_own_wherever_it_goes() {
    if !rustix::process::geteuid().is_root() {
        return omission::machine_lacks("root, to run QEMU as another user");
    }
    e2e::play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        configure(alpha)?;
        configure(beta)?;
        alpha.create_volume(DISK_BYTES)?;
        let vars = alpha.path("vars");
        std::fs::write(&vars, vec![7; 64 << 10])?;
        let words = [
            "-drive",
            "if=ide,id=vars,format=raw,file={file:vars}",
            "-chardev",
            "socket,id=own,path={path:own},server=on,wait=off",
        ];
        let words: Vec<&str> = words.into_iter().chain(vm::tpm_words().iter().copied()).collect();
        let files = format!("[files]\nvars = '{}'\n", vars.display());
        let console = vm::start_for_anybody(alpha, FILL_BYTES, &words, &files)?;
        check_unprivileged(alpha)?;
        console.work_on(REQUESTS)?;
        migrate(alpha, "beta:a")?;
        vm::check_at(beta, alpha)?;
        let there = check_unprivileged(beta)?;
        console.work_on(REQUESTS)?;

        // Its disk is available again after each end of the daemon.
        beta.kill()?;
        beta.start()?;
        console.work_on(REQUESTS)?;
        beta.stop()?;
        beta.start()?;
        console.work_on(REQUESTS)?;
        ensure!(check_unprivileged(beta)? == there, "the next daemon gives it another user");
        migrate(beta, "alpha:a")?;
        vm::check_at(alpha, beta)?;
        let home = check_unprivileged(alpha)?;
        console.work_on(REQUESTS)?;
        console.verify()?;

        // After a stop and a start, files in its folders still belong to its user.
        alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        alpha.sterna(["vm", "start", vm::NAME])?.success()?;
        ensure!(check_unprivileged(alpha)? == home, "it has another user than before");
        alpha.sterna(["vm", "stop", vm::NAME, "--now"])?.success()?;
        ensure!(!alpha.path("run/vms/web1.d").exists(), "its folder goes with it");

        // A user who may not open a named file gets an error.
        std::fs::set_permissions(alpha.path(""), std::fs::Permissions::from_mode(0o700))?;
        let refused = alpha.sterna(["vm", "start", vm::NAME])?;
        ensure!(
            refused.code != 0 && refused.stderr.contains(USER) && refused.stderr.contains("chmod o+x"),
            "{refused:?}"
        );
        Ok(())
    });
}

#[test]
fn a_machine_that_somebody_started_as_another_user_is_adopted_and_moves() {
    if !rustix::process::geteuid().is_root() {
        return omission::machine_lacks("root, to run QEMU as another user");
    }
    e2e::play_pair(|pair: &mut Pair| {
        let Pair { alpha, beta, .. } = pair;
        alpha.configure(&format!("[volume_sockets]\nowner = '{USER}'\nmode = '0600'\n"))?;
        configure(alpha)?;
        configure(beta)?;
        let words = ["-drive", "file=IMAGE,if=virtio,format=raw", "-runas", USER];
        let machine = ByHand::start(alpha, "raw", DISK_BYTES, FILL_BYTES, &words)?;
        // QEMU must be able to open again the files that it has opened as root.
        std::fs::set_permissions(&machine.image, std::fs::Permissions::from_mode(0o666))?;
        let monitor = machine.monitor.to_str().context("a folder that is not UTF-8")?;
        alpha.sterna(["vm", "adopt", vm::NAME, "--qmp", monitor])?.success()?;
        machine.console.work_on(REQUESTS)?;
        migrate(alpha, "beta:a")?;
        vm::check_at(beta, alpha)?;
        check_users(beta)?;
        machine.console.work_on(REQUESTS)?;
        machine.console.verify()
    });
}
