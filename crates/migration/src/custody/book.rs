//! The book of all claims; it decides whether a step may be taken.

use std::collections::BTreeMap;
use std::fmt;

use super::claim::{Claim, Kind};
use super::lasting::{KnownImage, Lasting, Purpose, Verdict, judge};
use super::rules;
use super::stack::Stack;
use super::step::{Owner, Step};
use crate::identity::{MigrationId, VolumeId};
use crate::journal::{ImageLocation, MigrationState, Place, ReservedContent, Side, State};
use crate::planted::{Bug, broken};

/// The identity of an image, independent of its names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Identity {
    /// A regular file, by device and inode.
    File {
        /// The number of its file system.
        device: u64,
        /// Its inode number in that file system.
        inode: u64,
    },
    /// A block device, by its number.
    Device(u64),
    /// An export of an NBD server, by its URI.
    Export(String),
}

/// The result of looking up a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The name leads to this image.
    There(Identity),
    /// The name does not exist.
    Gone,
    /// The name was not looked up, or the lookup failed for this reason.
    Unknown(String),
}

/// The image or device that a step is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// The name of the image.
    pub place: Place,
    /// The image under that name. For a file: the identity of the open descriptor.
    pub found: Found,
    /// The image's identity across restarts; `None`: it is unknown.
    pub lasting: Option<Lasting>,
}

/// All claims that are known at this host.
#[derive(Clone, Debug, Default)]
pub struct Book {
    claims: Vec<Claim>,
    /// The images that the journal means by names.
    images: BTreeMap<Place, KnownImage>,
    /// The stacks of images. An image without one is only itself.
    stacks: BTreeMap<Identity, Stack>,
    /// Where names lead that are links.
    links: BTreeMap<Place, (String, Lasting)>,
    /// The names of the volumes that left by each migration.
    left_by: BTreeMap<MigrationId, String>,
}

/// The permission to take one step on one image. Only [`Book::ask`] returns one.
#[derive(Debug)]

pub struct Permit {
    step: Step,
    object: Object,
}

/// The refusal of a step, with the claims against it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Refused {
    /// The step that was refused.
    pub step: Step,
    /// The claims against it; at least one.
    pub claims: Vec<Kind>,
}

impl Book {
    /// Returns the claims that follow from the journal. [`Book::identify`] adds the identities.
    pub fn of_journal(state: &State) -> Self {
        let left_by = state.migrations.iter().map(|(id, migration)| (*id, migration.names.join(", ")));
        let mut book = Self { images: state.images.clone(), left_by: left_by.collect(), ..Self::default() };
        for known in state.volumes.values() {
            let record = &known.record;
            book.claim(&record.image, Kind::Served { volume: record.volume, name: record.name.clone() });
        }
        // Includes volumes that had left when the backup was made: it is not known whether they are still away.
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
            // The target of a migration to another host is at that host, and what has arrived is served from it.
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
        // A migration to another host has no name for that host's image.
        if !image.place.name().is_empty() {
            self.add(Claim { kind, place: image.place.clone(), found: not_looked() });
        }
    }

    /// Removes the claims of one volume, to find out what may be done once the volume is removed.
    pub fn forget_volume(&mut self, gone: VolumeId) {
        self.claims.retain(|claim| match claim.kind {
            Kind::Served { volume, .. }
            | Kind::BelowServed { volume, .. }
            | Kind::Restored { volume, .. } => volume != gone,
            _ => true,
        });
    }

    /// Takes an open image as the one that is meant by its name.
    pub fn mean(&mut self, place: &Place, lasting: Lasting) {
        self.images.insert(place.clone(), KnownImage { lasting, purpose: Purpose::Passing });
    }

    /// Says where a name leads that is a link.
    pub fn link(&mut self, place: &Place, to: String, lasting: Lasting) {
        self.links.insert(place.clone(), (to, lasting));
    }

    /// Adds a claim that the journal does not know.
    pub fn add(&mut self, claim: Claim) {
        self.claims.push(claim);
    }

    /// Returns all claims in the book.
    pub fn claims(&self) -> &[Claim] {
        &self.claims
    }

    /// Records the image to which each claimed name leads.
    pub fn identify(&mut self, mut look: impl FnMut(&Place) -> Found) {
        for claim in &mut self.claims {
            claim.found = look(&claim.place);
        }
    }

    /// Returns the claims on an object, regardless of the step.
    pub fn claims_on<'a>(&'a self, object: &'a Object) -> impl Iterator<Item = &'a Claim> {
        self.claims.iter().filter(move |claim| self.is_on(claim, object))
    }

    /// Adds the stack of an image.
    pub fn stand(&mut self, identity: Identity, stack: Stack) {
        self.stacks.insert(identity, stack);
    }

    /// Returns whether a claim is on an object: by name, or because they share bytes.
    fn is_on(&self, claim: &Claim, object: &Object) -> bool {
        // An unknown claim may be about any image.
        if let Kind::Unknown { .. } | Kind::UnknownAbove { .. } = claim.kind {
            return true;
        }
        let has_common_bytes = match (&claim.found, &object.found) {
            (Found::There(one), Found::There(other)) => one == other || self.overlap(one, other),
            _ => false,
        };
        claim.place == object.place || has_common_bytes && !broken(Bug::ClaimsByNameAlone)
    }

    fn overlap(&self, one: &Identity, other: &Identity) -> bool {
        match (self.stacks.get(one), self.stacks.get(other)) {
            (Some(one), Some(other)) => one.overlaps(other),
            _ => false,
        }
    }

    /// Returns what keeps a file from being the image that the journal means by its name.
    fn doubt(&self, object: &Object) -> Option<Kind> {
        // The server alone knows which image an export is.
        if !matches!(object.found, Found::There(_)) || matches!(object.place, Place::Nbd(_)) {
            return None;
        }
        match judge(self.images.get(&object.place), object.lasting.as_ref()) {
            Verdict::Confirmed => {
                self.images.get(&object.place).and_then(|known| self.purposely(known.purpose))
            }
            Verdict::Unrecorded => Some(Kind::Unrecorded),
            Verdict::Exchanged => Some(self.linked(&object.place).unwrap_or(Kind::Exchanged)),
        }
    }

    fn linked(&self, place: &Place) -> Option<Kind> {
        let (to, lasting) = self.links.get(place)?;
        let is_image = judge(self.images.get(place), Some(lasting)) == Verdict::Confirmed;
        is_image.then(|| Kind::Linked { to: to.clone() })
    }

    /// Returns the claim that the journal's record of an image makes.
    fn purposely(&self, purpose: Purpose) -> Option<Kind> {
        match purpose {
            Purpose::Given(_) => Some(Kind::Given),
            Purpose::Hidden(migration) => {
                let volume = self.left_by.get(&migration).cloned().unwrap_or_default();
                Some(Kind::Stale { volume, migration })
            }
            Purpose::Use | Purpose::Kept(_) | Purpose::Passing | Purpose::Folder => None,
        }
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
                // The image was renamed, and its name is free.
                (Kind::Left { .. }, _) if step == Step::Create && claim.found == Found::Gone => false,
                // A migration's target holds only data which that migration has written. The source host may have it
                // open, under a lease.
                (Kind::Foreign { .. } | Kind::Unknown { .. } | Kind::UnknownAbove { .. }, true) => {
                    !matches!(step, Step::Discard | Step::Create | Step::Resize | Step::Mark | Step::Unmark)
                }
                // A file that a volume has written to until this moment has no backing chain. A rename is safe in any case.
                (Kind::Unknown { .. }, false) if is_left && step == Step::Fence => false,
                // The migration continues to fill the image that it reuses.
                (Kind::Left { .. } | Kind::Reservoir { .. }, true) => matches!(step, Step::Discard),
                (kind, _) => rules::refuses(kind, step, owner),
            };
            if is_against && !claims.contains(&claim.kind) {
                claims.push(claim.kind.clone());
            }
        }
        if let Some(kind) = self.doubt(object).filter(|kind| rules::refuses(kind, step, owner)) {
            claims.push(kind);
        }
        if let (Found::Unknown(why), false) = (&object.found, *owner == Owner::Maker) {
            claims.push(Kind::Unknown { why: why.clone() });
        }
        if claims.is_empty() { Ok(permit()) } else { Err(Refused { step, claims }) }
    }
}

impl Permit {
    /// Returns the permitted step.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Returns the image that the permit is for.
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
