//! The signs of life of a host's daemon. They tell a killed daemon's last writes from those of others.
//!
//! ```text
//!   run 1: sign ─ sign ─ sign ─ killed        an image changes        run 2: begins ─ sign ─ …
//!                         └──── TOLERANCE ────┘ earlier: by run 1      └ image record of run 1: changed later than that?
//!                                               later: by another program
//! ```
//! An image record names the run that had the image in use. A later run may not have opened the image at all, so each run
//! keeps its own last sign.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::image::Look;
use super::opening::Distrust;

/// How often a running daemon notes a sign of life.
pub const SIGN_EVERY: std::time::Duration = std::time::Duration::from_secs(1);
/// Nanoseconds after the last sign in which a change counts as the daemon's own. A sign may take that long to become durable.
/// A change by another program in this time is not noticed.
pub const TOLERANCE_NANOSECONDS: i128 = 5_000_000_000;
/// Bytes of one of the two places of the signs. They are written in turns, so a torn write leaves the other one.
pub const SLOT_BYTES: usize = 4096;
/// The largest number of runs whose last sign is kept.
const RUNS_MAX: usize = 64;
/// The first bytes of a place; the last one is the version.
const HEADER: [u8; 8] = *b"STERNAL\x01";
const PREFIX_BYTES: usize = HEADER.len() + 4;

/// A run of a daemon: when it began, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Run(pub i128);

/// The last sign of life of each run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lives {
    run: Run,
    noted: Noted,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Noted {
    /// Grows with each writing.
    sequence: u64,
    signs: BTreeMap<Run, i128>,
}

impl Lives {
    /// Begins a run `now`, in nanoseconds since 1970. `bytes` has both places, as far as they were ever written.
    pub fn begin(bytes: &[u8], now: i128) -> Self {
        let slots = bytes.chunks(SLOT_BYTES).filter_map(decode);
        let mut noted = slots.max_by_key(|noted| noted.sequence).unwrap_or_default();
        // The clock was set back: a later change may bear an earlier time than the sign.
        noted.signs.retain(|_, sign| *sign <= now);
        let after = noted.signs.keys().next_back().map_or(now, |last| now.max(last.0 + 1));
        let mut lives = Self { run: Run(after), noted };
        lives.sign(now);
        lives
    }

    /// Returns the present run.
    pub fn run(&self) -> Run {
        self.run
    }

    /// Gives a sign of life of the present run.
    pub fn sign(&mut self, now: i128) {
        self.noted.sequence += 1;
        self.noted.signs.insert(self.run, now);
        while self.noted.signs.len() > RUNS_MAX {
            self.noted.signs.pop_first();
        }
    }

    /// Returns the place of the next writing, from the beginning of the file, and its bytes.
    pub fn encode(&self) -> (u64, Vec<u8>) {
        // A growing buffer accepts everything.
        let body = postcard::to_stdvec(&self.noted).unwrap_or_default();
        let mut bytes = HEADER.to_vec();
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes.resize(SLOT_BYTES, 0);
        (self.noted.sequence % 2 * SLOT_BYTES as u64, bytes)
    }

    /// Checks that an image which `run` had in use was last changed while that run was alive.
    ///
    /// # Errors
    /// [`Distrust`]: another program may have changed it.
    pub fn attest(&self, run: Run, look: &Look) -> Result<(), Distrust> {
        if run == self.run {
            return Ok(());
        }
        let touched_at = look.touched_at.ok_or(Distrust::Unknowable)?;
        let sign = self.noted.signs.get(&run).ok_or(Distrust::Unwitnessed)?;
        if touched_at > sign + TOLERANCE_NANOSECONDS { Err(Distrust::Touched) } else { Ok(()) }
    }
}

fn decode(slot: &[u8]) -> Option<Noted> {
    let (prefix, body) = slot.split_at_checked(PREFIX_BYTES)?;
    let (header, checksum) = prefix.split_at_checked(HEADER.len())?;
    let (noted, rest) = postcard::take_from_bytes::<Noted>(body).ok()?;
    let body = body.strip_suffix(rest)?;
    (*header == HEADER && *checksum == crc32c::crc32c(body).to_le_bytes()).then_some(noted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;

    fn file(lives: &[&Lives]) -> Vec<u8> {
        let mut file = vec![0; 2 * SLOT_BYTES];
        for lives in lives {
            let (at, bytes) = lives.encode();
            file[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        file
    }

    fn touched(seconds: i128) -> Look {
        Look { which: vec![1], state: vec![2], changed_at: 0, touched_at: Some(seconds * SECOND) }
    }

    #[test]
    fn what_changed_after_the_last_sign_was_changed_by_others() {
        let mut first = Lives::begin(&[], 100 * SECOND);
        first.sign(200 * SECOND);
        // The next run does not open the image, and the third one does.
        let mut second = Lives::begin(&file(&[&first]), 300 * SECOND);
        second.sign(400 * SECOND);
        let third = Lives::begin(&file(&[&first, &second]), 500 * SECOND);
        assert_eq!(third.attest(first.run(), &touched(204)), Ok(()));
        assert_eq!(third.attest(first.run(), &touched(206)), Err(Distrust::Touched));
        assert_eq!(third.attest(first.run(), &touched(350)), Err(Distrust::Touched));
        assert_eq!(third.attest(second.run(), &touched(350)), Ok(()));
        assert_eq!(third.attest(third.run(), &touched(600)), Ok(()), "it is in use");
        assert_eq!(third.attest(Run(7), &touched(1)), Err(Distrust::Unwitnessed));
        let of_device = Look { touched_at: None, ..touched(1) };
        assert_eq!(third.attest(first.run(), &of_device), Err(Distrust::Unknowable));
    }

    #[test]
    fn a_clock_that_was_set_back_attests_nothing() {
        let first = Lives::begin(&[], 200 * SECOND);
        let second = Lives::begin(&file(&[&first]), 100 * SECOND);
        assert_eq!(second.attest(first.run(), &touched(150)), Err(Distrust::Unwitnessed));
    }

    #[test]
    fn a_torn_write_leaves_the_sign_before_and_runs_are_not_kept_for_ever() {
        let mut lives = Lives::begin(&[], 100 * SECOND);
        let before = lives.clone();
        lives.sign(200 * SECOND);
        let whole = file(&[&before, &lives]);
        let (at, _) = lives.encode();
        for byte in [0, 9, 14] {
            let mut torn = whole.clone();
            torn[at as usize + byte] ^= 1;
            let next = Lives::begin(&torn, 900 * SECOND);
            assert_eq!(next.attest(lives.run(), &touched(105)), Ok(()));
            assert_eq!(next.attest(lives.run(), &touched(106)), Err(Distrust::Touched));
        }
        let mut next = lives.clone();
        for second in 0..RUNS_MAX as i128 {
            next = Lives::begin(&file(&[&next]), (300 + second) * SECOND);
        }
        assert!(next.encode().1.len() == SLOT_BYTES);
        assert_eq!(next.attest(lives.run(), &touched(100)), Err(Distrust::Unwitnessed));
    }
}
