//! Encodes the server's messages of the negotiation.

use crate::nbd::export::{Export, Offer};
use crate::nbd::protocol::{
    EXPORT_NAME_PADDING, INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, handshake_flag, info, option_reply,
};

/// Appends the server's first message.
pub fn encode_greeting(output: &mut Vec<u8>) {
    output.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    output.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    output.extend_from_slice(&(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes());
}

/// Appends the reply to `EXPORT_NAME`, which alone has no header.
pub(super) fn encode_export_name_reply(output: &mut Vec<u8>, offer: &Offer, padding: Padding) {
    output.extend_from_slice(&offer.size.to_be_bytes());
    output.extend_from_slice(&offer.flags.to_be_bytes());
    if padding == Padding::Sent {
        output.extend_from_slice(&[0; EXPORT_NAME_PADDING]);
    }
}

/// Whether the reply to `EXPORT_NAME` ends in reserved zeroes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Padding {
    Sent,
    Left,
}

pub(super) struct Encoder<'a> {
    output: &'a mut Vec<u8>,
    option: u32,
}

impl<'a> Encoder<'a> {
    pub(super) fn new(output: &'a mut Vec<u8>, option: u32) -> Self {
        Self { output, option }
    }

    pub(super) fn reply(&mut self, kind: u32, parts: &[&[u8]]) {
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

    /// Grants the option, or ends a list.
    pub(super) fn acknowledge(&mut self) {
        self.reply(option_reply::ACK, &[]);
    }

    pub(super) fn server(&mut self, export: &Export) {
        let name = export.name.as_bytes();
        let length = (name.len() as u32).to_be_bytes();
        self.reply(option_reply::SERVER, &[&length, name, export.description.as_bytes()]);
    }

    pub(super) fn info_export(&mut self, offer: &Offer) {
        let (size, flags) = (offer.size.to_be_bytes(), offer.flags.to_be_bytes());
        self.reply(option_reply::INFO, &[&info::EXPORT.to_be_bytes(), &size, &flags]);
    }

    pub(super) fn info_text(&mut self, fact: u16, text: &str) {
        self.reply(option_reply::INFO, &[&fact.to_be_bytes(), text.as_bytes()]);
    }

    pub(super) fn info_block_size(&mut self, offer: &Offer) {
        let minimum = offer.block_size_minimum.to_be_bytes();
        let preferred = offer.block_size_preferred.to_be_bytes();
        let maximum = offer.block_size_maximum.to_be_bytes();
        self.reply(option_reply::INFO, &[&info::BLOCK_SIZE.to_be_bytes(), &minimum, &preferred, &maximum]);
    }

    pub(super) fn meta_context(&mut self, id: u32, name: &str) {
        self.reply(option_reply::META_CONTEXT, &[&id.to_be_bytes(), name.as_bytes()]);
    }
}
