//! Who is asked about the volumes of a journal that was put back, and what comes of the answers.
//!
//! ```text
//!   Hosts ─► Ask(host) ─► Answered │ silence: asked again ─┐
//!   Look(volume) ─► Looked │ not fit: looked again ────────┴─► Standing ─► ruling: serve, or stays away ─► Confirm(volume)
//! ```
//! An answer holds until the next one, which is asked for every few seconds: what people do at another host meanwhile is seen.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::Generation;

use super::hosts::{Hosts, Lacks};
use super::knowledge::{Knowledge, Word};
use super::ruling::{InDoubt, Ruling, Standing, Words, ruling};
use crate::identity::{HostId, VolumeId};
use crate::journal::{Doubt, RestoredVolume, State, Unlisted};

/// How long a host is waited for before it is asked again; its process may be another one by then.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long an answer is gone by before the host is asked again.
pub const ASK_AGAIN: Duration = Duration::from_secs(5);

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// These hosts are paired with this one, and these cannot be asked.
    Hosts(Hosts),
    /// A host has answered what it was asked last.
    Answered(HostId, Answer),
    /// An image was looked at.
    Looked(VolumeId, Look),
    /// That a volume is this host's could not be made durable: it is tried again.
    NotRecorded(VolumeId),
    /// What waits in the journal is this: volumes were reinstated, or forgotten.
    Waiting(BTreeMap<VolumeId, Claim>),
}

/// What a host answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// What it knows of the volumes that it was asked about. Of those that are not here it knows nothing.
    pub known: BTreeMap<VolumeId, Knowledge>,
    /// Whether what it does not know counts: its own journal was never put back.
    pub knows_all: bool,
}

/// A volume that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its generation in the backup; of a volume that had left, that with which it left.
    pub generation: Generation,
    /// Whether the words of other hosts are not enough.
    pub doubt: InDoubt,
    /// The host whose word settles the doubt: the volume's copy waited for it.
    pub copy_of: Option<HostId>,
    /// The host to which it had gone.
    pub left_for: Option<HostId>,
}

/// How an image looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// It is there, and nothing speaks against it.
    Fit,
    /// It is not there, or cannot be looked at.
    Missing,
    /// It is marked as the target of a migration that has not completed it.
    HalfMade,
    /// Another store has an image of the volume's name, which may be the one that it moved to.
    Rival(String),
    /// Nothing speaks against it, and this device or export may hold the volume as well: nobody can look there.
    NotAlone(String),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a host what it knows of everything that waits.
    Ask(HostId),
    /// Look at a volume's image.
    Look(VolumeId),
    /// Make durable what every other host has confirmed ([`super::confirm`]): that a volume is this host's, or that it is still away.
    Confirm(VolumeId),
}

/// Asks and looks, until it is known whose the volumes of a journal that was put back are.
#[derive(Debug)]
pub struct Restoration {
    claims: BTreeMap<VolumeId, Claim>,
    hosts: BTreeMap<HostId, Asked>,
    /// Hosts that cannot be asked.
    lacks: Lacks,
    looks: BTreeMap<VolumeId, Look>,
    /// Asked for and not come.
    looking: BTreeSet<VolumeId>,
    confirmed: BTreeSet<VolumeId>,
    /// When images are looked at again, of a host that has nobody to ask.
    again: Duration,
    actions: VecDeque<Action>,
}

impl Default for Restoration {
    /// Nobody has said yet which hosts there are: that is unknown, and not none.
    fn default() -> Self {
        Self {
            claims: BTreeMap::new(),
            hosts: BTreeMap::new(),
            lacks: Lacks::Unknown(Unlisted::Missing),
            looks: BTreeMap::new(),
            looking: BTreeSet::new(),
            confirmed: BTreeSet::new(),
            again: Duration::ZERO,
            actions: VecDeque::new(),
        }
    }
}

/// What is known of a host.
#[derive(Debug, Default)]
struct Asked {
    /// When it is asked again.
    again: Duration,
    answer: Option<Answer>,
}

impl Word {
    /// The generation that the other host has seen; `None`: it says nothing against it.
    pub fn generation(&self) -> Option<Generation> {
        match self {
            Self::Confirms | Self::Gave(_) => None,
            Self::HasIt(generation)
            | Self::CameBack(generation)
            | Self::KnowsLater(generation)
            | Self::Unsure(generation) => Some(*generation),
        }
    }
}

impl Event {
    /// What waits in a journal.
    pub fn waiting(state: &State) -> Self {
        let volumes = state.restored_volumes().map(|(volume, waiting)| (volume, Claim::of(waiting)));
        let departed = state.departures_in_question().map(|moved| {
            let claim = Claim {
                generation: moved.generation,
                doubt: InDoubt::No,
                copy_of: None,
                left_for: Some(moved.host),
            };
            (moved.volume.record.volume, claim)
        });
        Self::Waiting(volumes.chain(departed).collect())
    }
}

impl Claim {
    fn of(waiting: &RestoredVolume) -> Self {
        let doubt = match waiting.doubt {
            None => InDoubt::No,
            Some(Doubt::Hollow { .. }) => InDoubt::Hollow,
            Some(_) => InDoubt::Yes,
        };
        let copy_of = match waiting.doubt {
            Some(Doubt::Copy { peer, .. }) => Some(peer),
            _ => None,
        };
        Self { generation: waiting.volume.record.generation, doubt, copy_of, left_for: None }
    }
}

impl Restoration {
    /// Takes what has happened.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match event {
            Event::Hosts(hosts) => {
                self.hosts.retain(|host, _| hosts.paired.contains(host));
                for host in hosts.paired {
                    self.hosts.entry(host).or_default();
                }
                self.lacks = hosts.lacks;
            }
            Event::Answered(host, answer) => {
                if let Some(asked) = self.hosts.get_mut(&host) {
                    *asked = Asked { again: now + ASK_AGAIN, answer: Some(answer) };
                    // What was not to be had may be by now.
                    self.looks.retain(|_, look| look.is_fit());
                }
            }
            Event::Looked(volume, look) => {
                self.looking.remove(&volume);
                self.looks.insert(volume, look);
            }
            Event::NotRecorded(volume) => {
                self.confirmed.remove(&volume);
                self.looks.remove(&volume);
                // With the next answers, not at once.
                return;
            }
            Event::Waiting(claims) => {
                self.confirmed.retain(|volume| claims.contains_key(volume));
                self.looks.retain(|volume, _| claims.contains_key(volume));
                self.claims = claims;
            }
        }
        self.decide(now);
    }

    /// It is as late as [`Self::poll_timeout`] has said.
    pub fn handle_timeout(&mut self, now: Duration) {
        // A host alone has nobody whose answer would have an image looked at again.
        if self.hosts.is_empty() && self.again <= now {
            self.again = now + ASK_AGAIN;
            self.looks.retain(|_, look| look.is_fit());
        }
        self.decide(now);
    }

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When something is to be asked, and why; `None`: nothing waits.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        if self.claims.is_empty() {
            return None;
        }
        let again = self.hosts.values().map(|asked| asked.again).min();
        Some((again.unwrap_or(self.again), "asking other hosts whose volumes are"))
    }

    /// What is known of a volume; `None`: it does not wait.
    pub fn standing(&self, volume: VolumeId) -> Option<Standing> {
        let claim = self.claims.get(&volume)?;
        let words: Vec<(HostId, Option<(Word, bool)>)> =
            self.hosts.iter().map(|(host, asked)| (*host, asked.word(volume, claim))).collect();
        let came_back = words.iter().filter_map(|(_, word)| match word {
            Some((Word::CameBack(generation), _)) => Some(*generation),
            _ => None,
        });
        let came_back = came_back.max();
        let look = self.looks.get(&volume).cloned();
        let gave = |host: HostId| {
            let word = words.iter().find(|(known, _)| *known == host);
            matches!(word, Some((_, Some((Word::Gave(_) | Word::CameBack(_), _)))))
        };
        let doubt = match claim.doubt {
            InDoubt::Yes if claim.copy_of.is_some_and(gave) => InDoubt::No,
            // It may have come back to another place.
            InDoubt::No if came_back.is_some() && matches!(look, Some(Look::NotAlone(_))) => InDoubt::Yes,
            doubt => doubt,
        };
        Some(Standing { words: self.all_words(claim, &words, came_back), look, doubt, came_back })
    }

    /// What the hosts say, all together.
    fn all_words(
        &self,
        claim: &Claim,
        words: &[(HostId, Option<(Word, bool)>)],
        came_back: Option<Generation>,
    ) -> Words {
        let (mut unheard, mut contradicting, mut unreliable) = (Vec::new(), Vec::new(), Vec::new());
        // The backup itself says that it had left.
        contradicting.extend(claim.left_for.map(|host| (host, Word::KnowsLater(claim.generation))));
        for (host, word) in words {
            match word {
                None => unheard.push(*host),
                Some((Word::CameBack(_), _) | (Word::Confirms | Word::Gave(_), true)) => {}
                Some((Word::Confirms | Word::Gave(_), false)) => unreliable.push(*host),
                Some((word, _)) => contradicting.push((*host, *word)),
            }
        }
        // What another host knew before it came back here.
        contradicting.retain(|(_, word)| match word {
            Word::KnowsLater(generation) => Some(*generation) > came_back,
            _ => true,
        });
        let has_it = contradicting.iter().find_map(|(host, word)| match word {
            Word::HasIt(generation) if *generation >= claim.generation => Some((*host, *generation)),
            _ => None,
        });
        match has_it.filter(|(_, generation)| Some(*generation) > came_back) {
            Some((host, generation)) if claim.left_for.is_some() => Words::Away(host, generation),
            _ if !contradicting.is_empty() => Words::Contradicted(contradicting),
            _ if self.lacks != Lacks::Nothing => Words::Unlisted(self.lacks.clone()),
            _ if !unheard.is_empty() => Words::Unheard(unheard),
            _ if !unreliable.is_empty() => Words::Unreliable(unreliable),
            _ => Words::Agreed,
        }
    }

    fn decide(&mut self, now: Duration) {
        if self.claims.is_empty() {
            return;
        }
        for (host, asked) in &mut self.hosts {
            if asked.again <= now {
                asked.again = now + ANSWER_MAX;
                self.actions.push_back(Action::Ask(*host));
            }
        }
        let volumes: Vec<VolumeId> = self.claims.keys().copied().collect();
        for volume in volumes {
            // N.B. an image is looked at for an order as well, whatever the hosts say.
            if !self.looks.contains_key(&volume) && self.looking.insert(volume) {
                self.actions.push_back(Action::Look(volume));
            }
            let ruling = self.standing(volume).map(|standing| ruling(&standing, None));
            let is_known = matches!(ruling, Some(Ruling::Serve(_) | Ruling::StaysAway));
            if is_known && self.confirmed.insert(volume) {
                self.actions.push_back(Action::Confirm(volume));
            }
        }
    }
}

impl Look {
    /// Whether the image may be served if nothing else speaks against it.
    pub fn is_fit(&self) -> bool {
        matches!(self, Self::Fit | Self::NotAlone(_))
    }
}

impl Asked {
    /// What the host says of a volume, and whether its silence would count; `None`: it has not answered.
    fn word(&self, volume: VolumeId, claim: &Claim) -> Option<(Word, bool)> {
        let answer = self.answer.as_ref()?;
        Some(match answer.known.get(&volume) {
            Some(known) => (known.word(claim.generation), answer.knows_all),
            None => (Word::Confirms, answer.knows_all),
        })
    }
}
