//! Two hosts with a link, a daemon on each, and a volume at the first.

use std::path::{Path, PathBuf};

use testbed::Folder;

use super::migration::copy_in;
use super::runner::Ground;
use crate::demo::{HostsLink, HostsPair, STORES};
use crate::network::BitRate;

/// The second host's store, as named at the first.
pub(super) const THERE: &str = "b:first";
/// The first host's store, as named at the second.
pub(super) const HOME: &str = "a:first";

/// Two paired daemons: in network namespaces as root, otherwise on loopback.
pub(super) struct TwoHosts {
    pub(super) pair: HostsPair,
    /// URI of the export at the first host.
    pub(super) uri: String,
    folders: [Folder; 2],
    _link: HostsLink,
}

impl TwoHosts {
    /// Starts both daemons in the benchmark's folder, and creates the volume from an image.
    pub(super) async fn set(ground: &Ground<'_>, rate: BitRate, image: &Path) -> anyhow::Result<Self> {
        let of_host = || Folder::create(ground.folder.root(), STORES);
        let folders = [of_host()?, of_host()?];
        let link = HostsLink::create(None, rate)?;
        let pair = HostsPair::start(ground.program, &folders, &link).await?;
        let uri = copy_in(&pair.near, image).await?;
        Ok(Self { pair, uri, folders, _link: link })
    }

    pub(super) fn stores(&self) -> [PathBuf; 2] {
        self.folders.each_ref().map(|folder| folder.path(STORES[0]))
    }

    /// Stops both daemons and keeps their stores.
    pub(super) async fn end_daemons(self) -> anyhow::Result<[Folder; 2]> {
        self.pair.stop().await?;
        Ok(self.folders)
    }
}
