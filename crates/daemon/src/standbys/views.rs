//! Standbys as administrators see them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lane::capture::BLOCK_BYTES;
use migration::HostId;
use standby::asking::{IfSilent, Permission};
use standby::owner::{BehindBecause, State};
use tokio::sync::oneshot;

use super::book::{CopiedVolume, NamedVolume};
use super::copy::{CopyView, Input, Seen, text};
use super::orders::Found;
use super::source::{Shown, Source};
use super::verifying::check_of;
use super::{Standbys, lock};
use crate::error::{RequestError, StandbyError};
use crate::journal::now_unix_ms;

/// What a source says of a standby that was used.
const USED: &str = "a migration to that host has begun with it; when the volumes are there, remove it: sterna standby remove";

/// What a source says of a standby whose volumes are not served here any more.
const PROMOTED: &str = "it was promoted there while this host was away, so its volumes are not served here; sterna volume list says what \
    can be done";

/// What a host says of a standby that it has promoted, and whose source has given its volumes up.
const GIVEN_UP: &str = "the other host gives its volumes up, or has done so: to make its images a standby of the volumes here, sterna standby reprotect; \
    to leave it at that, sterna standby remove";

/// After so many hours a standby that waits is reported.
const WAITING_HOURS_MAX: u64 = 1;
/// After so many hours a first copy is reported.
const SEEDING_HOURS_MAX: u64 = 24;
/// How long a keeper may take to answer: it may be applying an epoch.
const LOOK_MAX: Duration = Duration::from_secs(2);
/// So many digits of its identity tell a standby from others of its name.
const TWIN_DIGITS: usize = 6;

impl Standbys {
    /// Describes all standbys, by name.
    pub(crate) async fn list(&self) -> Vec<api::Standby> {
        let mut found: Vec<Found> = lock(&self.sources).values().cloned().map(Found::Source).collect();
        found.extend(lock(&self.copies).values().cloned().map(Found::Kept));
        let mut views = futures_util::future::join_all(found.iter().map(|found| self.view(found))).await;
        views.sort_by(|one, other| one.name.cmp(&other.name));
        views
    }

    /// Describes the standbys of this host's volumes.
    pub(crate) fn sources(&self) -> Vec<api::Standby> {
        let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
        sources
            .iter()
            .map(|source| self.view_source(self.name_of(&Found::Source(Arc::clone(source))), source))
            .collect()
    }

    /// Returns whether the volumes of a standby are here, and no migration moves one.
    fn are_home(&self, source: &Source) -> bool {
        let volumes = source.config().volumes;
        self.journal.read(|state| {
            let is_here = |known: &NamedVolume| {
                let here = state.volumes.keys().find(|volume| volume.to_string() == known.volume);
                here.is_some_and(|id| {
                    !state
                        .unfinished()
                        .any(|(_, known)| known.volumes.iter().any(|moving| moving.volume == *id))
                })
            };
            volumes.iter().all(is_here)
        })
    }

    /// Returns the names of the standbys that are kept here for a host.
    pub(crate) fn names_kept_for(&self, host: HostId) -> Vec<String> {
        let kept: Vec<_> = lock(&self.copies).values().filter(|kept| kept.host() == host).cloned().collect();
        kept.into_iter().map(|kept| self.name_of(&Found::Kept(kept))).collect()
    }

    /// Returns the names of the standbys that were promoted here, and whose volumes have no standby since.
    pub(crate) fn promoted_here(&self) -> Vec<String> {
        let kept: Vec<_> = lock(&self.copies).values().cloned().collect();
        let promoted = kept.into_iter().filter(|kept| kept.noted().is_complete);
        promoted.map(|kept| self.name_of(&Found::Kept(kept))).collect()
    }

    /// Returns what is wrong with standbys for long: the name, and a sentence.
    pub(crate) fn stuck(&self) -> Vec<(String, String)> {
        let mut stuck = self.stuck_returns();
        let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
        for source in sources {
            let (shown, name) = (source.shown(), self.name_of(&Found::Source(Arc::clone(&source))));
            let view = self.view_source(name.clone(), &source);
            if view.state == api::StandbyState::Used && self.are_home(&source) {
                let what = format!(
                    "its volumes were at that host, and are here again without a standby: sterna standby remove {name}, then sterna \
                     standby add"
                );
                stuck.push((name.clone(), what));
            }
            let why = view.reason.map(|why| format!(": {why}")).unwrap_or_default();
            stuck.extend(self.doubts(&source).into_iter().map(|doubt| (name.clone(), doubt)));
            stuck.extend(
                too_long(view.state, &shown, Instant::now()).map(|what| (name, format!("{what}{why}"))),
            );
        }
        let kept: Vec<_> = lock(&self.copies).values().cloned().collect();
        for kept in kept {
            let Seen { fault, is_contested, .. } = kept.copy.seen();
            let fault = fault.map(|fault| format!("it cannot be kept: {fault}"));
            let is_given_up = kept.noted().has_source_yielded;
            let contested = (is_contested && !is_given_up).then(|| {
                let (host, volume) = (self.hosts.name_of(kept.host()), kept.config.volumes.first());
                let volume = volume.map(|volume| kept.name_here(&volume.name)).unwrap_or_default();
                format!(
                    "it was promoted, and host \"{host}\" serves its volumes, too; at the host whose content is not needed: sterna volume \
                     yield {volume}"
                )
            });
            let name = self.name_of(&Found::Kept(Arc::clone(&kept)));
            stuck.extend(
                fault
                    .into_iter()
                    .chain(contested)
                    .chain(Self::stuck_test(&kept))
                    .map(|what| (name.clone(), what)),
            );
        }
        stuck
    }

    pub(crate) async fn show(&self, name: &str) -> Result<api::Standby, RequestError> {
        Ok(self.view(&self.find(name)?).await)
    }

    /// Finds a standby by its whole name, its volume's or VM's, or its identity.
    pub(super) fn find(&self, name: &str) -> Result<Found, RequestError> {
        self.book()?;
        let mut all: Vec<Found> = lock(&self.sources).values().cloned().map(Found::Source).collect();
        all.extend(lock(&self.copies).values().cloned().map(Found::Kept));
        let mut found: Vec<Found> = all.into_iter().filter(|found| self.is_called(found, name)).collect();
        if found.len() > 1 {
            let known: Vec<_> = found.iter().map(|found| self.name_of(found)).collect();
            return Err(StandbyError::Ambiguous { name: name.to_owned(), known: known.join(", ") }.into());
        }
        Ok(found.pop().ok_or_else(|| StandbyError::NotFound(name.to_owned()))?)
    }

    pub(super) fn is_called(&self, found: &Found, name: &str) -> bool {
        let (group, id, volumes) = match found {
            Found::Source(source) => {
                let config = source.config();
                let volumes: Vec<_> = config.volumes.into_iter().map(|volume| volume.name).collect();
                (config.name, config.id, volumes)
            }
            Found::Kept(kept) => {
                let own = kept.config.volumes.iter().map(|volume| volume.name.clone());
                let volumes = own.chain(kept.noted().names.into_values()).collect();
                (kept.config.name.clone(), kept.config.id.clone(), volumes)
            }
        };
        name == self.name_of(found)
            || name == group
            || name == id
            || volumes.iter().any(|volume| volume == name)
    }

    /// Returns the name of a standby at this host. One that is not the only one with its name has its identity in it, too.
    pub(super) fn name_of(&self, found: &Found) -> String {
        let (name, host, id) = match found {
            Found::Source(source) => {
                let config = source.config();
                (config.name, source.host(), config.id)
            }
            Found::Kept(kept) => (kept.config.name.clone(), kept.host(), kept.config.id.clone()),
        };
        let is_twin = |other: &str, of: HostId, other_id: &str| other == name && of == host && other_id != id;
        let has_twin =
            lock(&self.copies).values().any(|kept| is_twin(&kept.config.name, kept.host(), &kept.config.id))
                || lock(&self.sources).values().any(|source| {
                    let config = source.config();
                    is_twin(&config.name, source.host(), &config.id)
                });
        let host = self.hosts.name_of(host);
        match id.get(..TWIN_DIGITS).filter(|_| has_twin) {
            Some(digits) => format!("{name}@{host}#{digits}"),
            None => format!("{name}@{host}"),
        }
    }

    pub(super) async fn view(&self, found: &Found) -> api::Standby {
        let name = self.name_of(found);
        match found {
            Found::Source(source) => self.view_source(name, source),
            Found::Kept(kept) => {
                let look = Self::look(kept).await;
                let vms = self.view_vms(kept).await;
                api::Standby { vms, test: self.view_test(kept), ..self.view_kept(name, kept, look) }
            }
        }
    }

    /// Asks the keeper of a standby.
    pub(super) async fn look(kept: &super::Kept) -> CopyView {
        let (answer, answered) = oneshot::channel();
        kept.copy.give(Input::Look { answer });
        let looked = tokio::time::timeout(LOOK_MAX, answered).await;
        let busy = || CopyView {
            fault: Some("it is applying an epoch, or its disk does not answer".to_owned()),
            ..CopyView::default()
        };
        looked.ok().and_then(Result::ok).unwrap_or_else(busy)
    }

    fn view_source(&self, name: String, source: &Arc<Source>) -> api::Standby {
        let (config, shown) = (source.config(), source.shown());
        let seen = shown.group.as_ref().and_then(|group| {
            group.look(|machine, now| {
                let waiting: u64 =
                    machine.written_since_confirmed().iter().map(chronicle::LayeredBitmap::count).sum();
                (
                    machine.state(now),
                    machine.as_of().map(|as_of| now.saturating_sub(as_of)),
                    waiting * BLOCK_BYTES,
                )
            })
        });
        let (state, because) = match seen.map(|(state, ..)| state) {
            None if self.permissions.permission(source.standby()) == Some(Permission::Replaced) => {
                (api::StandbyState::Promoted, Some(PROMOTED.to_owned()))
            }
            None if shown.state == Some(State::Used) => (api::StandbyState::Used, Some(USED.to_owned())),
            None => (api::StandbyState::Waiting, None),
            Some(state) => state_of(state),
        };
        let state = if config.is_paused && state == api::StandbyState::Waiting {
            api::StandbyState::Paused
        } else {
            state
        };
        api::Standby {
            name,
            id: config.id,
            role: api::StandbyRole::Source,
            host: self.hosts.name_of(source.host()),
            store: config.store,
            volumes: config.volumes.into_iter().map(|volume| volume.name).collect(),
            state,
            reason: shown
                .reason
                .or_else(|| {
                    self.hosts
                        .silence_of(source.host())
                        .map(|_| "the standby's host is not connected".to_owned())
                })
                .or(because),
            age_seconds: seen
                .and_then(|(_, age, _)| age)
                .or_else(|| shown.older_than.map(|time| time.elapsed()))
                .map(|age| age.as_secs_f64()),
            every_seconds: Some(config.every_ms as f64 / 1000.0),
            rpo_seconds: Some(config.rpo_ms as f64 / 1000.0),
            bandwidth_bytes_per_second: config.bandwidth,
            if_silent: config.if_silent.map(|said| match said {
                IfSilent::Wait => api::IfSilent::Wait,
                IfSilent::Serve => api::IfSilent::Serve,
            }),
            bytes_waiting: seen.map(|(.., waiting)| waiting),
            bytes_sent: Some(shown.bytes_sent),
            bytes_found: Some(shown.bytes_found).filter(|bytes| *bytes > 0),
            check: shown.compared.as_ref().and_then(|compared| compared.last.clone()).map(check_of),
            compared: shown.compared.and_then(|compared| compared.whole).map(|whole| api::StandbyCompared {
                unix_ms: whole.ended_ms,
                bytes_differing: whole.differing.saturating_mul(BLOCK_BYTES),
            }),
            export: self.view_export(source),
            verify_seconds: self.verify.map(|every| every.as_secs_f64()),
            vms: shown.vms,
            points: Vec::new(),
            test: None,
        }
    }

    fn view_kept(&self, name: String, kept: &Arc<super::Kept>, look: CopyView) -> api::Standby {
        let config = kept.config.clone();
        let name_here = |volume: CopiedVolume| {
            if look.is_promoted { kept.name_here(&volume.name) } else { volume.name }
        };
        let volumes = config.volumes.into_iter().map(name_here).collect();
        let silence = self
            .hosts
            .silence_of(kept.host())
            .map(|_| "the host that has the volumes is not connected".to_owned());
        let left = kept.noted().leaving_for;
        let left = left.map(|to| format!("its volumes are leaving for host \"{}\", or have left", to.name));
        let age_ms = look.as_of_unix_ms.map(|as_of| now_unix_ms().saturating_sub(as_of));
        let Seen { terms, is_contested, .. } = kept.copy.seen();
        let is_given_up = look.is_promoted && kept.noted().has_source_yielded;
        let late = terms.filter(|terms| age_ms.is_some_and(|age| age > terms.rpo_ms));
        let late = late.map(|_| "nothing newer has come from the host that has the volumes".to_owned());
        let state = match &look {
            _ if look.is_promoted && is_contested && !is_given_up => api::StandbyState::Diverged,
            _ if look.is_promoted => api::StandbyState::Promoted,
            _ if look.is_consumed => api::StandbyState::Used,
            _ if look.points.is_empty() && look.fault.is_none() => api::StandbyState::Seeding,
            _ if look.points.is_empty() => api::StandbyState::NoRecoveryPoint,
            _ if silence.is_some() || look.fault.is_some() || late.is_some() => api::StandbyState::Behind,
            _ => api::StandbyState::Current,
        };
        api::Standby {
            name,
            id: config.id,
            role: api::StandbyRole::Standby,
            host: self.hosts_of(kept),
            store: config.store,
            volumes,
            state,
            reason: look
                .lent_to
                .map(|lent| used_by(migration::MigrationId(lent)))
                .or_else(|| is_given_up.then(|| GIVEN_UP.to_owned()))
                .or(look.fault)
                .or(look.note)
                .or(left)
                .or(silence)
                .or(late),
            age_seconds: age_ms.map(|age| age as f64 / 1000.0),
            every_seconds: terms.map(|terms| terms.every_ms as f64 / 1000.0),
            rpo_seconds: terms.map(|terms| terms.rpo_ms as f64 / 1000.0),
            bandwidth_bytes_per_second: None,
            if_silent: None,
            bytes_waiting: None,
            bytes_sent: None,
            bytes_found: None,
            check: None,
            compared: None,
            export: None,
            verify_seconds: None,
            vms: Vec::new(),
            points: look
                .points
                .iter()
                .map(|(at, arrived)| api::RecoveryPoint { name: text(*at), as_of_unix_ms: *arrived })
                .collect(),
            test: None,
        }
    }
}

/// Says since when a standby has had no group, or no first copy, if that is long.
fn too_long(state: api::StandbyState, shown: &Shown, now: Instant) -> Option<String> {
    let (since, hours_max, what) = match state {
        api::StandbyState::Waiting => (shown.waiting_since, WAITING_HOURS_MAX, "it has waited for"),
        api::StandbyState::Seeding => {
            (shown.seeding_since, SEEDING_HOURS_MAX, "its first copy is not complete after")
        }
        _ => return None,
    };
    let hours = now.saturating_duration_since(since?).as_secs() / 3600;
    (hours >= hours_max).then(|| format!("{what} {hours} h"))
}

/// Says that a migration has begun with the images.
pub(super) fn used_by(migration: migration::MigrationId) -> String {
    format!("the migration {migration} has begun with it; if that fails, the standby goes on")
}

fn state_of(state: State) -> (api::StandbyState, Option<String>) {
    let because = |because: BehindBecause| match because {
        BehindBecause::NoAnswer => "the standby's host has not answered".to_owned(),
        BehindBecause::Refused(reason) => match reason {
            standby::wire::RefusedBecause::NoSpace => {
                "the standby's host has no room that leaves its last recovery point alone".to_owned()
            }
            standby::wire::RefusedBecause::CannotGrow => {
                "a volume has grown, and the standby's store cannot hold it".to_owned()
            }
            standby::wire::RefusedBecause::BaseMissing => {
                "the standby lacks an earlier state; it is copied again".to_owned()
            }
        },
        BehindBecause::Incomplete => "blocks of a volume still follow from another host".to_owned(),
        BehindBecause::Slow => {
            "the link, or what it may use, is too slow for what the guests write".to_owned()
        }
    };
    match state {
        State::Seeding => (api::StandbyState::Seeding, None),
        State::Current => (api::StandbyState::Current, None),
        State::Behind(reason) => (api::StandbyState::Behind, Some(because(reason))),
        State::Paused => (api::StandbyState::Paused, None),
        State::Used => (api::StandbyState::Used, Some(USED.to_owned())),
        State::NoRecoveryPoint => (api::StandbyState::NoRecoveryPoint, None),
        State::Diverged => (
            api::StandbyState::Diverged,
            Some("it was promoted at the other host while its volumes are served here: stop the guests of one of both, and give the volumes up there: sterna volume yield".to_owned()),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_that_waits_or_begins_for_hours_is_reported() {
        let began = Instant::now();
        let shown = Shown { waiting_since: Some(began), seeding_since: Some(began), ..Shown::default() };
        let after = |state, hours: u32| too_long(state, &shown, began + hours * Duration::from_secs(3600));
        use api::StandbyState as State;
        assert_eq!(after(State::Waiting, 0), None);
        assert_eq!(after(State::Waiting, 2).unwrap(), "it has waited for 2 h");
        assert_eq!(after(State::Seeding, 23), None);
        assert_eq!(after(State::Seeding, 25).unwrap(), "its first copy is not complete after 25 h");
        assert_eq!(after(State::Current, 100), None);
    }
}
