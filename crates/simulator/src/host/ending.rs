//! The end of a simulation: guests settle, and a last restart shows what is durable.

use std::time::Duration;

use super::{Ending, Host};
use crate::world::Stop;

impl Host {
    /// Looks from time to time whether everything is done.
    pub(super) fn end_when_done(&self) {
        let incarnation = self.incarnation.get();
        self.later(Duration::from_millis(1), move |host| {
            if !host.is_alive(incarnation) || host.ending.get() == Ending::LastRestart {
                return;
            }
            if host.ending.get() == Ending::Working
                && host.guests.iter().all(|guest| guest.has_done_its_work())
            {
                host.ending.set(Ending::Settling);
                host.guests.iter().for_each(|guest| guest.be_quiet());
            }
            if host.ending.get() == Ending::Settling && host.guests.iter().all(|guest| guest.is_idle()) {
                host.restart_for_the_last_time();
            } else {
                host.end_when_done();
            }
        });
    }

    pub(super) fn restart_for_the_last_time(&self) {
        self.ending.set(Ending::LastRestart);
        self.world.faults.end();
        let power_cut = self.random.borrow_mut().percent(70);
        self.world.stop(if power_cut { Stop::PowerCut } else { Stop::Kill });
    }
}
