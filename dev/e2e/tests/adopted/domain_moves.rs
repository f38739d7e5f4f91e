//! Tests of `sterna libvirt migrate`: whole domains between two libvirts as they stand.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use api::{Migration, Vm, Volume};
use e2e::libvirt::{DOMAIN, Libvirtd};
use e2e::{Host, play_pair, until};
use rustix::process::Signal;
use testbed::Outcome;

const DISK_BYTES: u64 = 32 << 20;
const FILL_BYTES: u64 = 4 << 20;
/// Requests of the guest between two steps.
const REQUESTS: u64 = 100;
const HERE: [&str; 2] = ["--migrateuri", "tcp://127.0.0.1"];

/// A host with its libvirt.
struct Site<'a> {
    host: &'a Host,
    name: &'a str,
    libvirt: &'a Libvirtd,
}

impl Site<'_> {
    fn order(&self, to: &Site<'_>, options: &[&str], of_virsh: &[&str]) -> anyhow::Result<Vec<String>> {
        let sockets = to.host.path("run/volumes");
        let (here, there) = (self.libvirt.uri()?, to.libvirt.uri()?);
        let store = format!("{}:a", to.name);
        let sockets = sockets.to_str().context("a folder that is not UTF-8")?;
        let order = ["libvirt", "migrate", DOMAIN, "--to", &store, "--connect", &here, "--to-uri", &there];
        let words = [&order[..], &["--sockets", sockets], options, &["--"], of_virsh].concat();
        Ok(words.into_iter().map(str::to_owned).collect())
    }

    fn send(&self, to: &Site<'_>, options: &[&str]) -> anyhow::Result<Outcome> {
        self.host.sterna(self.order(to, options, &HERE)?)
    }

    fn domains(&self) -> anyhow::Result<String> {
        Ok(self.libvirt.virsh(&["list", "--all", "--name"])?.trim().to_owned())
    }

    fn volumes(&self) -> anyhow::Result<Vec<Volume>> {
        self.host.ask(&["volume", "list"])
    }

    /// Checks that the domain and its disks are here, and nothing at the other host.
    fn check_all_here(&self, other: &Site<'_>) -> anyhow::Result<()> {
        ensure!(self.domains()? == DOMAIN && other.domains()?.is_empty(), "the domain is not here alone");
        let volumes = self.volumes()?;
        let is_here = |volume: &Volume| volume.host.is_none() && volume.attachments.is_empty();
        ensure!(!volumes.is_empty() && volumes.iter().all(is_here), "{volumes:?}");
        let elsewhere = other.volumes()?;
        ensure!(elsewhere.is_empty(), "{elsewhere:?}");
        Ok(())
    }
}

/// Plays with two hosts that have a libvirt each.
fn play_sites(test: impl Fn(&Site<'_>, &Site<'_>) -> anyhow::Result<()>) {
    play_pair(|pair| {
        let Some(here) = Libvirtd::start_as(&pair.alpha, "alpha")? else { return Ok(()) };
        let Some(there) = Libvirtd::start_as(&pair.beta, "beta")? else { return Ok(()) };
        let alpha = Site { host: &pair.alpha, name: "alpha", libvirt: &here };
        let beta = Site { host: &pair.beta, name: "beta", libvirt: &there };
        test(&alpha, &beta)
    });
}

#[test]
fn a_domain_moves_with_its_disk_by_one_order_there_and_back_in_both_ways() {
    play_sites(|alpha, beta| {
        let volume = alpha.host.create_volume(DISK_BYTES)?;
        let console = alpha.libvirt.domain_on_volume(alpha.host, &volume, FILL_BYTES)?;
        let planned = alpha.send(beta, &["--dry-run"])?;
        ensure!(planned.code == 0, "{planned:?}");
        let steps = ["1. moving v to beta", "2. moving the memory to beta", "3. ending the forwarding of v"];
        ensure!(steps.iter().all(|step| planned.stdout.contains(step)), "{planned:?}");
        alpha.check_all_here(beta)?;
        alpha.send(beta, &[])?.success()?;
        console.work_on(REQUESTS)?;
        beta.check_all_here(alpha)?;
        beta.send(alpha, &["--memory-first"])?.success()?;
        console.work_on(REQUESTS)?;
        alpha.check_all_here(beta)?;
        let again = alpha.send(beta, &["--json"])?;
        ensure!(again.code == 0 && again.stdout.contains("\"volumes\""), "{again:?}");
        console.work_on(REQUESTS)?;
        beta.check_all_here(alpha)?;
        // The way back at once, at the host that has it.
        beta.send(alpha, &["--memory-first"])?.success()?;
        console.verify()?;
        console.end();
        Ok(())
    });
}

#[test]
fn what_libvirt_refuses_changes_nothing_or_is_gone_on_with() {
    play_sites(|alpha, beta| {
        let volume = alpha.host.create_volume(DISK_BYTES)?;
        let console = alpha.libvirt.domain_on_volume(alpha.host, &volume, FILL_BYTES)?;
        let refused = ["--migrateuri", "nothing://127.0.0.1"];
        let outcome = alpha.host.sterna(alpha.order(beta, &["--memory-first"], &refused)?)?;
        ensure!(outcome.code == 5 && outcome.stderr.contains("It is here as before"), "{outcome:?}");
        alpha.check_all_here(beta)?;
        console.work_on(REQUESTS)?;
        let outcome = alpha.host.sterna(alpha.order(beta, &[], &refused)?)?;
        ensure!(outcome.code == 5 && outcome.stderr.contains("uses v at beta over the link"), "{outcome:?}");
        console.work_on(REQUESTS)?;
        alpha.libvirt.virsh(&["suspend", DOMAIN])?;
        let outcome = alpha.send(beta, &[])?;
        ensure!(outcome.code == 4 && outcome.stderr.contains("virsh resume"), "{outcome:?}");
        alpha.libvirt.virsh(&["resume", DOMAIN])?;
        alpha.send(beta, &[])?.success()?;
        console.work_on(REQUESTS)?;
        beta.check_all_here(alpha)?;
        // The other libvirt does not answer: nothing begins.
        let away = ["libvirt", "migrate", DOMAIN, "--to", "alpha:a"];
        let (uri, nowhere) = (beta.libvirt.uri()?, "qemu:///system?socket=/nonexistent");
        let outcome = beta.host.sterna([&away[..], &["--connect", &uri, "--to-uri", nowhere]].concat())?;
        ensure!(outcome.code == 1 && outcome.stderr.contains(nowhere), "{outcome:?}");
        let other = alpha.libvirt.uri()?;
        for (domain, there, code, words) in
            [("nobody", &other, 3, "virsh list"), (DOMAIN, &uri, 4, "are the same libvirt")]
        {
            let order = ["libvirt", "migrate", domain, "--to", "alpha", "--connect", &uri, "--to-uri", there];
            let outcome = beta.host.sterna(order)?;
            ensure!(outcome.code == code && outcome.stderr.contains(words), "{outcome:?}");
        }
        // A step that was decided before the disk came back takes nothing away.
        let outcome = beta.host.sterna(["volume", "remove", "v", "--only-forwarding", "--force"])?;
        ensure!(outcome.code == 2 && outcome.stderr.contains("nothing was removed"), "{outcome:?}");
        beta.check_all_here(alpha)?;
        console.verify()?;
        console.end();
        Ok(())
    });
}

#[test]
fn a_domain_whose_disk_is_attached_goes_back_to_it_and_what_is_attached_for_others_stays() {
    play_sites(|alpha, beta| {
        let volume = alpha.host.create_volume(DISK_BYTES)?;
        let console = alpha.libvirt.domain_on_volume(alpha.host, &volume, FILL_BYTES)?;
        // A user's own attachment is not ended by an order that is refused.
        alpha.host.ask::<Volume>(&["volume", "attach", "v", "--at", "beta", "--read-only"])?;
        ensure!(alpha.send(beta, &["--memory-first"])?.code == 4, "it is attached already");
        ensure!(alpha.volumes()?[0].attachments.len() == 1, "it is still attached");
        alpha.host.sterna(["volume", "detach", "v", "--at", "beta"])?.success()?;
        alpha.host.ask::<Volume>(&["volume", "attach", "v", "--at", "beta"])?;
        let sockets = (volume.socket.clone(), beta.host.volume()?.socket);
        alpha.libvirt.migrate(beta.libvirt, (&sockets.0, &sockets.1))?;
        console.work_on(REQUESTS)?;
        beta.send(alpha, &[])?.success()?;
        console.work_on(REQUESTS)?;
        alpha.check_all_here(beta)?;
        console.verify()?;
        console.end();
        Ok(())
    });
}

#[test]
fn an_order_that_was_killed_or_interrupted_is_given_again() {
    play_sites(|alpha, beta| {
        let volume = alpha.host.create_volume(DISK_BYTES)?;
        let console = alpha.libvirt.domain_on_volume(alpha.host, &volume, FILL_BYTES)?;
        for signal in [Signal::INT, Signal::KILL] {
            let slow = alpha.order(beta, &["--bandwidth", "2MiB/s"], &HERE)?;
            let running = alpha.host.command(slow)?.start()?;
            until("the disk moves", || {
                let under_way = |volume: &Volume| volume.migration.is_some();
                Ok(alpha.volumes()?.iter().any(under_way).then_some(()))
            })?;
            running.signal(signal)?;
            let ended = running.wait()?;
            if signal == Signal::INT {
                ensure!(ended.code == 6, "{ended:?}");
                alpha.check_all_here(beta)?;
            }
        }
        let migrations: Vec<Migration> = alpha.host.ask(&["migration", "list"])?;
        let running = migrations.iter().find(|migration| migration.ended_unix_ms.is_none());
        let id = &running.context("it goes on without its order")?.id;
        alpha.host.sterna(["migration", "set", id, "--bandwidth", "none"])?.success()?;
        let again = alpha.send(beta, &[])?;
        ensure!(again.code == 0, "{again:?}");
        console.work_on(REQUESTS)?;
        beta.check_all_here(alpha)?;
        console.verify()?;
        console.end();
        Ok(())
    });
}

#[test]
fn a_domain_on_files_is_adopted_first_and_released_by_its_move_and_one_that_is_shut_off_moves() {
    play_sites(|alpha, beta| {
        let image = alpha.host.path("a/old.img");
        std::fs::File::create(&image)?.set_len(DISK_BYTES)?;
        let images: [(&Path, &str); 1] = [(&image, "raw")];
        let console = alpha.libvirt.domain(alpha.host, &images, FILL_BYTES)?;
        let outcome = alpha.send(beta, &[])?;
        let adopt = format!("sterna vm adopt --libvirt {DOMAIN}");
        ensure!(outcome.code == 4 && outcome.stderr.contains(&adopt), "{outcome:?}");
        crate::libvirt::adopt(alpha.host, alpha.libvirt)?;
        alpha.send(beta, &[])?.success()?;
        console.work_on(REQUESTS)?;
        beta.check_all_here(alpha)?;
        ensure!(alpha.host.ask::<Vec<Vm>>(&["vm", "list"])?.is_empty(), "it is released");
        console.verify()?;
        beta.libvirt.virsh(&["destroy", DOMAIN])?;
        beta.send(alpha, &[])?.success()?;
        alpha.check_all_here(beta)?;
        let sockets: PathBuf = alpha.host.path("run/volumes");
        let sockets = sockets.to_str().context("a folder that is not UTF-8")?;
        ensure!(alpha.libvirt.virsh(&["dumpxml", DOMAIN])?.contains(sockets), "its disk is here");
        alpha.libvirt.virsh(&["start", DOMAIN])?;
        console.end();
        Ok(())
    });
}
