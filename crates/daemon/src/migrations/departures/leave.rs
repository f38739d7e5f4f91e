//! The start of a migration to another host: the checks at both hosts, and the offer. `outgoing.rs`
//! carries out the migration itself.

use std::sync::Arc;
use std::time::Duration;

use api::{MigrateVolume, Migration, SharedTarget};
use lane::LaneHandle;
use migration::journal::{
    Forwarding, ImageLocation, MigratingVolume, Origin, Place, Record, Side, VolumeRecord,
};
use migration::source::Moves;
use migration::wire::{
    Allocation, LeftBehind, Offer, OfferedVm, OfferedVolume, Refusal, RefusalCode, Sharing,
};
use migration::{CommitFault, MigrationId};
use transport::{Peer, Session};

use crate::error::RequestError;
use crate::host::Departures;
use crate::images::replicas::is_replica;
use crate::migrations::departures::ahead::{AheadVm, Thoroughness};
use crate::migrations::departures::outgoing::Hooks;
use crate::migrations::departures::strategies::{held_max, offered};
use crate::migrations::orders::plan::check_order_elsewhere;
use crate::migrations::view::image_format;
use crate::peers::host_id;
use crate::vms::orders::move_vm::{Company, HANDOVER_TIMEOUT};
use crate::vms::{VmError, Vms};
use crate::volumes::claims::Elsewhere;

/// How long a migration waits for a first connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
const CONNECT_POLL: Duration = Duration::from_millis(20);
/// How long the gates may be closed before the commit point, besides the round trips: as on one host.
pub(crate) const SWITCH_OVER_MAX: Duration = Duration::from_millis(500);
/// The round trips between the closing of the gates and the commit point: requests in flight, and *prepare*. The third is a
/// reserve, because round trips vary.
const SWITCH_OVER_ROUND_TRIPS: u32 = 3;

pub(crate) struct Departing {
    pub record: VolumeRecord,
    pub lane: LaneHandle,
}

impl Departures {
    /// Begins to move volumes to another host: all of them, or none. After an error nothing is left at the target.
    pub(crate) async fn migrate_away(
        self: &Arc<Self>,
        departing: Vec<Departing>,
        elsewhere: Elsewhere,
        mut order: MigrateVolume,
        company: Option<Company>,
    ) -> Result<Migration, RequestError> {
        check_order_elsewhere(&order)?;
        let volumes = departing.iter().map(|departing| departing.record.volume);
        let keeps = self.journal.read(|state| state.keeps_source(order.keep_source, volumes));
        let is_kept_as_wished = std::mem::replace(&mut order.keep_source, keeps) == keeps;
        let session = self.hosts.session(&elsewhere.peer)?;
        self.reach(&session, &elsewhere.peer).await?;
        let mut looked = self.look_before(&session, &departing, &elsewhere, &order, company.as_ref()).await?;
        if !is_kept_as_wished {
            let host = &elsewhere.peer.name;
            looked.1.push(format!("its image here lacks blocks that host \"{host}\" has, so it is not kept"));
        }
        let volumes: Vec<_> = departing.iter().map(|departing| departing.record.volume).collect();
        let to = host_id(elsewhere.peer.id);
        // Until the migration has begun.
        let _leaving = self.standbys.leave(&volumes, to, order.standby_untold).await?;
        self.begin_outgoing((elsewhere, session), order, departing, company, looked).await
    }

    /// Runs the preflight check. Returns the warnings for the user, or the refusal for which nothing is begun.
    async fn look_before(
        self: &Arc<Self>,
        session: &Session,
        departing: &[Departing],
        elsewhere: &Elsewhere,
        order: &MigrateVolume,
        company: Option<&Company>,
    ) -> Result<(Hooks, Vec<String>), RequestError> {
        let records: Vec<_> = departing.iter().map(|departing| departing.record.clone()).collect();
        // The target checks the VM itself after the offer, and may refuse it. This check only asks for the warnings.
        let vm = company.map(|company| {
            let manifest = Vms::files_alone(&company.manifest)?;
            Ok::<_, VmError>(AheadVm {
                name: company.name.clone(),
                downtime_max: company.travels.downtime_max(),
                manifest,
            })
        });
        let vm = vm.transpose()?;
        let asked = Thoroughness::BeforeOffer;
        let ahead = self.look_ahead(session, &records, elsewhere, order, vm.as_ref(), asked).await;
        // A host that did not answer may have hooks.
        let has_hooks =
            self.migration_hooks.has_hooks() || ahead.surveyed.as_ref().is_none_or(|there| there.has_hooks);
        let hooks = if has_hooks { Hooks::Some } else { Hooks::None };
        Ok((hooks, ahead.into_result()?))
    }

    /// Waits for a connection: a migration begins only with a host that can be reached.
    pub(crate) async fn reach(&self, session: &Session, peer: &Peer) -> Result<(), RequestError> {
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

    /// Makes durable that volumes leave, under a new migration number.
    pub(crate) async fn record_leaving(
        &self,
        departing: &[Departing],
        elsewhere: &Elsewhere,
        order: &MigrateVolume,
    ) -> Result<MigrationId, CommitFault> {
        let starting = self.runner.starting_migration.lock().await;
        let first = departing.first().map(|departing| departing.record.volume);
        let migration = self.runner.next_identity(first);
        let peer = &elsewhere.peer;
        // The exact place of the image there is known to the target alone.
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
        // N.B. The order is stored before *started*: a restart then knows the order, or finds no migration. On a full disk the
        // migration begins all the same, and its order is in memory only.
        if let Err(error) = self.metadata_folder.announce(migration, order).await {
            tracing::warn!(%migration, %error, "cannot store the order of a migration");
        }
        self.journal.commit(vec![started]).await?;
        drop(starting);
        self.runner.note_order(migration, order).await;
        Ok(migration)
    }

    /// Adds to the offer who owned the content of each volume before Sterna served it.
    pub(crate) fn tell_origins(&self, offer: &mut Offer) {
        self.journal.read(|state| {
            for offered in &mut offer.volumes {
                offered.origin = state.origin_of(offered.volume);
            }
        });
    }
}

/// Returns how long the gates may be closed, given the distance of the target host.
pub(crate) fn switch_over_max(session: &Session, moves: Moves, order: &MigrateVolume) -> Duration {
    let usual = match moves {
        Moves::Volumes | Moves::VolumesAfterHooks => SWITCH_OVER_MAX,
        Moves::Vm => HANDOVER_TIMEOUT,
    };
    let near = usual.max(held_max(order, moves));
    near + round_trip(session) * SWITCH_OVER_ROUND_TRIPS
}

/// Returns the longest of the connections' last measured round trips.
pub(crate) fn round_trip(session: &Session) -> Duration {
    let status = session.status();
    let round_trips = status.connections.iter().filter_map(|connection| connection.round_trip);
    round_trips.max().unwrap_or_default()
}

fn forwarding(order: &MigrateVolume) -> Forwarding {
    if order.serve_here { Forwarding::Always } else { Forwarding::WhileConnected }
}

pub(crate) fn offer(
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
        format: record.image.format,
        // A volume that leaves with blocks missing may return before they have followed, at little cost.
        left_behind: match order.strategy.leaves_blocks() || order.keep_source && is_replica(&record.image) {
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
            // Missing blocks are read over the link in any case.
            _ if order.strategy.leaves_blocks() => Sharing::Refused,
            SharedTarget::Auto => Sharing::Wanted,
            SharedTarget::Never => Sharing::Refused,
        },
        strategy: offered(order.strategy),
    }
}

pub(crate) fn refusal(error: &RequestError) -> Refusal {
    let code = match (error, error.code()) {
        (RequestError::BranchPresent { .. } | RequestError::BranchLedTo { .. }, _) => {
            RefusalCode::VolumePresent
        }
        (RequestError::ShareUsedUp(_), _) => RefusalCode::Busy,
        (_, api::ErrorCode::HostDrained) => RefusalCode::NotAllowed,
        (_, api::ErrorCode::NoSpace | api::ErrorCode::TargetTooSmall) => RefusalCode::NoSpace,
        (_, api::ErrorCode::StoreNotFound) => RefusalCode::UnknownStore,
        (_, api::ErrorCode::VolumeExists) => RefusalCode::NameTaken,
        (_, api::ErrorCode::InvalidRequest | api::ErrorCode::StoreOccupied) => RefusalCode::Unsuitable,
        (_, api::ErrorCode::VolumeBusy | api::ErrorCode::AlreadyMigrating) => RefusalCode::Busy,
        _ => RefusalCode::Failed,
    };
    // The peer names a store behind this host's name, which may differ from host to host.
    let detail = match error {
        RequestError::StoreNotChosen { known } => {
            format!("it has several stores; name one, as in --to HOST:STORE: {known}")
        }
        error => error.message(),
    };
    Refusal { code, detail }
}
