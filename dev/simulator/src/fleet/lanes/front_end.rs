//! The front end of simulated guests. They call their devices directly, so a gate that has ended stands for a server that takes
//! no more requests.

use std::rc::Weak;
use std::time::Duration;

use lane::{ClientProcess, FrontEnd, LaneFuture, PassedConnection};

use crate::fleet::host::SimHost;

/// How long apart it looks for requests in flight.
const DRAIN_LOOK: Duration = Duration::from_millis(1);

pub(super) struct Guests {
    host: Weak<SimHost>,
    index: usize,
}

impl Guests {
    pub(super) fn new(host: Weak<SimHost>, index: usize) -> Self {
        Self { host, index }
    }
}

impl FrontEnd for Guests {
    fn clients(&self) -> usize {
        0
    }

    fn processes(&self) -> Vec<ClientProcess> {
        Vec::new()
    }

    fn drain(&self, deadline: Duration) -> LaneFuture<usize> {
        let Some((host, volume)) =
            self.host.upgrade().and_then(|host| Some((host.handle.clone(), host.volume(self.index)?)))
        else {
            return Box::pin(std::future::ready(0));
        };
        volume.gate().end();
        Box::pin(async move {
            let until = host.now() + deadline;
            while volume.gate().in_flight() > 0 && host.now() < until {
                host.sleep(DRAIN_LOOK).await;
            }
            usize::from(volume.gate().in_flight() > 0)
        })
    }

    fn pass(&self, deadline: Duration) -> LaneFuture<(usize, Vec<PassedConnection>)> {
        let drained = self.drain(deadline);
        Box::pin(async move { (drained.await, Vec::new()) })
    }
}
