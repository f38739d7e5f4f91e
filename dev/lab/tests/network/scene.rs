//! Two hosts with a link, and the checks of tests.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lab::network::measure::Flow;
use lab::network::{BitRate, Conditions, Hosts, Namespace, ShapedLink, WideAreaLink, check};
use lab::workload::random::Random;

/// An awaited event comes within this time, or never.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);
const WINDOW: Duration = Duration::from_millis(500);

/// Tests of time take turns.
pub(crate) struct Turn {
    _guard: MutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for the turn; `None` if these tests are left out.
    pub(crate) fn take() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        // A failed test leaves nothing that the next would find.
        let guard = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let Err(error) = check() else { return Some(Self { _guard: guard }) };
        omission::machine_lacks(&format!("what hosts need: {error}"));
        None
    }
}

pub(crate) struct Scene<Link> {
    pub(crate) link: Link,
    hosts: Hosts,
}

impl Scene<ShapedLink> {
    pub(crate) fn with_shaped(rate: BitRate) -> Self {
        let mut hosts = Hosts::create(["a", "b"]).unwrap();
        Self { link: hosts.shaped_link([0, 1], rate).unwrap(), hosts }
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.link.addresses()[1]
    }
}

impl Scene<WideAreaLink> {
    pub(crate) fn with_wide_area(conditions: Conditions) -> Self {
        let mut hosts = Hosts::create(["a", "b"]).unwrap();
        Self { link: hosts.wide_area_link([0, 1], conditions).unwrap(), hosts }
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.link.addresses()[1]
    }
}

impl<Link> Scene<Link> {
    pub(crate) fn source(&self) -> &Namespace {
        self.hosts.get(0).unwrap()
    }

    pub(crate) fn target(&self) -> &Namespace {
        self.hosts.get(1).unwrap()
    }

    pub(crate) fn flow(&self, address: Ipv4Addr) -> Flow {
        Flow::start(self.source(), self.target(), address, None).unwrap()
    }

    pub(crate) fn connection(&self, address: Ipv4Addr) -> [TcpStream; 2] {
        let listener = self.target().run(|| TcpListener::bind((address, 0))).unwrap().unwrap();
        let local = listener.local_addr().unwrap();
        let near = self.source().run(|| TcpStream::connect(local)).unwrap().unwrap();
        let (far, _) = listener.accept().unwrap();
        far.set_read_timeout(Some(DEADLINE)).unwrap();
        [near, far]
    }

    pub(crate) fn refusal(&self, address: Ipv4Addr) -> ErrorKind {
        self.connect(address, DEADLINE).unwrap_err().kind()
    }

    /// Returns whether half a second passes without an answer to an attempt to connect.
    pub(crate) fn is_silent(&self, address: Ipv4Addr) -> bool {
        let connected = self.connect(address, Duration::from_millis(500));
        connected.unwrap_err().kind() == ErrorKind::TimedOut
    }

    fn connect(&self, address: Ipv4Addr, timeout: Duration) -> std::io::Result<TcpStream> {
        self.source().run(|| TcpStream::connect_timeout(&(address, 1).into(), timeout)).unwrap()
    }
}

pub(crate) fn part_of(rate: BitRate, flow: &Flow) -> f64 {
    let (begun, before) = (Instant::now(), flow.received_bytes());
    // The rate is the mean of this time.
    std::thread::sleep(WINDOW);
    let bytes = flow.received_bytes() - before;
    bytes as f64 / begun.elapsed().as_secs_f64() / rate.bytes_per_second()
}

/// Waits until a flow carries its rate, no less and no more. One busy moment of the processors is ignored: a link that is too
/// fast or too slow is so all the time.
pub(crate) fn expect_rate(rate: BitRate, flow: &Flow) {
    wait_until("the link carries its rate", || (0.9..1.0).contains(&part_of(rate, flow)));
}

/// Sends random bytes, does `meanwhile` when half is sent, and checks that the same bytes arrive.
pub(crate) fn expect_intact([mut near, mut far]: [TcpStream; 2], bytes: usize, meanwhile: impl FnOnce()) {
    let mut random = Random::new(bytes as u64);
    let sent: Vec<u8> =
        std::iter::repeat_with(|| random.next_u64().to_le_bytes()).flatten().take(bytes).collect();
    let expected = sent.clone();
    let receiver = std::thread::spawn(move || {
        let mut received = vec![0; bytes];
        far.read_exact(&mut received).unwrap();
        assert!(received == expected, "other bytes arrived than were sent");
    });
    let (first, second) = sent.split_at(bytes / 2);
    near.write_all(first).unwrap();
    meanwhile();
    near.write_all(second).unwrap();
    receiver.join().unwrap();
}

pub(crate) fn interfaces(host: &Namespace) -> Vec<String> {
    let text = host.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).unwrap().unwrap();
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut names: Vec<_> = lines.map(|(name, _)| name.trim().to_owned()).collect();
    names.sort();
    names
}

pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let give_up_at = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < give_up_at, "it did not come to pass that {what}");
        std::thread::yield_now();
    }
}
