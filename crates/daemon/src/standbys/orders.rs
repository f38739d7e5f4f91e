//! Orders of administrators about standbys.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lane::capture::BLOCK_BYTES;
use migration::HostId;
use standby::StandbyId;
use standby::asking::{IfSilent, Permission};

use super::book::{Keep, NamedVolume, Side, SourceConfig, hex};
pub(super) use super::frames::Terms;
use super::frames::{ANSWER_MAX, Answered, Ask, AskedKeep, AskedStandby, AskedVolume, cleaned};
use super::making::Left;
use super::source::Source;
use super::source::run::copy_of;
use super::{Kept, Standbys, lock};
use crate::error::{RequestError, SnapshotError, StandbyError};
use crate::peers::channel::VOLUMES_MAX;
use crate::volumes::orders::create::random_bytes;

/// Seconds between two cuts if the order says nothing.
const EVERY_S: f64 = 10.0;
/// The shortest interval in seconds.
const EVERY_MIN_S: f64 = 1.0;
/// Time between two looks whether a comparison has begun.
const CHECK_LOOK: Duration = Duration::from_millis(20);
const DAY_S: f64 = 86_400.0;
/// How long a host that has not answered is asked to remove the standby again.
const TAKE_BACK_MAX: Duration = Duration::from_secs(24 * 3600);

/// A standby of either role.
pub(super) enum Found {
    Source(Arc<Source>),
    Kept(Arc<Kept>),
}

impl Standbys {
    /// Orders a standby.
    pub(crate) async fn add(self: Arc<Self>, order: api::NewStandby) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let peer = self
            .hosts
            .find(&order.host)
            .ok_or_else(|| crate::hosts::HostsError::NotFound(order.host.clone()))?;
        let host = HostId(peer.id.0);
        let (name, volumes) = self.volumes_of(&order.volumes)?;
        if let Some(name) = self.journal.read(|state| state.snapshot_among(&volumes)) {
            return Err(SnapshotError::Stays(name.clone()).into());
        }
        let asked = self.asked_volumes(&volumes)?;
        if let Some(existing) = self.sources_of(host).find(|source| {
            source.config().volumes.iter().any(|known| asked.iter().any(|volume| volume.name == known.name))
        }) {
            let (volume, host) = (volumes.first().cloned().unwrap_or_default(), order.host);
            let name = self.name_of(&Found::Source(existing));
            return Err(StandbyError::Exists { volume, host, name }.into());
        }
        let Terms { every_ms, rpo_ms } = terms_of(order.every_seconds, order.rpo_seconds)?;
        let points = order.keep.unwrap_or(api::KeepPoints::DEFAULT);
        let standby = StandbyId(u128::from_le_bytes(random_bytes()));
        let keep = Keep { last: points.last, hourly: points.hourly, daily: points.daily };
        let ask = AskedStandby {
            standby,
            name: name.clone(),
            store: order.store.unwrap_or_default(),
            keep: AskedKeep { last: keep.last, hourly: keep.hourly, daily: keep.daily },
            volumes: asked.clone(),
        };
        let made = self.asker.ask(host, standby, Ask::Make(ask), Bytes::new()).await;
        if let Err(RequestError::Standby(StandbyError::NoAnswer { .. })) = made {
            // It may have made it, or may still do that.
            tokio::spawn(Arc::clone(&self).take_back(host, standby));
        }
        let Answered::Made { store } = made? else {
            return Err(RequestError::Internal("the other host has answered another order".to_owned()));
        };
        let config = SourceConfig {
            id: hex(standby),
            name,
            host: host.to_string(),
            store: cleaned(&store),
            volumes: asked
                .into_iter()
                .map(|volume| NamedVolume {
                    volume: migration::VolumeId(volume.volume).to_string(),
                    name: volume.name,
                })
                .collect(),
            every_ms,
            rpo_ms,
            bandwidth: order.bandwidth_bytes_per_second.filter(|rate| *rate > 0),
            keep,
            is_paused: false,
            if_silent: order.if_silent.map(if_silent),
            returns: None,
            leaving_for: None,
            came_unix_ms: None,
        };
        if let Err(error) = self.write_source(config.clone()).await {
            // The other host keeps nothing for a standby that is in no book.
            let _ = self.asker.ask(host, standby, Ask::Remove { knows_promotion: false }, Bytes::new()).await;
            return Err(error);
        }
        let source = self
            .begin_source(config)
            .ok_or_else(|| RequestError::Internal("a standby has no identity".to_owned()))?;
        Ok(self.view(&Found::Source(source)).await)
    }

    /// Has the other host delete a standby that was asked for and that nobody waits for any longer.
    async fn take_back(self: Arc<Self>, host: HostId, standby: StandbyId) {
        let begun = Instant::now();
        while begun.elapsed() < TAKE_BACK_MAX {
            tokio::select! {
                () = self.stopping.begins() => return,
                () = tokio::time::sleep(ANSWER_MAX) => {}
            }
            let remove = Ask::Remove { knows_promotion: false };
            if self.asker.ask(host, standby, remove, Bytes::new()).await.is_ok() {
                return;
            }
        }
        tracing::warn!(host = %self.hosts.name_of(host), "that host may keep a standby that nobody has ordered; look there: sterna standby \
            list");
    }

    /// Refuses to remove a volume that has a standby, unless it is forced.
    pub(crate) fn refuse_removal(&self, volume: &str, how: api::RemoveVolume) -> Result<(), RequestError> {
        let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
        let has = |source: &&Arc<Source>| {
            let is_ours = self.volumes.service(volume).is_some();
            is_ours && source.config().volumes.iter().any(|known| known.name == volume)
        };
        match sources.iter().find(has) {
            Some(source) if !how.force => {
                let name = self.name_of(&Found::Source(Arc::clone(source)));
                Err(StandbyError::HasStandby { volume: volume.to_owned(), name }.into())
            }
            _ => Ok(()),
        }
    }

    /// Changes a standby at its source.
    pub(crate) async fn set(
        self: Arc<Self>,
        name: String,
        change: api::SetStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let Found::Source(source) = self.find(&name)? else { return Err(StandbyError::NotHere(name).into()) };
        if self.is_exporting(&source) {
            return Err(StandbyError::Exporting(name).into());
        }
        let config = changed(source.config(), &change)?;
        self.write_source(config.clone()).await?;
        self.permissions.know(config.clone());
        source.set(config);
        Ok(self.view(&Found::Source(source)).await)
    }

    /// Has all blocks of a standby compared with those of its volumes, which are here. One comparison at a time.
    pub(crate) async fn check(self: Arc<Self>, name: String) -> Result<api::Standby, RequestError> {
        let found = self.find(&name)?;
        let source = match &found {
            Found::Source(source) => source,
            Found::Kept(_) => return Err(StandbyError::NotHere(name).into()),
        };
        let shown = source.shown();
        if self.is_exporting(source) {
            return Err(StandbyError::Exporting(name).into());
        }
        if shown.group.is_none() {
            let reason = shown.reason.unwrap_or_else(|| "its volumes are not served".to_owned());
            return Err(StandbyError::NotChecked { name, reason }.into());
        }
        let last = |source: &Source| source.shown().compared.and_then(|compared| compared.last);
        let before = last(source).map(|last| last.begun_ms);
        source.check(true);
        // The task begins it, or has ended meanwhile.
        let begun = async {
            while last(source).is_none_or(|last| Some(last.begun_ms) == before && last.ended_ms.is_some()) {
                tokio::time::sleep(CHECK_LOOK).await;
            }
        };
        if tokio::time::timeout(ANSWER_MAX, begun).await.is_err() {
            let reason = "it has not begun; sterna standby show says what it waits for".to_owned();
            return Err(StandbyError::NotChecked { name, reason }.into());
        }
        Ok(self.view(&found).await)
    }

    /// Removes a standby: at both hosts if it is given at the source, else here alone.
    pub(crate) async fn remove(
        self: Arc<Self>,
        name: String,
        how: api::RemoveStandby,
    ) -> Result<api::Standby, RequestError> {
        let _changing = self.changing.lock().await;
        let found = self.find(&name)?;
        let was = self.view(&found).await;
        match found {
            Found::Kept(kept) => {
                let is_connected = self.hosts.silence_of(kept.host()).is_none();
                let is_over = matches!(
                    was.state,
                    api::StandbyState::Promoted | api::StandbyState::Diverged | api::StandbyState::Used
                );
                if was.state == api::StandbyState::Diverged && !how.force {
                    return Err(diverged(name, was));
                }
                if let Some(migration) = Self::look(&kept).await.lent_to.filter(|_| !how.force) {
                    let migration = migration::MigrationId(migration).to_string();
                    return Err(StandbyError::Lent { name, migration }.into());
                }
                if is_connected && !how.force && !is_over {
                    return Err(StandbyError::KeptFor { name, host: self.hosts.name_of(kept.host()) }.into());
                }
                if !how.force && !is_over {
                    return Err(StandbyError::LastCopy(name).into());
                }
                if was.state == api::StandbyState::Promoted && !how.force && !self.is_whole(&kept) {
                    return Err(StandbyError::NotMade(name).into());
                }
                if let Some(standby) = super::parse(&kept.config.id) {
                    // N.B. The promoted state is asked of its record: `was` may be what a busy keeper has not said.
                    let is_promoted = self.is_promoted(&kept).await?;
                    let is_heard = kept.noted().has_source_yielded;
                    let left = if is_promoted && !is_heard { Left::Word } else { Left::Nothing };
                    if is_promoted {
                        self.forget_former_copy(&kept).await;
                    }
                    self.delete_copy(standby, left).await?;
                }
            }
            Found::Source(source) => {
                let (standby, host) = (source.standby(), source.host());
                match self.permissions.permission(standby) {
                    // N.B. Without it the volumes would be served, at both hosts.
                    Some(Permission::Replaced) => {
                        let volume = was.volumes.first().cloned().unwrap_or_default();
                        return Err(StandbyError::Replaced { name, volume, host: was.host }.into());
                    }
                    _ if was.state == api::StandbyState::Diverged && !how.force => {
                        return Err(diverged(name, was));
                    }
                    Some(Permission::Asking) if !how.force => {
                        return Err(StandbyError::Silent { name, host: was.host }.into());
                    }
                    _ => {}
                }
                let knows_promotion =
                    matches!(was.state, api::StandbyState::Promoted | api::StandbyState::Diverged);
                match self.asker.ask(host, standby, Ask::Remove { knows_promotion }, Bytes::new()).await {
                    Ok(_) => {}
                    Err(_) if how.force => {}
                    Err(RequestError::Standby(StandbyError::NoAnswer { host, .. })) => {
                        return Err(StandbyError::Silent { name, host }.into());
                    }
                    Err(error) => return Err(error),
                }
                self.end_export(&source);
                source.end();
                lock(&self.sources).remove(&standby);
                self.permissions.forget(standby);
                let config = source.config();
                let id = config.id.clone();
                self.on_book(move |book| book.forget(Side::Source, &id)).await?;
                for volume in &config.volumes {
                    if let Ok(lane) = self.volumes.lane(&volume.name).await {
                        // A copy that stays known is only longer marked for.
                        let _ = lane.forget_copy(copy_of(standby, host)).await;
                    }
                }
            }
        }
        Ok(was)
    }

    pub(super) async fn write_source(&self, config: SourceConfig) -> Result<(), RequestError> {
        self.on_book(move |book| book.write_config(Side::Source, &config.id, &config)).await
    }

    /// Returns the name of a group, and its volumes: those named, or those of the one VM that is named.
    fn volumes_of(&self, named: &[String]) -> Result<(String, Vec<String>), RequestError> {
        let Some(first) = named.first() else {
            return Err(RequestError::Invalid("name a volume, several volumes, or a VM".to_owned()));
        };
        if let ([vm], Ok(known)) = (named, self.vms.get(first))
            && self.volumes.service(vm).is_none()
        {
            return Ok((vm.clone(), known.volumes));
        }
        Ok((first.clone(), named.to_vec()))
    }

    fn asked_volumes(&self, volumes: &[String]) -> Result<Vec<AskedVolume>, RequestError> {
        if !(1..=VOLUMES_MAX).contains(&volumes.len()) {
            return Err(RequestError::Invalid(format!("a standby has one volume to {VOLUMES_MAX}")));
        }
        let mut asked: Vec<AskedVolume> = Vec::new();
        for name in volumes {
            let found = self.journal.read(|state| {
                let known = state.volumes.values().find(|known| known.record.name == *name)?;
                Some((known.record.volume, known.record.size_bytes, known.record.block_size_bytes))
            });
            let (volume, size_bytes, block_bytes) =
                found.ok_or_else(|| RequestError::VolumeNotFound(name.clone()))?;
            let unsuitable = |reason: String| StandbyError::Unsuitable { volume: name.clone(), reason };
            if !size_bytes.is_multiple_of(BLOCK_BYTES) {
                let next = size_bytes.next_multiple_of(BLOCK_BYTES);
                let reason = format!(
                    "its size is no multiple of {BLOCK_BYTES} bytes; sterna volume resize {name} {next}"
                );
                return Err(unsuitable(reason).into());
            }
            if u64::from(block_bytes) != BLOCK_BYTES {
                return Err(
                    unsuitable(format!("its writes are recorded in blocks of {block_bytes} bytes")).into()
                );
            }
            if asked.iter().any(|other| other.name == *name) {
                return Err(RequestError::Invalid(format!("volume \"{name}\" is named twice")));
            }
            asked.push(AskedVolume { volume: volume.0, name: name.clone(), size_bytes });
        }
        Ok(asked)
    }

    pub(super) fn sources_of(&self, host: HostId) -> impl Iterator<Item = Arc<Source>> + use<> {
        let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
        sources.into_iter().filter(move |source| source.host() == host)
    }
}

/// Says what to do about a standby whose volumes both hosts serve.
fn diverged(name: String, was: api::Standby) -> RequestError {
    let volume = was.volumes.into_iter().next().unwrap_or_default();
    StandbyError::Diverged { name, volume, host: was.host }.into()
}

/// Returns the interval of a new standby, and the age up to which it is current.
pub(super) fn terms_of(every_seconds: Option<f64>, rpo_seconds: Option<f64>) -> Result<Terms, RequestError> {
    let every_ms = milliseconds(every_seconds.unwrap_or(EVERY_S), EVERY_MIN_S, DAY_S, "the interval")?;
    let rpo_s = rpo_seconds.unwrap_or(default_rpo_ms(every_ms) as f64 / 1000.0);
    let rpo_ms = milliseconds(rpo_s, every_ms as f64 / 1000.0, 30.0 * DAY_S, "the age")?;
    Ok(Terms { every_ms, rpo_ms })
}

/// Returns a configuration with what an order changes.
fn changed(mut config: SourceConfig, change: &api::SetStandby) -> Result<SourceConfig, RequestError> {
    if let Some(seconds) = change.every_seconds {
        let is_default = config.rpo_ms == default_rpo_ms(config.every_ms);
        config.every_ms = milliseconds(seconds, EVERY_MIN_S, DAY_S, "the interval")?;
        if is_default {
            config.rpo_ms = default_rpo_ms(config.every_ms);
        }
    }
    if let Some(seconds) = change.rpo_seconds {
        config.rpo_ms = milliseconds(seconds, config.every_ms as f64 / 1000.0, 30.0 * DAY_S, "the age")?;
    }
    if config.rpo_ms < config.every_ms {
        let seconds = config.every_ms as f64 / 1000.0;
        return Err(RequestError::Invalid(format!(
            "the standby may be {} s old, less than the interval: add --rpo, with {seconds} s at least",
            config.rpo_ms as f64 / 1000.0
        )));
    }
    if let Some(rate) = change.bandwidth_bytes_per_second {
        config.bandwidth = Some(rate).filter(|rate| *rate > 0);
    }
    config.is_paused = change.paused.unwrap_or(config.is_paused);
    config.if_silent = change.if_silent.map(if_silent).or(config.if_silent);
    Ok(config)
}

/// Returns what the silence of a standby's host means.
pub(super) fn if_silent(said: api::IfSilent) -> IfSilent {
    match said {
        api::IfSilent::Wait => IfSilent::Wait,
        api::IfSilent::Serve => IfSilent::Serve,
    }
}

/// Returns the age up to which a standby is current if the order says nothing.
fn default_rpo_ms(every_ms: u64) -> u64 {
    (6 * every_ms).max(60_000)
}

/// Returns a time in milliseconds.
fn milliseconds(seconds: f64, least: f64, most: f64, what: &str) -> Result<u64, RequestError> {
    if (least..=most).contains(&seconds) {
        return Ok((seconds * 1000.0) as u64);
    }
    Err(RequestError::Invalid(format!("{what} is {least} s to {most} s, not {seconds} s")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_never_longer_than_the_age_up_to_which_a_standby_is_current() {
        let config = |every_ms, rpo_ms| SourceConfig {
            id: String::new(),
            name: "v".to_owned(),
            host: String::new(),
            store: "s".to_owned(),
            volumes: Vec::new(),
            every_ms,
            rpo_ms,
            bandwidth: None,
            keep: Keep { last: 1, hourly: 0, daily: 0 },
            is_paused: false,
            if_silent: None,
            returns: None,
            leaving_for: None,
            came_unix_ms: None,
        };
        let every = |config, every, rpo| {
            let change = api::SetStandby {
                every_seconds: Some(every),
                rpo_seconds: rpo,
                ..api::SetStandby::default()
            };
            changed(config, &change).map(|config| (config.every_ms, config.rpo_ms))
        };
        // The default follows the interval, and what was ordered stays.
        assert_eq!(every(config(10_000, 60_000), 300.0, None).unwrap(), (300_000, 1_800_000));
        assert_eq!(every(config(10_000, 30_000), 20.0, None).unwrap(), (20_000, 30_000));
        assert_eq!(every(config(10_000, 30_000), 300.0, Some(400.0)).unwrap(), (300_000, 400_000));
        let refused = every(config(10_000, 30_000), 300.0, None).unwrap_err();
        assert!(refused.message().contains("add --rpo, with 300 s at least"), "{}", refused.message());
    }
}
