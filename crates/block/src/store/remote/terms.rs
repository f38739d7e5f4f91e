//! The terms that were agreed on with a server, and whether they suffice.

use nbd_protocol::client::Offer;
use nbd_protocol::negotiation::BlockSizes;
use nbd_protocol::{NbdUri, PAYLOAD_LENGTH_MAX, transmission_flag};

use super::error::RemoteError;
use crate::device::ALIGNMENT;
use crate::store::image::Access;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// Size in bytes; a multiple of the server's minimum block size.
    pub(super) size: u64,
    /// The server's flags, without those that are not used.
    flags: u16,
    /// Smallest request in bytes; divides [`ALIGNMENT`].
    pub(super) minimum_block_size: u32,
    /// Longest read or write in bytes; a multiple of [`ALIGNMENT`].
    pub(super) payload_max: u32,
    pub(super) structured: bool,
    pub(super) allocation: Option<u32>,
}

const USED_FLAGS: u16 = transmission_flag::SEND_FLUSH
    | transmission_flag::SEND_FUA
    | transmission_flag::SEND_TRIM
    | transmission_flag::SEND_WRITE_ZEROES
    | transmission_flag::CAN_MULTI_CONN;

impl Terms {
    pub(super) fn new(uri: &NbdUri, offer: &Offer, access: Access) -> Result<Self, RemoteError> {
        let uri = || uri.to_string();
        let protocol = |reason| Err(RemoteError::Protocol { uri: uri(), reason });
        let Offer { size, structured, allocation, .. } = *offer;
        let flags = if offer.flags & transmission_flag::HAS_FLAGS == 0 { 0 } else { offer.flags };
        if size > i64::MAX as u64 {
            return protocol("no disk has that size");
        }
        let sizes = offer.block_sizes.unwrap_or(BlockSizes {
            minimum: 1,
            preferred: ALIGNMENT,
            maximum: PAYLOAD_LENGTH_MAX,
        });
        let BlockSizes { minimum, preferred, maximum } = sizes;
        if !minimum.is_power_of_two()
            || !preferred.is_power_of_two()
            || minimum > preferred
            || preferred > maximum
        {
            return protocol("its block sizes contradict each other");
        }
        if minimum > ALIGNMENT {
            return Err(RemoteError::BlockTooLarge { uri: uri(), minimum });
        }
        if !size.is_multiple_of(u64::from(minimum)) {
            return Err(RemoteError::OddSize { uri: uri(), size, minimum });
        }
        let payload_max = maximum.min(PAYLOAD_LENGTH_MAX) / ALIGNMENT * ALIGNMENT;
        if payload_max == 0 {
            return protocol("its largest request is smaller than a block of 4096 bytes");
        }
        if access == Access::ReadWrite {
            if flags & transmission_flag::READ_ONLY != 0 {
                return Err(RemoteError::ReadOnly { uri: uri() });
            }
            if flags & transmission_flag::SEND_FLUSH == 0 {
                return Err(RemoteError::NoFlush { uri: uri() });
            }
        }
        let flags = flags & USED_FLAGS;
        Ok(Self { size, flags, minimum_block_size: minimum, payload_max, structured, allocation })
    }

    pub(super) fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }

    pub(super) fn with_size(self, size: u64) -> Self {
        Self { size, ..self }
    }

    /// Checks that a store with these terms can continue with `other` ones; returns what has changed if not.
    pub(super) fn check_kept_by(&self, other: &Self) -> Result<(), &'static str> {
        // It may have grown: the part behind the volume is not touched.
        if other.size < self.size {
            return Err("it has become smaller");
        }
        if other.flags & self.flags != self.flags {
            return Err("the server knows fewer commands");
        }
        if other.payload_max < self.payload_max || other.minimum_block_size > self.minimum_block_size {
            return Err("the server takes other lengths");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> Offer {
        Offer {
            size: 1 << 20,
            flags: transmission_flag::HAS_FLAGS | USED_FLAGS,
            block_sizes: Some(BlockSizes { minimum: 512, preferred: 4096, maximum: u32::MAX }),
            structured: true,
            allocation: Some(1),
        }
    }

    fn judge(offer: &Offer) -> Result<Terms, RemoteError> {
        Terms::new(&NbdUri::unix("/s", "disk"), offer, Access::ReadWrite)
    }

    #[test]
    fn a_usual_offer_is_good_and_its_lengths_are_bounded() {
        let terms = judge(&offer()).unwrap();
        assert_eq!(
            (terms.size, terms.payload_max, terms.minimum_block_size),
            (1 << 20, PAYLOAD_LENGTH_MAX, 512)
        );
        assert!(terms.has(transmission_flag::SEND_TRIM | transmission_flag::SEND_FLUSH));
        let told_nothing = judge(&Offer { block_sizes: None, size: 1001, ..offer() }).unwrap();
        assert_eq!((told_nothing.minimum_block_size, told_nothing.payload_max), (1, PAYLOAD_LENGTH_MAX));
    }

    #[test]
    fn what_cannot_be_kept_is_refused_by_name() {
        let sizes = |minimum, preferred, maximum| {
            judge(&Offer { block_sizes: Some(BlockSizes { minimum, preferred, maximum }), ..offer() })
        };
        assert!(matches!(sizes(8192, 8192, 1 << 20), Err(RemoteError::BlockTooLarge { minimum: 8192, .. })));
        for (minimum, preferred, maximum) in
            [(0, 4096, 1 << 20), (3, 4096, 1 << 20), (512, 256, 1 << 20), (1, 4096, 1024), (1, 512, 1024)]
        {
            let result = sizes(minimum, preferred, maximum);
            assert!(matches!(result, Err(RemoteError::Protocol { .. })), "{minimum} {preferred} {maximum}");
        }
        assert!(matches!(judge(&Offer { size: 1000, ..offer() }), Err(RemoteError::OddSize { .. })));
        assert!(matches!(judge(&Offer { size: u64::MAX, ..offer() }), Err(RemoteError::Protocol { .. })));
        let flags = |flags| judge(&Offer { flags, ..offer() });
        let read_only = offer().flags | transmission_flag::READ_ONLY;
        assert!(matches!(flags(read_only), Err(RemoteError::ReadOnly { .. })));
        assert!(matches!(flags(transmission_flag::HAS_FLAGS), Err(RemoteError::NoFlush { .. })));
        assert!(
            matches!(flags(transmission_flag::SEND_FLUSH), Err(RemoteError::NoFlush { .. })),
            "they do not count"
        );
        let reading = Terms::new(&NbdUri::unix("/s", ""), &Offer { flags: 0, ..offer() }, Access::ReadOnly);
        assert!(reading.is_ok());
    }

    #[test]
    fn a_server_that_comes_back_may_offer_more_and_not_less() {
        let terms = judge(&offer()).unwrap();
        let kept_by = |offer| terms.check_kept_by(&judge(&offer).unwrap());
        assert_eq!(kept_by(offer()), Ok(()));
        assert_eq!(kept_by(Offer { structured: false, allocation: None, ..offer() }), Ok(()));
        assert_eq!(kept_by(Offer { size: 2 << 20, ..offer() }), Ok(()));
        assert!(kept_by(Offer { size: 1 << 19, ..offer() }).is_err());
        let without_zeroes = offer().flags & !transmission_flag::SEND_WRITE_ZEROES;
        assert!(kept_by(Offer { flags: without_zeroes, ..offer() }).is_err());
        let short = BlockSizes { minimum: 512, preferred: 4096, maximum: 65536 };
        assert!(kept_by(Offer { block_sizes: Some(short), ..offer() }).is_err());
    }
}
