//! Who is asked about the volumes of a journal that was put back, and what comes of the answers.
//!
//! ```text
//!   Hosts ─► Ask(host) ─► Answered │ silence: asked again
//!                            │ all have answered, none contradicts, there is no doubt
//!                            ▼
//!                         Look(volume) ─► Looked: fit ─► Confirm(volume) ─► Recorded
//!                                             └─ not there, half-made, a rival: looked again with the next answers
//! ```
//! An answer holds until the next one, which is asked for every few seconds: what people do at another host meanwhile is seen.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use chronicle::Generation;

use super::knowledge::{Knowledge, Word};
use crate::identity::{HostId, VolumeId};
use crate::journal::{Doubt, State};
use crate::planted::{Bug, broken};

/// How long a host is waited for before it is asked again; its process may be another one by then.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// How long an answer is gone by before the host is asked again.
pub const ASK_AGAIN: Duration = Duration::from_secs(5);

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// These hosts are paired with this one.
    Hosts(BTreeSet<HostId>),
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
    /// Its generation in the backup.
    pub generation: Generation,
    /// Whether the words of other hosts are not enough.
    pub is_in_doubt: bool,
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
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask a host what it knows of everything that waits.
    Ask(HostId),
    /// Look at a volume's image.
    Look(VolumeId),
    /// Make durable that a volume is this host's, and serve it.
    Confirm(VolumeId),
}

/// What a volume waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// These hosts have not said what they know.
    Unheard(Vec<HostId>),
    /// These contradict.
    Contradicted(Vec<(HostId, Word)>),
    /// These have confirmed, but were put back themselves, so what they do not know says nothing.
    Unreliable(Vec<HostId>),
    /// None contradicts, and something remains that no host can know: somebody has to decide.
    InDoubt {
        /// With which it came back here after the backup was made, to an image that may be another one; `None`: it did not.
        generation: Option<Generation>,
    },
    /// All have confirmed, and its image is not there.
    NoImage,
    /// All have confirmed, and its image is not complete.
    HalfMade,
    /// All have confirmed, and another store has an image of its name.
    Rival {
        /// Where.
        image: String,
    },
    /// All have confirmed.
    Confirmed,
}

/// Decides when volumes of a journal that was put back are this host's.
#[derive(Debug, Default)]
pub struct Restoration {
    claims: BTreeMap<VolumeId, Claim>,
    hosts: BTreeMap<HostId, Asked>,
    looks: BTreeMap<VolumeId, Look>,
    /// Asked for and not come.
    looking: BTreeSet<VolumeId>,
    confirmed: BTreeSet<VolumeId>,
    /// When images are looked at again, of a host that has nobody to ask.
    again: Duration,
    actions: VecDeque<Action>,
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
            Self::Confirms => None,
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
        let claim = |doubt: &Option<Doubt>, generation| Claim { generation, is_in_doubt: doubt.is_some() };
        let claims = state
            .restored_volumes()
            .map(|(volume, waiting)| (volume, claim(&waiting.doubt, waiting.volume.record.generation)));
        Self::Waiting(claims.collect())
    }
}

impl Restoration {
    /// Takes what has happened.
    pub fn handle_event(&mut self, now: Duration, event: Event) {
        match event {
            Event::Hosts(hosts) => {
                self.hosts.retain(|host, _| hosts.contains(host));
                for host in hosts {
                    self.hosts.entry(host).or_default();
                }
            }
            Event::Answered(host, answer) => {
                if let Some(asked) = self.hosts.get_mut(&host) {
                    *asked = Asked { again: now + ASK_AGAIN, answer: Some(answer) };
                    // What was not to be had may be by now.
                    self.looks.retain(|_, look| *look == Look::Fit);
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
            self.looks.retain(|_, look| *look == Look::Fit);
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

    /// What a volume waits for; `None`: it does not wait.
    pub fn standing(&self, volume: VolumeId) -> Option<Standing> {
        let claim = self.claims.get(&volume)?;
        let words = self.hosts.iter().map(|(host, asked)| (*host, asked.word(volume, claim)));
        let (mut unheard, mut contradicting, mut unreliable) = (Vec::new(), Vec::new(), Vec::new());
        let mut came_back: Option<Generation> = None;
        for (host, word) in words {
            match word {
                None => unheard.push(host),
                Some((Word::Confirms, true)) => {}
                Some((Word::Confirms, false)) => unreliable.push(host),
                Some((Word::CameBack(generation), _)) => came_back = came_back.max(Some(generation)),
                Some((word, _)) => contradicting.push((host, word)),
            }
        }
        // What another host knew before it came back here.
        contradicting.retain(|(_, word)| match word {
            Word::KnowsLater(generation) => Some(*generation) > came_back,
            _ => true,
        });
        if !contradicting.is_empty() {
            return Some(Standing::Contradicted(contradicting));
        }
        if !unheard.is_empty() && !broken(Bug::RestoredUnasked) {
            return Some(Standing::Unheard(unheard));
        }
        if !unreliable.is_empty() {
            return Some(Standing::Unreliable(unreliable));
        }
        Some(match self.looks.get(&volume) {
            Some(Look::Missing) => Standing::NoImage,
            Some(Look::HalfMade) if !broken(Bug::RestoredHalfMade) => Standing::HalfMade,
            Some(Look::Rival(image)) if !broken(Bug::RestoredRival) => {
                Standing::Rival { image: image.clone() }
            }
            _ if (claim.is_in_doubt || came_back.is_some()) && !broken(Bug::RestoredDoubt) => {
                Standing::InDoubt { generation: came_back }
            }
            _ => Standing::Confirmed,
        })
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
            let is_fit =
                self.looks.contains_key(&volume) && self.standing(volume) == Some(Standing::Confirmed);
            if is_fit && self.confirmed.insert(volume) {
                self.actions.push_back(Action::Confirm(volume));
            }
        }
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
