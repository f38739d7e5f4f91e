//! The table of claims against steps.

use super::claim::Kind;
use super::step::{Owner, Step, Word};
use crate::planted::{Bug, broken};

/// Returns whether a claim on an image keeps `owner` from taking `step`.
pub(super) fn refuses(kind: &Kind, step: Step, owner: &Owner) -> bool {
    match kind {
        Kind::Unknown { .. } => !matches!(owner, Owner::Maker) && !broken(Bug::UnknownTakenForFree),
        // Something that is not understood keeps no volume from being served: only deletions cannot be undone.
        Kind::UnknownAbove { .. } => {
            takes_volume_away(step) && !matches!(owner, Owner::Maker) && !broken(Bug::UnknownTakenForFree)
        }
        Kind::Foreign { .. } => against_strangers(step, owner),
        Kind::Served { volume, .. } => !is_of_volume(owner, *volume) || !may_own_volume(step),
        Kind::BelowServed { .. } | Kind::BelowImage { .. } => {
            !matches!(step, Step::ServeReadOnly | Step::Unmark | Step::Mark) && !broken(Bug::ChainUnclaimed)
        }
        // The volume may remain served, and its image may have any name.
        Kind::BelowExport { .. } => takes_volume_away(step) && !broken(Bug::ChainUnclaimed),
        Kind::Target { migration } | Kind::Left { migration } => *owner != Owner::Migration(*migration),
        Kind::Reservoir { migration, .. } => {
            *owner != Owner::Migration(*migration) && !broken(Bug::ReservoirUnclaimed)
        }
        Kind::Kept { .. } => against_kept(step, owner),
        Kind::Stale { .. } => is_service(step) && *owner != Owner::Administrator(Word::Insists),
        // N.B. A volume made of it would be a second one with this content, beside that of the other host.
        Kind::GivenUp { .. } => is_service(step) && *owner == Owner::Administrator(Word::Plain),
        Kind::HalfMade => against_half_made(step, owner),
        Kind::Exchanged | Kind::Linked { .. } => {
            against_exchanged(step, owner) && !broken(Bug::ExchangedTaken)
        }
        Kind::Given => step == Step::Discard && *owner != Owner::Maker,
        Kind::Unrecorded => *owner == Owner::Housekeeping && !broken(Bug::UnrecordedClearedAway),
        Kind::Restored { volume, .. } => !is_of_volume(owner, *volume) || !matches!(step, Step::Restore),
    }
}

/// Returns whether a volume that is served from the image lacks its bytes after the step.
fn takes_volume_away(step: Step) -> bool {
    matches!(
        step,
        Step::Discard
            | Step::TakeBack
            | Step::Create
            | Step::Zero
            | Step::Release
            | Step::Advise(super::step::Advice::Delete | super::step::Advice::Truncate)
    )
}

/// Permits steps that keep the bytes: a foreign program keeps its open descriptor when the name changes.
fn against_strangers(step: Step, owner: &Owner) -> bool {
    match step {
        // The program that has it open is the one that receives it.
        Step::Fence | Step::Rename | Step::Unmark | Step::ServeReadOnly | Step::GiveBack => false,
        // The name is known to its maker alone so far.
        Step::Create => *owner != Owner::Maker,
        Step::Discard
        | Step::TakeBack
        | Step::Resize
        | Step::Zero
        | Step::Mark
        | Step::ServeReadWrite
        | Step::Release
        | Step::Restore
        | Step::Advise(_) => true,
    }
}

/// Returns whether a volume may take this step on its own image while served. To delete the image, the volume is removed first.
fn may_own_volume(step: Step) -> bool {
    matches!(
        step,
        Step::Rename
            | Step::Fence
            | Step::Resize
            | Step::Zero
            | Step::Unmark
            | Step::GiveBack
            | Step::ServeReadWrite
            | Step::ServeReadOnly
            | Step::Advise(super::step::Advice::Truncate)
    )
}

/// Orders and limits may delete a kept image, and a volume that returns may reuse it. If an administrator has a volume
/// served from the image, it belongs to that volume.
fn against_kept(step: Step, owner: &Owner) -> bool {
    match step {
        Step::Discard => matches!(owner, Owner::Maker),
        Step::TakeBack | Step::Fence => !matches!(owner, Owner::Migration(_)),
        Step::ServeReadOnly | Step::Unmark | Step::Release => false,
        Step::ServeReadWrite => !matches!(owner, Owner::Administrator(_) | Owner::Volume(_)),
        Step::Rename | Step::Resize | Step::Zero | Step::GiveBack | Step::Restore => {
            !matches!(owner, Owner::Volume(_))
        }
        // An order may delete it.
        Step::Advise(super::step::Advice::Delete) => !matches!(owner, Owner::Administrator(_)),
        Step::Create | Step::Mark | Step::Advise(_) => true,
    }
}

fn against_half_made(step: Step, owner: &Owner) -> bool {
    match owner {
        Owner::Administrator(Word::Insists) => false,
        // A volume that is being filled is served from it, and a migration handles its target. The restoration checks marks by
        // itself.
        Owner::Volume(_) | Owner::Migration(_) => matches!(step, Step::GiveBack),
        _ => is_service(step),
    }
}

/// Refuses steps on an exchanged image. An administrator who serves it by its name means the present image.
fn against_exchanged(step: Step, owner: &Owner) -> bool {
    match owner {
        Owner::Maker => false,
        Owner::Administrator(word) => step == Step::Discard && *word == Word::Plain,
        // A file of a restored journal is examined first, and recorded afterwards.
        Owner::Volume(_) => step != Step::Restore,
        Owner::Migration(_) | Owner::Housekeeping => true,
    }
}

/// Returns whether guests would see the image as their disk.
fn is_service(step: Step) -> bool {
    matches!(step, Step::ServeReadWrite | Step::ServeReadOnly | Step::GiveBack | Step::Restore)
}

fn is_of_volume(owner: &Owner, volume: crate::identity::VolumeId) -> bool {
    *owner == Owner::Volume(volume)
}
