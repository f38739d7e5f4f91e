//! Gives up a group of volumes at one of two hosts that have it after a promotion: images are kept, and nothing is served here.
//!
//! ```text
//!   at the source: the other host is asked, and gives nothing up from here on ─┐
//!   VMs are gone, clients too ─────────────────────────────────────────────────┴─► each volume forgotten, its image kept
//!      ─► at the source: the standby ends, at both hosts
//!      └─► where it was promoted: *yielded*, and the source may serve
//! ```
//! Every step that was done before is left as it is, so the order can be given again.

use std::sync::Arc;

use bytes::Bytes;
use migration::{HostId, VolumeId};
use standby::asking::Permission;
use standby::owner::State;

use super::book::{Side, parse};
use super::frames::{Ask, Line};
use super::making::Left;
use super::orders::Found;
use super::source::Source;
use super::{Kept, Standbys, lock};
use crate::error::{RequestError, StandbyError};

impl Standbys {
    /// Gives up the volumes of a standby that was promoted, by the name of one of them, of their VM or of the standby.
    pub(crate) async fn yield_volumes(
        self: Arc<Self>,
        name: String,
        how: api::YieldVolume,
    ) -> Result<Vec<api::RemovedVolume>, RequestError> {
        let _changing = self.changing.lock().await;
        let refused =
            |reason: &str| StandbyError::NotYielded { name: name.clone(), reason: reason.to_owned() };
        match self.find(&name)? {
            Found::Source(source) => {
                if !self.is_elsewhere_too(&source) {
                    return Err(refused("no other host has promoted its standby").into());
                }
                let config = source.config();
                let volumes: Vec<_> = config.volumes.into_iter().map(|volume| volume.volume).collect();
                self.refuse_of_vms(&volumes)?;
                self.ask_to_yield(&source, &name, how).await?;
                // N.B. What only this host has is noted before anything is forgotten.
                self.begin_former(&source).await?;
                let removed = self.give_up(volumes, how, Some(&source)).await;
                self.claim_given_up().await;
                let removed = removed?;
                self.end_yielded(&source).await?;
                Ok(removed)
            }
            Found::Kept(kept) => {
                if !self.is_promoted(&kept).await? {
                    return Err(refused("its standby was not promoted here").into());
                }
                if !self.is_whole(&kept) {
                    return Err(StandbyError::NotMade(name).into());
                }
                if kept.noted().has_source_yielded {
                    let host = self.hosts.name_of(kept.host());
                    return Err(refused(&format!(
                        "host \"{host}\" gives its own up, so these are the only ones"
                    ))
                    .into());
                }
                let volumes = kept.config.volumes.iter().map(|volume| volume.promoted.clone());
                let removed = self.give_up(volumes.collect(), how, None).await?;
                self.note_yielded(&kept).await?;
                Ok(removed)
            }
        }
    }

    /// Returns whether another host has the volumes of a standby as well, or has them alone.
    fn is_elsewhere_too(&self, source: &Source) -> bool {
        let is_replaced = self.permissions.permission(source.standby()) == Some(Permission::Replaced);
        is_replaced
            || source.shown().state == Some(State::Diverged)
            || self.permissions.is_replaced(source.standby())
    }

    /// Asks the host that has promoted a standby whether the source may give its volumes up: then they stay there.
    async fn ask_to_yield(
        &self,
        source: &Source,
        name: &str,
        how: api::YieldVolume,
    ) -> Result<(), RequestError> {
        let (host, standby) = (source.host(), source.standby());
        let host_name = self.hosts.name_of(host);
        let silence = match self.hosts.silence_of(host) {
            Some(silence) => silence,
            None => match self.asker.ask(host, standby, Ask::Yielding, Bytes::new()).await {
                Ok(_) => return Ok(()),
                Err(RequestError::Standby(StandbyError::Refused { reason, .. })) => {
                    let reason = format!("host \"{host_name}\" does not keep its volumes: {reason}");
                    return Err(StandbyError::NotYielded { name: name.to_owned(), reason }.into());
                }
                Err(error) => error.message(),
            },
        };
        if !how.unasked {
            let name = name.to_owned();
            return Err(StandbyError::MayBeNowhere { name, host: host_name, reason: silence }.into());
        }
        tracing::warn!(standby = %name, silence, "volumes are given up although the other host has not agreed");
        Ok(())
    }

    /// Agrees that the source of a promoted standby gives its volumes up. From then on they are not given up here.
    pub(super) async fn let_yield(&self, peer: HostId, line: &Line) -> Result<(), RequestError> {
        // N.B. Whichever of both hosts is the first to give them up, the other one learns of it before it does the same.
        let _changing = self.changing.lock().await;
        if let Some(departed) = self.departed_for(peer, line) {
            let refused = || RequestError::Invalid("it has given them up itself".to_owned());
            return if departed.is_yielded { Err(refused()) } else { Ok(()) };
        }
        let kept = self.kept_for(peer, line);
        let kept = kept.ok_or_else(|| RequestError::Invalid("it knows nothing of a promotion".to_owned()))?;
        if !self.is_promoted(&kept).await? {
            return Err(RequestError::Invalid("it has not promoted the standby".to_owned()));
        }
        if !self.is_whole(&kept) {
            return Err(StandbyError::NotMade(kept.config.name.clone()).into());
        }
        if let Some(gone) = kept.config.volumes.iter().find(|volume| !self.is_made(volume)) {
            let reason = format!(
                "it does not have the volume \"{}\" any more; if it gives its volumes up, complete that there: sterna volume yield",
                kept.name_here(&gone.name)
            );
            return Err(RequestError::Invalid(reason));
        }
        self.note_source_yields(&kept).await
    }

    /// Forgets volumes, by identity, and keeps their images. One that is not here any longer is left out.
    async fn give_up(
        self: &Arc<Self>,
        volumes: Vec<String>,
        how: api::YieldVolume,
        source: Option<&Source>,
    ) -> Result<Vec<api::RemovedVolume>, RequestError> {
        // N.B. All are checked before the first one is forgotten.
        let here = self.refuse_of_vms(&volumes)?;
        let how = api::RemoveVolume { force: how.force, keep_image: true, ..api::RemoveVolume::default() };
        let mut removed = Vec::new();
        for name in here {
            let note = async |record, stay| {
                if let Some(source) = source {
                    self.note_former(source, record, stay).await;
                }
            };
            removed.push(Arc::clone(&self.volume_orders).remove_after(name, how, note).await?);
        }
        Ok(removed)
    }

    /// Returns the names of those of the volumes that are here. Refuses if a VM needs one.
    fn refuse_of_vms(&self, volumes: &[String]) -> Result<Vec<String>, RequestError> {
        let here: Vec<String> = self.journal.read(|state| {
            let is_meant = |volume: &VolumeId| volumes.contains(&volume.to_string());
            let meant = state.volumes.iter().filter(|(volume, _)| is_meant(volume));
            meant.map(|(_, known)| known.record.name.clone()).collect()
        });
        here.iter().try_for_each(|name| self.volume_orders.refuse_of_vm(name))?;
        Ok(here)
    }

    /// Ends a standby whose volumes were given up at their source. The other host hears it if it can be reached.
    async fn end_yielded(self: &Arc<Self>, source: &Arc<Source>) -> Result<(), RequestError> {
        let (standby, host, id) = (source.standby(), source.host(), source.config().id);
        source.end();
        self.on_book(move |book| book.forget(Side::Source, &id)).await?;
        lock(&self.sources).remove(&standby);
        self.permissions.forget(standby);
        let this = Arc::clone(self);
        tokio::spawn(async move {
            let told = this.asker.ask(host, standby, Ask::Yielded, Bytes::new()).await;
            if let Err(error) = told {
                tracing::warn!(host = %this.hosts.name_of(host), error = %error.message(), "that host does not know yet that its promoted \
                    volumes are the only ones: turn the direction round there with sterna standby reprotect, or remove the standby");
            }
        });
        Ok(())
    }

    /// Notes durably that what was promoted here was given up: its source may serve again.
    async fn note_yielded(self: &Arc<Self>, kept: &Arc<Kept>) -> Result<(), RequestError> {
        match parse(&kept.config.id) {
            Some(standby) => self.delete_copy(standby, Left::Yielded).await,
            None => Ok(()),
        }
    }
}
