//! A client that sends exactly what a test wants, valid or not.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use export::nbd::protocol::negotiation::{InfoRequest, MetaContextRequest, OptionReplyHeader, encode_option};
use export::nbd::protocol::{
    EXTENDED_REPLY_MAGIC, RequestHeader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, allocation, chunk,
    option, option_reply,
};

use super::{PATIENCE, Running};

pub(crate) struct RawClient {
    pub(crate) stream: UnixStream,
}

#[derive(Debug, PartialEq)]
pub(crate) enum RawReply {
    Simple(u32, u64),
    Chunk(u16, u16, u64, Vec<u8>),
    /// The same with an extended header, which has the offset before the payload.
    ExtendedChunk(u16, u16, u64, u64, Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Simple,
    Structured,
    Extended,
}

impl RawClient {
    /// Connects and reads the greeting. Returns `None` if the server closes instead.
    pub(crate) fn try_connect(server: &Running) -> Option<Self> {
        let stream = UnixStream::connect(server.socket()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut client = Self { stream };
        let mut greeting = [0; 18];
        match client.stream.read_exact(&mut greeting) {
            Ok(()) => {}
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset));
                return None;
            }
        }
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        Some(client)
    }

    /// Connects and chooses an export by its name. Returns `None` if the server has closed the connection meanwhile.
    pub(crate) fn connect_in_time(server: &Running, export: &str) -> Option<Self> {
        let mut client = Self::try_connect(server)?;
        client.stream.write_all(&3_u32.to_be_bytes()).ok()?;
        client.choose_by_name(export)?;
        let mut reply = [0; 10];
        client.stream.read_exact(&mut reply).ok()?;
        Some(client)
    }

    pub(crate) fn connect(server: &Running, export: &str, style: Style) -> Self {
        let mut client = Self::try_connect(server).expect("a greeting");
        client.stream.write_all(&3_u32.to_be_bytes()).unwrap();
        let headers = match style {
            Style::Simple => None,
            Style::Structured => Some(option::STRUCTURED_REPLY),
            Style::Extended => Some(option::EXTENDED_HEADERS),
        };
        if let Some(headers) = headers {
            assert_eq!(client.option(headers, &[]), [option_reply::ACK]);
            let query = MetaContextRequest { export, queries: vec![allocation::NAME] };
            let kinds = client.option(option::SET_META_CONTEXT, &query.encode());
            assert_eq!(kinds, [option_reply::META_CONTEXT, option_reply::ACK]);
        }
        assert_eq!(
            client.option(option::GO, &InfoRequest::encode(export, &[])),
            [option_reply::INFO, option_reply::ACK]
        );
        client
    }

    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        self.stream.write_all(&encode_option(option, data)).unwrap();
        let mut kinds = Vec::new();
        loop {
            let header = OptionReplyHeader::decode(&self.read()).unwrap();
            self.read_bytes(header.length as usize);
            kinds.push(header.kind);
            if header.kind == option_reply::ACK || header.is_error() {
                return kinds;
            }
        }
    }

    /// Chooses an export by the option that has no error reply.
    pub(crate) fn choose_by_name(&mut self, export: &str) -> Option<()> {
        self.stream.write_all(&encode_option(option::EXPORT_NAME, export.as_bytes())).ok()
    }

    /// Sends a request; a write has as many bytes as its length says.
    pub(crate) fn request(
        &mut self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u32,
        data: &[u8],
    ) {
        let length = u64::from(length);
        let header = RequestHeader { flags, command, cookie, offset, length, payload_length: 0 };
        self.stream.write_all(&[&header.encode(), data].concat()).unwrap();
    }

    /// Sends a request with an extended header, and a payload.
    pub(crate) fn extended_request(
        &mut self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u64,
        data: &[u8],
    ) {
        let header = RequestHeader { flags, command, cookie, offset, length, payload_length: 0 };
        self.stream.write_all(&[&header.encode_extended(), data].concat()).unwrap();
    }

    pub(crate) fn reply(&mut self) -> RawReply {
        let magic = u32::from_be_bytes(self.read());
        match magic {
            SIMPLE_REPLY_MAGIC => {
                let error = u32::from_be_bytes(self.read());
                RawReply::Simple(error, u64::from_be_bytes(self.read()))
            }
            STRUCTURED_REPLY_MAGIC => {
                let (flags, kind) = (u16::from_be_bytes(self.read()), u16::from_be_bytes(self.read()));
                let cookie = u64::from_be_bytes(self.read());
                let length = u32::from_be_bytes(self.read());
                RawReply::Chunk(flags, kind, cookie, self.read_bytes(length as usize))
            }
            EXTENDED_REPLY_MAGIC => {
                let (flags, kind) = (u16::from_be_bytes(self.read()), u16::from_be_bytes(self.read()));
                let (cookie, offset) = (u64::from_be_bytes(self.read()), u64::from_be_bytes(self.read()));
                let length = u64::from_be_bytes(self.read());
                RawReply::ExtendedChunk(flags, kind, cookie, offset, self.read_bytes(length as usize))
            }
            other => panic!("a reply opens with {other:#x}"),
        }
    }

    /// Receives the reply to `cookie` and returns its error, 0 for success.
    pub(crate) fn error_of(&mut self, cookie: u64) -> u32 {
        match self.reply() {
            RawReply::Simple(error, of) if of == cookie => error,
            RawReply::ExtendedChunk(chunk::DONE, chunk::NONE, of, ..) if of == cookie => 0,
            RawReply::ExtendedChunk(chunk::DONE, chunk::ERROR, of, _, payload)
            | RawReply::Chunk(chunk::DONE, chunk::ERROR, of, payload)
                if of == cookie =>
            {
                u32::from_be_bytes(payload[..4].try_into().unwrap())
            }
            other => panic!("expected the reply to {cookie}, got {other:?}"),
        }
    }

    /// Returns whether the server closes the connection without another byte.
    pub(crate) fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(0) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
            Ok(_) => false,
        }
    }

    pub(crate) fn read_bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn read<const LENGTH: usize>(&mut self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }
}
