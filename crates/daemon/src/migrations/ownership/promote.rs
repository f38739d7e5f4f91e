//! Promotes a complete copy whose source does not answer (design §5.13). `migration::promotion` decides from the journal alone
//! which copies can be promoted.
//!
//! ```text
//!   prepared, its lane waits ──► the target's half takes it over; waiting clients continue
//!   no lane (its source is unknown here, or its image was not available), or handed back
//!                            ──► lanes end ──► promoted and ended, durably ──► served like any volume
//! ```
//! The ticket that the source prints after *released* proves that no other host has the volume. After a promotion by force the
//! source may continue with its copy. The journal records that there may be two branches of one history.

pub(crate) mod exchanged;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chronicle::BranchId;
use lane::{LaneHandle, Promoted, Refused};
use migration::HostId;
use migration::filling::UNIT_BYTES;
use migration::journal::{MigrationState, Promotion, Record, Side, VolumeRecord};
use migration::promotion::{self, Promotable, Waits};
use migration::ticket::Ticket;

use crate::error::{LackingError, RequestError, StandbyError};
use crate::host::Ownership;
use crate::host::blocking;
use crate::images::half_made;
use crate::migrations::ownership::promote::exchanged::lost_image;
use crate::vms::Standing;
use crate::volumes::orders::create::random_bytes;
use crate::volumes::registry::{Claim, Service};

/// How long a volume may take until it is served: a commit, and a first read.
const SERVED_MAX: Duration = Duration::from_secs(10);
/// How long a lane that waits for a volume may take to end.
const GIVEN_BACK_MAX: Duration = Duration::from_secs(10);
const GIVEN_BACK_POLL: Duration = Duration::from_millis(50);

impl Ownership {
    /// Promotes this host's copy of a volume. Errors: [`RequestError::NotPrepared`], [`RequestError::NotPromotable`],
    /// [`RequestError::NoTicket`], [`RequestError::Ticket`]: nothing has changed.
    pub(crate) async fn promote_volume(
        self: Arc<Self>,
        name: String,
        order: api::PromoteVolume,
    ) -> Result<api::Volume, RequestError> {
        if order.restored {
            return self.take_restored(name, &order).await;
        }
        if order.unasked {
            return self.serve_unasked(name, order.force).await;
        }
        if order.exchanged && !order.force {
            return self.take_exchanged(name).await;
        }
        let departed = self.journal.read(|state| promotion::departed_named(state, &name));
        if let Some(departed) = departed {
            self.take_departed(&name, departed, &order).await?;
            self.volumes.lane(&name).await?;
            return self.views.describe_volume(&name).await;
        }
        if order.exchanged {
            self.take_exchanged_copy(&name).await?;
        }
        if order.without_missing {
            return self.give_up_missing(name, &order).await;
        }
        let (waiting, recorded) = self.find_promotable(&name)?;
        let promotion = match order.ticket {
            Some(ticket) => self.redeem(&Ticket::parse(&ticket)?, &waiting, &name)?,
            None if order.force => {
                let branch = |(volume, _): &(_, _)| (*volume, BranchId(random_bytes()));
                Promotion::Force { branches: waiting.generations.iter().map(branch).collect() }
            }
            None => return Err(RequestError::NoTicket),
        };
        tracing::warn!(volume = %name, migration = %waiting.migration, ?promotion, "a volume is promoted");
        match self.lane_that_waits(&waiting, &recorded) {
            Some(lane) => {
                let Promotable { migration, attempt, generations, .. } = waiting;
                let refused = |_| RequestError::NotPrepared(name.clone());
                let promoted = Promoted { attempt, generations, promotion };
                lane.promote(migration, promoted).await.map_err(refused)?;
                // The volume is served, or returns to its former state; the description shows which.
                let _ = tokio::time::timeout(SERVED_MAX, self.volumes.arrived(&name)).await;
            }
            None => self.promote_without_lane(&waiting, &recorded, promotion).await?,
        }
        self.volumes.lane(&name).await?;
        self.views.describe_volume(&name).await
    }

    /// Serves a volume that waits for the host of its standby.
    async fn serve_unasked(self: Arc<Self>, name: String, force: bool) -> Result<api::Volume, RequestError> {
        let volume = self.claims.record_named(&name)?.volume;
        if !self.permissions.waits(volume) {
            return Err(StandbyError::NotAsked { volume: name }.into());
        }
        let ordered = self.permissions.order(volume, force);
        ordered.map_err(|host| StandbyError::ServedElsewhere { volume: name.clone(), host })?;
        tracing::warn!(volume = %name, "a volume is served by order, although the host of its standby does not permit it");
        self.volumes.lane(&name).await?;
        self.views.describe_volume(&name).await
    }

    /// Gives up the missing blocks of a volume that is served here, because the host that has them is lost.
    async fn give_up_missing(
        self: Arc<Self>,
        name: String,
        order: &api::PromoteVolume,
    ) -> Result<api::Volume, RequestError> {
        let refused =
            |reason: &str| LackingError::NotGivenUp { volume: name.clone(), reason: reason.to_owned() };
        if order.ticket.is_some() {
            return Err(refused("it is this host's already, and needs no ticket").into());
        }
        let (_claim, volume) = self.volumes.claim(&name)?;
        let Some(filling) = self.journal.read(|state| state.fillings.get(&volume).cloned()) else {
            return Err(refused("nothing is").into());
        };
        let lane = self.volumes.lane(&name).await?;
        let unavailable = |fault: Refused| RequestError::VolumeUnavailable {
            volume: name.clone(),
            reason: fault.to_string(),
        };
        let progress = lane.status().await.map_err(unavailable)?.filling.unwrap_or_default();
        let is_away = self.hosts.silence_of(filling.peer).is_some() || progress.waits_for.is_some();
        if !is_away && !filling.is_given_up && !order.force {
            let reason = format!(
                "it comes from host \"{}\", which answers; to give it up anyway: --force",
                filling.peer_name
            );
            return Err(refused(&reason).into());
        }
        let bytes = progress.units_missing * UNIT_BYTES;
        tracing::warn!(volume = %name, host = %filling.peer_name, bytes, "gave up the missing blocks of a volume");
        self.journal.commit(vec![Record::MissingGivenUp { volume }]).await?;
        lane.give_up_missing().await.map_err(unavailable)?;
        // A migration that waits for the volume is refused now.
        self.queue.turn();
        self.views.describe_volume(&name).await
    }

    fn find_promotable(&self, name: &str) -> Result<(Promotable, MigrationState), RequestError> {
        self.journal.read(|state| {
            if state.questioned_named(name).is_some() {
                return Err(self.restoring.unconfirmed(name).into());
            }
            let waiting = promotion::waiting_named(state, name);
            if let Some((waiting, recorded)) = waiting {
                return Ok((waiting, recorded.clone()));
            }
            let comes = |recorded: &MigrationState| {
                matches!(recorded.side, Side::Incoming { .. })
                    && recorded.names.iter().any(|known| known == name)
            };
            let found = state.unfinished().find(|(_, recorded)| comes(recorded));
            Err(match found.map(|(id, recorded)| (id, promotion::promotable(id, recorded))) {
                Some((migration, Err(reason))) => {
                    RequestError::NotPromotable { volume: name.to_owned(), migration, reason }
                }
                _ => RequestError::NotPrepared(name.to_owned()),
            })
        })
    }

    /// Returns the lane that promotes all volumes of a migration: the first volume's, which has the target's half.
    fn lane_that_waits(&self, waiting: &Promotable, recorded: &MigrationState) -> Option<LaneHandle> {
        // A copy that was handed back has its store below the gate already; its half only waits for *discard*.
        if waiting.waits == Waits::ForDiscard {
            return None;
        }
        match self.volumes.service(recorded.names.first()?)? {
            Service::Arriving(lane, migration) if migration == waiting.migration => Some(lane),
            // A volume that has returned to the lane which forwarded its clients.
            Service::Serving(lane)
                if self.volumes.arrival_of(recorded.names.first()?) == Some(waiting.migration) =>
            {
                Some(lane)
            }
            _ => None,
        }
    }

    /// Makes this host the owner by its journal, and serves the volumes like any other.
    async fn promote_without_lane(
        self: &Arc<Self>,
        waiting: &Promotable,
        recorded: &MigrationState,
        promotion: Promotion,
    ) -> Result<(), RequestError> {
        let Side::Incoming { volumes, .. } = &recorded.side else { return Ok(()) };
        let vm = self.vm_orders.vm_of_arrival(&recorded.names);
        let mut taken = Vec::new();
        for record in volumes {
            taken.push((self.take_from_arrival(&record.name).await?, record));
        }
        // If this fails, the arrival continues alone: its session retries after a lane has ended.
        self.commit_promotion(waiting, volumes, promotion).await?;
        for (claim, record) in taken {
            claim.created(record.volume);
            drop(claim);
            self.serving.serve_in_background(&record.name);
        }
        if let Some(vm) = vm {
            self.vm_orders.settle(&vm, Standing::Arriving, true).await;
        }
        Ok(())
    }

    /// Makes a promotion durable, after a check of the images.
    async fn commit_promotion(
        &self,
        waiting: &Promotable,
        volumes: &[VolumeRecord],
        promotion: Promotion,
    ) -> Result<(), RequestError> {
        for record in volumes {
            // The image is locked for the check only; serving it opens it again.
            let opened = self.serving.open_for_resuming(record).await;
            drop(opened.map_err(|error| lost_image(record, error))?);
        }
        // The lanes that could change this are gone, and their commits are in the journal.
        let unchanged = self.find_promotable(&first_name(volumes));
        match unchanged {
            Ok((still, _)) if still == *waiting => {}
            Ok(_) => return Err(RequestError::NotPrepared(first_name(volumes))),
            Err(error) => return Err(error),
        }
        let records = waiting.records(promotion);
        self.journal.commit(records.clone()).await?;
        let journal = self.journal.clone();
        // N.B. The marks go before guests write to the images.
        blocking(move || {
            half_made::unmark_completed(&journal, &records);
            Ok(())
        })
        .await
    }

    /// Ends the lane that waits for an arriving volume, if there is one, and claims the name.
    async fn take_from_arrival(self: &Arc<Self>, name: &str) -> Result<Claim, RequestError> {
        if let Some(Service::Arriving(lane, _) | Service::Serving(lane)) = self.volumes.service(name) {
            if let Some(attempt) = self.volumes.attempt(name) {
                attempt.store(true, Ordering::SeqCst);
            }
            lane.stop(self.limits.now().stop_wait_max).await;
        }
        let taken = async {
            loop {
                let changed = self.volumes.changed();
                match self.volumes.claim_new(name) {
                    Ok((claim, _)) => return claim,
                    Err(_) => drop(tokio::time::timeout(GIVEN_BACK_POLL, changed).await),
                }
            }
        };
        let taken = tokio::time::timeout(GIVEN_BACK_MAX, taken).await;
        taken.map_err(|_| RequestError::VolumeBusy(name.to_owned()))
    }

    fn redeem(&self, ticket: &Ticket, waiting: &Promotable, name: &str) -> Result<Promotion, RequestError> {
        let own = self.hosts.own().unwrap_or(HostId([0; 32]));
        let redeemed =
            self.journal.read(|state| ticket.redeem(state, own).map(|(migration, _)| migration))?;
        if redeemed != waiting.migration {
            return Err(RequestError::NotPrepared(name.to_owned()));
        }
        Ok(Promotion::Ticket)
    }
}

fn first_name(volumes: &[VolumeRecord]) -> String {
    volumes.first().map(|first| first.name.clone()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
