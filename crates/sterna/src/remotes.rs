//! Daemons that this user reaches over TLS: their addresses and keys, and the user's own key.
//!
//! ```text
//!   ~/.config/sterna/identity/      this user's key and certificate, made by the first `sterna remote add`
//!   ~/.config/sterna/remotes.json   daemons, by their addresses, each with the key that it must have
//! ```
//! As between hosts, keys are pinned: certificate authorities and names have no meaning.

use std::fmt;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use api::{Client, Connect, Connecting};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use transport::pinned::{self, Connector, GarbledAccessToken};
use transport::{HostId, Identity, IdentityError};

/// Scheme of the addresses. Clients speak HTTP over TLS, as other programs write it.
const SCHEME: &str = "https://";
const PORT: u16 = 7425;
/// Longest time for connecting. A longer wait means a wrong address.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(10);
const VERSION: u32 = 1;
/// Names of the file, and of the folder with this user's key.
const FILE: &str = "remotes.json";
const IDENTITY_FOLDER: &str = "identity";

/// Address of a daemon over TLS: `https://HOST[:PORT]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    host: String,
    port: u16,
}

#[derive(Debug)]
pub(crate) struct Remotes {
    folder: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Remote {
    pub(crate) address: String,
    /// Digest of its public key, 64 hexadecimal digits.
    pub(crate) key: String,
}

/// Why a daemon cannot be used over TLS.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoteError {
    #[error("there is no folder for keys: set HOME")]
    NoHome,
    /// The daemon was not added.
    #[error(
        "this user has not added the daemon {0}; an administrator there runs: sterna access grant NAME --role ROLE; then run \
         here: sterna remote add {0}"
    )]
    Unknown(RemoteAddress),
    #[error("the file {path} cannot be used")]
    File { path: PathBuf, source: io::Error },
    /// This user's key cannot be used.
    #[error("this user's key cannot be used")]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Token(#[from] GarbledAccessToken),
    /// The given text is no key.
    #[error("a key is written as 64 hexadecimal digits; sterna access list prints that of the daemon")]
    Key,
    /// The key cannot be used for TLS.
    #[error("TLS cannot be begun with this user's key")]
    Tls(#[source] io::Error),
}

#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    remotes: Vec<Remote>,
}

impl FromStr for RemoteAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" names no daemon: write https://HOST or https://HOST:PORT");
        let rest = text.strip_prefix(SCHEME).ok_or_else(wrong)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        // An IPv6 address is in brackets, and contains colons.
        let after_address = rest.rfind(']').map_or(0, |bracket| bracket + 1);
        let (host, port) = match rest[after_address..].find(':') {
            Some(colon) => {
                let (host, port) = (&rest[..after_address + colon], &rest[after_address + colon + 1..]);
                (host, port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?)
            }
            None => (rest, PORT),
        };
        let is_name = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
        };
        let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_fine = in_brackets
            .map_or_else(|| is_name(host), |address| address.parse::<std::net::Ipv6Addr>().is_ok());
        if is_fine { Ok(Self { host: host.to_ascii_lowercase(), port }) } else { Err(wrong()) }
    }
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}:{}", self.host, self.port)
    }
}

impl Remotes {
    /// Returns the daemons of the user that runs this process.
    pub(crate) fn of_this_user() -> Result<Self, RemoteError> {
        let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let config = absolute("XDG_CONFIG_HOME").or_else(|| Some(absolute("HOME")?.join(".config")));
        Ok(Self { folder: config.ok_or(RemoteError::NoHome)?.join("sterna") })
    }

    /// Returns all daemons, by address.
    pub(crate) fn list(&self) -> Result<Vec<Remote>, RemoteError> {
        let path = self.folder.join(FILE);
        let read = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            read => read,
        };
        let content = read.and_then(|text| {
            let content: Content = serde_json::from_slice(&text)?;
            if content.version == VERSION {
                Ok(content)
            } else {
                Err(io::Error::other("it is of a newer version"))
            }
        });
        Ok(content.map_err(|source| RemoteError::File { path, source })?.remotes)
    }

    /// Adds a daemon, or replaces the one at the same address.
    pub(crate) fn put(&self, address: &RemoteAddress, key: HostId) -> Result<Remote, RemoteError> {
        let mut remotes = self.list()?;
        let remote = Remote { address: address.to_string(), key: key.to_string() };
        remotes.retain(|other| other.address != remote.address);
        remotes.push(remote.clone());
        remotes.sort_by(|one, other| one.address.cmp(&other.address));
        self.write(remotes)?;
        Ok(remote)
    }

    pub(crate) fn remove(&self, address: &RemoteAddress) -> Result<Remote, RemoteError> {
        let mut remotes = self.list()?;
        let at = remotes.iter().position(|remote| remote.address == address.to_string());
        let removed = remotes.remove(at.ok_or_else(|| RemoteError::Unknown(address.clone()))?);
        self.write(remotes)?;
        Ok(removed)
    }

    /// Returns this user's key, which is made if there is none.
    pub(crate) fn own_identity(&self) -> Result<Identity, RemoteError> {
        let folder = self.folder.join(IDENTITY_FOLDER);
        if folder.exists() {
            return Ok(Identity::load(&folder)?);
        }
        self.make_folder()?;
        match Identity::create(&folder, "sterna-client") {
            // Another command has just made it.
            Err(IdentityError::Exists { .. }) => Ok(Identity::load(&folder)?),
            made => Ok(made?),
        }
    }

    pub(crate) fn client(&self, address: &RemoteAddress) -> Result<Client, RemoteError> {
        let remote = self.list()?.into_iter().find(|remote| remote.address == address.to_string());
        let remote = remote.ok_or_else(|| RemoteError::Unknown(address.clone()))?;
        let key = remote.key.parse().map_err(|_| RemoteError::Key)?;
        client(address, &self.own_identity()?, key)
    }

    fn write(&self, remotes: Vec<Remote>) -> Result<(), RemoteError> {
        self.make_folder()?;
        let path = self.folder.join(FILE);
        let written = replace(&path, &Content { version: VERSION, remotes });
        written.map_err(|source| RemoteError::File { path, source })
    }

    fn make_folder(&self) -> Result<(), RemoteError> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        made.map_err(|source| RemoteError::File { path: self.folder.clone(), source })
    }
}

/// Returns a client that shows `identity`, of the daemon that has the key `key`.
pub(crate) fn client(
    address: &RemoteAddress,
    identity: &Identity,
    key: HostId,
) -> Result<Client, RemoteError> {
    let connector = Connector::new(identity, key).map_err(RemoteError::Tls)?;
    Ok(Client::over(Arc::new(Way { address: address.clone(), connector, key })))
}

fn replace(path: &Path, content: &Content) -> io::Result<()> {
    let begun = path.with_extension("new");
    std::fs::write(&begun, serde_json::to_vec_pretty(content)?)?;
    std::fs::rename(&begun, path)
}

/// The connection to a daemon over TLS.
struct Way {
    address: RemoteAddress,
    connector: Connector,
    key: HostId,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl Connect for Way {
    fn connect(&self) -> Connecting<'_> {
        Box::pin(async move {
            let stream = timeout(CONNECT_WAIT_MAX, self.begin()).await;
            Ok(Box::new(Judged(stream.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??)) as _)
        })
    }

    fn host(&self) -> String {
        format!("{}:{}", self.address.host, self.address.port)
    }
}

impl Way {
    async fn begin(&self) -> io::Result<pinned::ClientStream<TcpStream>> {
        let host = self.address.host.trim_matches(['[', ']']);
        let stream = TcpStream::connect((host, self.address.port)).await?;
        stream.set_nodelay(true)?;
        self.connector.connect(stream).await.map_err(|error| match pinned::other_server(&error) {
            Some(other) => io::Error::other(format!(
                "the daemon there has the key {} instead of {}: it is another one, or has lost its data folder; if it is the \
                 right daemon: sterna remote remove {}, and add it again",
                other.short(),
                self.key.short(),
                self.address,
            )),
            None => judged(error),
        })
    }
}

/// A connection that turns the daemon's refusal of an unknown client into an error. TLS 1.3 reports it only
/// after the connection is made.
struct Judged<S>(S);

fn judged(error: io::Error) -> io::Error {
    match pinned::is_refusal(&error) {
        true => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it closes the connection when it receives the key",
        ),
        false => error,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Judged<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer).map_err(judged)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Judged<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes).map_err(judged)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context).map_err(judged)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_write_them_and_one_daemon_has_one() {
        for (text, written) in [
            ("https://rack3-a", "https://rack3-a:7425"),
            ("https://Rack3.Example:99/", "https://rack3.example:99"),
            ("https://192.0.2.1", "https://192.0.2.1:7425"),
            ("https://[2001:DB8::1]:80", "https://[2001:db8::1]:80"),
        ] {
            assert_eq!(text.parse::<RemoteAddress>().unwrap().to_string(), written, "{text}");
        }
        for text in [
            "https://",
            "https://a:0",
            "https://a:x",
            "https://a/b",
            "https://a b",
            "https://[a]",
            "https://u@a",
            "a:1",
        ] {
            assert!(text.parse::<RemoteAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn remotes_and_the_key_are_kept_and_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let remotes = Remotes { folder: folder.path().join("a/sterna") };
        let [one, other] = ["https://a", "https://b:1"].map(|text| text.parse::<RemoteAddress>().unwrap());
        assert!(matches!(remotes.client(&one), Err(RemoteError::Unknown(_))));
        remotes.put(&other, HostId([1; 32])).unwrap();
        remotes.put(&one, HostId([1; 32])).unwrap();
        remotes.put(&one, HostId([2; 32])).unwrap();
        let listed = remotes.list().unwrap();
        assert_eq!(
            listed.iter().map(|remote| remote.address.as_str()).collect::<Vec<_>>(),
            ["https://a:7425", "https://b:1"]
        );
        assert_eq!(listed[0].key, HostId([2; 32]).to_string());
        assert_eq!(remotes.own_identity().unwrap().id(), remotes.own_identity().unwrap().id());
        remotes.remove(&one).unwrap();
        assert!(matches!(remotes.remove(&one), Err(RemoteError::Unknown(_))));
        std::fs::write(remotes.folder.join(FILE), r#"{"version": 2, "remotes": []}"#).unwrap();
        assert!(matches!(remotes.list(), Err(RemoteError::File { .. })));
    }
}
