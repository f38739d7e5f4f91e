//! The side of the standby's host: keeps what starting the VMs takes, and makes them VMs of this host at a promotion.

use std::sync::Arc;

use migration::HostId;
use ring::digest::{SHA256, digest};

use crate::error::{RequestError, with_causes};
use crate::names;
use crate::standbys::book::{Book, DescribedVm};
use crate::standbys::frames::{Answered, Line, VmPiece};
use crate::standbys::{Kept, Standbys, lock};
use crate::vms::moving::Terms;
use crate::vms::{MANIFEST_BYTES_MAX, Standing, VmError, Vms};

/// The most bytes of descriptions that are kept for one host.
const PEER_BYTES_MAX: u64 = 512 << 20;
/// The most bytes of those that are not whole yet.
const PIECES_BYTES_MAX: u64 = 64 << 20;

fn invalid(text: &str) -> RequestError {
    RequestError::Invalid(text.to_owned())
}

impl Standbys {
    /// Takes a piece of a VM's description. Once it is whole, checks whether the VM could be started here, and keeps it.
    pub(in crate::standbys) async fn keep_vm(
        &self,
        peer: HostId,
        line: &Line,
        piece: VmPiece,
        payload: &[u8],
    ) -> Result<Answered, RequestError> {
        let kept = self.receiving(peer, line).await?;
        names::check(&piece.vm).map_err(|_| invalid("that is no name of a VM"))?;
        if let Err(error) = self.vm_orders.check_may_bring_vms(peer) {
            // N.B. Nothing of it is kept, and nothing else is said: that would reveal what this host has.
            let id = kept.config.id.clone();
            self.on_book(move |book| book.forget_vms(&id)).await?;
            return Ok(Answered::Vm { problem: Some(error.message()) });
        }
        let (offset, bytes) = (u64::from(piece.offset), u64::from(piece.bytes));
        let end = offset + payload.len() as u64;
        if bytes > MANIFEST_BYTES_MAX as u64 || payload.is_empty() || end > bytes {
            return Err(invalid("that is no piece of a description"));
        }
        let (id, payload, ids) = (kept.config.id.clone(), payload.to_vec(), self.ids_of(peer));
        let whole = self.on_book(move |book| {
            if book.bytes_of_pieces(&ids)? + payload.len() as u64 > PIECES_BYTES_MAX {
                // N.B. It makes room: others may end.
                book.forget_pieces(&id)?;
                return Err(std::io::Error::other("its host has begun too many descriptions of VMs"));
            }
            book.take_piece(&id, offset, &payload)?;
            (end == bytes).then(|| book.take_whole(&id, bytes)).transpose()
        });
        let Some(whole) = whole.await? else { return Ok(Answered::Done) };
        if digest(&SHA256, &whole).as_ref() != piece.hash {
            return Err(invalid("the pieces are not of one description"));
        }
        let problem = self.examine_and_keep(&kept, &piece.vm, whole).await?;
        note_problem(&kept, piece.vm, problem.clone());
        Ok(Answered::Vm { problem })
    }

    /// Returns why the VM could not be started here. Keeps its description unless that names something forbidden.
    async fn examine_and_keep(
        &self,
        kept: &Kept,
        name: &str,
        whole: Vec<u8>,
    ) -> Result<Option<String>, RequestError> {
        let (announced, volumes) = Vms::announced(&whole)?;
        let has = |name: &String| kept.config.volumes.iter().any(|volume| volume.name == *name);
        if announced != name || volumes.is_empty() || !volumes.iter().all(has) {
            return Err(invalid("the description is of a VM with other volumes"));
        }
        let refusals = self.vms.refusals_announced(&whole);
        if !refusals.is_empty() {
            return Ok(Some(refusals.join("; ")));
        }
        let problem = match self.vm_orders.check_vm_name(name) {
            // A VM that somebody has prepared for this is as good.
            Err(_) if self.is_prepared(name, &volumes) => None,
            Err(error) => Some(error.message()),
            Ok(()) => {
                let checked = self.vm_orders.check_arrival(&whole, Terms::default()).await;
                checked.err().map(|fault| with_causes(&fault))
            }
        };
        let (id, name, ids) = (kept.config.id.clone(), name.to_owned(), self.ids_of(kept.host()));
        let vms_max = kept.config.volumes.len();
        let is_kept = self.on_book(move |book| {
            let others = others(book, &ids, &id, &name)?;
            if others.of_standby >= vms_max || others.bytes + whole.len() as u64 > PEER_BYTES_MAX {
                return Ok(false);
            }
            book.write_vm(&id, &name, &whole).map(|()| true)
        });
        if !is_kept.await? {
            return Err(invalid("it keeps enough descriptions of VMs for this host"));
        }
        Ok(problem)
    }

    /// Returns the identities of the standbys that are kept for a host.
    fn ids_of(&self, peer: HostId) -> Vec<String> {
        let copies = lock(&self.copies);
        copies.values().filter(|kept| kept.host() == peer).map(|kept| kept.config.id.clone()).collect()
    }

    /// Forgets the described VMs that have other names.
    pub(in crate::standbys) async fn keep_only(
        &self,
        peer: HostId,
        line: &Line,
        names: Vec<String>,
    ) -> Result<Answered, RequestError> {
        let kept = self.receiving(peer, line).await?;
        lock(&kept.problems).retain(|name, _| names.contains(name));
        let id = kept.config.id.clone();
        self.on_book(move |book| {
            let vms = book.vms(&id)?;
            let mut others = vms.iter().filter(|vm| !names.contains(&vm.name));
            others.try_for_each(|vm| book.forget_vm(&id, &vm.name))
        })
        .await?;
        Ok(Answered::Done)
    }

    /// Returns the standby that a channel is about, if it still receives.
    async fn receiving(&self, peer: HostId, line: &Line) -> Result<Arc<Kept>, RequestError> {
        let kept = self.kept_for(peer, line).ok_or_else(|| invalid("that host keeps no such standby"))?;
        let look = Self::look(&kept).await;
        if look.is_promoted || look.is_consumed {
            return Err(invalid("the standby was promoted, or used by a migration"));
        }
        Ok(kept)
    }

    /// Makes the described VMs of a promoted standby VMs of this host, stopped. What was done before is left as it is.
    pub(in crate::standbys) async fn make_vms(&self, kept: &Kept) -> Result<(), RequestError> {
        // N.B. It may have been permitted when the VMs were described.
        let refused = match self.hosts.refuses_vms_of(kept.host()) {
            true => self.vm_orders.check_may_bring_vms(kept.host()).err(),
            false => None,
        };
        for DescribedVm { name, .. } in self.described(kept).await? {
            if let Some(refused) = &refused {
                let why = refused.message();
                note_promoted(
                    kept,
                    name,
                    Some(format!("it was not added: {why}; then promote the standby again")),
                );
                continue;
            }
            let (id, read) = (kept.config.id.clone(), name.clone());
            let description = self.on_book(move |book| book.vm(&id, &read)).await?;
            let Some(description) = description else { continue };
            let (_, volumes) = Vms::announced(&description)?;
            let mut volumes: Vec<String> = volumes.iter().map(|volume| kept.name_here(volume)).collect();
            volumes.sort();
            let names = kept.noted().names;
            let problem = match self.vms.keep_promoted(&description, &names).await {
                Ok(()) => None,
                Err(VmError::Exists(_)) if self.is_prepared(&name, &volumes) => None,
                Err(error) => Some(format!("it was not added: {error}; add it: sterna vm add")),
            };
            note_promoted(kept, name, problem);
        }
        Ok(())
    }

    /// Starts the VMs of a promoted standby.
    pub(in crate::standbys) async fn start_vms(&self, kept: &Kept) -> Result<(), RequestError> {
        for DescribedVm { name, .. } in self.described(kept).await? {
            if lock(&kept.problems).contains_key(&name) {
                continue;
            }
            let started = Arc::clone(&self.vm_orders).start_vm(name.clone(), api::StartVm::default()).await;
            let problem = match started {
                Ok(_) | Err(RequestError::Vm(VmError::RunsAlready(_))) => None,
                Err(error) => {
                    let why = error.message();
                    Some(format!("it was not started: {why}; start it: sterna vm start {name}"))
                }
            };
            note_promoted(kept, name, problem);
        }
        Ok(())
    }

    /// Returns whether this host has a VM of this name with these volumes already.
    fn is_prepared(&self, name: &str, volumes: &[String]) -> bool {
        let known = self.vms.get(name);
        known.is_ok_and(|known| known.standing == Standing::Home && known.volumes == volumes)
    }

    pub(in crate::standbys) async fn described(&self, kept: &Kept) -> Result<Vec<DescribedVm>, RequestError> {
        let id = kept.config.id.clone();
        self.on_book(move |book| book.vms(&id)).await
    }

    /// Describes the VMs of a standby that is kept here.
    pub(in crate::standbys) async fn view_vms(&self, kept: &Kept) -> Vec<api::StandbyVm> {
        let problems = lock(&kept.problems).clone();
        // What cannot be read is in the log of the one who needs it.
        let described = self.described(kept).await.unwrap_or_default();
        let shown = described.into_iter().map(|vm| api::StandbyVm {
            problem: problems.get(&vm.name).cloned(),
            name: vm.name,
            described_unix_ms: Some(vm.written_unix_ms),
        });
        shown.collect()
    }
}

/// Notes what keeps a VM from running here.
fn note_problem(kept: &Kept, name: String, problem: Option<String>) {
    let mut problems = lock(&kept.problems);
    match problem {
        Some(problem) => problems.insert(name, problem),
        None => problems.remove(&name),
    };
}

/// Does the same after a promotion.
fn note_promoted(kept: &Kept, name: String, problem: Option<String>) {
    if let Some(problem) = &problem {
        tracing::error!(standby = %kept.config.name, vm = %name, problem, "a VM of a promoted standby does not run");
    }
    note_problem(kept, name, problem);
}

/// The other descriptions that this host keeps.
struct Others {
    /// The number of other VMs of the same standby.
    of_standby: usize,
    /// The bytes of all other VMs.
    bytes: u64,
}

fn others(book: &Book, ids: &[String], id: &str, name: &str) -> std::io::Result<Others> {
    let mut others = Others { of_standby: 0, bytes: 0 };
    for of in ids {
        for vm in book.vms(of)? {
            if of == id && vm.name == name {
                continue;
            }
            others.of_standby += usize::from(of == id);
            others.bytes += vm.bytes;
        }
    }
    Ok(others)
}
