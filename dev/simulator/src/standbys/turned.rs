//! The way back after a promotion: the direction is turned round, and both hosts have written meanwhile.
//!
//! ```text
//!   a world that ended with a promotion          a world of its own
//!     standby's host: images, writes ───────────► owner's host ─► Replication: written here ∪ lacking there
//!     former owner: images, chronicle, record ──► standby's host: the images, or none if these may lack everything
//! ```
//! The checks of that world are those of every other: each point, each promotion and the idle image are compared with the model.

use std::collections::BTreeSet;

use chronicle::{BlockCount, BlockRange, LayeredBitmap};
use standby::LifeId;
use standby::receiver::Image;
use standby::record::Standing;
use standby::reprotection::{Former, Lacking, Stage, Step, lacking};

use super::disk::Disk;
use super::owner::Knows;
use super::receiver::StandbyHost;
use super::world::{EVERY, Shape, World};
use crate::random::Random;

/// What is carried over to the world of the new owner.
pub(super) struct Turned {
    /// The volumes of the new owner.
    pub(super) volumes: Vec<Disk>,
    /// What the new owner has written since the promotion; `None`: its chronicle is lost.
    pub(super) ours: Option<Vec<LayeredBitmap>>,
    /// What the former owner's images lack.
    pub(super) theirs: Vec<LayeredBitmap>,
    /// The former owner's images; `None`: they may lack everything.
    pub(super) images: Option<Vec<Disk>>,
}

impl World {
    /// Turns the direction of a promotion round, and runs what follows. Does nothing if nothing was promoted.
    pub(super) fn turn(&mut self) {
        let is_promoted =
            self.standby.record().is_some_and(|record| matches!(record.standing, Standing::Promoted { .. }));
        let Some((at, promoted)) = self.standby.promoted.clone().filter(|_| is_promoted) else { return };
        let host = self.current;
        // One that still lacks blocks of its own is not given up.
        if self.owners[host].is_incomplete() {
            return;
        }
        let mut random = self.random.fork();
        if random.percent(50) {
            self.cut_owners_power(host);
        } else {
            self.stop_owner(host);
        }
        let (volumes, ours) = self.write_here(&mut random);
        let sizes: Vec<_> = volumes.iter().map(|volume| BlockCount(volume.len())).collect();
        let (former, images) = self.former(&mut random);
        let lacking = lacking(&former, at, &sizes);
        self.tell(|_| format!("turned round as of {at:?}: {lacking:?}"));
        let held: Vec<_> = self.owners[host].volumes.iter().map(Disk::content).collect();
        self.expect_kept(&held, &promoted, &lacking);
        let (theirs, images) = match lacking {
            Lacking::These(theirs) => (theirs, Some(taken(images, &sizes))),
            Lacking::Everything(_) => (sizes.iter().map(|size| LayeredBitmap::full(*size)).collect(), None),
        };
        self.shown.turned += 1;
        self.shown.turned_by_difference += u64::from(images.is_some());
        let ours = Some(ours).filter(|_| random.percent(85));
        let mut next = Self::of_turned(random, self, Turned { volumes, ours, theirs, images });
        next.play_turned();
        self.shown.promotions += next.shown.promotions;
        self.violation = self.violation.take().or(next.violation);
    }

    /// The new owner's guests write after the promotion. Returns its volumes, and what its chronicle knows.
    fn write_here(&mut self, random: &mut Random) -> (Vec<Disk>, Vec<LayeredBitmap>) {
        let mut volumes = self.standby.images.clone();
        let new = |volume: &Disk| LayeredBitmap::new(BlockCount(volume.len()));
        let mut ours: Vec<_> = volumes.iter().map(new).collect();
        // The guest of the promotion.
        ours[0].insert(BlockRange::new(0, 1));
        for _ in 0..random.below(20) {
            let volume = random.index(volumes.len());
            if random.percent(10) {
                let size = volumes[volume].len() + random.between(1, 5);
                volumes[volume].resize(size);
                ours[volume].grow(BlockCount(size));
            }
            let block = random.below(volumes[volume].len());
            volumes[volume].write(block, self.number());
            ours[volume].insert(BlockRange::new(block, block + 1));
        }
        volumes.iter_mut().for_each(Disk::sync);
        (volumes, ours)
    }

    /// Returns what the former owner knows, and its images. Some were changed since, and some are those of another group.
    fn former(&mut self, random: &mut Random) -> (Former, Vec<Disk>) {
        let owner = &self.owners[self.current];
        let mut images = owner.volumes.clone();
        let written = Some(owner.missing()).filter(|_| owner.knows != Some(Knows::Nothing));
        let mut former =
            Former { record: owner.record.clone(), written, image: Image::AsLeft, is_suitable: true };
        if random.percent(10) {
            let volume = random.index(images.len());
            let block = random.below(images[volume].len());
            images[volume].write(block, self.number());
            former.image = Image::Touched;
        }
        if random.percent(15) {
            let life = LifeId(u128::from(self.number()));
            former.record.iter_mut().for_each(|record| record.life = life);
            for image in &mut images {
                (0..image.len()).for_each(|block| image.write(block, self.number()));
            }
        }
        images.iter_mut().for_each(Disk::sync);
        (former, images)
    }

    /// The former owner takes its steps, and is killed now and then: each may be repeated. What only it has is kept before its images
    /// are overwritten.
    fn expect_kept(&mut self, held: &[Vec<u64>], promoted: &[Vec<u64>], lacking: &Lacking) {
        let (mut stage, mut kept) = (Stage::Ordered, BTreeSet::new());
        while let Some((step, next)) = stage.next() {
            match step {
                Step::KeepDivergence => kept = keep(held, lacking),
                Step::TakeImages => {
                    let differs = differing(held, promoted);
                    if let Some((volume, block)) = differs.into_iter().find(|block| !kept.contains(block)) {
                        self.violate(format!(
                            "block {block} of volume {volume}, which nobody has received, is overwritten and not kept"
                        ));
                    }
                }
                Step::Record => {}
            }
            if !self.random.percent(20) {
                stage = next;
            }
        }
    }

    /// Runs the world of the new owner.
    fn play_turned(&mut self) {
        if self.random.percent(40) {
            return self.expect_only_the_difference();
        }
        self.begin_to_play();
        self.run_until(EVERY * 6);
        if self.violation.is_none() {
            self.end();
        }
    }

    /// Without faults and guests, no more is sent than both hosts have written.
    fn expect_only_the_difference(&mut self) {
        self.is_calm = true;
        self.guests_run = false;
        let most = self.owners[0].lacks_at_first();
        self.run_until(EVERY * 20);
        if self.violation.is_some() {
            return;
        }
        let sent = self.owners[0].sent_blocks;
        if sent > most {
            return self.violate(format!("{sent} blocks were sent to turn the direction round, not {most}"));
        }
        let volumes: Vec<_> = self.owners[0].volumes.iter().map(Disk::content).collect();
        if self.standby.content() != volumes {
            self.violate("the images of a former owner are not the volumes of the new one");
        }
    }

    /// Makes the world of the new owner.
    fn of_turned(mut random: Random, before: &World, turned: Turned) -> Self {
        let sizes = turned.volumes.iter().map(Disk::len).collect();
        let shape = Shape { sizes, ..before.shape.clone() };
        let mut standby = StandbyHost::new(&mut random, &shape);
        standby.settings.spool_blocks = standby.settings.spool_blocks.max(8);
        let mut world = Self::with(random, before, shape, standby);
        world.order_turned(turned);
        world
    }
}

/// Returns the blocks that the former owner keeps.
fn keep(held: &[Vec<u64>], lacking: &Lacking) -> BTreeSet<(usize, u64)> {
    let is_kept = |volume: usize, block: u64| match lacking {
        // What is beyond the new owner's size is kept as well: the image is cut there.
        Lacking::These(sets) => {
            block >= sets[volume].blocks().0 || sets[volume].contains(chronicle::BlockIndex(block))
        }
        Lacking::Everything(_) => true,
    };
    let blocks = |(volume, content): (usize, &Vec<u64>)| {
        (0..content.len() as u64)
            .filter(|block| is_kept(volume, *block))
            .map(|block| (volume, block))
            .collect()
    };
    held.iter().enumerate().flat_map(|of| -> Vec<_> { blocks(of) }).collect()
}

/// Returns the blocks that differ from the promoted state.
fn differing(held: &[Vec<u64>], promoted: &[Vec<u64>]) -> Vec<(usize, u64)> {
    let mut differs = Vec::new();
    for (volume, (held, promoted)) in held.iter().zip(promoted).enumerate() {
        for (block, value) in held.iter().enumerate() {
            if promoted.get(block).copied().unwrap_or_default() != *value {
                differs.push((volume, block as u64));
            }
        }
    }
    differs
}

/// Returns images with the sizes of the new owner's volumes.
fn taken(mut images: Vec<Disk>, sizes: &[BlockCount]) -> Vec<Disk> {
    for (image, size) in images.iter_mut().zip(sizes) {
        image.resize(size.0);
        image.sync();
    }
    images
}
