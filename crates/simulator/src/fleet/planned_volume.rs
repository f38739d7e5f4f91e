//! Volumes as they are before anything happens.

use std::rc::Rc;

use block::BufferPool;
use chronicle::Generation;
use migration::VolumeId;
use migration::journal::{ExportSettings, ImageLocation, Record, VolumeRecord};

use crate::disk::SimDisk;
use crate::guest::Guest;
use crate::random::Random;
use crate::scenario::VolumePlan;
use crate::world::World;

/// In how many of a hundred cases what holds only zeroes is allocated all the same, so that they must be found.
const ALLOCATED_ZEROES_PERCENT: u64 = 40;

/// A volume as it is before anything happens: in an image of store `a`, with a guest.
pub(super) struct PlannedVolume {
    pub(super) disk: Rc<SimDisk>,
    pub(super) guest: Rc<Guest>,
    /// What the journal begins with.
    pub(super) record: Record,
}

impl PlannedVolume {
    /// Makes the volume of this number and identity, as planned.
    pub(super) fn make(
        world: &Rc<World>,
        random: &mut Random,
        (index, volume, plan): (usize, VolumeId, &VolumePlan),
        path: &str,
        buffers: BufferPool,
    ) -> Self {
        let disk = SimDisk::new(world, index as u32, plan.disk.clone(), random.fork());
        prefill(&disk, plan.filled_percent, random);
        let initial = disk.with_medium(|medium| medium.current().to_vec());
        let guest = Guest::new(world, index, plan.guest.clone(), random.fork(), &initial, buffers);
        let record = Record::VolumeAdded(VolumeRecord {
            volume,
            name: format!("v{index}"),
            size_bytes: plan.disk.size_bytes,
            block_size_bytes: plan.block_size.into(),
            image: ImageLocation::raw_file("a", path),
            generation: Generation(1),
            export: ExportSettings::default(),
        });
        Self { disk, guest, record }
    }
}

fn prefill(disk: &SimDisk, filled_percent: u64, random: &mut Random) {
    disk.with_medium(|medium| {
        // Of grains of 4 KiB, or of stretches long enough to be found empty when they are copied.
        let stretch = random.pick(&[8, 8, 128, 256]);
        let sectors = medium.current().len();
        for start in (0..sectors).step_by(stretch) {
            let end = (start + stretch).min(sectors);
            if random.percent(filled_percent) {
                (start..end).for_each(|sector| medium.prefill(sector, sector as u64 | 1 << 63));
            } else if random.percent(ALLOCATED_ZEROES_PERCENT) {
                (start..end).for_each(|sector| medium.prefill(sector, 0));
            }
        }
    });
}
