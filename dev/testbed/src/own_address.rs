//! Addresses of this machine that no other test uses.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};

/// Returns a loopback address that no other test uses, with a reserved port. The port stays reserved while the
/// test's daemon does not run.
///
/// # Errors
/// If the system has no free port.
pub fn own_address() -> io::Result<SocketAddr> {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    // Other programs use 127.0.0.1.
    let address = Ipv4Addr::new(127, 128 | high >> 2, low, COUNT.fetch_add(1, Ordering::Relaxed));
    // The socket never listens. A child that another test starts at this moment inherits it until its exec, and a listening
    // socket would block the port.
    let taken = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    set_socket_reuseaddr(&taken, true)?;
    bind(&taken, &SocketAddr::from((address, 0)))?;
    Ok(getsockname(&taken)?.try_into()?)
}
