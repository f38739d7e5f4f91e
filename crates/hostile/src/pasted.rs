//! What people paste who may have copied it badly, or made it up: invitations to use a daemon's API, and tickets.

use migration::ticket::Ticket;
use transport::pinned::AccessToken;

/// What texts of the two kinds begin with.
const ACCESS_PREFIX: &str = "sterna-access-1-";
const TICKET_PREFIX: &str = "sterna-ticket-1-";

/// The first byte decides: the rest is a text, or what the digits of an invitation or of a ticket hold, with a sum that is right.
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

/// A text is an invitation that says the same when it is written again and shows nobody its secret, or it is garbled.
fn check_access(text: &str) {
    let Ok(token) = text.parse::<AccessToken>() else { return };
    assert_eq!(token.to_string().parse().as_ref(), Ok(&token));
    let shown = format!("{token:?}");
    let secret: String = token.secret.iter().map(|byte| format!("{byte:02x}")).collect();
    // One of the daemon's key, which is shown, is none.
    assert!(!shown.contains(&secret) || token.secret == token.server.0, "{shown}");
}

/// A text is a ticket that says the same when it is written again, or it is none.
fn check_ticket(text: &str) {
    let Ok(ticket) = Ticket::parse(text) else { return };
    assert_eq!(Ticket::parse(&ticket.to_string()), Ok(ticket));
}

/// As digits, with a sum behind them.
fn with_sum(bytes: &[u8]) -> String {
    let sum = crc32c::crc32c(bytes).to_le_bytes();
    bytes.iter().chain(&sum).map(|byte| format!("{byte:02x}")).collect()
}
