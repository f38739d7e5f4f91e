//! Completes an interrupted growth on a control thread: brings the image to its new size, or back to the old one. Guests are
//! not served meanwhile. `lane::growth` does it in a lane, while guests work.

use std::rc::Rc;

use block::engine::EngineChoice;
use block::{BlockDevice, Executor, IoError, Opened};

use crate::fail_point::{self, Step};

/// Why an image has neither its new size nor its old one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrowError {
    /// No I/O engine can be started.
    #[error("open an I/O engine")]
    Engine(#[source] block::engine::EngineError),
    #[error("the image cannot be grown to its size: {0}")]
    Image(IoError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grown {
    /// It has the new size, with zeroes in the new part.
    Larger,
    /// It could not grow, and has its old size.
    AsBefore(IoError),
}

/// Brings `image`, which was narrowed to its volume, to `size` bytes. After an error it may be tried again.
pub(crate) fn finish(image: Opened, size: u64) -> Result<Grown, GrowError> {
    fail_point::before(Step::Grow);
    // Threads, because io_uring may be refused here.
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
