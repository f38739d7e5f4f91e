//! The state with which one server continues a connection of another: the socket, the agreement, and the unread bytes.
//!
//! ```text
//!   one server   ── requests answered ──┤ cut ├── unread: received, and not accepted ──┤── in the socket ──►
//!   the next one                                └────────────── continues here ──────────────────────►
//! ```
//! At the cut no request is in flight and no part of a reply is unsent. The caller transfers this state. No encrypted connection
//! is passed on, for the keys of a TLS session stay where they are.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use crate::nbd::client::Client;
use crate::nbd::export::{Export, Exports, Offer};
use crate::nbd::negotiation::{Agreement, AllocationContext};
use crate::nbd::protocol::transmission_flag;

/// A connection that is left open for another server.
pub struct PassedConnection {
    /// The socket of the connection.
    pub socket: OwnedFd,
    /// The state of the session; `None`: nothing has been exchanged on it.
    pub session: Option<PassedSession>,
}

impl PassedConnection {
    /// Returns whether its client is a process of this host that came by a unix socket.
    pub fn is_local(&self) -> bool {
        Client::of(&self.socket) == Client::Local
    }
}

/// The state of a session that is passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedSession {
    /// Name of the export that its client uses.
    pub export: String,
    /// The description of it that the client got.
    pub offer: Offer,
    /// Whether the client may request `base:allocation`.
    pub allocation: AllocationContext,
    /// Bytes of the client that were not accepted; they begin with a request.
    pub unread: Vec<u8>,
    /// Requests that were answered since the connection was made.
    pub requests_answered: u64,
}

/// Why a client has to connect again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotGoOn {
    /// There is no export of that name.
    #[error("its export is not served")]
    NoExport,
    /// The client could request something that the export does not offer.
    #[error("the export offers less than was negotiated, or in another way")]
    OffersLess,
    /// The client could request bytes beyond the end.
    #[error("the export is smaller than was negotiated")]
    Smaller,
}

impl PassedSession {
    pub(super) fn of(agreement: &Agreement, unread: Vec<u8>, requests_answered: u64) -> Self {
        let Agreement { export, offer, allocation } = agreement;
        let (offer, allocation) = (*offer, *allocation);
        Self { export: export.name.clone(), offer, allocation, unread, requests_answered }
    }

    /// Repeats the agreement with the client, and returns the bytes that come first. Fails with [`CannotGoOn`] if the export
    /// differs from the client's description of it.
    pub(super) fn agree_again(self, exports: &Exports) -> Result<(Agreement, Vec<u8>), CannotGoOn> {
        let named = |export: &&Rc<Export>| export.name == self.export;
        let export = exports.iter().find(named).ok_or(CannotGoOn::NoExport)?;
        let offer = export.offer(self.offer.replies);
        let with_contexts = self.offer.has(transmission_flag::BLOCK_STATUS_PAYLOAD);
        let offer = if with_contexts { offer.with_status_payload() } else { offer };
        if offer.size < self.offer.size {
            return Err(CannotGoOn::Smaller);
        }
        if !keeps(&offer, &self.offer) {
            return Err(CannotGoOn::OffersLess);
        }
        let agreement =
            Agreement { export: Rc::clone(export), offer: self.offer, allocation: self.allocation };
        Ok((agreement, self.unread))
    }
}

/// Returns whether `present` allows everything that `promised` does.
fn keeps(present: &Offer, promised: &Offer) -> bool {
    // N.B. A client of a read-only export caches accordingly: the export must not become writable.
    present.has(promised.flags)
        && present.has(transmission_flag::READ_ONLY) == promised.has(transmission_flag::READ_ONLY)
        && present.block_size_minimum <= promised.block_size_minimum
        && present.block_size_maximum >= promised.block_size_maximum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::export::{Access, ReplyStyle};
    use crate::nbd::test_device::{TestDevice, export};

    fn session(exports: &Exports, replies: ReplyStyle) -> PassedSession {
        let export = exports.find("disk").unwrap();
        let (offer, allocation) = (export.offer(replies), AllocationContext::Chosen);
        PassedSession { export: "disk".to_owned(), offer, allocation, unread: vec![7], requests_answered: 3 }
    }

    #[test]
    fn a_client_goes_on_with_what_it_was_told_and_may_find_a_larger_disk() {
        let device = TestDevice::new(1 << 20);
        let exports = Exports::new([export("disk", &device)]);
        for replies in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended] {
            let passed = session(&exports, replies);
            let larger = TestDevice::new(2 << 20);
            let exports = Exports::new([export("disk", &larger)]);
            let (agreement, unread) = passed.clone().agree_again(&exports).unwrap();
            assert_eq!((agreement.offer, unread), (passed.offer, vec![7]));
            assert_eq!(agreement.allocation, AllocationContext::Chosen);
        }
    }

    #[test]
    fn a_client_that_was_told_more_than_is_there_connects_again() {
        let device = TestDevice::new(1 << 20);
        let exports = Exports::new([export("disk", &device)]);
        let passed = session(&exports, ReplyStyle::Structured);
        let refused = |exports: &Exports, passed: &PassedSession| {
            passed.clone().agree_again(exports).err().expect("it is refused")
        };
        let smaller = TestDevice::new(1 << 19);
        assert_eq!(refused(&Exports::new([export("disk", &smaller)]), &passed), CannotGoOn::Smaller);
        assert_eq!(refused(&Exports::new([export("other", &device)]), &passed), CannotGoOn::NoExport);
        let read_only = Export { access: Access::ReadOnly, ..export("disk", &device) };
        let exports_read_only = Exports::new([read_only]);
        assert_eq!(refused(&exports_read_only, &passed), CannotGoOn::OffersLess);
        let passed_read_only = session(&exports_read_only, ReplyStyle::Structured);
        assert_eq!(refused(&exports, &passed_read_only), CannotGoOn::OffersLess);
        let no_discards = TestDevice::new(1 << 20);
        no_discards.geometry.set(block::Geometry { discards: false, ..no_discards.geometry.get() });
        assert_eq!(refused(&Exports::new([export("disk", &no_discards)]), &passed), CannotGoOn::OffersLess);
    }
}
