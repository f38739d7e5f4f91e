//! Negotiates with a server: fixed newstyle, blocking, with a limit on everything that the server sends.
//!
//! ```text
//!   greeting ► our flags ► STRUCTURED_REPLY ──granted──► SET_META_CONTEXT base:allocation ─┐
//!                               └──refused: simple replies, no allocation ─────────────────┴► GO with block sizes
//!                                                            GO unknown: EXPORT_NAME, which cannot say why it fails
//! ```
//! Deadlines are the stream's. The caller decides whether the server's offer is sufficient.

use std::io::{self, Read, Write};

use crate::negotiation::{
    BlockSizes, ExportInfo, Info, InfoRequest, MetaContextRequest, OptionReplyHeader, decode_greeting,
    decode_meta_context, encode_option,
};
use crate::{
    EXPORT_NAME_PADDING, GREETING_LENGTH, OPTION_REPLY_HEADER_LENGTH, STRING_LENGTH_MAX, allocation,
    handshake_flag, info, option, option_reply,
};

/// Limit of an option's reply in bytes: the longest string of the protocol, and numbers.
const OPTION_REPLY_LENGTH_MAX: usize = STRING_LENGTH_MAX + 64;
/// Limit of replies to one option: the protocol knows four facts, and the client asks for one context.
const OPTION_REPLIES_MAX: usize = 32;

/// The abilities that a client requests besides the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Simple replies are sufficient.
    SimpleReplies,
    /// Replies in chunks, if the server has them.
    Chunks,
    /// Replies in chunks, and the allocation context, if the server has them.
    ChunksAndAllocation,
}

/// A server's description of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Size of the export in bytes.
    pub size: u64,
    /// Bits of [`crate::transmission_flag`].
    pub flags: u16,
    /// Constraints on requests; `None`: the server sent none.
    pub block_sizes: Option<BlockSizes>,
    /// Whether replies come in chunks.
    pub structured: bool,
    /// The number of the allocation context; `None`: the server has none.
    pub allocation: Option<u32>,
}

/// Why a negotiation failed.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// The connection to the server failed.
    #[error("the connection to the server failed")]
    Stream(#[source] io::Error),
    /// The server breaks the protocol.
    #[error("the server breaks the protocol: {0}")]
    Broken(&'static str),
    /// The server wants TLS.
    #[error("the server wants TLS")]
    TlsRequired,
    /// The server refuses the export.
    #[error("the server refuses: {said}")]
    Refused {
        /// The server's words, as they came, or the meaning of its reply's number.
        said: String,
    },
}

/// Negotiates until requests may be sent. The export's name has at most [`STRING_LENGTH_MAX`] bytes.
///
/// # Errors
/// [`NegotiationError`].
pub fn negotiate(
    stream: &mut (impl Read + Write),
    export: &str,
    wanted: Wanted,
) -> Result<Offer, NegotiationError> {
    let mut talk = Talk { stream, export };
    let padding = talk.greet()?;
    let structured = wanted != Wanted::SimpleReplies && talk.ask_for_structured_replies()?;
    let asks_for_allocation = structured && wanted == Wanted::ChunksAndAllocation;
    let allocation = if asks_for_allocation { talk.ask_for_allocation()? } else { None };
    let (export, block_sizes) = match talk.go()? {
        Some(told) => told,
        None => (talk.export_name(padding)?, None),
    };
    let ExportInfo { size, flags } = export;
    Ok(Offer { size, flags, block_sizes, structured, allocation })
}

struct Talk<'a, S> {
    stream: &'a mut S,
    export: &'a str,
}

/// A reply to an option.
struct Reply {
    header: OptionReplyHeader,
    data: Vec<u8>,
}

impl<S: Read + Write> Talk<'_, S> {
    /// Returns the number of zeroes that end the reply to `EXPORT_NAME`.
    fn greet(&mut self) -> Result<usize, NegotiationError> {
        let greeting: [u8; GREETING_LENGTH] = self.receive()?;
        let flags = decode_greeting(&greeting).map_err(NegotiationError::Broken)?;
        let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        self.send(&u32::from(ours).to_be_bytes())?;
        Ok(if ours & handshake_flag::NO_ZEROES == 0 { EXPORT_NAME_PADDING } else { 0 })
    }

    fn ask_for_structured_replies(&mut self) -> Result<bool, NegotiationError> {
        let reply = self.ask(option::STRUCTURED_REPLY, &[])?;
        match reply.header.kind {
            option_reply::ACK => Ok(true),
            kind if reply.header.is_error() && kind != option_reply::ERR_TLS_REQD => Ok(false),
            _ => Err(reply.refused()),
        }
    }

    /// Returns the number of the allocation context; `None` if the server has none.
    fn ask_for_allocation(&mut self) -> Result<Option<u32>, NegotiationError> {
        let request = MetaContextRequest { export: self.export, queries: vec![allocation::NAME] };
        let mut reply = self.ask(option::SET_META_CONTEXT, &request.encode())?;
        let mut id = None;
        for _ in 0..OPTION_REPLIES_MAX {
            match reply.header.kind {
                option_reply::META_CONTEXT => {
                    let told = decode_meta_context(&reply.data);
                    let (told, name) = told.ok_or(NegotiationError::Broken("a context has no number"))?;
                    if name == allocation::NAME.as_bytes() {
                        id = Some(told);
                    }
                }
                option_reply::ACK => return Ok(id),
                _ if reply.header.is_error() => return Ok(None),
                _ => {
                    let reason = "it answers another question than that for contexts";
                    return Err(NegotiationError::Broken(reason));
                }
            }
            reply = self.receive_reply(option::SET_META_CONTEXT)?;
        }
        Err(NegotiationError::Broken("its list of contexts does not end"))
    }

    /// Chooses the export; `None`: the server does not know this option.
    fn go(&mut self) -> Result<Option<(ExportInfo, Option<BlockSizes>)>, NegotiationError> {
        let mut reply = self.ask(option::GO, &InfoRequest::encode(self.export, &[info::BLOCK_SIZE]))?;
        let (mut export, mut block_sizes) = (None, None);
        for _ in 0..OPTION_REPLIES_MAX {
            match reply.header.kind {
                option_reply::INFO => match Info::decode(&reply.data) {
                    Ok(Info::Export(told)) => export = Some(told),
                    Ok(Info::BlockSizes(sizes)) => block_sizes = Some(sizes),
                    Ok(Info::Other) => {}
                    Err(_) => return Err(NegotiationError::Broken("it describes the export too shortly")),
                },
                option_reply::ACK => {
                    let export = export.ok_or(NegotiationError::Broken("it does not tell the size"))?;
                    return Ok(Some((export, block_sizes)));
                }
                option_reply::ERR_UNSUP => return Ok(None),
                _ => return Err(reply.refused()),
            }
            reply = self.receive_reply(option::GO)?;
        }
        Err(NegotiationError::Broken("its description of the export does not end"))
    }

    fn export_name(&mut self, padding: usize) -> Result<ExportInfo, NegotiationError> {
        self.send(&encode_option(option::EXPORT_NAME, self.export.as_bytes()))?;
        let told: [u8; ExportInfo::LENGTH] = self.receive().map_err(|error| match error {
            NegotiationError::Stream(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
                let said = "there is no such export, as far as this old server can tell".to_owned();
                NegotiationError::Refused { said }
            }
            error => error,
        })?;
        let mut zeroes = [0; EXPORT_NAME_PADDING];
        self.fill(&mut zeroes[..padding])?;
        // The array has the right length.
        ExportInfo::decode(&told).ok_or(NegotiationError::Broken("it does not tell the size"))
    }

    fn ask(&mut self, option: u32, data: &[u8]) -> Result<Reply, NegotiationError> {
        self.send(&encode_option(option, data))?;
        self.receive_reply(option)
    }

    fn receive_reply(&mut self, option: u32) -> Result<Reply, NegotiationError> {
        let header: [u8; OPTION_REPLY_HEADER_LENGTH] = self.receive()?;
        let header = OptionReplyHeader::decode(&header).ok().filter(|header| header.option == option);
        let reason = "it answers another option than the one that was sent";
        let header = header.ok_or(NegotiationError::Broken(reason))?;
        if header.length as usize > OPTION_REPLY_LENGTH_MAX {
            return Err(NegotiationError::Broken("it answers an option at too great length"));
        }
        let mut data = vec![0; header.length as usize];
        self.fill(&mut data)?;
        Ok(Reply { header, data })
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), NegotiationError> {
        self.stream.write_all(bytes).map_err(NegotiationError::Stream)
    }

    fn receive<const N: usize>(&mut self) -> Result<[u8; N], NegotiationError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NegotiationError> {
        self.stream.read_exact(bytes).map_err(NegotiationError::Stream)
    }
}

impl Reply {
    /// Returns the error for this reply.
    fn refused(&self) -> NegotiationError {
        if self.header.kind == option_reply::ERR_TLS_REQD {
            return NegotiationError::TlsRequired;
        }
        if !self.header.is_error() {
            return NegotiationError::Broken("it answers another question than that for the export");
        }
        let mut said = String::from_utf8_lossy(&self.data).into_owned();
        if said.is_empty() {
            said = match self.header.kind {
                option_reply::ERR_UNKNOWN => "there is no such export".to_owned(),
                option_reply::ERR_POLICY => "its policy forbids it".to_owned(),
                kind => format!("error {}", kind & !option_reply::ERROR),
            };
        }
        NegotiationError::Refused { said }
    }
}
