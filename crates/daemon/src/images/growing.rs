//! Ends a growth that was interrupted, on a control thread: the image is brought to its new size, or back to the old one.
//!
//! Guests are not served meanwhile. What a lane does itself, with guests at work, is in `lane::growth`.

use std::rc::Rc;

use block::engine::EngineChoice;
use block::{BlockDevice, Executor, IoError, Opened};

use crate::fail_point::{self, Step};

/// Why an image is neither as large as it was to be nor as it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrowError {
    /// There is no engine to work with.
    #[error("open an I/O engine")]
    Engine(#[source] block::engine::EngineError),
    /// The image cannot be used.
    #[error("the image cannot be brought to its size: {0}")]
    Image(IoError),
}

/// What has become of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grown {
    /// It has the new size, and zeroes where it had nothing.
    Larger,
    /// It could not, and has the size that it had.
    AsBefore(IoError),
}

/// Brings `image`, which was narrowed to its volume, to `size` bytes.
///
/// # Errors
/// [`GrowError`]; it may be tried again.
pub(crate) fn finish(image: Opened, size: u64) -> Result<Grown, GrowError> {
    fail_point::before(Step::Grow);
    // Threads, because io_uring may be refused where this runs.
    let (driver, engine) = block::engine::open(EngineChoice::Threads).map_err(GrowError::Engine)?;
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    let grown = executor.run(async move {
        let device = image.into_device(&handle, &engine).await?;
        prepare(&device, size).await
    });
    let grown = grown.map_err(GrowError::Image)?;
    fail_point::after(Step::Grow);
    Ok(grown)
}

async fn prepare(device: &Rc<dyn BlockDevice>, size: u64) -> Result<Grown, IoError> {
    let growth = device.growth().ok_or(IoError::Unsupported)?;
    match growth.prepare(size).await {
        Ok(()) => Ok(Grown::Larger),
        Err(error) => {
            growth.undo().await?;
            Ok(Grown::AsBefore(error))
        }
    }
}
