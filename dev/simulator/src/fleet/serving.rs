//! The memory of a daemon, and how its volumes are served: from its disks, or by their owner.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use block::{BlockDevice, Geometry};
use chronicle::Generation;
use futures_channel::{mpsc, oneshot};
use lane::peer::{CallsOnly, PeerVolume, RpcChannel, Service};
use lane::{
    ClientRequests, ClientSession, Opening, Presence, SourceHandle, SourceParticipantRef, TargetHandle,
};
use migration::MigrationId;
use migration::journal::{MigrationState, Outcome, Side, State};
use migration::session::Event;

use super::branch::Branch;
use super::host::{SimHost, volume_id};
use super::lanes::{Beginning, SimLane};
use super::line::Ends;
use super::link::{Link, Subject};
use super::listener::MigrationListener;
use super::local::LocalHalves;
use super::place::Place;
use crate::guest::{Caller, Connection};
use crate::probe::Probe;

pub(super) struct Serving {
    /// Lanes of volumes that are served here, arrive, or have ever left from here.
    pub(super) lanes: Vec<Option<SimLane>>,
    /// Channels for clients that stayed at other hosts, and for local clients of other hosts' volumes.
    clients: BTreeMap<Subject, (Rc<RpcChannel>, Rc<Service>, Place)>,
    pub(super) reservoirs: BTreeMap<Subject, Rc<RpcChannel>>,
    channels: BTreeMap<Subject, Rc<Channel>>,
    pub(super) source: RefCell<Option<SourceHalf>>,
    pub(super) target: RefCell<Option<(Subject, TargetHandle)>>,
    pub(super) local: RefCell<Option<LocalHalves>>,
    /// What waits for the ends of migrations that lanes drive.
    pub(super) ends: BTreeMap<MigrationId, oneshot::Sender<Option<Outcome>>>,
    pub(super) sessions: BTreeMap<u64, mpsc::UnboundedSender<Event>>,
    pub(super) sessions_begun: u64,
}

pub(super) struct Channel {
    pub(super) subject: Subject,
    pub(super) channel: Rc<RpcChannel>,
    pub(super) service: Rc<Service>,
}

pub(super) struct SourceHalf {
    pub(super) subject: Subject,
    pub(super) driver: SourceHandle,
    /// Volumes on lanes of their own.
    pub(super) followers: Vec<SourceParticipantRef>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resumed {
    No,
    Yes,
}

impl Serving {
    pub(super) fn source_of(&self, subject: Subject) -> Option<Ref<'_, SourceHalf>> {
        let source = Ref::filter_map(self.source.borrow(), Option::as_ref).ok()?;
        (source.subject == subject).then_some(source)
    }

    pub(super) fn target_of(&self, subject: Subject) -> Option<TargetHandle> {
        let target = self.target.borrow();
        target.as_ref().filter(|(of, _)| *of == subject).map(|(_, driver)| driver.clone())
    }
}

impl SimHost {
    pub(super) fn serve(self: &Rc<Self>, resumes: &[MigrationId]) {
        let state = self.journal().acknowledged();
        *self.serving.borrow_mut() = Some(Serving {
            lanes: Vec::new(),
            clients: BTreeMap::new(),
            reservoirs: BTreeMap::new(),
            channels: BTreeMap::new(),
            source: RefCell::default(),
            target: RefCell::default(),
            local: RefCell::default(),
            ends: BTreeMap::new(),
            sessions: BTreeMap::new(),
            sessions_begun: 0,
        });
        let count = self.manner.block_sizes.len();
        let lanes: Vec<_> = (0..count).map(|index| self.lane_of_state(&state, index)).collect();
        self.with_serving(|serving| serving.lanes = lanes);
        for link in &self.links {
            let of_clients = |subject: &Subject| matches!(subject, Subject::Clients(..));
            let subjects = link.subjects().into_iter().filter(of_clients);
            subjects.for_each(|subject| drop(self.line_of_clients(link, subject)));
        }
        (0..count).for_each(|index| self.offer_to_clients(index));
        self.hear_of_the_past(&state);
        self.check_and_connect_guests();
        if let (true, Some(vm)) =
            (!state.volumes.is_empty() && state.unfinished().next().is_none(), self.vm())
        {
            vm.settle(self.place);
        }
        self.settle_vm();
        for id in resumes {
            let Some(recorded) = state.migrations.get(id) else { continue };
            match &recorded.side {
                Side::Outgoing { .. } => self.resume_outgoing(*id, recorded),
                Side::Incoming { peer, remote, .. } => {
                    self.resume_incoming(*id, (Place::of(*peer), *remote));
                }
                Side::OneHost => self.resume_local(*id, recorded),
            }
        }
    }

    pub(super) fn with_serving<T>(&self, change: impl FnOnce(&mut Serving) -> T) -> Option<T> {
        self.serving.borrow_mut().as_mut().map(change)
    }

    /// Begins the lane of a volume: in its own store; past the commit point, behind a closed gate; or at its owner.
    pub(super) fn lane_of_state(self: &Rc<Self>, state: &State, index: usize) -> Option<SimLane> {
        let id = volume_id(index);
        let disk_of = |path: &str| self.images.borrow().get(path).cloned();
        let (known, opening, disk) = match (state.volumes.get(&id), state.moved.get(&id)) {
            (Some(known), _) => (known, Opening::Serving, disk_of(known.record.image.place.name())),
            (None, Some(moved)) => {
                let is_released = state.unfinished().any(|(id, _)| id == moved.migration);
                let path = moved.volume.record.image.place.name();
                match is_released {
                    true => (&moved.volume, Opening::Waiting, disk_of(path)),
                    false => (&moved.volume, Opening::Serving, None),
                }
            }
            (None, None) => return None,
        };
        let beginning = match (&disk, state.moved.get(&id)) {
            (Some(disk), _) if state.fillings.contains_key(&id) => {
                self.lacking(index, disk, &state.fillings[&id])?
            }
            (Some(disk), _) => Beginning::Here(disk.clone()),
            // A source image that was retired before the recorded end is as useless as one before.
            (None, Some(moved)) => {
                Beginning::Elsewhere(self.elsewhere(index, Place::of(moved.host), moved.migration)?)
            }
            (None, None) => {
                self.world.violated("owner", || format!("the image of volume {index} is gone"));
                return None;
            }
        };
        let look = disk.as_ref().map(|disk| disk.look());
        let lane = self.begin_lane(index, (known.stay, known.record.generation), beginning, look, opening);
        if let Some(disk) = disk {
            // The disk needs it to know when its trial is over.
            disk.set_volume(lane.volume());
        }
        Some(lane)
    }

    pub(super) fn offer_to_clients(&self, index: usize) {
        let serving = self.serving.borrow();
        let Some(serving) = &*serving else { return };
        if let Some(lane) = &serving.lanes[index] {
            for (_, service, peer) in serving.clients.values() {
                service.offer_volume(Rc::clone(lane.volume()), peer.host());
            }
        }
    }

    pub(super) fn elsewhere(
        &self,
        index: usize,
        place: Place,
        migration: MigrationId,
    ) -> Option<Rc<PeerVolume>> {
        let subject = Subject::Clients(self.place, migration);
        let link = self.link_to(place)?;
        // The other host learns of it, now or when it is up again.
        link.line(subject).is_known_to(place);
        self.fleet()?.host(place).line_of_clients(link, subject);
        let channel = self.line_of_clients(link, subject)?;
        let geometry = Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
        Some(PeerVolume::new(channel, volume_id(index), geometry, self.handle.clone()))
    }

    /// Returns this daemon's end of a clients' line. The first time, opens it and offers all volumes.
    fn line_of_clients(&self, link: &Link, subject: Subject) -> Option<Rc<RpcChannel>> {
        let known = self
            .with_serving(|serving| serving.clients.get(&subject).map(|(channel, ..)| Rc::clone(channel)))?;
        if known.is_some() {
            return known;
        }
        let (line, arrivals) =
            link.line(subject).open(self.place, self.guard(subject, link.beyond(self.place)))?;
        let service = Service::new(self.handle.clone(), self.buffers.clone());
        let channel = RpcChannel::new(line);
        self.handle.spawn(channel.run(arrivals, Rc::clone(&service), Rc::new(CallsOnly)));
        self.with_serving(|serving| {
            let peer = link.beyond(self.place);
            let lanes = serving.lanes.iter().flatten();
            lanes.for_each(|lane| service.offer_volume(Rc::clone(lane.volume()), peer.host()));
            serving.clients.insert(subject, (Rc::clone(&channel), service, peer));
        });
        Some(channel)
    }

    pub(super) fn channel(self: &Rc<Self>, peer: Place, subject: Subject) -> Option<Rc<Channel>> {
        let known = self.with_serving(|serving| serving.channels.get(&subject).cloned())?;
        if known.is_some() {
            return known;
        }
        let ends = self.link_to(peer)?.line(subject).open(self.place, self.guard(subject, peer))?;
        Some(self.hear(peer, subject, ends))
    }

    pub(super) fn hear_anew(self: &Rc<Self>, ending: &Rc<Service>) {
        let subject = self.with_serving(|serving| {
            let mut channels = serving.channels.values();
            channels.find(|channel| Rc::ptr_eq(&channel.service, ending)).map(|channel| channel.subject)
        });
        let Some(subject @ Subject::Migration(source, _)) = subject.flatten() else { return };
        let ends = self.link_to(source).and_then(|link| link.line(subject).listen_anew(self.place));
        if let Some(ends) = ends {
            self.hear(source, subject, ends);
        }
    }

    fn hear(self: &Rc<Self>, peer: Place, subject: Subject, (line, arrivals): Ends) -> Rc<Channel> {
        let service = Service::new(self.handle.clone(), self.buffers.clone());
        let channel = RpcChannel::new(line);
        let channel = Rc::new(Channel { subject, channel, service });
        let ear = MigrationListener::new(self, peer, Rc::downgrade(&channel));
        self.handle.spawn(channel.channel.run(arrivals, Rc::clone(&channel.service), ear));
        let kept = Rc::clone(&channel);
        self.with_serving(|serving| serving.channels.insert(subject, kept));
        channel
    }

    /// Listens for questions about migrations that have ended here, or never began.
    fn hear_of_the_past(self: &Rc<Self>, state: &State) {
        let lines = |link: &Rc<Link>| {
            let peer = link.beyond(self.place);
            link.subjects().into_iter().map(move |subject| (peer, subject)).collect::<Vec<_>>()
        };
        for (peer, subject) in self.links.iter().flat_map(lines) {
            let Subject::Migration(source, number) = subject else { continue };
            let goes_on = match source == self.place {
                true => state.migrations.get(&number).is_some_and(|recorded| !recorded.has_ended()),
                false => {
                    state.incoming(source.host(), number).is_some_and(|(_, recorded)| !recorded.has_ended())
                }
            };
            if !goes_on {
                self.channel(peer, subject);
            }
        }
    }

    fn check_and_connect_guests(&self) {
        let Some(fleet) = self.fleet() else { return };
        for branch in fleet.branches.all().iter().filter(|branch| branch.home() == self.place) {
            if branch.power_was_cut.take() {
                for (index, guest) in branch.guests.iter().enumerate() {
                    let found = fleet.content_of(branch.number, index);
                    if let Some(found) = found.or_else(|| fleet.left_content(index)) {
                        guest.check_after_power_cut(&found);
                    }
                }
            } else if fleet.is_alone() {
                let guests = branch.guests.iter().enumerate();
                let found = guests.filter_map(|(index, guest)| Some((guest, self.content_of(index)?)));
                found.for_each(|(guest, found)| guest.check(&found));
            }
            self.connect(branch);
        }
    }

    pub(super) fn connect(&self, branch: &Branch) {
        for (index, guest) in branch.guests.iter().enumerate() {
            let Some(volume) = self.volume(index) else {
                self.world.violated("owner", || format!("{} knows nothing of volume {index}", self.place));
                continue;
            };
            let caller = Rc::<Caller>::default();
            let presence = Rc::clone(&caller) as Rc<dyn Presence>;
            let requests = ClientRequests::new(Rc::clone(&volume), Rc::clone(&presence));
            let probe = Probe::new(Rc::new(requests), &self.world, self.manner.limits);
            let device = Rc::new(ClientSession::new(volume, presence, Rc::new(probe)));
            guest.connect(Connection { device, handle: self.handle.clone(), caller });
        }
    }

    pub(super) fn welcomes_clients(&self) -> bool {
        let count = self.manner.block_sizes.len();
        // A volume that arrives for the first time may still be given back: its clients would be cut.
        let is_known = self.journal().look(|state, possible| {
            let comes = |(_, known): (_, &MigrationState)| matches!(known.side, Side::Incoming { .. });
            let rests = possible.is_empty() && !state.unfinished().any(comes);
            let mut volumes = (0..count).map(volume_id);
            volumes.all(|id| state.moved.contains_key(&id) || rests && state.volumes.contains_key(&id))
        });
        let serving = self.serving.borrow();
        let mut lanes = serving.iter().flat_map(|serving| &serving.lanes);
        is_known && self.is_up() && serving.is_some() && lanes.all(Option::is_some)
    }

    /// Returns the path of an additional client; `None` if the volume is not known here.
    pub(super) fn way_of_client(&self, index: usize) -> Option<(Rc<dyn BlockDevice>, Rc<Caller>)> {
        let volume = self.volume(index)?;
        let caller = Rc::<Caller>::default();
        let presence = Rc::clone(&caller) as Rc<dyn Presence>;
        let requests = ClientRequests::new(Rc::clone(&volume), Rc::clone(&presence));
        Some((Rc::new(ClientSession::new(volume, presence, Rc::new(requests))), caller))
    }

    /// Returns a volume's content on this host's disk; missing blocks are at its former host.
    pub(super) fn content_of(&self, index: usize) -> Option<Vec<u64>> {
        let state = self.journal().acknowledged();
        let image = &state.volumes.get(&volume_id(index))?.record.image;
        let disk = self.images.borrow().get(image.place.name()).cloned()?;
        self.left_whole(volume_id(index), disk.with_medium(|medium| medium.current().to_vec()))
    }

    pub(super) fn left_content(&self, index: usize) -> Option<(Generation, Vec<u64>)> {
        let state = self.journal().acknowledged();
        let volume = &state.moved.get(&volume_id(index))?.volume;
        let disk = self.images.borrow().get(volume.record.image.place.name()).cloned()?;
        let content = disk.with_medium(|medium| medium.current().to_vec());
        Some((volume.record.generation, self.left_whole(volume_id(index), content)?))
    }

    pub(super) fn has_nothing_to_do(&self) -> bool {
        let serving = self.serving.borrow();
        let Some(serving) = &*serving else { return false };
        let is_idle = serving.sessions.is_empty();
        is_idle
            && !self.is_stopping.get()
            && !self.has_unsettled_vm()
            && self.journal().look(|state, possible| {
                possible.is_empty() && state.unfinished().next().is_none() && state.fillings.is_empty()
            })
    }

    pub(super) fn cancel_driver(&self) -> bool {
        if let Some(driver) = self.with_local(|halves| halves.driver.clone()) {
            driver.cancel();
            return true;
        }
        let serving = self.serving.borrow();
        let source = serving.as_ref().map(|serving| serving.source.borrow());
        source.and_then(|source| source.as_ref().map(|source| source.driver.cancel())).is_some()
    }

    pub(super) fn cancel_arrival(&self) -> bool {
        let serving = self.serving.borrow();
        let target = serving.as_ref().map(|serving| serving.target.borrow());
        target.and_then(|target| target.as_ref().map(|(_, driver)| driver.cancel())).is_some()
    }

    /// Notes the end of a migration that lanes drove, for the session that waits for it.
    pub(super) fn driver_ended(&self, id: MigrationId, outcome: Outcome) {
        if let Some(ended) = self.with_serving(|serving| serving.ends.remove(&id)).flatten() {
            let _ = ended.send(Some(outcome));
        }
    }

    pub(super) fn weak(self: &Rc<Self>) -> Weak<Self> {
        Weak::clone(&self.me)
    }
}
