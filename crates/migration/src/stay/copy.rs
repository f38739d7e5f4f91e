//! Decides whether a restart continues a copy between two stores of its host.
//!
//! ```text
//!   while copying       at intervals: the target is flushed ──► its missing set is kept in the chronicle of its volume
//!   stopped in order    copying ends ──► the target is flushed ──► its missing set is kept ──► the image's state is recorded
//!   a restart           missing set known? the same image? unchanged? ──► only its missing blocks are copied
//!                                    └── no: it is deleted, and the volume stays in its store
//! ```
//! The chronicle covers the copy's missing set and everything written since that set was kept, as for a copy at another host
//! ([`Stay::lacking`](super::Stay::lacking)). The result may be too large, but never too small: later copying only shrinks the
//! true set. The only remaining doubt is whether another program has changed the image.

use chronicle::Epoch;

use super::image::{ImageRecord, Look};
use super::life::{Lives, Run};
use super::opening::Distrust;
use crate::planted::{Bug, broken};

/// The state of such a copy at a restart.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// Whether the chronicle of its volume has its missing set.
    pub is_known: bool,
    /// The record of its image: [`in_use`], or [`left`].
    pub record: Option<&'a ImageRecord>,
    /// The image's current state, held by no one else; `None` if it is gone, or its place does not say.
    pub look: Option<&'a Look>,
    /// The signs of life of this daemon and of earlier ones.
    pub lives: &'a Lives,
}

/// Returns the record of a copy's image before the first write.
pub fn in_use(look: Look, run: Run) -> ImageRecord {
    ImageRecord::InUse { looks: vec![look], since: Epoch::default(), run }
}

/// Returns the record of a copy's image at an orderly end of the daemon, instead of `record`: nothing is written to it after
/// this. `None` if its place does not say.
///
/// **N.B.** A daemon that had not resumed the copy has not compared the image with its former state, and vouches for nothing.
pub fn left(record: Option<ImageRecord>, look: Option<Look>, lives: &Lives) -> Option<ImageRecord> {
    let Some(ImageRecord::InUse { looks, run, .. }) = &record else { return record };
    match look.filter(|look| is_used(looks, look, *run, lives).is_ok()) {
        Some(look) => Some(ImageRecord::Closed(look)),
        None => record,
    }
}

/// Decides whether the copying continues.
///
/// # Errors
/// [`Distrust`]: the reason why the copy is useless.
pub fn believe(found: Found<'_>) -> Result<(), Distrust> {
    if !found.is_known {
        return Err(Distrust::Unmarked);
    }
    if broken(Bug::TouchedCopyTrusted) && found.look.is_some() {
        return Ok(());
    }
    let look = found.look.ok_or(Distrust::Unknowable)?;
    match found.record.ok_or(Distrust::NotRecorded)? {
        ImageRecord::Closed(known) if known.which != look.which => Err(Distrust::Another),
        ImageRecord::Closed(known) if known == look => Ok(()),
        ImageRecord::Closed(_) => Err(Distrust::Touched),
        // The daemon was killed: its last writes differ from those of others only by their time.
        ImageRecord::InUse { looks, run, .. } => is_used(looks, look, *run, found.lives),
        ImageRecord::Failed => Err(Distrust::FlushFailed),
        ImageRecord::Unseen => Err(Distrust::NotRecorded),
    }
}

/// Checks whether this may be the image that was in use.
fn is_used(looks: &[Look], look: &Look, run: Run, lives: &Lives) -> Result<(), Distrust> {
    match looks.iter().find(|known| known.which == look.which) {
        None => Err(Distrust::Another),
        // Restoring earlier content makes the image look older.
        Some(known) if look.changed_at < known.changed_at => Err(Distrust::Touched),
        Some(known) if look.state == known.state => Ok(()),
        Some(_) => lives.attest(run, look),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(which: u8, state: u8, changed_at: i128) -> Look {
        Look { which: vec![which], state: vec![state], changed_at, touched_at: Some(changed_at) }
    }

    /// Returns the signs of life: run 1 had its last one in its instant 1, and run 2 is the present one.
    fn lives() -> Lives {
        let (at, bytes) = Lives::begin(&[], 1).encode();
        let file = [vec![0; at as usize], bytes].concat();
        Lives::begin(&file, 2)
    }

    #[track_caller]
    fn check(record: Option<&ImageRecord>, now: Option<&Look>, expected: Result<(), Distrust>) {
        let lives = lives();
        let found = |is_known| Found { is_known, record, look: now, lives: &lives };
        assert_eq!(believe(found(true)), expected);
        assert_eq!(believe(found(false)), Err(Distrust::Unmarked), "whatever it looks like");
    }

    #[test]
    fn a_copy_that_was_closed_is_gone_on_with_only_if_it_looks_exactly_the_same() {
        let left = left(Some(in_use(look(1, 0, 3), Run(2))), Some(look(1, 1, 7)), &lives());
        let left = left.as_ref();
        check(left, Some(&look(1, 1, 7)), Ok(()));
        check(left, Some(&look(1, 2, 7)), Err(Distrust::Touched));
        check(left, Some(&look(1, 1, 8)), Err(Distrust::Touched));
        check(left, Some(&look(2, 1, 7)), Err(Distrust::Another));
        check(left, None, Err(Distrust::Unknowable));
        check(None, Some(&look(1, 1, 7)), Err(Distrust::NotRecorded));
    }

    #[test]
    fn a_daemon_vouches_only_for_what_was_in_use() {
        let used = Some(in_use(look(1, 1, 7), Run(1)));
        let closed = left(used.clone(), Some(look(1, 2, 8)), &lives());
        assert_eq!(closed, Some(ImageRecord::Closed(look(1, 2, 8))));
        assert_eq!(
            left(closed.clone(), Some(look(1, 3, 9)), &lives()),
            closed,
            "somebody has touched it, and nobody has looked"
        );
        for other in [Some(look(2, 1, 9)), Some(look(1, 1, 6)), None] {
            assert_eq!(left(used.clone(), other, &lives()), used);
        }
        assert_eq!(left(None, Some(look(1, 1, 7)), &lives()), None);
    }

    #[test]
    fn a_copy_whose_daemon_was_killed_must_be_the_same_image_and_not_an_older_one() {
        let used = in_use(look(1, 1, 7), Run(1));
        let used = Some(&used);
        check(used, Some(&look(1, 2, 9)), Ok(()));
        check(used, Some(&look(1, 2, 6)), Err(Distrust::Touched));
        check(used, Some(&look(2, 1, 7)), Err(Distrust::Another));
        let later = look(1, 2, 2 + crate::stay::life::TOLERANCE_NANOSECONDS);
        check(used, Some(&later), Err(Distrust::Touched));
        assert_eq!(left(used.cloned(), Some(later), &lives()).as_ref(), used, "nobody has compared it");
    }
}
