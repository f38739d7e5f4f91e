//! Connects to a server and negotiates, with a deadline on every read.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nbd_protocol::client::{self, NegotiationError, Wanted};
use nbd_protocol::{PAYLOAD_LENGTH_MAX, STRING_LENGTH_MAX, transmission_flag};

use super::{Address, ClientError, Export, ReplyStyle};

/// How long the server may take for each message of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects, negotiates and selects the export.
pub(super) fn connect(address: &Address, style: ReplyStyle) -> Result<(UnixStream, Export), ClientError> {
    let name = address.export();
    if name.len() > STRING_LENGTH_MAX {
        let reason = "the export's name is too long";
        return Err(ClientError::Address { address: name.to_owned(), reason });
    }
    let mut stream = UnixStream::connect(address.socket())
        .map_err(|source| ClientError::Connect { socket: address.socket().to_owned(), source })?;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(ClientError::Transfer)?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(ClientError::Transfer)?;
    let wanted = match style {
        ReplyStyle::Simple => Wanted::SimpleReplies,
        ReplyStyle::Structured => Wanted::Chunks,
    };
    let offer = client::negotiate(&mut stream, name, wanted).map_err(|error| match error {
        NegotiationError::Stream(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            ClientError::Closed
        }
        NegotiationError::Stream(error) => ClientError::Transfer(error),
        NegotiationError::Broken(reason) => ClientError::Protocol(reason),
        NegotiationError::TlsRequired => ClientError::Protocol("the server wants TLS"),
        NegotiationError::Refused { said } => ClientError::Refused { export: name.to_owned(), message: said },
    })?;
    Ok((stream, export(&offer)?))
}

/// Reads what the server offers.
fn export(offer: &client::Offer) -> Result<Export, ClientError> {
    let flag = |bit: u16| offer.flags & bit != 0;
    let sizes = offer.block_sizes;
    if let Some(sizes) = sizes
        && (!sizes.minimum.is_power_of_two()
            || sizes.minimum > sizes.preferred
            || sizes.maximum < sizes.preferred)
    {
        return Err(ClientError::Protocol("the block sizes contradict each other"));
    }
    Ok(Export {
        size: offer.size,
        read_only: flag(transmission_flag::READ_ONLY),
        flush: flag(transmission_flag::SEND_FLUSH),
        fua: flag(transmission_flag::SEND_FUA),
        trim: flag(transmission_flag::SEND_TRIM),
        write_zeroes: flag(transmission_flag::SEND_WRITE_ZEROES),
        block_size_min: sizes.map_or(1, |sizes| sizes.minimum),
        block_size_preferred: sizes.map_or(4096, |sizes| sizes.preferred),
        payload_bytes_max: sizes.map_or(PAYLOAD_LENGTH_MAX, |sizes| sizes.maximum.min(PAYLOAD_LENGTH_MAX)),
    })
}
