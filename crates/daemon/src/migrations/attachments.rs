//! Volumes that are attached at hosts which do not have them. Such a host offers the volume to its clients, and forwards their
//! requests.
//!
//! ```text
//!   the host that has it                               the host that is to offer it
//!   order ─► given, durably ── Attach ──────────────► checks ─► attached, durably ─► a lane that forwards (taking.rs)
//!                │        ◄── Attached, or refused ──
//!                └─ confirmed, or ended
//!   order ── Detach ────────────────────────────────► no client ─► detached, durably ─► the lane ends
//!      ended ◄── Attached, or refused ───────────────
//! ```
//! The right is durable before the other host hears of it, so that no request of its clients is refused. An order that a crash
//! has interrupted is given again. What the journal says about both sides is in `migration/src/journal/attached.rs`; the right itself
//! in `migration/src/authority.rs`.

mod taking;

use std::sync::Arc;
use std::time::Duration;

use migration::journal::{ExportAccess, GivenAttachment, Record, VolumeRecord};
use migration::wire::{OfferedAttachment, Refusal};
use migration::{HostId, VolumeId};
use transport::{Peer, Session};

use crate::error::{AttachmentError, RequestError};
use crate::files::sockets::SocketFolder;
use crate::host::{
    Departures, Draining, Parts, PresentLimits, Resumption, SessionRunner, Standbys, VolumeClaims,
    VolumeOrders, VolumeViews,
};
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::peers::{Peers, host_id};
use crate::vms::Vms;
use crate::volumes::registry::Volumes;

/// How long another host may take to attach or to detach a volume: a few commits and the start of a lane.
const ANSWER_MAX: Duration = Duration::from_secs(15);

/// Attaches volumes at other hosts, and offers those of other hosts here.
pub(crate) struct Attachments {
    journal: Journal,
    volumes: Arc<Volumes>,
    sockets: Arc<SocketFolder>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    limits: Arc<PresentLimits>,
    draining: Arc<Draining>,
    claims: Arc<VolumeClaims>,
    views: Arc<VolumeViews>,
    volume_orders: Arc<VolumeOrders>,
    standbys: Arc<Standbys>,
    runner: Arc<SessionRunner>,
    vms: Arc<Vms>,
    departures: Arc<Departures>,
    resumption: Arc<Resumption>,
}

/// The rooms that attachments use.
pub(crate) struct Rooms<'a> {
    pub(crate) claims: &'a Arc<VolumeClaims>,
    pub(crate) views: &'a Arc<VolumeViews>,
    pub(crate) volume_orders: &'a Arc<VolumeOrders>,
    pub(crate) standbys: &'a Arc<Standbys>,
    pub(crate) runner: &'a Arc<SessionRunner>,
    pub(crate) departures: &'a Arc<Departures>,
    pub(crate) resumption: &'a Arc<Resumption>,
}

impl Attachments {
    pub(crate) fn new(parts: &Parts, rooms: &Rooms<'_>) -> Arc<Self> {
        let Parts { journal, volumes, sockets, hosts, peers, limits, draining, vms, .. } = parts.clone();
        Arc::new(Self {
            journal,
            volumes,
            sockets,
            hosts,
            peers,
            limits,
            draining,
            vms,
            claims: Arc::clone(rooms.claims),
            views: Arc::clone(rooms.views),
            volume_orders: Arc::clone(rooms.volume_orders),
            standbys: Arc::clone(rooms.standbys),
            runner: Arc::clone(rooms.runner),
            departures: Arc::clone(rooms.departures),
            resumption: Arc::clone(rooms.resumption),
        })
    }

    /// Attaches a volume of this host at another one. Answers when clients can connect there.
    pub(crate) async fn attach(
        self: Arc<Self>,
        name: String,
        order: api::AttachVolume,
    ) -> Result<api::Volume, RequestError> {
        let (peer, session) = self.other_host(&order.host)?;
        self.claims.settled(&name).await;
        self.claims.record_named(&name)?;
        let (claim, volume) = self.volumes.claim(&name)?;
        let record = self.claims.record(volume, &name)?;
        let access = access(&record, order.read_only)?;
        let host = host_id(peer.id);
        let former = self
            .journal
            .read(|state| state.attachments_given(volume).find(|given| given.host == host).cloned());
        if former.as_ref().is_some_and(|given| given.is_confirmed) {
            return Err(AttachmentError::Already { volume: name, host: peer.name }.into());
        }
        self.departures.reach(&session, &peer).await?;
        let given = GivenAttachment {
            host,
            host_name: peer.name.clone(),
            access,
            is_confirmed: false,
            has_gone_there: false,
        };
        // N.B. Durable first: the other host's clients ask as soon as it offers the volume.
        self.commit_given(volume, &given).await?;
        let offered = OfferedAttachment {
            volume,
            name: name.clone(),
            size_bytes: record.size_bytes,
            block_size_bytes: record.block_size_bytes,
            generation: record.generation,
            access,
        };
        let answered = tokio::time::timeout(ANSWER_MAX, self.peers.attach_there(&session, offered)).await;
        match answered {
            Ok(Some(None)) => {}
            Ok(Some(Some(Refusal { detail, .. }))) => {
                self.commit_ended(volume, host).await?;
                return Err(AttachmentError::Refused { host: peer.name, detail }.into());
            }
            // N.B. The right stays: the other host may have attached it.
            Ok(None) | Err(_) => return Err(no_answer(&name, &peer)),
        }
        self.commit_given(volume, &GivenAttachment { is_confirmed: true, ..given }).await?;
        drop(claim);
        tracing::info!(volume = %name, host = %peer.name, ?access, "volume attached at another host");
        self.views.describe_volume(&name).await
    }

    /// Ends an attachment, at the host that gave it or at the one that has it.
    pub(crate) async fn detach(
        self: Arc<Self>,
        name: String,
        order: api::DetachVolume,
    ) -> Result<api::DetachedVolume, RequestError> {
        match &order.host {
            Some(host) if !self.hosts.is_own_name(host) => self.detach_there(name, host, order.force).await,
            _ => self.detach_here(name, order.force).await,
        }
    }

    /// Ends an attachment that this host has given.
    async fn detach_there(
        &self,
        name: String,
        host: &str,
        force: bool,
    ) -> Result<api::DetachedVolume, RequestError> {
        let volume = self.journal.read(|state| {
            let here = state.volume_named(&name).map(|(volume, _)| volume);
            here.or_else(|| state.moved_named(&name).map(|(volume, _)| volume))
        });
        let volume = volume.ok_or_else(|| RequestError::VolumeNotFound(name.clone()))?;
        let given = self.journal.read(|state| {
            let given = state.attachments_given(volume).find(|given| given.host_name == host);
            // The host may have been paired again under another name.
            let known = self.hosts.find(host).map(|peer| host_id(peer.id));
            given.or_else(|| state.attachments_given(volume).find(|given| Some(given.host) == known)).cloned()
        });
        let not_given = || AttachmentError::NotGiven { volume: name.clone(), host: host.to_owned() };
        let given = given.ok_or_else(not_given)?;
        let asked = self.ask_to_detach(&name, volume, &given, force).await;
        match asked {
            Ok(()) => {}
            Err(error) if force => {
                let reason = error.message();
                tracing::warn!(volume = %name, host, reason, "the other host keeps a socket that leads nowhere, until the volume \
                    is detached there");
            }
            Err(error) => return Err(error),
        }
        self.commit_ended(volume, given.host).await?;
        tracing::info!(volume = %name, host, "volume detached from another host");
        Ok(api::DetachedVolume { name, host: given.host_name })
    }

    /// Asks another host to stop offering a volume.
    async fn ask_to_detach(
        &self,
        name: &str,
        volume: VolumeId,
        given: &GivenAttachment,
        force: bool,
    ) -> Result<(), RequestError> {
        let unknown =
            || AttachmentError::UnknownHost { host: given.host_name.clone(), known: self.hosts.names() };
        let session = self.hosts.session_with(given.host).map_err(|_| unknown())?;
        let peer = self.hosts.find(&self.hosts.name_of(given.host)).ok_or_else(unknown)?;
        self.departures.reach(&session, &peer).await?;
        let asked = self.peers.detach_there(&session, volume, force);
        match tokio::time::timeout(ANSWER_MAX, asked).await {
            Ok(Some(None)) => Ok(()),
            Ok(Some(Some(Refusal { detail, .. }))) => {
                Err(AttachmentError::Refused { host: given.host_name.clone(), detail }.into())
            }
            Ok(None) | Err(_) => Err(no_answer(name, &peer)),
        }
    }

    /// Notes that another host has ended an attachment.
    pub(crate) async fn is_given_up(&self, peer: HostId, volume: VolumeId) {
        // N.B. one that is not confirmed may be newer than this word, which a broken link can hold up for long.
        let is_given = self.journal.read(|state| {
            let mut given = state.attachments_given(volume);
            given.any(|given| given.host == peer && given.is_confirmed)
        });
        if !is_given {
            return;
        }
        match self.commit_ended(volume, peer).await {
            Ok(()) => {
                tracing::info!(%volume, host = %self.hosts.name_of(peer), "another host has detached a volume");
            }
            Err(error) => {
                tracing::error!(%volume, reason = %error.message(), "cannot record that a volume was detached");
            }
        }
    }

    /// Finds the host of an order.
    fn other_host(&self, host: &str) -> Result<(Peer, Session), RequestError> {
        let Some(peer) = self.hosts.find(host) else {
            let host = host.to_owned();
            return Err(match self.hosts.is_own_name(&host) {
                true => AttachmentError::ThisHost(host),
                false => AttachmentError::UnknownHost { host, known: self.hosts.names() },
            }
            .into());
        };
        let session = self.hosts.session(&peer)?;
        Ok((peer, session))
    }

    async fn commit_given(&self, volume: VolumeId, given: &GivenAttachment) -> Result<(), RequestError> {
        let given = Box::new(given.clone());
        Ok(self.journal.commit(vec![Record::AttachmentGiven { volume, given }]).await?)
    }

    async fn commit_ended(&self, volume: VolumeId, host: HostId) -> Result<(), RequestError> {
        Ok(self.journal.commit(vec![Record::AttachmentEnded { volume, host }]).await?)
    }
}

fn access(record: &VolumeRecord, read_only: bool) -> Result<ExportAccess, RequestError> {
    match (record.export.access, read_only) {
        (_, true) => Ok(ExportAccess::ReadOnly),
        (ExportAccess::ReadWrite, false) => Ok(ExportAccess::ReadWrite),
        (ExportAccess::ReadOnly, false) => Err(AttachmentError::ReadOnlyHere(record.name.clone()).into()),
    }
}

fn no_answer(volume: &str, peer: &Peer) -> RequestError {
    let (volume, host, seconds) = (volume.to_owned(), peer.name.clone(), ANSWER_MAX.as_secs());
    AttachmentError::NoAnswer { volume, host, seconds }.into()
}
