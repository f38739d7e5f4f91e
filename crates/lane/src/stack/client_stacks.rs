//! What is made anew for each client: its layers down to the gate.

use std::rc::Rc;

use block::{BlockDevice, Handle};

use super::{ClientRequests, ClientSession, Counters, Meter, Volume};
use crate::fault_log::FaultLog;
use crate::fencing::Presence;
use crate::pulse::Pulse;

/// Makes for each client of a volume what its requests go through down to the gate.
#[derive(Clone)]
pub(crate) struct ClientStacks {
    volume: Rc<Volume>,
    counters: Rc<Counters>,
    pulse: Rc<Pulse>,
    faults: Rc<FaultLog>,
    handle: Handle,
}

impl ClientStacks {
    /// For the volume that people call `name`; its clients' requests are counted together.
    pub(crate) fn new(
        name: &str,
        volume: Rc<Volume>,
        counters: Rc<Counters>,
        pulse: Rc<Pulse>,
        handle: Handle,
    ) -> Self {
        Self { volume, counters, pulse, faults: Rc::new(FaultLog::new(name.to_owned())), handle }
    }

    /// What one client's requests go through.
    pub(crate) fn of(&self, presence: Rc<dyn Presence>) -> Rc<dyn BlockDevice> {
        let requests = ClientRequests::new(Rc::clone(&self.volume), Rc::clone(&presence));
        let session = ClientSession::new(Rc::clone(&self.volume), presence, Rc::new(requests));
        let (counters, pulse, faults) =
            (Rc::clone(&self.counters), Rc::clone(&self.pulse), Rc::clone(&self.faults));
        Rc::new(Meter::new(session, counters, pulse, faults, self.handle.clone()))
    }

    /// The volume as no client in particular sees it: to be asked what it is like.
    pub(crate) fn volume(&self) -> Rc<dyn BlockDevice> {
        self.volume.device()
    }
}
