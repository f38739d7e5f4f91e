//! A volume leaves for another host: checks here, an offer there, then the lane.
//!
//! ```text
//!   checks ──► started, durably ──► offered ──► accepted: its image is there ──► lane
//!                                      └─ refused, or no answer: ended, nothing is left
//! ```

use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, Migration, SharedTarget};
use block::ZeroMode;
use chronicle::{Generation, ReplicaOf};
use lane::{
    LaneHandle, OutgoingChannels, OutgoingGroup, OutgoingOrder, OutgoingRole, Rest, SharedImage,
    TargetContent,
};
use migration::journal::{
    FailureCode, Forwarding, ImageLocation, MigratingVolume, Origin, Outcome, Place, Record, Side, Summary,
    VolumeRecord,
};
use migration::source::Moves;
use migration::wire::{
    AcceptedVolume, Allocation, FormerContent, Held, LeftBehind, Offer, OfferedVm, OfferedVolume, Refusal,
    RefusalCode, Sharing,
};
use migration::{HostId, MigrationId, VolumeId, VolumeIndex};
use transport::{Peer, Session};

use super::Host;
use super::ahead::{AheadVm, Thoroughness};
use super::move_vm::{Company, HANDOVER_TIMEOUT};
use super::plan::check_order_elsewhere;
use super::shared::Found;
use crate::dockets::Docket;
use crate::error::RequestError;
use crate::hooks::Begun;
use crate::migrations::image_format;
use crate::peers::channel::{Kind, Subject};
use crate::peers::host_id;
use crate::replicas::is_replica;
use crate::vms::{VmError, Vms};

/// The version of the protocol from which on offers say whose the content of their volumes was.
const ORIGINS_SINCE: u16 = 4;
/// How long another host may take to answer an offer: it makes an image meanwhile, perhaps a thick one.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// How long it may take until there is a connection at all.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How often it is looked whether there is one.
const CONNECT_POLL: Duration = Duration::from_millis(20);
/// How long the gates may be closed before the commit point, beside the round trips: as on one host.
const SWITCH_OVER_MAX: Duration = Duration::from_millis(500);
/// Round trips that lie between the closing of the gates and the commit point: what is still in flight, and *prepare*.
/// One more, because a round trip is not always the same.
const SWITCH_OVER_ROUND_TRIPS: u32 = 3;

/// A volume that is to leave.
pub(super) struct Departing {
    /// What it is.
    pub record: VolumeRecord,
    /// Who serves it.
    pub lane: LaneHandle,
}

/// A volume that leaves, and what its lane is told.
pub(super) struct Departure {
    /// Its name.
    pub name: String,
    /// Which it is.
    pub volume: VolumeId,
    /// The generation that it has here.
    pub generation: Generation,
    /// Who serves it.
    pub lane: LaneHandle,
    /// What its lane is told.
    pub order: OutgoingOrder,
}

/// Where volumes are to go.
pub(super) struct Elsewhere {
    /// The host.
    pub peer: Peer,
    /// The store there; empty: its only one.
    pub store: String,
}

/// What is known before anything is begun.
struct Before {
    /// What the user should know.
    warnings: Vec<String>,
    hooks: Hooks,
}

/// Whether something is to be run before volumes change hands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hooks {
    /// Neither host has anything.
    None,
    /// One of them has, or may have.
    Some,
}

impl Host {
    /// The host that `to` names, as HOST or HOST:STORE; `None`: it is a store of this host.
    ///
    /// # Errors
    /// [`RequestError::DestinationNotFound`]; [`RequestError::Invalid`]: it is this host's own name.
    pub(super) fn elsewhere(&self, to: &str) -> Result<Option<Elsewhere>, RequestError> {
        if self.stores.get(to).is_ok() {
            return Ok(None);
        }
        let (host, store) = to.split_once(':').unwrap_or((to, ""));
        match self.hosts.find(host) {
            Some(peer) => Ok(Some(Elsewhere { peer, store: store.to_owned() })),
            None if self.hosts.own().is_none() => self.stores.get(to).map(|_| None),
            None if self.hosts.is_own_name(host) => Err(RequestError::Invalid(format!(
                "\"{host}\" is this host; what is to stay here goes to one of its stores: {}",
                self.stores.known()
            ))),
            None => Err(RequestError::DestinationNotFound {
                name: to.to_owned(),
                stores: self.stores.known(),
                hosts: self.hosts.names(),
            }),
        }
    }

    /// Begins to move volumes to another host: all of them, or none.
    ///
    /// # Errors
    /// [`RequestError`]: they stay where they are, and nothing is left there.
    pub(super) async fn migrate_away(
        self: &Arc<Self>,
        departing: Vec<Departing>,
        elsewhere: Elsewhere,
        order: MigrateVolume,
        company: Option<Company>,
    ) -> Result<Migration, RequestError> {
        check_order_elsewhere(&order)?;
        let session = self.hosts.session(&elsewhere.peer)?;
        self.reach(&session, &elsewhere.peer).await?;
        let Before { warnings, hooks } =
            self.look_before(&session, &departing, &elsewhere, &order, company.as_ref()).await?;
        let migration = self.record_leaving(&departing, &elsewhere, &order).await?;
        self.migrations.track(migration, departing.iter().map(|volume| volume.record.volume).collect());
        self.begin_history(migration, departing.iter().map(|volume| volume.record.size_bytes).sum(), &order);
        let names: Vec<_> = departing.iter().map(|volume| volume.record.name.clone()).collect();
        let begun = self.offer_and_leave(departing, &elsewhere, migration, &order, company, hooks).await;
        if let Err(error) = begun {
            self.end_refused(migration, &error).await;
            return Err(error);
        }
        if let Some(begun) = self.begun_unix_ms(migration).filter(|_| !warnings.is_empty()) {
            let warn = |docket: &mut Docket| warnings.into_iter().for_each(|warning| docket.warn(warning));
            self.dockets.note(migration, begun, warn).await;
        }
        tracing::info!(volumes = names.join(", "), %migration, host = %elsewhere.peer.name, "migration begun");
        self.migrations.get(&self.journal, migration)
    }

    /// Looks ahead, as a dry run does: nothing is begun if something is in the way. Returns what the user should know.
    async fn look_before(
        self: &Arc<Self>,
        session: &Session,
        departing: &[Departing],
        elsewhere: &Elsewhere,
        order: &MigrateVolume,
        company: Option<&Company>,
    ) -> Result<Before, RequestError> {
        let records: Vec<_> = departing.iter().map(|departing| departing.record.clone()).collect();
        // The other host looks at the VM itself when its volumes have been offered, and refuses it or not. What is only
        // to be known is asked for here.
        let vm = company.map(|company| {
            let manifest = Vms::files_alone(&company.manifest)?;
            Ok::<_, VmError>(AheadVm {
                name: company.name.clone(),
                downtime_max: company.downtime_max,
                manifest,
            })
        });
        let vm = vm.transpose()?;
        let asked = Thoroughness::BeforeOffer;
        let ahead = self.look_ahead(session, &records, elsewhere, order, vm.as_ref(), asked).await;
        // One that has not said so may have some.
        let has_hooks = self.has_hooks() || ahead.surveyed.as_ref().is_none_or(|there| there.has_hooks);
        let hooks = if has_hooks { Hooks::Some } else { Hooks::None };
        Ok(Before { warnings: ahead.into_result()?, hooks })
    }

    /// Waits until there is a connection: nothing is begun with a host that is not there.
    pub(super) async fn reach(&self, session: &Session, peer: &Peer) -> Result<(), RequestError> {
        let connected = async {
            while !session.status().is_connected {
                tokio::time::sleep(CONNECT_POLL).await;
            }
        };
        let unreachable = |_| RequestError::HostUnreachable {
            host: peer.name.clone(),
            reason: session.status().last_error.unwrap_or_else(|| "it does not answer".to_owned()),
        };
        tokio::time::timeout(CONNECT_MAX, connected).await.map_err(unreachable)
    }

    async fn record_leaving(
        &self,
        departing: &[Departing],
        elsewhere: &Elsewhere,
        order: &MigrateVolume,
    ) -> Result<MigrationId, RequestError> {
        let starting = self.starting_migration.lock().await;
        let first = departing.first().map(|departing| departing.record.volume);
        let migration = self.next_identity(first);
        let peer = &elsewhere.peer;
        // Where exactly its image is there, is the other host's affair.
        let store = match elsewhere.store.as_str() {
            "" => peer.name.clone(),
            store => format!("{}:{store}", peer.name),
        };
        let moving = |Departing { record, .. }: &Departing| {
            let format = order.format.map_or(record.image.format, image_format);
            let target = ImageLocation { store: store.clone(), place: Place::File(String::new()), format };
            MigratingVolume { volume: record.volume, source: record.image.clone(), target }
        };
        let volumes = departing.iter().map(moving).collect();
        let side = Side::Outgoing {
            peer: host_id(peer.id),
            peer_name: peer.name.clone(),
            store: elsewhere.store.clone(),
            forwarding: forwarding(order),
        };
        let keep_source = order.keep_source;
        let started = Record::MigrationStarted { migration, volumes, keep_source, side };
        // N.B. before the beginning: a restart goes on as it was ordered, or has nothing to go on with. On a full disk a
        // migration begins all the same, and its order is known until the daemon ends.
        if let Err(error) = self.dockets.announce(migration, order).await {
            tracing::warn!(%migration, %error, "how a migration was ordered cannot be kept");
        }
        self.journal.commit(vec![started]).await?;
        drop(starting);
        self.note_order(migration, order).await;
        Ok(migration)
    }

    async fn offer_and_leave(
        self: &Arc<Self>,
        departing: Vec<Departing>,
        elsewhere: &Elsewhere,
        migration: MigrationId,
        order: &MigrateVolume,
        company: Option<Company>,
        hooks: Hooks,
    ) -> Result<(), RequestError> {
        let session = &self.hosts.session(&elsewhere.peer)?;
        let host = elsewhere.peer.name.clone();
        let vm = company.as_ref().map(|company| OfferedVm { name: company.name.clone() });
        let moves = match (&company, hooks) {
            (Some(_), _) => Moves::Vm,
            (None, Hooks::Some) => Moves::VolumesAfterHooks,
            (None, Hooks::None) => Moves::Volumes,
        };
        let records: Vec<_> = departing.iter().map(|departing| departing.record.clone()).collect();
        let mut offer = offer(&records, &elsewhere.store, order, vm);
        if session.version().is_some_and(|version| version >= ORIGINS_SINCE) {
            self.tell_origins(&mut offer);
        }
        let answered = tokio::time::timeout(ANSWER_MAX, self.peers.offer(session, migration, offer)).await;
        let acceptance = match answered {
            Ok(Ok(acceptance)) => acceptance,
            Ok(Err(refusal)) => return Err(RequestError::HostRefused { host, refusal }),
            Err(_) => {
                self.peers.give_up_offer(host_id(session.peer()), migration);
                let reason = format!("it did not answer within {} s", ANSWER_MAX.as_secs());
                return Err(RequestError::HostUnreachable { host, reason });
            }
        };
        let peer = host_id(session.peer());
        if !order.full && acceptance.volumes.iter().any(|accepted| held(accepted, peer).is_some()) {
            self.note_held(migration, departing.iter().map(|departing| departing.record.clone()).collect())
                .await;
        }
        if let Some(company) = company {
            self.check_vm_at_target(migration, company, session, &elsewhere.peer.name).await?;
        }
        if moves == Moves::VolumesAfterHooks {
            self.prepare_hooks_away(migration, session, Begun::No);
        }
        let mut found = Vec::new();
        for Departing { record, .. } in &departing {
            let accepted = acceptance.volumes.iter().find(|accepted| accepted.volume == record.volume);
            let beside = accepted.and_then(|accepted| accepted.beside.as_ref());
            found.extend(self.find_shared(record.volume, &record.name, beside).await);
        }
        self.note_shared(migration, &found).await;
        let departures = departing.into_iter().map(|Departing { record, lane }| {
            let accepted = acceptance.volumes.iter().find(|accepted| accepted.volume == record.volume);
            let order = OutgoingOrder {
                migration,
                source: record.image,
                keep_source: order.keep_source,
                bandwidth_bytes_per_second: order.bandwidth_bytes_per_second,
                content: accepted.map_or(TargetContent::Unknown, content),
                known: accepted.filter(|_| !order.full).and_then(|accepted| held(accepted, peer)),
                zeroes: match order.allocation {
                    api::Allocation::Thin => ZeroMode::MayUnmap,
                    api::Allocation::Thick => ZeroMode::KeepAllocated,
                },
                shared: shared_of(&found, record.volume),
                switch_over_max: switch_over_max(session, moves),
                round_trip: round_trip(session),
                moves,
                rest: Rest::Resume,
                recorded: None,
            };
            Departure { name: record.name, volume: record.volume, generation: record.generation, lane, order }
        });
        self.hand_over_to(session, migration, departures.collect()).await
    }

    /// Says whose the volumes' content was before Sterna served it.
    fn tell_origins(&self, offer: &mut Offer) {
        self.journal.read(|state| {
            for offered in &mut offer.volumes {
                offered.origin = state.origin_of(offered.volume);
            }
        });
    }

    /// Gives lanes their orders, and the lines to the other host. That of the first volume drives the migration, the
    /// others follow it.
    ///
    /// # Errors
    /// [`RequestError::VolumeUnavailable`]; no lane has begun then, or goes on.
    pub(super) async fn hand_over_to(
        self: &Arc<Self>,
        session: &Session,
        migration: MigrationId,
        departures: Vec<Departure>,
    ) -> Result<(), RequestError> {
        let mut together = OutgoingGroup::default();
        let mut departures = departures.into_iter();
        let Some(first) = departures.next() else { return Ok(()) };
        let mut leaving = vec![(first.name.clone(), first.volume, first.lane.clone())];
        for departure in departures {
            let Departure { volume, generation, .. } = departure;
            let participation = together.add(volume, generation, departure.order.source.clone());
            leaving.push((departure.name.clone(), volume, departure.lane.clone()));
            let index = participation.index();
            self.let_leave(session, index, departure, OutgoingRole::Joins(participation)).await?;
        }
        self.let_leave(session, VolumeIndex(0), first, OutgoingRole::Drives(together)).await?;
        let host = Arc::clone(self);
        tokio::spawn(async move {
            if let Some(Outcome::Moved { .. }) = host.migrations.outcome(migration).await {
                for (name, volume, lane) in leaving {
                    tokio::spawn(Arc::clone(&host).see_departure(name, volume, lane));
                }
            }
        });
        Ok(())
    }

    async fn let_leave(
        &self,
        session: &Session,
        volume: VolumeIndex,
        departure: Departure,
        role: OutgoingRole,
    ) -> Result<(), RequestError> {
        let migration = departure.order.migration;
        let line = |kind| {
            let subject = Subject { kind, source: self.peers.own(), migration, volume };
            self.peers.line(session, subject)
        };
        let lines = OutgoingChannels { replica: line(Kind::Migration), owner: line(Kind::Forwarding) };
        let left = departure.lane.leave(departure.order, lines, role).await;
        left.map_err(|refused| RequestError::VolumeUnavailable {
            volume: departure.name,
            reason: refused.to_string(),
        })
    }

    /// Ends a migration that the other host did not take. If it did after all, it asks, and is told that there is none.
    async fn end_refused(&self, migration: MigrationId, error: &RequestError) {
        let outcome = Outcome::Failed { code: FailureCode::HostRefused, detail: error.message() };
        let summary = Summary::default();
        let ended = Record::MigrationEnded { migration, outcome: outcome.clone(), summary };
        if let Err(fault) = self.journal.commit(vec![ended]).await {
            tracing::warn!(%migration, %fault, "that the migration has ended is left to the next start");
        }
        self.migrations.report(lane::Report::Ended { migration, outcome, summary });
        self.histories.forget(migration);
    }
}

/// How long the gates may be closed, given how far away the other host is.
pub(super) fn switch_over_max(session: &Session, moves: Moves) -> Duration {
    let near = match moves {
        Moves::Volumes | Moves::VolumesAfterHooks => SWITCH_OVER_MAX,
        Moves::Vm => HANDOVER_TIMEOUT,
    };
    near + round_trip(session) * SWITCH_OVER_ROUND_TRIPS
}

/// The longest way to the other host and back, as it was measured last.
pub(super) fn round_trip(session: &Session) -> Duration {
    let status = session.status();
    let round_trips = status.connections.iter().filter_map(|connection| connection.round_trip);
    round_trips.max().unwrap_or_default()
}

fn forwarding(order: &MigrateVolume) -> Forwarding {
    if order.serve_here { Forwarding::Always } else { Forwarding::WhileConnected }
}

/// What is offered to another host.
pub(super) fn offer(
    records: &[VolumeRecord],
    store: &str,
    order: &MigrateVolume,
    vm: Option<OfferedVm>,
) -> Offer {
    let volume = |record: &VolumeRecord| OfferedVolume {
        volume: record.volume,
        name: record.name.clone(),
        size_bytes: record.size_bytes,
        block_size_bytes: record.block_size_bytes,
        generation: record.generation,
        left_behind: match order.keep_source && is_replica(&record.image) {
            true => LeftBehind::Replica,
            false => LeftBehind::Nothing,
        },
        origin: Origin::Unknown,
    };
    Offer {
        volumes: records.iter().map(volume).collect(),
        store: store.to_owned(),
        format: order.format.map(image_format),
        allocation: match order.allocation {
            api::Allocation::Thin => Allocation::Thin,
            api::Allocation::Thick => Allocation::Thick,
        },
        forwarding: forwarding(order),
        vm,
        sharing: match order.shared_target {
            SharedTarget::Auto => Sharing::Wanted,
            SharedTarget::Never => Sharing::Refused,
        },
    }
}

fn shared_of(found: &[Found], volume: VolumeId) -> Option<SharedImage> {
    found.iter().find(|found| found.volume == volume).map(|found| found.image.clone())
}

/// The replica that the other host has made the target of.
fn held(accepted: &AcceptedVolume, host: HostId) -> Option<(ReplicaOf, Generation)> {
    match accepted.held {
        Held::Copy { departure, generation } => {
            Some((ReplicaOf::Host { host: host.0, departure: departure.0 }, generation))
        }
        Held::Nothing => None,
    }
}

/// What is where nothing of the volume is yet.
fn content(accepted: &AcceptedVolume) -> TargetContent {
    match accepted.elsewhere {
        FormerContent::Zero => TargetContent::Zero,
        FormerContent::Unknown => TargetContent::Unknown,
    }
}

/// What another host is told of what went wrong here.
pub(super) fn refusal(error: &RequestError) -> Refusal {
    let code = match (error, error.code()) {
        (RequestError::BranchPresent { .. } | RequestError::BranchLedTo { .. }, _) => {
            RefusalCode::VolumePresent
        }
        (_, api::ErrorCode::NoSpace | api::ErrorCode::TargetTooSmall) => RefusalCode::NoSpace,
        (_, api::ErrorCode::StoreNotFound) => RefusalCode::UnknownStore,
        (_, api::ErrorCode::VolumeExists) => RefusalCode::NameTaken,
        (_, api::ErrorCode::InvalidRequest | api::ErrorCode::StoreOccupied) => RefusalCode::Unsuitable,
        (_, api::ErrorCode::VolumeBusy | api::ErrorCode::AlreadyMigrating) => RefusalCode::Busy,
        _ => RefusalCode::Failed,
    };
    // Who asked names a store behind this host's name, which is not the same everywhere.
    let detail = match error {
        RequestError::StoreNotChosen { known } => {
            format!("it has several stores; name one, as in --to HOST:STORE: {known}")
        }
        error => error.message(),
    };
    Refusal { code, detail }
}
