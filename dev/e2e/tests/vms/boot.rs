//! Tests of VMs that start when their host has booted, and of all VMs that start and stop in order.
//!
//! The host does not boot for this: the list of VMs is given the number of another boot, while no daemon and no QEMU runs.

use anyhow::{Context as _, ensure};
use api::{Vm, VmState};
use e2e::{Host, play, until};
use serde_json::Value;

/// Firmware that finds nothing to boot is a VM that runs. It says its name at a port for that.
const COMMAND: &str = r#"["qemu-system-x86_64", "-accel", "tcg", "-m", "32", "-nodefaults", "-no-user-config", "-display", "none",
    "-qmp", "unix:{qmp},server=on,wait=off", "-chardev", "file,id=says,path={path:says}",
    "-device", "isa-debugcon,iobase=0x402,chardev=says", "-device", "virtio-blk-pci,drive=disk", "-blockdev",
    "driver=nbd,node-name=disk,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60""#;

/// Ends the VMs with the test, however that ends: they outlive daemons.
struct Ends<'a>(&'a [&'a str]);

impl Ends<'_> {
    fn now(&self, host: &Host) {
        for vm in self.0 {
            let monitor = host.path(&format!("run/vms/{vm}.qmp"));
            let ended = std::os::unix::net::UnixStream::connect(monitor)
                .and_then(|monitor| Ok(rustix::net::sockopt::socket_peercred(&monitor)?));
            if let Ok(qemu) = ended {
                // It may have ended by itself.
                let _ = rustix::process::kill_process(qemu.pid, rustix::process::Signal::KILL);
            }
        }
    }
}

fn add(host: &Host, name: &str, more: &str) -> anyhow::Result<()> {
    host.sterna(["volume", "create", name, "--store", "a", "--size", "1MiB"])?.success()?;
    let file = host.path(&format!("{name}.toml"));
    std::fs::write(&file, format!("command = {COMMAND}{more}]\n[disks]\nroot = \"{name}\"\n"))?;
    host.sterna(["vm", "add", name, "--definition", file.to_str().context("a path")?])?.success().map(drop)
}

/// Restarts the daemon as a boot of the host would: no QEMU is left, and the kernel has another number.
fn boot(host: &mut Host, ends: &Ends<'_>) -> anyhow::Result<()> {
    ends.now(host);
    host.stop()?;
    let list = host.path("data/vms.json");
    let mut known: Value = serde_json::from_slice(&std::fs::read(&list)?)?;
    for vm in known["vms"].as_array_mut().context("a list")? {
        vm["settled_boot"] = "another one".into();
    }
    std::fs::write(&list, serde_json::to_vec(&known)?)?;
    host.start()
}

fn vm(host: &Host, name: &str) -> anyhow::Result<Vm> {
    host.ask(&["vm", "show", name])
}

fn until_running(host: &Host, names: &[&str]) -> anyhow::Result<()> {
    until("the VMs run", || {
        let all: Vec<Vm> = host.ask(&["vm", "list"])?;
        let runs = |name: &&str| all.iter().any(|vm| vm.name == **name && vm.state == VmState::Running);
        Ok(names.iter().all(runs).then_some(()))
    })
}

#[test]
fn vms_start_after_a_boot_in_their_order_and_stop_in_the_reverse_one() {
    play(|host| {
        let ends = Ends(&["db", "web", "idle"]);
        let played = (|| {
            for name in ends.0 {
                add(host, name, "")?;
            }
            let refused = host.sterna(["vm", "set", "db", "--wait-for", "udp:1"])?;
            ensure!(refused.code == 2 && refused.stderr.contains("tcp:HOST:PORT"), "{refused:?}");
            let set =
                ["vm", "set", "db", "--start-at-boot", "--order", "10", "--wait-for", "console:SeaBIOS"];
            host.sterna(set)?.success()?;
            host.sterna(["vm", "set", "web", "--start-at-boot", "--order", "20"])?.success()?;
            let shown = vm(host, "db")?.start.context("how it starts")?;
            ensure!(
                shown.at_boot && shown.order == 10 && shown.wait_for.as_deref() == Some("console:SeaBIOS"),
                "{shown:?}"
            );

            // A restart of the daemon is no boot.
            host.stop()?;
            host.start()?;
            let all: Vec<Vm> = host.ask(&["vm", "list"])?;
            ensure!(
                all.iter().all(|vm| vm.state == VmState::Stopped && vm.awaited_start.is_none()),
                "{all:?}"
            );

            boot(host, &ends)?;
            until_running(host, &["db", "web"])?;
            ensure!(vm(host, "idle")?.state == VmState::Stopped);
            let log = host.log()?;
            let at = |words: &str| log.rfind(words).with_context(|| format!("no {words:?}: {log}"));
            ensure!(at("VM is ready vm=db")? < at("VM started in its turn vm=web")?, "{log}");

            // What an administrator has stopped since the boot stays so, also when the daemon is killed.
            let stopped: Value = host.ask(&["vm", "stop", "--all", "--now"])?;
            let names: Vec<&str> = stopped["vms"]
                .as_array()
                .context("VMs")?
                .iter()
                .filter_map(|vm| vm["name"].as_str())
                .collect();
            ensure!(names == ["web", "db"], "{stopped}");
            host.kill()?;
            host.start()?;
            let all: Vec<Vm> = host.ask(&["vm", "list"])?;
            ensure!(
                all.iter().all(|vm| vm.state == VmState::Stopped && vm.awaited_start.is_none()),
                "{all:?}"
            );

            let started: Value = host.ask(&["vm", "start", "--all"])?;
            ensure!(started["vms"].as_array().is_some_and(|vms| vms.len() == 2), "{started}");
            until_running(host, &["db", "web"])
        })();
        ends.now(host);
        played
    });
}

#[test]
fn a_vm_that_cannot_start_is_named_tried_again_and_holds_up_the_others_for_a_time_only() {
    play(|host| {
        let ends = Ends(&["db", "web"]);
        let played = (|| {
            let firmware = host.path("firmware");
            add(host, "db", &format!(", \"-bios\", \"{}\"", firmware.display()))?;
            add(host, "web", "")?;
            host.sterna(["vm", "set", "db", "--start-at-boot", "--order", "10", "--wait-max", "1"])?
                .success()?;
            host.sterna(["vm", "set", "web", "--start-at-boot"])?.success()?;
            boot(host, &ends)?;
            until_running(host, &["web"])?;
            let broken = vm(host, "db")?;
            let awaited = broken.awaited_start.context("it is tried again")?;
            let why = broken.message.unwrap_or_default();
            ensure!(
                awaited.failed_attempts > 0 && why.contains("firmware") && why.contains("sterna vm stop db"),
                "{why}"
            );
            let health = host.sterna(["health"])?;
            ensure!(
                health.code == 10 && health.stdout.contains("db") && health.stdout.contains("firmware"),
                "{health:?}"
            );

            // A killed daemon leaves the attempts to the next one.
            host.kill()?;
            host.start()?;
            until("it is tried again", || Ok(vm(host, "db")?.awaited_start.map(drop)))?;
            host.sterna(["vm", "stop", "db"])?.success()?;
            let given_up = vm(host, "db")?;
            ensure!(given_up.state == VmState::Stopped || given_up.state == VmState::Crashed, "{given_up:?}");
            host.kill()?;
            host.start()?;
            ensure!(vm(host, "db")?.awaited_start.is_none(), "it was given up");
            Ok(())
        })();
        ends.now(host);
        played
    });
}
