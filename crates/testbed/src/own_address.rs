//! Addresses of this machine that no other test has.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};

/// An address of the loopback interface that no other test has, and a port there: nobody else is given that port, also
/// while the daemon that is to have it does not run.
///
/// # Errors
/// The system gives none.
pub fn own_address() -> io::Result<SocketAddr> {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    // Clear of 127.0.0.1, where everybody else is.
    let address = Ipv4Addr::new(127, 128 | high >> 2, low, COUNT.fetch_add(1, Ordering::Relaxed));
    // It never listens: a child that another test starts in this moment has it as well until it runs its program, and could
    // not be listened beside.
    let taken = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    set_socket_reuseaddr(&taken, true)?;
    bind(&taken, &SocketAddr::from((address, 0)))?;
    Ok(getsockname(&taken)?.try_into()?)
}
