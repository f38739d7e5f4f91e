//! Decodes the options of the negotiation.

use super::Violation;
use crate::nbd::protocol::{OPTION_HEADER_LENGTH, OPTION_MAGIC, STRING_LENGTH_MAX, option as number};

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
    /// End the session at once.
    Abort,
    /// List all the exports.
    List,
    /// Begin TLS on the connection.
    StartTls,
    /// Describe an export only.
    Info(InfoRequest<'a>),
    /// Describe an export and serve it.
    Go(InfoRequest<'a>),
    /// Reply in structured chunks.
    StructuredReply,
    /// List the contexts that match.
    ListMetaContext(MetaContextRequest<'a>),
    /// Choose the contexts that match.
    SetMetaContext(MetaContextRequest<'a>),
    /// Use extended headers in both directions.
    ExtendedHeaders,
    /// The option is not known here.
    Unknown,
}

/// The facts that a client requests about an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Name of the export.
    pub name: &'a str,
    /// Big-endian numbers of facts, two bytes each.
    facts: &'a [u8],
}

impl InfoRequest<'_> {
    /// Returns whether the client requested this fact.
    pub fn wants(&self, fact: u16) -> bool {
        self.facts.chunks_exact(2).any(|bytes| bytes == fact.to_be_bytes())
    }
}

/// The contexts that a client requests for an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetaContextRequest<'a> {
    /// Name of the export.
    pub export: &'a str,
    /// Names or wildcards; at most one for every four bytes of the option's data.
    pub queries: Vec<&'a str>,
}

/// The data of an option does not have the required form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// Decodes the header of an option. Returns `None` if there are not enough bytes yet.
///
/// # Errors
/// [`Violation::OptionMagic`].
pub fn decode_header(input: &[u8]) -> Result<Option<OptionHeader>, Violation> {
    if input.len() < OPTION_HEADER_LENGTH {
        return Ok(None);
    }
    let mut fields = Fields(input);
    let (Ok(magic), Ok(option), Ok(length)) = (fields.u64(), fields.u32(), fields.u32()) else {
        return Ok(None);
    };
    if magic != OPTION_MAGIC {
        return Err(Violation::OptionMagic { magic });
    }
    Ok(Some(OptionHeader { option, length }))
}

/// Decodes an option whose data is complete.
///
/// # Errors
/// [`Malformed`] if the data is shorter or longer than its own fields say, or a string is not text.
pub fn decode_option(option: u32, data: &[u8]) -> Result<OptionRequest<'_>, Malformed> {
    let mut fields = Fields(data);
    let request = match option {
        number::EXPORT_NAME => OptionRequest::ExportName(fields.rest_as_text()?),
        number::ABORT => {
            // Its data is ignored, as the protocol requires.
            fields = Fields(&[]);
            OptionRequest::Abort
        }
        number::LIST => OptionRequest::List,
        number::STARTTLS => OptionRequest::StartTls,
        number::INFO => OptionRequest::Info(decode_info(&mut fields)?),
        number::GO => OptionRequest::Go(decode_info(&mut fields)?),
        number::STRUCTURED_REPLY => OptionRequest::StructuredReply,
        number::LIST_META_CONTEXT => OptionRequest::ListMetaContext(decode_meta_context(&mut fields)?),
        number::SET_META_CONTEXT => OptionRequest::SetMetaContext(decode_meta_context(&mut fields)?),
        number::EXTENDED_HEADERS => OptionRequest::ExtendedHeaders,
        _ => return Ok(OptionRequest::Unknown),
    };
    if fields.0.is_empty() { Ok(request) } else { Err(Malformed) }
}

fn decode_info<'a>(fields: &mut Fields<'a>) -> Result<InfoRequest<'a>, Malformed> {
    let name = fields.text()?;
    let count = fields.u16()?;
    let facts = fields.bytes(usize::from(count) * 2)?;
    Ok(InfoRequest { name, facts })
}

fn decode_meta_context<'a>(fields: &mut Fields<'a>) -> Result<MetaContextRequest<'a>, Malformed> {
    let export = fields.text()?;
    let count = fields.u32()? as usize;
    // Each query takes four bytes at least, so the length of the data bounds what a hostile count can reserve.
    if count > fields.0.len() / 4 {
        return Err(Malformed);
    }
    let mut queries = Vec::with_capacity(count);
    for _ in 0..count {
        queries.push(fields.text()?);
    }
    Ok(MetaContextRequest { export, queries })
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    fn text(&mut self) -> Result<&'a str, Malformed> {
        let length = self.u32()? as usize;
        as_text(self.bytes(length)?)
    }

    fn rest_as_text(&mut self) -> Result<&'a str, Malformed> {
        as_text(std::mem::take(&mut self.0))
    }
}

/// Checks a string: the protocol's strings are UTF-8 without NUL, and bounded.
fn as_text(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > STRING_LENGTH_MAX || bytes.contains(&0) {
        return Err(Malformed);
    }
    str::from_utf8(bytes).map_err(|_| Malformed)
}
