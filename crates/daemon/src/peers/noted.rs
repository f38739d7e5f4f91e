//! The audit records of what another host orders here: a migration that it offers, a volume that it attaches or detaches.

use std::time::Instant;

use migration::journal::ExportAccess;
use migration::wire::{Acceptance, Offer, OfferedAttachment, Refusal};
use migration::{HostId, MigrationId, VolumeId};
use serde_json::{Map, Value};

use crate::audit::details::text;
use crate::audit::{By, Entry};

/// How many names of volumes are recorded: more than a migration may have.
const NAMES_MAX: usize = 64;

/// An offer that has not been answered.
pub(super) struct Noted {
    entry: Entry,
    begun: Instant,
}

impl Noted {
    pub(super) fn begin(peer: HostId, migration: MigrationId, offer: &Offer) -> Self {
        let names = offer.volumes.iter().take(NAMES_MAX).map(|offered| Value::String(text(&offered.name)));
        let mut details = Map::new();
        details.insert("migration".to_owned(), migration.to_string().into());
        details.insert("volumes".to_owned(), names.collect());
        details.insert("store".to_owned(), text(&offer.store).into());
        if let Some(vm) = &offer.vm {
            details.insert("vm".to_owned(), text(&vm.name).into());
        }
        Self::of(peer, "offer", details)
    }

    /// Begins the record of a volume that another host attaches here.
    pub(super) fn attach(peer: HostId, offered: &OfferedAttachment) -> Self {
        let mut details = Map::new();
        details.insert("volume".to_owned(), text(&offered.name).into());
        details.insert("read_only".to_owned(), (offered.access == ExportAccess::ReadOnly).into());
        Self::of(peer, "attach", details)
    }

    /// Begins the record of a volume that another host detaches here.
    pub(super) fn detach(peer: HostId, volume: VolumeId, is_forced: bool) -> Self {
        let mut details = Map::new();
        details.insert("volume".to_owned(), volume.to_string().into());
        details.insert("force".to_owned(), is_forced.into());
        Self::of(peer, "detach", details)
    }

    fn of(peer: HostId, order: &str, details: Map<String, Value>) -> Self {
        let entry = Entry {
            by: Some(By::Host { id: peer }),
            order: order.to_owned(),
            path: None,
            details,
            status: None,
            outcome: String::new(),
            seconds: 0.0,
        };
        Self { entry, begun: Instant::now() }
    }

    pub(super) fn answered(self, answer: &Result<Acceptance, Refusal>) -> Entry {
        self.ended(answer.as_ref().err())
    }

    pub(super) fn ended(self, refusal: Option<&Refusal>) -> Entry {
        let outcome = match refusal {
            None => "done".to_owned(),
            Some(refusal) => snake_case(&format!("{:?}", refusal.code)),
        };
        Entry { outcome, seconds: self.begun.elapsed().as_secs_f64(), ..self.entry }
    }
}

/// Converts a code's name to the API's form.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for (index, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && index > 0 {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
    }
    snake
}
