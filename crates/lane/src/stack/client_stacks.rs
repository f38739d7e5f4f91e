//! Makes the layers of each client, down to the gate.

use std::rc::Rc;

use block::{BlockDevice, Handle};

use super::{ClientRequests, ClientSession, Counters, Meter, Volume};
use crate::fault_log::FaultLog;
use crate::fencing::Presence;
use crate::pulse::Pulse;

/// The layers above the gate of a volume, for each of its clients.
#[derive(Clone)]
pub struct ClientStacks {
    volume: Rc<Volume>,
    measures: Measures,
    faults: Rc<FaultLog>,
    handle: Handle,
}

/// What measures the requests of a volume's clients together.
#[derive(Clone)]
pub(crate) struct Measures {
    pub(crate) counters: Rc<Counters>,
    pub(crate) pulse: Rc<Pulse>,
    pub(crate) gauge: Rc<pacer::Gauge>,
}

impl ClientStacks {
    /// Makes the factory for the volume of this name; its clients' requests are counted together.
    pub(crate) fn new(name: &str, volume: Rc<Volume>, measures: Measures, handle: Handle) -> Self {
        Self { volume, measures, faults: Rc::new(FaultLog::new(name.to_owned())), handle }
    }

    pub(crate) fn of(&self, presence: Rc<dyn Presence>) -> Rc<dyn BlockDevice> {
        let requests = ClientRequests::new(Rc::clone(&self.volume), Rc::clone(&presence));
        let session = ClientSession::new(Rc::clone(&self.volume), presence, Rc::new(requests));
        let (volume, faults) = (Rc::clone(&self.volume), Rc::clone(&self.faults));
        Rc::new(Meter::new(session, volume, self.measures.clone(), faults, self.handle.clone()))
    }

    pub(crate) fn volume(&self) -> Rc<dyn BlockDevice> {
        self.volume.device()
    }
}
