//! The command line of `sterna standby`.

use std::path::PathBuf;
use std::time::Duration;

use api::{KeepPoints, TestNetworks};
use clap::{Args, Subcommand, ValueEnum};

use console::units::{parse_rate, parse_time};

#[derive(Debug, Subcommand)]
pub(crate) enum StandbyCommand {
    /// Keep a copy of running volumes, or of a VM's volumes, at another host that is seconds old.
    #[command(after_help = ADD_HELP)]
    Add(AddStandbyArguments),
    /// List the standbys of this host's volumes, and those that it keeps for other hosts.
    #[command(visible_alias = "ls", after_help = "Example:\n  sterna standby list")]
    List,
    /// Show one standby: its age, what it lacks, its recovery points.
    #[command(after_help = SHOW_HELP)]
    Show(StandbyName),
    /// Send nothing until `standby resume`; the source records meanwhile what the standby lacks.
    #[command(after_help = "Example:\n  sterna standby pause web1")]
    Pause(StandbyName),
    /// Go on after `standby pause`: only what was written meanwhile is sent.
    #[command(after_help = "Example:\n  sterna standby resume web1")]
    Resume(StandbyName),
    /// Change the interval, the allowed age or the rate.
    #[command(after_help = "Example:\n  sterna standby set web1 --every 30s --bandwidth 20MiB/s")]
    Set(SetStandbyArguments),
    /// Say whether a standby is as young as it has to be, and its VMs would start; the exit code is 10 if not.
    #[command(after_help = CHECK_HELP)]
    Check {
        /// Name of the standby, its volume or its VM; by default all of this host's volumes.
        name: Option<String>,
        /// Compare all blocks at both hosts, while guests go on; what differs is sent again, and the exit code is 10.
        #[arg(long, requires = "name")]
        deep: bool,
    },
    /// Begin a standby with an image that is at its host already, so that only the difference is sent.
    #[command(after_help = SEED_HELP)]
    Seed {
        /// Name of the standby, its volume or its VM.
        name: String,
        /// Raw images in the folder of the standby's store, by their file names; with several volumes, which is whose.
        #[arg(required_unless_present = "exported", value_name = "[VOLUME=]FILE")]
        images: Vec<String>,
        /// A folder of `standby export`, which lies in the folder of the standby's store, by its name.
        #[arg(long, value_name = "FOLDER", conflicts_with = "images")]
        exported: Option<String>,
    },
    /// Write the first copy into a folder that somebody carries to the other host, instead of sending it.
    #[command(after_help = EXPORT_HELP)]
    Export {
        /// Name of the standby, its volume or its VM.
        name: String,
        /// A folder of this host that is not there yet: on a disk that is carried over, for example.
        folder: PathBuf,
    },
    /// Try a standby without disturbing it: a clone of it becomes volumes and a VM of this host, for a time.
    #[command(after_help = TEST_HELP)]
    Test(TestStandbyArguments),
    /// Make a standby's images volumes of this host, and start its VMs, because the host that had them is lost.
    #[command(after_help = PROMOTE_HELP)]
    Promote(PromoteStandbyArguments),
    /// After a promotion, keep a standby at the host that had the volumes before: only the difference is sent.
    #[command(after_help = REPROTECT_HELP)]
    Reprotect(ReprotectStandbyArguments),
    /// Remove a standby with its images and recovery points.
    #[command(visible_alias = "rm", after_help = REMOVE_HELP)]
    Remove {
        /// Name of the standby, its volume or its VM.
        name: String,
        /// Also if the other host does not answer: its part then stays there until it is removed there.
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct StandbyName {
    /// Name of the standby, its volume or its VM.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct AddStandbyArguments {
    /// The volumes, or one VM. All are cut at the same moments.
    #[arg(required = true, value_name = "VOLUME|VM")]
    pub(crate) volumes: Vec<String>,
    /// The host that keeps the standby, and its store.
    #[arg(long, value_name = "HOST[:STORE]")]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) terms: TermsArguments,
    /// The recovery points that are kept beside its newest state; `none`: no others.
    #[arg(long, value_name = "last=N,hourly=N,daily=N|none", value_parser = parse_keep)]
    pub(crate) keep: Option<KeepPoints>,
}

/// How a standby is kept.
#[derive(Debug, Args)]
pub(crate) struct TermsArguments {
    /// Time between two cuts: a promotion loses at most what was written since the last one that has arrived.
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "10s")]
    pub(crate) every: Duration,
    /// The age beyond which it is behind; by default six intervals, and a minute at least.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) rpo: Option<Duration>,
    /// Largest rate of what it sends, for example 20MiB/s.
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(crate) bandwidth: Option<u64>,
    /// What this host does after a start if that host does not say whether the standby was promoted; by default as configured.
    #[arg(long, value_name = "wait|serve")]
    pub(crate) if_silent: Option<IfSilent>,
}

#[derive(Debug, Args)]
pub(crate) struct ReprotectStandbyArguments {
    /// Name of the standby that was promoted, its volume or its VM.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) terms: TermsArguments,
    /// The recovery points that are kept; by default as many as before.
    #[arg(long, value_name = "last=N,hourly=N,daily=N|none", value_parser = parse_keep)]
    pub(crate) keep: Option<KeepPoints>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum IfSilent {
    /// The volumes wait for that host, or for `sterna volume promote --unasked`.
    Wait,
    /// The volumes are served after 15 seconds.
    Serve,
}

impl From<IfSilent> for api::IfSilent {
    fn from(said: IfSilent) -> Self {
        match said {
            IfSilent::Wait => Self::Wait,
            IfSilent::Serve => Self::Serve,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct SetStandbyArguments {
    /// Name of the standby, its volume or its VM.
    pub(crate) name: String,
    /// Time between two cuts.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) every: Option<Duration>,
    /// The age beyond which it is behind.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) rpo: Option<Duration>,
    /// Largest rate of what it sends; `none`: no limit.
    #[arg(long, value_name = "RATE|none", value_parser = parse_rate_or_none)]
    pub(crate) bandwidth: Option<u64>,
    /// What this host does after a start if the other host does not say whether the standby was promoted.
    #[arg(long, value_name = "wait|serve")]
    pub(crate) if_silent: Option<IfSilent>,
}

#[derive(Debug, Args)]
pub(crate) struct PromoteStandbyArguments {
    /// Name of the standby, its volume or its VM.
    pub(crate) name: String,
    /// Promote it although the host that had the volumes has not given them up. It must be off.
    #[arg(long, requires = "proof")]
    pub(crate) force: bool,
    /// That host, by name, is off: it does not serve the volumes, and will not. Of a move that has not ended both hosts: HOST,HOST.
    #[arg(long, value_name = "HOST", group = "proof", requires = "force")]
    pub(crate) source_is_off: Option<String>,
    /// A program that switches that host off. It runs with the host's name as its argument, if nothing else is in the way, and must succeed.
    #[arg(long, value_name = "PROGRAM", group = "proof", requires = "force")]
    pub(crate) fence: Option<PathBuf>,
    /// The age that is accepted: what was written since is lost.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) older_than_ok: Option<Duration>,
    /// The recovery point; by default the newest (sterna standby show).
    #[arg(long, value_name = "POINT")]
    pub(crate) point: Option<String>,
    /// Do not start its VMs.
    #[arg(long)]
    pub(crate) leave_stopped: bool,
    /// Another name for a volume, where its own is taken here; NEW alone for a standby of one volume. Its VM then uses that volume.
    #[arg(long = "name", value_name = "[OLD=]NEW")]
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TestStandbyArguments {
    /// Name of the standby, its volume or its VM.
    pub(crate) name: String,
    /// End the test that is under way, and delete all of it.
    #[arg(long, conflicts_with_all = ["point", "new_name", "time", "boot_check", "networks"])]
    pub(crate) end: bool,
    /// The recovery point; by default the newest state (sterna standby show).
    #[arg(long, value_name = "POINT")]
    pub(crate) point: Option<String>,
    /// The name of the test: that of its volume, or the beginning of the names of several; by default names get `-test` at their end.
    #[arg(long = "name", value_name = "NEW")]
    pub(crate) new_name: Option<String>,
    /// The time after which all of the test is deleted; by default an hour.
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
    pub(crate) time: Option<Duration>,
    /// The networks of its VM: `none`, they lead nowhere; `keep`, they are those of the VM, whose addresses it has.
    #[arg(long, value_name = "none|keep", default_value = "none", hide_default_value = true, value_parser = parse_networks)]
    pub(crate) networks: TestNetworks,
    /// Wait for this text on a serial console of its VM, then end the test unless there is --for; the exit code is 10 without the text.
    #[arg(long, value_name = "TEXT")]
    pub(crate) boot_check: Option<String>,
    /// The longest time for the text, from the start of the VM; by default two minutes.
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "boot_check")]
    pub(crate) boot_check_timeout: Option<Duration>,
}

/// Reads `last=6,hourly=24,daily=7` or `none`.
fn parse_keep(text: &str) -> Result<KeepPoints, String> {
    if text == "none" {
        return Ok(KeepPoints::NONE);
    }
    let mut keep = KeepPoints::NONE;
    for part in text.split(',') {
        let count = part.split_once('=').and_then(|(kind, count)| Some((kind, count.parse::<u32>().ok()?)));
        match count {
            Some(("last", count)) => keep.last = count,
            Some(("hourly", count)) => keep.hourly = count,
            Some(("daily", count)) => keep.daily = count,
            _ => return Err("it is none, or numbers as in last=6,hourly=24,daily=7".to_owned()),
        }
    }
    Ok(keep)
}

fn parse_networks(text: &str) -> Result<TestNetworks, String> {
    match text {
        "none" => Ok(TestNetworks::None),
        "keep" => Ok(TestNetworks::Keep),
        _ => Err("it is none or keep".to_owned()),
    }
}

/// Reads a rate; `none` is zero.
fn parse_rate_or_none(text: &str) -> Result<u64, String> {
    if text == "none" { Ok(0) } else { parse_rate(text).map_err(|error| error.to_string()) }
}

const ADD_HELP: &str = "\
Examples:
  sterna standby add web1 --to rack9
  sterna standby add db-data db-log --to rack9:fast --every 5s --keep last=12,hourly=48
  sterna standby list

The guests go on working. Every interval all volumes are cut at one moment, and what was written since the last cut is sent, each
block once. The copy is encrypted like everything between hosts. A VM whose volumes are all in it is described as well: definition,
UEFI variables, TPM. If this host is lost: at the other one, sterna standby promote.";

const SHOW_HELP: &str = "\
Examples:
  sterna standby show web1
  sterna standby show web1 --json | jq -r '.points[-1].name'

At the host that keeps the standby, the list has its recovery points.";

const CHECK_HELP: &str = "\
Example:
  sterna standby check || mail -s 'standbys are behind' root

It looks at all standbys of this host's volumes, or at one that is named. With `--deep` it has the daemons compare everything, which
takes about as long as reading both disks. If you end the command, the daemons continue: sterna standby show.";

const PROMOTE_HELP: &str = "\
Examples:
  sterna standby promote web1 --force --source-is-off rack3
  sterna standby promote web1 --force --fence /usr/local/sbin/switch-off
  sterna standby promote web1 --force --source-is-off rack3 --older-than-ok 2d --leave-stopped
  sterna standby promote db --force --source-is-off rack3 --name db-data=db-data2 --name db-log=db-log2

Give this order at the host that keeps the standby. The other host must be off, or must not serve the volumes any more: otherwise
two hosts have them, and their states part. `--fence` has a program switch it off. The program runs on this machine as you, not as
the daemon. While the other host can be reached, move the volumes there with
`sterna migrate` instead; that loses nothing.";

const REPROTECT_HELP: &str = "\
Examples:
  sterna volume yield web1              # before, at the host that had the volumes
  sterna standby reprotect web1         # at the host that has promoted them
  sterna migrate web1 --to rack7        # later, when the standby is current: brings them home

Give this order at the host that has promoted the standby. The images that the other host has given up become the standby. It is sent what
was written here since the promotion, and what only that host had written. That host keeps its own writes: sterna volume
divergence list, there. If it is not certain what its images lack, everything is sent.";

const EXPORT_HELP: &str = "\
Example:
  sterna standby add web1 --to rack9
  sterna standby export web1 /mnt/disk/web1             # pauses the standby
  sterna standby seed web1 --exported web1              # at rack9, when the folder lies in the folder of the store
  sterna standby resume web1                            # here: what was written since is sent

Give this order at the host that has the volumes, as long as the standby has nothing. Guests go on. The folder has the images of one moment,
and a manifest with their hashes; until all is written and durable it is called .NAME.partial. Ctrl-C cancels.";

const SEED_HELP: &str = "\
Examples:
  sterna standby add web1 --to rack9                  # at the host that has the volume
  sterna standby seed web1 web1-backup.img            # at rack9, as long as there is no recovery point
  sterna standby seed db db-data=data.img db-log=log.img
  sterna standby seed web1 --exported web1            # a folder of `standby export`

The images may be old copies, of any origin: a disk that was carried over, the restored backup of last night. They lie in the folder of the
store in which the standby is kept (`sterna standby show` names it), and become the standby's. Each block is compared by its SHA-256
hash, and sent only if it differs. An image in another format: first qemu-img convert -O raw.";

const TEST_HELP: &str = "\
Examples:
  sterna standby test web1
  sterna standby test web1 --name try --for 20m
  sterna standby test web1 --boot-check 'login:' || echo 'it would not boot'
  sterna standby test web1 --end

Give this order at the host that keeps the standby. The standby goes on being kept meanwhile, and is as it was afterwards. A VM that
was described is added and started, with networks that lead nowhere, and with its serial consoles in logs. When the time is over, VM and
volumes of the test are deleted with all that was written to them. A test also ends if its store becomes too
full, and when its standby is promoted or removed.";

const REMOVE_HELP: &str = "\
Examples:
  sterna standby remove web1
  sterna standby remove web1 --force

Give this order at the host that has the volumes. The volumes themselves stay as they are.";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_to_keep_are_counts_of_kinds() {
        assert_eq!(parse_keep("last=3,daily=2"), Ok(KeepPoints { last: 3, hourly: 0, daily: 2 }));
        assert_eq!(parse_keep("none"), Ok(KeepPoints::NONE));
        for wrong in ["", "last", "last=x", "weekly=3", "last=3,"] {
            assert!(parse_keep(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_rate_or_none("none"), Ok(0));
    }
}
