//! The fixed newstyle handshake, blocking, with a limit on every length and a deadline on every read.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::wire::PAYLOAD_BYTES_MAX;
use super::{Address, ClientError, Export, ReplyStyle};

/// Longest time for each message of the server in the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer to an option: an error with a message of 4096 bytes.
const OPTION_REPLY_BYTES_MAX: u32 = 8192;
/// Largest number of answers to one option.
const OPTION_REPLIES_MAX: usize = 64;

const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;

const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_ERROR_BIT: u32 = 1 << 31;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// Connects, negotiates and selects the export.
pub(super) fn connect(address: &Address, style: ReplyStyle) -> Result<(UnixStream, Export), ClientError> {
    let mut stream = UnixStream::connect(address.socket())
        .map_err(|source| ClientError::Connect { socket: address.socket().to_owned(), source })?;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(ClientError::Transfer)?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(ClientError::Transfer)?;
    let export = negotiate(&mut stream, address.export(), style)?;
    Ok((stream, export))
}

fn negotiate(stream: &mut (impl Read + Write), name: &str, style: ReplyStyle) -> Result<Export, ClientError> {
    greet(stream)?;
    if style == ReplyStyle::Structured {
        send_option(stream, OPTION_STRUCTURED_REPLY, &[])?;
        // If the server refuses structured replies, all replies are simple.
        let _ = read_option_reply(stream, OPTION_STRUCTURED_REPLY)?;
    }
    send_option(stream, OPTION_GO, &go_payload(name)?)?;
    read_export(stream, name)
}

fn greet(stream: &mut (impl Read + Write)) -> Result<(), ClientError> {
    const FIXED_NEWSTYLE: u16 = 1;
    const NO_ZEROES: u16 = 2;

    let greeting: [u8; 18] = read_array(stream)?;
    if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
        return Err(ClientError::Protocol("the greeting is not that of a newstyle server"));
    }
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(ClientError::Protocol("the server does not speak the fixed newstyle protocol"));
    }
    let answer = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    write_all(stream, &answer.to_be_bytes())
}

/// Returns the payload of GO, with a request for the block sizes.
fn go_payload(name: &str) -> Result<Vec<u8>, ClientError> {
    const NAME_BYTES_MAX: usize = 4096;
    let name_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX);
    if name.len() > NAME_BYTES_MAX {
        return Err(ClientError::Address {
            address: name.to_owned(),
            reason: "the export's name is too long",
        });
    }
    let mut payload = name_bytes.to_be_bytes().to_vec();
    payload.extend_from_slice(name.as_bytes());
    payload.extend_from_slice(&1_u16.to_be_bytes());
    payload.extend_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
    Ok(payload)
}

fn read_export(stream: &mut impl Read, name: &str) -> Result<Export, ClientError> {
    let mut export = None;
    let mut block_sizes = None;
    for _ in 0..OPTION_REPLIES_MAX {
        let reply = read_option_reply(stream, OPTION_GO)?;
        match reply.kind {
            REPLY_INFO => match decode_info(&reply.payload)? {
                Info::Export { size, flags } => export = Some((size, flags)),
                Info::BlockSize(sizes) => block_sizes = Some(sizes),
                Info::Other => {}
            },
            REPLY_ACK => {
                let (size, flags) = export.ok_or(ClientError::Protocol("GO was granted without a size"))?;
                return Ok(Export::new(size, flags, block_sizes));
            }
            kind if kind & REPLY_ERROR_BIT != 0 => {
                let message = match String::from_utf8_lossy(&reply.payload).into_owned() {
                    message if message.is_empty() => format!("error {}", kind & !REPLY_ERROR_BIT),
                    message => message,
                };
                return Err(ClientError::Refused { export: name.to_owned(), message });
            }
            _ => return Err(ClientError::Protocol("GO was answered with an unknown reply")),
        }
    }
    Err(ClientError::Protocol("GO was answered without an end"))
}

/// A piece of information about an export.
#[derive(Debug, PartialEq, Eq)]
enum Info {
    Export { size: u64, flags: u16 },
    BlockSize(BlockSizes),
    Other,
}

/// Lengths that the server accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockSizes {
    pub(super) minimum: u32,
    pub(super) preferred: u32,
    pub(super) payload_max: u32,
}

fn decode_info(payload: &[u8]) -> Result<Info, ClientError> {
    let (kind, rest) =
        payload.split_first_chunk().ok_or(ClientError::Protocol("an information has no kind"))?;
    let info = match u16::from_be_bytes(*kind) {
        INFO_EXPORT => {
            let bytes: &[u8; 10] =
                rest.try_into().map_err(|_| ClientError::Protocol("an export's size has a wrong length"))?;
            let [s0, s1, s2, s3, s4, s5, s6, s7, f0, f1] = *bytes;
            Info::Export {
                size: u64::from_be_bytes([s0, s1, s2, s3, s4, s5, s6, s7]),
                flags: u16::from_be_bytes([f0, f1]),
            }
        }
        INFO_BLOCK_SIZE => {
            let bytes: &[u8; 12] =
                rest.try_into().map_err(|_| ClientError::Protocol("block sizes have a wrong length"))?;
            let [a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3] = *bytes;
            let minimum = u32::from_be_bytes([a0, a1, a2, a3]);
            let preferred = u32::from_be_bytes([b0, b1, b2, b3]);
            let payload_max = u32::from_be_bytes([c0, c1, c2, c3]);
            if !minimum.is_power_of_two() || minimum > preferred || payload_max < preferred {
                return Err(ClientError::Protocol("the block sizes contradict each other"));
            }
            Info::BlockSize(BlockSizes {
                minimum,
                preferred,
                payload_max: payload_max.min(PAYLOAD_BYTES_MAX),
            })
        }
        _ => Info::Other,
    };
    Ok(info)
}

fn send_option(stream: &mut impl Write, option: u32, payload: &[u8]) -> Result<(), ClientError> {
    let length = u32::try_from(payload.len()).map_err(|_| ClientError::Protocol("an option is too long"))?;
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(payload);
    write_all(stream, &bytes)
}

struct OptionReply {
    kind: u32,
    payload: Vec<u8>,
}

fn read_option_reply(stream: &mut impl Read, option: u32) -> Result<OptionReply, ClientError> {
    const MAGIC: u64 = 0x0003_e889_0455_65a9;
    let magic = u64::from_be_bytes(read_array(stream)?);
    let answered = u32::from_be_bytes(read_array(stream)?);
    let kind = u32::from_be_bytes(read_array(stream)?);
    let length = u32::from_be_bytes(read_array(stream)?);
    if magic != MAGIC || answered != option {
        return Err(ClientError::Protocol("an option was answered with something else"));
    }
    if length > OPTION_REPLY_BYTES_MAX {
        return Err(ClientError::Protocol("the answer to an option is too long"));
    }
    let mut payload = vec![0; length as usize];
    read_exact(stream, &mut payload)?;
    Ok(OptionReply { kind, payload })
}

fn read_array<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], ClientError> {
    let mut bytes = [0; N];
    read_exact(stream, &mut bytes)?;
    Ok(bytes)
}

fn read_exact(stream: &mut impl Read, bytes: &mut [u8]) -> Result<(), ClientError> {
    stream.read_exact(bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => ClientError::Closed,
        _ => ClientError::Transfer(error),
    })
}

fn write_all(stream: &mut impl Write, bytes: &[u8]) -> Result<(), ClientError> {
    stream.write_all(bytes).map_err(ClientError::Transfer)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    /// A server that replays given bytes, whatever the client sends.
    struct Script(Cursor<Vec<u8>>);

    impl Read for Script {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0.read(bytes)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn greeting() -> Vec<u8> {
        b"NBDMAGICIHAVEOPT\x00\x03".to_vec()
    }

    fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
        let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    fn check(script: &[Vec<u8>]) -> Result<Export, ClientError> {
        negotiate(&mut Script(Cursor::new(script.concat())), "disk", ReplyStyle::Structured)
    }

    fn export_info(size: u64) -> Vec<u8> {
        let mut payload = INFO_EXPORT.to_be_bytes().to_vec();
        payload.extend_from_slice(&size.to_be_bytes());
        payload.extend_from_slice(&1_u16.to_be_bytes());
        reply(OPTION_GO, REPLY_INFO, &payload)
    }

    #[test]
    fn a_server_without_structured_replies_is_still_used() {
        let unsupported = reply(OPTION_STRUCTURED_REPLY, REPLY_ERROR_BIT | 1, b"");
        let export =
            check(&[greeting(), unsupported, export_info(1 << 20), reply(OPTION_GO, REPLY_ACK, b"")])
                .unwrap();
        assert_eq!(export.size, 1 << 20);
    }

    #[test]
    fn a_refusal_carries_the_servers_words() {
        let ack = reply(OPTION_STRUCTURED_REPLY, REPLY_ACK, b"");
        let refusal = reply(OPTION_GO, REPLY_ERROR_BIT | 6, b"no such volume");
        let error = check(&[greeting(), ack, refusal]).unwrap_err();
        assert!(matches!(error, ClientError::Refused { message, .. } if message == "no such volume"));
    }

    #[test]
    fn an_answer_without_a_size_is_refused() {
        let ack = reply(OPTION_STRUCTURED_REPLY, REPLY_ACK, b"");
        let error = check(&[greeting(), ack, reply(OPTION_GO, REPLY_ACK, b"")]).unwrap_err();
        assert!(matches!(error, ClientError::Protocol(_)));
    }

    #[test]
    fn an_endless_answer_is_refused_before_it_is_read() {
        let mut endless = reply(OPTION_STRUCTURED_REPLY, REPLY_ACK, b"");
        endless[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(matches!(check(&[greeting(), endless]).unwrap_err(), ClientError::Protocol(_)));
        let ack = reply(OPTION_STRUCTURED_REPLY, REPLY_ACK, b"");
        let infos = vec![export_info(1); OPTION_REPLIES_MAX + 1];
        assert!(matches!(
            check(&[vec![greeting(), ack], infos].concat()).unwrap_err(),
            ClientError::Protocol(_)
        ));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
            prop_assert!(check(std::slice::from_ref(&bytes)).is_err());
            prop_assert!(check(&[greeting(), bytes.clone()]).is_err());
            let _ = decode_info(&bytes);
        }
    }
}
