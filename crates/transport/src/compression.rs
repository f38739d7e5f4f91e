//! Compresses payloads where measurements say that it pays: the ratio, the time, and the link's speed.
//!
//! A [`Packer`] belongs to one connection. For each codec it keeps the nanoseconds per byte and the ratio, and beside them the
//! link's nanoseconds per byte. Packing pays where *packing + sending the packed bytes* takes clearly less time than *sending the
//! plain bytes*. Now and then a sample is packed to keep the figures true. Before a payload is packed, a small probe shows
//! whether it packs at all: for encrypted or packed data that costs a few microseconds only.

use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::frame::{Codec, Malformed};

/// Level of zstd: its fastest distinct level. On a link that calls for a higher one, the time is not worth it.
const ZSTD_LEVEL: i32 = -1;

/// Shorter payloads are sent plain: the gain would be less than a packet.
const PACKED_BYTES_MIN: usize = 2 << 10;

/// Bytes that are probed, from the payload's middle: the heads of files and blocks look alike.
const PROBE_BYTES: usize = 4 << 10;

const SAMPLE_BYTES: usize = 64 << 10;

/// Payloads between two samples of the unused codecs: the samples take less than a percent of the time.
const SAMPLE_INTERVAL: u32 = 128;

/// Highest ratio at which a payload is sent packed: below this gain unpacking is not worth it.
const RATIO_MAX: f64 = 0.9;

/// How many times faster packing must be: the figures are means, and switching back and forth costs time.
const GAIN_MIN: f64 = 1.15;

const WEIGHT: f64 = 0.2;

/// Undoes a peer's [`Packer`]. The caller has checked `payload_bytes` against the limits.
pub(crate) fn unpack(codec: Codec, wire: Vec<u8>, payload_bytes: usize) -> Result<Bytes, Malformed> {
    let payload = match codec {
        Codec::Plain => wire,
        Codec::Lz4 => {
            let mut payload = vec![0; payload_bytes];
            match lz4_flex::block::decompress_into(&wire, &mut payload) {
                Ok(length) if length == payload_bytes => payload,
                _ => return Err(Malformed::Packing),
            }
        }
        Codec::Zstd => zstd::bulk::decompress(&wire, payload_bytes).map_err(|_| Malformed::Packing)?,
    };
    if payload.len() == payload_bytes { Ok(payload.into()) } else { Err(Malformed::Packing) }
}

/// Whether payloads may be packed at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Compression {
    /// Payloads are packed where measurements say that it pays.
    #[default]
    Measured,
    /// Payloads are always sent plain.
    Off,
}

pub(crate) struct Packer {
    compression: Compression,
    lz4: Figures,
    zstd: Figures,
    /// Nanoseconds per byte on the link; `None` until enough has been sent.
    link_ns_per_byte: Option<f64>,
    payloads: u32,
}

#[derive(Clone, Copy, Default)]
struct Figures {
    /// Nanoseconds per byte, and the ratio; `None` until measured.
    measured: Option<(f64, f64)>,
}

impl Packer {
    pub(crate) fn new(compression: Compression) -> Self {
        Self {
            compression,
            lz4: Figures::default(),
            zstd: Figures::default(),
            link_ns_per_byte: None,
            payloads: 0,
        }
    }

    pub(crate) fn measured(&mut self, link_ns_per_byte: f64) {
        self.link_ns_per_byte = Some(link_ns_per_byte);
    }

    pub(crate) fn link_ns_per_byte(&self) -> Option<f64> {
        self.link_ns_per_byte
    }

    pub(crate) fn pack(&mut self, payload: &Bytes) -> (Codec, Bytes) {
        let plain = (Codec::Plain, payload.clone());
        let Some(link) = self.link_ns_per_byte else { return plain };
        if self.compression == Compression::Off || payload.len() < PACKED_BYTES_MIN {
            return plain;
        }
        self.payloads = self.payloads.wrapping_add(1);
        if self.payloads % SAMPLE_INTERVAL == 1 {
            self.sample(payload);
        }
        let Some(codec) = self.choose(link) else { return plain };
        if !probe(payload) {
            return plain;
        }
        let begun = Instant::now();
        let Some(packed) = compress(codec, payload) else { return plain };
        self.figures(codec).learn(payload.len(), packed.len(), begun.elapsed());
        if (packed.len() as f64) < payload.len() as f64 * RATIO_MAX { (codec, packed.into()) } else { plain }
    }

    /// Returns the codec with which a byte arrives soonest, if that is clearly sooner than without any.
    fn choose(&self, link: f64) -> Option<Codec> {
        let time = |figures: &Figures| figures.measured.map(|(pack, ratio)| pack + ratio * link);
        let candidates = [(Codec::Lz4, time(&self.lz4)), (Codec::Zstd, time(&self.zstd))];
        let timed = candidates.into_iter().filter_map(|(codec, time)| time.map(|time| (codec, time)));
        let (codec, time) = timed.min_by(|(_, one), (_, other)| one.total_cmp(other))?;
        (time * GAIN_MIN < link).then_some(codec)
    }

    fn sample(&mut self, payload: &Bytes) {
        let sample = payload.slice(..payload.len().min(SAMPLE_BYTES));
        if !probe(&sample) {
            return;
        }
        for codec in [Codec::Lz4, Codec::Zstd] {
            let begun = Instant::now();
            if let Some(packed) = compress(codec, &sample) {
                self.figures(codec).learn(sample.len(), packed.len(), begun.elapsed());
            }
        }
    }

    fn figures(&mut self, codec: Codec) -> &mut Figures {
        if codec == Codec::Zstd { &mut self.zstd } else { &mut self.lz4 }
    }
}

impl Figures {
    fn learn(&mut self, bytes: usize, packed_bytes: usize, took: Duration) {
        let cost = took.as_nanos() as f64 / bytes as f64;
        let ratio = packed_bytes as f64 / bytes as f64;
        let (mut cost_mean, mut ratio_mean) = (self.measured.map(|it| it.0), self.measured.map(|it| it.1));
        self.measured = Some((mean(&mut cost_mean, cost), mean(&mut ratio_mean, ratio)));
    }
}

fn mean(of: &mut Option<f64>, value: f64) -> f64 {
    let mean = of.map_or(value, |mean| mean + (value - mean) * WEIGHT);
    *of = Some(mean);
    mean
}

fn probe(payload: &[u8]) -> bool {
    let from = (payload.len() / 2).min(payload.len().saturating_sub(PROBE_BYTES));
    let piece = &payload[from..payload.len().min(from + PROBE_BYTES)];
    let packed = lz4_flex::block::compress(piece);
    (packed.len() as f64) < piece.len() as f64 * RATIO_MAX
}

fn compress(codec: Codec, payload: &[u8]) -> Option<Vec<u8>> {
    match codec {
        Codec::Plain => None,
        Codec::Lz4 => Some(lz4_flex::block::compress(payload)),
        Codec::Zstd => zstd::bulk::compress(payload, ZSTD_LEVEL).ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::{Codec, Compression, Packer, unpack};

    fn text(bytes: usize) -> Bytes {
        let mut random = 1u64;
        let mut text = Vec::with_capacity(bytes);
        while text.len() < bytes {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text.extend_from_slice(format!("{} tern, ", random >> 56).as_bytes());
        }
        text.truncate(bytes);
        text.into()
    }

    fn noise(bytes: usize) -> Bytes {
        let mut random = 7u64;
        let next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as u8
        };
        std::iter::repeat_with(next).take(bytes).collect::<Vec<u8>>().into()
    }

    /// Packs a payload repeatedly on a link of the given speed, and checks whether it is sent packed in the end.
    fn check(payload: &Bytes, compression: Compression, per_megabyte: Duration, packs: bool) {
        let mut packer = Packer::new(compression);
        packer.measured(per_megabyte.as_nanos() as f64 / 1e6);
        for _ in 0..8 {
            let (codec, wire) = packer.pack(payload);
            assert_eq!(codec != Codec::Plain, packs, "{per_megabyte:?}");
            let unpacked = unpack(codec, wire.to_vec(), payload.len()).unwrap();
            assert!(unpacked == payload);
        }
    }

    #[test]
    fn packing_pays_on_a_slow_link_and_not_on_a_fast_one() {
        check(&text(1 << 20), Compression::Measured, Duration::from_secs(1), true);
        check(&text(1 << 20), Compression::Measured, Duration::from_nanos(1), false);
        check(&text(1 << 20), Compression::Off, Duration::from_secs(1), false);
    }

    #[test]
    fn what_does_not_pack_and_what_is_short_is_sent_as_it_is() {
        check(&noise(1 << 20), Compression::Measured, Duration::from_secs(1), false);
        check(&text(1 << 10), Compression::Measured, Duration::from_secs(1), false);
    }

    #[test]
    fn wrong_lengths_are_found() {
        let text = text(10_000);
        let packed = [
            (Codec::Lz4, lz4_flex::block::compress(&text)),
            (Codec::Zstd, zstd::bulk::compress(&text, -1).unwrap()),
            (Codec::Plain, text.to_vec()),
        ];
        for (codec, wire) in packed {
            for length in [0, 9_999, 10_001] {
                assert!(unpack(codec, wire.clone(), length).is_err(), "{codec:?} {length}");
            }
            assert!(unpack(codec, wire[..20].to_vec(), 10_000).is_err(), "{codec:?}");
            assert_eq!(unpack(codec, wire, 10_000), Ok(text.clone()));
        }
    }
}
