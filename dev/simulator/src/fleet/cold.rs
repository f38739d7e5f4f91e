//! A stopped VM that moves with the volumes: the question of its source, and what its target keeps. A host's durable note says
//! that it has the VM, complete.

use std::rc::Rc;
use std::time::Duration;

use migration::MigrationId;
use migration::vm::cold::{self, Form, Found, Purpose, Step};

use super::host::SimHost;
use super::link::Subject;
use super::place::Place;
use super::vm_note::VmNote;

/// The pause before the target is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(30);
/// How often it is asked.
const ASKED_MAX: u32 = 100;
const EXAMINED_PERCENT: u64 = 4;

impl SimHost {
    /// Returns how the VM moves; a simulation without a VM has no need of that.
    pub(super) fn form(&self) -> Form {
        self.vm().map(|vm| vm.form()).unwrap_or_default()
    }

    /// Asks the target of this migration, until it answers, to keep the VM.
    pub(super) async fn ask_to_keep(
        &self,
        id: MigrationId,
        target: Place,
        purpose: Purpose,
    ) -> Result<(), String> {
        if purpose == Purpose::Copying
            && let Some(fleet) = self.fleet()
        {
            fleet.draw_kill_at_question(self.place);
        }
        if !cold::is_asked(purpose) {
            return Ok(());
        }
        for _ in 0..ASKED_MAX {
            self.handle.sleep(ASK_AGAIN).await;
            let peer = self.fleet().map(|fleet| Rc::clone(fleet.host(target)));
            let Some(peer) = peer.filter(|peer| peer.is_up() && self.can_hear(peer)) else { continue };
            if peer.vm_expected.get() == Some(Subject::Migration(self.place, id)) {
                return peer.keeps(purpose).await;
            }
        }
        Err("the other host does not keep the VM".to_owned())
    }

    async fn keeps(self: &Rc<Self>, purpose: Purpose) -> Result<(), String> {
        let found = match self.vm_note.get() {
            VmNote::Nothing => Found::Nothing,
            VmNote::Arriving => Found::Same,
            VmNote::Home | VmNote::Leaving => Found::Another,
        };
        let mut steps = cold::steps(found, purpose).into_iter();
        while let Some(step) = steps.next() {
            if step != Step::Answer {
                self.take(step).await?;
                continue;
            }
            let (me, rest) = (Rc::clone(self), steps);
            self.handle.spawn(async move {
                for step in rest {
                    if me.take(step).await.is_err() {
                        return;
                    }
                }
            });
            return Ok(());
        }
        Err("it was not answered".to_owned())
    }

    async fn take(&self, step: Step) -> Result<(), String> {
        match step {
            Step::Examine => {
                let examined = self.perhaps_fails(EXAMINED_PERCENT, "the VM cannot run there");
                examined.map_err(|failure| failure.detail)
            }
            Step::Forget => self.note_vm(VmNote::Nothing).await,
            Step::Keep => self.note_vm(VmNote::Arriving).await,
            Step::Refuse => Err("another VM has its name".to_owned()),
            Step::RunHook | Step::Answer => Ok(()),
        }
    }

    /// Checks that a stopped VM that is forgotten here is kept elsewhere.
    pub(super) fn check_kept_elsewhere(&self) {
        let Some(fleet) = self.fleet().filter(|_| self.form() == Form::Cold) else { return };
        let mut others = fleet.hosts.iter().filter(|host| host.place != self.place);
        if !others.any(|host| host.vm_note.get() != VmNote::Nothing) {
            self.world.violated("VM", || format!("it is forgotten at {}, and nowhere else", self.place));
        }
    }
}
