//! Moves several volumes in one migration without a VM, to another host: all of them or none (decision 0033).

use std::collections::BTreeSet;
use std::sync::Arc;

use api::{MigrateVolume, Migration};
use migration::journal::VolumeRecord;

use crate::error::RequestError;
use crate::host::MigrationOrders;
use crate::migrations::departures::leave::Departing;
use crate::peers::channel::VOLUMES_MAX;

impl MigrationOrders {
    /// Begins to move several volumes to another host: `name`, and those that the order names. After an error all of them stay
    /// at this host, and nothing is left at the target.
    pub(crate) async fn migrate_together(
        self: &Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        let names = self.names_together(&name, &order)?;
        let Some(elsewhere) = self.claims.elsewhere(&order.to)? else { return Err(only_to_a_host(&order)) };
        let (mut claims, mut departing) = (Vec::new(), Vec::new());
        for name in names {
            let (claim, volume) = self.claims.claim_to_move(&name, &order).await?;
            claims.push(claim);
            let record: VolumeRecord = self.claims.record(volume, &name)?;
            departing.push(Departing { record, lane: self.volumes.lane(&name).await? });
        }
        self.departures.migrate_away(departing, elsewhere, order, None).await
    }

    /// Returns the volumes of an order, the first one first. Fails with [`RequestError::Invalid`] if one is named twice or is a
    /// VM, or if there are too many.
    pub(crate) fn names_together(
        &self,
        name: &str,
        order: &MigrateVolume,
    ) -> Result<Vec<String>, RequestError> {
        let names: Vec<String> = std::iter::once(name)
            .chain(order.together_with.iter().map(String::as_str))
            .map(str::to_owned)
            .collect();
        if names.len() > VOLUMES_MAX {
            let text = format!("a migration has {VOLUMES_MAX} volumes at most, not {}", names.len());
            return Err(RequestError::Invalid(text));
        }
        let mut seen = BTreeSet::new();
        for name in &names {
            if !seen.insert(name) {
                return Err(RequestError::Invalid(format!("\"{name}\" is named twice")));
            }
            if names.len() > 1 && self.vms.get(name).is_ok() {
                let text = format!(
                    "\"{name}\" is a VM, which moves with all its volumes and no others: sterna migrate {name} --to {}",
                    order.to
                );
                return Err(RequestError::Invalid(text));
            }
        }
        Ok(names)
    }
}

/// Returns the error for several volumes that are to move to a store of this host.
pub(crate) fn only_to_a_host(order: &MigrateVolume) -> RequestError {
    RequestError::Invalid(format!(
        "several volumes move as one only to another host; to the store \"{}\" of this one they move one by one",
        order.to
    ))
}
