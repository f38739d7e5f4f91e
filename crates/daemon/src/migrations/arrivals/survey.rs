//! The target's part of a preflight check: finds every obstacle to an offer, and where the images would be. Reserves nothing.
//!
//! ```text
//!   names ─ stores ─ space ─► the VM: QEMU, processor, memory, files, ports ─► hooks ─► refusals, warnings, places
//! ```
//! An offered migration runs the same checks ([`crate::migrations::arrivals::arrive`]), and ends at the first that fails.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use migration::journal::Place;
use migration::wire::{
    Allocation, Offer, OfferedVolume, Refusal, RefusalCode, Survey, Surveyed, SurveyedPlace,
};
use migration::{HostId, VolumeId};

use crate::error::{RequestError, with_causes};
use crate::host::{Arrivals, blocking};
use crate::images::replicas::{self, is_replica};
use crate::migrations::departures::leave::refusal;
use crate::names;
use crate::peers::channel::VOLUMES_MAX;
use crate::peers::veil::unveiled;
use crate::vms::moving::Terms;
use crate::vms::{Differences, Scope};
use crate::volumes::serving::reserve::Wanted;

impl Arrivals {
    /// Runs every check that an offer would need here.
    pub(crate) async fn survey(self: &Arc<Self>, peer: HostId, survey: Survey) -> Surveyed {
        let Survey { mut offer, held_bytes, vm } = survey;
        let called: Vec<VolumeId> = offer.volumes.iter().map(|offered| offered.volume).collect();
        self.journal.read(|state| {
            offer.volumes.iter_mut().for_each(|offered| offered.volume = unveiled(state, offered.volume));
        });
        // Each check starts a QEMU and queries stores, so their number is limited together with that of descriptions.
        let _permit = Arc::clone(&self.looks).acquire_owned().await;
        let mut found = Surveyed {
            refusals: Vec::new(),
            warnings: Vec::new(),
            places: Vec::new(),
            has_hooks: self.migration_hooks.has_hooks(),
        };
        if !(1..=VOLUMES_MAX).contains(&offer.volumes.len()) {
            let detail =
                format!("a migration has one volume to {VOLUMES_MAX}, this one {}", offer.volumes.len());
            found.refusals.push(Refusal { code: RefusalCode::Unsuitable, detail });
            return found;
        }
        if let Err(error) = self.draining.refuse_new() {
            found.refusals.push(refusal(&error));
            return found;
        }
        if (offer.vm.is_some() || !vm.is_empty())
            && let Err(error) = self.vm_orders.check_may_bring_vms(peer)
        {
            // N.B. The answer says nothing else: a peer that may not bring VMs must not learn what this host has.
            found.refusals.push(refusal(&error));
            return found;
        }
        let forbidden = if vm.is_empty() { Vec::new() } else { self.vms.refusals_announced(&vm) };
        if !forbidden.is_empty() {
            // N.B. The answer says nothing else: for a definition that cannot be parsed this host is not examined.
            let refused = |detail| Refusal { code: RefusalCode::Unsuitable, detail };
            found.refusals.extend(forbidden.into_iter().map(refused));
            return found;
        }
        let takes_back = self.takes_back(peer, &offer);
        if let (Some(vm), Ok(None)) = (&offer.vm, &takes_back)
            && let Err(error) = self.vm_orders.check_vm_name(&vm.name)
        {
            found.refusals.push(refusal(&error));
        }
        found.refusals.extend(takes_back.as_ref().err().map(refusal));
        if matches!(takes_back, Ok(Some(_))) {
            found.refusals.extend(self.check_images_left(&offer).await.err().as_ref().map(refusal));
        }
        let mut needed = BTreeMap::<String, u64>::new();
        for ((offered, held), called) in offer.volumes.iter().zip(held_bytes).zip(called) {
            if matches!(takes_back, Ok(Some(_))) {
                let place = self.place_of_left(offered);
                found.places.extend(place.map(|place| SurveyedPlace { volume: called, ..place }));
                continue;
            }
            if self.leaving_migration(offered.volume).is_some() {
                let name = &offered.name;
                found.warnings.push(format!(
                    "the image that \"{name}\" left at the other host is still needed there; its room is checked when the image \
                     is free"
                ));
                continue;
            }
            match self.look_for_room(&offer, offered).await {
                Ok(place) => {
                    let bytes = match offer.allocation {
                        Allocation::Thick => offered.size_bytes,
                        // The size of its missing set is not known yet.
                        Allocation::Thin if place.has_replica => 0,
                        Allocation::Thin => held,
                    };
                    *needed.entry(place.store.clone()).or_default() += bytes;
                    // Under the identity that the peer used.
                    found.places.push(SurveyedPlace { volume: called, ..place });
                }
                Err(error) => found.refusals.push(refusal(&error)),
            }
        }
        let host = Arc::clone(self);
        let has_room = blocking(move || {
            needed.into_iter().try_for_each(|(store, bytes)| host.stores.get(&store)?.require_space(bytes))
        });
        found.refusals.extend(has_room.await.err().as_ref().map(refusal));
        if !vm.is_empty() {
            self.look_at_vm(&vm, &mut found).await;
        }
        let hooks = self.config.hooks.clone();
        let problems = blocking(move || Ok((hooks.before_problem(), hooks.after_problem())));
        if let Ok((before, after)) = problems.await {
            found.refusals.extend(before.map(|detail| Refusal { code: RefusalCode::Unsuitable, detail }));
            found.warnings.extend(after);
        }
        found
    }

    /// Checks whether a VM could run here.
    async fn look_at_vm(&self, vm: &[u8], found: &mut Surveyed) {
        let unsuitable = |detail: String| Refusal { code: RefusalCode::Unsuitable, detail };
        match self.vms.compare_files(vm).await {
            Ok((Differences { faults, warnings }, scope)) => {
                found.refusals.extend(faults.into_iter().map(unsuitable));
                found.warnings.extend(warnings);
                if scope == Scope::Files {
                    return;
                }
            }
            Err(error) => return found.refusals.push(unsuitable(error.to_string())),
        }
        if let Err(fault) = self.vms.examine(vm, Terms::default()).await {
            found.refusals.push(unsuitable(fault.to_string()));
        }
    }

    /// Returns where a volume's image would be, after a check that its name is free and its store can be used.
    async fn look_for_room(
        self: &Arc<Self>,
        offer: &Offer,
        offered: &OfferedVolume,
    ) -> Result<SurveyedPlace, RequestError> {
        let name = offered.name.clone();
        names::check(&name).map_err(|reason| RequestError::Name { name: name.clone(), reason })?;
        self.sockets.check(&name).map_err(|error| RequestError::Invalid(with_causes(&error)))?;
        self.refuse_other_branch(offered)?;
        // The claim is released at once.
        drop(self.claim_when_free(&name, offered.volume).await?);
        let wanted = self.wanted(offer, offered)?;
        let (host, volume) = (Arc::clone(self), offered.volume);
        blocking(move || {
            let (claim, looked) = host.serving.look_at_place(&wanted, || Ok(0))?;
            drop(claim);
            let store = host.stores.get(&wanted.store)?;
            let space = store.space().ok().flatten();
            let image = looked.location;
            if let (Place::Device(path), Some(space)) = (&image.place, space)
                && space.total < wanted.size_bytes
            {
                let detail = format!("it has {} bytes; choose another store", space.total);
                let (place, needed) = (path.clone(), wanted.size_bytes);
                return Err(RequestError::TargetTooSmall { place, needed, detail });
            }
            let is_held = |path: &str| {
                let (data_dir, id) = (&host.config.data_dir, volume.to_string());
                is_replica(&image) && replicas::would_take(data_dir, &id, wanted.size_bytes, Path::new(path))
            };
            Ok(SurveyedPlace {
                volume,
                has_replica: wanted.allocation == api::Allocation::Thin
                    && image.place.file().is_some_and(is_held),
                store: image.store,
                place: image.place.name().to_owned(),
                format: image.format,
                free_bytes: space.map(|space| space.free),
            })
        })
        .await
    }

    /// Returns the image that an offered volume needs. Errors: [`RequestError::StoreNotFound`], [`RequestError::StoreNotChosen`].
    pub(crate) fn wanted(&self, offer: &Offer, offered: &OfferedVolume) -> Result<Wanted, RequestError> {
        let store = Some(offer.store.as_str()).filter(|store| !store.is_empty());
        Ok(Wanted {
            store: self.stores.choose(store)?.name().to_owned(),
            volume: offered.name.clone(),
            format: offer.format,
            otherwise: offered.format,
            allocation: match offer.allocation {
                Allocation::Thin => api::Allocation::Thin,
                Allocation::Thick => api::Allocation::Thick,
            },
            size_bytes: offered.size_bytes,
            chain: None,
        })
    }
}
