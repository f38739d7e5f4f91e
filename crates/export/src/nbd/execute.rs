//! Carries one request out on a device.

use std::rc::Rc;

use block::{BlockDevice, Buffer, ByteRange, Durability, IoError};

use crate::nbd::error_code::ErrorCode;
use crate::nbd::reply::{Body, Reply, encode_extents};
use crate::nbd::transmission::{Command, ExtentCount};

/// Bytes that a device is asked to describe for one request: a store may have to look at every extent of it, and a
/// shorter answer than asked for is always allowed. A multiple of every alignment.
const DESCRIBE_LENGTH_MAX: u64 = 1 << 30;
/// The same if only the first extent is wanted: most of what lies behind it would be looked up in vain.
const DESCRIBE_ONE_LENGTH_MAX: u64 = 128 << 20;

/// Carries out `command` and says what the client is to be told.
///
/// `buffer` is the data of a write, or what a read fills. Dropping the future leaves it open whether the request is
/// carried out, as [`BlockDevice`] has it.
pub(super) async fn execute(
    device: Rc<dyn BlockDevice>,
    cookie: u64,
    command: Command,
    buffer: Option<Buffer>,
) -> Reply {
    let reserved = command.payload_length();
    let body = match carry_out(&*device, command, buffer).await {
        Ok(body) => body,
        Err(error) => {
            tracing::debug!(?command, %error, "request failed");
            let code = ErrorCode::from(error);
            Body::Failed { code, message: code.message() }
        }
    };
    Reply { cookie, reserved, body }
}

async fn carry_out(
    device: &dyn BlockDevice,
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
        Command::WriteZeroes(range, mode, durability) => device.write_zeroes(range, mode, durability).await?,
        Command::Describe(range, count) => {
            let limit = match count {
                ExtentCount::One => DESCRIBE_ONE_LENGTH_MAX,
                ExtentCount::Many => DESCRIBE_LENGTH_MAX,
            };
            let range = ByteRange::new(range.offset, range.length.min(limit));
            let extents = device.allocation(range).await?;
            return Ok(Body::Extents(Buffer::copy_of(&encode_extents(range, &extents, count))));
        }
        // Announced reads gain nothing: stores bypass the page cache. A disconnect is the connection's own affair.
        Command::Cache(_) | Command::Disconnect => {}
    }
    Ok(Body::Done)
}
