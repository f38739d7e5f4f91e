//! Volumes that arrive incomplete: the store that a lane serves them from, and the reservoir at their former host.

use std::rc::Rc;
use std::sync::Arc;

use block::engine::Engine;
use block::filter::FlushDebt;
use block::{BlockDevice, Geometry, Handle, IoError};
use chronicle::StayId;
use migration::filling::{FillingSettings, UnitMap};
use migration::{MigrationId, StayKey, VolumeIndex};

use super::Lane;
use crate::control::Control;
use crate::driver::GivesWay;
use crate::filling::{FillingStore, Missing, Surroundings};
use crate::handle::{FillingStoreOrder, LaneSettings};
use crate::peer::head::Address;
use crate::peer::{CallsOnly, PeerChannel, RpcChannel, Service};

pub(super) async fn reopen(
    order: FillingStoreOrder,
    settings: &LaneSettings,
    handle: &Handle,
    engine: &Rc<dyn Engine>,
    control: &Rc<dyn Control>,
) -> Result<Rc<FillingStore>, IoError> {
    let FillingStoreOrder { store, missing, reservoir, index, is_given_up } = order;
    let store = FlushDebt::new(store.into_device(handle, engine).await?);
    let surroundings = Surroundings {
        handle: handle.clone(),
        buffers: engine.buffers().clone(),
        control: Rc::clone(control),
    };
    let key = StayKey { volume: settings.volume, stay: settings.stay };
    let filling = filling_store(surroundings, settings, key, store, (reservoir, index), Some(missing));
    filling.begin();
    if is_given_up {
        filling.give_up_missing();
    }
    Ok(filling)
}

/// Makes the store of a volume that arrives, or arrived, incomplete.
fn filling_store(
    surroundings: Surroundings,
    settings: &LaneSettings,
    key: StayKey,
    store: Rc<FlushDebt>,
    (reservoir, index): (PeerChannel, VolumeIndex),
    missing: Option<UnitMap>,
) -> Rc<FillingStore> {
    let rpc = RpcChannel::new(reservoir.channel);
    let nothing = Service::new(surroundings.handle.clone(), surroundings.buffers.clone());
    surroundings.handle.spawn(rpc.run(reservoir.events, nothing, Rc::new(CallsOnly)));
    let geometry = store.geometry();
    let there = Missing::new(&rpc, index.0, Geometry { discards: true, ..geometry });
    let filling = FillingSettings { size_bytes: geometry.size, pacing: settings.pacing.clone() };
    let filling = FillingStore::new(surroundings, key, store, there, filling, missing);
    // The order of the source is not known here.
    let disks = pacer::Stores::default().and(Arc::clone(&settings.disk));
    filling.give_way(GivesWay { disks, impact: settings.impact, budget: None, ends_by: None });
    filling
}

impl Lane {
    /// Makes the store of a volume that may arrive incomplete; until this host owns it, it is read at its source.
    pub(super) fn may_be_filled(
        &self,
        migration: MigrationId,
        store: Rc<FlushDebt>,
        reservoir: (PeerChannel, VolumeIndex),
        missing: Option<UnitMap>,
    ) -> Rc<FillingStore> {
        let surroundings = Surroundings {
            handle: self.handle.clone(),
            buffers: self.engine.buffers().clone(),
            control: Rc::clone(&self.control),
        };
        let key = StayKey { volume: self.settings.volume, stay: StayId::Arrived(migration.0) };
        let filling = filling_store(surroundings, &self.settings, key, store, reservoir, missing);
        self.filling.replace(Some(Rc::clone(&filling)));
        filling
    }

    pub(super) fn serve_reservoir(&self, channel: PeerChannel, migration: MigrationId, index: VolumeIndex) {
        let rpc = RpcChannel::new(channel.channel);
        let service = Service::new(self.handle.clone(), self.engine.buffers().clone());
        let store = self.reservoir.of(migration, self.volume.device().geometry());
        let geometry = self.volume.device().geometry();
        let background = self.reservoir.in_background(migration, geometry, self.handle.clone());
        service.offer(Address::Reservoir(index.0), store);
        service.offer(Address::ReservoirInBackground(index.0), background);
        self.handle.spawn(rpc.run(channel.events, Rc::clone(&service), Rc::new(CallsOnly)));
        self.attached.borrow_mut().push((rpc, service));
    }
}
