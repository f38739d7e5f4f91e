//! An empty export for one client, which proves that a hypervisor can connect to a volume's socket before the volume
//! exists and before the VM is changed. It speaks as much of NBD as a client needs to open a disk. It trusts every client
//! that may connect to the socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener as StdListener;

use nbd_protocol::negotiation::{ExportInfo, OptionHeader, OptionReplies, Padding, encode_greeting};
use nbd_protocol::{
    CLIENT_FLAGS_LENGTH, OPTION_HEADER_LENGTH, STRING_LENGTH_MAX, option, option_reply, transmission_flag,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};

/// The longest value of an option: a name, and a list of requested information.
const OPTION_LENGTH_MAX: usize = STRING_LENGTH_MAX + 256;

/// Serves clients one after the other until it is dropped; they find a disk of `size_bytes`.
pub(crate) async fn serve(listener: OwnedFd, size_bytes: u64) -> io::Error {
    let listener = StdListener::from(listener);
    let made = listener.set_nonblocking(true).and_then(|()| UnixListener::from_std(listener));
    let listener = match made {
        Ok(listener) => listener,
        Err(error) => return error,
    };
    loop {
        match listener.accept().await {
            // Whatever it sends, and if it leaves, it has connected.
            Ok((client, _)) => drop(answer(client, size_bytes).await),
            Err(error) => return error,
        }
    }
}

/// Answers a client's options until it has opened the disk, and then waits until it leaves.
async fn answer(mut client: UnixStream, size_bytes: u64) -> io::Result<()> {
    let mut greeting = Vec::new();
    encode_greeting(&mut greeting);
    client.write_all(&greeting).await?;
    client.read_exact(&mut [0; CLIENT_FLAGS_LENGTH]).await?;
    let flags = transmission_flag::HAS_FLAGS
        | transmission_flag::SEND_FLUSH
        | transmission_flag::SEND_FUA
        | transmission_flag::SEND_TRIM
        | transmission_flag::SEND_WRITE_ZEROES;
    let export = ExportInfo { size: size_bytes, flags };
    loop {
        let mut header = [0; OPTION_HEADER_LENGTH];
        client.read_exact(&mut header).await?;
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let header = OptionHeader::decode(&header).ok().flatten().ok_or_else(invalid)?;
        let (asked, length) = (header.option, header.length as usize);
        if length > OPTION_LENGTH_MAX {
            return Err(invalid());
        }
        client.read_exact(&mut vec![0; length]).await?;
        let mut said = Vec::new();
        let mut replies = OptionReplies::new(&mut said, asked);
        match asked {
            option::EXPORT_NAME => export.encode(Padding::Left, &mut said),
            option::INFO | option::GO => {
                replies.info_export(export);
                replies.acknowledge();
            }
            option::ABORT => replies.acknowledge(),
            _ => replies.reply(option_reply::ERR_UNSUP, &[]),
        }
        client.write_all(&said).await?;
        match asked {
            option::ABORT => return Ok(()),
            option::EXPORT_NAME | option::GO => break,
            _ => {}
        }
    }
    // It disconnects; its other requests are not served.
    client.read_u8().await.map(drop)
}
