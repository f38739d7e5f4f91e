//! Whether volumes that have standbys may be served: one of them may have been promoted meanwhile (law 29).
//!
//! ```text
//!   serving ─► permit(volume) ─► for each of its standbys: standby::asking::Asking decides
//!                                     Ask ─► a line of its own ─► the standby's host ─► its word
//!                                     Record ─► the book
//! ```
//! This carries out, and says what a volume waits for.

mod served;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_channel::mpsc;
use futures_util::StreamExt as _;
use lane::peer::ChannelEvent;
use migration::VolumeId;
use standby::StandbyId;
use standby::asking::{Action, Asking, Event, IfSilent, Known, Permission, Promoted, Question, Word};
use standby::record::OwnerRecord;
use tokio::sync::Notify;
use tokio::time::sleep;
use transport::Priority;

use self::served::Served;
use super::book::{Book, Side, SourceConfig, parse};
use super::frames::{Frame, Purpose, subject};
use super::lock;
use super::source::host_of;
use crate::error::with_causes;
use crate::files::sockets::SocketFolder;
use crate::hosts::Hosts;
use crate::peers::Peers;
use crate::vms::moving;
use crate::volumes::registry::{Service, Volumes};

/// How often it is noted which volumes are served.
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// How long ago a volume may have been served that is served although it is unknown whether it has a standby: two of the shortest
/// intervals.
const DAMAGED_AWAY_MAX: Duration = Duration::from_secs(2);
/// The time before a host that cannot be asked is looked for again.
const RETRY: Duration = Duration::from_secs(5);

/// The permissions of all volumes that have standbys.
pub(crate) struct Permissions {
    book: Option<Book>,
    volumes: Arc<Volumes>,
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    /// What silence means where a standby does not say it.
    if_silent: IfSilent,
    groups: Mutex<BTreeMap<StandbyId, Group>>,
    /// Why it is unknown which volumes have standbys: files that cannot be read.
    damage: Option<String>,
    /// The volumes that wait for that, with their names.
    held: Mutex<BTreeMap<VolumeId, String>>,
    served: Mutex<Served>,
    /// Held while it is recorded whether a standby was promoted.
    writing: Mutex<()>,
    changed: Notify,
    /// The origin of the machines' time.
    began: Instant,
}

/// The volumes of one standby.
struct Group {
    config: SourceConfig,
    volumes: Vec<VolumeId>,
    asking: Option<Asking>,
    /// Whether a task asks. Two would take each other's line.
    is_asked: bool,
}

impl Group {
    fn is_waiting(&self) -> bool {
        self.asking.as_ref().is_some_and(|asking| asking.permission() != Permission::Permitted)
    }
}

impl Permissions {
    pub(crate) fn new(
        data_dir: &std::path::Path,
        if_silent: IfSilent,
        sockets: &SocketFolder,
        volumes: &Arc<Volumes>,
        hosts: &Arc<Hosts>,
        peers: &Arc<Peers>,
    ) -> Arc<Self> {
        // `Standbys` says what is wrong with the book.
        let book = Book::open(data_dir).ok();
        let found = match &book {
            Some(book) => book.configs::<SourceConfig>(Side::Source).map_err(|error| error.to_string()),
            None => Err("the folder of standbys cannot be used".to_owned()),
        };
        let (found, damage) = match found {
            Ok((found, damaged)) => {
                let paths: Vec<_> = damaged.iter().map(|file| file.path.display().to_string()).collect();
                (found, (!paths.is_empty()).then(|| format!("{} cannot be read", paths.join(", "))))
            }
            Err(error) => (Vec::new(), Some(error)),
        };
        let permissions = Arc::new(Self {
            book,
            volumes: Arc::clone(volumes),
            hosts: Arc::clone(hosts),
            peers: Arc::clone(peers),
            if_silent,
            groups: Mutex::default(),
            damage,
            held: Mutex::default(),
            served: Mutex::new(Served::open(sockets.folder())),
            writing: Mutex::default(),
            changed: Notify::new(),
            began: Instant::now(),
        });
        for config in found {
            permissions.know(config);
        }
        tokio::spawn(note_served(Arc::downgrade(&permissions)));
        permissions
    }

    /// Holds the volumes of the journal back if it is unknown which of them have standbys, but for those that were served a moment
    /// ago. What is made later has none that is unknown.
    pub(crate) fn hold_if_unsure(&self, volumes: impl IntoIterator<Item = (String, VolumeId)>) {
        if self.damage.is_none() {
            return;
        }
        let served = lock(&self.served);
        let was_served =
            |volume: &VolumeId| served.away(*volume).is_some_and(|away| away <= DAMAGED_AWAY_MAX);
        let unsure = volumes.into_iter().filter(|(_, volume)| !was_served(volume));
        lock(&self.held).extend(unsure.map(|(name, volume)| (volume, name)));
    }

    /// Knows a standby, or what was changed of it.
    pub(crate) fn know(&self, config: SourceConfig) {
        let Some(standby) = parse(&config.id) else { return };
        let volumes = config.volumes.iter().filter_map(|volume| identity(&volume.volume)).collect();
        let mut groups = lock(&self.groups);
        let (asking, is_asked) =
            groups.remove(&standby).map_or((None, false), |group| (group.asking, group.is_asked));
        groups.insert(standby, Group { config, volumes, asking, is_asked });
    }

    /// Forgets a standby that was removed. Its volumes wait for it no longer.
    pub(crate) fn forget(&self, standby: StandbyId) {
        lock(&self.groups).remove(&standby);
        self.changed.notify_waiters();
    }

    /// Resolves when a volume may be served. `say` is told what it waits for.
    pub(crate) async fn permit(self: &Arc<Self>, volume: VolumeId, say: impl Fn(String)) {
        let mut said = None;
        self.begin(volume);
        loop {
            let mut changed = pin!(self.changed.notified());
            // N.B. What changes from here on is heard.
            changed.as_mut().enable();
            let Some(reason) = self.obstacle(volume) else { return };
            if said.as_ref() != Some(&reason) {
                say(reason.clone());
                said = Some(reason);
            }
            changed.await;
        }
    }

    /// Begins to ask about all standbys of a volume that is to be served.
    fn begin(self: &Arc<Self>, volume: VolumeId) {
        let of_volume: Vec<StandbyId> = {
            let groups = lock(&self.groups);
            let has = |group: &Group| group.volumes.contains(&volume);
            groups.iter().filter(|(_, group)| has(group)).map(|(standby, _)| *standby).collect()
        };
        for standby in of_volume {
            let is_replaced = self.is_replaced(standby);
            let mut groups = lock(&self.groups);
            let Some(group) = groups.get_mut(&standby) else { continue };
            let may_begin = |asking: &Asking| asking.may_begin(self.began.elapsed());
            if group.is_waiting() || group.asking.as_ref().is_some_and(may_begin) {
                continue;
            }
            let served = lock(&self.served);
            let away = group.volumes.iter().filter_map(|volume| served.away(*volume)).min();
            drop(served);
            let asking = Asking::begin(self.began.elapsed(), self.known(group, away, is_replaced));
            let is_permitted = asking.permission() == Permission::Permitted;
            group.asking = Some(asking);
            let begins = !is_permitted && !std::mem::replace(&mut group.is_asked, !is_permitted);
            drop(groups);
            self.carry_out(standby);
            if begins {
                tokio::spawn(Arc::clone(self).ask(standby));
            }
        }
    }

    /// Returns whether a volume that was permitted may still begin to be served: that may have been long ago.
    pub(crate) fn may_begin(&self, volume: VolumeId) -> bool {
        let now = self.began.elapsed();
        let groups = lock(&self.groups);
        let mut of_volume = groups.values().filter(|group| group.volumes.contains(&volume));
        of_volume.all(|group| group.asking.as_ref().is_none_or(|asking| asking.may_begin(now)))
            && !lock(&self.held).contains_key(&volume)
    }

    fn known(&self, group: &Group, away: Option<Duration>, is_replaced: bool) -> Known {
        Known {
            away,
            every: Duration::from_millis(group.config.every_ms),
            is_replaced,
            is_given_up: self.is_given_up(&group.config.id),
            // A volume of a restored journal is not served before its owner is known.
            knows_history: true,
            if_silent: group.config.if_silent.unwrap_or(self.if_silent),
        }
    }

    /// Returns whether it is recorded that an administrator gives the group up. **N.B.** Unknown is not no.
    fn is_given_up(&self, id: &str) -> bool {
        self.book.as_ref().is_some_and(|book| !matches!(book.former(id), Ok(None)))
    }

    /// Returns whether it is recorded that a standby was promoted.
    pub(crate) fn is_replaced(&self, standby: StandbyId) -> bool {
        self.book.as_ref().is_some_and(|book| book.is_replaced(standby))
    }

    /// Asks until the group may be served, or the standby is forgotten.
    async fn ask(self: Arc<Self>, standby: StandbyId) {
        loop {
            let Some((host, config)) = self.waiting_or_end(standby) else { return };
            let Ok(session) = self.hosts.session_with(host) else {
                self.pass_time(standby, RETRY).await;
                continue;
            };
            let subject = subject(standby, self.peers.own(), Purpose::Questions);
            let (line, arrivals) = self.peers.standby_channel(&session, subject);
            self.converse(standby, &config, &line, arrivals).await;
        }
    }

    /// Sends questions on a line and takes what is said, until the group may be served or the line ends.
    async fn converse(
        self: &Arc<Self>,
        standby: StandbyId,
        config: &SourceConfig,
        line: &Arc<dyn moving::channel::Send>,
        mut arrivals: mpsc::UnboundedReceiver<ChannelEvent>,
    ) {
        self.tell(standby, Event::Connected);
        while self.is_waiting(standby) {
            if self.carry_out(standby) {
                line.send(
                    Priority::Control,
                    Frame::Question(self.question(standby, config)).encode(),
                    Bytes::new(),
                );
            }
            let timeout = self.timeout(standby);
            tokio::select! {
                arrival = arrivals.next() => match arrival {
                    None => return,
                    Some(ChannelEvent::Message { head, .. }) => {
                        if let Some(Frame::Word(word)) = Frame::decode(&head) {
                            self.said(standby, word);
                        }
                    }
                    Some(ChannelEvent::Restored | ChannelEvent::PeerRestarted) => self.tell(standby, Event::Connected),
                    Some(ChannelEvent::Lost(_)) => {}
                },
                () = sleep(timeout) => self.handle_timeout(standby),
                () = self.changed.notified() => {}
            }
        }
    }

    /// Lets time pass for a machine whose host cannot be asked.
    async fn pass_time(self: &Arc<Self>, standby: StandbyId, most: Duration) {
        sleep(self.timeout(standby).min(most)).await;
        self.handle_timeout(standby);
        self.carry_out(standby);
    }

    fn question(&self, standby: StandbyId, config: &SourceConfig) -> Question {
        let record: Option<OwnerRecord> =
            self.book.as_ref().and_then(|book| book.record(Side::Source, &config.id).ok().flatten());
        let life = record.as_ref().map_or(standby::LifeId(0), |record| record.life);
        Question { standby, life, acknowledged: record.and_then(|record| record.acknowledged) }
    }

    /// Returns the names of the standbys that a host keeps of volumes here.
    pub(crate) fn kept_at(&self, host: migration::HostId) -> Vec<String> {
        let groups = lock(&self.groups);
        let kept = groups.values().filter(|group| host_of(&group.config.host) == host);
        kept.map(|group| group.config.name.clone()).collect()
    }

    /// Returns whether the group of a standby may not be served yet.
    fn is_waiting(&self, standby: StandbyId) -> bool {
        lock(&self.groups).get(&standby).is_some_and(Group::is_waiting)
    }

    /// Returns the host and the configuration of a standby whose group may not be served yet; otherwise notes that nobody asks.
    fn waiting_or_end(&self, standby: StandbyId) -> Option<(migration::HostId, SourceConfig)> {
        let mut groups = lock(&self.groups);
        let group = groups.get_mut(&standby)?;
        group.is_asked = group.is_waiting();
        group.is_asked.then(|| (host_of(&group.config.host), group.config.clone()))
    }

    fn timeout(&self, standby: StandbyId) -> Duration {
        let groups = lock(&self.groups);
        let asking = groups.get(&standby).and_then(|group| group.asking.as_ref());
        let at = asking.and_then(Asking::poll_timeout);
        at.map_or(RETRY, |at| at.saturating_sub(self.began.elapsed()))
    }

    fn handle_timeout(&self, standby: StandbyId) {
        let now = self.began.elapsed();
        self.with(standby, |asking| asking.handle_timeout(now));
    }

    /// Takes what the host of a standby has said, also as an answer to an offer.
    pub(crate) fn said(self: &Arc<Self>, standby: StandbyId, word: Word) {
        if let Some(group) = lock(&self.groups).get_mut(&standby)
            && group.asking.is_none()
        {
            // It was ordered since this daemon began: its volumes are served.
            let known = self.known(group, Some(Duration::ZERO), false);
            group.asking = Some(Asking::begin(self.began.elapsed(), known));
        }
        self.tell(standby, Event::Said(word));
        self.carry_out(standby);
    }

    fn tell(&self, standby: StandbyId, event: Event) {
        let now = self.began.elapsed();
        self.with(standby, |asking| asking.handle_event(now, event));
    }

    fn with(&self, standby: StandbyId, change: impl FnOnce(&mut Asking)) {
        if let Some(asking) = lock(&self.groups).get_mut(&standby).and_then(|group| group.asking.as_mut()) {
            change(asking);
        }
        self.changed.notify_waiters();
    }

    /// Carries out what a machine has given; returns whether it asks.
    fn carry_out(self: &Arc<Self>, standby: StandbyId) -> bool {
        let (mut asks, mut records, mut is_permitted) = (false, false, false);
        loop {
            let action = lock(&self.groups)
                .get_mut(&standby)
                .and_then(|group| group.asking.as_mut())
                .and_then(Asking::poll_action);
            match action {
                Some(Action::Ask) => asks = true,
                Some(Action::Record { .. }) => records = true,
                Some(Action::Permit) => is_permitted = true,
                None => break,
            }
        }
        if records {
            self.record(standby);
        }
        if is_permitted {
            self.changed.notify_waiters();
        }
        asks
    }

    /// Makes durable whether a standby was promoted.
    fn record(self: &Arc<Self>, standby: StandbyId) {
        let this = Arc::clone(self);
        tokio::task::spawn_blocking(move || {
            // N.B. The one that writes last writes what is true then.
            let _writing = lock(&this.writing);
            let known = lock(&this.groups).get(&standby).and_then(|group| {
                let names: Vec<&str> =
                    group.config.volumes.iter().map(|volume| volume.name.as_str()).collect();
                Some((group.asking.as_ref()?.is_replaced(), names.join(", ")))
            });
            let (Some((is_replaced, volumes)), Some(book)) = (known, &this.book) else { return };
            if is_replaced {
                tracing::warn!(%volumes, "another host has promoted its standby of these volumes");
            }
            if let Err(error) = book.write_replaced(standby, is_replaced) {
                // The next start asks again.
                tracing::error!(%volumes, error = with_causes(&error), "cannot record that a standby was promoted");
            }
        });
    }

    /// An administrator orders to serve a volume. Errors: the host that has promoted a standby of it.
    pub(crate) fn order(self: &Arc<Self>, volume: VolumeId, knows_of_promotion: bool) -> Result<(), String> {
        let mut ordered = Vec::new();
        lock(&self.held).remove(&volume);
        {
            let mut groups = lock(&self.groups);
            for (standby, group) in groups.iter_mut().filter(|(_, group)| group.volumes.contains(&volume)) {
                let Some(asking) = &mut group.asking else { continue };
                if let Err(Promoted) = asking.order(knows_of_promotion) {
                    return Err(self.hosts.name_of(host_of(&group.config.host)));
                }
                ordered.push(*standby);
            }
        }
        for standby in ordered {
            self.carry_out(standby);
        }
        self.changed.notify_waiters();
        Ok(())
    }

    /// Returns whether a volume waits for a permission.
    pub(crate) fn waits(&self, volume: VolumeId) -> bool {
        self.obstacle(volume).is_some()
    }

    /// Returns whether the group of a standby may be served; `None`: nobody has asked for it.
    pub(crate) fn permission(&self, standby: StandbyId) -> Option<Permission> {
        let groups = lock(&self.groups);
        groups.get(&standby)?.asking.as_ref().map(Asking::permission)
    }

    /// Returns what a volume waits for, and what can be done; `None`: it may be served.
    fn obstacle(&self, volume: VolumeId) -> Option<String> {
        if let (Some(damage), Some(name)) = (&self.damage, lock(&self.held).get(&volume)) {
            return Some(format!(
                "it may have a standby that was promoted while this host was away, and {damage}: restore that file, and restart the \
                 daemon. If you know that no standby of it was promoted: sterna volume promote {name} --unasked"
            ));
        }
        let groups = lock(&self.groups);
        let of_volume = groups.values().filter(|group| group.volumes.contains(&volume));
        of_volume.into_iter().find_map(|group| {
            let asking = group.asking.as_ref()?;
            let host = self.hosts.name_of(host_of(&group.config.host));
            let text = volume.to_string();
            let known = group.config.volumes.iter().find(|known| known.volume == text);
            let name = known.map(|known| known.name.as_str()).unwrap_or_default();
            obstacle_of(asking, name, &host)
        })
    }
}

/// Returns what a volume waits for because of one standby at `host`.
fn obstacle_of(asking: &Asking, name: &str, host: &str) -> Option<String> {
    let promote = format!("sterna volume promote {name} --unasked");
    match asking.permission() {
        Permission::Permitted => None,
        Permission::Replaced => Some(format!(
            "its standby was promoted at host \"{host}\", which has the volume now. To go on with that one: sterna volume yield {name}; \
             to go on with this one, which lacks what was written there: {promote} --force"
        )),
        Permission::Asking => {
            let why = match asking.word() {
                None => "has not answered",
                Some(_) => "cannot say whether it has promoted it",
            };
            Some(format!(
                "host \"{host}\" keeps a standby of it, which may have been promoted while this host was away, and {why}; it is served as \
                 soon as that host says no. If you know that it was not promoted: {promote}"
            ))
        }
    }
}

/// Notes every second which volumes with standbys are served.
async fn note_served(permissions: Weak<Permissions>) {
    loop {
        sleep(NOTE_EVERY).await;
        let Some(permissions) = permissions.upgrade() else { return };
        let known: Vec<VolumeId> =
            lock(&permissions.groups).values().flat_map(|group| group.volumes.clone()).collect();
        if known.is_empty() {
            continue;
        }
        let served =
            permissions.volumes.list().into_iter().filter_map(|(_, volume, service)| match service {
                Service::Serving(_) => volume.filter(|volume| known.contains(volume)),
                _ => None,
            });
        let (path, bytes) = {
            let mut noted = lock(&permissions.served);
            noted.note(served);
            noted.keep_only(&known);
            noted.written()
        };
        let written = tokio::task::spawn_blocking(move || served::write(&path, &bytes)).await;
        if let Ok(Err(error)) = written {
            // Without it the next start asks, which takes longer and loses nothing.
            tracing::debug!(%error, "cannot note which volumes are served");
        }
    }
}

fn identity(text: &str) -> Option<VolumeId> {
    u128::from_str_radix(text, 16).ok().map(|number| VolumeId(number.to_be_bytes()))
}
