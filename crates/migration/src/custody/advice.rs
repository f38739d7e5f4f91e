//! The advice for an image whose size differs from its volume's.

use crate::journal::{ImageFormat, Place};

/// The advice that a message gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The end of a raw file is missing. The file can be lengthened, but the lost data is gone.
    Lengthen,
    /// A raw file is larger than its volume. The surplus may hold guest data, so nothing is cut off.
    KeepLonger,
    /// The image has a format of its own. Only a program that knows the format may change its size.
    ByItsProgram,
    /// The image is not a file.
    NoFile,
}

/// Chooses the advice for an image of `found` bytes whose volume has `wanted`. No message ever advises to shorten an image.
pub fn remedy_for_size(place: &Place, format: ImageFormat, found: u64, wanted: u64) -> Remedy {
    match (place, format) {
        (Place::Device(_) | Place::Nbd(_), _) => Remedy::NoFile,
        (Place::File(_), ImageFormat::Qcow2) => Remedy::ByItsProgram,
        (Place::File(_), ImageFormat::Raw) if found < wanted => Remedy::Lengthen,
        (Place::File(_), ImageFormat::Raw) => Remedy::KeepLonger,
    }
}
