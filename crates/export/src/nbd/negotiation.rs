//! The negotiation of a connection, without I/O: bytes of the client in, bytes of the server and a result out.
//!
//! ```text
//!   greeting ─► ClientFlags ─► Options ◄──────┐
//!                                │  every option is answered, good or bad
//!                                ├────────────┘      Skip: data too long to decode
//!                                ├─ STARTTLS ────────► StartTls: begins anew, encrypted
//!                                ├─ GO, EXPORT_NAME ─► Agreed
//!                                └─ ABORT ───────────► Aborted
//! ```
//!
//! At most [`INPUT_LENGTH_MAX`] bytes of a client need to be kept at a time. The caller enforces the deadline.

use std::rc::Rc;

use crate::nbd::export::{Export, Exports, Offer, ReplyStyle};
use crate::nbd::protocol::negotiation::{
    InfoRequest, Malformed, MetaContextRequest, OptionHeader, OptionReplies, OptionRequest, Padding,
    decode_option,
};
use crate::nbd::protocol::{
    CLIENT_FLAGS_LENGTH, OPTION_HEADER_LENGTH, allocation, handshake_flag, info, option as number,
    option_reply,
};

/// The longest option data that is decoded, in bytes: two of the protocol's longest strings, and room for lists.
pub const OPTION_LENGTH_MAX: u32 = 16 << 10;
/// The longest option data that is skipped, in bytes; a client that sends more is not worth reading.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// The largest number of bytes that [`Negotiation::advance`] must be given to make progress.
pub const INPUT_LENGTH_MAX: usize = OPTION_HEADER_LENGTH + OPTION_LENGTH_MAX as usize;
/// Options of one connection. A tool that describes every export of a large host needs a few per export.
pub const OPTIONS_MAX: u32 = 10_000;

/// The state of one connection's negotiation.
pub struct Negotiation {
    stage: Stage,
    tls: TlsMode,
    /// The reply style that the client has chosen so far.
    replies: ReplyStyle,
    padding: Padding,
    /// Canonical name of the export for which `base:allocation` was chosen last.
    allocation_of: Option<String>,
    options_seen: u32,
}

/// Whether a client can or must begin TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsMode {
    /// There is no TLS.
    Off,
    /// The client may begin TLS.
    Offered,
    /// The client must begin TLS before anything else.
    Required,
    /// The client has begun TLS.
    Begun,
}

enum Stage {
    ClientFlags,
    Options {
        /// Whether options may fail: a client that does not know of errors may only choose an export.
        newstyle: Newstyle,
    },
    /// The rest of an option's data is dropped, then the option is answered.
    Skip {
        newstyle: Newstyle,
        option: u32,
        answer: u32,
        remaining: u32,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Newstyle {
    Plain,
    Fixed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Inquiry {
    /// The client only inspects it.
    Info,
    /// The client uses it from now on.
    Go,
}

/// What [`Negotiation::advance`] made of the bytes.
pub enum Step {
    /// More bytes are needed.
    NeedBytes,
    /// A message was handled; there may be another one in the rest of the input.
    Continue,
    /// The negotiation is over: requests follow.
    Agreed(Agreement),
    /// The client has ended the session.
    Aborted,
    /// TLS follows, in which the negotiation continues after [`Negotiation::begin_tls`]. Bytes received beyond this message must
    /// be refused: they would count as encrypted.
    StartTls,
}

/// The result of a negotiation.
pub struct Agreement {
    /// The export that the client chose.
    pub export: Rc<Export>,
    /// The description that the client got.
    pub offer: Offer,
    /// Whether it may request `base:allocation`.
    pub allocation: AllocationContext,
}

/// Whether the metadata context `base:allocation` was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllocationContext {
    /// `BLOCK_STATUS` is answered with extents.
    Chosen,
    /// `BLOCK_STATUS` is refused as invalid.
    NotChosen,
}

/// A breach of the protocol that ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The client set flags that this server did not offer.
    #[error("the client set unknown flags {flags:#x}")]
    ClientFlags {
        /// All flags of the client.
        flags: u32,
    },
    /// The bytes are not an option.
    #[error("an option opens with {magic:#x}")]
    OptionMagic {
        /// The bytes in place of the magic number.
        magic: u64,
    },
    /// The option has more data than is read.
    #[error("option {option} has {length} bytes of data, more than this server reads")]
    OptionTooLong {
        /// Number of the option.
        option: u32,
        /// Length of its data in bytes.
        length: u32,
    },
    /// The client never gets to an end.
    #[error("the client sent more than {OPTIONS_MAX} options")]
    TooManyOptions,
    /// `EXPORT_NAME` cannot be answered with an error, so the session must end.
    #[error("the client asked for an export that does not exist, by an option that has no error reply")]
    UnknownExport,
    /// The same before TLS; the server does not disclose whether there is such an export.
    #[error("the client chose an export before TLS, by an option that has no error reply")]
    ExportNameBeforeTls,
    /// An export was chosen by an option other than `GO`, after extended headers.
    #[error("the client chose an export by an option that does not go with extended headers")]
    ExportNameAfterExtendedHeaders,
    /// A client that did not agree to fixed newstyle sent an option that needs it.
    #[error("option {option} without fixed newstyle")]
    NotFixed {
        /// Number of the option.
        option: u32,
    },
}

impl Default for Negotiation {
    fn default() -> Self {
        Self::new()
    }
}

impl Negotiation {
    /// Begins without TLS: the caller has sent, or is sending, the greeting of [`encode_greeting`](crate::nbd::protocol::negotiation::encode_greeting).
    pub fn new() -> Self {
        Self::with_tls(TlsMode::Off)
    }

    /// Begins with this mode of TLS.
    pub fn with_tls(tls: TlsMode) -> Self {
        Self {
            stage: Stage::ClientFlags,
            tls,
            replies: ReplyStyle::Simple,
            padding: Padding::Sent,
            allocation_of: None,
            options_seen: 0,
        }
    }

    /// Continues in TLS. All that was agreed on before is forgotten: somebody else may have sent it.
    pub fn begin_tls(&mut self) {
        let Self { options_seen, padding, .. } = *self;
        let stage = Stage::Options { newstyle: Newstyle::Fixed };
        *self = Self { stage, options_seen, padding, ..Self::with_tls(TlsMode::Begun) };
    }

    /// Handles the first message of `input`. Returns how many bytes it used, and appends the answer to `output`.
    ///
    /// # Errors
    /// A [`Violation`] ends the connection; `output` need not be sent.
    pub fn advance(
        &mut self,
        input: &[u8],
        exports: &Exports,
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), Violation> {
        match self.stage {
            Stage::ClientFlags => self.take_client_flags(input),
            Stage::Options { newstyle } => self.take_option(input, newstyle, exports, output),
            Stage::Skip { newstyle, option, answer, remaining } => {
                let available = u32::try_from(input.len()).unwrap_or(u32::MAX).min(remaining);
                let remaining = remaining - available;
                if remaining > 0 {
                    self.stage = Stage::Skip { newstyle, option, answer, remaining };
                    return Ok((available as usize, Step::NeedBytes));
                }
                OptionReplies::new(output, option).reply(answer, &[]);
                self.stage = Stage::Options { newstyle };
                Ok((available as usize, Step::Continue))
            }
        }
    }

    fn take_client_flags(&mut self, input: &[u8]) -> Result<(usize, Step), Violation> {
        let Some(bytes) = input.first_chunk::<CLIENT_FLAGS_LENGTH>() else {
            return Ok((0, Step::NeedBytes));
        };
        let flags = u32::from_be_bytes(*bytes);
        let fixed = u32::from(handshake_flag::FIXED_NEWSTYLE);
        let no_zeroes = u32::from(handshake_flag::NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return Err(Violation::ClientFlags { flags });
        }
        self.padding = if flags & no_zeroes == 0 { Padding::Sent } else { Padding::Left };
        let newstyle = if flags & fixed == 0 { Newstyle::Plain } else { Newstyle::Fixed };
        self.stage = Stage::Options { newstyle };
        Ok((CLIENT_FLAGS_LENGTH, Step::Continue))
    }

    fn take_option(
        &mut self,
        input: &[u8],
        newstyle: Newstyle,
        exports: &Exports,
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), Violation> {
        let header = OptionHeader::decode(input).map_err(|magic| Violation::OptionMagic { magic })?;
        let Some(header) = header else { return Ok((0, Step::NeedBytes)) };
        let OptionHeader { option, length } = header;
        if newstyle == Newstyle::Plain && option != number::EXPORT_NAME {
            return Err(Violation::NotFixed { option });
        }
        if length > OPTION_LENGTH_MAX {
            if length > OPTION_SKIP_MAX || option == number::EXPORT_NAME {
                return Err(Violation::OptionTooLong { option, length });
            }
            self.count_option()?;
            let known = decode_option(option, &[]) != Ok(OptionRequest::Unknown);
            let answer = match known {
                _ if self.tls == TlsMode::Required => option_reply::ERR_TLS_REQD,
                true => option_reply::ERR_TOO_BIG,
                false => option_reply::ERR_UNSUP,
            };
            self.stage = Stage::Skip { newstyle, option, answer, remaining: length };
            return Ok((OPTION_HEADER_LENGTH, Step::Continue));
        }
        let end = OPTION_HEADER_LENGTH + length as usize;
        let Some(data) = input.get(OPTION_HEADER_LENGTH..end) else { return Ok((0, Step::NeedBytes)) };
        self.count_option()?;
        let step = self.answer(option, data, exports, output)?;
        Ok((end, step))
    }

    fn count_option(&mut self) -> Result<(), Violation> {
        self.options_seen += 1;
        if self.options_seen > OPTIONS_MAX { Err(Violation::TooManyOptions) } else { Ok(()) }
    }

    fn answer(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &Exports,
        output: &mut Vec<u8>,
    ) -> Result<Step, Violation> {
        let request = decode_option(option, data);
        if self.tls == TlsMode::Required && !may_come_before_tls(option) {
            if option == number::EXPORT_NAME {
                return Err(Violation::ExportNameBeforeTls);
            }
            OptionReplies::new(output, option).reply(option_reply::ERR_TLS_REQD, &[b"TLS comes first"]);
            return Ok(Step::Continue);
        }
        if let Ok(OptionRequest::ExportName(name)) = request {
            if self.replies == ReplyStyle::Extended {
                return Err(Violation::ExportNameAfterExtendedHeaders);
            }
            let agreement = self.agree(exports.find(name).ok_or(Violation::UnknownExport)?);
            agreement.offer.export_info().encode(self.padding, output);
            return Ok(Step::Agreed(agreement));
        }
        let mut replies = OptionReplies::new(output, option);
        match request {
            Err(_) if option == number::EXPORT_NAME => return Err(Violation::UnknownExport),
            Err(Malformed) => {
                if option == number::SET_META_CONTEXT {
                    self.allocation_of = None;
                }
                replies.reply(option_reply::ERR_INVALID, &[]);
            }
            Ok(OptionRequest::Abort) => {
                replies.acknowledge();
                return Ok(Step::Aborted);
            }
            Ok(OptionRequest::List) => {
                for export in exports.iter() {
                    replies.server(&export.name, &export.description);
                }
                replies.acknowledge();
            }
            Ok(OptionRequest::StructuredReply) => match self.replies {
                ReplyStyle::Extended => replies
                    .reply(option_reply::ERR_EXT_HEADER_REQD, &[b"extended headers were agreed on already"]),
                ReplyStyle::Simple | ReplyStyle::Structured => {
                    self.replies = ReplyStyle::Structured;
                    replies.acknowledge();
                }
            },
            Ok(OptionRequest::ExtendedHeaders) => {
                self.replies = ReplyStyle::Extended;
                replies.acknowledge();
            }
            Ok(OptionRequest::Info(request)) => {
                self.describe(&request, exports, Inquiry::Info, &mut replies);
            }
            Ok(OptionRequest::Go(request)) => {
                if let Some(export) = self.describe(&request, exports, Inquiry::Go, &mut replies) {
                    return Ok(Step::Agreed(self.agree(export)));
                }
            }
            Ok(OptionRequest::ListMetaContext(request)) => {
                self.list_contexts(&request, exports, &mut replies);
            }
            Ok(OptionRequest::SetMetaContext(request)) => self.set_contexts(&request, exports, &mut replies),
            Ok(OptionRequest::StartTls) => match self.tls {
                TlsMode::Off => replies.reply(option_reply::ERR_POLICY, &[b"there is no TLS here"]),
                TlsMode::Begun => replies.reply(option_reply::ERR_INVALID, &[b"TLS has begun already"]),
                TlsMode::Offered | TlsMode::Required => {
                    replies.acknowledge();
                    return Ok(Step::StartTls);
                }
            },
            Ok(OptionRequest::Unknown | OptionRequest::ExportName(_)) => {
                replies.reply(option_reply::ERR_UNSUP, &[]);
            }
        }
        Ok(Step::Continue)
    }

    fn agree(&self, export: &Rc<Export>) -> Agreement {
        let allocation = if self.has_context_of(export) {
            AllocationContext::Chosen
        } else {
            AllocationContext::NotChosen
        };
        Agreement { export: Rc::clone(export), offer: self.offer(export, Inquiry::Go), allocation }
    }

    fn has_context_of(&self, export: &Export) -> bool {
        self.allocation_of.as_ref() == Some(&export.name)
    }

    /// N.B. Requests are checked against the reply to `GO`.
    fn offer(&self, export: &Export, inquiry: Inquiry) -> Offer {
        let offer = export.offer(self.replies);
        // An inspecting client may want to know it; one that has chosen no context cannot name any.
        let may_name_contexts = inquiry == Inquiry::Info || self.has_context_of(export);
        if self.replies == ReplyStyle::Extended && may_name_contexts {
            offer.with_status_payload()
        } else {
            offer
        }
    }

    /// Answers `INFO` and `GO`, and returns the export if there is one.
    fn describe<'a>(
        &self,
        request: &InfoRequest<'_>,
        exports: &'a Exports,
        inquiry: Inquiry,
        replies: &mut OptionReplies<'_>,
    ) -> Option<&'a Rc<Export>> {
        let Some(export) = exports.find(request.name) else {
            replies.reply(option_reply::ERR_UNKNOWN, &[b"no such export"]);
            return None;
        };
        let offer = self.offer(export, inquiry);
        replies.info_export(offer.export_info());
        if request.wants(info::NAME) {
            replies.info_text(info::NAME, &export.name);
        }
        if request.wants(info::DESCRIPTION) && !export.description.is_empty() {
            replies.info_text(info::DESCRIPTION, &export.description);
        }
        if request.wants(info::BLOCK_SIZE) {
            replies.info_block_sizes(offer.block_sizes());
        }
        replies.acknowledge();
        Some(export)
    }

    fn list_contexts(
        &self,
        request: &MetaContextRequest<'_>,
        exports: &Exports,
        replies: &mut OptionReplies<'_>,
    ) {
        if self.replies == ReplyStyle::Simple {
            return replies.reply(option_reply::ERR_INVALID, &[b"structured replies come first"]);
        }
        if exports.find(request.export).is_none() {
            return replies.reply(option_reply::ERR_UNKNOWN, &[b"no such export"]);
        }
        let listed = |query: &&str| [allocation::NAME, allocation::NAMESPACE].contains(query);
        if request.queries.is_empty() || request.queries.iter().any(listed) {
            // The id has no meaning in a list.
            replies.meta_context(0, allocation::NAME);
        }
        replies.acknowledge();
    }

    /// Replaces the earlier choice, also when it fails.
    fn set_contexts(
        &mut self,
        request: &MetaContextRequest<'_>,
        exports: &Exports,
        replies: &mut OptionReplies<'_>,
    ) {
        self.allocation_of = None;
        if self.replies == ReplyStyle::Simple {
            return replies.reply(option_reply::ERR_INVALID, &[b"structured replies come first"]);
        }
        let Some(export) = exports.find(request.export) else {
            return replies.reply(option_reply::ERR_UNKNOWN, &[b"no such export"]);
        };
        if request.queries.contains(&allocation::NAME) {
            self.allocation_of = Some(export.name.clone());
            replies.meta_context(allocation::ID, allocation::NAME);
        }
        replies.acknowledge();
    }
}

/// Returns whether a client may send this option where TLS is required and has not begun.
const fn may_come_before_tls(option: u32) -> bool {
    matches!(option, number::STARTTLS | number::ABORT)
}

#[cfg(test)]
mod tests;
