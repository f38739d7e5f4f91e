//! A host's durable note about the VM, in place of the daemon's records of VMs.
//!
//! ```text
//!   source   Home ──► Leaving ──► Home, or nothing        target   nothing ──► Arriving ──► Home, or nothing
//! ```
//! A note takes a moment. A full data folder refuses it. A daemon that is killed meanwhile leaves the old note or the new one.

use std::rc::{Rc, Weak};
use std::time::Duration;

use futures_channel::oneshot;
use migration::journal::Way;
use migration::session::VmPlace;

use super::host::SimHost;
use super::place::Place;

const NOTE_MAX: Duration = Duration::from_micros(300);
const FAILS_PERCENT: u64 = 3;
const NOTE_AGAIN: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum VmNote {
    #[default]
    Nothing,
    Home,
    Leaving,
    Arriving,
}

impl SimHost {
    pub(super) async fn note_vm(&self, note: VmNote) -> Result<(), String> {
        let (pause, fails) = {
            let mut random = self.random.borrow_mut();
            (random.duration(Duration::from_micros(10), NOTE_MAX), random.percent(FAILS_PERCENT))
        };
        self.vm_note_under_way.set(Some(note));
        let (done, noted) = oneshot::channel();
        let (me, incarnation) = (Weak::clone(&self.me), self.incarnation());
        self.world.clock.after(pause, move || {
            let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) else { return };
            host.vm_note_under_way.set(None);
            let is_noted = !fails && !host.chronicles.is_full();
            if is_noted {
                host.world.say(|| format!("{}: VM {note:?}", host.place));
                if (host.vm_note.replace(note), note) == (VmNote::Leaving, VmNote::Nothing) {
                    host.check_kept_elsewhere();
                }
            }
            let _ = done.send(is_noted);
        });
        match noted.await {
            Ok(true) => Ok(()),
            Ok(false) => Err("the data folder is full".to_owned()),
            Err(_) => Err("the daemon is gone".to_owned()),
        }
    }

    pub(super) async fn note_vm_at(&self, place: VmPlace) -> Result<(), String> {
        self.note_vm(match place {
            VmPlace::Here => VmNote::Home,
            VmPlace::Elsewhere => VmNote::Nothing,
        })
        .await
    }

    /// Notes at the target that the VM arrives; this host has noted that it leaves.
    pub(super) async fn memory_leaves(&self, target: &Self) -> Result<(), String> {
        let note = self.vm_note.get();
        if note != VmNote::Leaving {
            let detail = || format!("its memory leaves {}, where is noted: {note:?}", self.place);
            self.world.violated("VM", detail);
        }
        if self.vm_examined_by.get() != Some((target.place, target.incarnation())) {
            return Err("the other host was started again".to_owned());
        }
        if target.vm_expected.get().is_none() {
            return Err("the other host expects no VM any more".to_owned());
        }
        target.note_vm(VmNote::Arriving).await
    }

    pub(super) fn check_vm_note(&self, owner: Place) {
        let expected = if self.place == owner { VmNote::Home } else { VmNote::Nothing };
        let found = self.vm_note.get();
        if found != expected {
            let detail = || format!("the volumes are at {owner}, and at {} is noted: {found:?}", self.place);
            self.world.violated("VM", detail);
        }
    }

    pub(super) fn has_unsettled_vm(&self) -> bool {
        matches!(self.vm_note.get(), VmNote::Leaving | VmNote::Arriving)
    }

    /// Completes a note in flight or not, when the daemon ends.
    pub(super) fn vm_note_torn(&self) {
        if let Some(note) = self.vm_note_under_way.take()
            && self.random.borrow_mut().percent(50)
        {
            self.vm_note.set(note);
        }
    }

    /// After a start, notes a VM whose migration has ended, or was abandoned, where its volumes are.
    pub(super) fn settle_vm(self: &Rc<Self>) {
        let way = if self.vm_note.get() == VmNote::Arriving { Way::Here } else { Way::Elsewhere };
        let is_under_way = self.journal().look(|state, _| {
            let names = state.unfinished().flat_map(|(_, known)| known.names.clone()).collect::<Vec<_>>();
            state.is_under_way(&names, way)
        });
        if !self.has_unsettled_vm() || is_under_way {
            return;
        }
        let is_here = !self.journal().look(|state, _| state.volumes.is_empty());
        let place = if is_here { VmPlace::Here } else { VmPlace::Elsewhere };
        let (me, handle) = (Rc::clone(self), self.handle.clone());
        self.handle.spawn(async move {
            while me.note_vm_at(place).await.is_err() {
                handle.sleep(NOTE_AGAIN).await;
            }
        });
    }
}
