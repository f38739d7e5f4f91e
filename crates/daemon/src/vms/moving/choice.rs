//! Over how many streams a VM's memory goes, if nobody says.
//!
//! ```text
//!   one link, little memory       ──► one: it is full, and several would only take turns
//!   one link, a lot of memory     ──► several: one thread of the hypervisor does not fill a fast link
//!   several links                 ──► more than links, so that a slow one does not hold the others up
//! ```

/// From here on several streams are worth their threads, in bytes: below it a move is over in seconds in any case.
const LARGE_BYTES: u64 = 4 << 30;
/// Streams of a large VM over one link: with four threads QEMU fills 40 Gbit/s.
const STREAMS_OF_LARGE: u8 = 4;
/// Streams for each link, if there are several.
const STREAMS_OF_LINK: usize = 2;
/// The most that are used if nobody says.
const STREAMS_MAX: usize = 8;

/// Streams beside the main one, for a VM with so much memory over so many links; 0: only the main one.
pub(crate) fn side_streams(ordered: Option<u8>, memory_bytes: u64, links: usize) -> u8 {
    match (ordered, links) {
        // QEMU's main stream would only be waited for by a single other one.
        (Some(0 | 1), _) => 0,
        (Some(ordered), _) => ordered,
        // It is at most eight.
        (None, 2..) => u8::try_from((links * STREAMS_OF_LINK).min(STREAMS_MAX)).unwrap_or(STREAMS_OF_LARGE),
        (None, _) if memory_bytes >= LARGE_BYTES => STREAMS_OF_LARGE,
        (None, _) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_streams_are_used_where_they_gain_something_or_are_asked_for() {
        const SMALL: u64 = 256 << 20;
        assert_eq!(side_streams(None, SMALL, 1), 0);
        assert_eq!(side_streams(None, LARGE_BYTES, 1), 4);
        assert_eq!(side_streams(None, SMALL, 3), 6);
        assert_eq!(side_streams(None, LARGE_BYTES, 100), 8);
        assert_eq!(side_streams(Some(1), LARGE_BYTES, 3), 0);
        assert_eq!(side_streams(Some(16), SMALL, 1), 16);
    }
}
