//! An entrance for tests that choose the bytes of a connection. It decodes frames and assembles messages, without a socket,
//! a session or TLS.
//!
//! ```text
//!   bytes ─► frames, as a reader takes them ─► assembly ─► whole messages, or what was malformed
//! ```
//! Production code does not use it. Sessions, which check the numbers, are not included.

use bytes::BytesMut;

use crate::frame::{self, Assembly, Begun, Control, Frame, Malformed};

/// One message in this many counts as delivered already, so that its bytes are dropped.
const KNOWN_ONE_OF: u64 = 4;

/// The frames and messages that were decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Frames that were whole and in order.
    pub frames: usize,
    /// Messages that were assembled and unpacked.
    pub messages: usize,
    /// Bytes of their heads and payloads.
    pub message_bytes: usize,
}

/// Decodes these bytes as those of one connection, in pieces of at most `piece` bytes, which is not 0.
///
/// Returns the count up to the end of the bytes, or up to the first malformed one with its error.
///
/// # Panics
/// A decoded frame does not survive encoding.
pub fn hear(bytes: &[u8], piece: usize) -> (Heard, Option<Malformed>) {
    let (mut buffer, mut assembly, mut heard) = (BytesMut::new(), Assembly::default(), Heard::default());
    for piece in bytes.chunks(piece) {
        buffer.extend_from_slice(piece);
        let taken = frame::drain(&mut buffer, |frame| take(frame, &mut assembly, &mut heard));
        if let Err(malformed) = taken {
            return (heard, Some(malformed));
        }
    }
    (heard, None)
}

fn take(frame: Frame<'_>, assembly: &mut Assembly, heard: &mut Heard) -> Result<(), Malformed> {
    let whole = match frame {
        Frame::First { start, head, part } => {
            let is_known = start.number.is_multiple_of(KNOWN_ONE_OF);
            assembly.first(start, head, part, if is_known { Begun::Skip } else { Begun::Keep })?
        }
        Frame::Next { number, part } => assembly.next(number, part)?,
        Frame::Control(control) => {
            check_control(&control);
            None
        }
        Frame::Greeting(_) => None,
    };
    heard.frames += 1;
    if let Some((start, message)) = whole {
        assert_eq!((message.head().len(), message.payload().len()), (start.head_bytes, start.payload_bytes));
        heard.messages += 1;
        heard.message_bytes += message.len();
    }
    Ok(())
}

fn check_control(control: &Control) {
    let mut bytes = BytesMut::new();
    frame::encode_control(control, &mut bytes);
    let again = frame::decode(&bytes);
    assert!(
        matches!(&again, Ok(Some((Frame::Control(again), _))) if again == control),
        "{control:?}: {again:?}"
    );
}
