//! The allowed content of each sector of a volume, from its guest's requests and their answers.
//!
//! ```text
//!    write A  |-------|
//!    write B      |-------|             A and B were in flight together: either may be the last
//!    write C                 |-----|    C came after both had been answered: after its answer only C is right
//! ```
//! A write that failed, or was not answered, may have been applied or not. Answered writes that were then flushed (or FUA)
//! survive a power cut. Others may be lost, sector by sector, back to the state of the last flush.

use crate::disk::SECTOR_BYTES;

/// Time in this checker: one tick for each request that begins or ends.
type Tick = u32;
const NEVER: Tick = Tick::MAX;

pub(crate) struct Content {
    sectors: Vec<Vec<Version>>,
    now: Tick,
    flushed_before: Tick,
    reads: Vec<Tick>,
}

#[derive(Clone, Copy, Debug)]
struct Version {
    /// The number of the request that wrote it; 0: the initial content.
    request: u32,
    token: u64,
    began: Tick,
    /// [`NEVER`] while it is in flight.
    ended: Tick,
    outcome: Outcome,
    durable: bool,
    /// A failed flush may have lost it: no later one makes it durable.
    perhaps_lost: bool,
    /// When a later write was answered, which makes this content wrong; [`NEVER`]: not yet.
    superseded: Tick,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was answered: its content is there.
    Done,
    /// It was answered, and survives a power cut.
    DoneDurably,
    Failed,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Began(Tick);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub(crate) sector: usize,
    pub(crate) found: u64,
    pub(crate) allowed: Vec<u64>,
}

pub(crate) fn token(request: u32, sector: usize) -> u64 {
    u64::from(request) << 32 | sector as u64
}

impl Content {
    pub(crate) fn new(initial: &[u64]) -> Self {
        let version = |token: &u64| {
            let outcome = Outcome::DoneDurably;
            Version {
                request: 0,
                token: *token,
                began: 0,
                ended: 0,
                outcome,
                durable: true,
                perhaps_lost: false,
                superseded: NEVER,
            }
        };
        Self {
            sectors: initial.iter().map(|token| vec![version(token)]).collect(),
            now: 1,
            flushed_before: 0,
            reads: Vec::new(),
        }
    }

    pub(crate) fn change_begins(&mut self, request: u32, first: usize, count: usize, leaves: Leaves) {
        let began = self.tick();
        for sector in first..first + count {
            let token = match leaves {
                Leaves::Stamp => token(request, sector),
                Leaves::Zeroes => 0,
            };
            self.tidy(sector);
            let outcome = Outcome::Failed;
            let version = Version {
                request,
                token,
                began,
                ended: NEVER,
                outcome,
                durable: false,
                perhaps_lost: false,
                superseded: NEVER,
            };
            self.sectors[sector].push(version);
        }
    }

    pub(crate) fn change_ends(&mut self, request: u32, first: usize, count: usize, outcome: Outcome) {
        let now = self.tick();
        for versions in &mut self.sectors[first..first + count] {
            let Some(own) = versions.iter_mut().find(|version| version.request == request) else { continue };
            (own.ended, own.outcome) = (now, outcome);
            own.durable = outcome == Outcome::DoneDurably;
            let began = own.began;
            if outcome != Outcome::Failed {
                for older in versions.iter_mut().filter(|version| version.ended < began) {
                    older.superseded = older.superseded.min(now);
                }
            }
        }
    }

    pub(crate) fn read_begins(&mut self) -> Began {
        let began = self.tick();
        self.reads.push(began);
        Began(began)
    }

    pub(crate) fn read_ends(
        &mut self,
        Began(began): Began,
        first: usize,
        tokens: impl Iterator<Item = u64>,
    ) -> Result<(), Wrong> {
        self.tick();
        if let Some(index) = self.reads.iter().position(|read| *read == began) {
            self.reads.swap_remove(index);
        }
        for (sector, found) in (first..).zip(tokens) {
            let versions = &self.sectors[sector];
            if !versions.iter().any(|version| version.token == found && version.superseded > began) {
                return Err(self.wrong(sector, found, |version| version.superseded > began));
            }
        }
        Ok(())
    }

    pub(crate) fn flush_begins(&mut self) -> Began {
        Began(self.tick())
    }

    pub(crate) fn flush_succeeds(&mut self, Began(began): Began) {
        self.flushed_before = self.flushed_before.max(began);
    }

    /// Notes a failed flush: earlier changes that are not durable may be lost, whatever later flushes return.
    pub(crate) fn flush_fails(&mut self) {
        for sector in 0..self.sectors.len() {
            self.mark_durable(sector);
            let versions = self.sectors[sector].iter_mut();
            versions.filter(|version| !version.durable).for_each(|version| version.perhaps_lost = true);
        }
    }

    pub(crate) fn forget_reads(&mut self) {
        self.reads.clear();
    }

    pub(crate) fn check(&self, found: &[u64]) -> Result<(), Wrong> {
        for (sector, (versions, found)) in self.sectors.iter().zip(found).enumerate() {
            if !versions.iter().any(|version| version.token == *found && version.superseded == NEVER) {
                return Err(self.wrong(sector, *found, |version| version.superseded == NEVER));
            }
        }
        Ok(())
    }

    /// Checks the content after a power cut, and continues from it. Requests in flight have failed.
    pub(crate) fn check_after_power_cut(&mut self, found: &[u64]) -> Result<(), Wrong> {
        self.reads.clear();
        for (sector, found) in found.iter().enumerate().take(self.sectors.len()) {
            self.mark_durable(sector);
            let versions = &self.sectors[sector];
            if !versions.iter().any(|version| version.token == *found && !lost_for_good(versions, version)) {
                return Err(self.wrong(sector, *found, |version| !lost_for_good(versions, version)));
            }
        }
        let now = self.tick();
        for (versions, found) in self.sectors.iter_mut().zip(found) {
            versions.clear();
            versions.push(Version {
                request: 0,
                token: *found,
                began: now,
                ended: now,
                outcome: Outcome::DoneDurably,
                durable: true,
                perhaps_lost: false,
                superseded: NEVER,
            });
        }
        Ok(())
    }

    fn tick(&mut self) -> Tick {
        self.now += 1;
        self.now
    }

    fn mark_durable(&mut self, sector: usize) {
        let flushed_before = self.flushed_before;
        for version in &mut self.sectors[sector] {
            version.durable |=
                version.outcome != Outcome::Failed && version.ended < flushed_before && !version.perhaps_lost;
        }
    }

    fn tidy(&mut self, sector: usize) {
        if self.sectors[sector].len() < 3 {
            return;
        }
        self.mark_durable(sector);
        let oldest_read = self.reads.iter().copied().min().unwrap_or(NEVER);
        let versions = std::mem::take(&mut self.sectors[sector]);
        let kept =
            |version: &&Version| version.superseded >= oldest_read || !lost_for_good(&versions, version);
        self.sectors[sector] = versions.iter().filter(kept).copied().collect();
    }

    fn wrong(&self, sector: usize, found: u64, allowed: impl Fn(&Version) -> bool) -> Wrong {
        let allowed = self.sectors[sector].iter().filter(|version| allowed(version));
        Wrong { sector, found, allowed: allowed.map(|version| version.token).collect() }
    }
}

/// Returns whether a later write is durable: then not even a power cut brings this version back.
fn lost_for_good(versions: &[Version], version: &Version) -> bool {
    versions.iter().any(|later| later.durable && later.began > version.ended)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// The request's number and the sector's.
    Stamp,
    Zeroes,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |token: u64| match token {
            0 => "zeroes".to_owned(),
            token => format!("write {} of sector {}", token >> 32, token & u64::from(u32::MAX)),
        };
        let allowed: Vec<_> = self.allowed.iter().map(|token| show(*token)).collect();
        let offset = self.sector as u64 * SECTOR_BYTES;
        write!(f, "sector {} (byte {offset}) holds {}", self.sector, show(self.found))?;
        write!(f, "; allowed: {}", allowed.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &mut Content, found: u64) -> bool {
        let began = content.read_begins();
        content.read_ends(began, 0, [found].into_iter()).is_ok()
    }

    #[test]
    fn only_the_last_of_two_writes_in_a_row_may_be_read() {
        let mut content = Content::new(&[0]);
        for request in 1..=2 {
            content.change_begins(request, 0, 1, Leaves::Stamp);
            content.change_ends(request, 0, 1, Outcome::Done);
        }
        assert!(read(&mut content, token(2, 0)));
        assert!(!read(&mut content, token(1, 0)));
        assert!(!read(&mut content, 0));
        assert!(!read(&mut content, token(2, 1)), "another sector's");
    }

    #[test]
    fn either_of_two_writes_under_way_together_may_be_read() {
        let mut content = Content::new(&[0]);
        content.change_begins(1, 0, 1, Leaves::Stamp);
        content.change_begins(2, 0, 1, Leaves::Zeroes);
        content.change_ends(1, 0, 1, Outcome::Done);
        content.change_ends(2, 0, 1, Outcome::Done);
        assert!(read(&mut content, token(1, 0)) && read(&mut content, 0));
    }

    #[test]
    fn a_read_may_see_what_was_there_when_it_began() {
        let mut content = Content::new(&[0]);
        let began = content.read_begins();
        content.change_begins(1, 0, 1, Leaves::Stamp);
        content.change_ends(1, 0, 1, Outcome::Done);
        content.change_begins(2, 0, 1, Leaves::Stamp);
        content.change_ends(2, 0, 1, Outcome::Done);
        content.change_begins(3, 0, 1, Leaves::Stamp);
        assert_eq!(content.read_ends(began, 0, [0].into_iter()), Ok(()));
    }

    #[test]
    fn a_failed_write_may_be_there_or_not_until_a_later_one_is_answered() {
        let mut content = Content::new(&[0]);
        content.change_begins(1, 0, 1, Leaves::Stamp);
        content.change_ends(1, 0, 1, Outcome::Failed);
        assert!(read(&mut content, 0) && read(&mut content, token(1, 0)));
        content.change_begins(2, 0, 1, Leaves::Stamp);
        content.change_ends(2, 0, 1, Outcome::Done);
        assert!(!read(&mut content, 0) && !read(&mut content, token(1, 0)));
    }

    #[test]
    fn a_flushed_write_must_survive_a_power_cut_and_an_unflushed_one_may() {
        let flushed = |content: &mut Content| {
            content.change_begins(1, 0, 1, Leaves::Stamp);
            content.change_ends(1, 0, 1, Outcome::Done);
            let flush = content.flush_begins();
            content.flush_succeeds(flush);
            content.change_begins(2, 0, 1, Leaves::Stamp);
            content.change_ends(2, 0, 1, Outcome::Done);
        };
        for (found, right) in [(0, false), (token(1, 0), true), (token(2, 0), true), (token(9, 0), false)] {
            let mut content = Content::new(&[0]);
            flushed(&mut content);
            assert_eq!(content.check_after_power_cut(&[found]).is_ok(), right, "{found:x}");
        }
        let mut content = Content::new(&[0]);
        flushed(&mut content);
        assert!(content.check_after_power_cut(&[token(1, 0)]).is_ok());
        assert!(!read(&mut content, token(2, 0)), "what was lost stays lost");
    }

    #[test]
    fn a_flush_covers_nothing_that_ended_after_it_began() {
        let mut content = Content::new(&[0]);
        content.change_begins(1, 0, 1, Leaves::Stamp);
        let flush = content.flush_begins();
        content.change_ends(1, 0, 1, Outcome::Done);
        content.flush_succeeds(flush);
        assert!(content.check_after_power_cut(&[0]).is_ok());
    }

    #[test]
    fn a_killed_daemon_loses_nothing_that_was_answered() {
        let mut content = Content::new(&[0, 0]);
        content.change_begins(1, 0, 1, Leaves::Stamp);
        content.change_ends(1, 0, 1, Outcome::Done);
        content.change_begins(2, 1, 1, Leaves::Stamp);
        assert!(content.check(&[token(1, 0), 0]).is_ok());
        assert!(content.check(&[token(1, 0), token(2, 1)]).is_ok());
        assert!(content.check(&[0, 0]).is_err());
    }
}
