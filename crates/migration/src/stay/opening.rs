//! What a start trusts of a residency, and what it makes durable before the volume is served.
//!
//! ```text
//!   kept, marks ──┐
//!   record ───────┼──► believe ──┬── trust: continue above every epoch that is found
//!   look ─────────┘              └── nothing: forget, durably ──► the image is in use, durably ──► serve
//! ```

use chronicle::{Epoch, Kept};

use super::image::{ImageRecord, Look};
use super::life::{Lives, Run};
use crate::planted::{Bug, broken};

/// The stored state of a residency at a start.
#[derive(Clone, Debug)]
pub struct Found {
    /// The kept state with all marks; `None` if there is none, or it is unreadable.
    pub kept: Option<Kept>,
    /// The record of the image.
    pub record: Option<ImageRecord>,
    /// The image's current state, held by no one else; `None` if its place does not say.
    pub look: Option<Look>,
    /// The signs of life of this daemon and of earlier ones.
    pub lives: Lives,
}

/// The decision about the stored state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The state with which the residency continues.
    pub believed: Option<Kept>,
    /// The reason why an existing state is rejected.
    pub distrust: Option<Distrust>,
    /// The steps, in order, before the volume is served.
    pub steps: Vec<OpeningStep>,
}

/// A step of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpeningStep {
    /// Forgets the kept state and all marks durably. If this fails, the volume must not be served.
    Forget,
    /// Durably replaces the record of the image. If this fails, the next start may trust less, but never anything false.
    Record(ImageRecord),
}

/// The reason why a kept state is not trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Distrust {
    /// The parts of the kept state do not fit together.
    #[error("the kept record contradicts itself")]
    Inconsistent,
    /// The former state of the image is not known.
    #[error("the state of its image at the last close was not recorded")]
    NotRecorded,
    /// The place of the image cannot say whether the image has changed.
    #[error("its kind of image does not show whether another program has changed it")]
    Unknowable,
    /// Another image is in its place.
    #[error("another image is in its place")]
    Another,
    /// The image was changed by another program.
    #[error("its image was changed while it was not served")]
    Touched,
    /// The daemon that had it in use has left no sign of life.
    #[error("it is unknown until when the daemon that used its image has run")]
    Unwitnessed,
    /// The missing set of a copy is not known.
    #[error("it is unknown what was written since its blocks were copied")]
    Unmarked,
    /// Earlier writes may have vanished without a trace.
    #[error("a flush of its image has failed")]
    FlushFailed,
}

/// Decides what a start trusts, and which steps it takes.
pub fn open(found: Found) -> Opening {
    let belief = found.kept.as_ref().map_or(Ok(()), |kept| believe(kept, &found));
    // If no state was kept, there is nothing to distrust.
    let distrust = belief.err();
    let mut steps = Vec::new();
    if distrust.is_some() {
        // **N.B.** Before the new record of the image, which would vouch for the kept state.
        steps.push(OpeningStep::Forget);
    }
    let believed = found.kept.filter(|_| distrust.is_none());
    let (since, run) = (first_epoch(believed.as_ref()), found.lives.run());
    // A failed flush is remembered until the end of the residency.
    if found.record != Some(ImageRecord::Failed) {
        let in_use = |look| ImageRecord::InUse { looks: vec![look], since, run };
        steps.push(OpeningStep::Record(found.look.map_or(ImageRecord::Unseen, in_use)));
    }
    Opening { believed, distrust, steps }
}

/// Returns the record of an image that was closed in order, instead of `record`; `None` if `record` stays. If the new record
/// cannot be stored, `record` must be deleted.
pub fn closed(record: Option<ImageRecord>, look: Option<Look>) -> Option<ImageRecord> {
    match (record, look) {
        (Some(ImageRecord::Failed) | None, None) | (Some(ImageRecord::Failed), Some(_)) => None,
        (_, Some(look)) => Some(ImageRecord::Closed(look)),
        (Some(_), None) => Some(ImageRecord::Unseen),
    }
}

/// Returns the record of an image in use whose volume may soon be in another image. `look` is that image's state; `None` if its
/// place does not say.
pub fn also_in_use(record: Option<ImageRecord>, look: Option<Look>, run: Run) -> ImageRecord {
    match (record, look) {
        (Some(ImageRecord::Failed), _) => ImageRecord::Failed,
        (Some(ImageRecord::InUse { mut looks, since, run }), look) => {
            if let Some(look) = look {
                looks.retain(|known| known.which != look.which);
                looks.push(look);
            }
            ImageRecord::InUse { looks, since, run }
        }
        (Some(ImageRecord::Closed(_) | ImageRecord::Unseen) | None, Some(look)) => {
            ImageRecord::InUse { looks: vec![look], since: first_epoch(None), run }
        }
        (Some(ImageRecord::Closed(_) | ImageRecord::Unseen) | None, None) => ImageRecord::Unseen,
    }
}

/// Checks that a reservoir is unchanged since its volume left it.
///
/// It is *in use* while its volume returns to it: then this host writes there, and a kill leaves it that way. A device cannot
/// be checked after another boot.
///
/// # Errors
/// [`Distrust`]: nothing may be read from the reservoir.
pub fn check_left(record: Option<&ImageRecord>, look: Option<&Look>) -> Result<(), Distrust> {
    if broken(Bug::TouchedReservoirRead) {
        return Ok(());
    }
    let (Some(ImageRecord::Closed(known)), Some(look)) = (record, look) else { return Ok(()) };
    let is_device = known.which.starts_with(b"device ");
    match known.which == look.which {
        false if is_device => Ok(()),
        false => Err(Distrust::Another),
        true if known.state == look.state => Ok(()),
        true => Err(Distrust::Touched),
    }
}

/// Returns the record of another image that takes the place of a reservoir by order; `None`: it is not another one.
pub fn accept_left(record: Option<&ImageRecord>, look: Option<Look>) -> Option<ImageRecord> {
    let is_another = check_left(record, look.as_ref()) == Err(Distrust::Another);
    look.filter(|_| is_another).map(ImageRecord::Closed)
}

/// Returns the first epoch after a start that continues with this state.
fn first_epoch(believed: Option<&Kept>) -> Epoch {
    let found =
        believed.map(|kept| kept.epochs.iter().map(|(epoch, _)| *epoch).max().max(Some(kept.through)));
    found.flatten().unwrap_or_default().next()
}

fn believe(kept: &Kept, found: &Found) -> Result<(), Distrust> {
    let record = found.record.as_ref();
    if !kept.is_consistent() {
        return Err(Distrust::Inconsistent);
    }
    if broken(Bug::TouchedImageTrusted) {
        return Ok(());
    }
    if record == Some(&ImageRecord::Failed) {
        return Err(Distrust::FlushFailed);
    }
    let look = found.look.as_ref().ok_or(Distrust::Unknowable)?;
    match record.ok_or(Distrust::NotRecorded)? {
        ImageRecord::Closed(known) if known.which != look.which => Err(Distrust::Another),
        ImageRecord::Closed(known) if known == look => Ok(()),
        ImageRecord::Closed(_) => Err(Distrust::Touched),
        ImageRecord::Failed => Err(Distrust::FlushFailed),
        ImageRecord::Unseen => Err(Distrust::NotRecorded),
        ImageRecord::InUse { looks, since, run } => {
            let known = looks.iter().find(|known| known.which == look.which).ok_or(Distrust::Another)?;
            // Restoring earlier content makes the image look older.
            if look.changed_at < known.changed_at {
                return Err(Distrust::Touched);
            }
            // This program marks or records every write before it makes it: without either it has written nothing.
            let wrote = kept.through >= *since || kept.epochs.iter().any(|(epoch, _)| epoch >= since);
            let is_exact = !wrote && looks.len() == 1;
            match look.state == known.state {
                true => Ok(()),
                false if is_exact => Err(Distrust::Touched),
                false => found.lives.attest(*run, look),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use chronicle::{BlockCount, BlockSize, Generation, KeptReplica, LayeredBitmap, ReplicaOf};

    use super::*;
    use crate::stay::image::vouches;

    fn look(which: u8, state: u8, changed_at: i128) -> Look {
        Look { which: vec![which], state: vec![state], changed_at, touched_at: Some(changed_at) }
    }

    /// Returns a state kept through epoch 5, with marks of these epochs.
    fn kept(marks: &[u64]) -> Kept {
        let empty = LayeredBitmap::new(BlockCount(10));
        let replica = KeptReplica { generation: Generation(1), as_of: Epoch(4), missing: empty.clone() };
        Kept {
            block_size: BlockSize::DEFAULT,
            size_bytes: 10 << 16,
            known_after: Epoch(4),
            through: Epoch(5),
            epochs: marks.iter().map(|epoch| (Epoch(*epoch), empty.clone())).collect(),
            replicas: BTreeMap::from([(ReplicaOf::Migration(1), replica)]),
        }
    }

    /// Returns the signs of life: run 1 had its last one in its instant 1, and run 2 is the present one.
    fn lives() -> Lives {
        let (at, bytes) = Lives::begin(&[], 1).encode();
        let file = [vec![0; at as usize], bytes].concat();
        Lives::begin(&file, 2)
    }

    #[track_caller]
    fn check(marks: &[u64], record: Option<ImageRecord>, now: Option<Look>, expected: Result<(), Distrust>) {
        let found = Found { kept: Some(kept(marks)), record, look: now.clone(), lives: lives() };
        let opening = open(found);
        assert_eq!(opening.distrust, expected.err());
        assert_eq!(opening.believed.is_some(), expected.is_ok());
        let forgets = opening.steps.first() == Some(&OpeningStep::Forget);
        assert_eq!(forgets, expected.is_err(), "durably, and before anything vouches for it");
        let since =
            if expected.is_ok() { Epoch(marks.iter().max().map_or(6, |last| last + 1)) } else { Epoch(1) };
        let in_use = now.map_or(ImageRecord::Unseen, |look| ImageRecord::InUse {
            looks: vec![look],
            since,
            run: Run(2),
        });
        assert_eq!(opening.steps.last(), Some(&OpeningStep::Record(in_use)));
    }

    #[test]
    fn an_image_that_was_closed_is_trusted_only_if_it_looks_exactly_the_same() {
        let closed = || Some(ImageRecord::Closed(look(1, 1, 7)));
        check(&[], closed(), Some(look(1, 1, 7)), Ok(()));
        check(&[6], closed(), Some(look(1, 2, 7)), Err(Distrust::Touched));
        check(&[], closed(), Some(look(1, 1, 8)), Err(Distrust::Touched));
        check(&[], closed(), Some(look(2, 1, 7)), Err(Distrust::Another));
        check(&[], closed(), None, Err(Distrust::Unknowable));
        check(&[], None, Some(look(1, 1, 7)), Err(Distrust::NotRecorded));
    }

    #[test]
    fn an_image_that_was_in_use_may_have_changed_if_we_may_have_written() {
        let in_use =
            |since| Some(ImageRecord::InUse { looks: vec![look(1, 1, 7)], since: Epoch(since), run: Run(1) });
        check(&[6], in_use(6), Some(look(1, 2, 9)), Ok(()));
        check(&[], in_use(6), Some(look(1, 1, 7)), Ok(()));
        check(&[], in_use(6), Some(look(1, 2, 9)), Err(Distrust::Touched));
        check(&[], in_use(5), Some(look(1, 2, 9)), Ok(()));
        check(&[6], in_use(6), Some(look(1, 2, 6)), Err(Distrust::Touched));
        check(&[6], in_use(6), Some(look(2, 1, 7)), Err(Distrust::Another));
    }

    #[test]
    fn an_image_that_a_killed_daemon_had_in_use_is_not_trusted_if_it_changed_after_its_last_sign_of_life() {
        const LATER: i128 = 2 + crate::stay::life::TOLERANCE_NANOSECONDS;
        let in_use = |run| Some(ImageRecord::InUse { looks: vec![look(1, 1, 1)], since: Epoch(6), run });
        check(&[6], in_use(Run(1)), Some(look(1, 2, LATER - 1)), Ok(()));
        check(&[6], in_use(Run(1)), Some(look(1, 2, LATER)), Err(Distrust::Touched));
        // Somebody has restored its former time.
        let restored = Look { touched_at: Some(LATER), ..look(1, 2, 1) };
        check(&[6], in_use(Run(1)), Some(restored), Err(Distrust::Touched));
        check(&[6], in_use(Run(2)), Some(look(1, 2, LATER)), Ok(()));
        check(&[6], in_use(Run(0)), Some(look(1, 2, 1)), Err(Distrust::Unwitnessed));
        // A device reports no time, but it may be as it was.
        let device = |state| Some(Look { touched_at: None, ..look(1, state, 1) });
        check(&[6], in_use(Run(1)), device(2), Err(Distrust::Unknowable));
        check(&[6], in_use(Run(1)), device(1), Ok(()));
    }

    #[test]
    fn what_moves_between_stores_is_known_by_either_image() {
        let record = also_in_use(
            Some(ImageRecord::InUse { looks: vec![look(1, 1, 7)], since: Epoch(6), run: Run(1) }),
            Some(look(2, 1, 1)),
            Run(2),
        );
        for which in [1, 2] {
            check(&[], Some(record.clone()), Some(look(which, 5, 9)), Ok(()));
        }
        check(&[], Some(record), Some(look(3, 5, 9)), Err(Distrust::Another));
    }

    #[test]
    fn what_another_host_reads_is_read_only_while_it_looks_as_it_was_left() {
        let closed = Some(ImageRecord::Closed(look(1, 1, 7)));
        let check = |now: Look| check_left(closed.as_ref(), Some(&now));
        assert_eq!(check(look(1, 1, 7)), Ok(()));
        assert_eq!(check(look(1, 2, 7)), Err(Distrust::Touched));
        assert_eq!(check(look(2, 1, 7)), Err(Distrust::Another));
        // By order, another one is read, but not one that was changed in place.
        let accept = |now: Look| accept_left(closed.as_ref(), Some(now));
        assert_eq!(accept(look(2, 1, 7)), Some(ImageRecord::Closed(look(2, 1, 7))));
        assert_eq!((accept(look(1, 2, 7)), accept(look(1, 1, 7))), (None, None));
        // The volume returns to it.
        let in_use = also_in_use(closed.clone(), Some(look(1, 1, 7)), Run(1));
        assert_eq!(check_left(Some(&in_use), Some(&look(1, 2, 8))), Ok(()));
        // Device numbers change with a boot.
        let of_device =
            |which: &[u8]| Look { which: which.to_vec(), state: vec![1], changed_at: 0, touched_at: None };
        let device = ImageRecord::Closed(of_device(b"device 8:1 one"));
        assert_eq!(check_left(Some(&device), Some(&of_device(b"device 8:1 two"))), Ok(()));
    }

    #[test]
    fn a_flush_that_failed_is_remembered_as_long_as_the_stay_lasts() {
        let failed = || Some(ImageRecord::Failed);
        for now in [Some(look(1, 1, 7)), None] {
            let opening = open(Found { kept: Some(kept(&[6])), record: failed(), look: now, lives: lives() });
            assert_eq!(opening.distrust, Some(Distrust::FlushFailed));
            assert_eq!((opening.believed, opening.steps), (None, vec![OpeningStep::Forget]));
        }
        assert_eq!(closed(failed(), Some(look(1, 1, 7))), None, "it stays");
        assert_eq!(Some(also_in_use(failed(), Some(look(2, 1, 7)), Run(1))), failed());
        assert!(!vouches(failed().as_ref()) && !vouches(None));
        assert!(vouches(closed(None, Some(look(1, 1, 7))).as_ref()));
    }

    #[test]
    fn of_an_image_whose_place_does_not_say_how_it_looks_it_is_remembered_that_no_flush_has_failed() {
        let unseen = || Some(ImageRecord::Unseen);
        check(&[], None, None, Err(Distrust::Unknowable));
        check(&[], unseen(), None, Err(Distrust::Unknowable));
        check(&[], unseen(), Some(look(1, 1, 7)), Err(Distrust::NotRecorded));
        assert_eq!(closed(unseen(), None), unseen());
        assert_eq!(closed(None, None), None, "nothing is known of its flushes");
        assert_eq!(Some(also_in_use(None, None, Run(1))), unseen());
        assert!(vouches(unseen().as_ref()));
        // The place of the new image does report its state.
        let both = also_in_use(unseen(), Some(look(1, 1, 7)), Run(1));
        check(&[6], Some(both.clone()), Some(look(1, 2, 8)), Ok(()));
        // And back to the first image.
        assert_eq!(also_in_use(Some(both.clone()), None, Run(1)), both);
    }

    #[test]
    fn what_contradicts_itself_is_not_believed() {
        let mut kept = kept(&[]);
        kept.through = Epoch(3);
        let found = Found { kept: Some(kept), record: None, look: None, lives: lives() };
        assert_eq!(open(found).distrust, Some(Distrust::Inconsistent));
    }
}
