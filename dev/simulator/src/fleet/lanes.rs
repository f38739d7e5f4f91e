//! The lanes of a host: the product's, with simulated stores, links and control plane, and without threads, files and sockets.

mod engine;
mod front_end;

use std::rc::{Rc, Weak};

use block::BlockDevice;
use block::filter::FlushDebt;
use chronicle::{Generation, StayId};
use lane::filling::FillingStore;
use lane::peer::{PeerVolume, RpcChannel};
use lane::{Access, Control, FrontEnd, Home, Lane, LaneSettings, LaneSurroundings, Opening, Volume};
use migration::filling::UnitMap;
use migration::stay::Look;
use migration::{StayKey, VolumeIndex};

use self::engine::NoFiles;
use self::front_end::Guests;
use super::control::LaneControl;
use super::host::{SimHost, volume_id};

/// The lane of a volume that is served here, arrives, or has ever left from here.
#[derive(Clone)]
pub(super) struct SimLane {
    pub(super) lane: Rc<Lane>,
    pub(super) control: Rc<LaneControl>,
}

/// Where a volume is when its lane begins.
pub(super) enum Beginning {
    Here(Rc<dyn BlockDevice>),
    /// In a store that lacks these blocks; they are read over the channel.
    Lacking(Rc<FlushDebt>, Rc<RpcChannel>, Box<UnitMap>),
    Elsewhere(Rc<PeerVolume>),
}

impl SimLane {
    pub(super) fn volume(&self) -> &Rc<Volume> {
        self.lane.volume()
    }

    /// Returns the store of a volume that lacks blocks, or may.
    pub(super) fn filling(&self) -> Option<Rc<FillingStore>> {
        self.lane.filling()
    }
}

impl SimHost {
    pub(super) fn lanes(&self) -> Vec<Option<SimLane>> {
        self.serving.borrow().as_ref().map(|serving| serving.lanes.clone()).unwrap_or_default()
    }

    pub(super) fn lane(&self, index: usize) -> Option<SimLane> {
        self.serving.borrow().as_ref()?.lanes.get(index)?.clone()
    }

    pub(super) fn volume(&self, index: usize) -> Option<Rc<Volume>> {
        self.lane(index).map(|lane| Rc::clone(lane.volume()))
    }

    /// Begins a lane whose volume's residency continues as far as its records can be trusted.
    pub(super) fn begin_lane(
        self: &Rc<Self>,
        index: usize,
        (stay, generation): (StayId, Generation),
        beginning: Beginning,
        look: Option<Look>,
        opening: Opening,
    ) -> SimLane {
        let id = volume_id(index);
        let kept = look.and_then(|look| self.chronicles.open_stay(StayKey { volume: id, stay }, look));
        let settings = LaneSettings {
            volume: id,
            name: id.to_string(),
            block_size: self.manner.block_size(self.place, index),
            generation,
            stay,
            kept: kept.map(Box::new),
            ended_copies: Vec::new(),
            marks: Some(self.manner.regions),
            limits: self.manner.limits,
            rhythm: self.manner.rhythm,
            pacing: self.manner.pacing.clone(),
            impact: None,
            disk: pacer::Store::new(),
            access: Access::ReadWrite,
            connections_max: None,
            life: self.new_life(),
            opening,
        };
        let control = LaneControl::new(self);
        let surroundings = LaneSurroundings {
            handle: self.handle.clone(),
            engine: NoFiles::engine(&self.buffers),
            control: Rc::clone(&control) as Rc<dyn Control>,
        };
        let mut lacking = None;
        let home = match beginning {
            Beginning::Here(store) => Home::Here(store),
            Beginning::Lacking(store, rpc, missing) => {
                let reservoir = (&rpc, VolumeIndex(index as u32));
                let filling = Lane::reopen_filling(&surroundings, &settings, store, reservoir, *missing);
                filling.limit_waits(self.manner.wait_max);
                Home::Here(Rc::clone(lacking.insert(filling)) as Rc<dyn BlockDevice>)
            }
            Beginning::Elsewhere(owner) => Home::Elsewhere(owner),
        };
        let me = Weak::clone(&self.me);
        let guests = move || vec![Box::new(Guests::new(me, index)) as Box<dyn FrontEnd>];
        let lane = Lane::new(&surroundings, settings, home, |_, _, _| guests());
        if let Some(filling) = lacking {
            lane.lacks_blocks_of(filling);
        }
        lane.volume().clients().are_at(self.place.host());
        lane.begin();
        SimLane { lane, control }
    }
}
