//! Describes a disk by its chain: data in any image, and known zeroes.

use std::rc::Rc;

use super::file::LaneFile;
use super::mapping::{Place, Tables, TopSays};
use crate::device::{ALIGNMENT, ByteRange, Extent, ExtentKind, push_extent};
use crate::error::IoError;

/// Extents described one by one; the rest is reported as data, which is always allowed. Bounds the answer for a badly fragmented
/// image to 1.5 MiB.
const EXTENTS_MAX: usize = 65_536;

/// Describes a range of the disk. Parts that no image of the chain has are holes, and so are holes of a raw base's file.
pub(super) async fn of_range(tables: &Rc<Tables>, range: ByteRange) -> Result<Vec<Extent>, IoError> {
    let mut extents = Vec::new();
    let mut position = range.offset;
    while position < range.end() {
        let rest = ByteRange::new(position, range.end() - position);
        if extents.len() >= EXTENTS_MAX {
            push_extent(&mut extents, rest, ExtentKind::Data);
            break;
        }
        let piece = tables.piece(rest).await?;
        position = piece.range.end();
        match piece.place {
            Place::Zero => push_extent(&mut extents, piece.range, ExtentKind::Hole),
            Place::Own { .. } | Place::Packed => push_extent(&mut extents, piece.range, ExtentKind::Data),
            Place::Shared { file, offset } => push_file(&mut extents, piece.range, &file, offset).await?,
        }
    }
    Ok(extents)
}

pub(super) async fn of_top(tables: &Rc<Tables>, range: ByteRange) -> Result<Vec<Extent>, IoError> {
    let mut extents = Vec::new();
    let mut position = range.offset;
    while position < range.end() {
        let rest = ByteRange::new(position, range.end() - position);
        if extents.len() >= EXTENTS_MAX {
            push_extent(&mut extents, rest, ExtentKind::Data);
            break;
        }
        let (says, end) = tables.top_says(rest).await?;
        let kind = match says {
            TopSays::Something => ExtentKind::Data,
            TopSays::Nothing => ExtentKind::Hole,
        };
        push_extent(&mut extents, ByteRange::new(position, end - position), kind);
        position = end;
    }
    Ok(extents)
}

async fn push_file(
    extents: &mut Vec<Extent>,
    range: ByteRange,
    file: &LaneFile,
    offset: u64,
) -> Result<(), IoError> {
    let unit = u64::from(ALIGNMENT);
    let start = offset - offset % unit;
    let end = (offset + range.length).next_multiple_of(unit).min(file.end());
    let Some(told) = file.holes(ByteRange::new(start, end.saturating_sub(start))) else {
        push_extent(extents, range, ExtentKind::Data);
        return Ok(());
    };
    for extent in told.await? {
        let from = extent.range.offset.max(offset);
        let to = extent.range.end().min(offset + range.length);
        let part = ByteRange::new(from - offset + range.offset, to.saturating_sub(from));
        push_extent(extents, part, extent.kind);
    }
    Ok(())
}
