//! The addresses at which other hosts reach this one.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use transport::Link;

use super::ConfigError;

const ADDRESSES_MAX: usize = 16;
/// The largest number of folders that are searched when a volume leaves: each may be on a server that does not answer.
const SHARED_FOLDERS_MAX: usize = 64;

/// The addresses at which other hosts reach this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsConfig {
    /// Addresses to listen on; empty: this host can only call others.
    pub listen: Vec<SocketAddr>,
    /// The links that other hosts learn; empty: the addresses in `listen`.
    pub links: Vec<Link>,
    /// Whether paired hosts may bring VMs, whose QEMU runs here.
    pub machines: bool,
    /// Absolute paths of folders, besides those of this host's stores, where other hosts' stores may be mounted.
    pub shared_folders: Vec<PathBuf>,
}

impl Default for HostsConfig {
    fn default() -> Self {
        Self { listen: Vec::new(), links: Vec::new(), machines: true, shared_folders: Vec::new() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileHosts {
    listen: Vec<SocketAddr>,
    links: Vec<FileLink>,
    machines: Option<bool>,
    shared_folders: Vec<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a link, for example { address = \"192.0.2.1:7423\", speed_mbit = 10000 }"
)]
struct FileLink {
    address: String,
    speed_mbit: Option<u64>,
}

impl FileHosts {
    pub(super) fn check(self, path: &Path) -> Result<HostsConfig, ConfigError> {
        let counts = [
            ("hosts.listen", self.listen.len(), ADDRESSES_MAX),
            ("hosts.links", self.links.len(), ADDRESSES_MAX),
            ("hosts.shared_folders", self.shared_folders.len(), SHARED_FOLDERS_MAX),
        ];
        for (key, count, most) in counts {
            if count > most {
                let (value, most) = (count as u64, most as u64);
                return Err(ConfigError::OutOfRange { path: path.to_owned(), key, value, least: 0, most });
            }
        }
        if let Some(relative) = self.shared_folders.iter().find(|folder| !folder.is_absolute()) {
            return Err(ConfigError::SharedFolder { path: path.to_owned(), folder: relative.clone() });
        }
        let link = |FileLink { address, speed_mbit }: FileLink| match is_reachable(&address) {
            true => Ok(Link {
                address,
                speed_bits_per_second: speed_mbit.map(|speed| speed.saturating_mul(1_000_000)),
            }),
            false => Err(ConfigError::Link { path: path.to_owned(), address }),
        };
        let links = self.links.into_iter().map(link).collect::<Result<_, _>>()?;
        let (machines, shared_folders) = (self.machines.unwrap_or(true), self.shared_folders);
        Ok(HostsConfig { listen: self.listen, links, machines, shared_folders })
    }
}

/// Returns whether a text is a host and a port that others can call.
fn is_reachable(address: &str) -> bool {
    match address.parse::<SocketAddr>() {
        Ok(address) => !address.ip().is_unspecified() && address.port() > 0,
        Err(_) => address.rsplit_once(':').is_some_and(|(host, port)| {
            let is_name = |character: char| character.is_ascii_alphanumeric() || "-.".contains(character);
            !host.is_empty() && host.chars().all(is_name) && port.parse::<u16>().is_ok_and(|port| port > 0)
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::is_reachable;

    #[test]
    fn links_are_addresses_that_others_can_call() {
        for good in ["10.0.0.1:7423", "[fd00::1]:7423", "host-b.example:7423"] {
            assert!(is_reachable(good), "{good}");
        }
        for bad in
            ["", "10.0.0.1", "0.0.0.0:7423", "[::]:7423", "host:0", "host:", ":7423", "a b:7423", "h:70000"]
        {
            assert!(!is_reachable(bad), "{bad}");
        }
    }
}
