//! What a message tells the administrator to do with an image whose size is not its volume's.

use crate::journal::{ImageFormat, Place};

/// What helps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The end of a raw file is missing: the file can be made longer, and what was there is lost.
    Lengthen,
    /// A raw file is larger than its volume. What lies behind may be the guest's, so nothing is cut off.
    KeepLonger,
    /// The image has a format of its own. Only the program that knows the format changes its size.
    ByItsProgram,
    /// It is no file.
    NoFile,
}

/// Decides what is said of an image of `found` bytes whose volume has `wanted`. No message ever tells anybody to shorten an image.
pub fn remedy_for_size(place: &Place, format: ImageFormat, found: u64, wanted: u64) -> Remedy {
    match (place, format) {
        (Place::Device(_) | Place::Nbd(_), _) => Remedy::NoFile,
        (Place::File(_), ImageFormat::Qcow2) => Remedy::ByItsProgram,
        (Place::File(_), ImageFormat::Raw) if found < wanted => Remedy::Lengthen,
        (Place::File(_), ImageFormat::Raw) => Remedy::KeepLonger,
    }
}
