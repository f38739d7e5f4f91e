//! Begins migrations of VMs, with all their volumes.

use std::sync::Arc;

use api::{MigrateVolume, Migration};
use migration::vm::cold::Form;

use crate::error::RequestError;
use crate::host::MigrationOrders;
use crate::migrations::departures::leave::Departing;
use crate::vms::orders::adopted::{connect_to_move, derived};
use crate::vms::orders::cold::check_cold_order;
use crate::vms::orders::move_vm::{Company, Travels, check_order, no_volumes, not_to_a_store};
use crate::vms::{Adopted, Extent};

impl MigrationOrders {
    /// Begins to move a VM to another host, with all its volumes. After an error it runs here, and nothing is left at the target.
    pub(crate) async fn migrate_vm(
        self: &Arc<Self>,
        name: String,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        let known = self.vms.get(&name)?;
        let Some(elsewhere) = self.claims.elsewhere(&order.to)? else {
            return Err(not_to_a_store(&known.volumes, &order));
        };
        check_order(&order)?;
        let company = match self.vms.form(&name)? {
            Form::Live => self.vm_orders.live_company(name, &known.volumes, &order).await?,
            Form::Cold => {
                check_cold_order(&name, &order)?;
                let manifest = self.vm_orders.describe_cold(&name, Extent::Needs).await?;
                Company { name, manifest, travels: Travels::Cold }
            }
        };
        let (mut claims, mut departing) = (Vec::new(), Vec::new());
        for volume in &known.volumes {
            let (claim, id) = self.claims.claim_to_move(volume, &order).await?;
            claims.push(claim);
            let record = self.claims.record(id, volume)?;
            departing.push(Departing { record, lane: self.volumes.lane(volume).await? });
        }
        if departing.is_empty() {
            return Err(no_volumes(&company.name));
        }
        self.departures.migrate_away(departing, elsewhere, order, Some(company)).await
    }

    /// Begins to move an adopted VM to another host, with its disks. After an error the VM runs here, adopted as before, and
    /// nothing is left at the target.
    pub(crate) async fn migrate_adopted(
        self: &Arc<Self>,
        adopted: Adopted,
        order: MigrateVolume,
    ) -> Result<Migration, RequestError> {
        let name = adopted.name.clone();
        let qemu = connect_to_move(&adopted).await?;
        let derived = derived(&adopted, &qemu).await?;
        for what in &derived.left_behind {
            tracing::info!(vm = %name, %what, "files of the VM are left over");
        }
        self.vms.take_in(&adopted, qemu, derived.text).await?;
        let begun = self.migrate_vm(name.clone(), order).await;
        if begun.is_err() {
            self.vms.let_go_unless_leaving(&name).await?;
        }
        begun
    }
}
