//! `sterna standby …`

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use api::{
    BootCheckState, Client, ClientError, ErrorCode, ExportStandby, NewStandby, PromoteStandby, RemoveStandby,
    ReprotectStandby, SeedImage, SeedStandby, SetStandby, Standby, StandbyRole, StandbyState, StandbyTest,
    StandbyTestState, TestStandby,
};

use tokio::process::Command;

use crate::args::{AddStandbyArguments, PromoteStandbyArguments, StandbyCommand, TestStandbyArguments};
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, standbys};

/// Time between two looks at a test that is being made.
const LOOK_EVERY: Duration = Duration::from_millis(300);

pub(super) async fn run(
    client: &Client,
    command: StandbyCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        StandbyCommand::Add(arguments) => {
            let added = client.add_standby(&order(arguments)).await?;
            output::print(format, &added, standbys::added)?;
        }
        StandbyCommand::List => output::print(format, &client.standbys().await?, standbys::list)?,
        StandbyCommand::Show(named) => {
            output::print(format, &client.standby(&named.name).await?, standbys::show)?;
        }
        StandbyCommand::Pause(named) => set(client, &named.name, paused(true), format).await?,
        StandbyCommand::Resume(named) => set(client, &named.name, paused(false), format).await?,
        StandbyCommand::Set(arguments) => {
            let change = SetStandby {
                every_seconds: arguments.every.map(|every| every.as_secs_f64()),
                rpo_seconds: arguments.rpo.map(|rpo| rpo.as_secs_f64()),
                bandwidth_bytes_per_second: arguments.bandwidth,
                paused: None,
                if_silent: arguments.if_silent.map(Into::into),
            };
            set(client, &arguments.name, change, format).await?;
        }
        StandbyCommand::Check { name: Some(name), deep: true } => {
            return check_deep(client, &name, format).await;
        }
        StandbyCommand::Check { name, .. } => return check(client, name, format).await,
        StandbyCommand::Export { name, folder } => return export(client, &name, &folder, format).await,
        StandbyCommand::Seed { name, images, exported } => {
            let images = images.iter().map(|image| seed_image(image)).collect();
            let seeded = client.seed_standby(&name, &SeedStandby { images, exported }).await?;
            output::print(format, &seeded, standbys::show)?;
        }
        StandbyCommand::Test(arguments) => return test(client, arguments, format).await,
        StandbyCommand::Promote(arguments) => {
            let promoted = promote(client, arguments).await?;
            output::print(format, &promoted, standbys::promoted)?;
        }
        StandbyCommand::Reprotect(arguments) => {
            let order = ReprotectStandby {
                every_seconds: Some(arguments.terms.every.as_secs_f64()),
                rpo_seconds: arguments.terms.rpo.map(|age| age.as_secs_f64()),
                bandwidth_bytes_per_second: arguments.terms.bandwidth,
                keep: arguments.keep,
                if_silent: arguments.terms.if_silent.map(Into::into),
            };
            let turned = client.reprotect_standby(&arguments.name, &order).await?;
            output::print(format, &turned, standbys::turned)?;
        }
        StandbyCommand::Remove { name, force } => {
            let removed = client.remove_standby(&name, RemoveStandby { force }).await?;
            output::print(format, &removed, |removed| format!("removed the standby {}\n", removed.name))?;
        }
    }
    Ok(Exit::Success)
}

fn order(arguments: AddStandbyArguments) -> NewStandby {
    let (host, store) = match arguments.to.split_once(':') {
        Some((host, store)) => (host.to_owned(), Some(store.to_owned())),
        None => (arguments.to, None),
    };
    NewStandby {
        volumes: arguments.volumes,
        host,
        store,
        every_seconds: Some(arguments.terms.every.as_secs_f64()),
        rpo_seconds: arguments.terms.rpo.map(|rpo| rpo.as_secs_f64()),
        bandwidth_bytes_per_second: arguments.terms.bandwidth,
        keep: arguments.keep,
        if_silent: arguments.terms.if_silent.map(Into::into),
    }
}

fn paused(paused: bool) -> SetStandby {
    SetStandby { paused: Some(paused), ..SetStandby::default() }
}

async fn set(client: &Client, name: &str, change: SetStandby, format: Format) -> Result<(), CommandError> {
    let set = client.set_standby(name, &change).await?;
    Ok(output::print(format, &set, standbys::show)?)
}

/// Reads `[VOLUME=]FILE`.
fn seed_image(text: &str) -> SeedImage {
    match text.split_once('=') {
        Some((volume, file)) => SeedImage { volume: Some(volume.to_owned()), file: file.to_owned() },
        None => SeedImage { volume: None, file: text.to_owned() },
    }
}

/// Promotes a standby. With a fence program, the first order shows whether anything but the other host is in the way.
async fn promote(client: &Client, arguments: PromoteStandbyArguments) -> Result<Standby, CommandError> {
    let names = names(client, &arguments).await?;
    let order = PromoteStandby {
        source_is_off: arguments.source_is_off,
        older_than_ok_seconds: arguments.older_than_ok.map(|age| age.as_secs_f64()),
        point: arguments.point,
        leave_stopped: arguments.leave_stopped,
        names,
    };
    let first = client.promote_standby(&arguments.name, &order).await;
    let Some(program) = arguments.fence else { return Ok(first?) };
    match first {
        Err(ClientError::Refused(detail)) if detail.code == ErrorCode::StandbyMayBeServed => {}
        ended => return Ok(ended?),
    }
    let host = client.standby(&arguments.name).await?.host;
    // There are two while it is not certain where the volumes are.
    for host in host.split(',') {
        fence(&program, host).await?;
    }
    let order = PromoteStandby { source_is_off: Some(host), ..order };
    Ok(client.promote_standby(&arguments.name, &order).await?)
}

/// Runs the program that switches a host off. It must succeed.
async fn fence(program: &Path, host: &str) -> Result<(), CommandError> {
    output::say(&format!("{} switches host \"{host}\" off", program.display()));
    // Standard output is for the result.
    let status = Command::new(program).arg(host).stdout(std::io::stderr()).status().await;
    let reason = match status {
        Ok(status) if status.success() => return Ok(()),
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    };
    Err(CommandError::NotFenced { program: program.to_owned(), host: host.to_owned(), reason })
}

/// Returns the names that volumes get at a promotion. A name alone is that of the one volume of the standby.
async fn names(
    client: &Client,
    arguments: &PromoteStandbyArguments,
) -> Result<BTreeMap<String, String>, CommandError> {
    let mut names = BTreeMap::new();
    for name in &arguments.names {
        let (old, new) = match name.split_once('=') {
            Some((old, new)) => (old.to_owned(), new.to_owned()),
            // The daemon refuses a name that is no volume's, so that of the standby is as good as none.
            None => match client.standby(&arguments.name).await?.volumes.as_slice() {
                [volume] => (volume.clone(), name.clone()),
                _ => (String::new(), name.clone()),
            },
        };
        names.insert(old, new);
    }
    Ok(names)
}

/// Begins a test, and waits until it is made; or ends one.
async fn test(
    client: &Client,
    arguments: TestStandbyArguments,
    format: Format,
) -> Result<Exit, CommandError> {
    let TestStandbyArguments { name, end, point, new_name, time, networks, boot_check, boot_check_timeout } =
        arguments;
    if end {
        let ended = client.end_standby_test(&name).await?;
        output::print(format, &ended, |_| "the test has ended; nothing of it is left\n".to_owned())?;
        return Ok(Exit::Success);
    }
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let order = TestStandby {
        point,
        name: new_name,
        for_seconds: seconds(time),
        networks,
        boot_check,
        boot_check_timeout_seconds: seconds(boot_check_timeout),
    };
    let mut standby = client.test_standby(&name, &order).await?;
    let begun = standby.test.as_ref().map(|test| test.begun_unix_ms);
    while standby.test.as_ref().is_some_and(|test| !is_settled(test, time.is_some())) {
        tokio::time::sleep(LOOK_EVERY).await;
        standby = client.standby(&name).await?;
        if standby.test.as_ref().map(|test| test.begun_unix_ms) != begun {
            break;
        }
    }
    output::print(format, &standby, standbys::tested)?;
    Ok(exit_of(standby.test.as_ref()))
}

/// Returns whether nothing more of a test is waited for.
fn is_settled(test: &StandbyTest, goes_on: bool) -> bool {
    let check = test.boot_check.as_ref().map(|check| check.state);
    match test.state {
        StandbyTestState::Ended => true,
        StandbyTestState::Running => check.is_none() || goes_on && check != Some(BootCheckState::Waiting),
        StandbyTestState::Making | StandbyTestState::Ending => false,
    }
}

fn exit_of(test: Option<&StandbyTest>) -> Exit {
    let Some(test) = test else { return Exit::Refused };
    match test.boot_check.as_ref().map(|check| check.state) {
        Some(BootCheckState::Passed) => Exit::Success,
        Some(BootCheckState::Failed) => Exit::NotReady,
        Some(BootCheckState::Waiting) | None if test.state == StandbyTestState::Running => Exit::Success,
        Some(BootCheckState::Waiting) | None => Exit::Refused,
    }
}

/// Has everything compared, and prints what differs.
async fn check_deep(client: &Client, name: &str, format: Format) -> Result<Exit, CommandError> {
    let mut standby = client.check_standby(name).await?;
    let begun = standby.check.as_ref().map(|check| check.begun_unix_ms);
    let is_under_way = |standby: &Standby| {
        let check = standby.check.as_ref();
        check.is_some_and(|check| check.ended_unix_ms.is_none() && Some(check.begun_unix_ms) == begun)
    };
    while is_under_way(&standby) {
        if format == Format::Text {
            standby.check.iter().for_each(|check| output::say_in_place(&standbys::comparing(check)));
        }
        tokio::time::sleep(LOOK_EVERY).await;
        standby = client.standby(name).await?;
    }
    output::print(format, &standby, standbys::compared)?;
    Ok(match standby.check {
        Some(check) if check.interrupted.is_none() && check.ended_unix_ms.is_some() => {
            if check.bytes_differing == 0 { Exit::Success } else { Exit::NotReady }
        }
        _ => Exit::Refused,
    })
}

/// Exports a standby. Ctrl-C cancels that.
async fn export(client: &Client, name: &str, folder: &Path, format: Format) -> Result<Exit, CommandError> {
    let absolute = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let order = ExportStandby { folder: absolute.to_string_lossy().into_owned() };
    let mut standby = client.export_standby(name, &order).await?;
    let begun = standby.export.as_ref().map(|export| export.begun_unix_ms);
    let is_under_way = |standby: &Standby| {
        let export = standby.export.as_ref();
        export.is_some_and(|export| export.ended_unix_ms.is_none() && Some(export.begun_unix_ms) == begun)
    };
    while is_under_way(&standby) {
        if format == Format::Text {
            standby.export.iter().for_each(|export| output::say_in_place(&standbys::exporting(export)));
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK_EVERY) => {}
            _ = tokio::signal::ctrl_c() => {
                output::say("cancelling it");
                // It may have ended.
                let _ = client.cancel_export(name).await;
            }
        }
        standby = client.standby(name).await?;
    }
    output::print(format, &standby, standbys::exported)?;
    let has_failed = standby.export.as_ref().is_none_or(|export| export.failed.is_some());
    Ok(if has_failed { Exit::Refused } else { Exit::Success })
}

/// Prints the standbys that are not as young as they have to be, or whose VMs would not start.
async fn check(client: &Client, name: Option<String>, format: Format) -> Result<Exit, CommandError> {
    let checked = match name {
        Some(name) => vec![client.standby(&name).await?],
        None => client
            .standbys()
            .await?
            .into_iter()
            .filter(|standby| standby.role == StandbyRole::Source)
            .collect(),
    };
    let is_late = |standby: &Standby| {
        standby.state != StandbyState::Current
            || standby.vms.iter().any(|vm| vm.problem.is_some())
            || standbys::doubt(standby).is_some()
    };
    let late: Vec<Standby> = checked.iter().filter(|standby| is_late(standby)).cloned().collect();
    output::print(format, &late, |late| standbys::checked(late, &checked))?;
    Ok(if late.is_empty() { Exit::Success } else { Exit::NotReady })
}
