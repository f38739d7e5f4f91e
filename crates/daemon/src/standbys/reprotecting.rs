//! Turns the direction of a standby round, at the host that has promoted it: its former owner keeps the standby from then on.
//!
//! ```text
//!   promote ─► the chronicles refer to the former owner's copy, before the first write
//!   reprotect ─► record and life ─► Ask::Return ─► configuration of the source ─► the promoted standby is forgotten
//!                     the source's task: waits until that host is ready ─► adds what its images lack ─► first epoch
//! ```
//! Every step may be repeated. The identity of the new standby follows from that of the promoted one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chronicle::{BlockSize, MarkPolicy, StayId};
use migration::StayKey;
use migration::journal::{ImageFormat, ImageLocation, Place};
use migration::stay::Beginning;
use ring::digest::{SHA256, digest};
use standby::record::{OwnerRecord, StandbyRecord, Standing};
use standby::reprotection::owner_record;
use standby::{LifeId, StandbyId, Watermark};

use super::book::{CopyConfig, NamedVolume, Returns, Side, SourceConfig, hex, parse};
use super::frames::{Answered, Ask, AskedKeep, AskedReturn, AskedStandby, AskedVolume, Line, cleaned};
use super::making::Left;
use super::orders::{Found, Terms, terms_of};
use super::source::run::copy_of;
use super::{Kept, Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::host::blocking;
use crate::stores::path_text;
use crate::volumes::orders::create::random_bytes;

/// How long it is waited for a volume to be served.
const LANE_MAX: Duration = Duration::from_secs(5);

/// Returns the identity of the standby that turns the direction of a promoted one round.
pub(super) fn turned(standby: StandbyId) -> StandbyId {
    let hash = digest(&SHA256, &[b"sterna turns round ".as_slice(), &standby.0.to_le_bytes()].concat());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    StandbyId(u128::from_le_bytes(bytes))
}

impl Standbys {
    /// Makes the former owner of a promoted standby the host of a standby of the promoted volumes.
    pub(crate) async fn reprotect(
        self: Arc<Self>,
        name: String,
        order: api::ReprotectStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let terms = terms_of(order.every_seconds, order.rpo_seconds)?;
        let kept = match self.promoted_called(&name).await? {
            Ok(kept) => kept,
            // It was turned round before.
            Err(Found::Source(source)) if source.config().returns.is_some() => {
                return Ok(self.view(&Found::Source(source)).await);
            }
            Err(_) => {
                let reason = "it was not promoted here, so there is no direction to turn round; to order a standby: sterna standby add";
                return Err(StandbyError::NotTurned { name, reason: reason.to_owned() }.into());
            }
        };
        if !self.is_whole(&kept) {
            return Err(StandbyError::NotMade(name).into());
        }
        let config = self.turned_config(&kept, &order, terms).await?;
        let standby = parse(&config.id).unwrap_or(StandbyId(0));
        let asked = self.asked_return(&config).await?;
        let answer = self.asker.ask(kept.host(), standby, Ask::Return(asked), Bytes::new()).await?;
        let Answered::Returning { store, .. } = answer else {
            return Err(RequestError::Internal("the other host has answered another order".to_owned()));
        };
        let config = SourceConfig { store: cleaned(&store), ..config };
        let written = config.clone();
        self.on_book(move |book| book.write_config(Side::Source, &written.id, &written)).await?;
        let known = lock(&self.sources).get(&standby).cloned();
        let source = known
            .or_else(|| self.begin_source(config))
            .ok_or_else(|| RequestError::Internal("a standby has no identity".to_owned()))?;
        self.end_promoted(&kept).await?;
        Ok(self.view(&Found::Source(source)).await)
    }

    /// Returns the promoted standby of a name, or what else has it.
    async fn promoted_called(&self, name: &str) -> Result<Result<Arc<Kept>, Found>, RequestError> {
        let copies: Vec<_> = lock(&self.copies).values().cloned().collect();
        let mut promoted = Vec::new();
        for kept in copies {
            if self.is_called(&Found::Kept(Arc::clone(&kept)), name) && self.is_promoted(&kept).await? {
                promoted.push(kept);
            }
        }
        if promoted.len() > 1 {
            let known: Vec<_> =
                promoted.iter().map(|kept| self.name_of(&Found::Kept(Arc::clone(kept)))).collect();
            return Err(StandbyError::Ambiguous { name: name.to_owned(), known: known.join(", ") }.into());
        }
        promoted.pop().map_or_else(|| self.find(name).map(Err), |kept| Ok(Ok(kept)))
    }

    /// Returns the configuration of the source, and makes its record durable.
    async fn turned_config(
        &self,
        kept: &Kept,
        order: &api::ReprotectStandby,
        terms: Terms,
    ) -> Result<SourceConfig, RequestError> {
        let copy = kept.present();
        let former = parse(&copy.id).unwrap_or(StandbyId(0));
        let (standby, id) = (turned(former), copy.id.clone());
        let life = LifeId(u128::from_le_bytes(random_bytes()));
        let promoted = self.on_book(move |book| {
            let turned = hex(standby);
            if book.record::<OwnerRecord>(Side::Source, &turned)?.is_none() {
                book.write_record(Side::Source, &turned, &owner_record(standby, life))?;
            }
            book.record::<StandbyRecord>(Side::Copy, &id)
        });
        let Some(Standing::Promoted { at }) = promoted.await?.map(|record| record.standing) else {
            return Err(RequestError::Internal("a promoted standby has no record of that".to_owned()));
        };
        let mut volumes = Vec::new();
        for volume in &copy.volumes {
            let here = self.journal.read(|state| {
                let mut known = state.volumes.values();
                let known = known.find(|known| known.record.volume.to_string() == volume.promoted)?;
                Some(known.record.name.clone())
            });
            let name = here.ok_or_else(|| {
                let reason = format!(
                    "its volume \"{}\" is not at this host any more; move it back first",
                    volume.name
                );
                StandbyError::NotTurned { name: copy.name.clone(), reason }
            })?;
            volumes.push(NamedVolume { volume: volume.promoted.clone(), name });
        }
        let points = order.keep;
        Ok(SourceConfig {
            id: hex(standby),
            name: copy.name,
            host: copy.noted.host,
            store: String::new(),
            volumes,
            every_ms: terms.every_ms,
            rpo_ms: terms.rpo_ms,
            bandwidth: order.bandwidth_bytes_per_second.filter(|rate| *rate > 0),
            keep: points.map_or(copy.keep, |points| super::book::Keep {
                last: points.last,
                hourly: points.hourly,
                daily: points.daily,
            }),
            is_paused: false,
            if_silent: order.if_silent.map(super::orders::if_silent),
            returns: Some(Returns {
                former: copy.id,
                life: format!("{:032x}", at.life.0),
                epoch: at.epoch.0,
            }),
            leaving_for: None,
            came_unix_ms: None,
        })
    }

    async fn asked_return(&self, config: &SourceConfig) -> Result<AskedReturn, RequestError> {
        let (id, journal) = (config.id.clone(), self.journal.clone());
        let record = self.on_book(move |book| book.record::<OwnerRecord>(Side::Source, &id)).await?;
        asked_return(config, record.as_ref(), &journal)
            .ok_or_else(|| RequestError::Internal("a standby has no record of its direction".to_owned()))
    }

    /// Forgets a promoted standby whose direction is turned round: its source is here.
    async fn end_promoted(self: &Arc<Self>, kept: &Kept) -> Result<(), RequestError> {
        match parse(&kept.config.id) {
            Some(former) => self.delete_copy(former, Left::Nothing).await,
            None => Ok(()),
        }
    }

    /// Forgets promoted standbys whose direction was turned round when a restart interrupted that.
    pub(super) fn finish_turning(self: &Arc<Self>) {
        let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
        let formers = sources.iter().filter_map(|source| parse(&source.config().returns?.former));
        for former in formers {
            let Some(kept) = lock(&self.copies).get(&former).cloned() else { continue };
            let this = Arc::clone(self);
            tokio::spawn(async move {
                let _changing = this.changing.lock().await;
                if let Err(error) = this.end_promoted(&kept).await {
                    tracing::warn!(error = %error.message(), "a standby whose direction was turned round is not forgotten yet");
                }
            });
        }
    }

    /// Lets the chronicle of a promoted volume know from its first write on what the former owner's image lacks. Nothing depends on
    /// its success but the number of bytes that are sent when the direction is turned round.
    pub(super) async fn refer_to_former(
        &self,
        config: &CopyConfig,
        store: &str,
        promoted: &str,
        path: &Path,
    ) {
        let Some(former) = parse(&config.id) else { return };
        let Ok(place) = path_text(path).map(Place::File) else { return };
        let image = ImageLocation { store: store.to_owned(), place, format: ImageFormat::Raw };
        let size_bytes = std::fs::metadata(path).map_or(0, |found| found.len());
        let of = copy_of(turned(former), super::source::host_of(&config.noted.host));
        let key = StayKey { volume: super::promotion::identity(promoted), stay: StayId::Made };
        let block_size = BlockSize::DEFAULT;
        let regions = MarkPolicy::regions_for(block_size, size_bytes);
        let beginning = Beginning { id: StayId::Made, block_size, size_bytes, regions };
        let chronicles = self.chronicles.clone();
        let begun = blocking(move || {
            let begun = chronicles.begin_with_copy(key, &image, beginning, of);
            begun.map_err(|error| RequestError::Internal(error.to_string()))
        });
        if let Err(error) = begun.await {
            tracing::warn!(standby = %config.name, error = %error.message(), "it is not recorded what the former owner lacks: if its images \
                become a standby, everything is copied");
        }
    }

    /// Forgets what the former owner's images lack: their direction is not turned round any more.
    pub(super) async fn forget_former_copy(&self, kept: &Kept) {
        let Some(former) = parse(&kept.config.id) else { return };
        for volume in kept.config.volumes.iter().filter(|volume| self.is_made(volume)) {
            let name = kept.name_here(&volume.name);
            // One that is not served soon stays known: it is only longer marked for.
            if let Ok(Ok(lane)) = tokio::time::timeout(LANE_MAX, self.volumes.lane(&name)).await {
                let _ = lane.forget_copy(copy_of(turned(former), kept.host())).await;
            }
        }
    }

    /// Notes that the source of a standby that was promoted here has given its volumes up.
    pub(super) async fn hear_yielded(
        self: &Arc<Self>,
        peer: migration::HostId,
        line: &Line,
    ) -> Result<(), RequestError> {
        if let Some(departed) = self.departed_for(peer, line) {
            let Some(standby) = parse(&departed.id) else { return Ok(()) };
            return self.forget_departed(standby, departed.id).await;
        }
        let Some(kept) = self.kept_for(peer, line) else { return Ok(()) };
        if !self.is_promoted(&kept).await? {
            return Err(RequestError::Invalid("it was not promoted here".to_owned()));
        }
        self.note_source_yields(&kept).await
    }

    /// Makes durable that the source gives its volumes up, so that they are not given up here.
    pub(super) async fn note_source_yields(&self, kept: &Kept) -> Result<(), RequestError> {
        self.note(kept, |noted| noted.has_source_yielded = true).await
    }
}

/// Returns the order to a former owner; `None`: the direction is not turned round.
pub(super) fn asked_return(
    config: &SourceConfig,
    record: Option<&OwnerRecord>,
    journal: &crate::journal::Journal,
) -> Option<AskedReturn> {
    let returns = config.returns.as_ref()?;
    let promoted = Watermark {
        standby: parse(&returns.former)?,
        life: LifeId(u128::from_str_radix(&returns.life, 16).ok()?),
        epoch: chronicle::Epoch(returns.epoch),
    };
    let mut volumes = Vec::new();
    for volume in &config.volumes {
        let identity = super::promotion::identity(&volume.volume);
        let size_bytes = journal.read(|state| Some(state.volumes.get(&identity)?.record.size_bytes))?;
        volumes.push(AskedVolume { volume: identity.0, name: volume.name.clone(), size_bytes });
    }
    let keep = AskedKeep { last: config.keep.last, hourly: config.keep.hourly, daily: config.keep.daily };
    let asked = AskedStandby {
        standby: parse(&config.id)?,
        name: config.name.clone(),
        store: String::new(),
        keep,
        volumes,
    };
    Some(AskedReturn { asked, promoted, life: record?.life })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_direction_that_is_turned_again_and_again_never_has_an_identity_twice() {
        let mut seen = std::collections::BTreeSet::new();
        let mut standby = StandbyId(7);
        for _ in 0..1000 {
            assert!(seen.insert(standby));
            standby = turned(standby);
        }
        assert_eq!(turned(StandbyId(7)), turned(StandbyId(7)));
    }
}
