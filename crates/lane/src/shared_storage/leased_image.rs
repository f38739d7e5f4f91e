//! The target's side: an image that is open here, or leased to the source's host.
//!
//! ```text
//!            Lease, answered and not promised
//!    Here ──────────────────────────────────► Leased
//!      ▲    taken: for a promise, or because blocks come by the link │
//!      └─────────────────────────────────────────────────────────────┘
//! ```
//! A leased image can be read, because a waiting VM reads its disks. It then shows the source's writes so far.

use std::cell::{Cell, RefCell};
use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::IoFuture;
use block::device::check_range;
use block::engine::{Engine, run_blocking};
use block::store::{Access, FileStore, Image, ImageError, Opened};
use block::{BlockDevice, Buffer, ByteRange, Change, Extent, ExtentKind, Geometry, Handle, IoError};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::token::{self, Secret, SharedImage};

/// How often the lock of an image is tried that the other host is about to close: a fraction of the time for closing.
const RETRY: Duration = Duration::from_millis(2);
/// The longest wait for the other host's last writes. The source gives the attempt up long before.
const TAKE_MAX: Duration = Duration::from_secs(10);

/// An image that may be leased, before a lane has it.
pub struct Leasable {
    /// The open and locked image; `None`: it may be leased at this moment, after a restart.
    pub image: Option<Image>,
    /// Its path, and its token.
    pub shared: SharedImage,
    /// The size of the image in bytes.
    pub size_bytes: u64,
    /// Whether the target has promised: then the image is not leased.
    pub promise: Promise,
}

/// Whether a target has promised to keep the image until the source decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// No promise: leases are granted.
    None,
    /// A promise was given, or is about to be.
    Given,
}

/// The store of an arriving volume.
pub enum ArrivingStore {
    /// A store of this host alone.
    Own(Opened),
    /// An image that may be leased to the source's host.
    Leasable(Box<Leasable>),
}

/// An image that is open here, or leased to the source's host.
pub struct LeasedImage {
    handle: Handle,
    engine: Rc<dyn Engine>,
    shared: SharedImage,
    geometry: Geometry,
    state: RefCell<ImageState>,
    promise: Cell<Promise>,
}

enum ImageState {
    Here(Rc<dyn BlockDevice>),
    /// The description for reads while it is leased, opened at the first one, without a lock.
    Leased(Option<Arc<OwnedFd>>),
}

impl ArrivingStore {
    /// Makes a device of the store, with the lease if it can be leased. Fails with the errors of [`Opened::into_device`].
    pub(crate) async fn into_device(
        self,
        handle: &Handle,
        engine: &Rc<dyn Engine>,
    ) -> Result<(Rc<dyn BlockDevice>, Option<Rc<LeasedImage>>), IoError> {
        match self {
            Self::Own(opened) => Ok((opened.into_device(handle, engine).await?, None)),
            Self::Leasable(leasable) => {
                let leased = LeasedImage::new(*leasable, handle, engine);
                Ok((Rc::clone(&leased) as Rc<dyn BlockDevice>, Some(leased)))
            }
        }
    }
}

impl LeasedImage {
    pub(crate) fn new(leasable: Leasable, handle: &Handle, engine: &Rc<dyn Engine>) -> Rc<Self> {
        let Leasable { image, shared, size_bytes, promise } = leasable;
        let alignment = block::device::ALIGNMENT;
        let geometry = Geometry { size: size_bytes, alignment, read_only: false, discards: true };
        let state = match image {
            Some(image) => ImageState::Here(Rc::new(FileStore::new(image, Rc::clone(engine)))),
            None => ImageState::Leased(None),
        };
        Rc::new(Self {
            handle: handle.clone(),
            engine: Rc::clone(engine),
            shared,
            geometry,
            state: RefCell::new(state),
            promise: Cell::new(promise),
        })
    }

    /// Returns the image, open and locked here. From this call on the source cannot lease it again, until
    /// [`LeasedImage::promise_nothing`]. The future waits until the other host has closed it. Fails with [`IoError`]: the other
    /// host does not close it, or it cannot be opened.
    pub(crate) fn promise(
        self: &Rc<Self>,
    ) -> impl Future<Output = Result<Rc<dyn BlockDevice>, IoError>> + use<> {
        // N.B. at once: the attempt may be over before the future is polled.
        self.promise.set(Promise::Given);
        let image = Rc::clone(self);
        // After the end of the attempt nothing is taken: the source may be about to lease the image again.
        async move { image.take_while(|| image.promise.get() == Promise::Given).await }
    }

    pub(crate) fn promise_nothing(&self) {
        self.promise.set(Promise::None);
    }

    /// Leases the image to the host that has put `answer` beside it; resolves when it is closed here. Fails with
    /// [`Errno::AGAIN`]: not at this moment. [`IoError::Unsupported`]: that host does not have the same folder.
    pub(crate) async fn grant_lease(&self, answer: Secret) -> Result<(), IoError> {
        let shared = self.shared.clone();
        let is_answered = run_blocking(&self.engine, move || shared.is_answered(answer)).await?;
        if self.promise.get() == Promise::Given {
            return Err(IoError::os("lease the image", Errno::AGAIN));
        }
        if !is_answered {
            return Err(IoError::Unsupported);
        }
        // Requests in flight hold it a little longer.
        self.state.replace(ImageState::Leased(None));
        // N.B. the other host's lock proves something only if no lock of this host is in its way.
        self.open_while(|| true).await.map(drop)
    }

    /// Verifies that the host which leases the image has locked it. Fails with [`IoError::Unsupported`]: that host's locks do not
    /// count here, or it has another file.
    pub(crate) async fn is_locked(&self) -> Result<(), IoError> {
        let path = self.shared.path.clone();
        let opened =
            run_blocking(&self.engine, move || Image::open(&path, Access::ReadWrite).map(drop)).await?;
        match opened {
            Err(ImageError::Locked { .. }) => Ok(()),
            Ok(()) | Err(_) => Err(IoError::Unsupported),
        }
    }

    /// Removes the token of the image, which now belongs to a volume of this host.
    pub(crate) async fn forget_token(&self) {
        let path = self.shared.path.clone();
        let removed = run_blocking(&self.engine, move || token::remove(&path)).await;
        if let Ok(Err(error)) = removed {
            let path = self.shared.path.display();
            tracing::warn!(%path, %error, "cannot delete the file beside an image until the next start");
        }
    }

    async fn take(&self) -> Result<Rc<dyn BlockDevice>, IoError> {
        self.take_while(|| true).await
    }

    async fn take_while(&self, is_wanted: impl Fn() -> bool) -> Result<Rc<dyn BlockDevice>, IoError> {
        if let Some(device) = self.here() {
            return Ok(device);
        }
        // N.B. the image may have been opened by a concurrent request of this host.
        let opened = self.open_while(|| self.here().is_none() && is_wanted()).await;
        if let Some(device) = self.here() {
            return Ok(device);
        }
        let image = opened?;
        let mut state = self.state.borrow_mut();
        let device: Rc<dyn BlockDevice> = Rc::new(FileStore::new(image, Rc::clone(&self.engine)));
        *state = ImageState::Here(Rc::clone(&device));
        Ok(device)
    }

    async fn open_while(&self, is_wanted: impl Fn() -> bool) -> Result<Image, IoError> {
        let deadline = self.handle.now() + TAKE_MAX;
        loop {
            let shared = self.shared.clone();
            match run_blocking(&self.engine, move || open_same(&shared)).await? {
                Ok(None) => {
                    let path = self.shared.path.display();
                    tracing::warn!(%path, "another file has the name of an image that was leased; nothing is written to it");
                    return Err(IoError::os("open the image", Errno::STALE));
                }
                Ok(Some(image)) if image.size() == self.geometry.size => return Ok(image),
                Ok(Some(_)) => return Err(IoError::os("open the image", Errno::FBIG)),
                Err(ImageError::Locked { .. }) if !is_wanted() => {
                    return Err(IoError::os("open the image", Errno::AGAIN));
                }
                Err(ImageError::Locked { .. }) if self.handle.now() < deadline => {
                    self.handle.sleep(RETRY).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "an image that was leased cannot be opened");
                    return Err(IoError::os("open the image", Errno::BUSY));
                }
            }
        }
    }

    async fn reading(&self) -> Result<Arc<OwnedFd>, IoError> {
        if let ImageState::Leased(Some(file)) = &*self.state.borrow() {
            return Ok(Arc::clone(file));
        }
        let shared = self.shared.clone();
        let file = run_blocking(&self.engine, move || open_for_reading(&shared)).await?;
        let file = file.map_err(|error| IoError::from_std("read the image", &error))?;
        let file = Arc::new(OwnedFd::from(file));
        if let ImageState::Leased(reading) = &mut *self.state.borrow_mut() {
            *reading = Some(Arc::clone(&file));
        }
        Ok(file)
    }

    pub(crate) fn here(&self) -> Option<Rc<dyn BlockDevice>> {
        match &*self.state.borrow() {
            ImageState::Here(device) => Some(Rc::clone(device)),
            ImageState::Leased(_) => None,
        }
    }
}

impl BlockDevice for LeasedImage {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read(&self, offset: u64, buffer: Buffer) -> IoFuture<'_, Buffer> {
        Box::pin(async move {
            check_range(&self.geometry, ByteRange::new(offset, buffer.len() as u64))?;
            match self.here() {
                Some(device) => device.read(offset, buffer).await,
                None => self.engine.read_at(&self.reading().await?, offset, buffer).await,
            }
        })
    }

    fn change(&self, change: Change) -> IoFuture<'_, ()> {
        Box::pin(async move { self.take().await?.change(change).await })
    }

    /// Flushes the image if it is open here; its source flushes a leased one.
    fn flush(&self) -> IoFuture<'_, ()> {
        Box::pin(async move {
            match self.here() {
                Some(device) => device.flush().await,
                None => Ok(()),
            }
        })
    }

    fn allocation(&self, range: ByteRange) -> IoFuture<'_, Vec<Extent>> {
        Box::pin(async move {
            check_range(&self.geometry, range)?;
            match self.here() {
                Some(device) => device.allocation(range).await,
                None => Ok(vec![Extent { range, kind: ExtentKind::Data }]),
            }
        })
    }
}

/// Opens the file past the page cache, which would keep data that another host has overwritten since.
fn open_for_reading(shared: &SharedImage) -> std::io::Result<File> {
    let direct = OFlags::DIRECT.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(direct).open(&shared.path)?;
    if shared.is_image(&file) { Ok(file) } else { Err(Errno::STALE.into()) }
}

/// Opens and locks the image for writing; `None`: another file has its name.
fn open_same(shared: &SharedImage) -> Result<Option<Image>, ImageError> {
    let image = Image::open(&shared.path, Access::ReadWrite)?;
    Ok(shared.is_image(&**image.held()).then_some(image))
}
