//! New qcow2 images: their options, and the tables of an empty one.
//!
//! ```text
//!   cluster 0      1 …             …                …
//!   ├── header ────┼─ refcount ────┼─ refcount ─────┼─ first-level table ─┤
//!        backing name   table           blocks            all zero
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::header::{
    BACKING_NAME_MAX, CLUSTER_BITS, EXTENSION_BACKING_FORMAT, L1_BYTES_MAX, MAGIC, SECTOR, V3_LENGTH,
    l1_entries_for,
};
use super::image::Qcow2Error;
use super::probe::Format;

/// Cluster size of most images, in bytes.
pub const CLUSTER_SIZE: u64 = 64 << 10;

/// Bits of a refcount, as a power of two: 16, the default of all programs.
const REFCOUNT_ORDER: u32 = 4;
const BYTES_PER_REFCOUNT: u64 = 2;
const REFCOUNT_ONE: [u8; 2] = [0, 1];

/// The options of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Options {
    /// Bytes of a cluster: a power of two from 512 bytes to 2 MiB; mostly [`CLUSTER_SIZE`].
    pub cluster_size: u64,
    /// Its backing file; `None`: it is all zero.
    pub backing: Option<BackingFile>,
}

/// The backing file of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFile {
    /// Its path as it is written into the image: absolute, or relative to the image's folder.
    pub path: String,
    /// Its format; only [`Format::Raw`] and [`Format::Qcow2`] can be read.
    pub format: Format,
}

impl Qcow2Options {
    pub(super) fn check(&self, path: &Path, size: u64) -> Result<(), Qcow2Error> {
        let refuse = |what, value, advice| Err(Qcow2Error::Options { what, value, advice });
        let bits = self.cluster_size.trailing_zeros();
        if !self.cluster_size.is_power_of_two() || !CLUSTER_BITS.contains(&bits) {
            let advice = "take a power of two from 512 to 2097152";
            return refuse("clusters of bytes", self.cluster_size, advice);
        }
        if !size.is_multiple_of(SECTOR) || size > i64::MAX as u64 {
            return refuse("a size in bytes of", size, "take a multiple of 512 below 8 EiB");
        }
        if l1_entries_for(size, bits) * 8 > L1_BYTES_MAX {
            return refuse("with these clusters a size in bytes of", size, "take larger clusters");
        }
        let Some(backing) = &self.backing else { return Ok(()) };
        if let Format::Other(format) = &backing.format {
            return Err(Qcow2Error::BackingFormat { path: path.to_owned(), format: format.clone() });
        }
        let length = backing.path.len();
        let room = self.cluster_size.saturating_sub(V3_LENGTH as u64 + 32);
        if length == 0 || length > BACKING_NAME_MAX || length as u64 > room {
            return refuse("a name of a backing file with bytes", length as u64, "take a shorter path");
        }
        Ok(())
    }
}

/// Durably writes the tables of an empty image into an empty file; returns its length in bytes. The options are already checked.
pub(super) fn write_new(file: &File, size: u64, options: &Qcow2Options) -> io::Result<u64> {
    let layout = Layout::of(size, options.cluster_size);
    let cluster = options.cluster_size;
    file.write_all_at(&header(size, options, &layout), 0)?;
    let blocks = (0..layout.blocks).map(|block| ((layout.blocks_at() + block) * cluster).to_be_bytes());
    file.write_all_at(&blocks.flatten().collect::<Vec<u8>>(), cluster)?;
    // Refcount blocks are adjacent, so that all refcounts are one run.
    let refcounts = REFCOUNT_ONE.repeat(layout.clusters() as usize);
    file.write_all_at(&refcounts, layout.blocks_at() * cluster)?;
    let length = layout.clusters() * cluster;
    file.set_len(length)?;
    file.sync_all()?;
    Ok(length)
}

struct Layout {
    /// Clusters of the refcount table, behind the header.
    table: u64,
    /// Clusters of refcount blocks, behind the refcount table.
    blocks: u64,
    /// Clusters of the first-level table, behind the refcount blocks.
    l1: u64,
}

impl Layout {
    fn of(size: u64, cluster_size: u64) -> Self {
        let l1_bytes = l1_entries_for(size, cluster_size.trailing_zeros()) * 8;
        // An empty table has a place as well: some programs require it.
        let l1 = l1_bytes.div_ceil(cluster_size).max(1);
        let mut layout = Self { table: 1, blocks: 1, l1 };
        // The refcounts count their own clusters. They grow by much less than they count, so this ends.
        loop {
            let blocks = (layout.clusters() * BYTES_PER_REFCOUNT).div_ceil(cluster_size);
            let table = (blocks * 8).div_ceil(cluster_size);
            if (blocks, table) == (layout.blocks, layout.table) {
                return layout;
            }
            (layout.blocks, layout.table) = (blocks, table);
        }
    }

    fn clusters(&self) -> u64 {
        1 + self.table + self.blocks + self.l1
    }

    fn blocks_at(&self) -> u64 {
        1 + self.table
    }

    fn l1_at(&self) -> u64 {
        self.blocks_at() + self.blocks
    }
}

fn header(size: u64, options: &Qcow2Options, layout: &Layout) -> Vec<u8> {
    let cluster = options.cluster_size;
    let bits = cluster.trailing_zeros();
    let extensions = options.backing.as_ref().map(|backing| extension(&backing.format)).unwrap_or_default();
    let name = options.backing.as_ref().map_or("", |backing| &backing.path);
    // Behind the extensions and the eight zero bytes that end them.
    let name_at = if name.is_empty() { 0 } else { (V3_LENGTH + extensions.len() + 8) as u64 };
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(3_u32.to_be_bytes());
    bytes.extend(name_at.to_be_bytes());
    bytes.extend((name.len() as u32).to_be_bytes());
    bytes.extend(bits.to_be_bytes());
    bytes.extend(size.to_be_bytes());
    bytes.extend(0_u32.to_be_bytes());
    bytes.extend((l1_entries_for(size, bits) as u32).to_be_bytes());
    bytes.extend((layout.l1_at() * cluster).to_be_bytes());
    bytes.extend(cluster.to_be_bytes());
    bytes.extend((layout.table as u32).to_be_bytes());
    // No snapshots (number and offset), then three empty sets of features.
    bytes.extend([0; 4 + 8 + 3 * 8]);
    bytes.extend(REFCOUNT_ORDER.to_be_bytes());
    bytes.extend((V3_LENGTH as u32).to_be_bytes());
    bytes.extend(extensions);
    bytes.extend([0; 8]);
    bytes.extend(name.bytes());
    bytes
}

fn extension(format: &Format) -> Vec<u8> {
    let name = if *format == Format::Qcow2 { "qcow2" } else { "raw" };
    let mut bytes = Vec::new();
    bytes.extend(EXTENSION_BACKING_FORMAT.to_be_bytes());
    bytes.extend((name.len() as u32).to_be_bytes());
    bytes.extend(name.bytes());
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}
