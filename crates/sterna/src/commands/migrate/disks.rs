//! `sterna migrate VM --to STORE`: moves all disks of a running VM to another store of its host, one after the other.

use api::{Client, ClientError, ErrorCode, MigrateVolume, Named};
use tokio::signal::unix::{SignalKind, signal};

use super::wait;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};
use crate::progress::Display;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Course {
    /// The preflight checks are printed, and nothing moves.
    Look,
    /// All moves are ordered, and the daemon queues them.
    Order,
    /// Each move is awaited before the next one.
    Wait,
}

/// Returns the disks of a VM that are not in the named store; `None` if the names are not those of a VM and a store.
///
/// # Errors
/// [`CommandError::Client`].
pub(super) async fn of_vm(
    client: &Client,
    name: &str,
    order: &MigrateVolume,
) -> Result<Option<Vec<String>>, CommandError> {
    let is_alone = order.together_with.is_empty() && order.named != Named::Volume;
    if !is_alone || order.to.contains(':') {
        return Ok(None);
    }
    let Some(vm) = known(client.vm(name).await)? else { return Ok(None) };
    let has_volume = known(client.volume(name).await)?.is_some();
    let has_store = client.stores().await?.iter().any(|store| store.name == order.to);
    if !has_store || (order.named == Named::Any && has_volume) {
        return Ok(None);
    }
    let mut disks = Vec::new();
    for volume in vm.volumes {
        if client.volume(&volume).await?.store.as_ref() != Some(&order.to) {
            disks.push(volume);
        }
    }
    Ok(Some(disks))
}

/// Moves the disks. The first failure ends the command; disks that have moved stay there.
///
/// # Errors
/// [`CommandError`].
pub(super) async fn run(
    client: &Client,
    vm: &str,
    disks: Vec<String>,
    order: &MigrateVolume,
    course: Course,
    format: Format,
) -> Result<Exit, CommandError> {
    let order = MigrateVolume { named: Named::Volume, ..order.clone() };
    match course {
        Course::Look => look(client, &disks, &order, format).await,
        Course::Order => {
            let mut begun = Vec::new();
            for disk in &disks {
                begun.push(client.migrate(disk, &order).await?);
            }
            output::print(format, &begun, |begun| begun.iter().map(output::begun).collect())?;
            Ok(Exit::Success)
        }
        Course::Wait => follow_all(client, vm, disks, &order, format).await,
    }
}

async fn look(
    client: &Client,
    disks: &[String],
    order: &MigrateVolume,
    format: Format,
) -> Result<Exit, CommandError> {
    let mut plans = Vec::new();
    for disk in disks {
        plans.push(client.plan_migration(disk, order).await?);
    }
    let text =
        |plans: &Vec<api::MigrationPlan>| plans.iter().map(output::plan).collect::<Vec<_>>().join("\n");
    output::print(format, &plans, text)?;
    Ok(if plans.iter().all(|plan| plan.can_begin) { Exit::Success } else { Exit::Refused })
}

async fn follow_all(
    client: &Client,
    vm: &str,
    disks: Vec<String>,
    order: &MigrateVolume,
    format: Format,
) -> Result<Exit, CommandError> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::Signals)?;
    let mut display = Display::for_people(format);
    let (mut all, mut exit, count) = (Vec::new(), Exit::Success, disks.len());
    for (number, disk) in disks.into_iter().enumerate() {
        display.say(&format!("{disk}, disk {} of {count} of {vm}", number + 1));
        let begun = client.migrate(&disk, order).await?;
        let Some(ended) = wait(client, begun, &mut interrupt, &mut display).await?.ended else {
            return Ok(Exit::Interrupted);
        };
        exit = Exit::of_migration(&ended);
        all.push(ended);
        if exit != Exit::Success {
            break;
        }
    }
    display.close();
    output::print(format, &all, |all| match all.is_empty() {
        true => format!("all disks of {vm} are at {} already\n", order.to),
        false => all.iter().map(output::ended).collect(),
    })?;
    if all.len() < count {
        display.say(&format!("{} of {count} disks of {vm} were not moved", count - all.len()));
    }
    Ok(exit)
}

/// Returns the result, or `None` if nothing has this name.
fn known<T>(asked: Result<T, ClientError>) -> Result<Option<T>, ClientError> {
    match asked {
        Err(error) if matches!(error.code(), Some(ErrorCode::VmNotFound | ErrorCode::VolumeNotFound)) => {
            Ok(None)
        }
        asked => asked.map(Some),
    }
}
