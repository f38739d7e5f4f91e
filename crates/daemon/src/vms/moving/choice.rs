//! Chooses the number of streams for a VM's memory, unless the order names it.
//!
//! ```text
//!   one link, little memory       ──► one: it is full, and several would only take turns
//!   one link, a lot of memory     ──► several: one thread of the hypervisor does not fill a fast link
//!   several links                 ──► more than links, so that a slow link does not delay the others
//! ```

/// The memory size in bytes from which several streams are worth their threads: below it a move takes only seconds.
const LARGE_BYTES: u64 = 4 << 30;
/// The number of streams of a large VM over one link: with four threads QEMU fills 40 Gbit/s.
const STREAMS_OF_LARGE: u8 = 4;
/// The number of streams for each of several links.
const STREAMS_OF_LINK: usize = 2;
/// The largest number that is chosen automatically.
const STREAMS_MAX: usize = 8;

/// Returns the number of streams besides the main one; 0: only the main one.
pub(crate) fn side_streams(ordered: Option<u8>, memory_bytes: u64, links: usize) -> u8 {
    match (ordered, links) {
        // QEMU's main stream would only wait for a single side stream.
        (Some(0 | 1), _) => 0,
        (Some(ordered), _) => ordered,
        // STREAMS_MAX fits into a u8.
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
