//! Takes over a volume that waits for the word of a host which is not heard any more (design §5.13).
//!
//! With the ticket that the source prints after *released* nobody else has the volume. By force the source may go on with
//! it: then there are two branches of one history, and the journal remembers that.

use std::sync::Arc;
use std::time::Duration;

use chronicle::BranchId;
use lane::Promoted;
use migration::journal::{MigrationState, Promotion, Side, Stage};
use migration::recovery::next_of_incoming;
use migration::ticket::Ticket;
use migration::{HostId, MigrationId};

use super::Host;
use super::create::random_bytes;
use crate::error::RequestError;
use crate::volumes::Service;

/// How long the volume may take to be served: a commit, and a first read.
const SERVED_MAX: Duration = Duration::from_secs(10);

impl Host {
    /// Takes a volume over.
    ///
    /// # Errors
    /// [`RequestError::NotPrepared`], [`RequestError::NoTicket`], [`RequestError::Ticket`]: nothing has changed.
    pub(crate) async fn promote_volume(
        self: Arc<Self>,
        name: String,
        order: api::PromoteVolume,
    ) -> Result<api::Volume, RequestError> {
        let Some(Service::Arriving(_, migration)) = self.volumes.service(&name) else {
            return Err(RequestError::NotPrepared(name));
        };
        // The lane of the migration's first volume takes all of them over.
        let first = self.journal.read(|state| state.migrations.get(&migration)?.names.first().cloned());
        let Some(Service::Arriving(lane, _)) = first.and_then(|first| self.volumes.service(&first)) else {
            return Err(RequestError::NotPrepared(name));
        };
        let promoted = match order.ticket {
            Some(ticket) => self.redeem(&Ticket::parse(&ticket)?, migration, &name)?,
            None if order.force => self.force(migration, &name)?,
            None => return Err(RequestError::NoTicket),
        };
        tracing::warn!(volume = %name, %migration, promotion = ?promoted.promotion, "a volume is promoted");
        let refused = |_| RequestError::NotPrepared(name.clone());
        lane.promote(migration, promoted).await.map_err(refused)?;
        // It is served, or comes back as what it was; what is shown says which.
        let _ = tokio::time::timeout(SERVED_MAX, self.volumes.arrived(&name)).await;
        self.volumes.lane(&name).await?;
        self.describe_volume(&name).await
    }

    fn redeem(&self, ticket: &Ticket, waiting: MigrationId, name: &str) -> Result<Promoted, RequestError> {
        let own = self.hosts.own().unwrap_or(HostId([0; 32]));
        let redeemed =
            self.journal.read(|state| ticket.redeem(state, own).map(|(migration, _)| migration))?;
        if redeemed != waiting {
            return Err(RequestError::NotPrepared(name.to_owned()));
        }
        let (attempt, generations) = (ticket.attempt, ticket.generations.clone());
        Ok(Promoted { attempt, generations, promotion: Promotion::Ticket })
    }

    fn force(&self, waiting: MigrationId, name: &str) -> Result<Promoted, RequestError> {
        let recorded = self.journal.read(|state| state.migrations.get(&waiting).cloned());
        let prepared = recorded.as_ref().and_then(|recorded| match recorded {
            MigrationState { stage: Stage::Prepared(attempt), side: Side::Incoming { .. }, .. } => {
                Some((*attempt, next_of_incoming(recorded)))
            }
            _ => None,
        });
        let (attempt, generations) = prepared.ok_or_else(|| RequestError::NotPrepared(name.to_owned()))?;
        let branch = |(volume, _): &(_, _)| (*volume, BranchId(random_bytes()));
        let branches = generations.iter().map(branch).collect();
        Ok(Promoted { attempt, generations, promotion: Promotion::Force { branches } })
    }
}
