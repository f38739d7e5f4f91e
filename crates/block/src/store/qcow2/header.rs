//! The header of a qcow2 image: parsed from untrusted bytes, and checked before use.
//!
//! ```text
//!   0        72            104         header length      backing name's offset        end of the first cluster
//!   ├── v2 ───┼── v3 only ──┼── unknown ──┼── extensions ──────┼── backing name ─────────────┤
//! ```
//!
//! There is no I/O here. A header is refused if imago does not support it, would damage the image, or
//! would need unbounded memory.

/// Bytes of the largest header: a cluster of 2 MiB holds it, but names and extensions need far less.
pub const HEADER_MAX: usize = 64 << 10;

pub(super) const MAGIC: [u8; 4] = [0x51, 0x46, 0x49, 0xfb];
pub(super) const SIZE: std::ops::Range<usize> = 24..32;
pub(super) const L1_ENTRIES: std::ops::Range<usize> = 36..40;
pub(super) const L1_OFFSET: std::ops::Range<usize> = 40..48;
const V2_LENGTH: usize = 72;
/// Bytes of a version 3 header without extensions of later versions.
pub(super) const V3_LENGTH: usize = 104;

/// Cluster sizes as powers of two: the format's minimum, and the largest that QEMU opens.
pub(super) const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Largest first-level table that QEMU opens, in bytes; all of it is held in memory.
pub(super) const L1_BYTES_MAX: u64 = 32 << 20;
/// Largest refcount table that QEMU opens, in bytes; all of it is held in memory.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
pub(super) const BACKING_NAME_MAX: usize = 1023;
/// QEMU counts disks in sectors; bytes beyond the last whole one are invisible.
pub(super) const SECTOR: u64 = 512;
const REFCOUNT_ORDER_MAX: u32 = 6;

pub(super) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
/// Header extension with the name of the file that holds the disk's bytes.
const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// Header extension with the places of persistent dirty bitmaps.
const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// The reason why a header is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file does not begin as a qcow2 image.
    #[error("it is no qcow2 image")]
    NotQcow2,
    /// The file ends within the header.
    #[error("the file ends within the header")]
    Truncated,
    /// The version is not supported.
    #[error("it is of version {version}; 2 and 3 are known")]
    Version {
        /// The version in the header.
        version: u32,
    },
    /// The image needs a feature that is not supported.
    #[error("it uses {feature}; {advice}")]
    Unsupported {
        /// The feature that is needed.
        feature: &'static str,
        /// The user's options.
        advice: &'static str,
    },
    /// A field has an impossible value.
    #[error("its {field} is {value}, which cannot be")]
    Field {
        /// The name of the field.
        field: &'static str,
        /// The value of the field.
        value: u64,
    },
    /// A table lies outside of the file.
    #[error("its {table} lies beyond the end of the file")]
    Outside {
        /// The name of the table.
        table: &'static str,
    },
    /// A table is larger than any image needs.
    #[error("its {table} has {bytes} bytes, and {bytes_max} is the most")]
    TooLarge {
        /// The name of the table.
        table: &'static str,
        /// Its size in bytes.
        bytes: u64,
        /// The largest size that is accepted.
        bytes_max: u64,
    },
    /// The first refcount block is missing: the header's own cluster would be reused.
    #[error("its refcount table counts not even the header; run `qemu-img check -r all` on it first")]
    Uncounted,
    /// The name of the backing file cannot be read.
    #[error("the name of its backing file is damaged")]
    BackingName,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) cluster_bits: u32,
    /// Size of the disk in bytes, in whole sectors.
    pub(super) size: u64,
    pub(super) l1: Table,
    pub(super) refcounts: Table,
    pub(super) snapshots: u32,
    pub(super) has_bitmaps: bool,
    /// The backing file; `None`: unallocated clusters are zero.
    pub(super) backing: Option<BackingName>,
}

/// The files that an image names as those below it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FilesBelow {
    /// Its backing file, as written.
    pub backing: Option<Vec<u8>>,
    /// The backing file's format, if the image names one.
    pub backing_format: Option<String>,
    /// The raw file that holds its disk's bytes, as written.
    pub data_file: Option<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Table {
    /// First byte in the file.
    pub(super) offset: u64,
    pub(super) entries: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BackingName {
    /// As written: relative to the image's folder, or absolute.
    pub(super) name: String,
    /// `raw`, `qcow2` or another; `None` if the image does not say.
    pub(super) format: Option<String>,
}

impl Table {
    pub(super) fn bytes(&self) -> u64 {
        self.entries * 8
    }
}

impl Header {
    /// Parses a header from the first bytes of a file of `file_length` bytes: at most [`HEADER_MAX`], all if it is shorter.
    pub(super) fn parse(bytes: &[u8], file_length: u64) -> Result<Self, HeaderError> {
        let fields = Fields { bytes };
        if bytes.get(..4) != Some(&MAGIC) {
            return Err(HeaderError::NotQcow2);
        }
        let version = fields.u32(4)?;
        if !matches!(version, 2 | 3) {
            return Err(HeaderError::Version { version });
        }
        let cluster_bits = fields.u32(20)?;
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(field("cluster size as a power of two", cluster_bits.into()));
        }
        check_encryption(fields.u32(32)?)?;
        // All of a header lies in the first cluster.
        let fields = Fields { bytes: bytes.get(..1 << cluster_bits).unwrap_or(bytes) };
        let header_length = match version {
            2 => V2_LENGTH,
            _ => check_version_3(&fields, cluster_bits)?,
        };
        let extensions = Extensions::read(&fields, header_length)?;
        let header = Self {
            version,
            cluster_bits,
            size: fields.u64(24)? / SECTOR * SECTOR,
            l1: Table { offset: fields.u64(40)?, entries: fields.u32(36)?.into() },
            refcounts: Table {
                offset: fields.u64(48)?,
                entries: u64::from(fields.u32(56)?) << (cluster_bits - 3),
            },
            snapshots: fields.u32(60)?,
            has_bitmaps: extensions.has_bitmaps && version == 3 && fields.u64(88)? & 1 != 0,
            backing: backing_name(&fields, cluster_bits, extensions.backing_format)?,
        };
        header.check_tables(file_length)?;
        Ok(header)
    }

    pub(super) fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    pub(super) fn l1_clusters(&self) -> std::ops::Range<u64> {
        self.l1.offset..self.l1.offset + self.l1.bytes().next_multiple_of(self.cluster_size())
    }

    fn check_tables(&self, file_length: u64) -> Result<(), HeaderError> {
        if self.size > i64::MAX as u64 {
            return Err(field("size", self.size));
        }
        if self.l1.entries < l1_entries_for(self.size, self.cluster_bits) {
            return Err(field("number of first-level entries", self.l1.entries));
        }
        let end_of_clusters = file_length.div_ceil(self.cluster_size()).saturating_mul(self.cluster_size());
        let tables = [
            ("first-level table", self.l1, L1_BYTES_MAX),
            ("refcount table", self.refcounts, REFCOUNT_TABLE_BYTES_MAX),
        ];
        for (table, place, bytes_max) in tables {
            if place.bytes() > bytes_max {
                return Err(HeaderError::TooLarge { table, bytes: place.bytes(), bytes_max });
            }
            if !place.offset.is_multiple_of(self.cluster_size()) {
                return Err(field(table, place.offset));
            }
            let end = place.offset.checked_add(place.bytes());
            if end.is_none_or(|end| end > end_of_clusters) {
                return Err(HeaderError::Outside { table });
            }
        }
        if self.refcounts.offset == 0 || self.refcounts.entries == 0 {
            return Err(field("refcount table", self.refcounts.offset));
        }
        if self.l1.offset == 0 && self.l1.entries > 0 {
            return Err(field("first-level table", 0));
        }
        Ok(())
    }
}

impl FilesBelow {
    /// Reads what an image of qcow version 1, 2 or 3 names, from its first bytes: at most [`HEADER_MAX`]. `None`: it does not
    /// begin as such an image.
    ///
    /// Features that Sterna does not support do not matter: QEMU may open what Sterna refuses.
    ///
    /// # Errors
    /// [`HeaderError`]: what it stands on is not known.
    pub fn parse(bytes: &[u8]) -> Result<Option<Self>, HeaderError> {
        if bytes.get(..4) != Some(&MAGIC) {
            return Ok(None);
        }
        let fields = Fields { bytes };
        let version = fields.u32(4)?;
        if version == 1 {
            let backing = backing_bytes(&fields, HEADER_MAX as u64)?.map(<[u8]>::to_owned);
            return Ok(Some(Self { backing, ..Self::default() }));
        }
        if !matches!(version, 2 | 3) {
            return Err(HeaderError::Version { version });
        }
        let cluster_bits = fields.u32(20)?;
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(field("cluster size as a power of two", cluster_bits.into()));
        }
        let fields = Fields { bytes: bytes.get(..1 << cluster_bits).unwrap_or(bytes) };
        let length = match version {
            2 => V2_LENGTH,
            _ => header_length(&fields, cluster_bits)?,
        };
        let extensions = Extensions::read(&fields, length)?;
        Ok(Some(Self {
            backing: backing_bytes(&fields, 1 << cluster_bits)?.map(<[u8]>::to_owned),
            backing_format: extensions.backing_format,
            data_file: extensions.data_file,
        }))
    }
}

pub(super) fn l1_entries_for(size: u64, cluster_bits: u32) -> u64 {
    size.div_ceil(bytes_per_l2(cluster_bits))
}

pub(super) fn bytes_per_l2(cluster_bits: u32) -> u64 {
    1 << (2 * cluster_bits - 3)
}

/// Checks the entries of a table as they are in the file: each is 0 or points to a whole cluster within it. `cluster_end` is the
/// end of the file, rounded up to whole clusters. Fails with [`HeaderError::Field`] or [`HeaderError::Outside`].
pub(super) fn check_entries(
    table: &'static str,
    entries: &[u8],
    cluster_bits: u32,
    cluster_end: u64,
) -> Result<(), HeaderError> {
    /// The bits of an entry that are an offset; 0 to 8 and 56 to 63 are flags or reserved.
    const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
    for entry in entries.chunks_exact(8) {
        let offset = u64::from_be_bytes(entry.try_into().unwrap_or_default()) & OFFSET;
        if !offset.is_multiple_of(1 << cluster_bits) {
            return Err(field(table, offset));
        }
        if offset >= cluster_end {
            return Err(HeaderError::Outside { table });
        }
    }
    Ok(())
}

fn field(field: &'static str, value: u64) -> HeaderError {
    HeaderError::Field { field, value }
}

fn check_encryption(method: u32) -> Result<(), HeaderError> {
    if method == 0 {
        return Ok(());
    }
    let advice = "decrypt it with `qemu-img convert` first";
    Err(HeaderError::Unsupported { feature: "encryption", advice })
}

/// Checks the fields of version 3; returns the header's length.
fn check_version_3(fields: &Fields<'_>, cluster_bits: u32) -> Result<usize, HeaderError> {
    check_features(fields.u64(72)?)?;
    let order = fields.u32(96)?;
    if order > REFCOUNT_ORDER_MAX {
        return Err(field("refcount width as a power of two", order.into()));
    }
    header_length(fields, cluster_bits)
}

/// Reads where the header of version 3 ends.
fn header_length(fields: &Fields<'_>, cluster_bits: u32) -> Result<usize, HeaderError> {
    let length = fields.u32(100)?;
    let is_possible = length as usize >= V3_LENGTH && u64::from(length) <= 1 << cluster_bits;
    if !is_possible || !length.is_multiple_of(8) {
        return Err(field("header length", length.into()));
    }
    Ok(length as usize)
}

fn check_features(features: u64) -> Result<(), HeaderError> {
    const CONVERT: &str = "copy it with `qemu-img convert -O qcow2` first";
    const KNOWN: [(u64, &str, &str); 5] = [
        (1 << 0, "refcounts that were not brought up to date", "run `qemu-img check -r all` on it first"),
        (1 << 1, "a mark that says it is corrupt", "run `qemu-img check -r all` on it first"),
        (1 << 2, "an external data file", CONVERT),
        (1 << 3, "a compression other than zlib", CONVERT),
        (1 << 4, "extended L2 entries", CONVERT),
    ];
    for (bit, feature, advice) in KNOWN {
        if features & bit != 0 {
            return Err(HeaderError::Unsupported { feature, advice });
        }
    }
    match features {
        0 => Ok(()),
        _ => Err(HeaderError::Unsupported { feature: "a feature that is not known", advice: CONVERT }),
    }
}

fn backing_name(
    fields: &Fields<'_>,
    cluster_bits: u32,
    format: Option<String>,
) -> Result<Option<BackingName>, HeaderError> {
    let Some(name) = backing_bytes(fields, 1 << cluster_bits)? else { return Ok(None) };
    let name = std::str::from_utf8(name).map_err(|_| HeaderError::BackingName)?;
    Ok(Some(BackingName { name: name.to_owned(), format }))
}

/// Reads the name of the backing file, which begins at `offset_max` or before it.
fn backing_bytes<'a>(fields: &Fields<'a>, offset_max: u64) -> Result<Option<&'a [u8]>, HeaderError> {
    let (offset, length) = (fields.u64(8)?, fields.u32(16)? as usize);
    if offset == 0 || length == 0 {
        return Ok(None);
    }
    if length > BACKING_NAME_MAX || offset > offset_max {
        return Err(HeaderError::BackingName);
    }
    let start = usize::try_from(offset).map_err(|_| HeaderError::BackingName)?;
    let name = fields.bytes.get(start..start + length).ok_or(HeaderError::BackingName)?;
    if name.contains(&0) { Err(HeaderError::BackingName) } else { Ok(Some(name)) }
}

#[derive(Default)]
struct Extensions {
    backing_format: Option<String>,
    data_file: Option<Vec<u8>>,
    has_bitmaps: bool,
}

impl Extensions {
    /// Reads the extensions; each has a type, a length and that many bytes, padded to eight.
    fn read(fields: &Fields<'_>, start: usize) -> Result<Self, HeaderError> {
        let mut found = Self::default();
        let mut position = start;
        // Version 2 headers of old programs end here.
        while fields.bytes.len() >= position + 8 {
            let (kind, length) = (fields.u32(position)?, fields.u32(position + 4)? as usize);
            if kind == 0 {
                break;
            }
            let from = position + 8;
            let data = from.checked_add(length).and_then(|end| fields.bytes.get(from..end));
            let data = data.ok_or(field("header extension's length", length as u64))?;
            match kind {
                EXTENSION_BACKING_FORMAT => {
                    let format = std::str::from_utf8(data).map_err(|_| HeaderError::BackingName)?;
                    found.backing_format = Some(format.to_owned());
                }
                EXTENSION_DATA_FILE => found.data_file = Some(data.to_owned()),
                EXTENSION_BITMAPS => found.has_bitmaps = true,
                _ => {}
            }
            position = from + length.next_multiple_of(8);
        }
        Ok(found)
    }
}

/// Big-endian numbers in a slice that may be too short.
struct Fields<'a> {
    bytes: &'a [u8],
}

impl Fields<'_> {
    fn u32(&self, offset: usize) -> Result<u32, HeaderError> {
        let bytes = self.bytes.get(offset..offset + 4).ok_or(HeaderError::Truncated)?;
        Ok(bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)))
    }

    fn u64(&self, offset: usize) -> Result<u64, HeaderError> {
        Ok(u64::from(self.u32(offset)?) << 32 | u64::from(self.u32(offset + 4)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::qcow2::create::{BackingFile, CLUSTER_SIZE, Qcow2Options, write_new};
    use crate::store::qcow2::probe::Format;

    fn new_image() -> (Vec<u8>, u64) {
        let backing = Some(BackingFile { path: "below/base.raw".to_owned(), format: Format::Raw });
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = Qcow2Options { cluster_size: CLUSTER_SIZE, backing };
        let length = write_new(file.as_file(), 1 << 30, &options).unwrap();
        let mut bytes = std::fs::read(file.path()).unwrap();
        bytes.truncate(HEADER_MAX);
        (bytes, length)
    }

    #[test]
    fn what_is_written_is_read_back() {
        let (bytes, length) = new_image();
        let header = Header::parse(&bytes, length).unwrap();
        assert_eq!((header.version, header.cluster_size(), header.size), (3, CLUSTER_SIZE, 1 << 30));
        assert_eq!(header.l1.entries, 2);
        let backing = header.backing.unwrap();
        assert_eq!((backing.name.as_str(), backing.format.as_deref()), ("below/base.raw", Some("raw")));
        let end = backing.name.len() + bytes.windows(5).position(|part| part == b"below").unwrap();
        for cut in 0..end {
            assert!(Header::parse(&bytes[..cut], length).is_err(), "{cut} bytes");
        }
    }

    proptest! {
        #[test]
        fn whatever_the_bytes_are_the_tables_are_within_their_limits(
            changes in prop::collection::vec((0_usize..256, any::<u8>()), 0..8),
            length in prop_oneof![Just(1_u64 << 18), any::<u64>()],
        ) {
            let (mut bytes, _) = new_image();
            for (place, value) in changes {
                bytes[place] = value;
            }
            if let Ok(header) = Header::parse(&bytes, length) {
                prop_assert!(header.l1.bytes() <= L1_BYTES_MAX);
                prop_assert!(header.refcounts.bytes() <= REFCOUNT_TABLE_BYTES_MAX);
                prop_assert!(header.l1.offset + header.l1.bytes() <= length.next_multiple_of(header.cluster_size()));
                prop_assert!(header.size / bytes_per_l2(header.cluster_bits) <= header.l1.entries);
            }
        }
    }
}
