//! A host that serves the page on a port of its own.

use std::net::{SocketAddr, TcpStream};

use e2e::{Host, host, until};

/// Runs a test on a host whose daemon serves the page at an address, with more configuration.
pub(crate) fn play(more: &str, test: impl FnOnce(&mut Host, SocketAddr) -> anyhow::Result<()>) {
    let played = host().and_then(|mut host| {
        let address = testbed::own_address()?;
        host.configure(&format!("{more}[web]\nlisten = '{address}'\n"))?;
        host.start()?;
        until("the page's port answers", || Ok(TcpStream::connect(address).is_ok().then_some(())))?;
        test(&mut host, address).map_err(|error| host.with_log(error))
    });
    #[expect(clippy::panic, reason = "this is how a test fails")]
    if let Err(error) = played {
        panic!("{error:#}");
    }
}
