//! Tests of the package with systemd: installed, used, upgraded, removed and purged. Guests and images survive all of it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use e2e::throw_away_root::{ThrowAwayRoot, package, repository};
use e2e::{Outcome, Program, program, until};

const VERSIONS: [&str; 2] = ["0.1.0", "0.1.0+next"];

/// A VM that boots from the volume `web1`.
const DEFINITION: &str = r#"
command = ["qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-m", "64", "-nodefaults", "-display", "none",
    "-name", "{name}", "-qmp", "unix:{qmp},server=on,wait=off",
    "-blockdev", "driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
    "-device", "virtio-blk-pci,drive=root"]
[disks]
root = "web1"
"#;

/// A guest in a boot sector, as an argument of printf(1). It reads the next sector at each tick of its clock, and halts
/// for good if that fails.
///
/// ```text
///   mov ax,9000  mov es,ax  xor bx,bx
///   L: mov ax,0201  mov cx,2  mov dx,80  int 13  jc E  sti  hlt  jmp L
///   E: cli  hlt  jmp E
/// ```
const GUEST: &str = r"\xb8\x00\x90\x8e\xc0\x31\xdb\xb8\x01\x02\xb9\x02\x00\xba\x80\x00\xcd\x13\x72\x04\xfb\xf4\xeb\xef\xfa\xf4\xeb\xfc";
/// Bytes of a boot sector before its signature.
const BEFORE_MARK: u64 = 510;

/// Byte of the volume's second MiB.
const WRITE: &str = "qemu-io -f raw -c 'write -P 0x5a 1M 1M' -c flush \
    'nbd+unix:///web1?socket=/run/sterna/volumes/web1.sock'";
/// Checks that this content is still there.
const READ: &str =
    "qemu-io -f raw -c 'read -P 0x5a 1M 1M' 'nbd+unix:///web1?socket=/run/sterna/volumes/web1.sock' |
    grep -q '^read 1048576/1048576' && echo as it was";

fn property(root: &ThrowAwayRoot, name: &str) -> anyhow::Result<String> {
    Ok(root.succeed(&format!("systemctl show --value --property {name} sterna.service"))?.trim().to_owned())
}

/// Returns the process of the present daemon.
fn daemon(root: &ThrowAwayRoot) -> anyhow::Result<String> {
    ensure!(property(root, "ActiveState")? == "active", "{}", journal(root)?);
    property(root, "MainPID")
}

fn journal(root: &ThrowAwayRoot) -> anyhow::Result<String> {
    root.succeed("journalctl --unit sterna --no-pager --lines 80")
}

/// Returns QEMU's process in its namespace, and checks that it runs as a user of its own in the groups of `sterna-qemu`.
fn qemu(root: &ThrowAwayRoot) -> anyhow::Result<String> {
    let process = root.succeed("pgrep --exact qemu-system-x86")?.trim().to_owned();
    let groups = root.succeed(&format!("grep -w $(id -g sterna-qemu) /proc/{process}/status"))?;
    ensure!(groups.starts_with("Groups:"), "{groups}");
    let user: u32 = root.succeed(&format!("stat -c %u /proc/{process}"))?.trim().parse()?;
    ensure!((2_100_000_000..=2_100_065_535).contains(&user), "{user}");
    Ok(process)
}

/// Returns the number of reads that the daemon has counted.
fn reads(root: &ThrowAwayRoot) -> anyhow::Result<u64> {
    let metric = "sterna_volume_requests_total{volume=\"web1\",operation=\"read\"}";
    let told = root.run("sterna metrics")?;
    let value = told.stdout.lines().find_map(|line| line.strip_prefix(metric));
    Ok(value.map_or(Ok(0), |value| value.trim().parse())?)
}

/// Waits until the guest, which reads all the time, has got another answer.
fn wait_for_guest(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    let mut before = u64::MAX;
    until("the guest reads its disk", || {
        let seen = reads(root)?;
        let is_read = seen > before;
        before = seen;
        Ok(is_read.then_some(()))
    })
}

fn install(root: &ThrowAwayRoot, version: &str) -> anyhow::Result<Outcome> {
    root.run(&format!("dpkg --install /mnt/sterna_{version}_$(dpkg --print-architecture).deb"))
}

#[test]
fn a_package_is_installed_used_upgraded_removed_and_purged_and_every_guest_and_image_stays()
-> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        omission::machine_lacks("root, to boot a system that is thrown away");
        return Ok(());
    }
    let packages = tempfile::tempdir()?;
    for version in VERSIONS {
        package(version, packages.path())?;
    }
    let root = ThrowAwayRoot::boot(packages.path())?;
    root.succeed("! command -v sterna")?;

    install(&root, VERSIONS[0])?.expect(0)?;
    daemon(&root)?;
    check_installed(&root)?;
    use_it(&root)?;
    upgrade(&root)?;
    outlast(&root)?;
    remove_and_purge(&root)?;

    // The remaining volume is served again.
    install(&root, VERSIONS[1])?.expect(0)?;
    daemon(&root)?;
    ensure!(root.succeed(READ)? == "as it was\n");
    wait_for_guest(&root)
}

/// Checks files, accounts and modes, the unit's properties, and access to the API.
fn check_installed(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    root.succeed("systemctl is-enabled sterna.service sterna-guests.service && systemctl is-active sterna-guests.service && sterna health && sterna config check")?;
    let modes = "stat --format '%a %U %G' /var/lib/sterna /run/sterna /run/sterna/sterna.sock /etc/sterna/sterna.toml";
    ensure!(root.succeed(modes)? == "700 root root\n755 root root\n660 root sterna\n644 root root\n");
    ensure!(root.succeed("id --groups --name sterna-qemu")? == "sterna-qemu kvm\n");

    let said = root.run("systemd-analyze verify sterna.service sterna-guests.service")?;
    said.expect(0)?;
    ensure!(!said.stderr.contains("sterna"), "{}", said.stderr);
    // Hardened services of systemd have a similar figure. Without hardening it is 9.6.
    let said = root.run("systemd-analyze security --no-pager --threshold=75 sterna.service")?;
    said.expect(0)?;
    let offline =
        root.run("systemd-analyze security --no-pager --offline=yes --threshold=75 sterna.service")?;
    offline.expect(0)?;

    // There are manual pages and completions.
    root.succeed("for page in /usr/share/man/man1/sterna*.gz; do gzip --test \"$page\"; done")?;
    root.succeed("zcat /usr/share/man/man1/sterna-migrate.1.gz | grep -q -- bandwidth")?;
    root.succeed("source /usr/share/bash-completion/completions/sterna && complete -p sterna")?;
    root.succeed("test -s /usr/share/zsh/vendor-completions/_sterna -a -s /usr/share/fish/vendor_completions.d/sterna.fish")?;

    // Every key in the comments of the configuration exists.
    root.succeed("sed -E 's/^#([a-z[])/\\1/' /etc/sterna/sterna.toml >/tmp/all.toml; grep -q '^data_dir' /tmp/all.toml")?;
    let all = root.run("sterna config check /tmp/all.toml")?;
    all.expect(1)?;
    let said = all.stdout + &all.stderr;
    ensure!(!said.contains("unknown key") && !said.contains("line "), "{said}");

    // Users without a daemon of their own reach the system's, if they are in its group.
    let list = "sterna volume list";
    root.run(&format!("setpriv --reuid nobody --regid nogroup --clear-groups {list}"))?.expect(9)?;
    root.succeed(&format!("setpriv --reuid nobody --regid sterna --clear-groups {list}"))?;
    Ok(())
}

/// Makes a volume with content and a VM with it as its disk, and sends orders by signal.
fn use_it(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    root.succeed(&format!(
        "printf '{GUEST}' >/tmp/web1.img; truncate -s {BEFORE_MARK} /tmp/web1.img; printf '\\x55\\xaa' >>/tmp/web1.img
        truncate -s 64M /tmp/web1.img; sterna volume create web1 --image /tmp/web1.img"
    ))?;
    root.succeed(WRITE)?;
    root.succeed(
        "nbdinfo 'nbd+unix:///web1?socket=/run/sterna/volumes/web1.sock' | grep 'export-size: 67108864'",
    )?;
    root.succeed(&format!(
        "cat >/tmp/web1.toml <<'END'{DEFINITION}END\nsterna vm add web1 --definition /tmp/web1.toml"
    ))?;
    root.succeed("sterna vm start web1")?;
    wait_for_guest(root)?;
    qemu(root)?;
    let before = daemon(root)?;
    root.succeed("systemctl reload sterna.service")?;
    ensure!(daemon(root)? == before, "a reload is no restart");
    Ok(())
}

/// Guests prevent the removal. They keep running over an upgrade, a restart, and any end of the daemon.
fn upgrade(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    let (before, guest) = (daemon(root)?, qemu(root)?);
    let refused = root.run("dpkg --remove sterna")?;
    refused.expect(1)?;
    ensure!(refused.stderr.contains("would lose their disks:\nsterna:   web1\n"), "{}", refused.stderr);
    ensure!(daemon(root)? == before);

    // The new version would refuse this configuration, so the old one keeps running.
    root.succeed("echo '[no_such_table]' >>/etc/sterna/sterna.toml")?;
    let kept = install(root, VERSIONS[1])?;
    kept.expect(0)?;
    ensure!(kept.stderr.contains("no_such_table"), "{}", kept.stderr);
    ensure!(daemon(root)? == before);

    // A store with a missing disk does not prevent the upgrade.
    root.succeed(
        "sed -i '/no_such_table/d' /etc/sterna/sterna.toml
        cat >>/etc/sterna/sterna.toml <<'END'
[stores.default]
path = \"/var/lib/sterna/images\"
[stores.away]
path = \"/srv/away\"
# ours
END",
    )?;
    root.run("sterna config check")?.expect(1)?;
    install(root, VERSIONS[1])?.expect(0)?;
    ensure!(daemon(root)? != before, "the new one has not been started");
    ensure!(qemu(root)? == guest, "the guest's QEMU is another one");
    wait_for_guest(root)?;
    ensure!(root.succeed(READ)? == "as it was\n");
    root.succeed("tail -n 1 /etc/sterna/sterna.toml | grep '# ours'")?;
    Ok(())
}

/// The daemon is killed, hangs, and is stopped. systemd restarts it in the first two cases, and QEMU keeps running.
fn outlast(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    let guest = qemu(root)?;
    let started_again = |what: &str| {
        until(what, || Ok((property(root, "ActiveState")? == "active").then_some(())))?;
        wait_for_guest(root)?;
        ensure!(qemu(root)? == guest, "{what}: the guest's QEMU is another one");
        anyhow::Ok(())
    };
    let restarts = || property(root, "NRestarts");
    root.succeed("kill -KILL $(systemctl show --value --property MainPID sterna.service)")?;
    until("it is started again", || Ok((restarts()? == "1").then_some(())))?;
    started_again("after it was killed")?;

    // The watchdog's timeout is shortened for the test.
    root.succeed(
        "mkdir -p /run/systemd/system/sterna.service.d
        printf '[Service]\\nWatchdogSec=1s\\n' >/run/systemd/system/sterna.service.d/watchdog.conf
        systemctl daemon-reload; systemctl restart sterna.service",
    )?;
    started_again("after a restart")?;
    root.succeed("kill -STOP $(systemctl show --value --property MainPID sterna.service)")?;
    until("the watchdog has it started again", || Ok((restarts()? != "0").then_some(())))?;
    started_again("after it hung")?;
    root.succeed("rm -r /run/systemd/system/sterna.service.d; systemctl daemon-reload")?;

    root.succeed("systemctl stop sterna.service")?;
    ensure!(qemu(root)? == guest, "the guest's QEMU ends with the daemon");
    root.succeed("systemctl start sterna.service")?;
    started_again("after a stop")
}

/// After the administrator has stopped the daemon, only the package is removed.
fn remove_and_purge(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    let guest = qemu(root)?;
    root.succeed("systemctl stop sterna.service")?;
    let kept = "find /var/lib/sterna -type f ! -name '*.lock' -print0 | sort -z | xargs -0 sha256sum";
    let before = root.succeed(kept)?;
    ensure!(before.contains("web1.img") && before.contains("journal"), "{before}");

    root.succeed("dpkg --remove sterna")?;
    root.succeed("test -e /etc/sterna/sterna.toml && ! command -v sterna")?;
    ensure!(root.succeed(kept)? == before, "removing it has changed what it kept");
    let purged = root.run("dpkg --purge sterna")?;
    purged.expect(0)?;
    let said = purged.stdout + &purged.stderr;
    for word in [
        "left as it is: /var/lib/sterna",
        &format!("left running: processes of the group sterna-qemu: {guest}"),
    ] {
        ensure!(said.contains(word), "{word}: {said}");
    }
    root.succeed("test ! -e /etc/sterna -a ! -e /usr/lib/systemd/system/sterna.service")?;
    ensure!(root.succeed(kept)? == before, "purging it has changed what it kept");
    ensure!(qemu(root)? == guest);
    Ok(())
}

/// Returns all files below a folder, with relative paths.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let said = Program::of_package("find", "findutils").arg(folder).args(["-type", "f"]).succeed()?;
    let mut files = Vec::new();
    for line in said.lines() {
        files.push(Path::new(line).strip_prefix(folder)?.to_owned());
    }
    files.sort();
    Ok(files)
}

#[test]
fn make_install_obeys_its_variables_and_leaves_a_configuration_alone() -> anyhow::Result<()> {
    let root = tempfile::tempdir()?;
    let configuration = root.path().join("etc/sterna/sterna.toml");
    let install = || {
        Program::of_package("make", "make")
            .arg("install")
            .arg(format!("BINARY={}", program::sterna()?.display()))
            .arg(format!("DESTDIR={}", root.path().display()))
            .arg("PREFIX=/opt/sterna")
            .in_folder(&repository())
            .succeed()
    };
    install()?;
    let installed = files(root.path())?;
    ensure!(
        installed.iter().all(|file| file.starts_with("opt/sterna") || file.starts_with("etc/sterna")),
        "{installed:?}"
    );
    let binary = std::fs::metadata(root.path().join("opt/sterna/bin/sterna"))?;
    ensure!(binary.permissions().mode() & 0o7777 == 0o755);
    ensure!(binary.len() <= std::fs::metadata(program::sterna()?)?.len(), "it is stripped");
    let unit = std::fs::read_to_string(root.path().join("opt/sterna/lib/systemd/system/sterna.service"))?;
    ensure!(
        unit.contains("\nExecStart=/opt/sterna/bin/sterna serve\n") && !unit.contains("@BINDIR@"),
        "{unit}"
    );

    std::fs::write(&configuration, "engine = 'threads'\n").context("the configuration")?;
    install()?;
    ensure!(std::fs::read_to_string(&configuration)? == "engine = 'threads'\n");
    ensure!(files(root.path())? == installed);
    Ok(())
}
