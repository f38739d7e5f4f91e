//! Sending in pieces, common to both engines.

use std::io::IoSlice;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::buffer::Buffer;

/// Pieces that are described without an allocation: enough for the few replies of one send.
const PIECES_FEW: usize = 8;

/// Sends as much of `pieces` as the socket takes without waiting; returns the number of bytes, which may be 0. Fails with the
/// system's error, unless it means "later".
pub(super) fn transmit(socket: &OwnedFd, pieces: &[Buffer]) -> Result<usize, Errno> {
    let mut few = [IoSlice::new(&[]); PIECES_FEW];
    let many;
    let described = match few.get_mut(..pieces.len()) {
        Some(few) => {
            few.iter_mut().zip(pieces).for_each(|(slice, piece)| *slice = IoSlice::new(piece.as_slice()));
            &*few
        }
        None => {
            many = unsent(pieces, 0);
            &many
        }
    };
    match send_now(socket, described) {
        Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => Ok(0),
        result => result,
    }
}

pub(super) fn send_now(socket: &OwnedFd, pieces: &[IoSlice<'_>]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags)
}

pub(super) fn unsent(pieces: &[Buffer], mut sent: usize) -> Vec<IoSlice<'_>> {
    let mut rest = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let unsent = piece.as_slice().get(sent..).unwrap_or_default();
        sent = sent.saturating_sub(piece.len());
        if !unsent.is_empty() {
            rest.push(IoSlice::new(unsent));
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_the_socket_does_not_take_is_not_counted_and_what_follows_begins_there() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = (0..4_u32 << 20).map(|index| (index % 251) as u8).collect();
        let pieces = [Buffer::copy_of(&bytes[..3]), Buffer::copy_of(&bytes[3..])];
        let writer = OwnedFd::from(writer);
        let mut sent = transmit(&writer, &pieces).unwrap();
        assert!(sent > 3 && sent < bytes.len(), "{sent}: neither nothing nor all");
        assert_eq!(transmit(&writer, &pieces), Ok(0), "it is full");
        let mut received = Vec::new();
        while received.len() < bytes.len() {
            let mut part = vec![0; 1 << 20];
            let count = reader.read(&mut part).unwrap();
            received.extend_from_slice(&part[..count]);
            let rest = unsent(&pieces, sent);
            if !rest.is_empty() {
                sent += send_now(&writer, &rest).unwrap();
            }
        }
        assert!(received == bytes);
        drop(reader);
        assert_eq!(transmit(&writer, &pieces), Err(Errno::PIPE));
    }
}
