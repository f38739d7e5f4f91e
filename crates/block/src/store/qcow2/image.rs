//! A qcow2 image and the chain of its backing files: found, checked and locked before a lane serves them.
//!
//! ```text
//!   Qcow2Image::open / create     on a control thread; may sleep
//!        │      top.qcow2         locked for itself if it is written
//!        │        └─► middle.qcow2   ┐ locked as readers do: several images may stand on them, nobody may change them
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

/// Images in a chain, the top included. Each costs a table in memory, an open file, and a look-up in every read of
/// what is not above it.
pub const CHAIN_MAX: usize = 64;

/// Memory for tables that a chain may need, in bytes: several disks of many TiB, and far from what a damaged or
/// hostile image could ask for.
pub(super) const TABLE_MEMORY_MAX: u64 = 1 << 30;

/// Second-level tables that the driver below keeps of each image.
const L2_TABLES_CACHED: u64 = 128;
/// Refcount blocks that the driver below keeps of the image that is written.
const REFCOUNT_BLOCKS_CACHED: u64 = 32;

/// Bytes of a table that are checked at a time.
const TABLE_PIECE: usize = 64 << 10;

/// Why a qcow2 image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Qcow2Error {
    /// Its file, or one of its chain, cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Its header or its tables are refused.
    #[error("{path} cannot be served: {reason}")]
    Header {
        /// The image.
        path: PathBuf,
        /// What is wrong with it.
        reason: HeaderError,
    },
    /// It names a backing file that cannot be used.
    #[error("{path} stands on {backing}, which cannot be used")]
    Backing {
        /// The image.
        path: PathBuf,
        /// Its backing file, as far as it is known.
        backing: PathBuf,
        /// Why not.
        source: Box<Qcow2Error>,
    },
    /// Its backing file is named in a way that only QEMU understands.
    #[error("{path} stands on \"{name}\", which is no path of a file; `qemu-img rebase -u` can name one")]
    BackingIsNoFile {
        /// The image.
        path: PathBuf,
        /// What it says.
        name: String,
    },
    /// Its backing file has a format that cannot be read.
    #[error(
        "{path} stands on an image of format {format}; convert that to qcow2 or raw with `qemu-img convert`"
    )]
    BackingFormat {
        /// The image.
        path: PathBuf,
        /// What the backing file is.
        format: String,
    },
    /// An image stands on itself.
    #[error("{path} is in its own chain of backing files")]
    Loop {
        /// The image.
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
        /// What they need.
        bytes: u64,
    },
    /// No image can be made like this.
    #[error("no qcow2 image can have {what} {value}; {advice}")]
    Options {
        /// What of the options.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What would be possible.
        advice: &'static str,
    },
}

/// A qcow2 image that is open, checked and locked, with its chain.
pub struct Qcow2Image {
    pub(super) top: Image,
    pub(super) header: Header,
    /// From the one below the top down to the base.
    pub(super) backing: Vec<Layer>,
    /// Bytes of the disk that are used: all, unless [`Qcow2Image::narrowed_to`] said less.
    used: u64,
}

/// An image below the top.
pub(super) struct Layer {
    pub(super) image: Image,
    /// `None` for a raw one.
    pub(super) header: Option<Header>,
}

impl Qcow2Image {
    /// Makes a new image of `size` zero bytes, or with the content of a backing file, open for writing and locked.
    ///
    /// Nothing of the disk is allocated. Its name, size and tables survive a power cut when this returns. If it
    /// fails, there is no file left behind. A backing file is opened and checked as by [`Qcow2Image::open`].
    ///
    /// # Errors
    /// [`Qcow2Error::Options`] for a size that is no multiple of 512 bytes or a cluster size that is none;
    /// [`Qcow2Error::Backing`], or those of [`Image::create`].
    pub fn create(path: &Path, size: u64, options: &Qcow2Options) -> Result<Self, Qcow2Error> {
        Self::create_found(path, size, options, &ByName)
    }

    /// As [`Qcow2Image::create`], if `finder` says that what it is to stand on may be opened.
    ///
    /// # Errors
    /// As there; what `finder` says.
    pub fn create_found(
        path: &Path,
        size: u64,
        options: &Qcow2Options,
        finder: &dyn Finder,
    ) -> Result<Self, Qcow2Error> {
        options.check(path, size)?;
        let top = Image::create(path, 0)?;
        Self::create_in(top, size, options, finder).inspect_err(|_| {
            // What could not be made is not left half-made; if even that fails, the first error says why.
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
    /// [`Qcow2Error`]; [`ImageError::Locked`] in it at once if another process, also QEMU, uses a file of the chain
    /// in a way that does not go together.
    pub fn open(path: &Path, access: Access) -> Result<Self, Qcow2Error> {
        Self::open_waiting(path, access, |_| Patience::GiveUp)
    }

    /// Opens an image, waiting while another process holds its top; as [`Image::open_waiting`].
    ///
    /// # Errors
    /// Those of [`Qcow2Image::open`].
    pub fn open_waiting(
        path: &Path,
        access: Access,
        on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, Qcow2Error> {
        Self::open_found(path, access, &ByName, on_held)
    }

    /// As [`Qcow2Image::open_waiting`], if `finder` says that the top and what it stands on may be opened.
    ///
    /// # Errors
    /// Those of [`Qcow2Image::open`]; what `finder` says.
    pub fn open_found(
        path: &Path,
        access: Access,
        finder: &dyn Finder,
        on_held: impl FnMut(&Holder) -> Patience,
    ) -> Result<Self, Qcow2Error> {
        Self::examine(Image::open_found(path, access, finder, on_held)?, finder)
    }

    /// Where its top is.
    pub fn path(&self) -> &Path {
        self.top.path()
    }

    /// Size of the disk in bytes, or what it was narrowed to.
    pub fn size(&self) -> u64 {
        self.used
    }

    /// Uses the first `size` bytes of the disk only: a growth that was cut off may have made it larger than its volume.
    ///
    /// # Errors
    /// [`ImageError::TooSmall`]. It is closed then.
    pub fn narrowed_to(mut self, size: u64) -> Result<Self, Qcow2Error> {
        if self.header.size < size {
            let path = self.path().to_owned();
            return Err(ImageError::TooSmall { path, size: self.header.size, needed: size }.into());
        }
        self.used = size;
        Ok(self)
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.top.access()
    }

    /// Bytes of a cluster: what is allocated, discarded and copied at a time.
    pub fn cluster_size(&self) -> u64 {
        self.header.cluster_size()
    }

    /// The file of its top itself, whatever becomes of its name.
    pub fn held(&self) -> &Arc<Held> {
        self.top.held()
    }

    /// The files that it stands on, from the one below the top down to the base; none if it stands alone.
    pub fn backing_files(&self) -> impl Iterator<Item = &Path> {
        self.backing.iter().map(|layer| layer.image.path())
    }

    /// Whether it stands on other files.
    pub fn has_backing(&self) -> bool {
        !self.backing.is_empty()
    }

    /// Whether writing makes persistent dirty bitmaps of backup programs worthless: their next backup is a full one.
    pub fn loses_bitmaps(&self) -> bool {
        self.header.has_bitmaps && self.access() == Access::ReadWrite
    }

    /// Checks a file that is open and locked, and opens what it stands on.
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

    /// Opens the chain below the top.
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

    /// Bytes of memory that the tables of the chain can come to, at the most.
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
    /// The same failure, seen from the image above, unless it is about the chain as a whole.
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

/// What an image says of the one that it stands on.
struct Named<'a> {
    above: &'a Held,
    path: &'a Path,
    format: Option<&'a str>,
}

/// Opens one image below the top; `seen` are those above it.
fn open_layer(
    above: &Path,
    named: &Named<'_>,
    seen: &[(u64, u64)],
    finder: &dyn Finder,
) -> Result<Layer, Qcow2Error> {
    let (path, format) = (named.path, named.format);
    let found = finder.find(path, Some(named.above));
    let found = found.map_err(|error| ImageError::of("find", path, error))?;
    // Before it is locked: what the chain holds already would seem to be held by another process.
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
                "it does not tell the format of its backing file, which was guessed");
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
    // A colon before the first slash ends the name of a protocol, "json:" among them.
    let first_part = name_of_file.split('/').next().unwrap_or_default();
    if first_part.contains(':') || name_of_file.is_empty() {
        return Err(no_file());
    }
    let folder = image.parent().unwrap_or(Path::new(""));
    Ok(folder.join(name_of_file))
}

/// Reads and checks the header of a locked image and its tables of tables; an image that is written is made as long
/// as direct I/O wants it.
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
        // Clusters smaller than the blocks of direct I/O could not be written one by one; in ones as large, an entry of
        // the first-level table could not be told from another table.
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

/// Opens the file of a locked image once more, buffered, for the control thread.
fn plain(image: &Image) -> Result<std::fs::File, Qcow2Error> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(image.access() == Access::ReadWrite);
    // By descriptor, because the name may belong to another file by now.
    let opened = options.open(format!("/proc/self/fd/{}", image.file().as_raw_fd()));
    opened.map_err(|error| ImageError::of("open", image.path(), error).into())
}

/// What tells a file from others.
fn identity(image: &Image) -> Result<(u64, u64), Qcow2Error> {
    let stat = rustix::fs::fstat(image.file())
        .map_err(|errno| ImageError::of("examine", image.path(), errno.into()))?;
    Ok((stat.st_dev, stat.st_ino))
}
