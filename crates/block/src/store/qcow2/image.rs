//! A qcow2 image and the chain of its backing files: found, checked and locked before a lane serves them.
//!
//! ```text
//!   Qcow2Image::open / create     on a control thread; may sleep
//!        │      top.qcow2         locked exclusively if it is written
//!        │        └─► middle.qcow2   ┐ locked for reading: several images may share them, no process may change them
//!        │              └─► base.raw ┘
//!        ▼
//!   Qcow2Store::open              on the lane's thread; does not block it
//! ```

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::create::{Qcow2Options, write_new};
use super::header::{self, HEADER_MAX, Header, HeaderError};
use super::probe::{Format, probe_held};
use crate::held::{ByName, Finder, Held};
use crate::store::image::{Access, Image, ImageError, Kind, Patience};
use crate::store::lock::Holder;

/// The limit of images in a chain, with the top. Each costs a table in memory, an open file, and a look-up in reads that
/// no image above satisfies.
pub const CHAIN_MAX: usize = 64;

/// The limit of memory for a chain's tables, in bytes: enough for several disks of many TiB, and far below what a damaged or
/// hostile image could demand.
pub(super) const TABLE_MEMORY_MAX: u64 = 1 << 30;

const L2_TABLES_CACHED: u64 = 128;
const REFCOUNT_BLOCKS_CACHED: u64 = 32;

const TABLE_PIECE: usize = 64 << 10;

/// The reason why a qcow2 image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Qcow2Error {
    /// Its file, or a file of its chain, cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Its header or its tables are refused.
    #[error("{path} cannot be served: {reason}")]
    Header {
        /// The path of the image.
        path: PathBuf,
        /// The fault of the header.
        reason: HeaderError,
    },
    /// It names a backing file that cannot be used.
    #[error("the backing file {backing} of {path} cannot be used")]
    Backing {
        /// The path of the image.
        path: PathBuf,
        /// Its backing file, as far as it is known.
        backing: PathBuf,
        /// Why the backing file cannot be used.
        source: Box<Qcow2Error>,
    },
    /// It names its backing file in a syntax of QEMU only.
    #[error("{path} stands on \"{name}\", which is no path of a file; `qemu-img rebase -u` can name one")]
    BackingIsNoFile {
        /// The path of the image.
        path: PathBuf,
        /// The name in the image.
        name: String,
    },
    /// Its backing file has a format that cannot be read.
    #[error(
        "{path} stands on an image of format {format}; convert that to qcow2 or raw with `qemu-img convert`"
    )]
    BackingFormat {
        /// The path of the image.
        path: PathBuf,
        /// The format of the backing file.
        format: String,
    },
    /// An image is in its own chain.
    #[error("{path} is in its own chain of backing files")]
    Loop {
        /// The path of the image.
        path: PathBuf,
    },
    /// The chain is too long.
    #[error(
        "the chain of {path} has more than {CHAIN_MAX} images; shorten it with `qemu-img commit` or `rebase`"
    )]
    TooDeep {
        /// The top of the chain.
        path: PathBuf,
    },
    /// The tables of the chain need too much memory.
    #[error("the tables of {path} need {bytes} bytes of memory, and {TABLE_MEMORY_MAX} is the most")]
    TooMuchMemory {
        /// The top of the chain.
        path: PathBuf,
        /// The memory that they need, in bytes.
        bytes: u64,
    },
    /// No image can be made with these options.
    #[error("no qcow2 image can have {what} {value}; {advice}")]
    Options {
        /// The name of the option.
        what: &'static str,
        /// The value of the option.
        value: u64,
        /// The values that are possible.
        advice: &'static str,
    },
}

/// A qcow2 image that is open, checked and locked, with its chain.
pub struct Qcow2Image {
    pub(super) top: Image,
    pub(super) header: Header,
    /// The images from below the top down to the base.
    pub(super) backing: Vec<Layer>,
    /// Bytes of the disk that are used: all, unless it was [narrowed](Qcow2Image::narrowed_to).
    used: u64,
}

pub(super) struct Layer {
    pub(super) image: Image,
    pub(super) header: Option<Header>,
}

impl Qcow2Image {
    /// Makes a new image of `size` zero bytes, or with the content of a backing file, open for writing and locked.
    /// No cluster is allocated.
    ///
    /// On return its name, size and tables survive a power cut. On failure no file is left behind. A backing file is opened and
    /// checked as by [`Qcow2Image::open`].
    ///
    /// # Errors
    /// [`Qcow2Error::Options`] for a size that is no multiple of 512 bytes, or an invalid cluster size;
    /// [`Qcow2Error::Backing`], or those of [`Image::create`].
    pub fn create(path: &Path, size: u64, options: &Qcow2Options) -> Result<Self, Qcow2Error> {
        Self::create_found(path, size, options, &ByName)
    }

    /// Makes an image like [`Qcow2Image::create`], if `finder` permits its backing file.
    ///
    /// # Errors
    /// Those of [`Qcow2Image::create`] and of `finder`.
    pub fn create_found(
        path: &Path,
        size: u64,
        options: &Qcow2Options,
        finder: &dyn Finder,
    ) -> Result<Self, Qcow2Error> {
        options.check(path, size)?;
        let top = Image::create(path, 0)?;
        Self::create_in(top, size, options, finder).inspect_err(|_| {
            // A half-made image is removed; if even that fails, the first error is returned.
            let _ = std::fs::remove_file(path);
        })
    }

    fn create_in(
        mut top: Image,
        size: u64,
        options: &Qcow2Options,
        finder: &dyn Finder,
    ) -> Result<Self, Qcow2Error> {
        let path = top.path().to_owned();
        let file = plain(&top)?;
        let fail = |error| ImageError::of("write the tables of", &path, error);
        top.forget_tail(write_new(&file, size, options).map_err(fail)?);
        Self::examine(top, finder)
    }

    /// Opens, checks and locks an image and its chain.
    ///
    /// # Errors
    /// [`Qcow2Error`]; in it [`ImageError::Locked`] at once if another process, for example QEMU, uses a file of the chain
    /// in a conflicting way.
    pub fn open(path: &Path, access: Access) -> Result<Self, Qcow2Error> {
        Self::open_waiting(path, access, |_| Patience::GiveUp)
    }

    /// Opens an image, waiting while another process holds its top; as [`Image::open_waiting`].
    pub fn open_waiting(
        path: &Path,
        access: Access,
        on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, Qcow2Error> {
        Self::open_found(path, access, &ByName, on_held)
    }

    /// Opens an image like [`Qcow2Image::open_waiting`], if `finder` permits its files.
    ///
    /// # Errors
    /// Those of [`Qcow2Image::open`] and of `finder`.
    pub fn open_found(
        path: &Path,
        access: Access,
        finder: &dyn Finder,
        on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, Qcow2Error> {
        Self::examine(Image::open_found(path, access, finder, on_held)?, finder)
    }

    /// Returns the path of its top.
    pub fn path(&self) -> &Path {
        self.top.path()
    }

    /// Returns the size of the disk in bytes, or what it was narrowed to.
    pub fn size(&self) -> u64 {
        self.used
    }

    /// Uses the first `size` bytes of the disk only: an interrupted growth may have made it larger than its volume.
    ///
    /// # Errors
    /// [`ImageError::TooSmall`]. It is then closed.
    pub fn narrowed_to(mut self, size: u64) -> Result<Self, Qcow2Error> {
        if self.header.size < size {
            let path = self.path().to_owned();
            return Err(ImageError::TooSmall { path, size: self.header.size, needed: size }.into());
        }
        self.used = size;
        Ok(self)
    }

    /// Returns the use that it was opened for.
    pub fn access(&self) -> Access {
        self.top.access()
    }

    /// Returns the bytes of a cluster: the unit of allocating, discarding and copying.
    pub fn cluster_size(&self) -> u64 {
        self.header.cluster_size()
    }

    /// Returns the held file of its top, even if its name changes.
    pub fn held(&self) -> &Arc<Held> {
        self.top.held()
    }

    /// Returns its backing files, from below the top down to the base.
    pub fn backing_files(&self) -> impl Iterator<Item = &Path> {
        self.backing.iter().map(|layer| layer.image.path())
    }

    /// Returns whether it has a backing file.
    pub fn has_backing(&self) -> bool {
        !self.backing.is_empty()
    }

    /// Returns whether writing invalidates persistent dirty bitmaps of backup programs: their next backup is a full one.
    pub fn loses_bitmaps(&self) -> bool {
        self.header.has_bitmaps && self.access() == Access::ReadWrite
    }

    fn examine(mut top: Image, finder: &dyn Finder) -> Result<Self, Qcow2Error> {
        let header = read_header(&mut top)?;
        let used = header.size;
        let mut image = Self { top, header, backing: Vec::new(), used };
        image.open_backing(finder)?;
        let bytes = image.table_memory();
        if bytes > TABLE_MEMORY_MAX {
            return Err(Qcow2Error::TooMuchMemory { path: image.path().to_owned(), bytes });
        }
        if image.loses_bitmaps() {
            let path = image.path().display();
            tracing::warn!(%path, "its persistent dirty bitmaps are lost: the next backup is a full one");
        }
        Ok(image)
    }

    fn open_backing(&mut self, finder: &dyn Finder) -> Result<(), Qcow2Error> {
        let mut seen = vec![identity(&self.top)?];
        let mut path = self.path().to_owned();
        let mut header = Some(self.header.clone());
        let mut above = Arc::clone(self.top.held());
        while let Some(name) = header.take().and_then(|header| header.backing) {
            if seen.len() >= CHAIN_MAX {
                return Err(Qcow2Error::TooDeep { path: self.path().to_owned() });
            }
            let backing = resolve(&path, &name.name)?;
            let named = Named { above: &above, path: &backing, format: name.format.as_deref() };
            let layer =
                open_layer(&path, &named, &seen, finder).map_err(|error| error.below(&path, &backing))?;
            seen.push(identity(&layer.image)?);
            header = layer.header.clone();
            above = Arc::clone(layer.image.held());
            path = backing;
            self.backing.push(layer);
        }
        Ok(())
    }

    fn table_memory(&self) -> u64 {
        let headers = self.backing.iter().filter_map(|layer| layer.header.as_ref());
        let of_image = |header: &Header| {
            let l2 = header.l1.entries.min(L2_TABLES_CACHED) * header.cluster_size();
            header.l1.bytes() + l2
        };
        let refcounts = match self.access() {
            Access::ReadOnly => 0,
            Access::ReadWrite => {
                let blocks = self.header.refcounts.entries.min(REFCOUNT_BLOCKS_CACHED);
                self.header.refcounts.bytes() + blocks * self.header.cluster_size()
            }
        };
        refcounts + of_image(&self.header) + headers.map(of_image).sum::<u64>()
    }
}

impl Qcow2Error {
    /// Returns the same failure as seen from the image above, unless it concerns the chain as a whole.
    fn below(self, path: &Path, backing: &Path) -> Self {
        match self {
            Self::Loop { .. } | Self::BackingFormat { .. } => self,
            other => {
                let (path, backing) = (path.to_owned(), backing.to_owned());
                Self::Backing { path, backing, source: Box::new(other) }
            }
        }
    }
}

struct Named<'a> {
    above: &'a Held,
    path: &'a Path,
    format: Option<&'a str>,
}

fn open_layer(
    above: &Path,
    named: &Named<'_>,
    seen: &[(u64, u64)],
    finder: &dyn Finder,
) -> Result<Layer, Qcow2Error> {
    let (path, format) = (named.path, named.format);
    let found = finder.find(path, Some(named.above));
    let found = found.map_err(|error| ImageError::of("find", path, error))?;
    // Checked before it is locked: a file already in the chain would seem to be held by another process.
    if seen.contains(&(found.identity().device, found.identity().inode)) {
        return Err(Qcow2Error::Loop { path: path.to_owned() });
    }
    let format = match format {
        Some("raw" | "file") => Format::Raw,
        Some("qcow2") => Format::Qcow2,
        Some(other) => Format::Other(other.to_owned()),
        None => {
            let format = probe_held(&found)?;
            tracing::warn!(path = %above.display(), backing = %path.display(), ?format,
                "the format of the backing file is not recorded, and was guessed");
            format
        }
    };
    if let Format::Other(format) = format {
        return Err(Qcow2Error::BackingFormat { path: above.to_owned(), format });
    }
    let mut image = Image::try_open(path, Access::ReadOnly, finder, Some(named.above))?;
    let header = match format {
        Format::Qcow2 => Some(read_header(&mut image)?),
        _ => None,
    };
    Ok(Layer { image, header })
}

/// Finds a backing file as QEMU does: relative to the folder of the image that names it.
pub(super) fn resolve(image: &Path, name: &str) -> Result<PathBuf, Qcow2Error> {
    let no_file = || Qcow2Error::BackingIsNoFile { path: image.to_owned(), name: name.to_owned() };
    let name_of_file = name.strip_prefix("file:").unwrap_or(name);
    // A colon before the first slash ends the name of a protocol, for example "json:".
    let first_part = name_of_file.split('/').next().unwrap_or_default();
    if first_part.contains(':') || name_of_file.is_empty() {
        return Err(no_file());
    }
    let folder = image.parent().unwrap_or(Path::new(""));
    Ok(folder.join(name_of_file))
}

/// Reads and checks the header of a locked image and its top-level tables. Lengthens a writable image to direct I/O's alignment.
fn read_header(image: &mut Image) -> Result<Header, Qcow2Error> {
    let path = image.path().to_owned();
    let fail = |operation: &'static str| {
        let path = path.clone();
        move |error| Qcow2Error::from(ImageError::of(operation, &path, error))
    };
    let refuse = |reason| Qcow2Error::Header { path: path.clone(), reason };
    let file = plain(image)?;
    let length = image.size();
    let mut bytes = vec![0; HEADER_MAX.min(usize::try_from(length).unwrap_or(HEADER_MAX))];
    file.read_exact_at(&mut bytes, 0).map_err(fail("read the header of"))?;
    let header = Header::parse(&bytes, length).map_err(refuse)?;
    let cluster_end = length.div_ceil(header.cluster_size()) * header.cluster_size();
    for (name, table) in [("first-level table", header.l1), ("refcount table", header.refcounts)] {
        let mut position = table.offset;
        let end = table.offset + table.bytes();
        while position < end {
            // A table may reach into the last cluster beyond the end of the file, where it is zero.
            let wanted = TABLE_PIECE.min((end - position) as usize);
            let mut piece = vec![0; wanted.min(length.saturating_sub(position) as usize)];
            file.read_exact_at(&mut piece, position).map_err(fail("read the tables of"))?;
            header::check_entries(name, &piece, header.cluster_bits, cluster_end).map_err(refuse)?;
            let is_first = position == header.refcounts.offset;
            if is_first && piece.get(..8).is_none_or(|entry| entry.iter().all(|byte| *byte == 0)) {
                return Err(refuse(HeaderError::Uncounted));
            }
            position += wanted as u64;
        }
    }
    if u64::from(image.io_alignment()) >= header.cluster_size() {
        // Clusters smaller than the blocks of direct I/O could not be written one by one. With clusters as large as blocks, an
        // entry of the first-level table could not be distinguished from another table.
        image.go_buffered().map_err(fail("turn direct I/O off for"))?;
    }
    if image.access() == Access::ReadWrite {
        let whole = length.next_multiple_of(image.io_alignment().into());
        if whole != length && image.kind() == Kind::File {
            file.set_len(whole).map_err(fail("lengthen"))?;
        }
        image.forget_tail(whole);
    }
    Ok(header)
}

fn plain(image: &Image) -> Result<std::fs::File, Qcow2Error> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(image.access() == Access::ReadWrite);
    // By descriptor, because the name may belong to another file by now.
    let opened = options.open(format!("/proc/self/fd/{}", image.file().as_raw_fd()));
    opened.map_err(|error| ImageError::of("open", image.path(), error).into())
}

fn identity(image: &Image) -> Result<(u64, u64), Qcow2Error> {
    let stat = rustix::fs::fstat(image.file())
        .map_err(|errno| ImageError::of("examine", image.path(), errno.into()))?;
    Ok((stat.st_dev, stat.st_ino))
}
