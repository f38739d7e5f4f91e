//! What the machine has written into the images: epochs, and points that are put back.

use standby::Watermark;
use standby::record::{KeptBy, Sealed};

use crate::standbys::world::World;

impl World {
    /// Writes a part of a sealed epoch's spools into the images.
    pub(super) fn apply(&mut self, sealed: &Sealed, percent: u64) {
        self.expect_image_is_free();
        let Some(spools) = self.standby.named.get(&sealed.watermark).cloned() else {
            return self.violate("a sealed epoch has no spool");
        };
        self.standby.grow(&sealed.sizes);
        for (volume, entries) in spools.iter().enumerate() {
            for (block, value) in entries.iter().flat_map(|entry| entry.blocks.iter().zip(&entry.payload)) {
                if self.random.percent(percent) {
                    self.standby.write(volume, block.0, *value);
                }
            }
        }
    }

    pub(super) fn restore_point(&mut self, at: Watermark, percent: u64) {
        self.expect_image_is_free();
        if self.standby.passed.contains(&at) {
            self.violate("a point is put back over an image that has older blocks already");
        }
        if self.standby.settings.kept_by == KeptBy::Undo {
            let newer = self.standby.record.iter().flat_map(|record| &record.points).rev();
            let newer: Vec<_> = newer.map(|point| point.watermark).take_while(|point| *point != at).collect();
            self.standby.passed.extend(newer);
        }
        let Some(point) = self.standby.points.get(&at).cloned() else {
            return self.violate("a point that is to be promoted does not exist");
        };
        if percent == 100 {
            let sizes: Vec<_> = point.iter().map(|volume| volume.len() as u64).collect();
            self.standby.resize(&sizes);
        }
        for (volume, content) in point.iter().enumerate() {
            for (block, value) in content.iter().enumerate() {
                if self.random.percent(percent) {
                    self.standby.write(volume, block as u64, *value);
                }
            }
        }
    }
}
