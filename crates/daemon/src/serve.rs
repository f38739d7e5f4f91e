//! The life of a daemon, from its start to its end.
//!
//! ```text
//!   lock the data folder ► journal ► stores ► end interrupted migrations ► settle left-over files
//!        ► volumes get their lanes, waiting for locked images ► API
//!        ► the service manager is notified
//!   SIGTERM, SIGINT, another daemon ► API closed ► operations end ► lanes drain ► sockets removed, or passed on with their
//!                                     clients; a second signal: at once
//! ```
//! Nothing is served before the journal says who owns it. A volume with a problem keeps no other from being served.

use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use migration::CommitFault;
use migration::journal::State;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::audit::Audit;
use crate::config::{Config, DEFAULT_STORE, RunsAs, StoreConfig};
use crate::custody::Custody;
use crate::fail_point::{self, UnknownFailPoint};
use crate::files::descriptors;
use crate::files::lock::{Ending, FolderLock, LockError};
use crate::files::sockets::{self, SocketError, SocketFolder};
use crate::host::reload::ReadConfig;
use crate::host::{Books, Host, Parts};
use crate::hosts::Hosts;
use crate::http;
use crate::journal::{Journal, JournalError, now_unix_ms};
use crate::migrations::recovery;
use crate::peers::Peers;
use crate::service_manager;
use crate::stores::Stores;
use crate::take_over::{
    self, Action, Asked, Clients, Departure, Estate, Event, Heir, Listening, ServiceManager, Successors,
    TakeOverError,
};
use crate::volumes::chronicles::Chronicles;
use crate::volumes::exports::encryption;

/// The time between two attempts to get a port: a daemon that is being replaced releases it sooner.
const PORT_RETRY: Duration = Duration::from_secs(1);
/// How long clients of the API have to read their answers when guests wait for the next daemon.
const ANSWERS_WAIT_MAX: Duration = Duration::from_millis(20);

/// Why a daemon could not start, or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A folder cannot be made.
    #[error("the folder {path} cannot be made")]
    Folder {
        /// The path of the folder.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// Another daemon has locked the data folder.
    #[error("the data folder cannot be used{}", what_to_do(.0))]
    DataFolder(#[source] LockError),
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The journal cannot be written.
    #[error("interrupted migrations cannot be ended: the journal cannot be written")]
    Recovery(#[source] CommitFault),
    /// The sockets cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The certificate or key for TLS cannot be used.
    #[error("volumes cannot be served over TLS: correct nbd.tls in the configuration")]
    Credentials(#[source] lane::CredentialsError),
    /// The API cannot be served.
    #[error("the API cannot be served")]
    Api(#[source] std::io::Error),
    /// The environment names an unknown fail point.
    #[error(transparent)]
    FailPoint(#[from] UnknownFailPoint),
    /// The running daemon cannot be replaced.
    #[error("cannot take over")]
    TakeOver(#[source] TakeOverError),
    /// A second signal ended the process at once.
    #[error("stopped at once; the next start completes interrupted operations")]
    StoppedAtOnce,
}

fn what_to_do(error: &LockError) -> &'static str {
    match error {
        LockError::Held { .. } => {
            "; stop the daemon that has it, or add --take-over, which breaks no connection"
        }
        _ => "",
    }
}

/// Whose clients a daemon adopts at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The clients that the service manager has kept, if it has started this daemon.
    Alone,
    /// Those of the daemon that has the data folder, which is asked to end.
    TakeOver,
}

/// Runs a daemon until SIGTERM or SIGINT, or until another one replaces it. At SIGHUP it reads the configuration by `read`.
///
/// # Errors
/// [`ServeError`]: the daemon could not start, or had to stop.
pub async fn serve(config: Config, start: Start, read: ReadConfig) -> Result<(), ServeError> {
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate()).map_err(ServeError::Api)?,
        signal(SignalKind::interrupt()).map_err(ServeError::Api)?,
    );
    let mut asked =
        async move || tokio::select! { _ = terminate.recv() => "SIGTERM", _ = interrupt.recv() => "SIGINT" };
    let manager = service_manager::presence();
    let starting = async {
        let kept = take_over::kept();
        let (left, ending) = match start {
            Start::Alone => (kept, Ending::ToBeSeen),
            Start::TakeOver => match ask_for_clients(&config.data_dir).await? {
                Some(left) => (left, Ending::Announced),
                None => (kept, Ending::ToBeSeen),
            },
        };
        Daemon::start_with(config, manager, left, ending).await
    };
    // A signal also ends a start, which may wait for long: for a locked image.
    let daemon = tokio::select! {
        daemon = starting => daemon?,
        signal = asked() => {
            tracing::info!(signal, "stopped while starting");
            return Ok(());
        }
    };
    daemon.run_until_asked(manager, asked, read).await
}

async fn ask_for_clients(data_dir: &Path) -> Result<Option<Estate>, ServeError> {
    descriptors::raise_limit();
    let data_dir = data_dir.to_owned();
    let asking = tokio::task::spawn_blocking(move || take_over::take_over(&data_dir)).await;
    asking.unwrap_or(Ok(None)).map_err(ServeError::TakeOver)
}

/// A daemon that serves its volumes, and soon its API.
pub struct Daemon {
    host: Arc<Host>,
    listener: UnixListener,
    api: PathBuf,
    /// SIGHUP. Received from the start on, because without a handler it would end the process.
    hang_ups: Signal,
    /// Daemons that ask to adopt this one's clients.
    successors: Successors,
}

impl Daemon {
    /// Starts: when this returns, volumes are served, and the API's socket accepts connections.
    ///
    /// # Errors
    /// [`ServeError`]: nothing is served.
    pub async fn start(config: Config) -> Result<Self, ServeError> {
        Self::start_with(config, ServiceManager::Absent, Estate::default(), Ending::ToBeSeen).await
    }

    /// Starts with the restart state of an earlier daemon.
    async fn start_with(
        config: Config,
        manager: ServiceManager,
        left: Estate,
        ending: Ending,
    ) -> Result<Self, ServeError> {
        fail_point::arm_from_environment()?;
        let hang_ups = signal(SignalKind::hangup()).map_err(ServeError::Api)?;
        let api = config.api.path().to_owned();
        make_folder(&config.data_dir)?;
        keep_to_owner(&config.data_dir)?;
        descriptors::raise_limit();
        let (since_unix_ms, passed) = (left.since_unix_ms, left.clients.len());
        if passed > 0 {
            fail_point::before(fail_point::Step::TakeUp);
        }
        let lock = FolderLock::acquire_after_its_holder(&config.data_dir, ending).await;
        let lock = lock.map_err(ServeError::DataFolder)?;
        let journal = Journal::open(&config.data_dir, lock)?;
        let chronicles = Chronicles::open(&config.data_dir);
        let chronicles =
            chronicles.map_err(|source| ServeError::Folder { path: config.data_dir.clone(), source })?;
        let encryption = encryption(&config.nbd).map_err(ServeError::Credentials)?;
        let stores = open_stores(&config)?;
        let sockets = SocketFolder::open(&config.volume_sockets_dir, Listening::new(manager, left))?;
        let successors = Successors::listen(&config.data_dir);
        if config.machines.runs_as == RunsAs::Root && config.hosts.machines {
            tracing::warn!(
                "QEMU runs as root: create a user for it, which the daemon then uses: useradd --system --gid kvm sterna-qemu"
            );
        }
        let listener = listen(sockets.bind_api(&api, &config.api_socket)?)?;
        let custody = Custody::new(journal.clone(), &stores);
        recovery::run(&journal, &custody).await.map_err(ServeError::Recovery)?;
        settle(&stores, &custody, &journal.read(State::clone));
        chronicles.sweep(&journal.read(State::clone));
        let peers = Peers::new(tokio::runtime::Handle::current());
        let audit = Audit::begin(&config.data_dir);
        let hosts = Hosts::start(&config, audit.clone(), Arc::clone(&peers) as Arc<dyn transport::Receiver>);
        let parts = Parts::new(
            config,
            Books { audit, journal, chronicles },
            stores,
            sockets,
            encryption,
            hosts,
            Arc::clone(&peers),
        );
        let host = Host::new(&parts);
        peers.connect(&host);
        host.migration_orders.account_for_migrations();
        host.serving.serve_all().await;
        if passed > 0 {
            let waited_ms = now_unix_ms().saturating_sub(since_unix_ms);
            fail_point::after(fail_point::Step::TakeUp);
            let still_waiting = parts.sockets.listening().waiting();
            tracing::info!(
                clients = passed,
                still_waiting,
                waited_ms,
                "adopted clients of the previous daemon"
            );
        }
        parts.vms.find_running();
        host.resumption.resume_interrupted().await;
        host.migration_hooks.settle_hooks();
        host.vm_orders.settle_vms().await;
        host.vm_orders.settle_holds();
        host.vm_orders.settle_domains();
        host.vm_orders.start_at_boot();
        host.vm_orders.begin_to_see_to_stalls();
        host.resumption.close_unknown_clients();
        host.migration_orders.run_queue().await;
        host.migration_orders.go_on_with_interrupted().await;
        host.standbys.begin();
        peers.begin();
        host.ownership.begin_restoration();
        host.volume_orders.begin_retention();
        host.notices.begin();
        host.evacuations.resume().await;
        tracing::info!(api = %api.display(), volumes = parts.volumes.list().len(), "ready");
        Ok(Self { host, listener, api, hang_ups, successors })
    }

    /// Serves the API until `stop` resolves, then stops in order.
    ///
    /// # Errors
    /// [`ServeError::Api`]: the API cannot be served.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<(), ServeError> {
        let stop = async move {
            stop.await;
            Clients::Closed
        };
        let Self { host, listener, api, hang_ups, successors: _successors } = self;
        let config = Arc::clone(&host.config);
        let read: ReadConfig = Arc::new(move || Ok(Config::clone(&config)));
        run(host, listener, api, (hang_ups, read), stop).await.map(drop)
    }

    /// Serves until a signal from `signals`, or until another daemon asks to replace it; see [`Departure`].
    async fn run_until_asked(
        self,
        manager: ServiceManager,
        mut signals: impl AsyncFnMut() -> &'static str,
        read: ReadConfig,
    ) -> Result<(), ServeError> {
        let Self { host, listener, api, hang_ups, mut successors } = self;
        let mut departure = Departure::new(manager);
        let (stop, stopped) = oneshot::channel::<Clients>();
        // The sender exists until the end: an error would mean that no stop can be requested.
        let stopped = async move { stopped.await.unwrap_or(Clients::Closed) };
        let mut running = pin!(run(host, listener, api, (hang_ups, read), stopped));
        let (mut stop, mut left) = (Some(stop), None);
        loop {
            let event = tokio::select! {
                ended = &mut running, if left.is_none() => {
                    left = Some(ended?);
                    Event::Ended
                }
                signal = signals() => {
                    tracing::info!(signal, "stopping; a second signal ends the daemon at once");
                    Event::Signal
                }
                asked = successors.next() => match asked {
                    Asked::Asks(successor) => Event::Asks(successor),
                    Asked::Gone(successor) => Event::Gone(successor),
                },
            };
            departure.handle(event);
            while let Some(action) = departure.poll_action() {
                match action {
                    Action::Refuse(successor, reason) => successors.refuse(successor, reason),
                    Action::End(clients) => {
                        if let Event::Asks(successor) = event {
                            tracing::info!("stopping: another daemon takes over");
                            successors.accept(successor);
                        }
                        // N.B. From here on the daemon stops, and nothing undoes that.
                        let _ = stop.take().map(|stop| stop.send(clients));
                    }
                    Action::Deliver(heir) => {
                        let estate = left.take().unwrap_or_default();
                        departure.handle(deliver(&mut successors, heir, estate).await);
                    }
                    Action::Close => drop(left.take()),
                    Action::Exit => return Ok(()),
                    Action::StopAtOnce => return Err(ServeError::StoppedAtOnce),
                }
            }
        }
    }
}

/// Delivers the restart state, and returns the result.
async fn deliver(successors: &mut Successors, heir: Heir, estate: Estate) -> Event {
    let (clients, sockets) = (estate.clients.len(), estate.listeners.len());
    fail_point::before(fail_point::Step::PassOn);
    let delivered = match heir {
        Heir::Successor(successor) => successors.deliver(successor, &estate).await,
        Heir::ServiceManager => {
            let kept = tokio::task::spawn_blocking(move || take_over::keep(&estate)).await;
            kept.unwrap_or_else(|error| Err(std::io::Error::other(error)))
        }
    };
    match delivered {
        Ok(()) => {
            fail_point::after(fail_point::Step::PassOn);
            tracing::info!(clients, sockets, ?heir, "clients are handed over");
            Event::Delivered
        }
        Err(error) => {
            tracing::warn!(clients, ?heir, %error, "cannot hand over clients: they connect again");
            Event::Failed
        }
    }
}

/// Serves the API until `stop` resolves with what happens to clients, then stops in order. Returns the restart state.
async fn run(
    host: Arc<Host>,
    listener: UnixListener,
    api: PathBuf,
    (hang_ups, read): (Signal, ReadConfig),
    stop: impl Future<Output = Clients> + Send + 'static,
) -> Result<Estate, ServeError> {
    let (closing, closed) = oneshot::channel();
    let router = http::router(Arc::clone(&host));
    let watched = router.clone();
    let server = tokio::spawn(http::serve(listener, router, async move {
        // The receiver is gone if the server has failed.
        let _ = closing.send(stop.await);
    }));
    let page = host.config.web.listen.map(|address| tokio::spawn(serve_page(address, Arc::clone(&host))));
    let remote = tokio::spawn(serve_remote(Arc::clone(&host)));
    let hang_ups = tokio::spawn(Arc::clone(&host.reloading).reload_at_hang_up(hang_ups, read));
    // Until the end, because stopping may take long, and the daemon must be seen alive meanwhile.
    let is_alive = move || http::answers(watched.clone());
    let alive = tokio::spawn(service_manager::feed_watchdog(is_alive));
    service_manager::tell_ready(host.description.describe().volumes);
    // Resolves at a stop, or when the server has failed and dropped its side.
    let ending = closed.await.ok();
    hang_ups.abort();
    page.iter().for_each(JoinHandle::abort);
    service_manager::tell_stopping();
    // Open connections get their answers while the lanes drain.
    if let Err(error) = sockets::remove(&api) {
        tracing::warn!(path = %api.display(), %error, "the API's socket is left over");
    }
    let (clients, has_failed) = (ending.unwrap_or(Clients::Closed), ending.is_none());
    let left = host.shutdown.stop(clients).await;
    host.standbys.end().await;
    // Guests do not wait for a client of the API.
    let answers_wait_max = match clients {
        Clients::Closed => host.shutdown.wait_max(),
        Clients::PassedOn => ANSWERS_WAIT_MAX,
    };
    let remote_end = remote.abort_handle();
    let answered = tokio::time::timeout(answers_wait_max, async { (server.await, remote.await) }).await;
    if answered.is_err() {
        tracing::warn!("a client of the API does not read its response");
    }
    // The next daemon needs the port.
    remote_end.abort();
    alive.abort();
    // No further order can come.
    if tokio::task::spawn_blocking(move || host.access.audit.flush()).await.is_err() {
        tracing::warn!("the audit log may lack its last entries");
    }
    if has_failed {
        return Err(ServeError::Api(std::io::ErrorKind::BrokenPipe.into()));
    }
    tracing::info!("stopped");
    Ok(left)
}

/// Serves the page on a port, as soon as the port is free, until the daemon stops.
async fn serve_page(address: SocketAddr, host: Arc<Host>) {
    let listener = listen_in_the_end(address, "the page").await;
    host.access.sign_ins.listens();
    tracing::info!(url = %format_args!("http://{address}/"), "the page is served");
    http::serve(listener, http::page_router(Arc::clone(&host)), host.stopping.begins()).await;
}

/// Serves the API over TLS, if configured, as soon as its port is free, until the daemon stops.
async fn serve_remote(host: Arc<Host>) {
    let (Some(address), Some(acceptor)) = (host.config.api_tls.listen, host.access.grants.acceptor()) else {
        return;
    };
    let listener = tokio::select! {
        listener = listen_in_the_end(address, "the API over TLS") => listener,
        () = host.stopping.begins() => return,
    };
    tracing::info!(%address, "the API is served over TLS");
    let router = http::remote_router(Arc::clone(&host));
    http::remote::serve(listener, acceptor, Arc::clone(&host.access.grants), router, host.stopping.begins())
        .await;
}

/// Listens on a port as soon as it is free.
async fn listen_in_the_end(address: SocketAddr, what: &str) -> TcpListener {
    let mut was_refused = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) => {
                if !std::mem::replace(&mut was_refused, true) {
                    tracing::warn!(%address, %error, "{what} is not served yet: the port is tried every second");
                }
                tokio::time::sleep(PORT_RETRY).await;
            }
        }
    }
}

fn make_folder(path: &Path) -> Result<(), ServeError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| ServeError::Folder { path: path.to_owned(), source })
}

/// Removes other users' access to the data folder.
fn keep_to_owner(data_dir: &Path) -> Result<(), ServeError> {
    use std::os::unix::fs::PermissionsExt as _;
    let failed = |source| ServeError::Folder { path: data_dir.to_owned(), source };
    let mode = std::fs::metadata(data_dir).map_err(failed)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    let closed = std::fs::set_permissions(data_dir, std::fs::Permissions::from_mode(mode & 0o7700));
    // Another user owns the folder, and decides.
    if let Err(error) = closed {
        tracing::warn!(path = %data_dir.display(), %error, "other users may read the data folder");
    }
    Ok(())
}

fn open_stores(config: &Config) -> Result<Stores, ServeError> {
    // The default store is made. A configured one may be a disk that is not mounted.
    if let Some(folder) = config
        .stores
        .get(DEFAULT_STORE)
        .and_then(StoreConfig::folder)
        .filter(|folder| folder.starts_with(&config.data_dir))
    {
        make_folder(folder)?;
    }
    let stores = Stores::new(&config.stores).with_impairments(&config.impairments);
    for store in stores.iter() {
        if let Some(impairment) = stores.impairment(store.name()) {
            tracing::warn!(store = store.name(), %impairment, "the store is for tests and demonstrations only");
        }
        if let Err(problem) = store.check() {
            tracing::warn!(store = store.name(), %problem, "cannot use the store at the moment");
        }
    }
    Ok(stores)
}

fn settle(stores: &Stores, custody: &Custody, state: &State) {
    for store in stores.iter().filter(|store| store.check().is_ok()) {
        if let Err(error) = store.settle(custody, state) {
            tracing::warn!(store = store.name(), %error, "cannot scan the store");
        }
    }
}

fn listen(socket: OwnedFd) -> Result<UnixListener, ServeError> {
    let listener = std::os::unix::net::UnixListener::from(socket);
    listener.set_nonblocking(true).map_err(ServeError::Api)?;
    UnixListener::from_std(listener).map_err(ServeError::Api)
}
