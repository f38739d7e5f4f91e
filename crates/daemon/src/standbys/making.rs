//! What another host asks: to make room for its standby here, to delete it, or to keep a description of its VM.

use std::sync::Arc;

use lane::capture::BLOCK_BYTES;
use migration::HostId;
use standby::StandbyId;
use standby::record::{StandbyRecord, Standing};

use super::book::{CopiedVolume, CopyConfig, Keep, Noted, Side, Why, hex, parse};
use super::copy::{Ending, delete_files};
use super::frames::{Answered, Ask, AskedStandby, Line, is_about};
use super::orders::Found;
use super::source::host_of;
use super::{Kept, Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::files::descriptors;
use crate::host::blocking;
use crate::names;
use crate::peers::channel::VOLUMES_MAX;
use crate::volumes::orders::create::random_bytes;

/// The largest number of standbys that one host may keep here.
const STANDBYS_MAX: usize = 256;
/// The largest number of recovery points of a kind.
pub(super) const POINTS_MAX: u32 = 1000;

impl Standbys {
    /// Carries out what another host asks.
    pub(super) async fn asked(
        self: &Arc<Self>,
        peer: HostId,
        line: &Line,
        ask: Ask,
        payload: &[u8],
    ) -> Result<Answered, RequestError> {
        match ask {
            Ask::Make(asked) => self.make(peer, line, asked).await,
            Ask::Remove { knows_promotion } => {
                self.remove_for(peer, line, knows_promotion).await.map(|()| Answered::Done)
            }
            Ask::Vm(piece) => self.keep_vm(peer, line, piece, payload).await,
            Ask::Vms(names) => self.keep_only(peer, line, names).await,
            Ask::Leaving(to) => self.let_leave(peer, line, to).await.map(|()| Answered::Done),
            Ask::Staying => self.let_stay(peer, line).await.map(|()| Answered::Done),
            Ask::Follow(followed) => self.become_source(peer, line, *followed).await.map(|()| Answered::Done),
            Ask::Arrived => self.let_arrive(peer, line).await.map(|()| Answered::Done),
            Ask::Yielding => self.let_yield(peer, line).await.map(|()| Answered::Done),
            Ask::Yielded => self.hear_yielded(peer, line).await.map(|()| Answered::Done),
            Ask::Return(order) => self.return_to(peer, line, order).await,
            Ask::Lacking { volume, from } => self.tell_lacking(peer, line, volume, from).await,
            Ask::Compare { volume, first } => self.compare(peer, line, volume, first, payload).await,
        }
    }

    async fn make(
        self: &Arc<Self>,
        peer: HostId,
        line: &Line,
        asked: AskedStandby,
    ) -> Result<Answered, RequestError> {
        let invalid = |text: &str| RequestError::Invalid(text.to_owned());
        let own = self.peers.own();
        if !is_about(line.channel, asked.standby, peer, own) {
            return Err(invalid("the standby's identity is not that of its channel"));
        }
        if !self.hosts.is_paired(peer) {
            return Err(invalid("the hosts are not paired"));
        }
        if let Some(kept) = self.kept_for(peer, line) {
            return Ok(Answered::Made { store: kept.config.store.clone() });
        }
        self.draining.refuse_new()?;
        if lock(&self.copies).values().filter(|kept| kept.host() == peer).count() >= STANDBYS_MAX {
            return Err(RequestError::Invalid(format!(
                "it keeps {STANDBYS_MAX} standbys of this host, and no more"
            )));
        }
        check(&asked)?;
        self.replace_empty(peer, &asked).await?;
        let files = asked.volumes.len();
        blocking(move || descriptors::require_for_standby(files as u64)).await?;
        let store = self.stores.choose(Some(asked.store.as_str()).filter(|store| !store.is_empty()))?;
        let (store, name) = (store.name().to_owned(), asked.name.clone());
        self.folder_of(&store).map_err(RequestError::Invalid)?;
        self.stores.get(&store)?.require_writable()?;
        for volume in &asked.volumes {
            if self.volumes.service(&volume.name).is_some() {
                return Err(RequestError::VolumeExists(volume.name.clone()));
            }
        }
        if self.has_promoted(peer, &asked) {
            let own = self.hosts.describe_identity().map(|own| own.name).unwrap_or_default();
            return Err(StandbyError::PromotedThere(own).into());
        }
        let AskedStandby { standby, keep, volumes, .. } = asked;
        let copied = volumes.into_iter().map(|volume| CopiedVolume {
            volume: migration::VolumeId(volume.volume).to_string(),
            name: volume.name,
            size_bytes: volume.size_bytes,
            promoted: format!("{:032x}", u128::from_le_bytes(random_bytes())),
        });
        let config = CopyConfig {
            id: hex(standby),
            name,
            store: store.clone(),
            volumes: copied.collect(),
            keep: Keep {
                last: keep.last.min(POINTS_MAX),
                hourly: keep.hourly.min(POINTS_MAX),
                daily: keep.daily.min(POINTS_MAX),
            },
            noted: Noted::of(peer.to_string()),
            is_removed: false,
            is_yielded: false,
        };
        let written = config.clone();
        if !self.on_book(move |book| book.add_config(Side::Copy, &written.id, &written)).await? {
            return Err(invalid("the standby's identity is not new"));
        }
        tracing::info!(standby = %config.name, host = %self.hosts.name_of(peer), %store, "keeps a standby");
        self.keep(config)?;
        Ok(Answered::Made { store })
    }

    /// Returns the name of a standby of this volume that is kept here.
    pub(crate) fn name_of_kept(&self, volume: migration::VolumeId) -> Option<String> {
        let volume = volume.to_string();
        let copies = lock(&self.copies);
        let mut kept = copies.values().map(|kept| &kept.config);
        let has = |config: &&CopyConfig| config.volumes.iter().any(|copied| copied.volume == volume);
        kept.find(has).map(|config| config.name.clone())
    }

    /// Returns whether this host has a volume of a host because a copy of it was promoted here.
    fn has_promoted(&self, peer: HostId, asked: &AskedStandby) -> bool {
        let kept: Vec<CopyConfig> = {
            let copies = lock(&self.copies);
            let copies = copies.values().filter(|kept| kept.host() == peer).map(|kept| kept.config.clone());
            let departed = lock(&self.departed);
            let departed = departed.values().filter(|config| host_of(&config.noted.host) == peer);
            copies.chain(departed.cloned()).collect()
        };
        let is_asked = |volume: &&CopiedVolume| {
            asked.volumes.iter().any(|asked| migration::VolumeId(asked.volume).to_string() == volume.volume)
        };
        kept.iter()
            .flat_map(|config| config.volumes.iter().filter(is_asked))
            .any(|volume| self.is_made(volume))
    }

    /// Removes a standby because its source asks. A promotion has to be complete, and known there: its volumes are at both hosts.
    async fn remove_for(
        self: &Arc<Self>,
        peer: HostId,
        line: &Line,
        knows_promotion: bool,
    ) -> Result<(), RequestError> {
        let own = || self.hosts.describe_identity().map(|own| own.name).unwrap_or_default();
        let unknown = || StandbyError::PromotedThere(own());
        if let Some(departed) = self.departed_for(peer, line) {
            if !knows_promotion && !departed.is_yielded {
                return Err(unknown().into());
            }
            let Some(standby) = parse(&departed.id) else { return Ok(()) };
            return self.forget_departed(standby, departed.id).await;
        }
        let Some(kept) = self.kept_for(peer, line) else { return Ok(()) };
        if self.is_promoted(&kept).await? {
            if !knows_promotion {
                return Err(unknown().into());
            }
            if !self.is_whole(&kept) {
                return Err(StandbyError::NotMade(kept.config.name.clone()).into());
            }
        }
        match parse(&kept.config.id) {
            Some(standby) => self.delete_copy(standby, Left::Nothing).await,
            None => Ok(()),
        }
    }

    /// Forgets that a standby was promoted and removed here, because its source knows.
    pub(super) async fn forget_departed(&self, standby: StandbyId, id: String) -> Result<(), RequestError> {
        self.on_book(move |book| book.forget(Side::Copy, &id)).await?;
        lock(&self.departed).remove(&standby);
        Ok(())
    }

    /// Deletes standbys of these volumes that never had everything: the answer about them was lost, and they were ordered again.
    async fn replace_empty(self: &Arc<Self>, peer: HostId, asked: &AskedStandby) -> Result<(), RequestError> {
        let is_of = |kept: &Kept| {
            let volumes = asked.volumes.iter().map(|volume| migration::VolumeId(volume.volume).to_string());
            kept.host() == peer
                && volumes
                    .into_iter()
                    .any(|volume| kept.config.volumes.iter().any(|known| known.volume == volume))
        };
        let former: Vec<_> = lock(&self.copies).values().filter(|kept| is_of(kept)).cloned().collect();
        for kept in former {
            let name = self.name_of(&Found::Kept(Arc::clone(&kept)));
            let record = self.book()?.record::<StandbyRecord>(Side::Copy, &kept.config.id);
            let is_empty = record.is_ok_and(|record| {
                record.is_none_or(|record| {
                    record.standing == Standing::Receiving
                        && record.watermark.is_none()
                        && record.points.is_empty()
                        && record.sealed.is_empty()
                })
            });
            match parse(&kept.config.id).filter(|_| is_empty) {
                Some(standby) => self.delete_copy(standby, Left::Nothing).await?,
                None => {
                    return Err(RequestError::Invalid(format!(
                        "it has a standby of these volumes already; to delete that, there: sterna standby remove {name} --force"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Deletes a standby that is kept here, with all files.
    pub(super) async fn delete_copy(
        self: &Arc<Self>,
        standby: StandbyId,
        left: Left,
    ) -> Result<(), RequestError> {
        let kept = lock(&self.copies).get(&standby).cloned();
        let Some(kept) = kept else { return Ok(()) };
        self.end_test_of(&kept, Why::Removed).await?;
        let _noting = self.noting.lock().await;
        lock(&self.copies).remove(&standby);
        // N.B. Before its files are deleted: it would make some of them anew.
        kept.copy.end(Ending::Removed).await;
        let (book, id, name) = (self.book()?.clone(), kept.config.id.clone(), kept.config.name.clone());
        let store = self.folder_of(&kept.config.store);
        let is_yielded = left == Left::Yielded;
        let departed = CopyConfig { is_removed: true, is_yielded, ..kept.present() };
        if left != Left::Nothing {
            lock(&self.departed).insert(standby, departed.clone());
        }
        blocking(move || {
            let forgotten = match left {
                Left::Nothing => book.forget(Side::Copy, &id),
                Left::Word | Left::Yielded => {
                    let written = book.write_config(Side::Copy, &id, &departed);
                    written.and_then(|()| book.forget_vms(&id)).and_then(|()| book.forget_test(&id))
                }
            };
            forgotten.map_err(|error| RequestError::Internal(error.to_string()))?;
            if let Ok(store) = store
                && let Err(error) = delete_files(&store, &id)
            {
                tracing::warn!(standby = %name, %error, "files of a removed standby are left over");
            }
            Ok(())
        })
        .await
    }
}

/// The trace that a deleted standby leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    /// That it was promoted, for its source.
    Word,
    /// That it was promoted, and given up.
    Yielded,
}

/// Checks what another host has sent.
pub(super) fn check(asked: &AskedStandby) -> Result<(), RequestError> {
    let named = |name: &str| {
        names::check(name).map_err(|reason| RequestError::Name { name: words::clean(name), reason })
    };
    named(&asked.name)?;
    if !(1..=VOLUMES_MAX).contains(&asked.volumes.len()) {
        return Err(RequestError::Invalid(format!("a standby has one volume to {VOLUMES_MAX}")));
    }
    for (index, volume) in asked.volumes.iter().enumerate() {
        named(&volume.name)?;
        if volume.size_bytes == 0
            || volume.size_bytes % BLOCK_BYTES != 0
            || volume.size_bytes > i64::MAX as u64
        {
            return Err(RequestError::Invalid(format!(
                "{} bytes are no size for a standby",
                volume.size_bytes
            )));
        }
        if asked.volumes[..index].iter().any(|other| other.name == volume.name) {
            return Err(RequestError::Invalid("two volumes have one name".to_owned()));
        }
    }
    Ok(())
}
