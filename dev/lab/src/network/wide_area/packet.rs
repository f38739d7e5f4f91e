//! A packet of a TUN device: the kernel's header, then the packet on the wire.
//!
//! ```text
//!   flags u8 │ segmentation u8 │ header u16 │ segment u16 │ checksum start u16 │ checksum offset u16 │ IP packet …
//! ```
//!
//! The kernels of both ends leave the division into segments to the device. A packet may thus stand for up to 64 KiB of
//! segments of one connection. It is written to the other end unchanged, header included, which keeps a gigabit cheap. On the
//! wire it counts as its segments.

#[derive(Debug)]
pub(super) struct Packet {
    bytes: Box<[u8]>,
    wire_bytes: u64,
}

/// Kinds of segmentation in the header; the top bit marks congestion.
const NO_SEGMENTATION: u8 = 0;
const SEGMENTATION_AT: usize = 1;
const SEGMENT_BYTES_AT: usize = 4;
const CHECKSUM_START_AT: usize = 6;
/// Offset of TCP's header length, in words of four bytes, in the upper half of the byte.
const TCP_HEADER_LENGTH_AT: usize = 12;

impl Packet {
    pub(super) const HEADER_BYTES: usize = 10;
    pub(super) const BYTES_MAX: usize = Self::HEADER_BYTES + 65_536;

    /// Parses what a device has delivered; `None` if it is shorter than the header.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let packet = bytes.get(Self::HEADER_BYTES..)?;
        Some(Self { bytes: bytes.into(), wire_bytes: wire_bytes(&bytes[..Self::HEADER_BYTES], packet) })
    }

    #[cfg(test)]
    pub(super) fn plain(packet: &[u8]) -> Self {
        let bytes = [&[0; Self::HEADER_BYTES], packet].concat();
        Self { bytes: bytes.into(), wire_bytes: packet.len() as u64 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bytes on the wire: those of all IP packets that it stands for.
    pub(super) fn wire_bytes(&self) -> u64 {
        self.wire_bytes
    }
}

/// Returns the bytes on the wire. Every segment after the first adds headers. An unknown packet counts once.
fn wire_bytes(note: &[u8], packet: &[u8]) -> u64 {
    let length = packet.len() as u64;
    let field = |at: usize| u64::from(u16::from_ne_bytes([note[at], note[at + 1]]));
    let segment_bytes = field(SEGMENT_BYTES_AT);
    if note[SEGMENTATION_AT] == NO_SEGMENTATION || segment_bytes == 0 {
        return length;
    }
    let transport_at = field(CHECKSUM_START_AT);
    let Some(words) = packet.get(transport_at as usize + TCP_HEADER_LENGTH_AT) else { return length };
    let headers = transport_at + u64::from(words >> 4) * 4;
    let segments = length.saturating_sub(headers).div_ceil(segment_bytes).max(1);
    length + (segments - 1) * headers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a TCP packet over IPv4 without options, with this header.
    fn read(segmentation: u8, segment_bytes: u16, payload: usize) -> Packet {
        let mut bytes = vec![0; Packet::HEADER_BYTES + 40 + payload];
        bytes[SEGMENTATION_AT] = segmentation;
        bytes[SEGMENT_BYTES_AT..][..2].copy_from_slice(&segment_bytes.to_ne_bytes());
        bytes[CHECKSUM_START_AT..][..2].copy_from_slice(&20_u16.to_ne_bytes());
        bytes[Packet::HEADER_BYTES + 20 + TCP_HEADER_LENGTH_AT] = 5 << 4;
        Packet::read(&bytes).unwrap()
    }

    #[test]
    fn segments_count_with_their_headers() {
        assert_eq!(read(1, 1460, 3 * 1460).wire_bytes(), 3 * 1500);
        assert_eq!(read(1, 1460, 2 * 1460 + 1).wire_bytes(), 2 * 1500 + 41);
        assert_eq!(read(0, 0, 1460).wire_bytes(), 1500);
        assert_eq!(read(1, 0, 1460).wire_bytes(), 1500, "a note that makes no sense");
    }

    #[test]
    fn what_is_too_short_is_no_packet() {
        assert!(Packet::read(&[0; Packet::HEADER_BYTES - 1]).is_none());
        assert_eq!(Packet::read(&[0; Packet::HEADER_BYTES]).unwrap().wire_bytes(), 0);
        let mut odd = [0; Packet::HEADER_BYTES + 5];
        odd[SEGMENTATION_AT] = 1;
        odd[SEGMENT_BYTES_AT] = 1;
        assert_eq!(Packet::read(&odd).unwrap().wire_bytes(), 5);
    }
}
