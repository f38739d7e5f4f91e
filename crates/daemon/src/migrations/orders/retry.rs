//! Repeats a migration that failed: the same volume or VM, target and options.

use std::pin::Pin;
use std::sync::Arc;

use api::{MigrateVolume, Migration, Strategy};
use lane::Rest;
use migration::journal::{MigrationState, Outcome, Side, Stage};
use migration::stay::copy;
use migration::{MigrationId, orders};

use crate::error::{RequestError, RetryObstacle};
use crate::host::MigrationOrders;
use crate::journal::now_unix_ms;
use crate::migrations::metadata::Metadata;
use crate::migrations::registry::parse_id;
use crate::volumes::chronicles::look;

impl MigrationOrders {
    /// Repeats a migration that moved nothing, under a new number. Errors: [`RequestError::MigrationNotFound`];
    /// [`RequestError::CannotRetry`]: it is running, has succeeded, or its volume has left; those of [`Self::migrate`].
    pub(crate) async fn retry_migration(self: Arc<Self>, id: String) -> Result<Migration, RequestError> {
        let migration = parse_id(&id)?;
        let refused = |reason: RetryObstacle| RequestError::CannotRetry { migration, reason };
        if self.queue.has(migration) {
            return Err(refused(RetryObstacle::Queued(migration)));
        }
        let known = self.journal.read(|state| state.migrations.get(&migration).cloned());
        let known = known.ok_or(RequestError::MigrationNotFound(id))?;
        check_end(migration, &known).map_err(refused)?;
        let metadata = self.metadata_folder.of(migration, known.started_unix_ms);
        let Some(metadata @ Metadata { order: Some(_), .. }) = metadata else {
            return Err(refused(unrecorded(&known)));
        };
        self.check_volumes(&metadata).map_err(refused)?;
        let Metadata { name, order: Some(order), strategy_reason, .. } = metadata else {
            return Err(refused(unrecorded(&known)));
        };
        // The retry begins at once, and a time in the past orders nothing.
        let (begin_unix_ms, deadline_unix_ms) =
            (None, order.deadline_unix_ms.filter(|at| *at > now_unix_ms()));
        // What was chosen then may be wrong by now.
        let (strategy, or_mirror) = match strategy_reason.is_empty() {
            true => (order.strategy.begun(), order.or_mirror),
            false => (Strategy::Auto, false),
        };
        let order = MigrateVolume { begin_unix_ms, deadline_unix_ms, strategy, or_mirror, ..order };
        self.order_migration(name, order, Some(migration)).await
    }

    /// Records for migrations between stores, whose lanes have ended in order, what the next daemon needs to resume them. If it
    /// cannot resume one, it repeats it.
    pub(crate) async fn note_interrupted(&self) {
        let interrupted = self.journal.read(|state| {
            let interrupted = state.unfinished().filter(|(_, migration)| is_interrupted(migration));
            interrupted.map(|(id, migration)| (id, migration.clone())).collect::<Vec<_>>()
        });
        for (id, migration) in interrupted {
            // Interrupted migrations within a host have one volume.
            let look = match migration.volumes.into_iter().next() {
                Some(moving) => {
                    tokio::task::spawn_blocking(move || look(&moving.target)).await.ok().flatten()
                }
                None => None,
            };
            let (progress, lives) = (self.migrations.progress(id), self.chronicles.lives());
            let note = |metadata: &mut Metadata| {
                metadata.goes_on = true;
                metadata.copy.image = copy::left(metadata.copy.image.take(), look, &lives);
                progress.iter().for_each(|progress| metadata.copy.count(progress));
            };
            self.metadata_folder.note(id, migration.started_unix_ms, note).await;
        }
    }

    /// Repeats migrations that an orderly stop interrupted and that this daemon could not resume. They get new numbers and
    /// begin anew, because their targets were deleted.
    pub(crate) async fn go_on_with_interrupted(self: &Arc<Self>) {
        let ended = self.journal.read(|state| {
            let ended = state.migrations.iter().filter(|(_, migration)| migration.has_ended());
            ended.map(|(id, _)| *id).collect::<Vec<_>>()
        });
        // A session handles its own migration.
        for id in ended.into_iter().filter(|id| !self.sessions.has(*id)) {
            self.begin_anew_if_interrupted(id).await;
        }
    }

    /// Repeats a migration from the beginning, if an orderly stop of the daemon interrupted it. A session may await this, so
    /// the future is boxed: it leads to the next session.
    pub(crate) fn begin_anew_if_interrupted(
        self: &Arc<Self>,
        id: MigrationId,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(Arc::clone(self).begin_anew(id))
    }

    pub(crate) async fn begin_anew(self: Arc<Self>, id: MigrationId) {
        let Some(begun) = self.journal.begun_unix_ms(id) else { return };
        let Some(metadata) = self.metadata_folder.of(id, begun).filter(|metadata| metadata.goes_on) else {
            return;
        };
        let next = Arc::clone(&self).retry_migration(id.to_string()).await;
        // N.B. Whatever the outcome, the next start does not try again.
        self.metadata_folder.note(id, begun, |metadata| metadata.goes_on = false).await;
        match next {
            Ok(next) => {
                tracing::info!(migration = %id, goes_on_as = next.id, "a restart has interrupted it; it begins again");
                if metadata.is_paused {
                    // A migration that waits for its turn is not copied either.
                    let _ = Arc::clone(&self).rest_migration(next.id, Rest::Pause).await;
                }
            }
            Err(error) => {
                let reason = error.message();
                tracing::warn!(migration = %id, reason, "cannot begin an interrupted migration again");
            }
        }
    }

    /// Checks that the named volumes are those that were to move: other volumes may have their names since.
    fn check_volumes(&self, metadata: &Metadata) -> Result<(), RetryObstacle> {
        let (gone, away) = self.journal.read(|state| {
            let here = |id: &String| state.volumes.keys().any(|volume| volume.to_string() == *id);
            let gone = metadata.volumes.iter().find(|id| !here(id));
            let moved = |id: &String| {
                state.moved.values().find(|moved| moved.volume.record.volume.to_string() == *id)
            };
            (gone.is_some(), gone.and_then(moved).map(|moved| moved.host_name.clone()))
        });
        match (gone, away) {
            (false, _) => Ok(()),
            (true, Some(host)) => Err(RetryObstacle::Away { name: metadata.name.clone(), host }),
            (true, None) => Err(RetryObstacle::Gone(metadata.name.clone())),
        }
    }
}

/// Returns whether a migration between stores of this host has an incomplete copy and is not cancelled.
fn is_interrupted(migration: &MigrationState) -> bool {
    migration.side == Side::OneHost
        && matches!(migration.stage, Stage::Copying | Stage::Prepared(_))
        && orders::goes_on(migration)
}

/// Refuses to repeat a migration that has moved something, or that came from another host.
fn check_end(migration: MigrationId, known: &MigrationState) -> Result<(), RetryObstacle> {
    if let Side::Incoming { peer_name, .. } = &known.side {
        return Err(RetryObstacle::Incoming { peer: peer_name.clone() });
    }
    match &known.stage {
        Stage::Ended(Outcome::Moved { .. } | Outcome::TakenBack) => Err(RetryObstacle::EndedWell(migration)),
        Stage::Ended(_) => Ok(()),
        _ => Err(RetryObstacle::UnderWay(migration)),
    }
}

fn unrecorded(known: &MigrationState) -> RetryObstacle {
    let volume = known.names.first().map_or("VOLUME", String::as_str);
    let target = known.volumes.first().map_or("STORE", |moving| moving.target.store.as_str());
    RetryObstacle::Unrecorded { volume: volume.to_owned(), target: target.to_owned() }
}

#[cfg(test)]
mod tests {
    use migration::journal::{FailureCode, Forwarding, MigrationState, Outcome, Side, Stage, Summary};
    use migration::{Attempt, HostId, MigrationId};

    use super::check_end;
    use crate::error::RetryObstacle;

    fn check(side: Side, stage: Stage) -> Result<(), RetryObstacle> {
        let known = MigrationState {
            volumes: Vec::new(),
            names: Vec::new(),
            keep_source: false,
            stage,
            aborted: Attempt::NONE,
            started_unix_ms: 0,
            ended_unix_ms: None,
            summary: Summary::default(),
            side,
            promotion: None,
            returning: Vec::new(),
            hollow: None,
            is_cancelled: false,
        };
        check_end(MigrationId(7), &known)
    }

    #[test]
    fn only_what_was_begun_here_and_came_to_nothing_is_done_once_more() {
        let failed = || Outcome::Failed { code: FailureCode::TargetFull, detail: String::new() };
        for outcome in [failed(), Outcome::Cancelled, Outcome::HandedBack { detail: String::new() }] {
            check(Side::OneHost, Stage::Ended(outcome)).unwrap();
        }
        let outgoing = Side::Outgoing {
            peer: HostId([1; 32]),
            peer_name: "beta".to_owned(),
            store: String::new(),
            forwarding: Forwarding::WhileConnected,
        };
        check(outgoing, Stage::Ended(failed())).unwrap();
        let moved = Outcome::Moved { left_over: String::new() };
        assert!(check(Side::OneHost, Stage::Ended(moved)).unwrap_err().to_string().contains("succeeded"));
        assert!(check(Side::OneHost, Stage::Copying).unwrap_err().to_string().contains("under way"));
        let incoming = Side::Incoming {
            peer: HostId([1; 32]),
            peer_name: "beta".to_owned(),
            remote: MigrationId(3),
            volumes: Vec::new(),
        };
        assert!(check(incoming, Stage::Ended(failed())).unwrap_err().to_string().contains("\"beta\""));
    }
}
