//! Negotiates with a server, and says of which export it failed.

use std::io::{Read, Write};

use nbd_protocol::NbdUri;
use nbd_protocol::client::{self, NegotiationError, Offer, Wanted};

use super::error::RemoteError;

/// Negotiates until requests may be sent.
pub(super) fn negotiate(stream: &mut (impl Read + Write), uri: &NbdUri) -> Result<Offer, RemoteError> {
    client::negotiate(stream, &uri.export, Wanted::ChunksAndAllocation).map_err(|error| {
        let uri = uri.to_string();
        match error {
            NegotiationError::Stream(source) => {
                RemoteError::Unreachable { operation: "negotiate with the server of", uri, source }
            }
            NegotiationError::Broken(reason) => RemoteError::Protocol { uri, reason },
            NegotiationError::TlsRequired => RemoteError::Tls { uri },
            NegotiationError::Refused { said } => RemoteError::Refused { uri, message: words::clean(&said) },
        }
    })
}

#[cfg(test)]
mod tests;
