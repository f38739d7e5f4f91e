//! What a daemon has in memory, and how its volumes are served: from its disks, or by the host that has them.

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

/// What lives in a daemon.
pub(super) struct Serving {
    /// Those that are served here, come here, or have left from here in this life of the daemon or before.
    pub(super) volumes: Vec<Option<Rc<Volume>>>,
    /// What clients that stayed at other hosts ask for, and what is asked of other hosts for clients that stayed here.
    clients: BTreeMap<Subject, (Rc<RpcChannel>, Rc<Service>, Place)>,
    /// What targets of migrations from here read.
    pub(super) reservoirs: BTreeMap<Subject, Rc<RpcChannel>>,
    /// What each volume has for its new owner: one of a lane each.
    of_volumes: BTreeMap<usize, Rc<Reservoir>>,
    /// Stores of volumes that lack blocks, or may.
    pub(super) fillings: Vec<Weak<FillingStore>>,
    /// Of migrations, to and from other hosts.
    channels: BTreeMap<Subject, Rc<Channel>>,
    pub(super) source: RefCell<Option<SourceHalf>>,
    pub(super) target: RefCell<Option<(Subject, TargetHandle)>>,
    /// Both halves of a migration between stores.
    pub(super) local: RefCell<Option<LocalHalves>>,
    /// Those who see to migrations, and how many have been begun.
    pub(super) sessions: BTreeMap<u64, mpsc::UnboundedSender<Event>>,
    pub(super) sessions_begun: u64,
}

/// One end of a migration's line.
pub(super) struct Channel {
    pub(super) subject: Subject,
    pub(super) channel: Rc<RpcChannel>,
    pub(super) service: Rc<Service>,
}

/// The source's half of a migration that goes out from here.
pub(super) struct SourceHalf {
    pub(super) subject: Subject,
    pub(super) driver: SourceHandle,
    /// Volumes that are leased to its driver, as by lanes of their own.
    pub(super) followers: Vec<SourceParticipantRef>,
    /// Has it be left where it is; whoever asks is given what its session waits for.
    pub(super) set_aside: Option<oneshot::Sender<oneshot::Sender<SetAside>>>,
}

/// Whether a half goes on with what a restart interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resumed {
    No,
    Yes,
}

impl Serving {
    /// The source's half of this migration, if it runs here.
    pub(super) fn source_of(&self, subject: Subject) -> Option<Ref<'_, SourceHalf>> {
        let source = Ref::filter_map(self.source.borrow(), Option::as_ref).ok()?;
        (source.subject == subject).then_some(source)
    }

    /// What the lane of this volume has for its new owner.
    pub(super) fn reservoir_of(&mut self, index: usize) -> Rc<Reservoir> {
        Rc::clone(self.of_volumes.entry(index).or_default())
    }

    /// The target's half of this migration, if it runs here.
    pub(super) fn target_of(&self, subject: Subject) -> Option<TargetHandle> {
        let target = self.target.borrow();
        target.as_ref().filter(|(of, _)| *of == subject).map(|(_, driver)| driver.clone())
    }
}

impl SimHost {
    /// Serves what the journal says is this host's, and goes on with migrations.
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

    /// Changes what lives in the daemon, while there is one.
    pub(super) fn with_serving<T>(&self, change: impl FnOnce(&mut Serving) -> T) -> Option<T> {
        self.serving.borrow_mut().as_mut().map(change)
    }

    /// The volume as this host has it: its own; past the commit point, behind a closed gate; or at the host that has it.
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
            // A source image that was retired before the end was recorded is of no more use than one that went before.
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
            // A target that has become the owner's only disk knows by it that its trial is over.
            disk.set_volume(&volume);
        }
        Some(volume)
    }

    /// A volume whose stay goes on as far as it is believed, if its image is here and looks so.
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

    /// Lets clients that stayed at other hosts use a volume that is here, or leads on from here.
    pub(super) fn offer_to_clients(&self, index: usize) {
        let serving = self.serving.borrow();
        let Some(serving) = &*serving else { return };
        if let Some(volume) = &serving.volumes[index] {
            for (_, service, peer) in serving.clients.values() {
                service.offer_volume(Rc::clone(volume), peer.host());
            }
        }
    }

    /// The volume at another host, to which a migration from here has brought it.
    pub(super) fn elsewhere(
        &self,
        index: usize,
        place: Place,
        migration: MigrationId,
    ) -> Option<Rc<PeerVolume>> {
        let subject = Subject::Clients(self.place, migration);
        let link = self.link_to(place)?;
        // The other host hears it, now or when it is there again.
        link.line(subject).is_known_to(place);
        self.fleet()?.host(place).line_of_clients(link, subject);
        let channel = self.line_of_clients(link, subject)?;
        let geometry = Geometry { read_only: false, discards: true, ..self.manner.geometries[index] };
        let (handle, buffers) = (self.handle.clone(), self.buffers.clone());
        Some(PeerVolume::new(channel, volume_id(index), geometry, handle, buffers))
    }

    /// This daemon's end of a line of clients; opened, and all volumes offered over it, when it is asked for first.
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

    /// This daemon's end of a migration's line; opened when it is asked for first.
    pub(super) fn channel(self: &Rc<Self>, peer: Place, subject: Subject) -> Option<Rc<Channel>> {
        let known = self.with_serving(|serving| serving.channels.get(&subject).cloned())?;
        if known.is_some() {
            return known;
        }
        let ends = self.link_to(peer)?.line(subject).open(self.place, self.guard(subject, peer))?;
        Some(self.hear(peer, subject, ends))
    }

    /// Goes on to hear a migration's line whose service is about to end.
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

    /// Listens to whoever still asks about migrations that have ended here, or never began.
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

    /// Guests whose home this is are checked against what is there after a power cut, and go on.
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

    /// Connects the guests of a branch to this host.
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

    /// Tells whether clients find the volumes here: they are here, or lead to where they are.
    pub(super) fn welcomes_clients(&self) -> bool {
        let count = self.manner.block_sizes.len();
        // One that comes for the first time may be given back yet: its clients would be sent away.
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

    /// The way of a client that is no guest, and the client's end of it; `None`: the volume is not known here.
    pub(super) fn way_of_client(&self, index: usize) -> Option<(Rc<dyn BlockDevice>, Rc<Caller>)> {
        let volume = self.serving.borrow().as_ref().and_then(|serving| serving.volumes[index].clone())?;
        let caller = Rc::<Caller>::default();
        let presence = Rc::clone(&caller) as Rc<dyn Presence>;
        let requests = ClientRequests::new(Rc::clone(&volume), Rc::clone(&presence));
        Some((Rc::new(ClientSession::new(volume, presence, Rc::new(requests))), caller))
    }

    /// What the disk holds that a volume of this host is on; what it lacks is at the host that it came from.
    pub(super) fn content_of(&self, index: usize) -> Option<Vec<u64>> {
        let state = self.journal().acknowledged();
        let image = &state.volumes.get(&volume_id(index))?.record.image;
        let disk = self.images.borrow().get(image.place.name()).cloned()?;
        self.left_whole(volume_id(index), disk.with_medium(|medium| medium.current().to_vec()))
    }

    /// What a volume was when it was released here, and its generation then.
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

    /// Has the driver end what goes out from here or moves within, if there is one.
    pub(super) fn cancel_driver(&self) -> bool {
        if let Some(driver) = self.with_local(|halves| halves.driver.clone()) {
            driver.cancel();
            return true;
        }
        let serving = self.serving.borrow();
        let source = serving.as_ref().map(|serving| serving.source.borrow());
        source.and_then(|source| source.as_ref().map(|source| source.driver.cancel())).is_some()
    }

    /// Has the driver end what comes here, if there is one.
    pub(super) fn cancel_arrival(&self) -> bool {
        let serving = self.serving.borrow();
        let target = serving.as_ref().map(|serving| serving.target.borrow());
        target.and_then(|target| target.as_ref().map(|(_, driver)| driver.cancel())).is_some()
    }

    /// A weak reference, for what outlasts this daemon.
    pub(super) fn weak(self: &Rc<Self>) -> Weak<Self> {
        Weak::clone(&self.me)
    }
}
