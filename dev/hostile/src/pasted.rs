//! Feeds the parsers of pasted texts: access tokens and tickets.

use migration::ticket::Ticket;
use transport::pinned::AccessToken;

/// First characters of the two kinds of texts.
const ACCESS_PREFIX: &str = "sterna-access-1-";
const TICKET_PREFIX: &str = "sterna-ticket-1-";

/// Feeds a text, or the content of a token or ticket with a correct checksum. The first byte decides.
pub(crate) fn feed(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    match kind % 3 {
        0 => {
            if let Ok(text) = std::str::from_utf8(rest) {
                check_access(text);
                check_ticket(text);
                check_access(&format!("{ACCESS_PREFIX}{text}"));
                check_ticket(&format!("{TICKET_PREFIX}{text}"));
            }
        }
        1 => check_access(&format!("{ACCESS_PREFIX}{}", with_sum(rest))),
        _ => check_ticket(&format!("{TICKET_PREFIX}{}", with_sum(rest))),
    }
}

/// Checks that a text is refused, or is a token that is the same when it is written again, and whose
/// debug output hides its secret.
fn check_access(text: &str) {
    let Ok(token) = text.parse::<AccessToken>() else { return };
    assert_eq!(token.to_string().parse().as_ref(), Ok(&token));
    let shown = format!("{token:?}");
    let secret: String = token.secret.iter().map(|byte| format!("{byte:02x}")).collect();
    // A secret that equals the daemon's public key is no secret.
    assert!(!shown.contains(&secret) || token.secret == token.server.0, "{shown}");
}

/// Checks that a text is refused, or is a ticket that is the same when it is written again.
fn check_ticket(text: &str) {
    let Ok(ticket) = Ticket::parse(text) else { return };
    assert_eq!(Ticket::parse(&ticket.to_string()), Ok(ticket));
}

/// Returns the bytes as digits, with their checksum.
fn with_sum(bytes: &[u8]) -> String {
    let sum = crc32c::crc32c(bytes).to_le_bytes();
    bytes.iter().chain(&sum).map(|byte| format!("{byte:02x}")).collect()
}
