//! Carries one request out on a device.

use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Durability, IoError};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::export::ReplyStyle;
use crate::nbd::reply::{Body, Reply, encode_extents};
use crate::nbd::transmission::{Command, Effort, ExtentCount};

/// Bytes that a device is asked to describe for one request: a store may have to look at every extent of it, and a
/// shorter answer than asked for is always allowed. A multiple of every alignment.
const DESCRIBE_LENGTH_MAX: u64 = 1 << 30;
/// The same for clients that can be told of more than 4 GiB at a time, and ask in order to see all of a disk.
const DESCRIBE_LENGTH_EXTENDED_MAX: u64 = 64 << 30;
/// The same if only the first extent is wanted: most of what lies behind it would be looked up in vain.
const DESCRIBE_ONE_LENGTH_MAX: u64 = 128 << 20;

/// Carries out `command` and says what the client is to be told.
///
/// `buffer` is the data of a write, or what a read fills. Dropping the future leaves it open whether the request is
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

/// What a client is told of a failure. `ENOTSUP` means to it that zeroes would have to be written, and nothing else.
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
            let limit = match (count, style) {
                (ExtentCount::One, _) => DESCRIBE_ONE_LENGTH_MAX,
                (ExtentCount::Many, ReplyStyle::Extended) => DESCRIBE_LENGTH_EXTENDED_MAX,
                (ExtentCount::Many, _) => DESCRIBE_LENGTH_MAX,
            };
            let range = ByteRange::new(range.offset, range.length.min(limit));
            let extents = device.allocation(range).await?;
            return Ok(Body::Extents(Buffer::copy_of(&encode_extents(range, &extents, count, style))));
        }
        // Announced reads gain nothing: stores bypass the page cache. A disconnect is the connection's own affair.
        Command::Cache(_) | Command::Disconnect => {}
    }
    Ok(Body::Done)
}
