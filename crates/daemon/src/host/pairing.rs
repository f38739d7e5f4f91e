//! Operations on other hosts: creating this host's identity, inviting, joining, forgetting.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::future::join_all;
use migration::journal::{Record, Side};
use migration::session::Event;
use migration::{HostId, MigrationId, VolumeId, orders};
use transport::Peer;

use super::blocking;
use crate::error::RequestError;
use crate::host::{MigrationOrders, Ownership, Parts, Standbys};
use crate::hosts::{Hosts, Trust};
use crate::journal::Journal;
use crate::migrations::metadata::MetadataFolder;
use crate::migrations::sessions::Sessions;
use crate::peers::Peers;
use crate::standbys::permissions::Permissions;
use crate::volumes::registry::{Service, Volumes};
use crate::volumes::views::ANSWER_MAX;

/// Carries out the orders about other hosts.
pub(crate) struct Pairing {
    pub(crate) journal: Journal,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) metadata_folder: Arc<MetadataFolder>,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) permissions: Arc<Permissions>,
    pub(crate) standbys: Arc<Standbys>,
    pub(crate) migration_orders: Arc<MigrationOrders>,
    pub(crate) ownership: Arc<Ownership>,
}

impl Pairing {
    pub(crate) fn new(
        parts: &Parts,
        standbys: &Arc<Standbys>,
        migration_orders: &Arc<MigrationOrders>,
        ownership: &Arc<Ownership>,
    ) -> Arc<Self> {
        let Parts { journal, volumes, metadata_folder, sessions, hosts, peers, permissions, .. } =
            parts.clone();
        Arc::new(Self {
            journal,
            volumes,
            metadata_folder,
            sessions,
            hosts,
            peers,
            permissions,
            standbys: Arc::clone(standbys),
            migration_orders: Arc::clone(migration_orders),
            ownership: Arc::clone(ownership),
        })
    }

    pub(crate) async fn create_identity(
        self: Arc<Self>,
        order: api::NewIdentity,
    ) -> Result<api::Identity, RequestError> {
        blocking(move || {
            self.hosts.create_identity(&order.name)?;
            Ok(self.hosts.describe_identity()?)
        })
        .await
    }

    pub(crate) async fn invite(
        self: Arc<Self>,
        order: api::NewInvitation,
    ) -> Result<api::Invitation, RequestError> {
        let token = self.hosts.invite(order.lifetime_s, Trust { machines: order.allow_machines })?;
        let expires = token.expires().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Ok(api::Invitation {
            token: token.to_string(),
            addresses: token.addresses().to_vec(),
            expires_unix_ms: u64::try_from(expires.as_millis()).unwrap_or(u64::MAX),
        })
    }

    pub(crate) async fn join_host(self: Arc<Self>, order: api::JoinHost) -> Result<api::Peer, RequestError> {
        blocking(move || {
            let trust = order.allow_machines.map(|machines| Trust { machines });
            let joined = self.hosts.join(&order.token, order.address, trust)?;
            Ok(self.hosts.describe(&joined))
        })
        .await
    }

    /// Changes what another host is trusted with, and where it is reached. A VM that is already on its way still arrives.
    pub(crate) async fn set_host(
        self: Arc<Self>,
        name: String,
        order: api::SetPeer,
    ) -> Result<api::Peer, RequestError> {
        blocking(move || {
            let trust = order.allow_machines.map(|machines| Trust { machines });
            self.hosts.set(&name, trust, order.addresses)?;
            self.describe_other_host(&name)
        })
        .await
    }

    pub(crate) fn describe_hosts(&self) -> Result<Vec<api::Peer>, RequestError> {
        Ok(self.hosts.describe_all()?.into_iter().map(|peer| self.with_words(peer)).collect())
    }

    pub(crate) fn describe_other_host(&self, name: &str) -> Result<api::Peer, RequestError> {
        Ok(self.with_words(self.hosts.describe_one(name)?))
    }

    /// Adds the message traffic with a host to its description.
    fn with_words(&self, peer: api::Peer) -> api::Peer {
        let Some(id) = self.hosts.find(&peer.name).map(|known| HostId(known.id.0)) else { return peer };
        api::Peer {
            refused_requests: self.peers.refused_to(id),
            program_version: self.peers.program_of(id),
            ..peer
        }
    }

    /// Forgets another host. Errors: [`RequestError::HostNeeded`], [`RequestError::Hosts`].
    pub(crate) async fn remove_host(
        self: Arc<Self>,
        name: String,
        how: api::RemovePeer,
    ) -> Result<api::RemovedPeer, RequestError> {
        if let (false, Some(peer)) = (how.force, self.hosts.find(&name)) {
            let used = self.used_from(HostId(peer.id.0)).await;
            self.refuse_needed(&peer, &used)?;
        }
        if let Some(peer) = self.hosts.find(&name) {
            // N.B. Otherwise a host that is paired again could write to them at once.
            self.end_attachments_at(HostId(peer.id.0)).await?;
        }
        let host = Arc::clone(&self);
        let removed = blocking(move || {
            let removed = host.hosts.remove(&name)?;
            host.peers.unpaired(HostId(removed.id.0));
            Ok(removed)
        });
        let removed = removed.await?;
        self.end_migrations_with(HostId(removed.id.0), &removed.name).await;
        Ok(api::RemovedPeer { name: removed.name, id: removed.id.to_string() })
    }

    /// Ends the right of a host to use volumes that are attached there.
    async fn end_attachments_at(&self, host: HostId) -> Result<(), RequestError> {
        let ended: Vec<Record> = self.journal.read(|state| {
            let given = state.given.iter().filter(|(_, hosts)| hosts.contains_key(&host));
            given.map(|(volume, _)| Record::AttachmentEnded { volume: *volume, host }).collect()
        });
        match ended.is_empty() {
            true => Ok(()),
            false => Ok(self.journal.commit(ended).await?),
        }
    }

    /// Ends migrations with a removed host where that loses nothing. The others wait for an administrator's decision.
    async fn end_migrations_with(&self, peer: HostId, name: &str) {
        let with_it = self.journal.read(|state| {
            let with_it = state
                .unfinished()
                .filter(|(_, known)| known.side.peer().is_some_and(|(other, _)| other == peer));
            with_it.map(|(id, _)| id).collect::<Vec<_>>()
        });
        for migration in with_it {
            if let Some(begun) = self.journal.begun_unix_ms(migration) {
                let warning = format!("the host \"{name}\" was removed");
                self.metadata_folder.note(migration, begun, |metadata| metadata.warn(warning)).await;
            }
            // N.B. Recorded first. That fails if this target has promised to wait: only an administrator decides then.
            let is_recorded = self.migration_orders.record_cancel(migration).await.is_ok()
                || self.record_given_up(migration).await;
            if is_recorded && self.sessions.tell(migration, Event::Cancel) {
                tracing::info!(%migration, host = name, "ending a migration with a removed host");
            }
        }
    }

    /// Gives up an incomplete copy that waits for a removed host; returns whether it is one, and that is durable.
    async fn record_given_up(&self, migration: MigrationId) -> bool {
        match self.journal.read(|state| orders::give_up(state, migration)) {
            Some(records) => self.journal.commit(records).await.is_ok(),
            None => false,
        }
    }

    /// Returns the local volumes that clients at another host use.
    async fn used_from(&self, peer: HostId) -> Vec<String> {
        let served = self.volumes.list().into_iter().filter_map(|(name, _, service)| match service {
            Service::Serving(lane) => Some((name, lane)),
            _ => None,
        });
        let asked = served.map(async |(name, lane)| {
            let status = tokio::time::timeout(ANSWER_MAX, lane.status()).await.ok()?.ok()?;
            (status.clients_elsewhere.at(peer) > 0).then_some(name)
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Refuses to forget a host that migrations or forwarded clients, to it or from it, would wait for without end.
    fn refuse_needed(&self, peer: &Peer, used: &[String]) -> Result<(), RequestError> {
        let id = HostId(peer.id.0);
        let here: BTreeSet<VolumeId> = self.volumes.list().into_iter().filter_map(|(_, id, _)| id).collect();
        let (migrations, volumes, filled, attached) = self.journal.read(|state| {
            let with_it = |side: &Side| side.peer().is_some_and(|(other, _)| other == id);
            let migrations = state.unfinished().filter(|(_, migration)| with_it(&migration.side));
            let migrations: Vec<_> = migrations.map(|(id, _)| id).collect();
            // Other departed volumes have no clients to forward; they are remembered in case they return.
            let forwarded =
                state.moved.iter().filter(|(volume, moved)| moved.host == id && here.contains(volume));
            let forwarded = forwarded.filter(|(volume, _)| state.attachment_of(**volume).is_none());
            let volumes: Vec<String> = forwarded.map(|(_, moved)| moved.volume.record.name.clone()).collect();
            let filled = state.fillings.iter().filter(|(_, known)| known.peer == id && !known.is_given_up);
            let named = filled.filter_map(|(volume, _)| state.volumes.get(volume));
            let filled = named.map(|known| known.record.name.clone()).collect::<Vec<_>>();
            let attached = state.attachments_with(id).into_iter().filter_map(|volume| {
                let here = state.volumes.get(&volume).map(|known| &known.record.name);
                here.or_else(|| Some(&state.moved.get(&volume)?.volume.record.name)).cloned()
            });
            (migrations, volumes, filled, attached.collect::<Vec<_>>())
        });
        let mut needed = Vec::new();
        if !migrations.is_empty() {
            let all: Vec<String> = migrations.iter().map(ToString::to_string).collect();
            needed.push(format!(
                "{} would not end ({})",
                all.join(", "),
                self.ownership.ended_by(&migrations, id)
            ));
        }
        if let Some(first) = volumes.first() {
            let all = volumes.join(", ");
            needed.push(format!(
                "clients of {all} are forwarded there (sterna volume remove {first} ends that)"
            ));
        }
        if let Some(first) = attached.first() {
            let all = attached.join(", ");
            needed.push(format!(
                "{all} are attached there, or here by it (sterna volume detach {first} --at HOST ends that)"
            ));
        }
        let kept_here = self.standbys.names_kept_for(id);
        if let Some(first) = kept_here.first() {
            let all = kept_here.join(", ");
            needed.push(format!(
                "its standbys {all} are kept here (sterna standby remove {first} ends that: there, or here with --force)"
            ));
        }
        let kept = self.permissions.kept_at(id);
        if let Some(first) = kept.first() {
            let all = kept.join(", ");
            needed.push(format!("it keeps standbys of {all} (sterna standby remove {first} ends that)"));
        }
        if let Some(first) = filled.first() {
            let all = filled.join(", ");
            needed.push(format!(
                "it has missing blocks of {all} (sterna volume promote {first} --without-missing gives them up for good)"
            ));
        }
        if !used.is_empty() {
            needed.push(format!("clients there use {} here by forwarding", used.join(", ")));
        }
        match needed.is_empty() {
            true => Ok(()),
            false => Err(RequestError::HostNeeded { host: peer.name.clone(), needed: needed.join(", and ") }),
        }
    }
}
