//! Volumes in their initial state.

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

/// The percentage of zeroes that are allocated, so that copying has to find them.
const ALLOCATED_ZEROES_PERCENT: u64 = 40;

pub(super) struct PlannedVolume {
    pub(super) disk: Rc<SimDisk>,
    pub(super) guest: Rc<Guest>,
    pub(super) record: Record,
}

impl PlannedVolume {
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
        // Grains of 4 KiB, or stretches long enough to be found empty in copying.
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
