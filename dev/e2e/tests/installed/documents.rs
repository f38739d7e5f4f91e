//! Runs the commands of the tour on a system without Sterna, and lists for every other block of commands in the documents the
//! test that runs it, or the reason why none does.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, ensure};
use e2e::blocks::{Block, blocks};
use e2e::program;
use e2e::throw_away_root::{ThrowAwayRoot, repository};

const TOUR: &str = "## The tour";
/// The heading of the commands that end the tour.
const CLEAN_UP: &str = "## Clean up after the tour";

/// The variables of the tour's terminal.
const BEFORE_CLEAN_UP: &str = "
export PATH=/root/sterna/target/release:$PATH STERNA_HOST=unix:/tmp/tour/sterna.sock
";

/// Commands before the tour. They replace the builds of the program and the guest, which are at `/mnt`.
const BEFORE: &str = "
mkdir -p /root/sterna/target/release /root/sterna/scripts
cd /root/sterna
cargo() { ln -sf /mnt/sterna target/release/sterna; }
printf '#!/bin/sh\\nln -sfn /mnt/guest-image target/guest-image\\n' >scripts/guest-image
chmod +x scripts/guest-image
";

/// Checks after the tour.
const AFTER: &str = "
sterna volume show web1 --json | jq -e '.state == \"serving\" and .store == \"fast\" and .size_bytes == 8589934592' >/dev/null
sterna volume show web1 --json | jq -e '.statistics.errors == 0 and .statistics.connections == 1' >/dev/null
sterna vm list --json | jq -e 'any(.name == \"web3\" and .state == \"running\")' >/dev/null
test -s /tmp/tour/web1.html
";

/// Headings of docs/hosts.md whose commands the tour's hosts run after the tour.
const OF_HOSTS: [&str; 2] = ["## Before anything moves", "## Moving"];

/// Commands before those: one more host, and volumes of these names. The commands are alternatives, so each
/// move is undone after it.
const BEFORE_HOSTS: &str = "
export PATH=/root/sterna/target/release:$PATH STERNA_HOST=unix:/tmp/tour/sterna.sock RACK=unix:/tmp/tour/rack/sterna.sock
mkdir -p /tmp/tour/rack/fast
cat >/tmp/tour/rack/sterna.toml <<'END'
data_dir = \"/tmp/tour/rack/data\"
api = \"unix:/tmp/tour/rack/sterna.sock\"
[hosts]
listen = [\"127.0.0.1:7443\"]
[stores.fast]
path = \"/tmp/tour/rack/fast\"
END
sterna serve --config /tmp/tour/rack/sterna.toml 2>/tmp/tour/rack/log &
until sterna --host \"$RACK\" store list 2>/dev/null; do sleep 0.1; done
sterna --host \"$RACK\" host init --name rack3-b
sterna --host \"$RACK\" host invite --json | jq -r .token >/tmp/tour/rack/invitation
sterna host join 127.0.0.1:7443 --token-file /tmp/tour/rack/invitation
sterna volume create db-data --size 16MiB --store fast
sterna volume create db-log --size 16MiB --store fast
come_home() {
  for volume in web1 db-data db-log; do
    sterna --host \"$RACK\" migrate $volume --to here:fast 2>/dev/null || true
  done
  sterna volume list --json | jq -e '[.[] | select(.host == null and .state == \"serving\") | .name] | contains([\"web1\", \"db-data\", \"db-log\"])' >/dev/null
}
";

/// Blocks that are run: the tour and the commands of its hosts by a test of this file, the others by `operate.rs` and `pages.rs`.
const RUN: [&str; 16] = [
    "docs/tour.md",
    "docs/hosts.md#Moving",
    "docs/hosts.md#Before anything moves",
    "docs/hosts.md#Pairing",
    "docs/hosts.md#When something breaks",
    "docs/vm.md",
    "docs/nbd.md#What an export offers",
    "docs/libvirt.md#",
    "docs/libvirt.md#By hand",
    "docs/operate.md",
    "docs/api.md",
    "docs/configuration.md",
    "docs/journal.md",
    "docs/observe.md#In a terminal",
    "docs/observe.md#Figures",
    "docs/observe.md#The audit log",
];

/// Blocks that are not run, by document and heading, with the reason.
const NOT_RUN: [(&str, &str); 22] = [
    (
        "docs/clones.md",
        "they need a file system whose files share blocks; e2e/tests/stores/cloned.rs, duplicates.rs and snapshots.rs",
    ),
    ("README.md#Try it", "it is the whole of the tests, and the demo, which a test of its own runs"),
    ("README.md#Install it", "it builds a package by the network; docs/operate.md has the rest, and is run"),
    ("docs/hostile-input.md#Fuzzing", "it takes ten minutes a target, and a nightly compiler"),
    ("docs/observe.md#The page", "it opens a browser; e2e/tests/views"),
    ("docs/strategies.md#Guests first", "it needs a busy guest; e2e/tests/program/pacing.rs"),
    (
        "docs/strategies.md#When it begins, and when it is to end",
        "it would wait until four; e2e/tests/program/queue.rs and pacing.rs",
    ),
    ("docs/observe.md#What happens", "it waits for ever; e2e/tests/program/watch.rs"),
    ("docs/observe.md#Notices", "somebody is told; e2e/tests/program/notices.rs"),
    ("docs/standby.md#", "it needs another host; e2e/tests/hosts/standbys.rs"),
    (
        "docs/standby.md#A first copy that need not be sent",
        "it needs another host; e2e/tests/hosts/standby_seeded.rs",
    ),
    ("docs/standby.md#Is it really the same?", "it needs another host; e2e/tests/hosts/standby_seeded.rs"),
    ("docs/standby.md#Trying a standby", "it needs another host; e2e/tests/hosts/standby_tests.rs"),
    (
        "docs/standby.md#When the first host comes back",
        "a host is to be lost; e2e/tests/hosts/standby_asks.rs",
    ),
    ("docs/standby.md#Failback", "a host is to be lost; e2e/tests/hosts/standby_reprotect.rs"),
    ("docs/standby.md#When the first host is lost", "a host is to be lost; e2e/tests/hosts/standbys.rs"),
    ("docs/attach.md#", "it needs another host; e2e/tests/hosts/attached.rs"),
    ("docs/libvirt.md#To another host", "it needs another libvirt; e2e/tests/adopted/domain_moves.rs"),
    ("docs/libvirt.md#By virsh migrate alone", "it needs another libvirt; e2e/tests/adopted/attached.rs"),
    ("docs/evacuation.md#", "it needs other hosts; e2e/tests/hosts/evacuate.rs"),
    ("docs/evacuation.md#Maintenance", "it needs other hosts; e2e/tests/hosts/evacuate.rs"),
    ("docs/performance.md#", "benchmarks take hours; lab/tests/bench.rs runs short ones"),
];

#[test]
fn the_tour_does_what_it_says() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        omission::machine_lacks("root, to boot a system that is thrown away");
        return Ok(());
    }
    let given = tempfile::tempdir()?;
    std::fs::copy(program::sterna()?, given.path().join("sterna")).context("the program under test")?;
    let image = e2e::vm::GuestImage::find(None)?;
    std::fs::create_dir(given.path().join("guest-image"))?;
    for file in [&image.kernel, &image.initramfs] {
        let name = file.file_name().context("a file of the guest image")?;
        std::fs::copy(file, given.path().join("guest-image").join(name))?;
    }
    let page = std::fs::read_to_string(repository().join("docs/tour.md"))?;
    let tour: Vec<Block> = blocks(&page).into_iter().filter(|block| block.heading == TOUR).collect();
    ensure!(tour.len() > 8, "the tour has few blocks: {tour:?}");
    // They run in one shell.
    let commands: String = tour.iter().map(|block| block.commands.as_str()).collect();
    // Daemons outlive the commands, and would keep their output open.
    let script = format!("exec >/tmp/said 2>&1\nset -v\n{BEFORE}{commands}{AFTER}");
    let root = ThrowAwayRoot::boot(given.path())?;
    let outcome = root.run(&script)?;
    let said = root.run("cat /tmp/said; tail -n 40 /tmp/tour/log /tmp/tour/there/log")?.stdout;
    outcome.expect(0).context(said)?;
    run_of_hosts(&root)?;
    clean_up(&root, given.path(), &page)
}

/// Runs the commands that end the tour, after which no process and no file is left. They are in a file, because `pkill -f` would
/// match a shell that has them as an argument.
fn clean_up(root: &ThrowAwayRoot, given: &Path, page: &str) -> anyhow::Result<()> {
    let found = blocks(page).into_iter().filter(|block| block.heading == CLEAN_UP);
    let commands: String = found.map(|block| block.commands).collect();
    ensure!(!commands.is_empty(), "docs/tour.md has no commands below {CLEAN_UP}");
    std::fs::write(given.join("clean-up"), format!("{BEFORE_CLEAN_UP}{commands}"))?;
    root.run("bash -eu /mnt/clean-up")?.expect(0)?;
    // An exiting process has no command line, so the page's own wait does not see it.
    root.run("for i in $(seq 100); do pgrep -l 'sterna|qemu' || break; sleep 0.1; done")?.expect(0)?;
    root.run("! pgrep -l 'sterna|qemu' && test ! -e /tmp/tour")?.expect(0)?;
    Ok(())
}

/// Runs the commands of the page about several hosts, line by line.
fn run_of_hosts(root: &ThrowAwayRoot) -> anyhow::Result<()> {
    let page = std::fs::read_to_string(repository().join("docs/hosts.md"))?;
    let mut script = format!("exec >/tmp/said 2>&1\nset -ev\n{BEFORE_HOSTS}");
    for heading in OF_HOSTS {
        let found = blocks(&page).into_iter().filter(|block| block.heading == heading);
        let commands: String = found.map(|block| block.commands).collect();
        ensure!(!commands.is_empty(), "docs/hosts.md has no commands below {heading}");
        commands.lines().for_each(|line| script.push_str(&format!("{line}\ncome_home\n")));
    }
    let outcome = root.run(&script)?;
    let said = root.run("cat /tmp/said; tail -n 40 /tmp/tour/log /tmp/tour/rack/log")?.stdout;
    outcome.expect(0).context(said)
}

#[test]
fn every_block_of_commands_is_run_or_it_is_said_why_not() -> anyhow::Result<()> {
    let mut documents = vec!["README.md".to_owned()];
    for entry in std::fs::read_dir(repository().join("docs"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if Path::new(&name).extension().is_some_and(|end| end == "md") {
            documents.push(format!("docs/{name}"));
        }
    }
    let said: BTreeSet<&str> = RUN.into_iter().chain(NOT_RUN.map(|(place, _)| place)).collect();
    let (mut used, mut unsaid) = (BTreeSet::new(), Vec::new());
    for document in documents {
        let page = std::fs::read_to_string(repository().join(&document))?;
        for block in blocks(&page) {
            let place = format!("{document}#{}", block.heading.trim_start_matches("## "));
            let known = said.get(document.as_str()).or_else(|| said.get(place.as_str()));
            match known {
                Some(known) => drop(used.insert(*known)),
                None => unsaid.push(place),
            }
        }
    }
    ensure!(unsaid.is_empty(), "nobody says who runs these blocks, or why nobody does: {unsaid:?}");
    let unused: Vec<_> = said.difference(&used).collect();
    ensure!(unused.is_empty(), "there are no such blocks: {unused:?}");
    Ok(())
}
