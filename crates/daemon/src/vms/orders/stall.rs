//! Handles VMs whose disks lack blocks that another host has: checks each once a second,
//! and does what [`migration::vm::stall`] decides.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use hypervisor::RunState;
use hypervisor::qemu::Qemu;
use lane::LaneHandle;
use migration::vm::hold::Reason;
use migration::vm::stall::{Guest, Late, Note, Seen, Step, steps};

use crate::host::VmOrders;
use crate::vms::{Alive, Known, Life, NotedReason, Standing, VmError, launched};
use crate::volumes::registry::Service;

const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a read of a VM that stops at errors may wait for a host that does not answer. Linux resets a SCSI or SATA disk that
/// does not answer for 30 s.
const READ_WAIT_MAX: Duration = Duration::from_secs(20);

/// The state of a VM that is kept from one check to the next.
#[derive(Default)]
struct Remembered {
    /// Whether all its disks stop the VM at errors, for this process.
    stops_at_errors: Option<(i32, bool)>,
    /// The number of late reads after which the guest was resumed; `None`: the reads that an earlier daemon refused are unknown.
    late_before: Option<u64>,
}

struct Lacking {
    volume: String,
    host: String,
    silence: Option<String>,
    lane: LaneHandle,
}

impl VmOrders {
    /// Begins to check VMs whose disks lack blocks, until the daemon stops.
    pub(crate) fn begin_to_see_to_stalls(self: &Arc<Self>) {
        let host = Arc::clone(self);
        tokio::spawn(async move {
            let mut remembered = BTreeMap::<String, Remembered>::new();
            loop {
                let known = host.vms.list();
                remembered.retain(|name, _| known.iter().any(|vm| vm.name == *name));
                for vm in known {
                    let of_it = remembered.entry(vm.name.clone()).or_default();
                    if let Err(error) = host.see_to_stall(&vm, of_it).await {
                        tracing::debug!(vm = %vm.name, %error, "checking a VM again whose disks lack blocks");
                    }
                }
                tokio::select! {
                    () = tokio::time::sleep(LOOK_INTERVAL) => {}
                    () = host.stopping.begins() => return,
                }
            }
        });
    }

    async fn see_to_stall(self: &Arc<Self>, vm: &Known, remembered: &mut Remembered) -> Result<(), VmError> {
        let lacking = self.lacking(&vm.volumes);
        let note = match self.vms.holds.get(&vm.name).map(|note| note.reason) {
            None => Note::None,
            Some(NotedReason::Missing) => Note::Ours,
            Some(_) => Note::Other,
        };
        if lacking.is_empty() && note != Note::Ours {
            return Ok(());
        }
        let alive = match &vm.life {
            Life::Alive(alive) if vm.standing == Standing::Home => Some(alive),
            Life::Stopped | Life::Crashed(_) if note == Note::Ours => {
                // The note is obsolete: no daemon has to resume this VM.
                self.vms.holds.forget(&vm.name).await;
                return Ok(());
            }
            _ => None,
        };
        let seen = match alive {
            Some(alive) => self.look_at_stalled(vm, alive, &lacking, note, remembered).await?,
            None => Seen {
                is_here: false,
                lacks_blocks: !lacking.is_empty(),
                stops_at_errors: false,
                note,
                guest: Guest::Otherwise,
                late: Late::None,
            },
        };
        for step in steps(seen) {
            self.carry_out_step(*step, vm, alive, &lacking, remembered).await?;
        }
        Ok(())
    }

    /// Returns the volumes that lack blocks which their former host may still send.
    fn lacking(&self, volumes: &[String]) -> Vec<Lacking> {
        let lacking = volumes.iter().filter_map(|name| {
            let filling = self.journal.read(|state| {
                let (volume, _) = state.volumes.iter().find(|(_, known)| known.record.name == *name)?;
                state.fillings.get(volume).filter(|filling| !filling.is_given_up).cloned()
            })?;
            let Some(Service::Serving(lane)) = self.volumes.service(name) else { return None };
            let silence = self.hosts.silence_of(filling.peer);
            Some(Lacking { volume: name.clone(), host: filling.peer_name, silence, lane })
        });
        lacking.collect()
    }

    async fn look_at_stalled(
        &self,
        vm: &Known,
        alive: &Alive,
        lacking: &[Lacking],
        note: Note,
        remembered: &mut Remembered,
    ) -> Result<Seen, VmError> {
        // N.B. Reads are counted before the guest is examined: the next check counts reads that are refused in between.
        let (late_reads, units_owed) = late(lacking).await;
        let guest = match alive.qemu.status().await.map_err(VmError::of(&vm.name))? {
            RunState::Running => Guest::Runs,
            RunState::IoError => Guest::StoppedByError,
            _ => Guest::Otherwise,
        };
        if guest == Guest::Runs {
            // Reads that an earlier daemon refused have not stopped the guest, or it has been resumed since.
            remembered.late_before.get_or_insert(0);
        }
        let late = match remembered.late_before {
            _ if units_owed > 0 => Late::Owed,
            Some(before) if late_reads <= before => Late::None,
            _ => Late::Came,
        };
        let process = alive.process_id();
        let stops_at_errors = match remembered.stops_at_errors {
            Some((of, stops)) if of == process => stops,
            _ => {
                let stops = self.stops_at_errors(vm, &alive.qemu).await?;
                remembered.stops_at_errors = Some((process, stops));
                stops
            }
        };
        let lacks_blocks = !lacking.is_empty();
        Ok(Seen { is_here: true, lacks_blocks, stops_at_errors, note, guest, late })
    }

    /// Returns whether all volumes of a VM are its disks, and each stops it at errors.
    async fn stops_at_errors(&self, vm: &Known, qemu: &Qemu) -> Result<bool, VmError> {
        let command = launched(&vm.name, qemu).await?.command;
        for volume in &vm.volumes {
            let disk =
                qemu.disk_over(&self.exports.export_named(volume)).await.map_err(VmError::of(&vm.name))?;
            let Some(disk) = disk else { return Ok(false) };
            if !qemu.stops_at_errors(&disk, &command).await.map_err(VmError::of(&vm.name))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn carry_out_step(
        self: &Arc<Self>,
        step: Step,
        vm: &Known,
        alive: Option<&Alive>,
        lacking: &[Lacking],
        remembered: &mut Remembered,
    ) -> Result<(), VmError> {
        let (name, holds) = (&vm.name, &self.vms.holds);
        match step {
            Step::Note => {
                // These keep other operations away until the note is written.
                let (_operation, _turn) = (self.vms.operate(name)?, self.vms.turn(name)?);
                if holds.get(name).is_none() {
                    holds.hold(name, Reason::Missing, true).await?;
                }
            }
            Step::Limit => limit(lacking, Some(READ_WAIT_MAX)).await,
            Step::Lift => limit(lacking, None).await,
            Step::Say => {
                if !holds.is_told(name) {
                    let (seconds, volumes) = (READ_WAIT_MAX.as_secs(), names(lacking));
                    tracing::warn!(vm = %name, %volumes, seconds, "the VM is stopped: a disk of it waits for blocks of another \
                        host");
                }
                holds.tell(name, Some(waits_for(lacking)));
            }
            Step::Unsay => holds.tell(name, None),
            Step::Continue => {
                let Some(alive) = alive else { return Ok(()) };
                // N.B. Counted before the resume, so that reads refused after it are seen by the next check.
                let (late_reads, _) = late(lacking).await;
                if let Err(error) = alive.qemu.resume().await {
                    holds.tell(
                        name,
                        Some(format!("the blocks that it waited for have arrived, and it cannot be resumed yet: {error}")),
                    );
                    return Err(VmError::of(name)(error));
                }
                remembered.late_before = Some(late_reads);
                tracing::info!(vm = %name, "the VM continues: the blocks that a disk of it waited for have arrived");
            }
            Step::Forget => holds.forget(name).await,
        }
        Ok(())
    }
}

/// Returns how many reads of these volumes were refused, and how many units these reads still wait for.
async fn late(lacking: &[Lacking]) -> (u64, u64) {
    let asked = futures_util::future::join_all(lacking.iter().map(|lacking| lacking.lane.status())).await;
    let fillings = asked.into_iter().filter_map(|status| status.ok()?.filling);
    fillings.fold((0, 0), |(late, owed), filling| (late + filling.reads_late, owed + filling.units_owed))
}

async fn limit(lacking: &[Lacking], to: Option<Duration>) {
    for lacking in lacking {
        // A lane that has ended refuses nothing.
        let _ = lacking.lane.limit_waits(to).await;
    }
}

fn names(lacking: &[Lacking]) -> String {
    lacking.iter().map(|lacking| lacking.volume.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns why a VM is stopped.
fn waits_for(lacking: &[Lacking]) -> String {
    let seconds = READ_WAIT_MAX.as_secs();
    let of: Vec<_> = lacking
        .iter()
        .map(|lacking| {
            let silence = lacking.silence.as_ref().map(|silence| format!("; it waits for {silence}"));
            format!("volume {}, from host {}{}", lacking.volume, lacking.host, silence.unwrap_or_default())
        })
        .collect();
    format!(
        "a disk of it has waited {seconds} s for missing blocks ({}); Sterna resumes the VM when they arrive",
        of.join("; ")
    )
}
