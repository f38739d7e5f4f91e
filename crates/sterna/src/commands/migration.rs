//! `sterna migration …`

use std::time::SystemTime;

use api::{Bytes, Client, FULL_SPEED_PERCENT, MigrationState, SetMigration, Watch};

use crate::args::{Limit, MigrationCommand, SetArguments};
use crate::commands::named::identity;
use crate::commands::{CommandError, migrate, report};
use crate::exit::Exit;
use crate::output::{self, Format};
use crate::progress::{Display, follow};

pub(super) async fn run(
    client: &Client,
    command: &MigrationCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        MigrationCommand::List(order) => {
            let mut migrations = client.migrations().await?;
            let after_unix_ms = order.since.map(|since| {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                now.saturating_sub(since).as_millis() as u64
            });
            migrations.retain(|migration| match (migration.ended_unix_ms, order.running, after_unix_ms) {
                (None, ..) => true,
                (Some(_), true, _) => false,
                (Some(ended), false, after) => after.is_none_or(|after| ended >= after),
            });
            let is_all = !order.running && order.since.is_none();
            output::print(format, &migrations, |migrations| match migrations.is_empty() && !is_all {
                true => "no such migrations; for all recorded ones: sterna migration list\n".to_owned(),
                false => output::migrations(migrations),
            })?;
        }
        MigrationCommand::Show(migration) => {
            let shown = client.migration(&identity(client, &migration.id).await?, Watch::default()).await?;
            output::print(format, &shown, output::migration)?;
        }
        MigrationCommand::Report(order) => return report::run(client, order, format).await,
        MigrationCommand::Watch(migration) => {
            return watch(client, &identity(client, &migration.id).await?, format).await;
        }
        MigrationCommand::Pause(migration) => {
            let shown = client.pause_migration(&identity(client, &migration.id).await?).await?;
            output::print(format, &shown, |migration| {
                format!("{id} is paused; to continue: sterna migration resume {id}\n", id = migration.id)
            })?;
        }
        MigrationCommand::Resume(migration) => {
            let shown = client.resume_migration(&identity(client, &migration.id).await?).await?;
            output::print(format, &shown, |migration| format!("{} continues\n", migration.id))?;
        }
        MigrationCommand::Set(SetArguments { id, bandwidth, impact }) => {
            let bandwidth_bytes_per_second = bandwidth.map(|limit| match limit {
                Limit::None => None,
                Limit::Rate(rate) => Some(rate),
            });
            let order = SetMigration { bandwidth_bytes_per_second, impact_percent: *impact };
            let shown = client.set_migration(&identity(client, id).await?, &order).await?;
            output::print(format, &shown, |migration| {
                let rate = order.bandwidth_bytes_per_second.map(|rate| match rate {
                    None => "copies without a rate limit".to_owned(),
                    Some(rate) => format!("copies at most {}/s", Bytes(rate)),
                });
                let impact = order.impact_percent.map(|percent| match percent {
                    FULL_SPEED_PERCENT => "does not give way to guests".to_owned(),
                    percent => format!("may cost guests {percent} % of their throughput"),
                });
                let changed: Vec<_> = rate.into_iter().chain(impact).collect();
                format!("{} {}\n", migration.id, changed.join(" and "))
            })?;
        }
        MigrationCommand::Retry(order) => return migrate::retry(client, order, format).await,
        MigrationCommand::Cancel(migration) => {
            let shown = client.cancel_migration(&identity(client, &migration.id).await?).await?;
            output::print(format, &shown, |migration| match migration.state {
                MigrationState::Cancelled => format!("{} is cancelled\n", migration.id),
                _ => format!(
                    "{id} is being cancelled; follow it with: sterna migration watch {id}\n",
                    id = migration.id
                ),
            })?;
        }
    }
    Ok(Exit::Success)
}

async fn watch(client: &Client, id: &str, format: Format) -> Result<Exit, CommandError> {
    let first = client.migration(id, Watch::default()).await?;
    let mut display = match format {
        Format::Json => Display::Json,
        Format::Text => Display::for_people(format),
    };
    let ended = tokio::select! {
        ended = follow(client, first, &mut display) => Some(ended),
        _ = tokio::signal::ctrl_c() => None,
    };
    display.close();
    let Some(ended) = ended else {
        display.say(&migrate::unwatched(id));
        return Ok(Exit::Interrupted);
    };
    let ended = ended?;
    if format == Format::Text {
        output::print(format, &ended, output::ended)?;
    }
    Ok(Exit::of_migration(&ended))
}
