//! The messages of the fixed newstyle negotiation: the greeting, options, and replies to options.
//!
//! ```text
//!   server ── greeting ──────────────────────────────────────────► client
//!          ◄───────────────────────── flags ─ option · option · … ─
//!          ── reply · reply · … (information, contexts, an end) ──►
//! ```
//! This file holds both directions of each message. Other files decide what is offered, granted or refused.

use crate::fields::Fields;
use crate::{
    EXPORT_NAME_PADDING, GREETING_LENGTH, INIT_MAGIC, OPTION_HEADER_LENGTH, OPTION_MAGIC,
    OPTION_REPLY_HEADER_LENGTH, OPTION_REPLY_MAGIC, handshake_flag, info, option as number, option_reply,
};

/// The header before an option's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Number of the option.
    pub option: u32,
    /// Length of its data in bytes; not checked yet.
    pub length: u32,
}

/// An option, decoded. Text is borrowed from the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionRequest<'a> {
    /// Serve this export; there is no error reply.
    ExportName(&'a str),
    /// End the session without an export.
    Abort,
    /// List the exports of the server.
    List,
    /// Begin TLS on this connection.
    StartTls,
    /// Describe an export without serving it.
    Info(InfoRequest<'a>),
    /// Describe an export and serve it.
    Go(InfoRequest<'a>),
    /// Use replies in chunks.
    StructuredReply,
    /// List the contexts that match the queries.
    ListMetaContext(MetaContextRequest<'a>),
    /// Choose the contexts that match the queries.
    SetMetaContext(MetaContextRequest<'a>),
    /// Use extended headers for requests and replies.
    ExtendedHeaders,
    /// An option that this server does not know.
    Unknown,
}

/// The facts that a client requests, and the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// The name of the export.
    pub name: &'a str,
    /// Big-endian numbers of facts, two bytes each.
    facts: &'a [u8],
}

impl InfoRequest<'_> {
    /// Returns whether the client asked for this fact.
    pub fn wants(&self, fact: u16) -> bool {
        self.facts.chunks_exact(2).any(|bytes| bytes == fact.to_be_bytes())
    }

    /// Encodes the data of `INFO` and of `GO`. A name has at most [`crate::STRING_LENGTH_MAX`] bytes.
    pub fn encode(name: &str, facts: &[u16]) -> Vec<u8> {
        let mut data = Vec::new();
        push_text(&mut data, name);
        data.extend_from_slice(&(facts.len() as u16).to_be_bytes());
        facts.iter().for_each(|fact| data.extend_from_slice(&fact.to_be_bytes()));
        data
    }
}

/// The contexts that a client looks for, and the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// The name of the export.
    pub export: &'a str,
    /// Names or wildcards; at most one for every four bytes of the option's data.
    pub queries: Vec<&'a str>,
}

impl MetaContextRequest<'_> {
    /// Encodes the data of `LIST_META_CONTEXT` and of `SET_META_CONTEXT`.
    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        push_text(&mut data, self.export);
        data.extend_from_slice(&(self.queries.len() as u32).to_be_bytes());
        self.queries.iter().for_each(|query| push_text(&mut data, query));
        data
    }
}

/// The error for a message of the wrong form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message of the negotiation has another form than the protocol's")]
pub struct Malformed;

impl OptionHeader {
    /// Decodes a header; `None` if there are not enough bytes yet.
    ///
    /// # Errors
    /// The number that was found in place of [`OPTION_MAGIC`].
    pub fn decode(input: &[u8]) -> Result<Option<Self>, u64> {
        if input.len() < OPTION_HEADER_LENGTH {
            return Ok(None);
        }
        let mut fields = Fields(input);
        let (Some(magic), Some(option), Some(length)) = (fields.u64(), fields.u32(), fields.u32()) else {
            return Ok(None);
        };
        if magic == OPTION_MAGIC { Ok(Some(Self { option, length })) } else { Err(magic) }
    }
}

/// Encodes an option with its data.
pub fn encode_option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    // A name of at most 4,096 bytes, and less than a hundred more.
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// Decodes an option with all its data.
///
/// # Errors
/// [`Malformed`] if the data is shorter or longer than its own fields say, or text is not UTF-8.
pub fn decode_option(option: u32, data: &[u8]) -> Result<OptionRequest<'_>, Malformed> {
    let mut fields = Fields(data);
    let request = match option {
        number::EXPORT_NAME => OptionRequest::ExportName(fields.rest_as_text().ok_or(Malformed)?),
        number::ABORT => {
            // The protocol says that its data is ignored.
            fields = Fields(&[]);
            OptionRequest::Abort
        }
        number::LIST => OptionRequest::List,
        number::STARTTLS => OptionRequest::StartTls,
        number::INFO => OptionRequest::Info(decode_info_request(&mut fields).ok_or(Malformed)?),
        number::GO => OptionRequest::Go(decode_info_request(&mut fields).ok_or(Malformed)?),
        number::STRUCTURED_REPLY => OptionRequest::StructuredReply,
        number::LIST_META_CONTEXT => {
            OptionRequest::ListMetaContext(decode_meta_context_request(&mut fields).ok_or(Malformed)?)
        }
        number::SET_META_CONTEXT => {
            OptionRequest::SetMetaContext(decode_meta_context_request(&mut fields).ok_or(Malformed)?)
        }
        number::EXTENDED_HEADERS => OptionRequest::ExtendedHeaders,
        _ => return Ok(OptionRequest::Unknown),
    };
    if fields.0.is_empty() { Ok(request) } else { Err(Malformed) }
}

fn decode_info_request<'a>(fields: &mut Fields<'a>) -> Option<InfoRequest<'a>> {
    let name = fields.text()?;
    let count = fields.u16()?;
    let facts = fields.bytes(usize::from(count) * 2)?;
    Some(InfoRequest { name, facts })
}

fn decode_meta_context_request<'a>(fields: &mut Fields<'a>) -> Option<MetaContextRequest<'a>> {
    let export = fields.text()?;
    let count = fields.u32()? as usize;
    // Each query takes four bytes at least, so the data at hand bounds what a hostile count can reserve.
    if count > fields.0.len() / 4 {
        return None;
    }
    let mut queries = Vec::with_capacity(count);
    for _ in 0..count {
        queries.push(fields.text()?);
    }
    Some(MetaContextRequest { export, queries })
}

fn push_text(data: &mut Vec<u8>, text: &str) {
    data.extend_from_slice(&(text.len() as u32).to_be_bytes());
    data.extend_from_slice(text.as_bytes());
}

/// Appends the server's first message.
pub fn encode_greeting(output: &mut Vec<u8>) {
    output.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    output.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    output.extend_from_slice(&(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes());
}

/// Decodes the server's first message, and returns its flags.
///
/// # Errors
/// A description of the wrong field.
pub fn decode_greeting(greeting: &[u8; GREETING_LENGTH]) -> Result<u16, &'static str> {
    let mut fields = Fields(greeting);
    if fields.u64() != Some(INIT_MAGIC) {
        return Err("it does not greet as an NBD server does");
    }
    if fields.u64() != Some(OPTION_MAGIC) {
        return Err("it speaks the old style only");
    }
    let flags = fields.u16().unwrap_or(0);
    if flags & handshake_flag::FIXED_NEWSTYLE == 0 {
        return Err("it does not know the fixed newstyle");
    }
    Ok(flags)
}

/// Whether the reply to `EXPORT_NAME` ends in reserved zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// The reply ends in zeroes.
    Sent,
    /// Both sides have agreed to omit them.
    Left,
}

/// Size and transmission flags of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size of the export in bytes.
    pub size: u64,
    /// Bits of [`crate::transmission_flag`].
    pub flags: u16,
}

impl ExportInfo {
    /// Length of the encoding in bytes.
    pub const LENGTH: usize = 10;

    /// Appends the reply to `EXPORT_NAME`, which alone has no header.
    pub fn encode(&self, padding: Padding, output: &mut Vec<u8>) {
        output.extend_from_slice(&self.size.to_be_bytes());
        output.extend_from_slice(&self.flags.to_be_bytes());
        if padding == Padding::Sent {
            output.extend_from_slice(&[0; EXPORT_NAME_PADDING]);
        }
    }

    /// Decodes what [`Self::encode`] begins with; `None` if it is too short.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        Some(Self { size: fields.u64()?, flags: fields.u16()? })
    }
}

/// The lengths that a server accepts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Requests must be multiples of this.
    pub minimum: u32,
    /// Requests that are multiples of this need no read-modify-write.
    pub preferred: u32,
    /// Limit of a read or write.
    pub maximum: u32,
}

/// One fact about an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info {
    /// Size and transmission flags.
    Export(ExportInfo),
    /// The lengths that the server accepts.
    BlockSizes(BlockSizes),
    /// A name, a description, or an unknown fact.
    Other,
}

impl Info {
    /// Decodes the data of a reply of the kind `INFO`.
    ///
    /// # Errors
    /// [`Malformed`] if it is too short.
    pub fn decode(data: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(data);
        match fields.u16().ok_or(Malformed)? {
            info::EXPORT => ExportInfo::decode(fields.0).map(Self::Export).ok_or(Malformed),
            info::BLOCK_SIZE => {
                let mut number = || fields.u32().ok_or(Malformed);
                let (minimum, preferred, maximum) = (number()?, number()?, number()?);
                Ok(Self::BlockSizes(BlockSizes { minimum, preferred, maximum }))
            }
            _ => Ok(Self::Other),
        }
    }
}

/// Decodes the data of a reply of the kind `META_CONTEXT`: the context's number and name; `None` if it is too short.
pub fn decode_meta_context(data: &[u8]) -> Option<(u32, &[u8])> {
    let mut fields = Fields(data);
    Some((fields.u32()?, fields.0))
}

/// The header before the data of an option's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// Number of the answered option.
    pub option: u32,
    /// A number of [`option_reply`].
    pub kind: u32,
    /// Length of the data in bytes; not checked yet.
    pub length: u32,
}

impl OptionReplyHeader {
    /// Decodes the header of an option's reply.
    ///
    /// # Errors
    /// [`Malformed`] if it does not begin with the magic number of replies.
    pub fn decode(bytes: &[u8; OPTION_REPLY_HEADER_LENGTH]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        if fields.u64() != Some(OPTION_REPLY_MAGIC) {
            return Err(Malformed);
        }
        let mut number = || fields.u32().ok_or(Malformed);
        Ok(Self { option: number()?, kind: number()?, length: number()? })
    }

    /// Returns whether the option is refused.
    pub fn is_error(&self) -> bool {
        self.kind & option_reply::ERROR != 0
    }
}

/// Appends replies to one option.
pub struct OptionReplies<'a> {
    output: &'a mut Vec<u8>,
    option: u32,
}

impl<'a> OptionReplies<'a> {
    /// Returns a writer that appends replies to `option` to `output`.
    pub fn new(output: &'a mut Vec<u8>, option: u32) -> Self {
        Self { output, option }
    }

    /// Appends a reply whose data is `parts`, one after the other.
    pub fn reply(&mut self, kind: u32, parts: &[&[u8]]) {
        // Parts are numbers and strings of at most `STRING_LENGTH_MAX` bytes.
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.output.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.output.extend_from_slice(&self.option.to_be_bytes());
        self.output.extend_from_slice(&kind.to_be_bytes());
        self.output.extend_from_slice(&(length as u32).to_be_bytes());
        for part in parts {
            self.output.extend_from_slice(part);
        }
    }

    /// Appends that the option is granted, or that the list ends.
    pub fn acknowledge(&mut self) {
        self.reply(option_reply::ACK, &[]);
    }

    /// Appends one export of a list.
    pub fn server(&mut self, name: &str, description: &str) {
        let length = (name.len() as u32).to_be_bytes();
        self.reply(option_reply::SERVER, &[&length, name.as_bytes(), description.as_bytes()]);
    }

    /// Appends size and transmission flags.
    pub fn info_export(&mut self, export: ExportInfo) {
        let (size, flags) = (export.size.to_be_bytes(), export.flags.to_be_bytes());
        self.reply(option_reply::INFO, &[&info::EXPORT.to_be_bytes(), &size, &flags]);
    }

    /// Appends a name or a description.
    pub fn info_text(&mut self, fact: u16, text: &str) {
        self.reply(option_reply::INFO, &[&fact.to_be_bytes(), text.as_bytes()]);
    }

    /// Appends block size constraints.
    pub fn info_block_sizes(&mut self, sizes: BlockSizes) {
        let BlockSizes { minimum, preferred, maximum } = sizes;
        let [minimum, preferred, maximum] = [minimum, preferred, maximum].map(u32::to_be_bytes);
        self.reply(option_reply::INFO, &[&info::BLOCK_SIZE.to_be_bytes(), &minimum, &preferred, &maximum]);
    }

    /// Appends one metadata context.
    pub fn meta_context(&mut self, id: u32, name: &str) {
        self.reply(option_reply::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
    }
}

#[cfg(test)]
mod tests;
