//! Fills a new volume on a control thread: from an image of any format, into a store of any kind.
//!
//! ```text
//!   source ── extents that hold data ──► pieces, several at once ──► target
//!             the rest is zero           zeroes are left out of a target that is zero
//! ```
//!
//! The stores are devices as in a lane, so they run on an engine and an executor of their own here. Raw files have a faster
//! way: `images::copy_into`, by the kernel.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::engine::EngineChoice;
use block::{
    BlockDevice, Buffer, BufferPool, ByteRange, Durability, Executor, ExtentKind, IoError, Opened, ZeroMode,
};
use futures_util::future::try_join_all;
use lane::TargetContent;

const PIECE_BYTES: u64 = 1 << 20;
/// The number of concurrent pieces: enough to keep a disk busy.
const PIECES: usize = 8;
/// The bytes whose extents are queried at once, and that one request zeroes.
const STEP_BYTES: u64 = 256 << 20;

#[derive(Debug, thiserror::Error)]
pub(crate) enum FillError {
    /// No I/O engine can be started.
    #[error("open an I/O engine")]
    Engine(#[source] block::engine::EngineError),
    #[error("the image cannot be read: {0}")]
    Source(IoError),
    #[error("the new volume cannot be written: {0}")]
    Target(IoError),
}

/// Makes `target` hold the bytes of `source`, and zeroes behind them or without a source; durably when this returns. `done`
/// follows the position. After an error the target may hold anything.
pub(crate) fn fill(
    source: Option<Opened>,
    target: Opened,
    content: TargetContent,
    done: &Arc<AtomicU64>,
) -> Result<(), FillError> {
    // Threads, because io_uring may be refused here, and no guest's request waits for this.
    let (driver, engine) = block::engine::open(EngineChoice::Threads).map_err(FillError::Engine)?;
    let mut executor = Executor::new(driver);
    let (handle, done) = (executor.handle(), Arc::clone(done));
    executor.run(async move {
        let target = target.into_device(&handle, &engine).await.map_err(FillError::Target)?;
        if content == TargetContent::Unknown {
            zero(&*target).await?;
        }
        if let Some(source) = source {
            let source = source.into_device(&handle, &engine).await.map_err(FillError::Source)?;
            copy(&source, &target, engine.buffers(), &done).await?;
        }
        target.flush().await.map_err(FillError::Target)
    })
}

async fn zero(target: &dyn BlockDevice) -> Result<(), FillError> {
    for range in steps(ByteRange::new(0, target.geometry().size), STEP_BYTES) {
        let zeroed = target.write_zeroes(range, ZeroMode::MayUnmap, Durability::Volatile);
        zeroed.await.map_err(FillError::Target)?;
    }
    Ok(())
}

async fn copy(
    source: &Rc<dyn BlockDevice>,
    target: &Rc<dyn BlockDevice>,
    buffers: &BufferPool,
    done: &AtomicU64,
) -> Result<(), FillError> {
    for step in steps(ByteRange::new(0, source.geometry().size), STEP_BYTES) {
        let extents = source.allocation(step).await.map_err(FillError::Source)?;
        let data = extents.iter().filter(|extent| extent.kind == ExtentKind::Data);
        let pieces: Vec<ByteRange> = data.flat_map(|extent| steps(extent.range, PIECE_BYTES)).collect();
        for together in pieces.chunks(PIECES) {
            try_join_all(together.iter().map(|piece| copy_piece(source, target, buffers, *piece))).await?;
            done.store(together.last().map_or(0, ByteRange::end), Ordering::Relaxed);
        }
        done.store(step.end(), Ordering::Relaxed);
    }
    Ok(())
}

async fn copy_piece(
    source: &Rc<dyn BlockDevice>,
    target: &Rc<dyn BlockDevice>,
    buffers: &BufferPool,
    piece: ByteRange,
) -> Result<(), FillError> {
    // A piece has at most PIECE_BYTES.
    let buffer: Buffer = buffers.take(usize::try_from(piece.length).unwrap_or(0));
    let data = source.read(piece.offset, buffer).await.map_err(FillError::Source)?;
    if block::buffer::is_zero(data.as_slice()) {
        return Ok(());
    }
    target.write(piece.offset, data, Durability::Volatile).await.map_err(FillError::Target)
}

/// Cuts a range into pieces that end at multiples of `length`.
fn steps(range: ByteRange, length: u64) -> impl Iterator<Item = ByteRange> {
    let next = move |offset: &u64| {
        let end = (offset / length + 1).saturating_mul(length).min(range.end());
        (end < range.end()).then_some(end)
    };
    let first = (range.length > 0).then_some(range.offset);
    std::iter::successors(first, next).map(move |offset| {
        let end = (offset / length + 1).saturating_mul(length).min(range.end());
        ByteRange::new(offset, end - offset)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use block::{ByteRange, Image};
    use lane::TargetContent;

    use super::{fill, steps};

    #[test]
    fn steps_cover_a_range_and_end_at_multiples() {
        let cut = |offset, length| {
            steps(ByteRange::new(offset, length), 10)
                .map(|step| (step.offset, step.length))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(3, 20), [(3, 7), (10, 10), (20, 3)]);
        assert_eq!(cut(10, 10), [(10, 10)]);
        assert_eq!(cut(5, 0), []);
    }

    #[test]
    fn target_holds_the_source_and_zeroes_whatever_it_held() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        let size = 3 << 20;
        let check = |content, expected_behind: u8| {
            std::fs::write(&to, vec![9; size]).unwrap();
            let source = Image::open(&from, block::Access::ReadOnly).unwrap();
            let target = Image::open(&to, block::Access::ReadWrite).unwrap();
            let done = Arc::default();
            fill(Some(source.into()), target.into(), content, &done).unwrap();
            assert_eq!(done.load(Ordering::Relaxed), 2 << 20);
            let bytes = std::fs::read(&to).unwrap();
            assert_eq!(
                (bytes[0], bytes[(1 << 20) + 5000], bytes[size - 1]),
                (expected_behind, 7, expected_behind)
            );
        };
        let file = std::fs::File::create(&from).unwrap();
        file.set_len(2 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], (1 << 20) + 4096).unwrap();
        check(TargetContent::Unknown, 0);
        // The declared content of the target is trusted.
        check(TargetContent::Zero, 9);
    }
}
