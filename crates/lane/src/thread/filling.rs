//! Volumes that arrive incomplete: the store that a lane serves them from, and the reservoir at their former host.

use std::rc::Rc;
use std::sync::Arc;

use block::engine::Engine;
use block::filter::FlushDebt;
use block::{BlockDevice, Geometry, Handle, IoError};
use chronicle::StayId;
use migration::filling::{FillingSettings, UnitMap};
use migration::{MigrationId, StayKey, VolumeIndex};

use super::{Lane, LaneSurroundings};
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
    let reservoir = reservoir_elsewhere(handle, engine, reservoir);
    let with =
        LaneSurroundings { handle: handle.clone(), engine: Rc::clone(engine), control: Rc::clone(control) };
    let filling = Lane::reopen_filling(&with, settings, store, (&reservoir, index), missing);
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
    (reservoir, index): (&Rc<RpcChannel>, VolumeIndex),
    missing: Option<UnitMap>,
) -> Rc<FillingStore> {
    let geometry = store.geometry();
    let there = Missing::new(reservoir, index.0, Geometry { discards: true, ..geometry });
    let filling = FillingSettings { size_bytes: geometry.size, pacing: settings.pacing.clone() };
    let filling = FillingStore::new(surroundings, key, store, there, filling, missing);
    // The order of the source is not known here.
    let disks = pacer::Stores::default().and(Arc::clone(&settings.disk));
    filling.give_way(GivesWay { disks, impact: settings.impact, budget: None, ends_by: None });
    filling
}

fn reservoir_elsewhere(handle: &Handle, engine: &Rc<dyn Engine>, channel: PeerChannel) -> Rc<RpcChannel> {
    let rpc = RpcChannel::new(channel.channel);
    let nothing = Service::new(handle.clone(), engine.buffers().clone());
    handle.spawn(rpc.run(channel.events, nothing, Rc::new(CallsOnly)));
    rpc
}

impl Lane {
    pub(super) fn reservoir_elsewhere(&self, channel: PeerChannel) -> Rc<RpcChannel> {
        reservoir_elsewhere(&self.handle, &self.engine, channel)
    }

    /// Makes the store of a volume that may arrive incomplete; until this host owns it, it is read at its source.
    pub(super) fn may_be_filled(
        &self,
        migration: MigrationId,
        store: Rc<FlushDebt>,
        reservoir: (&Rc<RpcChannel>, VolumeIndex),
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
        self.offer_reservoir(&service, migration, index);
        self.handle.spawn(rpc.run(channel.events, Rc::clone(&service), Rc::new(CallsOnly)));
        self.attached.borrow_mut().push((rpc, service));
    }

    /// Lets the target of a migration read its missing blocks by `service`; `index` is the volume's position in the migration.
    pub fn offer_reservoir(&self, service: &Service, migration: MigrationId, index: VolumeIndex) {
        let geometry = self.volume.device().geometry();
        let store = self.reservoir.of(migration, geometry);
        let background = self.reservoir.in_background(migration, geometry, self.handle.clone());
        service.offer(Address::Reservoir(index.0), store);
        service.offer(Address::ReservoirInBackground(index.0), background);
    }

    /// Serves the volume from a store that lacks blocks, as a restart finds it. `missing` are these blocks.
    pub fn reopen_filling(
        surroundings: &LaneSurroundings,
        settings: &LaneSettings,
        store: Rc<FlushDebt>,
        reservoir: (&Rc<RpcChannel>, VolumeIndex),
        missing: UnitMap,
    ) -> Rc<FillingStore> {
        let key = StayKey { volume: settings.volume, stay: settings.stay };
        let of = Surroundings {
            handle: surroundings.handle.clone(),
            buffers: surroundings.engine.buffers().clone(),
            control: Rc::clone(&surroundings.control),
        };
        let filling = filling_store(of, settings, key, store, reservoir, Some(missing));
        filling.begin();
        filling
    }
}
