//! The release ticket, printed by a source that has released volumes to a target and cannot reach it.
//!
//! ```text
//!   source, released ──► sterna-ticket-… ──(a person carries it)──► target, prepared: takes over as if by COMMIT
//! ```
//! The ticket replaces the COMMIT message, for one target. It proves nothing by secrets: an administrator who may promote at the
//! target may also force a promotion. It guards against mistakes. A mistyped ticket, or one of another migration, attempt or
//! host, is refused with the reason.

use chronicle::Generation;
use serde::{Deserialize, Serialize};

use crate::identity::{Attempt, HostId, MigrationId, VolumeId};
use crate::journal::{MigrationState, Side, Stage, State};

/// The beginning of every ticket, for the administrator and for searches; the number is the version.
const PREFIX: &str = "sterna-ticket-1-";
/// The digits of a ticket. None of them is mistaken for another when it is read aloud or typed.
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// The longest text that is parsed: room for a thousand volumes.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// A source's statement that it has released volumes to one target, in one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The host that has released the volumes.
    pub source: HostId,
    /// The host that may take the volumes over.
    pub target: HostId,
    /// The migration's number at the source.
    pub migration: MigrationId,
    /// The attempt that was released.
    pub attempt: Attempt,
    /// The generations of the volumes after the release.
    pub generations: Vec<(VolumeId, Generation)>,
}

/// The reason why there is no ticket, or why it is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// The source has not released the volumes, or the handover is complete.
    #[error(
        "the volumes of {migration} are not released: only a migration past its commit point has a ticket"
    )]
    NotReleased {
        /// The migration without a ticket.
        migration: MigrationId,
    },
    /// The text is not a ticket.
    #[error("this is no ticket: it begins with \"{PREFIX}\", and was copied in part or with a typing error")]
    Unreadable,
    /// The ticket is for another host.
    #[error("the ticket is for host {target}, and this is another: promote there")]
    OtherTarget {
        /// The host that the ticket is for.
        target: HostId,
    },
    /// No such migration waits at this host.
    #[error(
        "no migration {migration} from host {source_host} waits here: it was promoted or given up, or never reached this point"
    )]
    NothingWaits {
        /// The migration's number at the source.
        migration: MigrationId,
        /// The host that the volumes come from.
        source_host: HostId,
    },
    /// The ticket is of another attempt than the one that waits here.
    #[error(
        "the ticket is of attempt {ticket}, and attempt {waiting} waits here: use the source's current ticket"
    )]
    OtherAttempt {
        /// The attempt of the ticket.
        ticket: Attempt,
        /// The attempt that waits here.
        waiting: Attempt,
    },
    /// The ticket names other volumes or generations than those that wait here.
    #[error("the ticket names other volumes or generations than those that wait here")]
    OtherVolumes,
}

impl Ticket {
    /// Returns the ticket of an outgoing migration of `host`, from its journal.
    ///
    /// # Errors
    /// [`TicketError::NotReleased`] if the migration is not past its commit point.
    pub fn print(state: &State, host: HostId, migration: MigrationId) -> Result<Self, TicketError> {
        let no_ticket = TicketError::NotReleased { migration };
        let Some(recorded) = state.migrations.get(&migration) else { return Err(no_ticket) };
        let (Side::Outgoing { peer, .. }, Stage::Released(attempt)) = (&recorded.side, &recorded.stage)
        else {
            return Err(no_ticket);
        };
        let generation = |volume| Some((volume, state.moved.get(&volume)?.generation));
        let generations = recorded.volumes.iter().map(|moving| generation(moving.volume)).collect();
        let Some(generations) = generations else { return Err(no_ticket) };
        Ok(Self { source: host, target: *peer, migration, attempt: *attempt, generations })
    }

    /// Finds the migration of `host` that the ticket permits to take over: it is prepared, and waits, in the ticket's attempt.
    ///
    /// # Errors
    /// [`TicketError`]: the ticket does not fit, and nothing may be promoted.
    pub fn redeem<'a>(
        &self,
        state: &'a State,
        host: HostId,
    ) -> Result<(MigrationId, &'a MigrationState), TicketError> {
        if self.target != host {
            return Err(TicketError::OtherTarget { target: self.target });
        }
        let nothing = TicketError::NothingWaits { migration: self.migration, source_host: self.source };
        let Some((id, recorded)) = state.incoming(self.source, self.migration) else { return Err(nothing) };
        let Stage::Prepared(waiting) = recorded.stage else { return Err(nothing) };
        if waiting != self.attempt {
            return Err(TicketError::OtherAttempt { ticket: self.attempt, waiting });
        }
        if crate::recovery::next_of_incoming(recorded) != self.generations {
            return Err(TicketError::OtherVolumes);
        }
        Ok((id, recorded))
    }

    /// Parses the output of `Display`. Ignores white space and the case of letters.
    ///
    /// # Errors
    /// [`TicketError::Unreadable`] if the text is not a complete ticket.
    pub fn parse(text: &str) -> Result<Self, TicketError> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let digits = text.to_ascii_lowercase();
        let digits = digits.strip_prefix(PREFIX).filter(|digits| digits.len() <= TEXT_BYTES_MAX);
        let bytes = digits.and_then(from_digits).ok_or(TicketError::Unreadable)?;
        let (payload, checksum) =
            bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or(TicketError::Unreadable)?;
        if crc32c::crc32c(payload).to_le_bytes() != *checksum {
            return Err(TicketError::Unreadable);
        }
        postcard::from_bytes(payload).map_err(|_| TicketError::Unreadable)
    }
}

const CHECKSUM_BYTES: usize = 4;

impl std::fmt::Display for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut bytes = postcard::to_stdvec(self).map_err(|_| std::fmt::Error)?;
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        write!(f, "{PREFIX}{}", to_digits(&bytes))
    }
}

/// Encodes five bits in a digit; the last digit is padded with zeroes.
fn to_digits(bytes: &[u8]) -> String {
    let mut digits = String::with_capacity(bytes.len() * 8 / 5 + 1);
    let (mut bits, mut count) = (0u32, 0);
    for byte in bytes {
        bits = bits << 8 | u32::from(*byte);
        count += 8;
        while count >= 5 {
            count -= 5;
            digits.push(digit(bits >> count));
        }
        bits &= (1 << count) - 1;
    }
    if count > 0 {
        digits.push(digit(bits << (5 - count)));
    }
    digits
}

fn digit(bits: u32) -> char {
    char::from(DIGITS[(bits & 31) as usize])
}

fn from_digits(digits: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(digits.len() * 5 / 8);
    let (mut bits, mut count) = (0u32, 0);
    for digit in digits.bytes() {
        let value = DIGITS.iter().position(|known| *known == digit)?;
        bits = bits << 5 | u32::try_from(value).ok()?;
        count += 5;
        if count >= 8 {
            count -= 8;
            // The cast keeps eight bits.
            bytes.push((bits >> count & 0xFF) as u8);
        }
        bits &= (1 << count) - 1;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ticket(attempt: u32) -> Ticket {
        Ticket {
            source: HostId([7; 32]),
            target: HostId([0xEE; 32]),
            migration: MigrationId(3),
            attempt: Attempt(attempt),
            generations: vec![(VolumeId([1; 16]), Generation(5)), (VolumeId([2; 16]), Generation(1))],
        }
    }

    #[test]
    fn a_ticket_is_read_as_it_was_printed_however_it_was_copied() {
        let printed = ticket(300).to_string();
        let folded = printed.to_uppercase().replace("8", "8\n ");
        assert_eq!(Ticket::parse(&printed), Ok(ticket(300)));
        assert_eq!(Ticket::parse(&folded), Ok(ticket(300)));
    }

    proptest! {
        #[test]
        fn a_ticket_with_another_digit_is_no_ticket(at in any::<prop::sample::Index>(), digit in 0usize..32) {
            let printed = ticket(1).to_string();
            let at = PREFIX.len() + at.index(printed.len() - PREFIX.len());
            let mut bytes = printed.clone().into_bytes();
            bytes[at] = DIGITS[digit];
            let changed = String::from_utf8(bytes).unwrap();
            let read = Ticket::parse(&changed);
            prop_assert!(changed == printed || read == Err(TicketError::Unreadable) || read == Ok(ticket(1)));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,200}") {
            let _ = Ticket::parse(&text);
            let _ = Ticket::parse(&format!("{PREFIX}{text}"));
        }
    }
}
