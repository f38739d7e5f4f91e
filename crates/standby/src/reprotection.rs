//! Turns the direction of a standby round after a promotion: the former owner's images become the standby of the promoted volumes.
//!
//! ```text
//!   former owner: written since the oldest watermark that it knows, on an image as it was left ─► lacking() ─► these blocks ──┐
//!   new owner: written since the promotion, by its chronicle ─────────────────────────────────────────────────────────────────┴─► first epoch
//!
//!   at the former owner:  ordered ─keep the divergence─► kept ─take the images─► taken ─record the standby─► ready
//! ```
//! The former owner's image differs from the promoted state at most where the former owner has written since a watermark that is not
//! younger. So it counts as an image whose watermark is [`BASE`] of the new history and that is a mixture: the new owner seals
//! nothing before an epoch has carried all of that (law 16, case 3).

use chronicle::{BlockCount, Epoch, Generation, LayeredBitmap};
use serde::{Deserialize, Serialize};

use crate::identity::{LifeId, StandbyId, Watermark};
use crate::planted::{Bug, broken};
use crate::receiver::Image;
use crate::record::{ImageState, OwnerRecord, StandbyRecord, Standing};

/// The epoch of the promoted state in the history of the new owner. No epoch that is cut has this number.
pub const BASE: Epoch = Epoch(0);

/// What a host knows of a group that it has given up.
#[derive(Clone, Debug)]
pub struct Former {
    /// The record of its replication; `None`: it has none, or cannot read it.
    pub record: Option<OwnerRecord>,
    /// The blocks of each volume that were written since the epoch of `record` or an earlier one, or may be lost in a power cut;
    /// `None`: the chronicle is lost, or cannot be believed.
    pub written: Option<Vec<LayeredBitmap>>,
    /// Whether the images are as they were when the group was given up.
    pub image: Image,
    /// Whether the images can become those of a standby: raw files in the folder of one store.
    pub is_suitable: bool,
}

/// What an image of a former owner lacks of the promoted state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// At most these blocks of each volume.
    These(Vec<LayeredBitmap>),
    /// Perhaps everything.
    Everything(Because),
}

/// Why it is not known what a former owner's image lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Because {
    /// There is no record of the replication.
    NoRecord,
    /// What was written is not known.
    HistoryLost,
    /// The images were changed since the group was given up.
    Touched,
    /// The promoted state is one of another standby, or of another history.
    Stranger,
    /// The promoted state is older than the last one that was confirmed: what was written between them is forgotten.
    OlderPoint,
    /// The promoted state is newer than all that this record knows of: the record was restored from a backup.
    NewerPoint,
    /// The groups have not the same volumes.
    OtherVolumes,
    /// The images cannot become those of a standby.
    Unsuitable,
}

/// Returns what the images of a former owner lack of a promoted state, whose volumes have these sizes at the new owner.
pub fn lacking(former: &Former, promoted: Watermark, sizes: &[BlockCount]) -> Lacking {
    let record = former.record.as_ref();
    let because = match (record, &former.written) {
        (None, _) => Some(Because::NoRecord),
        (Some(record), _) if is_stranger(record, promoted) => Some(Because::Stranger),
        (Some(record), _) if record.acknowledged > Some(promoted.epoch) => Some(Because::OlderPoint),
        (Some(record), _) if promoted.epoch > record.numbered_through => Some(Because::NewerPoint),
        (Some(_), None) => Some(Because::HistoryLost),
        (Some(_), Some(_)) if former.image == Image::Touched => Some(Because::Touched),
        (Some(_), Some(written)) if written.len() != sizes.len() => Some(Because::OtherVolumes),
        (Some(record), Some(_)) if record.acknowledged.is_none() => Some(Because::HistoryLost),
        (Some(_), Some(_)) if !former.is_suitable => Some(Because::Unsuitable),
        (Some(_), Some(_)) => None,
    };
    match (because, &former.written) {
        (None, Some(written)) => {
            Lacking::These(written.iter().zip(sizes).map(|(written, size)| of_size(written, *size)).collect())
        }
        (because, _) => Lacking::Everything(because.unwrap_or(Because::HistoryLost)),
    }
}

fn is_stranger(record: &OwnerRecord, promoted: Watermark) -> bool {
    let is_ours = record.standby == promoted.standby && record.life == promoted.life;
    !is_ours && !broken(Bug::ReprotectsStranger)
}

/// Returns a set of a volume that has this size at the new owner.
///
/// A longer image is cut to the size, and a shorter one is filled up with zeroes: there the new owner has zeroes too, or has written.
pub fn of_size(written: &LayeredBitmap, size: BlockCount) -> LayeredBitmap {
    if broken(Bug::DivergenceForgotten) {
        return LayeredBitmap::new(size);
    }
    let mut set = written.clone().cut_to(size);
    set.grow(size);
    set
}

/// Returns the record with which the new owner begins: its chronicle knows what it has written since the promotion.
pub fn owner_record(standby: StandbyId, life: LifeId) -> OwnerRecord {
    OwnerRecord { standby, generation: Generation(1), life, acknowledged: Some(BASE), numbered_through: BASE }
}

/// Returns the record with which the former owner keeps the standby, if it is known what its images lack.
pub fn standby_record(standby: StandbyId, life: LifeId) -> StandbyRecord {
    StandbyRecord {
        standby,
        generation: Generation(0),
        standing: Standing::Receiving,
        watermark: Some(Watermark { standby, life, epoch: BASE }),
        as_of_ms: 0,
        image: ImageState::Torn,
        sealed: Vec::new(),
        points: Vec::new(),
    }
}

/// Returns whether the new owner must learn what the former one lacks before it begins: no epoch has carried that yet.
pub fn needs_former(record: &OwnerRecord) -> bool {
    record.acknowledged == Some(BASE)
}

/// Returns the blocks that are worth comparing: those that the former owner may have changed and that the new one has not. What the
/// new owner has written is sent anyway.
pub fn to_compare(theirs: &LayeredBitmap, ours: &LayeredBitmap) -> LayeredBitmap {
    let mut to_compare = theirs.clone();
    to_compare.subtract(ours);
    to_compare
}

/// How far the former owner is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Nothing is done yet.
    Ordered,
    /// What only this host has is kept, durably, or was given up by name.
    Kept,
    /// The images are those of the standby.
    Taken,
    /// The standby receives.
    Ready,
}

/// What the former owner does next. Each step may be repeated, and the stage after it is made durable before the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Keep what only this host has, durably.
    KeepDivergence,
    /// Give the images to the standby, with the sizes of the new owner's volumes. **N.B.** What they had is overwritten from then on.
    TakeImages,
    /// Make the standby's record durable, then receive.
    Record,
}

impl Stage {
    /// Returns the next step, and the stage after it; `None`: all is done.
    pub fn next(self) -> Option<(Step, Self)> {
        match self {
            Self::Ordered if broken(Bug::DivergenceOverwritten) => Some((Step::TakeImages, Self::Taken)),
            Self::Ordered => Some((Step::KeepDivergence, Self::Kept)),
            Self::Kept => Some((Step::TakeImages, Self::Taken)),
            Self::Taken => Some((Step::Record, Self::Ready)),
            Self::Ready => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use chronicle::{BlockIndex, BlockRange};

    use super::*;

    const STANDBY: StandbyId = StandbyId(7);
    const LIFE: LifeId = LifeId(9);

    fn at(epoch: u64) -> Watermark {
        Watermark { standby: STANDBY, life: LIFE, epoch: Epoch(epoch) }
    }

    fn former() -> Former {
        let record = OwnerRecord {
            standby: STANDBY,
            generation: Generation(1),
            life: LIFE,
            acknowledged: Some(Epoch(40)),
            numbered_through: Epoch(64),
        };
        let mut written = LayeredBitmap::new(BlockCount(10));
        written.insert(BlockRange::new(3, 5));
        written.insert(BlockRange::new(9, 10));
        Former { record: Some(record), written: Some(vec![written]), image: Image::AsLeft, is_suitable: true }
    }

    fn because(former: &Former, promoted: Watermark) -> Option<Because> {
        match lacking(former, promoted, &[BlockCount(10)]) {
            Lacking::These(_) => None,
            Lacking::Everything(because) => Some(because),
        }
    }

    #[test]
    fn only_what_was_written_since_a_watermark_that_is_not_younger_is_lacking() {
        let Lacking::These(sets) = lacking(&former(), at(41), &[BlockCount(10)]) else {
            panic!("it is known")
        };
        assert_eq!(sets[0].runs().collect::<Vec<_>>(), [BlockRange::new(3, 5), BlockRange::new(9, 10)]);
        assert_eq!(because(&former(), at(40)), None);
        assert_eq!(because(&former(), at(39)), Some(Because::OlderPoint));
        assert_eq!(because(&former(), at(64)), None);
        assert_eq!(because(&former(), at(65)), Some(Because::NewerPoint));
    }

    #[test]
    fn a_set_has_the_size_of_the_new_owner_s_volume() {
        let blocks = |size| match lacking(&former(), at(41), &[BlockCount(size)]) {
            Lacking::These(sets) => (sets[0].blocks(), sets[0].count()),
            Lacking::Everything(because) => panic!("{because:?}"),
        };
        assert_eq!(blocks(4), (BlockCount(4), 1));
        assert_eq!(blocks(10), (BlockCount(10), 3));
        assert_eq!(blocks(20), (BlockCount(20), 3));
    }

    #[test]
    fn whatever_is_in_doubt_lacks_everything() {
        let known = former();
        let other_life = Watermark { life: LifeId(10), ..at(41) };
        let other_standby = Watermark { standby: StandbyId(8), ..at(41) };
        assert_eq!(because(&known, other_life), Some(Because::Stranger));
        assert_eq!(because(&known, other_standby), Some(Because::Stranger));
        assert_eq!(because(&Former { record: None, ..known.clone() }, at(41)), Some(Because::NoRecord));
        assert_eq!(because(&Former { written: None, ..known.clone() }, at(41)), Some(Because::HistoryLost));
        let touched = Former { image: Image::Touched, ..known.clone() };
        assert_eq!(because(&touched, at(41)), Some(Because::Touched));
        let unsuitable = Former { is_suitable: false, ..known.clone() };
        assert_eq!(because(&unsuitable, at(41)), Some(Because::Unsuitable));
        let two = lacking(&known, at(41), &[BlockCount(10), BlockCount(10)]);
        assert_eq!(two, Lacking::Everything(Because::OtherVolumes));
        let mut never = known;
        never.record.as_mut().unwrap().acknowledged = None;
        assert_eq!(because(&never, at(41)), Some(Because::HistoryLost));
    }

    #[test]
    fn what_only_the_former_owner_has_is_kept_before_its_images_are_taken() {
        let mut stage = Stage::Ordered;
        let mut steps = Vec::new();
        while let Some((step, next)) = stage.next() {
            steps.push(step);
            stage = next;
        }
        assert_eq!(steps, [Step::KeepDivergence, Step::TakeImages, Step::Record]);
        assert_eq!(stage, Stage::Ready);
    }

    #[test]
    fn what_the_new_owner_has_written_is_not_compared() {
        let (mut theirs, mut ours) = (LayeredBitmap::new(BlockCount(10)), LayeredBitmap::new(BlockCount(10)));
        theirs.insert(BlockRange::new(2, 6));
        ours.insert(BlockRange::new(4, 9));
        let compared = to_compare(&theirs, &ours);
        assert_eq!(compared.runs().collect::<Vec<_>>(), [BlockRange::new(2, 4)]);
        assert!(theirs.contains(BlockIndex(5)));
    }
}
