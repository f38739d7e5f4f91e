//! `sterna watch`: prints a line for each event on the host.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use api::{Client, ClientError, Migration, Watch};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use crate::commands::CommandError;
use crate::exit::Exit;
use crate::happenings::{Happening, Seen};
use crate::output::{self, Format, with_causes};

/// Time between two overviews.
const INTERVAL: Duration = Duration::from_millis(1000);
/// Longest time for an answer of the daemon.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Longest time that a request waits at the daemon for a change of a migration.
const WAIT_MS: u64 = 5_000;
/// Largest number of migrations that are followed individually, so that none of their phases is missed. For
/// others the overview is used.
const FOLLOWED_MAX: usize = 16;
/// Largest number of events that wait to be printed.
const NEWS_MAX: usize = 64;

pub(super) async fn run(client: &Client, format: Format) -> Result<Exit, CommandError> {
    // Ctrl-C ends the command in order. A closed pipe is an error of the next write.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::Signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(CommandError::Signals)?;
    // Late answers are reported as events instead.
    let client = client.never_late();
    let watched = tokio::select! {
        watched = watch(&client, format) => watched,
        _ = interrupt.recv() => Ok(()),
        _ = terminate.recv() => Ok(()),
    };
    watched.map(|()| Exit::Success)
}

async fn watch(client: &Client, format: Format) -> Result<(), CommandError> {
    let mut seen = Seen::default();
    let (news, mut told) = mpsc::channel(NEWS_MAX);
    let mut followed = Followed { client: client.clone(), news, tasks: BTreeMap::new() };
    // If no daemon answers at the start, the command fails. Later it waits for the daemon.
    print(&seen.look(client.overview().await?), format)?;
    let mut turns = tokio::time::interval(INTERVAL);
    turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        followed.follow(&seen.under_way());
        tokio::select! {
            Some(migration) = told.recv() => print(&seen.news_of(&migration), format)?,
            _ = turns.tick() => {
                let answer = tokio::time::timeout(ANSWER_MAX, client.overview()).await;
                let happened = match answer {
                    Ok(Ok(overview)) => seen.look(overview),
                    Ok(Err(error)) if is_for_good(&error) => return Err(error.into()),
                    Ok(Err(error)) => seen.lose(&with_causes(&error)),
                    Err(_) => seen.lose("it takes too long to answer"),
                };
                print(&happened, format)?;
            }
        }
    }
}

/// The tasks that follow one migration each.
struct Followed {
    client: Client,
    news: mpsc::Sender<Migration>,
    tasks: BTreeMap<String, AbortHandle>,
}

impl Followed {
    /// Follows exactly these migrations.
    fn follow(&mut self, under_way: &[(String, u64)]) {
        self.tasks.retain(|id, task| {
            let is_wanted = under_way.iter().any(|(wanted, _)| wanted == id);
            if !is_wanted {
                task.abort();
            }
            is_wanted && !task.is_finished()
        });
        for (id, change) in under_way {
            if self.tasks.len() >= FOLLOWED_MAX {
                return;
            }
            if !self.tasks.contains_key(id) {
                let task = tokio::spawn(follow(self.client.clone(), id.clone(), *change, self.news.clone()));
                self.tasks.insert(id.clone(), task.abort_handle());
            }
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.tasks.values().for_each(AbortHandle::abort);
    }
}

/// Sends each change of a migration until it has ended or the daemon does not answer.
async fn follow(client: Client, id: String, change: u64, news: mpsc::Sender<Migration>) {
    let mut after = change;
    loop {
        let watch = Watch { after: Some(after), wait_ms: WAIT_MS };
        let Ok(migration) = client.migration(&id, watch).await else { return };
        let has_ended = migration.state.has_ended();
        after = migration.change;
        if news.send(migration).await.is_err() || has_ended {
            return;
        }
    }
}

fn print(happened: &[Happening], format: Format) -> io::Result<()> {
    happened.iter().try_for_each(|happening| match format {
        Format::Json => output::print_line(happening),
        Format::Text => output::print_text_line(&happening.line()),
    })
}

fn is_for_good(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
        ClientError::Malformed { .. } | ClientError::TooLarge => true,
        ClientError::Refused(detail) => detail.code != api::ErrorCode::ShuttingDown,
        ClientError::Broken(_) => false,
    }
}
