//! Clients that stay at this host when their volume leaves for another one.

use std::sync::Arc;
use std::time::Duration;

use lane::LaneHandle;
use migration::VolumeId;
use migration::journal::{LaneLeft, Users};

use crate::host::Departures;

/// How often this host checks whether the clients of a departed volume have left.
const CLIENTS_POLL: Duration = Duration::from_secs(1);

impl Departures {
    /// Returns whether a VM of this host uses a volume. It stays when the volume moves alone, and reconnects after a restart.
    pub(crate) fn has_vm_on(&self, volume: &str) -> bool {
        let is_adopted = || {
            let adoptions = self.vms.adoptions().ok();
            adoptions.is_some_and(|adoptions| adoptions.find(|adopted| adopted.uses(volume)).is_some())
        };
        self.vms.runs_on(volume) || is_adopted()
    }

    /// Has the lane of a departed volume forward the clients until the last of them has left.
    pub(crate) async fn see_departure(self: Arc<Self>, name: String, volume: VolumeId, lane: LaneHandle) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(CLIENTS_POLL) => {}
                () = lane.ended() => return,
            }
            // A lane that does not answer is ending, or hangs and is asked again.
            let Ok(status) = lane.status().await else { continue };
            let users = Users {
                clients: status.connections + status.requests_in_flight,
                led_here_by: &status.led_here_by,
                has_vm: self.has_vm_on(&name),
            };
            let host = match self.journal.read(|state| state.lane_left(volume, users)) {
                LaneLeft::Over => return,
                LaneLeft::Needed => continue,
                LaneLeft::Unneeded { host } => host,
            };
            // The operation that holds the volume may make it return.
            let Ok((claim, _)) = self.volumes.claim(&name) else { continue };
            claim.removing();
            lane.stop(self.limits.now().stop_wait_max).await;
            let socket = self.sockets.volume_socket(&name);
            if let Err(error) = self.sockets.forget_volume(&name) {
                tracing::warn!(path = %socket.display(), %error, "cannot remove the socket of a volume that has left this host");
            }
            claim.removed();
            tracing::info!(
                volume = %name, host = %host,
                "the last forwarded client has disconnected; this host keeps nothing of the volume"
            );
            return;
        }
    }
}
