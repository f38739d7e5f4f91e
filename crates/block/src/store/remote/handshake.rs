//! Negotiates with a server: fixed newstyle, blocking, with a limit on everything that the server sends.
//!
//! ```text
//!   greeting ► our flags ► STRUCTURED_REPLY ──granted──► SET_META_CONTEXT base:allocation ─┐
//!                               └──refused: simple replies, no allocation ─────────────────┴► GO with block sizes
//!                                                            GO unknown: EXPORT_NAME, which cannot say why it fails
//! ```

use std::io::{Read, Write};

use nbd_protocol::{
    EXPORT_NAME_PADDING, GREETING_LENGTH, INIT_MAGIC, NbdUri, OPTION_MAGIC, OPTION_REPLY_HEADER_LENGTH,
    OPTION_REPLY_MAGIC, STRING_LENGTH_MAX, allocation, handshake_flag, info, option, option_reply,
};

use super::error::RemoteError;
use super::terms::{BlockSizes, Offer};

/// Longest accepted reply to an option, in bytes: the longest string of the protocol, and numbers.
const OPTION_REPLY_LENGTH_MAX: usize = STRING_LENGTH_MAX + 64;
/// The limit of replies to one option: the protocol has four pieces of information, and one context is requested.
const OPTION_REPLIES_MAX: usize = 32;

pub(super) fn negotiate(stream: &mut (impl Read + Write), uri: &NbdUri) -> Result<Offer, RemoteError> {
    let mut talk = Talk { stream, uri };
    let padding = talk.greet()?;
    let structured = talk.ask_for_structured_replies()?;
    let allocation = if structured { talk.ask_for_allocation()? } else { None };
    let (size, flags, block_sizes) = match talk.go()? {
        Some(told) => told,
        None => talk.export_name(padding)?,
    };
    Ok(Offer { size, flags, block_sizes, structured, allocation })
}

type Told = (u64, u16, Option<BlockSizes>);

struct Talk<'a, S> {
    stream: &'a mut S,
    uri: &'a NbdUri,
}

struct Reply {
    kind: u32,
    data: Vec<u8>,
}

impl<S: Read + Write> Talk<'_, S> {
    fn greet(&mut self) -> Result<usize, RemoteError> {
        let greeting: [u8; GREETING_LENGTH] = self.receive()?;
        let mut fields = Fields(&greeting);
        if fields.u64() != Some(INIT_MAGIC) {
            return Err(self.broken("it does not greet as an NBD server does"));
        }
        if fields.u64() != Some(OPTION_MAGIC) {
            return Err(self.broken("it speaks the old style only"));
        }
        let flags = fields.u16().unwrap_or(0);
        if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
            return Err(self.broken("it does not know the fixed newstyle"));
        }
        let ours = flags & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        self.send(&u32::from(ours).to_be_bytes())?;
        Ok(if ours & handshake_flag::NO_ZEROES == 0 { EXPORT_NAME_PADDING } else { 0 })
    }

    fn ask_for_structured_replies(&mut self) -> Result<bool, RemoteError> {
        self.send_option(option::STRUCTURED_REPLY, &[])?;
        let reply = self.receive_reply(option::STRUCTURED_REPLY)?;
        match reply.kind {
            option_reply::ACK => Ok(true),
            kind if kind & option_reply::ERROR != 0 && kind != option_reply::ERR_TLS_REQD => Ok(false),
            _ => Err(self.refused(&reply)),
        }
    }

    fn ask_for_allocation(&mut self) -> Result<Option<u32>, RemoteError> {
        let mut data = self.name();
        data.extend_from_slice(&1_u32.to_be_bytes());
        push_string(&mut data, allocation::NAME);
        self.send_option(option::SET_META_CONTEXT, &data)?;
        let mut id = None;
        for _ in 0..OPTION_REPLIES_MAX {
            let reply = self.receive_reply(option::SET_META_CONTEXT)?;
            match reply.kind {
                option_reply::META_CONTEXT => {
                    let mut fields = Fields(&reply.data);
                    let told = fields.u32().ok_or_else(|| self.broken("a context has no number"))?;
                    if fields.0 == allocation::NAME.as_bytes() {
                        id = Some(told);
                    }
                }
                option_reply::ACK => return Ok(id),
                kind if kind & option_reply::ERROR != 0 => return Ok(None),
                _ => return Err(self.broken("it answers another question than that for contexts")),
            }
        }
        Err(self.broken("its list of contexts is too long"))
    }

    /// Returns `None` if the server does not support this option.
    fn go(&mut self) -> Result<Option<Told>, RemoteError> {
        let mut data = self.name();
        data.extend_from_slice(&1_u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.send_option(option::GO, &data)?;
        let (mut export, mut block_sizes) = (None, None);
        for _ in 0..OPTION_REPLIES_MAX {
            let reply = self.receive_reply(option::GO)?;
            match reply.kind {
                option_reply::INFO => match decode_info(&reply.data).map_err(|reason| self.broken(reason))? {
                    Info::Export { size, flags } => export = Some((size, flags)),
                    Info::BlockSizes(sizes) => block_sizes = Some(sizes),
                    Info::Other => {}
                },
                option_reply::ACK => {
                    let (size, flags) = export.ok_or_else(|| self.broken("it does not report the size"))?;
                    return Ok(Some((size, flags, block_sizes)));
                }
                option_reply::ERR_UNSUP => return Ok(None),
                _ => return Err(self.refused(&reply)),
            }
        }
        Err(self.broken("its description of the export is too long"))
    }

    fn export_name(&mut self, padding: usize) -> Result<Told, RemoteError> {
        self.send_option(option::EXPORT_NAME, self.uri.export.as_bytes())?;
        let told: [u8; 10] = self.receive().map_err(|error| match error {
            RemoteError::Unreachable { source, .. } if source.kind() == std::io::ErrorKind::UnexpectedEof => {
                let message = "there is no such export, according to this old server".to_owned();
                RemoteError::Refused { uri: self.uri.to_string(), message }
            }
            error => error,
        })?;
        let mut zeroes = [0; EXPORT_NAME_PADDING];
        self.fill(&mut zeroes[..padding])?;
        let mut fields = Fields(&told);
        // The array has room for both.
        Ok((fields.u64().unwrap_or(0), fields.u16().unwrap_or(0), None))
    }

    fn name(&self) -> Vec<u8> {
        let mut data = Vec::new();
        push_string(&mut data, &self.uri.export);
        data
    }

    fn send_option(&mut self, number: u32, data: &[u8]) -> Result<(), RemoteError> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend_from_slice(&number.to_be_bytes());
        // The name has at most 4,096 bytes, and the rest less than a hundred.
        bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(data);
        self.send(&bytes)
    }

    fn receive_reply(&mut self, option: u32) -> Result<Reply, RemoteError> {
        let header: [u8; OPTION_REPLY_HEADER_LENGTH] = self.receive()?;
        let mut fields = Fields(&header);
        let is_ours = fields.u64() == Some(OPTION_REPLY_MAGIC) && fields.u32() == Some(option);
        let (kind, length) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0) as usize);
        if !is_ours {
            return Err(self.broken("it answers another option than the one that was sent"));
        }
        if length > OPTION_REPLY_LENGTH_MAX {
            return Err(self.broken("its answer to an option is too long"));
        }
        let mut data = vec![0; length];
        self.fill(&mut data)?;
        Ok(Reply { kind, data })
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), RemoteError> {
        let sent = self.stream.write_all(bytes);
        sent.map_err(|source| self.unreachable("negotiate with the server of", source))
    }

    fn receive<const N: usize>(&mut self) -> Result<[u8; N], RemoteError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), RemoteError> {
        let received = self.stream.read_exact(bytes);
        received.map_err(|source| self.unreachable("negotiate with the server of", source))
    }

    fn unreachable(&self, operation: &'static str, source: std::io::Error) -> RemoteError {
        RemoteError::Unreachable { operation, uri: self.uri.to_string(), source }
    }

    fn broken(&self, reason: &'static str) -> RemoteError {
        RemoteError::Protocol { uri: self.uri.to_string(), reason }
    }

    fn refused(&self, reply: &Reply) -> RemoteError {
        let uri = self.uri.to_string();
        if reply.kind == option_reply::ERR_TLS_REQD {
            return RemoteError::Tls { uri };
        }
        if reply.kind & option_reply::ERROR == 0 {
            return self.broken("it answers another question than that for the export");
        }
        let said = String::from_utf8_lossy(&reply.data);
        let mut message = words::clean(&said);
        if message.is_empty() {
            message = match reply.kind {
                option_reply::ERR_UNKNOWN => "there is no such export".to_owned(),
                option_reply::ERR_POLICY => "its policy forbids it".to_owned(),
                kind => format!("error {}", kind & !option_reply::ERROR),
            };
        }
        RemoteError::Refused { uri, message }
    }
}

enum Info {
    Export { size: u64, flags: u16 },
    BlockSizes(BlockSizes),
    Other,
}

fn decode_info(data: &[u8]) -> Result<Info, &'static str> {
    const SHORT: &str = "it describes the export too shortly";
    let mut fields = Fields(data);
    match fields.u16().ok_or(SHORT)? {
        info::EXPORT => {
            Ok(Info::Export { size: fields.u64().ok_or(SHORT)?, flags: fields.u16().ok_or(SHORT)? })
        }
        info::BLOCK_SIZE => Ok(Info::BlockSizes(BlockSizes {
            minimum: fields.u32().ok_or(SHORT)?,
            preferred: fields.u32().ok_or(SHORT)?,
            maximum: fields.u32().ok_or(SHORT)?,
        })),
        _ => Ok(Info::Other),
    }
}

fn push_string(data: &mut Vec<u8>, text: &str) {
    // At most 4,096 bytes: addresses are checked when they are parsed.
    data.extend_from_slice(&(text.len() as u32).to_be_bytes());
    data.extend_from_slice(text.as_bytes());
}

/// Reads big-endian numbers, one after the other; `None` at the end.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*field)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }
}

#[cfg(test)]
mod tests;
