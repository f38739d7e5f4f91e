//! The current size of a volume of a restored journal: it may have grown since the backup.
//!
//! ```text
//!   image            what it shows        the volume has
//!   raw file, qcow2  the volume's size    that size, if it is not below the saved size
//!   device, export   the room available   the size in the replaced journal, if there was one; all the room, if that is not
//!                                         above the saved size; otherwise the administrator decides
//! ```
//! **N.B.** A volume served with fewer bytes than it had loses the rest: guests see a truncated disk, and the next growth
//! zeroes the lost part.

use crate::planted::{Bug, broken};

/// A volume grows by multiples of this many bytes.
const STEP_BYTES: u64 = 512;

/// The evidence of an image for the size of its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// The volume has this many bytes.
    Volume(u64),
    /// The place has this many bytes; its volume may have fewer.
    Room(u64),
}

/// The reason why the size of a volume is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeUnknown {
    /// The image is too small for the volume.
    #[error(
        "its image has {found} bytes, and the volume had {recorded} when the journal was saved: it is another image, or was cut off"
    )]
    Smaller {
        /// The size of the image in bytes.
        found: u64,
        /// The recorded size of the volume in bytes.
        recorded: u64,
    },
    /// The size is not a size of a volume.
    #[error("its image has {0} bytes, which is no multiple of 512")]
    Odd(u64),
    /// The volume may have grown since the backup.
    #[error(
        "its device or export has room for {room} bytes, and the volume had {recorded} when the journal was saved: it may have grown since"
    )]
    MayHaveGrown {
        /// The size of the place in bytes.
        room: u64,
        /// The recorded size of the volume in bytes.
        recorded: u64,
    },
}

/// Returns the size of a volume that had `recorded` bytes at the backup. `is_known`: a later journal confirms that size for the
/// time of the loss. `said`: the size that the administrator gives.
///
/// # Errors
/// [`SizeUnknown`]: the volume must not be served.
pub fn size_now(
    recorded: u64,
    is_known: bool,
    measured: Measured,
    said: Option<u64>,
) -> Result<u64, SizeUnknown> {
    if broken(Bug::RestoredSize) {
        return Ok(recorded);
    }
    match measured {
        Measured::Volume(found) | Measured::Room(found) if found < recorded => {
            Err(SizeUnknown::Smaller { found, recorded })
        }
        Measured::Volume(found) if found != recorded && !found.is_multiple_of(STEP_BYTES) => {
            Err(SizeUnknown::Odd(found))
        }
        Measured::Volume(found) => Ok(found),
        Measured::Room(room) => match said {
            Some(said) if said > room => Err(SizeUnknown::Smaller { found: room, recorded: said }),
            Some(said) if said < recorded => Err(SizeUnknown::MayHaveGrown { room, recorded }),
            Some(said) if said != recorded && !said.is_multiple_of(STEP_BYTES) => Err(SizeUnknown::Odd(said)),
            Some(said) => Ok(said),
            None if is_known || room == recorded => Ok(recorded),
            None => Err(SizeUnknown::MayHaveGrown { room, recorded }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::Measured::{Room, Volume};
    use super::SizeUnknown::{MayHaveGrown, Odd, Smaller};
    use super::*;

    #[test]
    fn a_volume_has_the_size_that_it_has_grown_to_or_waits() {
        let now = |is_known, measured, said| size_now(4096, is_known, measured, said);
        for is_known in [false, true] {
            assert_eq!(now(is_known, Volume(4096), None), Ok(4096));
            assert_eq!(now(is_known, Volume(8192), None), Ok(8192));
            assert_eq!(now(is_known, Volume(2048), None), Err(Smaller { found: 2048, recorded: 4096 }));
            assert_eq!(now(is_known, Volume(8191), None), Err(Odd(8191)));
            assert_eq!(now(is_known, Room(4096), None), Ok(4096));
            assert_eq!(now(is_known, Room(512), None), Err(Smaller { found: 512, recorded: 4096 }));
            assert_eq!(now(is_known, Room(8192), Some(6144)), Ok(6144));
            assert!(now(is_known, Room(8192), Some(2048)).is_err(), "no volume becomes smaller");
            assert!(now(is_known, Room(8192), Some(16384)).is_err());
        }
        assert_eq!(now(true, Room(8192), None), Ok(4096), "a later journal said so");
        assert_eq!(now(false, Room(8192), None), Err(MayHaveGrown { room: 8192, recorded: 4096 }));
    }
}
