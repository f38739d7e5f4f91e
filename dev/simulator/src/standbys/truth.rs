//! The model: what all volumes of the group held at each cut. A write in flight at the cut counts either way.

use std::collections::BTreeMap;
use std::time::Duration;

use standby::Watermark;

/// A group at one cut.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    pub(super) at: Duration,
    /// Of each volume and block: the content, and the content if a write in flight counts.
    pub(super) volumes: Vec<Vec<(u64, u64)>>,
}

/// All cuts, by the life of the history and the epoch that ended.
#[derive(Debug, Default)]
pub(super) struct Truth {
    cuts: BTreeMap<(u128, u64), Cut>,
}

impl Truth {
    pub(super) fn add(&mut self, life: u128, epoch: u64, cut: Cut) {
        self.cuts.insert((life, epoch), cut);
    }

    pub(super) fn cut(&self, at: Watermark) -> Option<&Cut> {
        self.cuts.get(&(at.life.0, at.epoch.0))
    }

    /// Returns how images differ from the group at a cut.
    pub(super) fn difference(&self, at: Watermark, images: &[Vec<u64>]) -> Option<String> {
        let epoch = at.epoch.0;
        let Some(cut) = self.cut(at) else { return Some(format!("epoch {epoch} was never cut")) };
        for (volume, (image, truth)) in images.iter().zip(&cut.volumes).enumerate() {
            if image.len() != truth.len() {
                let (has, had) = (image.len(), truth.len());
                return Some(format!(
                    "volume {volume} has {has} blocks, and had {had} at the end of epoch {epoch}"
                ));
            }
            let is_other = |(value, (old, new)): &(&u64, &(u64, u64))| *value != old && *value != new;
            if let Some(block) = image.iter().zip(truth).position(|pair| is_other(&pair)) {
                let (has, had) = (image[block], truth[block]);
                return Some(format!(
                    "block {block} of volume {volume} has {has}, and had {had:?} at the end of epoch {epoch}"
                ));
            }
        }
        None
    }
}
