//! A server in a thread of its own, on a unix socket, over a device that a test can hold and inspect.

#![expect(dead_code, reason = "each test binary uses a part of it")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

pub(crate) mod authority;
pub(crate) mod clients;
pub(crate) mod device;
pub(crate) mod raw_client;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, mpsc as thread_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use block::engine::EngineChoice;
use block::{BlockDevice, Executor};
use export::nbd::{
    Access, ConnectionInfo, Drained, Encryption, Export, Exports, Limits, PassedSession, Server,
};
use futures_channel::mpsc;
use futures_util::StreamExt;

use device::{Probe, TestDevice};

/// Time that a test waits for an expected event. It only bounds a failure, so it is long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const SIZE: u64 = 64 << 20;

/// Runs a test on each engine that this system has; it always has the threads.
pub(crate) fn on_each_engine(test: impl Fn(EngineChoice)) {
    test(EngineChoice::Threads);
    match block::engine::open(EngineChoice::Ring) {
        Ok(_) => test(EngineChoice::Ring),
        Err(error) => omission::kernel_lacks(&format!("io_uring ({error})")),
    }
}

/// A running server with the exports `disk` (the default) and `frozen`, which is read-only; both are one device.
pub(crate) struct Running {
    directory: tempfile::TempDir,
    /// Address of its TCP listener on the loopback interface.
    pub(crate) address: SocketAddr,
    pub(crate) probe: Probe,
    questions: mpsc::UnboundedSender<Question>,
    thread: Option<JoinHandle<()>>,
}

enum Question {
    Connections(thread_channel::Sender<Vec<ConnectionInfo>>),
    Shutdown(Duration, thread_channel::Sender<Drained>),
    PassOn(Duration, thread_channel::Sender<PassedOn>),
    Leave,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PassedOn {
    pub(crate) drained: Drained,
    /// Bytes of each connection that had been received and not accepted; `None`: nothing had been exchanged on it.
    pub(crate) unread: Vec<Option<usize>>,
}

impl Running {
    pub(crate) fn start(choice: EngineChoice, limits: Limits) -> Self {
        Self::start_encrypted(choice, limits, Encryption::Off)
    }

    /// Starts a server that encrypts connections over TCP.
    pub(crate) fn start_encrypted(choice: EngineChoice, limits: Limits, encryption: Encryption) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let local = UnixListener::bind(directory.path().join("socket")).unwrap();
        let remote = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = remote.local_addr().unwrap();
        let listeners = vec![(local.into(), Encryption::Off), (remote.into(), encryption)];
        let (questions, asked) = mpsc::unbounded();
        let (ready, started) = thread_channel::channel();
        let thread = std::thread::spawn(move || serve(choice, limits, listeners, asked, &ready));
        let probe = started.recv().expect("the server starts");
        Self { directory, address, probe, questions, thread: Some(thread) }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    pub(crate) fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    /// Returns the same as a Python expression about `name`.
    pub(crate) fn socket_uri_in_python(&self) -> String {
        format!("'nbd+unix:///' + name + '?socket={}'", self.socket().display())
    }

    /// Returns the path of a file that is deleted with the server.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn connections(&self) -> Vec<ConnectionInfo> {
        let (answer, answered) = thread_channel::channel();
        self.questions.unbounded_send(Question::Connections(answer)).unwrap();
        answered.recv_timeout(PATIENCE).expect("the server answers")
    }

    /// Begins to shut down; the result is sent when that is over.
    pub(crate) fn shutdown(&self, deadline: Duration) -> thread_channel::Receiver<Drained> {
        let (answer, answered) = thread_channel::channel();
        self.questions.unbounded_send(Question::Shutdown(deadline, answer)).unwrap();
        answered
    }

    /// Has another server continue with the same device, sockets, and connections; the result is sent when that is done.
    pub(crate) fn pass_on(&self, deadline: Duration) -> thread_channel::Receiver<PassedOn> {
        let (answer, answered) = thread_channel::channel();
        self.questions.unbounded_send(Question::PassOn(deadline, answer)).unwrap();
        answered
    }

    pub(crate) fn wait_for(&self, what: &str, reached: impl Fn(&[ConnectionInfo]) -> bool) {
        let begun = Instant::now();
        while !reached(&self.connections()) {
            assert!(begun.elapsed() < PATIENCE, "waited for {what}: {:?}", self.connections());
            std::thread::yield_now();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.questions.unbounded_send(Question::Leave);
        let joined = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(joined, Some(Ok(()))), "the server's thread ended well");
        }
    }
}

fn serve(
    choice: EngineChoice,
    limits: Limits,
    listeners: Vec<(OwnedFd, Encryption)>,
    mut asked: mpsc::UnboundedReceiver<Question>,
    ready: &thread_channel::Sender<Probe>,
) {
    let (driver, engine) = block::engine::open(choice).expect("the engine can be had");
    let mut executor = Executor::new(driver);
    let (device, probe) = TestDevice::new(SIZE);
    let handle = executor.handle();
    ready.send(probe).unwrap();
    executor.run(async move {
        let device: Rc<dyn BlockDevice> = Rc::new(device);
        let export = |name: &str, access| Export {
            name: name.into(),
            description: format!("a {name} for tests"),
            device: Rc::clone(&device),
            connect: None,
            access,
        };
        let exports =
            || Exports::new([export("disk", Access::ReadWrite), export("frozen", Access::ReadOnly)]);
        let listeners: Vec<_> =
            listeners.into_iter().map(|(listener, encryption)| (Arc::new(listener), encryption)).collect();
        let start = || {
            let server = Server::new(handle.clone(), Rc::clone(&engine), exports(), limits);
            for (listener, encryption) in &listeners {
                server.serve_encrypted(Arc::clone(listener), encryption.clone());
            }
            server
        };
        let mut server = start();
        while let Some(question) = asked.next().await {
            match question {
                Question::Connections(answer) => answer.send(server.connections()).unwrap(),
                Question::Shutdown(deadline, answer) => {
                    let server = server.clone();
                    handle.spawn(async move {
                        // The test may have ended without waiting.
                        let _ = answer.send(server.shutdown(deadline).await);
                    });
                }
                Question::PassOn(deadline, answer) => {
                    let (drained, passed) = server.pass(deadline).await;
                    assert_eq!(server.connections(), []);
                    server = start();
                    let length = |session: &PassedSession| session.unread.len();
                    let unread = passed.iter().map(|passed| passed.session.as_ref().map(length)).collect();
                    for connection in passed {
                        server.take_up(connection, &Encryption::Off);
                    }
                    let _ = answer.send(PassedOn { drained, unread });
                }
                Question::Leave => break,
            }
        }
    });
}
