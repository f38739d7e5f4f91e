//! Explains what a volume of a restored journal waits for, and what can be done about it.

use migration::HostId;
use migration::journal::{Doubt, Moved, NamedHost, Unlisted};
use migration::restoration::{InDoubt, Lacks, Look, Standing, Word, Words as Said};

/// The facts about a volume for its explanation.
pub(crate) struct Words<'a> {
    pub(crate) volume: &'a str,
    /// Why the answers of other hosts are not enough.
    pub(crate) doubt: Option<&'a Doubt>,
    /// Where it had moved when the backup was made.
    pub(crate) moved: Option<&'a Moved>,
    pub(crate) named: &'a [NamedHost],
    /// Returns the name of a host, and its identity if it is not paired.
    pub(crate) name_of: &'a dyn Fn(HostId) -> String,
}

impl Words<'_> {
    /// Returns the whole explanation as one sentence.
    pub(crate) fn of(&self, standing: Option<&Standing>) -> String {
        let what = match standing {
            None => "other hosts are being asked which host owns it".to_owned(),
            Some(standing) => self.all(standing),
        };
        format!("the journal was restored from a backup, and {what}")
    }

    /// Returns what the hosts say and the state of the image, whichever of them decides.
    fn all(&self, standing: &Standing) -> String {
        if let Some(Doubt::Hollow { peer_name }) = self.doubt {
            return format!(
                "it lacked blocks then that host \"{peer_name}\" had, and it is unknown which ones it lacks now; to forget it \
                 here and keep its image: {}",
                self.remove()
            );
        }
        let facts = [Some(self.hosts(standing)), self.image(standing)];
        let facts: Vec<String> = facts.into_iter().flatten().filter(|fact| !fact.is_empty()).collect();
        let facts = match facts.is_empty() {
            true => "all other hosts have confirmed it".to_owned(),
            false => facts.join(", and "),
        };
        format!("{facts}; {}", self.advice(standing))
    }

    fn hosts(&self, standing: &Standing) -> String {
        let list =
            |hosts: &[HostId]| hosts.iter().map(|host| (self.name_of)(*host)).collect::<Vec<_>>().join(", ");
        match &standing.words {
            Said::Away(host, _) => format!("host {} knows where it is", (self.name_of)(*host)),
            Said::Contradicted(words) => {
                words.iter().map(|(host, word)| self.word(*host, *word)).collect::<Vec<_>>().join(", ")
            }
            Said::Unlisted(lacks) => self.unlisted(lacks),
            Said::Unheard(hosts) => format!("these hosts have not said which host owns it: {}", list(hosts)),
            Said::Unreliable(hosts) => {
                format!("these hosts do not know it, and their journals were restored, too: {}", list(hosts))
            }
            Said::Agreed if standing.doubt == InDoubt::Yes => self.doubt(standing),
            Said::Agreed => String::new(),
        }
    }

    fn word(&self, host: HostId, word: Word) -> String {
        let left =
            self.moved.filter(|moved| moved.host == host && word == Word::KnowsLater(moved.generation));
        let name = (self.name_of)(host);
        match word {
            _ if left.is_some() => {
                format!("it had moved to host {name} then, and no host has said where it is now")
            }
            Word::HasIt(generation) => {
                format!("host {name} knows that another host has it, with generation {}", generation.0)
            }
            Word::KnowsLater(generation) => {
                format!("host {name} has seen it with generation {}", generation.0)
            }
            Word::Unsure(generation) => {
                format!("host {name} may have it as well, with generation {}", generation.0)
            }
            Word::CameBack(_) | Word::Gave(_) | Word::Confirms => format!("host {name} does not have it"),
        }
    }

    /// Returns which hosts cannot be asked, and how to change that.
    fn unlisted(&self, lacks: &Lacks) -> String {
        let pair = "pair this host with each of them again (sterna host invite, sterna host join)";
        let named =
            |hosts: &[HostId]| hosts.iter().map(|host| (self.name_of)(*host)).collect::<Vec<_>>().join(", ");
        match lacks {
            Lacks::Nothing => String::new(),
            Lacks::These(hosts) => format!(
                "these hosts may have it, and are not paired with this one now: {}; {pair}",
                named(hosts)
            ),
            Lacks::Unknown(why) => {
                let why = match why {
                    Unlisted::Missing => "the list of hosts that were paired with this one is lost",
                    Unlisted::Unreadable => "the list of hosts that are paired with this one cannot be read",
                    Unlisted::OfAnotherTime => "the list of hosts may be of another time than this journal",
                };
                let known: Vec<HostId> = self.named.iter().map(|host| host.id).collect();
                let known = match known.is_empty() {
                    true => "the backup names none of them".to_owned(),
                    false => format!("the backup names {}", named(&known)),
                };
                format!("{why}, so any host that was in it may have the volume ({known}); {pair}")
            }
        }
    }

    fn doubt(&self, standing: &Standing) -> String {
        match (self.doubt, standing.came_back) {
            (Some(Doubt::Lasting), _) => {
                "its device or export keeps an old copy when a volume leaves it, so it is unknown whether this is one".to_owned()
            }
            (Some(Doubt::Copy { peer_name, .. }), _) => {
                format!("it was a copy that waited for host \"{peer_name}\"")
            }
            (Some(Doubt::BetweenStores { other }), _) => {
                format!("it was being moved, so its image may be {} as well", other.place)
            }
            (Some(Doubt::Hollow { .. }) | None, came_back) => {
                let generation = came_back.map_or_else(String::new, |came| format!(", with generation {}", came.0));
                format!("it has returned here since{generation}, perhaps to another image")
            }
        }
    }

    fn image(&self, standing: &Standing) -> Option<String> {
        Some(match standing.look.as_ref()? {
            Look::Missing => "its image is not there: it has left, or its store is not mounted".to_owned(),
            Look::HalfMade => "its image is marked as one that a migration has not completed".to_owned(),
            Look::Rival(image) => {
                format!("there is another image of it, which may be the later one: {image}")
            }
            Look::NotAlone(other) if standing.came_back.is_some() && standing.words == Said::Agreed => {
                format!("{other} may have it as well")
            }
            Look::Fit | Look::NotAlone(_) => return None,
        })
    }

    fn advice(&self, standing: &Standing) -> String {
        let by_force = format!(
            "to forget it here: {}; to use the image that is here anyway, which loses writes at other hosts, or makes two \
             volumes of one: sterna volume promote {} --restored --force",
            self.remove(),
            self.volume
        );
        match (&standing.look, &standing.words) {
            (Some(Look::Missing), _) => format!("if it has left, forget it here: {}", self.remove()),
            (Some(Look::HalfMade | Look::Rival(_)), _) | (_, Said::Contradicted(_)) => by_force,
            (_, Said::Agreed) if standing.came_back.is_some() => {
                format!("if its image is the right one: sterna volume promote {} --restored", self.volume)
            }
            _ => format!(
                "if you know that no other host has it: sterna volume promote {} --restored",
                self.volume
            ),
        }
    }

    fn remove(&self) -> String {
        format!("sterna volume remove {}", self.volume)
    }
}
