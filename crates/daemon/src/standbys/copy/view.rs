//! What of a keeper is shown.

use std::io;

use standby::record::{ImageState, KeptBy, Point, Standing};
use standby::{VolumeIndex, Watermark};

use super::keeper::Keeper;
use crate::standbys::book::Side;

/// What an administrator sees of a standby.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyView {
    /// When the source's state was as the images are, in milliseconds since 1970; `None`: there is no recovery point.
    pub(crate) as_of_unix_ms: Option<u64>,
    pub(crate) is_promoted: bool,
    pub(crate) is_consumed: bool,
    /// The migration that may still give the images back.
    pub(crate) lent_to: Option<u64>,
    /// What happened to the images.
    pub(crate) note: Option<String>,
    /// Recovery points, the oldest first: name, time in milliseconds since 1970.
    pub(crate) points: Vec<(Watermark, u64)>,
    /// Why it cannot go on.
    pub(crate) fault: Option<String>,
}

impl Keeper {
    /// Returns which blocks of a volume from `first` on have contents with these hashes.
    pub(super) fn same(
        &mut self,
        volume: VolumeIndex,
        first: u64,
        hashes: &[u8],
    ) -> io::Result<Vec<(u64, u64)>> {
        let open = self.open.as_mut().ok_or_else(|| io::Error::other("its files are closed"))?;
        open.files.same(volume, first, hashes)
    }

    pub(super) fn view(&self) -> CopyView {
        // N.B. What is recorded can be promoted once the fault is mended, so it is shown.
        let recorded = || self.book.record(Side::Copy, &self.config.id).ok().flatten();
        let Some(record) =
            self.open.as_ref().map_or_else(recorded, |open| Some(open.machine.record().clone()))
        else {
            return CopyView { fault: self.fault.clone(), ..CopyView::default() };
        };
        let is_promoted = matches!(record.standing, Standing::Promoted { .. });
        let is_consumed = record.standing == Standing::Consumed;
        // N.B. What a migration has begun with is overwritten, and with it what depends on it.
        let is_point =
            record.image == ImageState::AsOfWatermark && record.watermark.is_some() && !is_consumed;
        let is_shown = |point: &&Point| match point.kept_by {
            KeptBy::Reflink => true,
            KeptBy::Undo => !is_consumed,
            KeptBy::Passed => false,
        };
        let points = record.points.iter().filter(is_shown);
        let newest = points.clone().next_back().map(|point| point.as_of_ms);
        let arrived = if is_point { Some(record.as_of_ms) } else { newest };
        let is_kept = record.points.last().map(|point| point.watermark) == record.watermark;
        let image = record.watermark.filter(|_| is_point && !is_kept).map(|at| (at, record.as_of_ms));
        CopyView {
            as_of_unix_ms: arrived
                .map(|arrived| self.current_unix_ms.filter(|_| is_point).unwrap_or(0).max(arrived)),
            is_promoted,
            is_consumed,
            lent_to: self.lent_to,
            note: self.note.clone().filter(|_| record.watermark.is_none()),
            points: points
                .map(|point| (point.watermark, point.as_of_ms))
                .chain(image)
                // The images are volumes now, which do not go back to a point.
                .filter(|_| !is_promoted)
                .collect(),
            fault: self.fault.clone(),
        }
    }
}
