//! `sterna migrate`: begins a migration and, unless detached, waits for its end; or prints the preflight check.

mod disks;

use api::{Allocation, Client, ClientError, ErrorCode, MigrateVolume, Migration, Named};
use tokio::signal::unix::{Signal, SignalKind, signal};

use self::disks::Course;
use crate::args::{MigrateArguments, RetryArguments};
use crate::commands::CommandError;
use crate::commands::named::identity;
use crate::exit::Exit;
use crate::output::{self, Format};
use crate::progress::{Display, follow};

pub(super) async fn run(
    client: &Client,
    order: MigrateArguments,
    format: Format,
) -> Result<Exit, CommandError> {
    let mut names = order.names.into_iter();
    // The command line requires at least one.
    let (named, name) = named(&names.next().unwrap_or_default());
    let request = MigrateVolume {
        to: order.to,
        bandwidth_bytes_per_second: order.pace.bandwidth,
        impact_percent: order.pace.impact,
        keep_source: order.keep_source,
        format: order.format.map(Into::into),
        allocation: if order.thick { Allocation::Thick } else { Allocation::Thin },
        keep_chain: order.keep_chain,
        serve_here: order.serve_here,
        full: order.full,
        standby_untold: order.standby_untold,
        shared_target: order.shared_target.into(),
        max_downtime_ms: Some(order.max_downtime),
        memory_streams: order.memory_streams.0,
        memory: order.memory.into(),
        strategy: order.strategy.strategy.into(),
        not_incremental: order.strategy.no_incremental,
        rounds: order.strategy.rounds,
        or_mirror: order.strategy.or_mirror,
        ignore_hot_blocks: order.strategy.ignore_hot_blocks,
        together_with: names.collect(),
        named,
        begin_unix_ms: order.pace.at,
        deadline_unix_ms: order.pace.deadline,
    };
    if let Some(found) = disks::of_vm(client, &name, &request).await? {
        let course = match (order.dry_run, order.detach) {
            (true, _) => Course::Look,
            (false, true) => Course::Order,
            (false, false) => Course::Wait,
        };
        return disks::run(client, &name, found, &request, course, format).await;
    }
    if order.dry_run {
        let plan = client.plan_migration(&name, &request).await?;
        output::print(format, &plan, output::plan)?;
        return Ok(if plan.can_begin { Exit::Success } else { Exit::Refused });
    }
    let begun = async {
        let migration = client.migrate(&name, &request).await?;
        if request.memory == api::Memory::PostCopy && matches!(format, Format::Text) {
            Display::for_people(format).say(api::Memory::POST_COPY_PRICE);
        }
        Ok(migration)
    };
    see_through(client, begun, order.detach, format).await
}

/// Splits a name from its optional prefix: `vm:NAME`, `volume:NAME`.
fn named(text: &str) -> (Named, String) {
    let prefixed = [("vm:", Named::Vm), ("volume:", Named::Volume)].into_iter();
    let found = prefixed.filter_map(|(prefix, named)| Some((named, text.strip_prefix(prefix)?))).next();
    found.map_or_else(|| (Named::Any, text.to_owned()), |(named, name)| (named, name.to_owned()))
}

/// Repeats a failed or cancelled migration.
pub(super) async fn retry(
    client: &Client,
    order: &RetryArguments,
    format: Format,
) -> Result<Exit, CommandError> {
    let begun = async { client.retry_migration(&identity(client, &order.id).await?).await };
    see_through(client, begun, order.detach, format).await
}

/// Begins a migration and waits for its end, unless it is detached.
async fn see_through(
    client: &Client,
    begun: impl Future<Output = Result<Migration, ClientError>>,
    is_detached: bool,
    format: Format,
) -> Result<Exit, CommandError> {
    // From here on Ctrl-C cancels the migration before it ends the program.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::Signals)?;
    let migration = begun.await?;
    if is_detached {
        output::print(format, &migration, output::begun)?;
        return Ok(Exit::Success);
    }
    let mut display = Display::for_people(format);
    let ended = wait(client, migration, &mut interrupt, &mut display).await;
    display.close();
    let Some(ended) = ended?.ended else { return Ok(Exit::Interrupted) };
    output::print(format, &ended, output::ended)?;
    Ok(Exit::of_migration(&ended))
}

/// The end of a wait for a migration.
pub(super) struct Waited {
    /// The migration, ended; `None`: a second Ctrl-C has stopped the wait.
    pub(super) ended: Option<Migration>,
    /// Whether the user has tried to cancel it.
    pub(super) was_interrupted: bool,
}

/// Waits for the end of a migration. The first Ctrl-C cancels, the second one stops waiting.
pub(super) async fn wait(
    client: &Client,
    migration: Migration,
    interrupt: &mut Signal,
    display: &mut Display,
) -> Result<Waited, CommandError> {
    let id = migration.id.clone();
    tokio::select! {
        ended = follow(client, migration, display) => {
            return Ok(Waited { ended: Some(ended?), was_interrupted: false });
        }
        _ = interrupt.recv() => {}
    }
    display.say(&format!("cancelling {id}; press Ctrl-C again to stop waiting"));
    let migration = match client.cancel_migration(&id).await {
        Ok(migration) => migration,
        Err(error) if matches!(error.code(), Some(ErrorCode::TooLate | ErrorCode::NotMigrating)) => {
            display.say(&error.to_string());
            client.migration(&id, api::Watch::default()).await?
        }
        Err(error) => return Err(error.into()),
    };
    tokio::select! {
        ended = follow(client, migration, display) => {
            Ok(Waited { ended: Some(ended?), was_interrupted: true })
        }
        _ = interrupt.recv() => {
            display.say(&unwatched(&id));
            Ok(Waited { ended: None, was_interrupted: true })
        }
    }
}

/// Returns the text for a migration whose end the command does not wait for.
pub(super) fn unwatched(id: &str) -> String {
    format!("{id} continues without being watched; see: sterna migration show {id}")
}
