//! Takes volumes back that left this host, by order, because the host that they left for does not end their migration: it is
//! lost, or has lost the volume. `migration::promotion` decides from the journal alone which departures an order can end.
//!
//! ```text
//!   promote --force ─► drivers end ─► names claimed, lanes end ─► images opened ─► promoted and ended, durably ─► served
//!                         └─ the other host has just ended it        └─ an error: the departure's session continues
//! ```
//! **N.B.** The other host may own the volumes as well, so a branch of their history begins. What was written there is not here.

use std::sync::Arc;

use chronicle::BranchId;
use lane::Aside;
use migration::custody::{Kind, Owner};
use migration::journal::Promotion;
use migration::promotion::{self, Departed, LeftImages};
use migration::{HostId, MigrationId};

use crate::error::RequestError;
use crate::host::Ownership;
use crate::migrations::ownership::promote::exchanged::lost_image;
use crate::volumes::orders::create::random_bytes;
use crate::volumes::registry::{Claim, Service};

/// Which images serve volumes that are taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Images {
    /// The images that the volumes left.
    AsKnown,
    /// The files or devices that have their names by now (`--exchanged`).
    AsNamed,
}

impl Ownership {
    /// Serves the volumes of a departure again, as they were when they left. Errors: [`RequestError::Left`] without
    /// `--force`, [`RequestError::LeftThere`]; after any error the departure continues.
    pub(crate) async fn take_departed(
        self: &Arc<Self>,
        name: &str,
        departed: Departed,
        order: &api::PromoteVolume,
    ) -> Result<(), RequestError> {
        let is_mixed = departed.images == LeftImages::Mixed;
        if !order.force || is_mixed && !order.without_missing && !order.exchanged {
            return Err(RequestError::Left { volume: name.to_owned(), advice: departed.advice() });
        }
        for record in &departed.volumes {
            if promotion::is_owned_there(self.claims.known_at(departed.host, record.volume).await) {
                let (volume, host) = (record.name.clone(), departed.host_name);
                return Err(RequestError::LeftThere { volume, host, migration: departed.migration });
            }
        }
        let images = if order.exchanged { Images::AsNamed } else { Images::AsKnown };
        let migration = departed.migration;
        let names: Vec<String> = departed.volumes.iter().map(|record| record.name.clone()).collect();
        let lanes = names.iter().filter_map(|name| match self.volumes.service(name) {
            Some(Service::Serving(lane)) => Some((name.clone(), lane)),
            _ => None,
        });
        let lanes: Vec<_> = lanes.collect();
        // N.B. The lanes first: a driver that has just learned of the end would delete the images.
        let aside = self.arrivals.set_aside(migration, Aside::Released, &lanes).await?;
        let mut taken = Vec::new();
        for record in &departed.volumes {
            taken.push((self.claim_departed(&record.name).await?, record));
        }
        let begun = self.promote_departed(&departed, images).await;
        for (claim, record) in taken {
            match begun {
                Ok(()) => {
                    claim.created(record.volume);
                    drop(claim);
                    self.serving.serve_in_background(&record.name);
                }
                // The session makes its lane again.
                Err(_) => claim.removed(),
            }
        }
        drop(aside);
        self.arrivals.look_again(migration);
        begun?;
        let host = &departed.host_name;
        tracing::warn!(volume = %name, %migration, host, "took a volume back by order, with its content of when it left");
        Ok(())
    }

    /// Makes the promotion durable, after a check of the images.
    async fn promote_departed(&self, departed: &Departed, images: Images) -> Result<(), RequestError> {
        for record in &departed.volumes {
            let opened = match (self.serving.open_for_resuming(record).await, images) {
                (Err(error), Images::AsNamed) if is_another(&error) => {
                    let owner = Owner::Migration(departed.migration);
                    self.accept(&record.name, owner, &record.image).await?;
                    self.serving.open_for_resuming(record).await
                }
                (opened, _) => opened,
            };
            // The image is locked for the check only; serving it opens it again.
            drop(opened.map_err(|error| lost_image(record, error))?);
        }
        let unchanged = self.journal.read(|state| promotion::departed(state, departed.migration));
        if unchanged.as_ref() != Some(departed) {
            let name = departed.volumes.first().map(|first| first.name.clone());
            return Err(RequestError::NotPrepared(name.unwrap_or_default()));
        }
        let branches = departed.generations.iter().map(|(volume, _)| (*volume, BranchId(random_bytes())));
        let promotion = Promotion::Force { branches: branches.collect() };
        Ok(self.journal.commit(departed.records(promotion)).await?)
    }

    /// Claims the name of a volume that has left, and ends the lane that forwards its clients, if there is one.
    async fn claim_departed(&self, name: &str) -> Result<Claim, RequestError> {
        let claim = match self.volumes.claim(name) {
            Err(RequestError::VolumeNotFound(_)) => return Ok(self.volumes.claim_new(name)?.0),
            claim => claim?.0,
        };
        if let Some(Service::Serving(lane)) = claim.removing() {
            lane.stop(self.limits.now().stop_wait_max).await;
        }
        claim.not_removed();
        Ok(claim)
    }

    /// Returns the order that ends the migrations which wait for a host, in words; the first for which there is one.
    pub(crate) fn ended_by(&self, migrations: &[MigrationId], peer: HostId) -> String {
        self.journal.read(|state| {
            let left = |id: &MigrationId| {
                let departed = promotion::departed(state, *id)?;
                let is_of_it = state.migrations.get(id)?.side.peer().is_some_and(|(other, _)| other == peer);
                is_of_it.then(|| format!("{}, if it is lost for good", departed.order()))
            };
            let cancel = || migrations.first().map(|first| format!("sterna migration cancel {first}"));
            migrations.iter().find_map(left).or_else(cancel).unwrap_or_default()
        })
    }
}

/// Returns whether an image is not used because another one has its name.
fn is_another(error: &RequestError) -> bool {
    matches!(error, RequestError::Claimed { refused, .. } if refused.claims.contains(&Kind::Exchanged))
}
