//! A link without namespaces: a TCP proxy on loopback that carries so much a second, and can be cut.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::network::BitRate;

/// Bytes that are carried at a time.
const PIECE_BYTES: usize = 64 << 10;
/// How much unused time may be made up for later: timers are exact to a millisecond.
const BURST_TIME: Duration = Duration::from_millis(5);

/// A proxy. It ends, and closes what goes over it, when it is dropped.
#[derive(Debug)]
pub(super) struct Proxy {
    address: SocketAddr,
    /// `None` until it is known where it leads to.
    target: watch::Sender<Option<SocketAddr>>,
    is_whole: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// Listens on loopback. Nobody gets through before [`Self::lead_to`].
    ///
    /// # Errors
    /// If nothing can be listened on.
    pub(super) async fn new(rate: BitRate) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("listen for the proxy")?;
        let address = listener.local_addr().context("ask where the proxy listens")?;
        let (target, leads_to) = watch::channel(None);
        let (is_whole, whole) = watch::channel(true);
        let accepting = tokio::spawn(accept(listener, leads_to, whole, rate));
        Ok(Self { address, target, is_whole, accepting })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Says where it ends.
    pub(super) fn lead_to(&self, target: SocketAddr) {
        self.target.send_replace(Some(target));
    }

    /// Closes all connections, and new ones at once.
    pub(super) fn cut(&self) {
        self.is_whole.send_replace(false);
    }

    /// Lets connections be made again.
    pub(super) fn restore(&self) {
        self.is_whole.send_replace(true);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    leads_to: watch::Receiver<Option<SocketAddr>>,
    whole: watch::Receiver<bool>,
    rate: BitRate,
) {
    let paces = [Arc::new(Pace::new(rate)), Arc::new(Pace::new(rate))];
    while let Ok((near, _)) = listener.accept().await {
        let target = *leads_to.borrow();
        let Some(target) = target.filter(|_| *whole.borrow()) else { continue };
        let (mut whole, paces) = (whole.clone(), paces.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = connect(near, target, &paces) => {}
                // Also when the proxy is gone.
                _ = whole.wait_for(|whole| !whole) => {}
            }
        });
    }
}

/// Carries one connection until either side closes it.
async fn connect(near: TcpStream, target: SocketAddr, [there, back]: &[Arc<Pace>; 2]) {
    let Ok(far) = TcpStream::connect(target).await else { return };
    for stream in [&near, &far] {
        // It would only be slower.
        let _ = stream.set_nodelay(true);
    }
    let ((mut near_in, mut near_out), (mut far_in, mut far_out)) = (near.into_split(), far.into_split());
    tokio::select! {
        () = carry(&mut near_in, &mut far_out, there) => {}
        () = carry(&mut far_in, &mut near_out, back) => {}
    }
}

async fn carry(from: &mut (impl AsyncRead + Unpin), to: &mut (impl AsyncWrite + Unpin), pace: &Pace) {
    let mut piece = vec![0; PIECE_BYTES];
    while let Ok(length @ 1..) = from.read(&mut piece).await {
        sleep_until(pace.take(length)).await;
        if to.write_all(&piece[..length]).await.is_err() {
            return;
        }
    }
}

/// One direction of the link, shared by all connections.
#[derive(Debug)]
struct Pace {
    rate: BitRate,
    /// When all that was taken has been carried.
    free_at: Mutex<Instant>,
}

impl Pace {
    fn new(rate: BitRate) -> Self {
        Self { rate, free_at: Mutex::new(Instant::now()) }
    }

    /// When `bytes` more will have been carried.
    fn take(&self, bytes: usize) -> Instant {
        let now = Instant::now();
        // A panic elsewhere leaves a moment that is as good as any.
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST_TIME).unwrap_or(now);
        *free_at = (*free_at).max(earliest) + self.rate.time_of(bytes as u64);
        *free_at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A proxy that leads to an echo.
    async fn proxy(rate: BitRate) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::new(rate).await.unwrap();
        proxy.lead_to(listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut input, mut output) = stream.split();
                    tokio::io::copy(&mut input, &mut output).await
                });
            }
        });
        proxy
    }

    async fn echo(stream: &mut TcpStream, bytes: usize) -> std::io::Result<()> {
        let sent = vec![7; bytes];
        let (mut input, mut output) = stream.split();
        let mut received = vec![0; bytes];
        tokio::try_join!(output.write_all(&sent), input.read_exact(&mut received))?;
        assert_eq!(received, sent);
        Ok(())
    }

    #[tokio::test]
    async fn what_is_cut_is_closed_and_can_be_made_again() {
        let proxy = proxy(BitRate::megabits(10_000)).await;
        let mut first = TcpStream::connect(proxy.address()).await.unwrap();
        echo(&mut first, 1 << 20).await.unwrap();
        proxy.cut();
        echo(&mut first, 1).await.unwrap_err();
        let mut second = TcpStream::connect(proxy.address()).await.unwrap();
        echo(&mut second, 1).await.unwrap_err();
        proxy.restore();
        let mut third = TcpStream::connect(proxy.address()).await.unwrap();
        echo(&mut third, 1 << 20).await.unwrap();
    }

    #[tokio::test]
    async fn all_connections_share_the_rate() {
        let proxy = proxy(BitRate::megabits(80)).await;
        let mut streams =
            [TcpStream::connect(proxy.address()).await, TcpStream::connect(proxy.address()).await]
                .map(Result::unwrap);
        let began = Instant::now();
        let [first, second] = &mut streams;
        tokio::try_join!(echo(first, 1 << 20), echo(second, 1 << 20)).unwrap();
        // 2 MiB at 10 MB/s, but for the burst.
        assert!(began.elapsed() > Duration::from_millis(190), "{:?}", began.elapsed());
    }
}
