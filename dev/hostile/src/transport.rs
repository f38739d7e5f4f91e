//! Feeds another host's bytes: any frames, whole frames with any content, and texts of invitations.

use transport::hostile::hear;
use transport::{GarbledToken, Token};

/// First characters of a token's text.
const TOKEN_PREFIX: &str = "sterna-invitation-1-";

/// Sizes of the pieces in which bytes arrive. The meaning must not depend on them.
const PIECES: [usize; 4] = [1, 21, 4096, 1 << 20];

/// Bytes before each frame's body in an input of whole frames: kind, priority, codec, order, number, length of the body.
const RECIPE_BYTES: usize = 4 + 2 + 2;

/// Feeds the bytes of a connection, whole frames, or the content of a token. The first byte decides.
pub(crate) fn feed_frames(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let piece = PIECES[usize::from(kind / 3 % 4)];
    match kind % 3 {
        0 => check_heard(rest, piece),
        1 => check_heard(&whole_frames(rest), piece),
        _ => check_token(rest),
    }
}

/// Checks that the decoded messages do not depend on the pieces, and are not longer than the bytes, except by compression.
fn check_heard(bytes: &[u8], piece: usize) {
    let (heard, malformed) = hear(bytes, piece);
    assert_eq!(hear(bytes, usize::MAX), (heard, malformed), "in pieces of {piece}");
    let bytes_max = heard.messages * (transport::HEAD_BYTES_MAX + transport::PAYLOAD_BYTES_MAX);
    assert!(heard.messages <= heard.frames && heard.message_bytes <= bytes_max, "{heard:?}");
}

/// Returns frames with correct lengths and checksums, and any other content.
fn whole_frames(mut recipes: &[u8]) -> Vec<u8> {
    let mut frames = Vec::new();
    while let Some((recipe, rest)) = recipes.split_first_chunk::<RECIPE_BYTES>() {
        let [kind, priority, codec, order, number @ ..] = *recipe;
        let [number_low, number_high, length_low, length_high] = number;
        let length = usize::from(u16::from_le_bytes([length_low, length_high]));
        let (body, rest) = rest.split_at(rest.len().min(length));
        let number = u64::from(u16::from_le_bytes([number_low, number_high]));
        // It is at most 64 KiB.
        let length = (body.len() as u32).to_le_bytes();
        let (start, number) = ([kind, priority, codec, order], number.to_le_bytes());
        // The field of the checksum counts as zero in it.
        let blank = [&start[..], &length, &[0; 4], &number].concat();
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&blank), body).to_le_bytes();
        frames.extend([&start[..], &length, &checksum, &number, body].concat());
        recipes = rest;
    }
    frames
}

/// Checks that a text is refused, or is a token that is the same when it is written again, also with a correct checksum.
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
