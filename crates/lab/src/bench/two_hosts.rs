//! Two hosts with a link, a daemon on each, and a volume at the first.

use std::path::{Path, PathBuf};

use testbed::Folder;

use super::folder::BenchFolder;
use super::migration::copy_in;
use crate::demo::{HostsLink, HostsPair, STORES};
use crate::network::BitRate;

/// The store of the second host, as the first one calls it.
pub(super) const THERE: &str = "b:first";
/// The store of the first host, as the second one calls it.
pub(super) const HOME: &str = "a:first";

/// Two paired daemons: in network namespaces as root, otherwise on loopback.
pub(super) struct TwoHosts {
    pub(super) pair: HostsPair,
    /// Where the volume is served, at the first host.
    pub(super) uri: String,
    folders: [Folder; 2],
    /// There as long as this is.
    _link: HostsLink,
}

impl TwoHosts {
    /// Starts both daemons below `folder`, and makes the volume of an image.
    ///
    /// # Errors
    /// What went wrong, with the daemons' logs.
    pub(super) async fn set(
        program: &Path,
        folder: &BenchFolder,
        rate: BitRate,
        image: &Path,
    ) -> anyhow::Result<Self> {
        let of_host = || Folder::create(folder.root(), STORES);
        let folders = [of_host()?, of_host()?];
        let link = HostsLink::create(None, rate)?;
        let pair = HostsPair::start(program, &folders, &link).await?;
        let uri = copy_in(&pair.near, image).await?;
        Ok(Self { pair, uri, folders, _link: link })
    }

    /// The stores of both hosts.
    pub(super) fn stores(&self) -> [PathBuf; 2] {
        self.folders.each_ref().map(|folder| folder.path(STORES[0]))
    }

    /// Ends both daemons; their stores are as they were.
    ///
    /// # Errors
    /// If one does not end in order.
    pub(super) async fn end_daemons(self) -> anyhow::Result<[Folder; 2]> {
        self.pair.stop().await?;
        Ok(self.folders)
    }

    /// Ends both daemons and deletes all that they had.
    ///
    /// # Errors
    /// As [`Self::end_daemons`], or if something cannot be deleted.
    pub(super) async fn end(self) -> anyhow::Result<()> {
        self.end_daemons().await?.into_iter().try_for_each(Folder::remove)
    }
}
