//! How processes of owners begin and end, and how a group is handed over.

use std::collections::BTreeMap;
use std::time::Duration;

use chronicle::BlockCount;
use standby::owner::{Completeness, Event, HandedOn, History, Settings, State};
use standby::record::{OwnerRecord, Record as _};
use standby::reprotection::{needs_former, of_size, owner_record, standby_record};
use standby::{LifeId, Replication};

use super::{Knows, NOT_HERE, OwnerHost, OwnerTask, STANDBY};
use crate::standbys::disk::Disk;
use crate::standbys::met::Fault;
use crate::standbys::turned::Turned;
use crate::standbys::world::{EVERY, Link, Task, WAIT_MAX, World};

impl World {
    fn owner_settings(&mut self) -> Settings {
        let first = Duration::from_millis(self.random.between(1, 1000));
        Settings {
            every: EVERY,
            first_cut: self.now + first,
            rpo: EVERY * 3,
            wait_max: WAIT_MAX,
            ring_blocks: self.shape.ring_blocks,
            spool_blocks: self.shape.spool_blocks,
            extent_blocks: self.shape.extent_blocks,
            catch_up_blocks: self.shape.catch_up_blocks,
        }
    }

    /// An administrator orders the standby.
    pub(in crate::standbys) fn order_standby(&mut self) {
        let settings = self.owner_settings();
        let mut owner = OwnerHost { process: self.number(), is_serving: true, ..OwnerHost::default() };
        for size in self.shape.sizes.clone() {
            let mut disk = Disk::new(size);
            for block in 0..size / 2 {
                disk.write(block, self.number());
            }
            disk.sync();
            owner.volumes.push(disk);
        }
        owner.forget_history();
        owner.open = 1;
        let life = LifeId(u128::from(self.number()));
        let sizes = self.shape.sizes.iter().map(|size| BlockCount(*size)).collect();
        owner.asking = Some(self.served_already());
        owner.machine = Some(Replication::begin(settings, STANDBY, life, sizes));
        owner.record = owner.machine.as_ref().map(|machine| machine.record().clone());
        self.owners.push(owner);
        self.links.push(Link::default());
        self.start_standby();
        self.drain_owner(0);
        self.connect(0);
    }

    /// A standby whose direction is turned round is ordered: the new owner's volumes are served, and the former owner has images.
    pub(in crate::standbys) fn order_turned(&mut self, turned: Turned) {
        let life = LifeId(u128::from(self.number()));
        let Turned { volumes, ours, theirs, images } = turned;
        let knows = if ours.is_some() { Knows::History } else { Knows::Nothing };
        let mut owner = OwnerHost {
            process: self.number(),
            record: Some(owner_record(STANDBY, life)),
            knows: Some(knows),
            volumes,
            theirs,
            ..OwnerHost::default()
        };
        let ours: Vec<_> = ours
            .unwrap_or_default()
            .iter()
            .map(|set| set.runs().flat_map(|run| run.iter().map(|block| block.0)).collect())
            .collect();
        if !ours.is_empty() {
            owner.chronicle = BTreeMap::from([(1, ours)]);
        }
        owner.asking = Some(self.served_already());
        self.owners.push(owner);
        self.links.push(Link::default());
        if let Some(images) = images {
            self.standby.return_images(images, standby_record(STANDBY, life));
        }
        self.start_standby();
        self.serve(0);
        self.connect(0);
    }

    pub(in crate::standbys) fn stop_owner(&mut self, host: usize) {
        let mut random = self.random.fork();
        self.disconnect(host);
        if self.owners[host].is_serving {
            self.owners[host].ended_at = Some(self.now);
        }
        self.owners[host].stop(|| random.percent(50));
        self.owners[host].process = self.number();
    }

    pub(in crate::standbys) fn cut_owners_power(&mut self, host: usize) {
        self.stop_owner(host);
        let mut random = self.random.fork();
        self.owners[host].ended_at = None;
        self.owners[host].volumes.iter_mut().for_each(|volume| volume.cut_power(&mut random));
    }

    /// Serves the group, and goes on with its replication.
    pub(super) fn serve(&mut self, host: usize) {
        let settings = self.owner_settings();
        let Some(mut record) = self.owners[host].record.clone() else { return };
        // A record is read from the bytes that were stored.
        match OwnerRecord::decode(&record.encode()) {
            Some(decoded) if decoded == record => record = decoded,
            _ => self.violate("a record of the owner is not what was stored"),
        }
        let life = LifeId(u128::from(self.number()));
        let owner = &mut self.owners[host];
        let history = if owner.knows == Some(Knows::Nothing) {
            owner.forget_history();
            owner.open = 1;
            let sizes = owner.volumes.iter().map(|volume| BlockCount(volume.len())).collect();
            History::Forgotten(life, sizes)
        } else {
            owner.open = record.numbered_through.0 + 1;
            let mut missing = owner.missing();
            if needs_former(&record) {
                missing.iter_mut().zip(&owner.theirs).for_each(|(ours, theirs)| {
                    let size = ours.blocks();
                    ours.union_with(&of_size(theirs, size));
                });
            }
            History::Since(missing)
        };
        owner.machine = Some(Replication::restart(settings, record, history));
        owner.is_serving = true;
        self.tell(|world| {
            format!("owner {host} serves: {:?}", world.owners[host].machine.as_ref().map(Replication::record))
        });
        if !self.owners[host].absent.is_empty() {
            self.owner_event(host, Event::Incomplete);
            self.owner_later(host, Duration::from_secs(3), OwnerTask::Fetched);
        }
        self.drain_owner(host);
        if self.links[host].is_up {
            self.begin_stream(host);
        }
    }

    /// Hands the group over to another host, which may have to fetch blocks afterwards.
    pub(in crate::standbys) fn hand_over(&mut self) {
        let from = self.current;
        let is_possible = self.owners[from].is_serving
            && self.owners[from].in_flight.is_empty()
            && self.owners[from].state != Some(State::Diverged)
            && self.owners.len() < 4
            && self.owners[from].absent.is_empty()
            // Otherwise the order is refused: the standby's host would not know.
            && self.links[from].is_up
            && self.standby.machine.is_some();
        let Some(handed) =
            self.owners[from].machine.as_ref().filter(|_| is_possible).map(Replication::hand_on)
        else {
            return;
        };
        self.meet(Fault::HandedOver);
        if self.standby.whereabouts.leaves(from, self.owners.len()).is_err() {
            self.violate("the standby's host does not know the host that its group leaves");
        }
        self.owners[from].volumes.iter_mut().for_each(Disk::sync);
        self.owners[from].is_serving = false;
        self.owners[from].asked.clear();
        let HandedOn { record, missing } = handed.clone();
        let mut owner = OwnerHost {
            process: self.number(),
            volumes: self.owners[from].volumes.clone(),
            is_serving: true,
            asking: Some(self.served_already()),
            confirmed: self.owners[from].confirmed,
            ..OwnerHost::default()
        };
        let written =
            missing.iter().map(|set| set.runs().flat_map(|run| run.iter().map(|block| block.0)).collect());
        owner.chronicle = BTreeMap::from([(record.numbered_through.0, written.collect())]);
        owner.open = record.numbered_through.0 + 1;
        owner.record = Some(record);
        let mut completeness = Completeness::Complete;
        if self.random.percent(50) {
            completeness = Completeness::Incomplete;
            for volume in 0..owner.volumes.len() {
                for block in 0..owner.volumes[volume].len() {
                    if self.random.percent(50) {
                        owner.absent.insert((volume, block), owner.volumes[volume].read(block));
                        owner.volumes[volume].write(block, NOT_HERE);
                    }
                }
                owner.volumes[volume].sync();
            }
        }
        let settings = self.owner_settings();
        owner.machine = Some(Replication::take_over(settings, handed, completeness));
        self.owners.push(owner);
        self.links.push(Link::default());
        self.current = self.owners.len() - 1;
        let host = self.current;
        self.drain_owner(host);
        if !self.owners[host].absent.is_empty() {
            self.owner_later(host, Duration::from_secs(3), OwnerTask::Fetched);
        }
        self.in_about(Duration::from_millis(200), Task::Connect(host));
    }
}
