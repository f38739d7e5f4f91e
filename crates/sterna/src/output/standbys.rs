//! Text output of `sterna standby`.

use std::time::{Duration, SystemTime};

use api::{
    BootCheck, BootCheckState, Standby, StandbyCheck, StandbyExport, StandbyRole, StandbyState, StandbyTest,
    StandbyTestState, StandbyTestVolume, StandbyVm,
};

use super::{dash, lines, properties, table};
use crate::output::replicas::age;
use console::units::{bytes, duration};

/// Returns the standbys as a table.
pub(crate) fn list(standbys: &Vec<Standby>) -> String {
    if standbys.is_empty() {
        return "there are no standbys; to keep one: sterna standby add VOLUME --to HOST\n".to_owned();
    }
    let header = ["STANDBY", "HERE", "STATE", "AGE", "WAITING", "EVERY", "COMPARED", "STORE"];
    let mut table = table(&header, &[3, 4, 5]);
    for standby in standbys {
        table.add_row([
            standby.name.clone(),
            match standby.role {
                StandbyRole::Source => "volumes",
                StandbyRole::Standby => "copy",
            }
            .to_owned(),
            state(standby.state).to_owned(),
            standby.age_seconds.map_or_else(dash, duration),
            standby.bytes_waiting.map_or_else(dash, bytes),
            standby.every_seconds.map_or_else(dash, duration),
            compared_when(standby),
            standby.store.clone(),
        ]);
    }
    let reasons = standbys
        .iter()
        .filter_map(|standby| Some(format!("{}: {}\n", standby.name, standby.reason.as_ref()?)));
    lines(&table) + &reasons.collect::<String>()
}

/// Returns the text about one standby.
pub(crate) fn show(standby: &Standby) -> String {
    let is_source = standby.role == StandbyRole::Source;
    let mut shown = vec![
        ("standby", standby.name.clone()),
        (if is_source { "kept at" } else { "volumes at" }, standby.host.clone()),
        ("volumes", standby.volumes.join(", ")),
        ("store", standby.store.clone()),
        ("state", state(standby.state).to_owned()),
    ];
    let mut add = |name, value: Option<String>| shown.extend(value.map(|value| (name, value)));
    add("because", standby.reason.clone());
    add("age", standby.age_seconds.map(duration));
    add("every", standby.every_seconds.map(duration));
    add("allowed age", standby.rpo_seconds.map(duration));
    add("rate", standby.bandwidth_bytes_per_second.map(|rate| format!("{}/s", bytes(rate))));
    add("waiting", standby.bytes_waiting.map(bytes));
    add("sent", standby.bytes_sent.map(bytes));
    add("found there", standby.bytes_found.map(bytes));
    add("export", standby.export.as_ref().map(export_of));
    add("compared", is_source.then(|| compared_when(standby)));
    add("compared every", standby.verify_seconds.map(duration));
    add("last comparison", standby.check.as_ref().map(check_of));
    standby.vms.iter().for_each(|of| add("vm", Some(vm(of))));
    if let Some(test) = &standby.test {
        add("test", Some(format!("{}: {}", test.name, test_state(test))));
        add("boot check", test.boot_check.as_ref().map(boot));
        test.vms.iter().for_each(|vm| add("test vm", Some(vm.name.clone())));
        let is_there = |test: &StandbyTest| test.state == StandbyTestState::Running;
        test.volumes
            .iter()
            .filter(|_| is_there(test))
            .for_each(|volume| add("test volume", Some(served(volume))));
    }
    let points = standby.points.iter().rev();
    let points: String =
        points.map(|point| format!("  {}  {} old\n", point.name, age(point.as_of_unix_ms))).collect();
    let head = if points.is_empty() { "" } else { "recovery points, the newest first:\n" };
    properties(&shown) + head + &points
}

/// Returns the text about a test that was just made, or was not.
pub(crate) fn tested(standby: &Standby) -> String {
    let Some(test) = &standby.test else { return "there is no test\n".to_owned() };
    let check = test.boot_check.as_ref().map(|check| format!("{}\n", boot(check)));
    if test.state != StandbyTestState::Running {
        return check.unwrap_or_default() + &format!("test {}: {}\n", test.name, test_state(test));
    }
    let mut shown = vec![("test", test.name.clone()), ("state", test_state(test))];
    shown.extend(test.point.clone().map(|point| ("point", point)));
    shown.extend(test.volumes.iter().map(|volume| ("volume", served(volume))));
    shown.extend(test.vms.iter().map(|vm| ("vm", vm.name.clone())));
    properties(&shown)
        + &check.unwrap_or_default()
        + &format!("to end it: sterna standby test {} --end\n", standby.name)
}

fn boot(check: &BootCheck) -> String {
    let time = check.seconds.map_or_else(String::new, |seconds| format!(" after {}", duration(seconds)));
    let text = &check.text;
    match check.state {
        BootCheckState::Waiting => format!("the test waits for \"{text}\" on the console"),
        BootCheckState::Passed => format!("\"{text}\" has appeared on the console{time}"),
        BootCheckState::Failed => format!("\"{text}\" has not appeared on the console{time}"),
    }
}

fn served(volume: &StandbyTestVolume) -> String {
    format!("{}, a clone of {}, at {}", volume.name, volume.of, volume.uri)
}

fn test_state(test: &StandbyTest) -> String {
    let because = test.reason.as_ref().map_or_else(String::new, |reason| format!(", because {reason}"));
    match test.state {
        StandbyTestState::Making => {
            let progress = test.bytes_done.zip(test.bytes_total);
            let progress =
                progress.map(|(done, total)| format!(", {} of {} copied", bytes(done), bytes(total)));
            format!("being made{}", progress.unwrap_or_default())
        }
        StandbyTestState::Running => {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let left = Duration::from_millis(test.ends_unix_ms).saturating_sub(now);
            format!("running, ends in {}", duration(left.as_secs_f64()))
        }
        StandbyTestState::Ending => format!("being deleted{because}"),
        StandbyTestState::Ended => format!("ended{because}"),
    }
}

pub(crate) fn added(standby: &Standby) -> String {
    format!(
        "{} is being copied to store {} of host {}; follow it with: sterna standby show {}\n",
        standby.volumes.join(", "),
        standby.store,
        standby.host,
        standby.name
    )
}

pub(crate) fn promoted(standby: &Standby) -> String {
    let volumes = standby.volumes.join(", ");
    let vms = standby.vms.iter().map(|vm| match &vm.problem {
        Some(problem) => format!("VM {}: {problem}\n", vm.name),
        None => format!("VM {} is at this host; see: sterna vm show {0}\n", vm.name),
    });
    format!("promoted: this host has {volumes} now; see: sterna volume list\n") + &vms.collect::<String>()
}

pub(crate) fn turned(standby: &Standby) -> String {
    format!(
        "host {} keeps a standby of {} now, and is sent what its images lack; follow it with: sterna standby show {}\n",
        standby.host,
        standby.volumes.join(", "),
        standby.name
    )
}

/// Returns what is known of a VM of a standby.
fn vm(vm: &StandbyVm) -> String {
    match (&vm.problem, vm.described_unix_ms) {
        (Some(problem), _) => format!("{}: {problem}", vm.name),
        (None, Some(at)) => format!("{}, described {} ago", vm.name, age(at)),
        (None, None) => format!("{}, not described yet", vm.name),
    }
}

/// Returns when everything was last compared with a standby; only the source of it knows that.
pub(crate) fn compared_when(standby: &Standby) -> String {
    match &standby.compared {
        _ if standby.role == StandbyRole::Standby => dash(),
        None => "never".to_owned(),
        Some(compared) if compared.bytes_differing == 0 => format!("{} ago", age(compared.unix_ms)),
        Some(compared) => {
            format!("{} ago, {} differed", age(compared.unix_ms), bytes(compared.bytes_differing))
        }
    }
}

/// Returns what the last comparisons say against a standby.
pub(crate) fn doubt(standby: &Standby) -> Option<String> {
    let again = format!("sterna standby check {} --deep", standby.name);
    let failed = standby.check.as_ref().filter(|check| check.failed);
    let differed = standby.compared.as_ref().filter(|compared| compared.bytes_differing > 0);
    if let Some(compared) = differed {
        let (age, differing) = (age(compared.unix_ms), bytes(compared.bytes_differing));
        return Some(format!(
            "{differing} differed {age} ago, and were sent again; is it the same now? {again}"
        ));
    }
    let reason = failed?.interrupted.as_ref()?;
    Some(format!("it could not be compared: {reason}; again: {again}"))
}

/// Returns the text about standbys that are late, of those that were looked at.
pub(crate) fn checked(late: &[Standby], looked_at: &[Standby]) -> String {
    if looked_at.is_empty() {
        return "there are no standbys\n".to_owned();
    }
    if late.is_empty() {
        let oldest =
            looked_at.iter().map(|standby| standby.compared.as_ref().map(|compared| compared.unix_ms)).min();
        let compared = match oldest.flatten() {
            Some(unix_ms) if looked_at.len() == 1 => format!("compared {} ago", age(unix_ms)),
            Some(unix_ms) => format!("each was compared {} ago or later", age(unix_ms)),
            None if looked_at.len() == 1 => "never compared: standby check --deep".to_owned(),
            None => "some were never compared: standby check NAME --deep".to_owned(),
        };
        return format!("all is well: {} current; {compared}\n", looked_at.len());
    }
    let line = |standby: &Standby| {
        let age = standby
            .age_seconds
            .map_or_else(|| "of unknown age".to_owned(), |age| format!("{} old", duration(age)));
        let because = standby.reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        let vms = standby.vms.iter().filter_map(|vm| {
            Some(format!(
                "VM {} would not start at host {}: {}\n",
                vm.name,
                standby.host,
                vm.problem.as_ref()?
            ))
        });
        let doubt = doubt(standby).map(|doubt| format!("{}: {doubt}\n", standby.name)).unwrap_or_default();
        format!("{} is {}, {age}{because}\n", standby.name, state(standby.state))
            + &doubt
            + &vms.collect::<String>()
    };
    late.iter().map(line).collect()
}

/// Returns how far an export is.
pub(crate) fn exporting(export: &StandbyExport) -> String {
    match export.bytes_hashed {
        0 => format!("{} written", bytes(export.bytes_written)),
        hashed => format!("{} written, {} hashed", bytes(export.bytes_written), bytes(hashed)),
    }
}

/// Returns the result of an order to export.
pub(crate) fn exported(standby: &Standby) -> String {
    let Some(export) = &standby.export else {
        return format!(
            "the daemon was restarted: there is no whole folder; again: sterna standby export {} FOLDER\n",
            standby.name
        );
    };
    if let Some(reason) = &export.failed {
        return format!("{} is not exported: {reason}\n", standby.name);
    }
    let (folder, host, volume) =
        (&export.folder, &standby.host, standby.volumes.first().map_or("", String::as_str));
    format!(
        "{folder} has the images of one moment. Carry it into the folder of the store {} at host {host}; there: sterna standby seed {volume} \
         --exported {}; then here: sterna standby resume {}\n",
        standby.store,
        std::path::Path::new(folder).file_name().unwrap_or_default().to_string_lossy(),
        standby.name
    )
}

/// Returns the export of a standby in words.
fn export_of(export: &StandbyExport) -> String {
    match (&export.failed, export.ended_unix_ms) {
        (Some(reason), _) => format!("failed: {reason}"),
        (None, None) => format!("to {}: {}", export.folder, exporting(export)),
        (None, Some(ended)) => format!("to {}, {} ago", export.folder, age(ended)),
    }
}

/// Returns how far a comparison is.
pub(crate) fn comparing(check: &StandbyCheck) -> String {
    format!("{} of {} compared", bytes(check.bytes_done), bytes(check.bytes_total))
}

/// Returns the result of an order to compare.
pub(crate) fn compared(standby: &Standby) -> String {
    let Some(check) = &standby.check else {
        return format!(
            "nothing is known of the comparison; again: sterna standby check {} --deep\n",
            standby.name
        );
    };
    let again = match &check.interrupted {
        Some(_) => format!("; again: sterna standby check {} --deep", standby.name),
        None => String::new(),
    };
    format!("{}: {}{again}\n", standby.name, check_of(check))
}

/// Returns a comparison in words.
fn check_of(check: &StandbyCheck) -> String {
    let left_out = match check.bytes_left_out {
        0 => String::new(),
        left_out => format!("; {} of it were just changing", bytes(left_out)),
    };
    let found = match check.bytes_differing {
        0 => "all is the same".to_owned(),
        differing => format!("{} differ, and are sent again", bytes(differing)),
    };
    let end = match &check.interrupted {
        Some(reason) => format!("interrupted: {reason}"),
        None if check.ended_unix_ms.is_none() => "under way".to_owned(),
        None => found,
    };
    format!("{}{left_out}; {end}", comparing(check))
}

/// Returns the state in words.
pub(crate) fn state(state: StandbyState) -> &'static str {
    match state {
        StandbyState::Seeding => "seeding",
        StandbyState::Current => "current",
        StandbyState::Behind => "behind",
        StandbyState::Paused => "paused",
        StandbyState::NoRecoveryPoint => "no recovery point",
        StandbyState::Promoted => "promoted",
        StandbyState::Diverged => "diverged",
        StandbyState::Used => "used by a migration",
        StandbyState::Waiting => "waiting",
    }
}
