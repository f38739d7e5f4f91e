//! An empty export for one client, which proves that a hypervisor can connect to a volume's socket before the volume
//! exists and before the VM is changed. It speaks as much of NBD as a client needs to open a disk. It trusts every client
//! that may connect to the socket.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener as StdListener;

use nbd_protocol::{
    CLIENT_FLAGS_LENGTH, INIT_MAGIC, OPTION_HEADER_LENGTH, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    STRING_LENGTH_MAX, handshake_flag, info, option, option_reply, transmission_flag,
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
    let mut greeting = INIT_MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend((handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES).to_be_bytes());
    client.write_all(&greeting).await?;
    client.read_exact(&mut [0; CLIENT_FLAGS_LENGTH]).await?;
    let flags = transmission_flag::HAS_FLAGS
        | transmission_flag::SEND_FLUSH
        | transmission_flag::SEND_FUA
        | transmission_flag::SEND_TRIM
        | transmission_flag::SEND_WRITE_ZEROES;
    let mut export = size_bytes.to_be_bytes().to_vec();
    export.extend(flags.to_be_bytes());
    loop {
        let mut header = [0; OPTION_HEADER_LENGTH];
        client.read_exact(&mut header).await?;
        let word = |at: usize| {
            header.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_be_bytes)
        };
        let (asked, length) = (word(8), word(12) as usize);
        if length > OPTION_LENGTH_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        client.read_exact(&mut vec![0; length]).await?;
        match asked {
            option::EXPORT_NAME => {
                client.write_all(&export).await?;
                break;
            }
            option::INFO | option::GO => {
                let mut told = info::EXPORT.to_be_bytes().to_vec();
                told.extend(&export);
                reply(&mut client, asked, option_reply::INFO, &told).await?;
                reply(&mut client, asked, option_reply::ACK, &[]).await?;
                if asked == option::GO {
                    break;
                }
            }
            option::ABORT => return reply(&mut client, asked, option_reply::ACK, &[]).await,
            _ => reply(&mut client, asked, option_reply::ERR_UNSUP, &[]).await?,
        }
    }
    // It disconnects; its other requests are not served.
    client.read_u8().await.map(drop)
}

async fn reply(client: &mut UnixStream, asked: u32, kind: u32, payload: &[u8]) -> io::Result<()> {
    let mut reply = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    reply.extend(asked.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend(u32::try_from(payload.len()).unwrap_or(0).to_be_bytes());
    reply.extend(payload);
    client.write_all(&reply).await
}
