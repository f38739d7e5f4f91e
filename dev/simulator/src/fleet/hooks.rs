//! Hooks that administrators have both hosts run before volumes change hands: they take a while, and may fail.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use futures_channel::oneshot;
use lane::{HooksFault, LaneFuture};
use migration::MigrationId;
use migration::source::Moves;
use migration::vm::cold::{Form, Purpose};

use super::host::SimHost;
use super::vm_note::VmNote;

const RUN_MAX: Duration = Duration::from_millis(30);
const FAILS_PERCENT: u64 = 8;

#[derive(Default)]
pub(super) struct SimHooks(RefCell<BTreeSet<MigrationId>>);

impl SimHooks {
    pub(super) fn expect(&self, migration: MigrationId, moves: Moves) {
        if moves == Moves::VolumesAfterHooks {
            self.0.borrow_mut().insert(migration);
        }
    }

    pub(super) fn are_missing(&self, migration: MigrationId) -> bool {
        self.0.borrow().contains(&migration)
    }

    pub(super) fn forget(&self) {
        self.0.borrow_mut().clear();
    }
}

impl SimHost {
    pub(super) fn run_hooks(self: &Rc<Self>, migration: MigrationId) -> LaneFuture<Result<(), HooksFault>> {
        let (pause, fails) = {
            let mut random = self.random.borrow_mut();
            (random.duration(Duration::from_micros(100), RUN_MAX), random.percent(FAILS_PERCENT))
        };
        let asked = self.peer_of(migration).filter(|_| {
            // With a stopped VM, the target is asked first.
            self.form() == Form::Cold && self.vm_note.get() == VmNote::Leaving
        });
        let host = Rc::clone(self);
        let (done, ended) = oneshot::channel();
        let (me, incarnation) = (self.weak(), self.incarnation());
        self.world.clock.after(pause, move || {
            if let Some(host) = me.upgrade().filter(|host| host.incarnation() == incarnation) {
                if !fails {
                    host.hooks.0.borrow_mut().remove(&migration);
                }
                let _ = done.send(());
            }
        });
        Box::pin(async move {
            if let Some(target) = asked {
                let kept = host.ask_to_keep(migration, target, Purpose::Handover).await;
                kept.map_err(HooksFault::new)?;
            }
            match ended.await {
                Ok(()) if fails => Err(HooksFault::new("a hook fails")),
                Ok(()) => Ok(()),
                // The daemon is gone, and with it the waiting task.
                Err(_) => std::future::pending().await,
            }
        })
    }
}
