//! Locates the bytes of a disk by imago's tables of a chain.

use std::io;
use std::rc::Rc;

use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, Mapping, ShallowMapping};
use rustix::io::Errno;

use super::file::LaneFile;
use super::image::{Layer, Qcow2Image};
use super::storage::LaneStorage;
use crate::buffer::Buffer;
use crate::device::ByteRange;
use crate::engine::Engine;
use crate::error::IoError;
use crate::store::image::Access;

pub(super) struct Tables {
    access: FormatAccess<LaneStorage>,
    top: Rc<LaneFile>,
}

pub(super) struct Piece {
    pub(super) range: ByteRange,
    pub(super) place: Place,
}

#[derive(Clone)]
pub(super) enum Place {
    /// In the top's file, in a cluster without other references: it may be written.
    Own {
        offset: u64,
    },
    /// The piece is in a file where it may only be read.
    Shared {
        file: Rc<LaneFile>,
        offset: u64,
    },
    /// The piece is in no file: it is zero.
    Zero,
    Packed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TopSays {
    /// It has data there, or an explicit zero.
    Something,
    /// The image below shows through.
    Nothing,
}

impl Tables {
    /// Opens a chain on the lane's thread. Fails with the errors of the first reads of tables; EINVAL if imago refuses an image
    /// that passed the checks.
    pub(super) async fn open(image: Qcow2Image, engine: &Rc<dyn Engine>) -> Result<Rc<Self>, IoError> {
        let mut below = None;
        for layer in image.backing.into_iter().rev() {
            below = Some(open_layer(layer, below, engine).await.map_err(|error| to_ours("open", &error))?);
        }
        let is_written = image.top.access() == Access::ReadWrite;
        let (header, path) = (image.header, image.top.path().to_owned());
        let top = Rc::new(if is_written {
            LaneFile::growing(image.top, header.cluster_size(), header.l1_clusters(), engine)
        } else {
            LaneFile::fixed(image.top, engine)
        });
        let storage = LaneStorage::new(Rc::clone(&top), Rc::clone(engine));
        let access = open_qcow2(storage, is_written, below).await.map_err(|error| {
            tracing::warn!(path = %path.display(), %error, "the image cannot be opened");
            to_ours("open", &error)
        })?;
        let tables = Rc::new(Self { access, top: Rc::clone(&top) });
        top.set_tables(&tables);
        Ok(tables)
    }

    pub(super) fn top(&self) -> &Rc<LaneFile> {
        &self.top
    }

    pub(super) fn access(&self) -> &FormatAccess<LaneStorage> {
        &self.access
    }

    /// Locates the pieces of a range of the disk, in order. Waits only for tables that are not in memory.
    pub(super) async fn pieces(&self, range: ByteRange) -> Result<Vec<Piece>, IoError> {
        let mut pieces: Vec<Piece> = Vec::with_capacity(1);
        let mut position = range.offset;
        while position < range.end() {
            let piece = self.piece(ByteRange::new(position, range.end() - position)).await?;
            position = piece.range.end();
            match pieces.last_mut() {
                Some(last) if last.goes_on_with(&piece) => last.range.length += piece.range.length,
                _ => pieces.push(piece),
            }
        }
        Ok(pieces)
    }

    pub(super) async fn piece(&self, range: ByteRange) -> Result<Piece, IoError> {
        let mapped = self.access.get_mapping(range.offset, range.length).await;
        let (mapping, length) = mapped.map_err(|error| to_ours("look up", &error))?;
        if length == 0 {
            // The disk ends where its header says, and so does the range at the latest.
            return Err(IoError::os("look up", Errno::IO));
        }
        let range = ByteRange::new(range.offset, length.min(range.length));
        let place = match mapping {
            Mapping::Raw { storage, offset, writable, .. } => {
                let file = storage.file()?;
                match Rc::ptr_eq(&file, &self.top) && writable {
                    true => Place::Own { offset },
                    false => Place::Shared { file, offset },
                }
            }
            Mapping::Special { .. } => Place::Packed,
            // Beyond the end of an image below it is zero.
            Mapping::Zero { .. } | Mapping::Eof { .. } => Place::Zero,
            _ => return Err(IoError::Unsupported),
        };
        Ok(Piece { range, place })
    }

    /// Returns whether the top itself describes the start of a range, and up to where.
    pub(super) async fn top_says(&self, range: ByteRange) -> Result<(TopSays, u64), IoError> {
        let mapped = self.access.inner().get_mapping(range.offset, range.length).await;
        let (mapping, length) = mapped.map_err(|error| to_ours("look up", &error))?;
        if length == 0 {
            return Err(IoError::os("look up", Errno::IO));
        }
        let says = match mapping {
            ShallowMapping::Indirect { .. } | ShallowMapping::Zero { explicit: false, .. } => {
                TopSays::Nothing
            }
            // Data, compressed data, explicit zeroes, and any other kind.
            _ => TopSays::Something,
        };
        Ok((says, range.offset + length.min(range.length)))
    }

    pub(super) async fn unpack(&self, range: ByteRange, mut buffer: Buffer) -> Result<Buffer, IoError> {
        let target = buffer.as_mut_slice().ok_or(IoError::os("read", Errno::INVAL))?;
        let read = self.access.read(target, range.offset).await;
        read.map_err(|error| to_ours("read", &error))?;
        Ok(buffer)
    }

    pub(super) async fn keep_as_zero(&self, range: ByteRange) -> Result<u64, IoError> {
        let done = self.access.inner().ensure_zero_mapping(range.offset, range.length).await;
        let (start, length) = done.map_err(|error| to_ours("discard", &error))?;
        Ok(if start == range.offset { start + length } else { range.offset })
    }

    pub(super) async fn write_cached(&self) -> Result<(), IoError> {
        self.access.flush().await.map_err(|error| to_ours("write tables", &error))
    }
}

impl Piece {
    fn goes_on_with(&self, next: &Self) -> bool {
        let length = self.range.length;
        match (&self.place, &next.place) {
            (Place::Own { offset }, Place::Own { offset: next }) => offset + length == *next,
            (Place::Shared { file, offset }, Place::Shared { file: next_file, offset: next }) => {
                Rc::ptr_eq(file, next_file) && offset + length == *next
            }
            (Place::Zero, Place::Zero) | (Place::Packed, Place::Packed) => true,
            _ => false,
        }
    }
}

/// Converts an error of imago; an error without a system code is a damaged image, reported as EIO.
pub(super) fn to_ours(operation: &'static str, error: &io::Error) -> IoError {
    let by_kind = match error.kind() {
        io::ErrorKind::StorageFull => Errno::NOSPC,
        io::ErrorKind::QuotaExceeded => Errno::DQUOT,
        io::ErrorKind::FileTooLarge => Errno::FBIG,
        io::ErrorKind::Unsupported => Errno::OPNOTSUPP,
        _ => Errno::IO,
    };
    IoError::os(operation, Errno::from_io_error(error).unwrap_or(by_kind))
}

async fn open_layer(
    layer: Layer,
    below: Option<FormatAccess<LaneStorage>>,
    engine: &Rc<dyn Engine>,
) -> io::Result<FormatAccess<LaneStorage>> {
    let file = match layer.header {
        Some(_) => LaneFile::fixed(layer.image, engine),
        None => LaneFile::raw(layer.image, engine),
    };
    let storage = LaneStorage::new(Rc::new(file), Rc::clone(engine));
    match layer.header {
        Some(_) => open_qcow2(storage, false, below).await,
        None => Ok(FormatAccess::new(Raw::open_image(storage, false).await?)),
    }
}

async fn open_qcow2(
    storage: LaneStorage,
    is_written: bool,
    below: Option<FormatAccess<LaneStorage>>,
) -> io::Result<FormatAccess<LaneStorage>> {
    let mut qcow2 = Qcow2::<LaneStorage>::open_image(storage, is_written).await?;
    qcow2.set_data_file(None);
    qcow2.set_backing(below);
    Ok(FormatAccess::new(qcow2))
}
