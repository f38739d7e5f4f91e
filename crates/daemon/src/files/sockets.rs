//! Unix sockets at stable paths: made with their mode, put in place in one step, and never taken from another process.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, Permissions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{Address, AddressError};
use block::held::{self, Reach};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};

use crate::config::SocketAccess;
use crate::files::lock::{FolderLock, LockError};
use crate::take_over::Listening;

/// The mode of a private folder of sockets, for the daemon's user alone.
const FOLDER_MODE: u32 = 0o700;
/// The mode if others may connect to some sockets: every user may pass through, and each socket's mode says who may connect.
const SHARED_FOLDER_MODE: u32 = 0o711;
/// The bits of a socket's mode that let its owner connect.
const OWNER_CONNECTS: u32 = 0o600;
/// How many connections the kernel queues for a volume's port.
const PORT_BACKLOG: i32 = 128;
/// How often the lock of the folder is tried, and the pause in between: an ending process releases all its locks within a moment.
const LOCK_TRIES: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(1);
/// The temporary name of a new socket. It is shorter than any volume's name, so it fits wherever those do.
const UNFINISHED: &str = ".bind";

pub(crate) struct SocketFolder {
    folder: PathBuf,
    /// Whether this daemon also made the folder above it.
    made_parent: bool,
    /// Held while a socket is made, because all have the same temporary name.
    binding: Mutex<()>,
    grants: Arc<Grants>,
    listening: Listening,
    _lock: FolderLock,
}

/// The users of VMs' QEMUs by volume: only they may connect to their disks.
#[derive(Debug, Default)]
pub(crate) struct Grants(Mutex<BTreeMap<String, u32>>);

impl Grants {
    /// Gives a volume's socket to a user, when it is made the next time.
    pub(crate) fn give(&self, volume: &str, user: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(volume.to_owned(), user);
    }

    /// Takes a volume's socket back, when it is made the next time.
    pub(crate) fn take(&self, volume: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(volume);
    }

    fn user_of(&self, volume: &str) -> Option<u32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(volume).copied()
    }
}

/// Why a socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path is not valid for a socket.
    #[error("the path of the socket cannot be used; choose a folder with a shorter path: --api unix:PATH")]
    Path(#[from] AddressError),
    /// Another process listens at the path.
    #[error("another daemon listens at {0}; stop it, or choose another address with --api unix:PATH")]
    Taken(PathBuf),
    /// Something else than a socket has the path.
    #[error("{0} exists and is no socket; move it away")]
    NotASocket(PathBuf),
    /// Another user could change the folder.
    #[error("{folder} belongs to another user ({owner}); choose another folder with --api unix:PATH")]
    NotOurs {
        /// The path of the folder.
        folder: PathBuf,
        /// The number of the folder's owner.
        owner: u32,
    },
    /// Another user could replace the folder.
    #[error(
        "users other than root can replace {folder}: a folder above it belongs to them, or they may write there; choose another \
         folder with --api unix:PATH"
    )]
    Exchangeable {
        /// The path of the folder.
        folder: PathBuf,
    },
    /// Another daemon has locked the folder.
    #[error("the folder of the sockets cannot be used")]
    Locked(#[from] LockError),
    /// The socket cannot be given to its configured owner.
    #[error(
        "{path} cannot be given to {owner}: a daemon that is not root can give sockets only to its own groups"
    )]
    Owner {
        /// The path of the socket.
        path: PathBuf,
        /// The owner in the configuration.
        owner: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The system refused an operation.
    #[error("cannot {operation} {path}")]
    Io {
        /// The failed operation, as a verb.
        operation: &'static str,
        /// The path of the folder or socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

impl SocketFolder {
    /// Makes the folder if it does not exist, and locks it for this daemon.
    pub(crate) fn open(folder: &Path, listening: Listening) -> Result<Self, SocketError> {
        let failed = |source| SocketError::Io { operation: "make", path: folder.to_owned(), source };
        let made_parent = folder.parent().is_some_and(|parent| !parent.exists());
        DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder).map_err(failed)?;
        // A folder below another user's folder can be replaced at any time.
        let held = held::find(folder).map_err(failed)?;
        if !held::is_own_user(held.owner()) {
            return Err(SocketError::NotOurs { folder: folder.to_owned(), owner: held.owner() });
        }
        if held.reach() == Reach::Others {
            return Err(SocketError::Exchangeable { folder: folder.to_owned() });
        }
        let lock = acquire_soon(folder)?;
        // Its sockets may have been shared earlier.
        std::fs::set_permissions(folder, Permissions::from_mode(FOLDER_MODE)).map_err(failed)?;
        Ok(Self {
            folder: folder.to_owned(),
            made_parent,
            binding: Mutex::new(()),
            grants: Arc::default(),
            listening,
            _lock: lock,
        })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn volume_socket(&self, volume: &str) -> PathBuf {
        self.folder.join(format!("{volume}.sock"))
    }

    /// Returns which QEMU users may connect to the volumes' sockets.
    pub(crate) fn grants(&self) -> Arc<Grants> {
        Arc::clone(&self.grants)
    }

    /// Gives a volume's socket, also whenever it is made again, to a user whose QEMU has the volume as a disk.
    pub(crate) fn grant(&self, volume: &str, user: u32) -> Result<(), SocketError> {
        let path = self.volume_socket(volume);
        let failed = |source| SocketError::Io { operation: "give to QEMU", path: path.clone(), source };
        let _binding = self.binding.lock().unwrap_or_else(PoisonError::into_inner);
        self.grants.give(volume, user);
        self.let_others_through().map_err(failed)?;
        match std::os::unix::fs::lchown(&path, Some(user), None) {
            // The socket does not exist yet: it gets its owner when it is made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            given => given.map_err(failed),
        }
    }

    /// Checks that a volume's socket can have its path; fails with [`SocketError::Path`].
    pub(crate) fn check(&self, volume: &str) -> Result<(), SocketError> {
        Address::unix(self.volume_socket(volume))?;
        Ok(())
    }

    /// Returns the listening sockets, and what an earlier daemon has left.
    pub(crate) fn listening(&self) -> &Listening {
        &self.listening
    }

    /// Stops listening for a volume, and removes its socket.
    pub(crate) fn forget_volume(&self, volume: &str) -> io::Result<()> {
        self.listening.forget(volume);
        remove(&self.volume_socket(volume))
    }

    /// Listens at a volume's socket: at the one that an earlier daemon has left, if it exists.
    /// Replaces an existing socket in one step: clients find the old one or the new one. This folder is locked, so the old one
    /// belongs to a daemon that has ended. It may seem alive for a while, because the kernel closes the listener of a killed
    /// daemon only when its io_uring has been taken down.
    pub(crate) fn bind_volume(&self, volume: &str, access: &SocketAccess) -> Result<OwnedFd, SocketError> {
        let (path, user) = (self.volume_socket(volume), self.grants.user_of(volume));
        if let Some(left) = self.listening.claim_path(volume, &path) {
            match self.give_access(&path, &path, access, user) {
                Ok(()) => return Ok(left),
                Err(error) => tracing::warn!(%volume, %error, "made its socket again"),
            }
        }
        let listener = self.bind(&path, access, user)?;
        self.listening.made_path(volume, &listener, &path);
        Ok(listener)
    }

    /// Listens at `path`, which is in the folder above this one. Replaces a socket at which no process listens.
    pub(crate) fn bind_api(&self, path: &Path, access: &SocketAccess) -> Result<OwnedFd, SocketError> {
        if UnixStream::connect(path).is_ok() {
            return Err(SocketError::Taken(path.to_owned()));
        }
        self.bind(path, access, None)
    }

    /// Listens at `path`. `user` is the user of a VM's QEMU that has it as a disk.
    fn bind(&self, path: &Path, access: &SocketAccess, user: Option<u32>) -> Result<OwnedFd, SocketError> {
        Address::unix(path)?;
        check_replaceable(path)?;
        let _binding = self.binding.lock().unwrap_or_else(PoisonError::into_inner);
        let unfinished = self.folder.join(UNFINISHED);
        let failed = |source| SocketError::Io { operation: "make the socket", path: path.to_owned(), source };
        remove(&unfinished).map_err(failed)?;
        let listener = UnixListener::bind(&unfinished).map_err(failed)?;
        self.give_access(&unfinished, path, access, user)?;
        std::fs::rename(&unfinished, path).map_err(failed)?;
        Ok(listener.into())
    }

    /// Sets the owner and the mode of the socket at `made`; `path` is its final path.
    fn give_access(
        &self,
        made: &Path,
        path: &Path,
        access: &SocketAccess,
        user: Option<u32>,
    ) -> Result<(), SocketError> {
        let failed = |source| SocketError::Io { operation: "make the socket", path: path.to_owned(), source };
        if let Some(owner) = &access.owner {
            let refused =
                |source| SocketError::Owner { path: path.to_owned(), owner: owner.to_string(), source };
            std::os::unix::fs::chown(made, owner.user, owner.group).map_err(refused)?;
        }
        if user.is_some() {
            std::os::unix::fs::lchown(made, user, None).map_err(failed)?;
        }
        // After the owner, so that no user can connect in between who may not afterwards.
        let mode = access.mode.bits() | user.map_or(0, |_| OWNER_CONNECTS);
        let mode = Permissions::from_mode(mode);
        std::fs::set_permissions(made, mode).map_err(failed)?;
        let is_anothers = access.owner.as_ref().is_some_and(|owner| owner.user.is_some());
        if access.mode.is_shared() || is_anothers || user.is_some() {
            self.let_others_through().map_err(failed)?;
        }
        Ok(())
    }

    /// Lets other users reach shared sockets. Leaves a folder above unchanged if this daemon did not make it.
    fn let_others_through(&self) -> io::Result<()> {
        std::fs::set_permissions(&self.folder, Permissions::from_mode(SHARED_FOLDER_MODE))?;
        let Some(parent) = self.folder.parent() else { return Ok(()) };
        if self.made_parent {
            return std::fs::set_permissions(parent, Permissions::from_mode(SHARED_FOLDER_MODE));
        }
        if std::fs::metadata(parent)?.mode() & 0o011 == 0 {
            let folder = parent.display();
            tracing::warn!(%folder, "other users cannot reach the sockets that are shared with them: chmod go+x it");
        }
        Ok(())
    }
}

/// Listens on a port, also of an address that this host does not have yet.
pub(crate) fn listen(address: &str) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address);
    let Err(error) = &listener else { return listener };
    let (io::ErrorKind::AddrNotAvailable, Ok(address)) = (error.kind(), address.parse::<SocketAddr>()) else {
        return listener;
    };
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    match address {
        SocketAddr::V4(_) => sockopt::set_ip_freebind(&socket, true)?,
        SocketAddr::V6(_) => sockopt::set_ipv6_freebind(&socket, true)?,
    }
    net::bind(&socket, &address)?;
    net::listen(&socket, PORT_BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket, if it exists.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Returns the address for an NBD client.
pub(crate) fn volume_uri(volume: &str, socket: &Path) -> String {
    // Names need no escapes. Paths may, for characters that a query does not allow.
    let escaped = socket.as_os_str().as_encoded_bytes().iter().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'.' | b'_' | b'~' => {
            char::from(*byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    });
    format!("nbd+unix:///{volume}?socket={}", escaped.collect::<String>())
}

/// Locks the folder. The daemon that had the data folder has ended, and may release this lock a moment later.
fn acquire_soon(folder: &Path) -> Result<FolderLock, LockError> {
    for _ in 0..LOCK_TRIES {
        match FolderLock::acquire(folder) {
            Err(LockError::Held { .. }) => std::thread::sleep(LOCK_PAUSE),
            result => return result,
        }
    }
    FolderLock::acquire(folder)
}

fn check_replaceable(path: &Path) -> Result<(), SocketError> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(SocketError::Io { operation: "examine", path: path.to_owned(), source }),
        Ok(found) if !found.file_type().is_socket() => Err(SocketError::NotASocket(path.to_owned())),
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::net::UnixStream;
    use std::path::Path;

    use super::{SocketError, SocketFolder, volume_uri};
    use crate::config::SocketAccess;
    use crate::take_over::{Estate, Listening, ServiceManager};

    fn nothing_left() -> Listening {
        Listening::new(ServiceManager::Absent, Estate::default())
    }

    fn open(folder: &Path) -> SocketFolder {
        SocketFolder::open(folder, nothing_left()).unwrap()
    }

    #[test]
    fn socket_is_private_and_replaces_a_dead_one_only() {
        let private = SocketAccess::default();
        let parent = tempfile::tempdir().unwrap();
        let folder = open(&parent.path().join("run/volumes"));
        let path = parent.path().join("run/api.sock");
        let listener = folder.bind_api(&path, &private).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        assert!(matches!(folder.bind_api(&path, &private), Err(SocketError::Taken(_))));
        drop(listener);
        let _listener = folder.bind_api(&path, &private).unwrap();
        UnixStream::connect(&path).unwrap();

        // No other process makes sockets in this folder.
        let _ghost = folder.bind_volume("a", &private).unwrap();
        let _listener = folder.bind_volume("a", &private).unwrap();
        UnixStream::connect(folder.volume_socket("a")).unwrap();

        let file = parent.path().join("run/file");
        std::fs::write(&file, b"precious").unwrap();
        assert!(matches!(folder.bind_api(&file, &private), Err(SocketError::NotASocket(_))));
        assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    }

    #[test]
    fn socket_that_is_shared_is_reached_by_those_it_is_shared_with() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("run/volumes");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = open(&path);
        assert_eq!(mode(&path), 0o700);
        let group = rustix::process::getegid().as_raw();
        let access =
            SocketAccess { mode: "0660".parse().unwrap(), owner: Some(format!(":{group}").parse().unwrap()) };
        let _listener = folder.bind_volume("a", &access).unwrap();
        assert_eq!((mode(&path), mode(&folder.volume_socket("a"))), (0o711, 0o660));
        assert_eq!(mode(&parent.path().join("run")), 0o711);
    }

    #[test]
    fn socket_of_a_disk_is_its_qemus_now_and_when_it_is_made_again() {
        if !rustix::process::geteuid().is_root() {
            return omission::machine_lacks("root, to give a socket away");
        }
        let parent = tempfile::tempdir().unwrap();
        let folder = open(&parent.path().join("run/volumes"));
        let owner = |volume: &str| {
            let found = std::fs::metadata(folder.volume_socket(volume)).unwrap();
            (found.uid(), found.permissions().mode() & 0o777)
        };
        // Whatever its configured owner, the disk's user connects.
        let access = SocketAccess { mode: "0060".parse().unwrap(), owner: Some("7:8".parse().unwrap()) };
        let _listener = folder.bind_volume("a", &access).unwrap();
        assert_eq!(owner("a"), (7, 0o060));
        folder.grant("a", 5).unwrap();
        assert_eq!(owner("a").0, 5);
        folder.grant("b", 5).unwrap();
        let _listeners = ["a", "b", "c"].map(|volume| folder.bind_volume(volume, &access).unwrap());
        assert_eq!([owner("a"), owner("b"), owner("c")], [(5, 0o660), (5, 0o660), (7, 0o060)]);
        assert_eq!(std::fs::metadata(parent.path().join("run/volumes")).unwrap().mode() & 0o777, 0o711);
        folder.grants().take("a");
        let _listener = folder.bind_volume("a", &access).unwrap();
        assert_eq!(owner("a"), (7, 0o060));
    }

    #[test]
    fn two_daemons_do_not_share_a_folder_of_sockets() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("volumes");
        let _first = open(&path);
        assert!(matches!(SocketFolder::open(&path, nothing_left()), Err(SocketError::Locked(_))));
    }

    #[test]
    fn path_that_is_too_long_is_refused_before_anything_is_done() {
        let parent = tempfile::tempdir().unwrap();
        let folder = open(&parent.path().join("x".repeat(60)));
        folder.check("a").unwrap();
        let error = folder.check(&"y".repeat(60)).unwrap_err();
        assert!(error.to_string().contains("choose a folder with a shorter path"), "{error}");
    }

    #[test]
    fn uri_escapes_what_a_query_cannot_hold() {
        let uri = volume_uri("a.b", Path::new("/run/my disks&co/a.b.sock"));
        assert_eq!(uri, "nbd+unix:///a.b?socket=/run/my%20disks%26co/a.b.sock");
    }
}
