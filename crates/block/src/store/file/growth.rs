//! Growth of a raw image: a file is made longer; of a device, more is used, and zeroed.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::FileStore;
use crate::buffer::Buffer;
use crate::device::{ByteRange, Durability, IoFuture, ZeroMode};
use crate::engine::run_blocking;
use crate::error::IoError;
use crate::growth::Growth;
use crate::store::image::Kind;

/// Bytes of a device that one request zeroes: few enough that guests' requests come in between, and that an
/// abandoned growth ends soon.
const ZERO_STEP: u64 = 256 << 20;

impl Growth for FileStore {
    /// Returns the present size of a device. The limit of a file is unknown before it is tried.
    fn capacity(&self) -> IoFuture<'_, Option<u64>> {
        Box::pin(async move {
            match self.image.kind() {
                Kind::File => Ok(None),
                Kind::Device => {
                    // The end of a device is its size. This does not sleep, and the position is not used.
                    let end = rustix::fs::seek(self.image.file(), SeekFrom::End(0));
                    end.map(Some).map_err(|errno| IoError::os("ask the size", errno))
                }
            }
        })
    }

    fn prepare(&self, size: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let now = self.geometry.get();
            if now.read_only {
                return Err(IoError::ReadOnly);
            }
            match self.image.kind() {
                Kind::File => {
                    let file = Arc::clone(self.image.file());
                    run_blocking(&self.engine, move || lengthen(&file, now.size, size)).await?
                }
                Kind::Device => {
                    self.zero_head(now.size).await?;
                    let mut start = now.size.next_multiple_of(u64::from(self.image.io_alignment()));
                    while start < size {
                        let length = ZERO_STEP.min(size - start);
                        self.zero_checked(ByteRange::new(start, length), ZeroMode::MayUnmap).await?;
                        start += length;
                    }
                    self.engine.sync(self.image.file()).await
                }
            }
        })
    }

    fn show(&self, size: u64) {
        self.image.show(size);
        self.geometry.show(size);
    }

    fn undo(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            if self.image.kind() == Kind::Device {
                return Ok(());
            }
            let (file, size) = (Arc::clone(self.image.file()), self.geometry.size());
            run_blocking(&self.engine, move || cut_off(&file, size)).await?
        })
    }
}

impl FileStore {
    /// Zeroes from an end that direct I/O cannot reach to the next one that it can.
    async fn zero_head(&self, end: u64) -> Result<(), IoError> {
        let length = end.next_multiple_of(u64::from(self.image.io_alignment())) - end;
        match self.image.tail() {
            Some(tail) if length > 0 => {
                let zeroes = Buffer::zeroed(length as usize);
                self.engine.write_at(tail, end, zeroes, Durability::Volatile).await?;
                self.engine.sync(tail).await
            }
            _ => Ok(()),
        }
    }
}

/// Durably makes a file, of which `present` bytes are used, `size` bytes long. May sleep.
fn lengthen(file: &OwnedFd, present: u64, size: u64) -> Result<(), IoError> {
    // Cuts remains of an earlier attempt: from there on all is zero.
    cut_off(file, present)?;
    let done = rustix::fs::ftruncate(file, size).and_then(|()| rustix::fs::fsync(file));
    done.map_err(|errno| match errno {
        // Larger than the file system's files can be.
        Errno::INVAL => IoError::os("grow", Errno::FBIG),
        errno => IoError::os("grow", errno),
    })
}

fn cut_off(file: &OwnedFd, size: u64) -> Result<(), IoError> {
    let fail = |errno| IoError::os("set the size", errno);
    let length = rustix::fs::fstat(file).map_err(fail)?.st_size;
    if length as u64 > size {
        rustix::fs::ftruncate(file, size).and_then(|()| rustix::fs::fsync(file)).map_err(fail)?;
    }
    Ok(())
}
