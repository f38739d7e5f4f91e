//! The machine that asks hosts about the volumes of a restored journal, and evaluates the answers.
//!
//! ```text
//!   Hosts ─► Ask(host) ─► Answered │ silence: asked again ─┐
//!   Look(volume) ─► Looked │ not fit: looked again ────────┴─► Standing ─► ruling: serve, or stays away ─► Confirm(volume)
//! ```
//! An answer holds until the next one, which is requested every few seconds. So changes by administrators of other hosts are
//! noticed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::Generation;

use super::hosts::{Hosts, Lacks};
use super::knowledge::{Knowledge, Word};
use super::ruling::{InDoubt, Ruling, Standing, Words, ruling};
use crate::identity::{HostId, VolumeId};
use crate::journal::{Doubt, RestoredVolume, State, Unlisted};

/// How long to wait for a host's answer before it is asked again; its process may have restarted.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long after an answer the host is asked again.
pub const ASK_AGAIN: Duration = Duration::from_secs(5);

/// An event of the restoration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The paired hosts, and those that cannot be asked.
    Hosts(Hosts),
    /// A host has answered the last question.
    Answered(HostId, Answer),
    /// An image was inspected.
    Looked(VolumeId, Look),
    /// The reinstatement of a volume could not be made durable, and is tried again.
    NotRecorded(VolumeId),
    /// The volumes that wait in the journal, after a reinstatement or a removal.
    Waiting(BTreeMap<VolumeId, Claim>),
}

/// The answer of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Its knowledge of the volumes in question; it knows nothing of the others.
    pub known: BTreeMap<VolumeId, Knowledge>,
    /// Whether its silence about a volume counts: its own journal was never restored.
    pub knows_all: bool,
}

/// A volume that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The generation in the backup; for a volume that had left, its generation on departure.
    pub generation: Generation,
    /// Whether the answers of other hosts do not suffice.
    pub doubt: InDoubt,
    /// The source of a waiting copy, whose answer settles the doubt.
    pub copy_of: Option<HostId>,
    /// The host to which the volume had gone.
    pub left_for: Option<HostId>,
}

/// The result of inspecting an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// The image exists, with no evidence against it.
    Fit,
    /// The image does not exist, or cannot be inspected.
    Missing,
    /// The image is marked as the target of an unfinished migration.
    HalfMade,
    /// Another store has an image with the volume's name: the volume may have moved there.
    Rival(String),
    /// No evidence is against the image, but this device or export may hold the volume as well, and cannot be inspected.
    NotAlone(String),
}

/// An action for the restoration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a host for its knowledge of every waiting volume.
    Ask(HostId),
    /// Inspect a volume's image.
    Look(VolumeId),
    /// Make durable the fact that every host has confirmed ([`super::confirm`]): the volume is this host's, or is still away.
    Confirm(VolumeId),
}

/// Asks hosts and inspects images until the owner of each volume is settled.
#[derive(Debug)]
pub struct Restoration {
    claims: BTreeMap<VolumeId, Claim>,
    hosts: BTreeMap<HostId, Asked>,
    lacks: Lacks,
    looks: BTreeMap<VolumeId, Look>,
    looking: BTreeSet<VolumeId>,
    confirmed: BTreeSet<VolumeId>,
    /// When images are inspected again, on a host without other hosts.
    again: Duration,
    actions: VecDeque<Action>,
}

impl Default for Restoration {
    /// Until the hosts are reported, they are unknown, not absent.
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

#[derive(Debug, Default)]
struct Asked {
    again: Duration,
    answer: Option<Answer>,
}

impl Word {
    /// Returns the generation that the other host has seen; `None` if it does not contradict.
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
    /// Returns the event for the volumes that wait in a journal.
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
    /// Handles an event of the restoration.
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
                    // Unavailable images may be available by now.
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

    /// Handles everything that is due at the time from [`Self::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Duration) {
        // No answer triggers another inspection if there are no other hosts.
        if self.hosts.is_empty() && self.again <= now {
            self.again = now + ASK_AGAIN;
            self.looks.retain(|_, look| look.is_fit());
        }
        self.decide(now);
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when the next host must be asked, and why; `None` if no volume waits for an answer.
    pub fn poll_timeout(&self) -> Option<(Duration, &'static str)> {
        if self.claims.is_empty() {
            return None;
        }
        let again = self.hosts.values().map(|asked| asked.again).min();
        Some((again.unwrap_or(self.again), "asking other hosts which volumes they own"))
    }

    /// Returns the evidence about a waiting volume; `None` if it does not wait.
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
            // The volume may have returned to another place.
            InDoubt::No if came_back.is_some() && matches!(look, Some(Look::NotAlone(_))) => InDoubt::Yes,
            doubt => doubt,
        };
        Some(Standing { words: self.all_words(claim, &words, came_back), look, doubt, came_back })
    }

    fn all_words(
        &self,
        claim: &Claim,
        words: &[(HostId, Option<(Word, bool)>)],
        came_back: Option<Generation>,
    ) -> Words {
        let (mut unheard, mut contradicting, mut unreliable) = (Vec::new(), Vec::new(), Vec::new());
        // The backup itself says that the volume had left.
        contradicting.extend(claim.left_for.map(|host| (host, Word::KnowsLater(claim.generation))));
        for (host, word) in words {
            match word {
                None => unheard.push(*host),
                Some((Word::CameBack(_), _) | (Word::Confirms | Word::Gave(_), true)) => {}
                Some((Word::Confirms | Word::Gave(_), false)) => unreliable.push(*host),
                Some((word, _)) => contradicting.push((*host, *word)),
            }
        }
        // Drops knowledge that is older than the return to this host.
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
            // **N.B.** An order needs the inspection as well, whatever the hosts answer.
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
    /// Returns whether the image may be served if no other evidence is against it.
    pub fn is_fit(&self) -> bool {
        matches!(self, Self::Fit | Self::NotAlone(_))
    }
}

impl Asked {
    /// Returns the host's answer about a volume, and whether its silence would count; `None` before its first answer.
    fn word(&self, volume: VolumeId, claim: &Claim) -> Option<(Word, bool)> {
        let answer = self.answer.as_ref()?;
        Some(match answer.known.get(&volume) {
            Some(known) => (known.word(claim.generation), answer.knows_all),
            None => (Word::Confirms, answer.knows_all),
        })
    }
}
