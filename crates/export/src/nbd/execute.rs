//! Carries out one request on a device.

use std::rc::Rc;

use block::device::push_extent;
use block::{BlockDevice, Buffer, ByteRange, Durability, Extent, IoError};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::ReplyStyle;
use crate::nbd::reply::{Body, EXTENTS_MAX, Reply, encode_extents};
use crate::nbd::transmission::{Command, Effort, ExtentCount};

/// Limit of the bytes to describe for one request. A store may have to read every extent of them, and a shorter answer is always
/// allowed. It is a multiple of every alignment.
const DESCRIBE_LENGTH_MAX: u64 = 1 << 30;
/// The same for clients that accept more than 4 GiB at a time, in order to map a whole disk.
const DESCRIBE_LENGTH_EXTENDED_MAX: u64 = 64 << 30;
/// First step if only the first extent is wanted: most of the map behind it would be read in vain. The step doubles as long as
/// all of it is alike.
const DESCRIBE_ONE_LENGTH: u64 = 128 << 20;

/// Carries out `command` and returns the reply for the client.
///
/// `buffer` is the data of a write, or the memory that a read fills. Dropping the future leaves it open whether the request is
/// carried out, as [`BlockDevice`] has it.
pub(super) async fn execute(
    device: Rc<dyn BlockDevice>,
    style: ReplyStyle,
    cookie: u64,
    command: Command,
    buffer: Option<Buffer>,
) -> Reply {
    let (offset, reserved) = (command.offset(), command.payload_length());
    let body = match carry_out(&*device, style, command, buffer).await {
        Ok(body) => body,
        Err(error) => {
            tracing::debug!(?command, %error, "request failed");
            let code = code_of(error, command);
            Body::Failed { code, message: code.message() }
        }
    };
    Reply { cookie, offset, reserved, body }
}

/// Returns the code for a failure. `ENOTSUP` tells a client that zeroes would have to be written, and nothing else.
fn code_of(error: IoError, command: Command) -> ErrorCode {
    match (ErrorCode::from(error), command) {
        (ErrorCode::Unsupported, Command::WriteZeroes(_, _, Effort::Fast, _)) => ErrorCode::Unsupported,
        (ErrorCode::Unsupported, _) => ErrorCode::Invalid,
        (code, _) => code,
    }
}

async fn carry_out(
    device: &dyn BlockDevice,
    style: ReplyStyle,
    command: Command,
    buffer: Option<Buffer>,
) -> Result<Body, IoError> {
    match command {
        Command::Read(ByteRange { offset, .. }, framing) => {
            let data = device.read(offset, buffer.unwrap_or_else(|| Buffer::zeroed(0))).await?;
            return Ok(Body::Data { offset, data, framing });
        }
        Command::Write(ByteRange { offset, .. }, durability) => {
            device.write(offset, buffer.unwrap_or_else(|| Buffer::zeroed(0)), durability).await?;
        }
        Command::Flush => device.flush().await?,
        Command::Discard(range, durability) => {
            device.discard(range).await?;
            if durability == Durability::Durable {
                device.flush().await?;
            }
        }
        Command::WriteZeroes(range, mode, effort, durability) => {
            if effort == Effort::Fast && !device.zeroes_fast(mode) {
                return Err(IoError::Unsupported);
            }
            device.write_zeroes(range, mode, durability).await?;
        }
        Command::Describe(range, count) => {
            let limit = match style {
                ReplyStyle::Extended => DESCRIBE_LENGTH_EXTENDED_MAX,
                ReplyStyle::Simple | ReplyStyle::Structured => DESCRIBE_LENGTH_MAX,
            };
            let range = ByteRange::new(range.offset, range.length.min(limit));
            let (range, extents) = match count {
                ExtentCount::Many => describe_many(device, range).await?,
                ExtentCount::One => describe_one(device, range).await?,
            };
            return Ok(Body::Extents(Buffer::copy_of(&encode_extents(range, &extents, count, style))));
        }
        // Announced reads gain nothing: stores bypass the page cache. The connection handles a disconnect.
        Command::Cache(_) | Command::Disconnect => {}
    }
    Ok(Body::Done)
}

async fn describe_many(
    device: &dyn BlockDevice,
    range: ByteRange,
) -> Result<(ByteRange, Vec<Extent>), IoError> {
    let mut described = ByteRange::new(range.offset, 0);
    let mut extents = Vec::new();
    while described != range && extents.len() < EXTENTS_MAX {
        let length = DESCRIBE_LENGTH_MAX.min(range.end() - described.end());
        let next = device.allocation(ByteRange::new(described.end(), length)).await?;
        next.into_iter().for_each(|extent| push_extent(&mut extents, extent.range, extent.kind));
        described.length += length;
    }
    Ok((described, extents))
}

/// Describes a range until its first extent is known, and returns how far that was.
async fn describe_one(
    device: &dyn BlockDevice,
    range: ByteRange,
) -> Result<(ByteRange, Vec<Extent>), IoError> {
    let mut described = ByteRange::new(range.offset, 0);
    let mut extents: Vec<Extent> = Vec::new();
    let mut length = DESCRIBE_ONE_LENGTH;
    loop {
        let next = ByteRange::new(described.end(), length.min(range.end() - described.end()));
        extents.extend(device.allocation(next).await?);
        described.length += next.length;
        let first = extents.first().map(|extent| extent.kind);
        let is_over = extents.iter().any(|extent| Some(extent.kind) != first);
        if is_over || described == range {
            return Ok((described, extents));
        }
        length *= 2;
    }
}

#[cfg(test)]
mod tests {
    use block::MemoryStore;
    use futures_util::FutureExt;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// Returns the lengths of the described extents, after a write at 20 GiB.
    fn told(style: ReplyStyle, count: ExtentCount) -> Vec<u64> {
        let store = Rc::new(MemoryStore::new(100 * GIB));
        let written = store.write(20 * GIB, Buffer::copy_of(&[1; 4096]), Durability::Volatile);
        assert_eq!(written.now_or_never(), Some(Ok(())));
        let command = Command::Describe(ByteRange::new(0, 90 * GIB), count);
        let reply = execute(store, style, 1, command, None).now_or_never().expect("memory does not wait");
        let Body::Extents(payload) = reply.body else { panic!("{:?}", reply.body) };
        let extents = nbd_protocol::reply::decode_extents(payload.as_slice(), style).unwrap();
        extents.iter().map(|extent| extent.length).collect()
    }

    #[test]
    fn the_first_extent_is_described_as_far_as_it_goes_or_the_reply_can_tell() {
        use ExtentCount::{Many, One};
        assert_eq!(told(ReplyStyle::Extended, One), [20 * GIB]);
        assert_eq!(told(ReplyStyle::Extended, Many), [20 * GIB, 4096, 44 * GIB - 4096]);
        assert_eq!(told(ReplyStyle::Structured, One), [GIB]);
        assert_eq!(told(ReplyStyle::Structured, Many), [GIB]);
    }
}
