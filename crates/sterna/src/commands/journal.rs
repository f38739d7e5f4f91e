//! `sterna journal …`

use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;

use daemon::config::Overrides;
use daemon::{
    Config, Folders, HostsSaid, JournalError, JournalExamination, JournalMigration, JournalOwner,
    JournalVolume, Replacing, RestoredJournal, restore_journal,
};

use crate::args::{JournalArguments, JournalCommand, RestoreArguments};
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};
use console::units::bytes;

pub(super) fn run(command: JournalCommand, format: Format) -> Result<Exit, CommandError> {
    let found = match command {
        JournalCommand::Check(which) => {
            let found = examine(which)?;
            output::print(format, &found, text)?;
            found
        }
        JournalCommand::Export(which) => {
            let found = examine(which)?;
            output::print(Format::Json, &found.export(), |_| String::new())?;
            // The output may go to a file, so the problem is printed on standard error as well.
            if let (Some(problem), Format::Text) = (&found.problem, format) {
                output::say(&format!("the export ends where the journal becomes unreadable: {problem}"));
            }
            found
        }
        JournalCommand::Restore(order) => {
            output::print(format, &restore(order)?, restored)?;
            return Ok(Exit::Success);
        }
    };
    Ok(if found.intact { Exit::Success } else { Exit::Unexpected })
}

fn examine(JournalArguments { path, config }: JournalArguments) -> Result<JournalExamination, CommandError> {
    let path = match path {
        Some(path) => path,
        None => data_folder(config)?,
    };
    JournalExamination::of(&path).map_err(|fault| match fault {
        JournalError::Io { path, source, .. } if source.kind() == io::ErrorKind::NotFound => {
            CommandError::NoJournal { path }
        }
        fault => CommandError::Journal(fault),
    })
}

fn restore(order: RestoreArguments) -> Result<RestoredJournal, CommandError> {
    let RestoreArguments { from, replace, hosts_complete, data_dir, config } = order;
    let data_dir = data_dir.map_or_else(|| data_folder(config), Ok)?;
    let replacing = if replace { Replacing::Ordered } else { Replacing::Refused };
    let said = if hosts_complete { HostsSaid::Complete } else { HostsSaid::Nothing };
    Ok(restore_journal(&data_dir, &from, replacing, said)?)
}

fn restored(restored: &RestoredJournal) -> String {
    let (path, age) = (restored.path.display(), output::replicas::age(restored.backup_unix_ms));
    let mut text = format!("{path} is now the journal of {age} ago\n");
    if let Some(replaced) = &restored.replaced {
        // Writing to a string does not fail.
        let _ = writeln!(text, "the former journal is {}", replaced.display());
    }
    let then = "\nThe daemon serves an unconfirmed volume when all other hosts have confirmed it. See: sterna volume list\n";
    text + &volumes(&restored.volumes) + then + &hosts(restored)
}

/// Returns advice about the hosts that must be asked, if the list of hosts is not known to be complete.
fn hosts(restored: &RestoredJournal) -> String {
    if restored.hosts_known {
        return String::new();
    }
    let named: Vec<String> =
        restored.hosts.iter().map(|host| format!("  {} ({})\n", host.name, host.id)).collect();
    let named = match named.is_empty() {
        true => "it names none".to_owned(),
        false => format!("it names these:\n{}", named.concat()),
    };
    format!(
        "\n**No volume is served automatically**: the list of hosts is missing, or may be of another time, so other hosts may \
         exist. Any of them may have a volume. Pair this host again with every host that it was paired with (sterna host invite, \
         sterna host join); of the backup {}\n",
        named.trim_end()
    )
}

fn data_folder(config_file: Option<PathBuf>) -> Result<PathBuf, CommandError> {
    let overrides = Overrides { config_file, ..Overrides::default() };
    Ok(Config::load(&overrides, &Folders::of_this_user())?.data_dir)
}

fn text(found: &JournalExamination) -> String {
    let path = found.path.display();
    let mut text = match &found.problem {
        None => format!("{path} is intact\n"),
        Some(problem) => format!("{problem}\n\nIts content before that:\n"),
    };
    let version = found.version.map_or_else(|| "unknown".to_owned(), |version| version.to_string());
    let last = found.last_unix_ms.map(|then| format!(", the last {} ago", output::replicas::age(then)));
    let torn = match found.torn_bytes {
        0 => String::new(),
        torn => format!("; behind them {torn} bytes of an incomplete commit, which nothing relies on"),
    };
    // Writing to a string does not fail.
    let _ = writeln!(text, "  version   {version}");
    let _ = writeln!(
        text,
        "  entries   {} with {} records{}, {} of {}{torn}",
        found.entries,
        found.records,
        last.unwrap_or_default(),
        bytes(found.end_bytes),
        bytes(found.size_bytes),
    );
    text + &volumes(&found.volumes) + &migrations(&found.migrations)
}

fn volumes(volumes: &[JournalVolume]) -> String {
    if volumes.is_empty() {
        return "\nno volumes\n".to_owned();
    }
    let mut table = output::table(&["VOLUME", "SIZE", "GENERATION", "WHERE", "IMAGE"], &[1, 2]);
    for volume in volumes {
        let host = volume.host.as_deref().unwrap_or("another");
        let place = match volume.owner {
            JournalOwner::Here => "here".to_owned(),
            JournalOwner::BeingFilled => format!("here, being filled from host {host}"),
            JournalOwner::Elsewhere => format!("at host {host}"),
            JournalOwner::Arriving => format!("arriving here from host {host}"),
            JournalOwner::Unconfirmed => "unconfirmed".to_owned(),
        };
        let image = volume.image.clone().unwrap_or_else(|| "-".to_owned());
        table.add_row([
            volume.name.clone(),
            bytes(volume.size_bytes),
            volume.generation.to_string(),
            place,
            image,
        ]);
    }
    format!("\n{}", output::lines(&table))
}

fn migrations(migrations: &[JournalMigration]) -> String {
    if migrations.is_empty() {
        return String::new();
    }
    let mut table = output::table(&["UNDER WAY", "STAGE", "VOLUMES", "DIRECTION"], &[]);
    for migration in migrations {
        let direction = match (&migration.host, migration.incoming) {
            (None, _) => "between stores".to_owned(),
            (Some(host), true) => format!("from host {host}"),
            (Some(host), false) => format!("to host {host}"),
        };
        let volumes = migration.volumes.join(", ");
        table.add_row([migration.id.clone(), migration.stage.to_owned(), volumes, direction]);
    }
    format!("\n{}", output::lines(&table))
}
