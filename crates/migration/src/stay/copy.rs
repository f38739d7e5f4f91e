//! Whether a restart goes on with the copy that a migration makes in another store of its host.
//!
//! ```text
//!   while it is copied  every so often: the target is flushed ──► what it lacks is kept in the chronicle of its volume
//!   stopped in order    nothing is copied any more ──► the target is flushed ──► what it lacks is kept ──► how it looks is recorded
//!   a restart           known what it lacks? the image that was copied to? as it was left? ──► only what it lacks is copied
//!                                    └── no: it is deleted, and the volume stays where it is
//! ```
//! What the copy lacks is of the chronicle, with everything that was written since it was kept, as of a copy at another host
//! ([`Stay::lacking`](super::Stay::lacking)): it may say too much, and never too little. What the target has got since only makes
//! it lack less. So what is left to be doubted is whether somebody else has changed the image.

use chronicle::Epoch;

use super::image::{ImageRecord, Look};
use super::opening::Distrust;
use crate::planted::{Bug, broken};

/// What a restart finds of such a copy.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// Whether the chronicle of its volume says what it lacks.
    pub is_known: bool,
    /// What was remembered of its image: [`in_use`], or [`left`].
    pub record: Option<&'a ImageRecord>,
    /// How its image looks, with nobody else holding it; `None`: it is gone, or in a place that does not say.
    pub look: Option<&'a Look>,
}

/// What is remembered of the image of a copy that is about to be written to.
pub fn in_use(look: Look) -> ImageRecord {
    ImageRecord::InUse { looks: vec![look], since: Epoch::default() }
}

/// What is remembered of the image of a copy at the end of a daemon that ends in order, in the place of `record`: nothing is written to
/// it any more, and it looks so; `None`: its place does not say.
///
/// **N.B.** A daemon that had not gone on with it has not looked whether it was as it had been left, and vouches for nothing.
pub fn left(record: Option<ImageRecord>, look: Option<Look>) -> Option<ImageRecord> {
    let Some(ImageRecord::InUse { looks, .. }) = &record else { return record };
    match look.filter(|look| is_used(looks, look).is_ok()) {
        Some(look) => Some(ImageRecord::Closed(look)),
        None => record,
    }
}

/// Decides whether the copying goes on.
///
/// # Errors
/// [`Distrust`]: why the copy is of no use.
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
        // Its daemon was killed: the last writes are its own, and no look tells them from those of others.
        ImageRecord::InUse { looks, .. } => is_used(looks, look),
        ImageRecord::Failed => Err(Distrust::FlushFailed),
        ImageRecord::Unseen => Err(Distrust::NotRecorded),
    }
}

/// Whether an image that looks so may be the one that was in use.
fn is_used(looks: &[Look], look: &Look) -> Result<(), Distrust> {
    match looks.iter().find(|known| known.which == look.which) {
        None => Err(Distrust::Another),
        // Whoever puts a former content back in place makes it look older.
        Some(known) if look.changed_at < known.changed_at => Err(Distrust::Touched),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(which: u8, state: u8, changed_at: i128) -> Look {
        Look { which: vec![which], state: vec![state], changed_at }
    }

    #[track_caller]
    fn check(record: Option<&ImageRecord>, now: Option<&Look>, expected: Result<(), Distrust>) {
        let found = |is_known| Found { is_known, record, look: now };
        assert_eq!(believe(found(true)), expected);
        assert_eq!(believe(found(false)), Err(Distrust::Unmarked), "whatever it looks like");
    }

    #[test]
    fn a_copy_that_was_closed_is_gone_on_with_only_if_it_looks_exactly_the_same() {
        let left = left(Some(in_use(look(1, 0, 3))), Some(look(1, 1, 7)));
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
        let used = Some(in_use(look(1, 1, 7)));
        let closed = left(used.clone(), Some(look(1, 2, 8)));
        assert_eq!(closed, Some(ImageRecord::Closed(look(1, 2, 8))));
        assert_eq!(
            left(closed.clone(), Some(look(1, 3, 9))),
            closed,
            "somebody has touched it, and nobody has looked"
        );
        for other in [Some(look(2, 1, 9)), Some(look(1, 1, 6)), None] {
            assert_eq!(left(used.clone(), other), used);
        }
        assert_eq!(left(None, Some(look(1, 1, 7))), None);
    }

    #[test]
    fn a_copy_whose_daemon_was_killed_must_be_the_same_image_and_not_an_older_one() {
        let used = in_use(look(1, 1, 7));
        let used = Some(&used);
        check(used, Some(&look(1, 2, 9)), Ok(()));
        check(used, Some(&look(1, 2, 6)), Err(Distrust::Touched));
        check(used, Some(&look(2, 1, 7)), Err(Distrust::Another));
    }
}
