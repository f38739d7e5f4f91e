//! A standby follows its volumes to another host.
//!
//! ```text
//!   host A, the source                     host B, the standby's            host C, where the volumes go
//!   migrate ─► noted ─► Leaving ─────────► noted: at A, or at C
//!     the migration begins, and ends
//!     they are here: Staying ────────────► at A
//!     they are there: Follow ───────────────────────────────────────────► noted: source of the standby
//!     forgotten ◄───────────────────────────────────────────────────────┘
//!                                          at C ◄───────────── Arrived ──┘ ─► the first stream, of the next generation
//! ```
//! B hears of C before anything is handed over, so an administrator who promotes at B is asked about the right host. Every step may
//! be repeated. What the standby lacks is in C's chronicle: migrations pass on what copies elsewhere lack (decision 0063).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chronicle::{Epoch, Generation, StayId};
use migration::journal::Side as MigrationSide;
use migration::{HostId, VolumeId};
use standby::StandbyId;
use standby::record::OwnerRecord;
use tokio::sync::OwnedMutexGuard;
use tokio::time::sleep;

use super::book::{Keep, NamedHost, NamedVolume, Side, SourceConfig, hex, parse};
use super::frames::{
    Ask, AskedKeep, AskedStandby, AskedVolume, Followed, LeavingFor, Line, Terms, cleaned, is_about,
};
use super::making::{POINTS_MAX, check};
use super::orders::Found;
use super::source::{Source, host_of};
use super::{Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::journal::now_unix_ms;

/// Time between two looks at volumes that are leaving.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Time between two tries if another host does not answer, or refuses.
const RETRY: Duration = Duration::from_secs(5);
/// A record with greater numbers is none of a standby.
const NUMBER_MAX: u64 = 1 << 56;

/// Volumes with standbys that are about to leave for another host. Its end starts the tasks that find out where they are.
pub(crate) struct Leaving {
    standbys: Arc<Standbys>,
    sources: Vec<Arc<Source>>,
    _held: Vec<OwnedMutexGuard<()>>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        for source in std::mem::take(&mut self.sources) {
            tokio::spawn(Arc::clone(&self.standbys).settle(source));
        }
    }
}

/// Why the host of a standby does not know that the volumes leave.
enum Untold {
    /// It has not answered.
    Silent(String),
    /// It has refused to note it.
    Refused(String),
}

/// Where the volumes of a standby are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    There,
    /// A migration is under way, or they are at several hosts.
    Undecided,
}

// What the source does.
impl Standbys {
    /// Tells the hosts of standbys that these volumes are about to leave for another host. Errors: [`StandbyError::WouldNotKnow`]: one
    /// of them does not hear it, unless `untold` says that it does not have to.
    pub(crate) async fn leave(
        self: &Arc<Self>,
        volumes: &[VolumeId],
        to: HostId,
        untold: bool,
    ) -> Result<Leaving, RequestError> {
        let mut leaving = Leaving { standbys: Arc::clone(self), sources: Vec::new(), _held: Vec::new() };
        for source in self.sources_that_follow(volumes, to) {
            // N.B. The same order for all, and nobody decides where the volumes are before the migration has begun.
            leaving._held.push(Arc::clone(&source.leaving).lock_owned().await);
            leaving.sources.push(Arc::clone(&source));
            let named = NamedHost { host: to.to_string(), name: self.hosts.name_of(to) };
            self.note_source(&source, |config| config.leaving_for = Some(named)).await?;
            if let Err(Untold::Silent(reason) | Untold::Refused(reason)) = self.tell_leaving(&source).await {
                if !untold {
                    return Err(self.would_not_know(&source, reason));
                }
                tracing::warn!(standby = %source.config().name, reason, "the host of a standby does not know yet that its volumes leave");
            }
        }
        Ok(leaving)
    }

    /// Returns the refusal of a move to another host that a host of a standby would not hear of, by all that is known.
    pub(crate) fn refuse_to_leave(&self, volumes: &[VolumeId], to: HostId) -> Option<RequestError> {
        let mut sources = self.sources_that_follow(volumes, to).into_iter();
        sources.find_map(|source| {
            let silence = self.hosts.silence_of(source.host())?;
            Some(self.would_not_know(&source, silence))
        })
    }

    fn would_not_know(&self, source: &Arc<Source>, reason: String) -> RequestError {
        let name = self.name_of(&Found::Source(Arc::clone(source)));
        StandbyError::WouldNotKnow { name, host: self.hosts.name_of(source.host()), reason }.into()
    }

    /// Returns the standbys of volumes that are kept at other hosts than the one they go to, in the order of their identities.
    fn sources_that_follow(&self, volumes: &[VolumeId], to: HostId) -> Vec<Arc<Source>> {
        let sources = lock(&self.sources);
        let follows = |source: &&Arc<Source>| {
            let is_moving = |known: &NamedVolume| volumes.iter().any(|id| id.to_string() == known.volume);
            source.host() != to && source.config().volumes.iter().any(is_moving)
        };
        sources.values().filter(follows).cloned().collect()
    }

    async fn tell_leaving(&self, source: &Source) -> Result<(), Untold> {
        let Some(to) = source.config().leaving_for else { return Ok(()) };
        if let Some(silence) = self.hosts.silence_of(source.host()) {
            return Err(Untold::Silent(silence));
        }
        let to = LeavingFor { host: host_of(&to.host), name: to.name };
        match self.asker.ask(source.host(), source.standby(), Ask::Leaving(to), Bytes::new()).await {
            Ok(_) => Ok(()),
            Err(RequestError::Standby(StandbyError::Refused { reason, .. })) => Err(Untold::Refused(reason)),
            Err(error) => Err(Untold::Silent(error.message())),
        }
    }

    /// Sees to standbys whose volumes were leaving when the daemon ended.
    pub(super) fn resume_leaving(self: &Arc<Self>) {
        let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
        for source in sources.into_iter().filter(|source| source.config().leaving_for.is_some()) {
            tokio::spawn(Arc::clone(self).settle(source));
        }
    }

    /// Waits until the volumes of a standby have left or stay, and says so to whom it concerns.
    async fn settle(self: Arc<Self>, source: Arc<Source>) {
        let mut reported = None;
        loop {
            let is_known = || {
                let sources = lock(&self.sources);
                sources.get(&source.standby()).is_some_and(|known| Arc::ptr_eq(known, &source))
            };
            let held = source.leaving.lock().await;
            let Some(to) = source.config().leaving_for.filter(|_| is_known()) else { return };
            let (settled, what) = match self.place_of(&source, host_of(&to.host)) {
                Place::Undecided => (Ok(false), String::new()),
                Place::Here => {
                    let stays = self.stay(&source).await.map(|()| true);
                    (
                        stays,
                        format!(
                            "its host does not know yet that the volumes have not left for host \"{}\"",
                            to.name
                        ),
                    )
                }
                Place::There => {
                    let handed_on = self.hand_on(&source, &to).await.map(|()| true);
                    (handed_on, format!("its volumes have left for host \"{}\"", to.name))
                }
            };
            drop(held);
            let pause = match settled {
                Ok(true) => return,
                Ok(false) => LOOK_EVERY,
                Err(reason) => {
                    let text = format!("{what}: {reason}");
                    if reported.as_ref() != Some(&text) {
                        tracing::warn!(standby = %source.config().name, reason = %text, "it is not known everywhere where a standby belongs");
                    }
                    source.show(|shown| shown.reason = Some(text.clone()));
                    reported = Some(text);
                    RETRY
                }
            };
            tokio::select! {
                () = self.stopping.begins() => return,
                () = sleep(pause) => {}
            }
        }
    }

    fn place_of(&self, source: &Source, to: HostId) -> Place {
        let volumes = source.config().volumes;
        self.journal.read(|state| {
            let of = |volume: &NamedVolume| super::promotion::identity(&volume.volume);
            let moves = |volume: VolumeId| {
                let mut migrations = state.migrations.values().filter(|migration| !migration.has_ended());
                migrations.any(|migration| migration.volumes.iter().any(|moving| moving.volume == volume))
            };
            let places = volumes.iter().map(of).map(|volume| {
                let there = state.moved.get(&volume).is_some_and(|moved| moved.host == to);
                match (state.volumes.contains_key(&volume), there) {
                    _ if moves(volume) => Place::Undecided,
                    (true, _) => Place::Here,
                    (false, true) => Place::There,
                    (false, false) => Place::Undecided,
                }
            });
            let mut places: Vec<_> = places.collect();
            places.dedup();
            if let [place] = places[..] { place } else { Place::Undecided }
        })
    }

    /// Says to the host of a standby that its volumes have not left, and notes it.
    async fn stay(&self, source: &Source) -> Result<(), String> {
        let asked = self.asker.ask(source.host(), source.standby(), Ask::Staying, Bytes::new()).await;
        asked.map_err(|error| error.message())?;
        let noted = self.note_source(source, |config| config.leaving_for = None).await;
        noted.map_err(|error| error.message())
    }

    /// Hands a standby on to the host that has its volumes, and forgets it here.
    async fn hand_on(&self, source: &Source, to: &NamedHost) -> Result<(), String> {
        // N.B. Before the new source comes, which its host would not know otherwise. If that has come already, this host is none that
        // the standby's host listens to.
        match self.tell_leaving(source).await {
            Ok(()) | Err(Untold::Refused(_)) => {}
            Err(Untold::Silent(reason)) => return Err(reason),
        }
        let (host, standby, config) = (host_of(&to.host), source.standby(), source.config());
        if let Some(silence) = self.hosts.silence_of(host) {
            return Err(silence);
        }
        let followed = Box::new(self.followed(&config).await.map_err(|error| error.message())?);
        let asked = self.asker.ask(host, standby, Ask::Follow(followed), Bytes::new()).await;
        asked.map_err(|error| error.message())?;
        tracing::info!(standby = %config.name, host = %to.name, "a standby follows its volumes");
        source.end();
        lock(&self.sources).remove(&standby);
        self.permissions.forget(standby);
        let forgotten = self.on_book(move |book| book.forget(Side::Source, &config.id)).await;
        forgotten.map_err(|error| error.message())
    }

    async fn followed(&self, config: &SourceConfig) -> Result<Followed, RequestError> {
        let id = config.id.clone();
        let record: Option<OwnerRecord> = self.on_book(move |book| book.record(Side::Source, &id)).await?;
        let size_of = |volume: VolumeId| {
            let moved =
                |state: &migration::journal::State| Some(state.moved.get(&volume)?.volume.record.size_bytes);
            self.journal.read(moved).unwrap_or_default()
        };
        let volumes = config.volumes.iter().map(|known| {
            let volume = super::promotion::identity(&known.volume);
            AskedVolume { volume: volume.0, name: known.name.clone(), size_bytes: size_of(volume) }
        });
        let Keep { last, hourly, daily } = config.keep;
        Ok(Followed {
            asked: AskedStandby {
                standby: parse(&config.id).unwrap_or(StandbyId(0)),
                name: config.name.clone(),
                store: config.store.clone(),
                keep: AskedKeep { last, hourly, daily },
                volumes: volumes.collect(),
            },
            host: host_of(&config.host),
            terms: Terms { every_ms: config.every_ms, rpo_ms: config.rpo_ms },
            bandwidth: config.bandwidth,
            is_paused: config.is_paused,
            if_silent: config.if_silent,
            record: record.map(|record| OwnerRecord { generation: record.generation.next(), ..record }),
        })
    }

    /// Changes the configuration of a source, durably.
    async fn note_source(
        &self,
        source: &Source,
        change: impl FnOnce(&mut SourceConfig),
    ) -> Result<(), RequestError> {
        let mut config = source.config();
        change(&mut config);
        let written = config.clone();
        self.on_book(move |book| book.write_config(Side::Source, &written.id, &written)).await?;
        source.set(config);
        Ok(())
    }
}

// What the host does that keeps the standby.
impl Standbys {
    /// Notes that the volumes of a standby are leaving their host, or have left it.
    pub(super) async fn let_leave(
        &self,
        peer: HostId,
        line: &Line,
        to: LeavingFor,
    ) -> Result<(), RequestError> {
        self.change_whereabouts(peer, line, |of| of.leaves(peer, to.host), Some(cleaned(&to.name))).await
    }

    /// Notes that the volumes have not left their host.
    pub(super) async fn let_stay(&self, peer: HostId, line: &Line) -> Result<(), RequestError> {
        self.change_whereabouts(peer, line, |of| of.stays(peer), None).await
    }

    /// Notes that another host has the volumes, and is the source from now on.
    pub(super) async fn let_arrive(&self, peer: HostId, line: &Line) -> Result<(), RequestError> {
        self.change_whereabouts(peer, line, |of| of.arrived(peer), None).await
    }

    async fn change_whereabouts(
        &self,
        peer: HostId,
        line: &Line,
        change: impl FnOnce(&mut Whereabouts) -> Result<(), standby::whereabouts::Stranger>,
        name: Option<String>,
    ) -> Result<(), RequestError> {
        let unknown =
            || RequestError::Invalid("it keeps no standby of volumes that are at that host".to_owned());
        let kept =
            self.kept_about(peer, line, |kept| kept.whereabouts().may_be_at(peer)).ok_or_else(unknown)?;
        let mut of = kept.whereabouts();
        change(&mut of).map_err(|_| unknown())?;
        self.note(&kept, |noted| {
            noted.host = of.at.to_string();
            noted.leaving_for =
                of.leaving_for.map(|to| NamedHost { host: to.to_string(), name: name.unwrap_or_default() });
        })
        .await
    }
}

type Whereabouts = standby::whereabouts::Whereabouts<HostId>;

// What the host does that has the volumes now.
impl Standbys {
    /// Becomes the source of a standby whose volumes have come here from another host.
    pub(super) async fn become_source(
        self: &Arc<Self>,
        peer: HostId,
        line: &Line,
        followed: Followed,
    ) -> Result<(), RequestError> {
        let own = self.peers.own();
        let invalid = |text: &str| RequestError::Invalid(text.to_owned());
        let Followed { asked, host, terms, record, .. } = &followed;
        let standby = asked.standby;
        if !is_about(line.channel, standby, peer, own) {
            return Err(invalid("the standby's identity is not that of its channel"));
        }
        check(asked)?;
        let is_whole = record.as_ref().is_none_or(|record| is_sound(record, standby));
        let has_terms = (1000..=terms.rpo_ms).contains(&terms.every_ms) && terms.rpo_ms < NUMBER_MAX;
        if !is_whole || !has_terms || *host == own {
            return Err(invalid("it is no description of a standby"));
        }
        if !self.forget_older(standby, record.as_ref()).await? {
            return Ok(());
        }
        if !self.hosts.is_paired(*host) {
            let host = &host.to_string()[..8];
            return Err(RequestError::Invalid(format!(
                "it is not paired with the host {host}… that keeps the standby; pair them, or remove the standby"
            )));
        }
        let volumes = self.volumes_from(peer, asked)?;
        let has_one =
            |source: Arc<Source>| source.config().volumes.iter().any(|known| volumes.contains(known));
        if self.sources_of(*host).any(has_one) {
            return Err(invalid("one of its volumes has another standby at that host already"));
        }
        let config = config_of(&followed, volumes);
        let (written, record) = (config.clone(), followed.record);
        let is_new = self.on_book(move |book| {
            // N.B. One that is known may be of another host. The record goes first: without it this owner would be fenced.
            if let Some(record) =
                record.filter(|_| !matches!(book.has_config(Side::Source, &written.id), Ok(true)))
            {
                book.write_record(Side::Source, &written.id, &record)?;
            }
            book.add_config(Side::Source, &written.id, &written)
        });
        if is_new.await? {
            tracing::info!(standby = %config.name, host = %self.hosts.name_of(peer), "a standby has come with its volumes");
            self.begin_source(config);
        }
        Ok(())
    }

    /// Forgets this host as the source of a standby that has come back, if that was before the new owner. Returns whether this host is to
    /// become the source.
    async fn forget_older(
        &self,
        standby: StandbyId,
        new: Option<&OwnerRecord>,
    ) -> Result<bool, RequestError> {
        let Some(source) = lock(&self.sources).get(&standby).cloned() else { return Ok(true) };
        // N.B. It hands the standby on at this moment, perhaps.
        let _held = source.leaving.lock().await;
        let id = source.config().id;
        let known = id.clone();
        let record: Option<OwnerRecord> = self.on_book(move |book| book.record(Side::Source, &known)).await?;
        let is_older = match (&record, new) {
            (Some(known), Some(new)) => known.generation < new.generation,
            _ => false,
        };
        if !is_older {
            return Ok(false);
        }
        source.end();
        lock(&self.sources).remove(&standby);
        self.permissions.forget(standby);
        self.on_book(move |book| book.forget(Side::Source, &id)).await?;
        Ok(true)
    }

    /// Returns the volumes of a standby that have come here from another host, as they are called here. **N.B.** No host orders a
    /// standby of what has not come from it.
    fn volumes_from(&self, peer: HostId, asked: &AskedStandby) -> Result<Vec<NamedVolume>, RequestError> {
        self.journal.read(|state| {
            let volumes = asked.volumes.iter().map(|asked| {
                let known = state.volumes.get(&VolumeId(asked.volume))?;
                let StayId::Arrived(migration) = known.stay else { return None };
                let came = state.migrations.get(&migration::MigrationId(migration))?;
                let is_from =
                    matches!(&came.side, MigrationSide::Incoming { peer: from, .. } if *from == peer);
                let record = &known.record;
                is_from.then(|| NamedVolume { volume: record.volume.to_string(), name: record.name.clone() })
            });
            let volumes: Option<Vec<_>> = volumes.collect();
            volumes.ok_or_else(|| {
                RequestError::Invalid("its volumes have not come here from that host".to_owned())
            })
        })
    }
}

fn config_of(followed: &Followed, volumes: Vec<NamedVolume>) -> SourceConfig {
    let AskedStandby { standby, name, store, keep, .. } = &followed.asked;
    SourceConfig {
        id: hex(*standby),
        name: name.clone(),
        host: followed.host.to_string(),
        store: cleaned(store),
        volumes,
        every_ms: followed.terms.every_ms,
        rpo_ms: followed.terms.rpo_ms,
        bandwidth: followed.bandwidth.filter(|rate| *rate > 0),
        keep: Keep {
            last: keep.last.min(POINTS_MAX),
            hourly: keep.hourly.min(POINTS_MAX),
            daily: keep.daily.min(POINTS_MAX),
        },
        is_paused: followed.is_paused,
        if_silent: followed.if_silent,
        returns: None,
        leaving_for: None,
        came_unix_ms: Some(now_unix_ms()),
    }
}

/// Returns whether a record of another host can be one of this standby.
fn is_sound(record: &OwnerRecord, standby: StandbyId) -> bool {
    let OwnerRecord { generation, acknowledged, numbered_through, .. } = record;
    record.standby == standby
        && *generation <= Generation(NUMBER_MAX)
        && *numbered_through <= Epoch(NUMBER_MAX)
        && *acknowledged <= Some(*numbered_through)
}
