//! A door for tests that choose what comes over a connection: its frames and what is put together of them, without a
//! socket, a session or TLS.
//!
//! ```text
//!   bytes ─► frames, as a reader takes them ─► assembly ─► whole messages, or what was malformed
//! ```
//! The product does not come through here. What numbers mean is judged by sessions, which are not behind it.

use bytes::BytesMut;

use crate::frame::{self, Assembly, Begun, Control, Frame, Malformed};

/// Of so many messages one is known already, so that its bytes only pass by.
const KNOWN_ONE_OF: u64 = 4;

/// What was heard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Frames that were whole and in order.
    pub frames: usize,
    /// Messages that were put together and unpacked.
    pub messages: usize,
    /// Bytes of heads and payloads of these.
    pub message_bytes: usize,
}

/// Hears these bytes on one connection, at most `piece` of them at a time, which is not 0.
///
/// Returns what was heard until the bytes ended, or until they were malformed, and then in which way.
///
/// # Panics
/// If what was decoded does not survive encoding.
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

/// A control frame says the same when it is said again.
fn check_control(control: &Control) {
    let mut bytes = BytesMut::new();
    frame::encode_control(control, &mut bytes);
    let again = frame::decode(&bytes);
    assert!(
        matches!(&again, Ok(Some((Frame::Control(again), _))) if again == control),
        "{control:?}: {again:?}"
    );
}
