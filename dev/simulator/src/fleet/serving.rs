//! The memory of a daemon, and how its volumes are served: from its disks, or by their owner.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use block::filter::Aligner;
use block::{BlockDevice, Geometry};
use chronicle::Generation;
use chronicle::StayId;
use futures_channel::{mpsc, oneshot};
use lane::filling::FillingStore;
use lane::peer::{CallsOnly, PeerVolume, RpcChannel, Service};
use lane::reservoir::Reservoir;
use lane::stack::GateMode;
use lane::{
    Chronicler, ClientRequests, ClientSession, Home, Keeper, Keeping, Presence, SourceHandle,
    SourceParticipantRef, TargetHandle, Volume,
};
use migration::journal::{MigrationState, Side, State};
use migration::session::Event;
use migration::stay::{Beginning, Look};
use migration::{MigrationId, StayKey};

use super::branch::Branch;
use super::host::{SimHost, volume_id};
use super::line::Ends;
use super::link::{Link, Subject};
use super::listener::MigrationListener;
use super::local::LocalHalves;
use super::place::Place;
use super::taking_back::SetAside;
use crate::guest::{Caller, Connection};
use crate::probe::Probe;

pub(super) struct Serving {
    /// Volumes that are served here, arrive, or have ever left from here.
    pub(super) volumes: Vec<Option<Rc<Volume>>>,
    /// Channels for clients that stayed at other hosts, and for local clients of other hosts' volumes.
    clients: BTreeMap<Subject, (Rc<RpcChannel>, Rc<Service>, Place)>,
    pub(super) reservoirs: BTreeMap<Subject, Rc<RpcChannel>>,
    of_volumes: BTreeMap<usize, Rc<Reservoir>>,
    pub(super) fillings: Vec<Weak<FillingStore>>,
    channels: BTreeMap<Subject, Rc<Channel>>,
    pub(super) source: RefCell<Option<SourceHalf>>,
    pub(super) target: RefCell<Option<(Subject, TargetHandle)>>,
    pub(super) local: RefCell<Option<LocalHalves>>,
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
    /// Ends the driver and leaves the migration; the asker gets what its session waits for.
    pub(super) set_aside: Option<oneshot::Sender<oneshot::Sender<SetAside>>>,
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

    pub(super) fn reservoir_of(&mut self, index: usize) -> Rc<Reservoir> {
        Rc::clone(self.of_volumes.entry(index).or_default())
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
            volumes: Vec::new(),
            clients: BTreeMap::new(),
            reservoirs: BTreeMap::new(),
            of_volumes: BTreeMap::new(),
            fillings: Vec::new(),
            channels: BTreeMap::new(),
            source: RefCell::default(),
            target: RefCell::default(),
            local: RefCell::default(),
            sessions: BTreeMap::new(),
            sessions_begun: 0,
        });
        let count = self.manner.block_sizes.len();
        let volumes: Vec<_> = (0..count).map(|index| self.volume(&state, index)).collect();
        self.with_serving(|serving| serving.volumes = volumes);
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

    /// Returns the stack of a volume: its own; past the commit point, behind a closed gate; or at its owner.
    fn volume(self: &Rc<Self>, state: &State, index: usize) -> Option<Rc<Volume>> {
        let id = volume_id(index);
        let disk_of = |path: &str| self.images.borrow().get(path).cloned();
        let (known, mode, disk) = match (state.volumes.get(&id), state.moved.get(&id)) {
            (Some(known), _) => (known, GateMode::Open, disk_of(known.record.image.place.name())),
            (None, Some(moved)) => {
                let is_released = state.unfinished().any(|(id, _)| id == moved.migration);
                let path = moved.volume.record.image.place.name();
                match is_released {
                    true => (&moved.volume, GateMode::Hold, disk_of(path)),
                    false => (&moved.volume, GateMode::Open, None),
                }
            }
            (None, None) => return None,
        };
        let home = match (&disk, state.moved.get(&id)) {
            (Some(disk), _) if state.fillings.contains_key(&id) => {
                Home::Here(self.reopen_filling(index, disk, &state.fillings[&id])?)
            }
            (Some(disk), _) => Home::Here(disk.clone()),
            // A source image that was retired before the recorded end is as useless as one before.
            (None, Some(moved)) => {
                Home::Elsewhere(self.elsewhere(index, Place::of(moved.host), moved.migration)?)
            }
            (None, None) => {
                self.world.violated("owner", || format!("the image of volume {index} is gone"));
                return None;
            }
        };
        let look = disk.as_ref().map(|disk| disk.look());
        let volume = self.make_volume(index, known.stay, known.record.generation, home, look);
        volume.gate().set_mode(mode);
        if let Some(disk) = disk {
            // The disk needs it to know when its trial is over.
            disk.set_volume(&volume);
        }
        Some(volume)
    }

    /// Makes a volume whose residency continues as far as its records can be trusted.
    pub(super) fn make_volume(
        &self,
        index: usize,
        stay: StayId,
        generation: Generation,
        home: Home,
        look: Option<Look>,
    ) -> Rc<Volume> {
        let id = volume_id(index);
        let key = StayKey { volume: id, stay };
        let believed = look.and_then(|look| self.chronicles.open_stay(key, look));
        let beginning = Beginning {
            id: stay,
            block_size: self.manner.block_size(self.place, index),
            size_bytes: self.manner.geometries[index].size,
            regions: self.manner.regions,
        };
        let keeper: Rc<dyn Keeper> = Rc::clone(&self.chronicles) as Rc<dyn Keeper>;
        let wait_max = self.manner.limits.mirror_wait_max;
        let keeping = Keeping { keeper, handle: self.handle.clone(), wait_max };
        let chronicler = Chronicler::kept(id, beginning, believed, keeping);
        let aligner = Aligner::new(self.buffers.clone(), self.handle.clone());
        let volume = Volume::with_chronicler(id, chronicler, generation, home, aligner);
        volume.fencing().begin(self.new_life());
        volume.clients().are_at(self.place.host());
        volume
    }

    pub(super) fn offer_to_clients(&self, index: usize) {
        let serving = self.serving.borrow();
        let Some(serving) = &*serving else { return };
        if let Some(volume) = &serving.volumes[index] {
            for (_, service, peer) in serving.clients.values() {
                service.offer_volume(Rc::clone(volume), peer.host());
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
            let volumes = serving.volumes.iter().flatten();
            volumes.for_each(|volume| service.offer_volume(Rc::clone(volume), peer.host()));
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
            let volume = {
                let serving = self.serving.borrow();
                serving.as_ref().and_then(|serving| serving.volumes[index].clone())
            };
            let Some(volume) = volume else {
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
        let mut volumes = serving.iter().flat_map(|serving| &serving.volumes);
        is_known && self.is_up() && serving.is_some() && volumes.all(Option::is_some)
    }

    /// Returns the path of an additional client; `None` if the volume is not known here.
    pub(super) fn way_of_client(&self, index: usize) -> Option<(Rc<dyn BlockDevice>, Rc<Caller>)> {
        let volume = self.serving.borrow().as_ref().and_then(|serving| serving.volumes[index].clone())?;
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

    pub(super) fn weak(self: &Rc<Self>) -> Weak<Self> {
        Weak::clone(&self.me)
    }
}
