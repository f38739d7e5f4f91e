//! A store that is slower than it is, or that fails, because somebody has asked for that: both filters, as one thing
//! that all devices of a store share.
//!
//! ```text
//!   request ──► delay ──► fault ──► the device below        what fails has taken its time
//! ```

use std::rc::Rc;

use super::{Delay, DelaySwitch, Fault, FaultSwitch};
use crate::device::BlockDevice;
use crate::executor::Handle;

/// What the requests to a store suffer; clones share rates and counts.
#[derive(Clone, Default)]
pub struct Impairment {
    /// How it is slowed down; `None`: not at all.
    pub delay: Option<DelaySwitch>,
    /// What fails; `None`: nothing but what fails by itself.
    pub fault: Option<FaultSwitch>,
}

impl Impairment {
    /// Puts the filters over a device of the store.
    pub fn over(self, mut device: Rc<dyn BlockDevice>, handle: &Handle) -> Rc<dyn BlockDevice> {
        if let Some(switch) = self.fault {
            device = Rc::new(Fault::with(switch, device));
        }
        if let Some(switch) = self.delay {
            device = Rc::new(Delay::with(switch, device, handle.clone()));
        }
        device
    }
}
