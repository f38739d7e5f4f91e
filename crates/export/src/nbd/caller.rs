//! The client of a connection, as the device behind an export sees it: present, or gone.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The client of one connection.
#[derive(Clone)]
pub struct Caller {
    socket: Arc<OwnedFd>,
}

impl Caller {
    pub(super) fn new(socket: Arc<OwnedFd>) -> Self {
        Self { socket }
    }

    /// Returns whether the client has hung up, as the kernel knows at this moment, even if earlier bytes have not been read yet.
    /// This is one system call, which does not wait.
    ///
    /// A client on another host is gone only when the news of that has arrived here.
    pub fn has_left(&self) -> bool {
        let mut asked = [PollFd::new(&*self.socket, PollFlags::RDHUP)];
        // Whatever is wrong with the socket, no reply can be sent on it.
        match poll(&mut asked, Some(&Timespec::default())) {
            Ok(_) => asked[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR),
            Err(error) => error != rustix::io::Errno::INTR,
        }
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(if self.has_left() { "Caller(gone)" } else { "Caller(there)" })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_client_that_hangs_up_is_gone_at_once_whatever_it_sent_before() {
        let (mut client, server) = UnixStream::pair().unwrap();
        let caller = Caller::new(Arc::new(server.into()));
        client.write_all(b"not read yet").unwrap();
        assert!(!caller.has_left());
        drop(client);
        assert!(caller.has_left());
    }

    #[test]
    fn a_client_over_tcp_is_gone_when_it_says_nothing_more() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let caller = Caller::new(Arc::new(listener.accept().unwrap().0.into()));
        assert!(!caller.has_left());
        client.shutdown(Shutdown::Write).unwrap();
        // Over loopback the news arrives within the call.
        assert!(caller.has_left());
    }
}
