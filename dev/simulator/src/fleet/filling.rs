//! Incomplete volumes: opens their stores, and computes their content with the missing blocks.

use std::rc::Rc;

use block::filter::FlushDebt;
use chronicle::ReplicaOf;
use lane::peer::{CallsOnly, RpcChannel, Service};
use migration::filling::UNIT_BYTES;
use migration::journal::VolumeFilling;
use migration::message::{ToSource, ToTarget};
use migration::wire::Message;
use migration::{HostId, MigrationId, StayKey, VolumeId, recovery};

use super::host::{SimHost, volume_id};
use super::lanes::Beginning;
use super::link::Subject;
use super::listener::send;
use super::place::Place;
use crate::disk::SimDisk;

impl SimHost {
    /// Returns the beginning of a lane whose volume lacks blocks.
    pub(super) fn lacking(
        &self,
        index: usize,
        disk: &Rc<SimDisk>,
        filling: &VolumeFilling,
    ) -> Option<Beginning> {
        let key = StayKey { volume: volume_id(index), stay: filling.stay };
        let Some(missing) = self.chronicles.missing(key) else {
            self.world.violated("presence", || format!("what volume {index} lacks is not known any more"));
            return None;
        };
        if missing.manifest != filling.manifest {
            self.world.violated("presence", || format!("what volume {index} lacks is not what was promised"));
        }
        let rpc = self.way_to_reservoir(Place::of(filling.peer), filling.remote)?;
        Some(Beginning::Lacking(FlushDebt::new(disk.clone()), rpc, Box::new(missing)))
    }

    /// Returns the answer to a source that asks for completeness, if its volumes are incomplete here.
    pub(super) fn lacks_still(
        &self,
        peer: HostId,
        remote: MigrationId,
        asked: &ToTarget,
    ) -> Option<ToSource> {
        let ToTarget::IsWhole(attempt) = *asked else { return None };
        let lacking = self.journal().look(|state, _| state.fillings_from(peer, remote).next().is_some());
        let units = self.units_missing().filter(|_| lacking)?.max(1);
        Some(ToSource::Lacks { attempt, units })
    }

    pub(super) fn units_missing(&self) -> Option<u64> {
        // The receiver of the question may already hold the borrow.
        let lanes = self.serving.borrow().as_ref().map(|serving| serving.lanes.clone())?;
        let progress = lanes.iter().flatten().filter_map(|lane| lane.filling()?.progress());
        Some(progress.map(|progress| progress.units_missing).sum())
    }

    pub(super) fn forget_copies(&self, copies: Vec<(VolumeId, ReplicaOf)>) {
        for (id, of) in copies {
            let index = usize::from(id.0[0]) - 1;
            let Some(volume) = self.volume(index) else { continue };
            // A full data folder may keep the record, which has no user.
            self.handle.spawn(async move { drop(volume.chronicler().forget(of).await) });
        }
    }

    pub(super) fn answer_unasked(self: &Rc<Self>, asked: Vec<(HostId, MigrationId, ToTarget)>) {
        for (peer, migration, message) in asked {
            let answer =
                recovery::answer_as_target(&self.journal().acknowledged(), peer, migration, &message);
            let Some(message) = answer else { continue };
            let place = Place::of(peer);
            if let Some(channel) = self.channel(place, Subject::Migration(place, migration)) {
                send(&channel.channel, &Message::ToSource { migration, message });
            }
        }
    }

    pub(super) fn way_to_reservoir(&self, from: Place, remote: MigrationId) -> Option<Rc<RpcChannel>> {
        let subject = Subject::Reservoir(from, remote);
        let known = self.with_serving(|serving| serving.reservoirs.get(&subject).cloned())?;
        if known.is_some() {
            return known;
        }
        let line = self.link_to(from)?.line(subject);
        line.is_known_to(from);
        let (line, arrivals) = line.open(self.place, self.guard(subject, from))?;
        let rpc = RpcChannel::new(line);
        let nothing = Service::new(self.handle.clone(), self.buffers.clone());
        self.handle.spawn(rpc.run(arrivals, nothing, Rc::new(CallsOnly)));
        self.with_serving(|serving| serving.reservoirs.insert(subject, Rc::clone(&rpc)));
        Some(rpc)
    }

    /// Returns the content of a volume that is here or was released here, given its own disk's; `None` if its
    /// missing set is unknown.
    pub(super) fn left_whole(&self, volume: VolumeId, content: Vec<u64>) -> Option<Vec<u64>> {
        let filling = self.journal().look(|state, _| state.fillings.get(&volume).cloned());
        match filling {
            None => Some(content),
            Some(filling) => self.with_missing(usize::from(volume.0[0]) - 1, &filling, content),
        }
    }

    pub(super) fn with_missing(
        &self,
        index: usize,
        filling: &VolumeFilling,
        mut content: Vec<u64>,
    ) -> Option<Vec<u64>> {
        let key = StayKey { volume: volume_id(index), stay: filling.stay };
        let missing = self.chronicles.missing(key)?.missing;
        let fleet = self.fleet()?;
        let there = fleet.host(Place::of(filling.peer));
        let path = there.journal().look(|state, _| {
            Some(state.moved.get(&volume_id(index))?.volume.record.image.place.name().to_owned())
        })?;
        let disk = there.images.borrow().get(&path).cloned()?;
        let elsewhere = disk.with_medium(|medium| medium.current().to_vec());
        let size_bytes = self.manner.geometries[index].size;
        let sectors = (size_bytes.div_ceil(content.len() as u64)).next_power_of_two();
        for run in missing.runs() {
            let start = run.start.0 * UNIT_BYTES / sectors;
            let end = (run.end.0 * UNIT_BYTES / sectors).min(content.len() as u64);
            let run = start as usize..end as usize;
            content[run.clone()].copy_from_slice(&elsewhere[run]);
        }
        Some(content)
    }
}
