//! A store of any kind in transit: found and locked on a control thread, which may sleep, then made a device on the lane's
//! thread, which may not.
//!
//! ```text
//!   Image::open, Image::create, …    control thread: opens, locks, checks; an error of the store's own kind
//!        │
//!      Opened                        sent to the lane's thread
//!        │
//!   Opened::into_device              lane's thread: a device over the lane's engine
//! ```

use std::rc::Rc;
use std::sync::Arc;

use super::file::FileStore;
use super::image::Image;
use super::qcow2::{Qcow2Image, Qcow2Store};
use super::remote::{RemoteImage, RemoteStore};
use crate::device::BlockDevice;
use crate::engine::Engine;
use crate::error::IoError;
use crate::executor::Handle;
use crate::filter::Impairment;
use crate::held::Held;

/// An open and locked store of any kind.
pub enum Opened {
    /// A raw image, in a file or on a block device.
    File(Image),
    /// A qcow2 image, with its chain of backing files.
    Qcow2(Qcow2Image),
    /// An export of an NBD server.
    Remote(RemoteImage),
    /// A store that is slowed down, or fails, on purpose.
    Impaired(Box<Opened>, Impairment),
}

impl Opened {
    /// Returns the size in bytes of the resulting device.
    pub fn size(&self) -> u64 {
        match self {
            Self::File(image) => image.size(),
            Self::Qcow2(image) => image.size(),
            Self::Remote(image) => image.size(),
            Self::Impaired(store, _) => store.size(),
        }
    }

    /// Returns the held file of the store, or of its top image; `None` for an export.
    pub fn held(&self) -> Option<&Arc<Held>> {
        match self {
            Self::File(image) => Some(image.held()),
            Self::Qcow2(image) => Some(image.held()),
            Self::Remote(_) => None,
            Self::Impaired(store, _) => store.held(),
        }
    }

    /// Adds an impairment, if there is one.
    #[must_use]
    pub fn impaired(self, impairment: Option<Impairment>) -> Self {
        match impairment {
            None => self,
            Some(impairment) => Self::Impaired(Box::new(self), impairment),
        }
    }

    /// Makes a device whose requests go through `engine`; its tasks run on `handle`.
    ///
    /// Call this on the thread of both. Dropping the future closes the store.
    ///
    /// # Errors
    /// [`IoError`]: data that is needed before the first request could not be read; the store is then closed.
    pub async fn into_device(
        self,
        handle: &Handle,
        engine: &Rc<dyn Engine>,
    ) -> Result<Rc<dyn BlockDevice>, IoError> {
        match self {
            Self::File(image) => Ok(Rc::new(FileStore::new(image, Rc::clone(engine)))),
            Self::Qcow2(image) => Ok(Rc::new(Qcow2Store::open(image, handle, engine).await?)),
            Self::Remote(image) => Ok(Rc::new(RemoteStore::new(image, Rc::clone(engine), handle.clone()))),
            Self::Impaired(store, impairment) => {
                let device = Box::pin(store.into_device(handle, engine)).await?;
                Ok(impairment.over(device, handle))
            }
        }
    }
}

impl From<Image> for Opened {
    fn from(image: Image) -> Self {
        Self::File(image)
    }
}

impl From<Qcow2Image> for Opened {
    fn from(image: Qcow2Image) -> Self {
        Self::Qcow2(image)
    }
}

impl From<RemoteImage> for Opened {
    fn from(image: RemoteImage) -> Self {
        Self::Remote(image)
    }
}
