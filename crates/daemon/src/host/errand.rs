//! What is to be run before and after a machine changes its host: the occasion, and where a failure is noted.

use std::sync::Arc;

use migration::MigrationId;

use super::Host;
use crate::hooks::{Begun, Errand, HookSide, Occasion};

impl Host {
    /// What is to be run for a machine that leaves for the host `other`, or comes from there.
    pub(super) fn errand(
        self: &Arc<Self>,
        migration: MigrationId,
        vm: &str,
        side: HookSide,
        other: &str,
        begun: Begun,
    ) -> Arc<Errand> {
        let volumes =
            self.journal.read(|state| state.migrations.get(&migration).map(|known| known.names.clone()));
        let occasion = Occasion {
            migration,
            vm: vm.to_owned(),
            volumes: volumes.unwrap_or_default(),
            side,
            own: self.hosts.describe_identity().map(|identity| identity.name).unwrap_or_default(),
            other: other.to_owned(),
        };
        let host = Arc::downgrade(self);
        let warn = move |warning: String| {
            let Some(host) = host.upgrade() else { return };
            tokio::spawn(async move {
                if let Some(begun) = host.begun_unix_ms(migration) {
                    host.dockets.note(migration, begun, |docket| docket.warn(warning)).await;
                }
            });
        };
        Errand::new(self.config.hooks.clone(), occasion, begun, warn)
    }
}
