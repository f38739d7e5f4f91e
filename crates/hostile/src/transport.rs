//! What another host says: frames of any form, frames that are whole with anything in them, and texts of invitations.

use transport::hostile::hear;
use transport::{GarbledToken, Token};

/// What a token's text begins with.
const TOKEN_PREFIX: &str = "sterna-invitation-1-";

/// Bytes that come at a time: what was heard does not depend on it.
const PIECES: [usize; 4] = [1, 21, 4096, 1 << 20];

/// Bytes before each frame's body in an input of whole frames: kind, priority, codec, order, number, length of the body.
const RECIPE_BYTES: usize = 4 + 2 + 2;

/// The first byte decides: the rest is what comes over a connection, or whole frames for it, or what a token says.
pub(crate) fn feed_frames(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let piece = PIECES[usize::from(kind / 3 % 4)];
    match kind % 3 {
        0 => check_heard(rest, piece),
        1 => check_heard(&whole_frames(rest), piece),
        _ => check_token(rest),
    }
}

/// Bytes are heard alike however they come, and a message has no more of them than were sent, but for its packing.
fn check_heard(bytes: &[u8], piece: usize) {
    let (heard, malformed) = hear(bytes, piece);
    assert_eq!(hear(bytes, usize::MAX), (heard, malformed), "in pieces of {piece}");
    let bytes_max = heard.messages * (transport::HEAD_BYTES_MAX + transport::PAYLOAD_BYTES_MAX);
    assert!(heard.messages <= heard.frames && heard.message_bytes <= bytes_max, "{heard:?}");
}

/// Frames with the right length and checksum, whatever else is in them.
fn whole_frames(mut recipes: &[u8]) -> Vec<u8> {
    let mut frames = Vec::new();
    while let Some((recipe, rest)) = recipes.split_first_chunk::<RECIPE_BYTES>() {
        let [kind, priority, codec, order, number @ ..] = *recipe;
        let [number_low, number_high, length_low, length_high] = number;
        let length = usize::from(u16::from_le_bytes([length_low, length_high]));
        let (body, rest) = rest.split_at(rest.len().min(length));
        let number = u64::from(u16::from_le_bytes([number_low, number_high]));
        // No more than 64 KiB.
        let length = (body.len() as u32).to_le_bytes();
        let (start, number) = ([kind, priority, codec, order], number.to_le_bytes());
        // Its own field counts as zero in the checksum.
        let blank = [&start[..], &length, &[0; 4], &number].concat();
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&blank), body).to_le_bytes();
        frames.extend([&start[..], &length, &checksum, &number, body].concat());
        recipes = rest;
    }
    frames
}

/// A text is a token that says the same when it is written again, or it is garbled; and so is one whose sum is right.
fn check_token(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        check_text(text);
    }
    let summed = [bytes, &crc32c::crc32c(bytes).to_le_bytes()].concat();
    let digits: String = summed.iter().map(|byte| format!("{byte:02x}")).collect();
    check_text(&format!("{TOKEN_PREFIX}{digits}"));
}

fn check_text(text: &str) {
    let token: Result<Token, GarbledToken> = text.parse();
    if let Ok(token) = token {
        let again = token.to_string().parse::<Token>();
        assert_eq!(again.map(|again| again.to_string()), Ok(token.to_string()));
    }
}
