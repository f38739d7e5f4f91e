//! The book: every claim, and whether a step may be taken.

use std::fmt;

use super::claim::{Claim, Kind};
use super::rules;
use super::step::{Owner, Step};
use crate::identity::{MigrationId, VolumeId};
use crate::journal::{ImageLocation, MigrationState, Place, ReservedContent, Side, State};
use crate::planted::{Bug, broken};

/// What an image is, whatever it is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Identity {
    /// A file.
    File {
        /// The number of its file system.
        device: u64,
        /// Its number there.
        inode: u64,
    },
    /// A block device, by its number.
    Device(u64),
    /// An export of an NBD server, by its URI.
    Export(String),
}

/// What a name leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// This.
    There(Identity),
    /// Nothing.
    Gone,
    /// Nobody has looked, or it could not be looked at.
    Unknown(String),
}

/// What a step is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its name.
    pub place: Place,
    /// What is there. For a file: what the open descriptor says.
    pub found: Found,
}

/// All claims that are known.
#[derive(Clone, Debug, Default)]
pub struct Book {
    claims: Vec<Claim>,
}

/// That a step may be taken on one image. Only [`Book::ask`] gives one.
#[derive(Debug)]

pub struct Permit {
    step: Step,
    object: Object,
}

/// Who keeps a step from being taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refused {
    /// What was to be done.
    pub step: Step,
    /// What stands against it; at least one.
    pub claims: Vec<Kind>,
}

impl Book {
    /// What the journal knows. The identities are for [`Book::identify`].
    pub fn of_journal(state: &State) -> Self {
        let mut book = Self::default();
        for known in state.volumes.values() {
            let record = &known.record;
            book.claim(&record.image, Kind::Served { volume: record.volume, name: record.name.clone() });
        }
        // Also what had left when the backup was made: nobody has said whether it is still away.
        for record in state.claimed_records().filter(|record| !state.volumes.contains_key(&record.volume)) {
            let kind = Kind::Restored { volume: record.volume, name: record.name.clone() };
            book.claim(&record.image, kind);
        }
        for (id, migration) in state.unfinished() {
            book.add_migration(state, id, migration);
        }
        for (place, fence) in &state.reservations {
            let (volume, migration) = (fence.volume.clone(), fence.migration);
            let kind = match fence.content {
                ReservedContent::Left => Kind::Stale { volume, migration },
                ReservedContent::Kept => Kind::Kept { volume, migration },
                ReservedContent::HalfMade => Kind::HalfMade,
            };
            book.add(Claim { kind, place: place.clone(), found: not_looked() });
        }
        book
    }

    fn add_migration(&mut self, state: &State, id: MigrationId, migration: &MigrationState) {
        for moving in &migration.volumes {
            // The target of a migration to another host is there, and what has arrived is served from it.
            if migration.side.has_target() && !migration.has_arrived() {
                self.claim(&moving.target, Kind::Target { migration: id });
            }
            let is_served = state.volumes.get(&moving.volume);
            let is_served = is_served.is_some_and(|known| known.record.image == moving.source);
            let is_read = state.is_reservoir(moving.source.place.name());
            match &migration.side {
                Side::Incoming { .. } => {}
                Side::Outgoing { peer_name, .. } if is_read => {
                    self.claim(&moving.source, Kind::Reservoir { migration: id, host: peer_name.clone() });
                }
                Side::OneHost | Side::Outgoing { .. } if is_served => {}
                Side::OneHost | Side::Outgoing { .. } => {
                    self.claim(&moving.source, Kind::Left { migration: id });
                }
            }
        }
    }

    fn claim(&mut self, image: &ImageLocation, kind: Kind) {
        // A migration to another host has no name for what is there.
        if !image.place.name().is_empty() {
            self.add(Claim { kind, place: image.place.clone(), found: not_looked() });
        }
    }

    /// Takes the claims of one volume out: what may be done once it is removed?
    pub fn forget_volume(&mut self, gone: VolumeId) {
        self.claims.retain(|claim| match claim.kind {
            Kind::Served { volume, .. }
            | Kind::BelowServed { volume, .. }
            | Kind::Restored { volume, .. } => volume != gone,
            _ => true,
        });
    }

    /// Adds a claim that the journal does not know.
    pub fn add(&mut self, claim: Claim) {
        self.claims.push(claim);
    }

    /// All claims.
    pub fn claims(&self) -> &[Claim] {
        &self.claims
    }

    /// Notes what each claimed name leads to.
    pub fn identify(&mut self, mut look: impl FnMut(&Place) -> Found) {
        for claim in &mut self.claims {
            claim.found = look(&claim.place);
        }
    }

    /// Tells what is claimed of an object, whatever is to be done to it.
    pub fn claims_on<'a>(&'a self, object: &'a Object) -> impl Iterator<Item = &'a Claim> {
        self.claims.iter().filter(move |claim| claim.is_on(object))
    }

    /// Decides whether `owner` may take `step`.
    ///
    /// # Errors
    /// [`Refused`]: nothing may be changed.
    pub fn ask(&self, step: Step, owner: &Owner, object: &Object) -> Result<Permit, Refused> {
        let permit = || Permit { step, object: object.clone() };
        if broken(Bug::CustodyUnasked) {
            return Ok(permit());
        }
        let on_it: Vec<&Claim> = self.claims_on(object).collect();
        let fills = |claim: &&Claim| matches!(&claim.kind, Kind::Target { migration } if *owner == Owner::Migration(*migration));
        let is_own_target = on_it.iter().any(fills);
        let leaves = |claim: &&Claim| matches!(&claim.kind, Kind::Left { migration } | Kind::Reservoir { migration, .. } if *owner == Owner::Migration(*migration));
        let is_left = on_it.iter().any(leaves);
        let mut claims: Vec<Kind> = Vec::new();
        for claim in on_it {
            let is_against = match (&claim.kind, is_own_target) {
                // It was renamed, and its name is free.
                (Kind::Left { .. }, _) if step == Step::Create && claim.found == Found::Gone => false,
                // What a migration fills holds no more than that has written. Its source's host may have it open: a lease.
                (Kind::Foreign { .. } | Kind::Unknown { .. }, true) => {
                    !matches!(step, Step::Discard | Step::Create | Step::Resize | Step::Mark | Step::Unmark)
                }
                // What a volume has written to until now carries no chain. Under another name it is safe in any case.
                (Kind::Unknown { .. }, false) if is_left && step == Step::Fence => false,
                // It goes on to fill what it takes back.
                (Kind::Left { .. } | Kind::Reservoir { .. }, true) => matches!(step, Step::Discard),
                (kind, _) => rules::refuses(kind, step, owner),
            };
            if is_against && !claims.contains(&claim.kind) {
                claims.push(claim.kind.clone());
            }
        }
        if let (Found::Unknown(why), false) = (&object.found, *owner == Owner::Maker) {
            claims.push(Kind::Unknown { why: why.clone() });
        }
        if claims.is_empty() { Ok(permit()) } else { Err(Refused { step, claims }) }
    }
}

impl Claim {
    /// Tells whether it is on an object: by name, or by identity.
    pub fn is_on(&self, object: &Object) -> bool {
        // What is not known may be about anything.
        if let Kind::Unknown { .. } = self.kind {
            return true;
        }
        let by_identity = match (&self.found, &object.found) {
            (Found::There(one), Found::There(other)) => one == other,
            _ => false,
        };
        self.place == object.place || by_identity && !broken(Bug::ClaimsByNameAlone)
    }
}

impl Permit {
    /// What it permits.
    pub fn step(&self) -> Step {
        self.step
    }

    /// On what.
    pub fn object(&self) -> &Object {
        &self.object
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it cannot be {}: ", self.step.participle())?;
        for (position, kind) in self.claims.iter().enumerate() {
            write!(f, "{}{kind}", if position == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

fn not_looked() -> Found {
    Found::Unknown("nobody has looked".to_owned())
}
