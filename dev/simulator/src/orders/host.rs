//! A host of this simulation: a journal, images of two blocks, and the halves of migrations under way.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use chronicle::Generation;
use migration::journal::{
    ExportSettings, Forwarding, ImageLocation, MigratingVolume, MigrationState, Record, Side, State,
    VolumeRecord,
};
use migration::message::{ToSource, ToTarget};
use migration::source::{Moves, Peer, SourceAction, SourceEvent, SourceSettings};
use migration::target::{TargetAction, TargetEvent};
use migration::{Attempt, CommitId, HostId, MigrationId, Phase, Source, Target, VolumeId, VolumeIndex};

pub(super) const VOLUME: VolumeId = VolumeId([1; 16]);
pub(super) const NAME: &str = "v";
pub(super) const FIRST: VolumeIndex = VolumeIndex(0);

/// The numbers of the last writes; `None`: the block is missing.
pub(super) type Blocks = [Option<u64>; 2];

pub(super) struct Host {
    pub(super) id: HostId,
    pub(super) state: State,
    pub(super) images: BTreeMap<String, Blocks>,
    pub(super) source: Option<(MigrationId, Source)>,
    pub(super) target: Option<(MigrationId, Target)>,
    pub(super) commits: VecDeque<Commit>,
    pub(super) pending: Vec<Event>,
    /// The attempt whose last data is on its way, after which the gate counts as closed.
    pub(super) closing: Option<Attempt>,
    pub(super) is_up: bool,
    pub(super) is_lost: bool,
    /// Whether the gate of its own volume is open.
    pub(super) is_open: bool,
    /// Whether the daemon still knows which blocks of its volume are missing.
    pub(super) knows_missing: bool,
    /// The branch of its volume.
    pub(super) branch: usize,
    /// Clients and a VM that use the volume by this host.
    pub(super) clients: usize,
    pub(super) has_vm: bool,
}

pub(super) struct Commit {
    pub(super) by: By,
    pub(super) id: CommitId,
    pub(super) records: Vec<Record>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Source(MigrationId),
    Target(MigrationId),
    Filling,
}

#[derive(Clone, Debug)]
pub(super) enum Event {
    Source(SourceEvent),
    Target(TargetEvent),
}

/// The messages on their way between the hosts.
#[derive(Clone, Debug)]
pub(super) enum Mail {
    ToSource(MigrationId, ToSource),
    ToTarget(MigrationId, ToTarget),
    /// Data of a migration; with an attempt, the last data behind its closed gate.
    Data(MigrationId, Option<Attempt>, Blocks),
    Copied(MigrationId, Option<Attempt>),
}

impl Host {
    pub(super) fn new(at: usize) -> Self {
        Self {
            id: HostId([at as u8 + 1; 32]),
            state: State::default(),
            images: BTreeMap::new(),
            source: None,
            target: None,
            commits: VecDeque::new(),
            pending: Vec::new(),
            closing: None,
            is_up: true,
            is_lost: false,
            is_open: true,
            knows_missing: true,
            branch: 0,
            clients: 1,
            has_vm: false,
        }
    }

    pub(super) fn owns(&self) -> bool {
        self.state.volumes.contains_key(&VOLUME)
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        Some(self.state.volumes.get(&VOLUME)?.record.generation)
    }

    /// Returns whether the volume is here, and this host does not know which of its blocks are missing.
    pub(super) fn cannot_serve(&self) -> bool {
        self.lacks_blocks() && !self.knows_missing
    }

    pub(super) fn lacks_blocks(&self) -> bool {
        self.state.fillings.get(&VOLUME).is_some_and(|filling| !filling.is_given_up)
    }

    pub(super) fn serves(&self) -> bool {
        self.is_up && self.is_open && self.owns() && !self.cannot_serve()
    }

    pub(super) fn own_image(&self) -> Option<String> {
        Some(self.state.volumes.get(&VOLUME)?.record.image.place.name().to_owned())
    }

    pub(super) fn under_way(&self) -> Option<(MigrationId, &MigrationState)> {
        self.state.unfinished().last()
    }

    pub(super) fn phase(&self) -> Option<Phase> {
        self.source.as_ref().map(|(_, source)| source.phase())
    }

    pub(super) fn settings(&self, migration: MigrationId) -> Option<SourceSettings> {
        let here = self.state.volumes.get(&VOLUME).map(|here| here.record.generation);
        let left = self.state.moved.get(&VOLUME).map(|moved| moved.volume.record.generation);
        Some(SourceSettings {
            migration,
            volumes: vec![(VOLUME, here.or(left)?)],
            switch_over_max: Duration::from_millis(500),
            peer: Peer::OtherHost,
            moves: Moves::Volumes,
        })
    }

    pub(super) fn forget_its_memory(&mut self) {
        (self.source, self.target, self.closing) = (None, None, None);
        self.pending.clear();
        self.is_up = false;
    }
}

pub(super) fn added() -> Record {
    Record::VolumeAdded(VolumeRecord {
        volume: VOLUME,
        name: NAME.to_owned(),
        size_bytes: 1 << 20,
        block_size_bytes: 65536,
        image: ImageLocation::raw_file("a", "/0/made"),
        generation: Generation(4),
        export: ExportSettings::default(),
    })
}

pub(super) fn leaves(peer: HostId, moving: &MigratingVolume, migration: MigrationId) -> Record {
    let (peer_name, store) = ("other".to_owned(), "store".to_owned());
    let side = Side::Outgoing { peer, peer_name, store, forwarding: Forwarding::WhileConnected };
    Record::MigrationStarted { migration, volumes: vec![moving.clone()], keep_source: false, side }
}

pub(super) fn comes(
    (peer, remote): (HostId, MigrationId),
    moving: &MigratingVolume,
    volume: &VolumeRecord,
    migration: MigrationId,
) -> Record {
    let volume = VolumeRecord { image: moving.target.clone(), ..volume.clone() };
    let side = Side::Incoming { peer, peer_name: "other".to_owned(), remote, volumes: vec![volume] };
    Record::MigrationStarted { migration, volumes: vec![moving.clone()], keep_source: false, side }
}

impl Host {
    pub(super) fn next_of_source(&mut self) -> Option<(MigrationId, SourceAction)> {
        let (id, source) = self.source.as_mut()?;
        Some((*id, source.poll_action()?))
    }

    pub(super) fn next_of_target(&mut self) -> Option<(MigrationId, TargetAction)> {
        let (id, target) = self.target.as_mut()?;
        Some((*id, target.poll_action()?))
    }

    /// Returns the source's host and number of an arriving migration.
    pub(super) fn remote_of(&self, id: MigrationId) -> Option<(HostId, MigrationId)> {
        match &self.state.migrations.get(&id)?.side {
            Side::Incoming { peer, remote, .. } => Some((*peer, *remote)),
            _ => None,
        }
    }
}
