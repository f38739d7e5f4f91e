//! A store that an administrator has made slower, or failing: both filters, shared by all devices of the store.
//!
//! ```text
//!   request ──► delay ──► fault ──► the device below        a failing request has taken its time
//! ```

use std::rc::Rc;

use super::{Delay, DelaySwitch, Fault, FaultSwitch};
use crate::device::BlockDevice;
use crate::executor::Handle;

/// The impairment of a store's requests; clones share rates and counts.
#[derive(Clone, Default)]
pub struct Impairment {
    /// The delay of requests; `None`: no delay.
    pub delay: Option<DelaySwitch>,
    /// The failing requests; `None`: no added failures.
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
