//! Two hosts with the links of a part, and the servers on them.

use std::cell::Cell;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use api::{ExportSettings, Volume};
use testbed::{Daemon, Folder};

use super::{LinkOptions, Part};
use crate::bench::folder::BenchFolder;
use crate::bench::image::{Blocks, Compared, compare};
use crate::bench::server::{NAME, Setup, StorageDaemon, file_nodes, remote_node};
use crate::bench::tools::STORAGE_DAEMON;
use crate::demo::{STORES, start_daemon};
use crate::network::measure::{median, round_trips};
use crate::network::{BitRate, Conditions, Hosts, Namespace, WideAreaLink};

/// The first server's port. Each server gets another one: the kernel keeps the port of an ended server until the last request of
/// its ring has ended.
const FIRST_PORT: u16 = 10_809;
const FAR_NODE: &str = "far";
const SOURCE_NAME: &str = "source";
const TARGET_NAME: &str = "target";
const FAR_STORE: &str = "far";
const ROUND_TRIPS: usize = 21;

#[derive(Debug)]
pub(super) struct Stage<'a> {
    pub(super) options: &'a LinkOptions,
    pub(super) folder: &'a BenchFolder,
    pub(super) part: Part,
    pub(super) source: &'a Path,
    pub(super) target: PathBuf,
    hosts: [Namespace; 2],
    links: Vec<WideAreaLink>,
    /// The next server's port, on either host: no other program is in their namespaces.
    next_port: Cell<u16>,
}

impl<'a> Stage<'a> {
    pub(super) fn set(
        options: &'a LinkOptions,
        folder: &'a BenchFolder,
        part: Part,
        source: &'a Path,
    ) -> anyhow::Result<Self> {
        let mut hosts = Hosts::create([SOURCE_NAME, TARGET_NAME])?;
        let links = part.rates().iter().map(|&rate| {
            let conditions = Conditions::of(rate, part.round_trip());
            hosts.wide_area_link([0, 1], conditions)
        });
        let links = links.collect::<Result<Vec<_>, _>>()?;
        let host = |number| hosts.get(number).cloned().context("there are two hosts");
        let hosts = [host(0)?, host(1)?];
        Ok(Self {
            options,
            folder,
            part,
            source,
            target: folder.path("target.img"),
            hosts,
            links,
            next_port: Cell::new(FIRST_PORT),
        })
    }

    pub(super) fn source_host(&self) -> &Namespace {
        &self.hosts[0]
    }

    pub(super) fn target_host(&self) -> &Namespace {
        &self.hosts[1]
    }

    /// Returns each link's rate and target address, the fastest first.
    pub(super) fn links(&self) -> impl Iterator<Item = (BitRate, Ipv4Addr)> {
        self.links.iter().map(|link| (link.conditions().rate, link.addresses()[1]))
    }

    /// Returns the target's address on the fastest link, for contenders that use one link.
    fn target_address(&self) -> Ipv4Addr {
        self.links[0].addresses()[1]
    }

    fn new_port(&self) -> u16 {
        let port = self.next_port.get();
        self.next_port.set(port + 1);
        port
    }

    pub(super) async fn round_trip(&self) -> anyhow::Result<Duration> {
        let [source, target] = self.hosts.clone();
        let address = self.target_address();
        let measured = move || round_trips(&source, &target, address, ROUND_TRIPS);
        Ok(median(tokio::task::spawn_blocking(measured).await??))
    }

    pub(super) fn make_target(&self) -> anyhow::Result<()> {
        let target = std::fs::File::create(&self.target).context("make the target")?;
        target.set_len(self.options.bench.size_bytes).context("make the target")
    }

    /// Starts QEMU's daemons, one on each host.
    pub(super) async fn storage_daemons(&self) -> anyhow::Result<StorageDaemons> {
        self.make_target()?;
        let serves_at = (self.target_address(), self.new_port());
        let setup = Setup {
            command: STORAGE_DAEMON.command_in(self.target_host()),
            name: "qemu-target",
            nodes: file_nodes("target", &self.target).to_vec(),
            exported: "target",
            port: Some(serves_at),
        };
        let target = StorageDaemon::launch(self.folder, setup).await.context("on the target host")?;
        let mut nodes = file_nodes("source", self.source).to_vec();
        nodes.push(remote_node(FAR_NODE, serves_at));
        let command = STORAGE_DAEMON.command_in(self.source_host());
        let setup = Setup { command, name: "qemu-source", nodes, exported: "source", port: None };
        let source = StorageDaemon::launch(self.folder, setup).await.context("on the source host")?;
        Ok(StorageDaemons { source, target })
    }

    /// Starts Sterna's daemons, one on each host. The source's serves the image, and can migrate it to the other.
    pub(super) async fn sternas(&self, way: Way) -> anyhow::Result<Sternas> {
        let folder = || Folder::create(self.folder.root(), STORES);
        let folders = [folder()?, folder()?];
        let (address, port) = (self.target_address(), self.new_port());
        let store = match way {
            Way::Host => {
                for (end, folder) in folders.iter().enumerate() {
                    self.let_hosts_reach(folder, end, port)?;
                }
                format!("{TARGET_NAME}:{}", STORES[0])
            }
            Way::NbdStore => {
                let store = format!("[stores.{FAR_STORE}]\nnbd = \"nbd://{address}:{port}/{NAME}\"\n");
                folders[0].configure(&store)?;
                FAR_STORE.to_owned()
            }
        };
        let target = self.start_sterna(self.target_host(), &folders[1]).await?;
        if way == Way::NbdStore {
            self.make_target()?;
            let export =
                ExportSettings { listen: Some(format!("{address}:{port}")), ..ExportSettings::default() };
            target.export_volume(NAME, &self.target, export).await?;
        }
        let source = self.start_sterna(self.source_host(), &folders[0]).await?;
        if way == Way::Host {
            target.create_identity(TARGET_NAME).await?;
            source.create_identity(SOURCE_NAME).await?;
            source.join(&target, &format!("{address}:{port}")).await?;
        }
        let volume = source.add_volume(NAME, self.source).await?;
        Ok(Sternas { source, target, folders, volume, way, store })
    }

    async fn start_sterna(&self, host: &Namespace, folder: &Folder) -> anyhow::Result<Daemon> {
        let command = host.command(&self.options.bench.program);
        start_daemon(command, folder).await.with_context(|| format!("on the {} host", host.name()))
    }

    /// Configures all addresses of this end at the daemon of `folder`.
    fn let_hosts_reach(&self, folder: &Folder, end: usize, port: u16) -> anyhow::Result<()> {
        let mut listen = Vec::new();
        let mut links = String::new();
        for link in &self.links {
            let address = format!("\"{}:{port}\"", link.addresses()[end]);
            let speed_mbit = link.conditions().rate.bits_per_second() / 1_000_000;
            let _ = write!(links, "[[hosts.links]]\naddress = {address}\nspeed_mbit = {speed_mbit}\n");
            listen.push(address);
        }
        folder.configure(&format!("[hosts]\nlisten = [{}]\n{links}", listen.join(", ")))
    }

    /// Stops the daemons after a migration, compares the images, and puts the source's image back for the next turn.
    pub(super) async fn finish_sternas(&self, servers: Sternas, except: Blocks) -> anyhow::Result<u64> {
        let copy = match servers.way {
            Way::Host => PathBuf::from(servers.target.volume(NAME).await?.image),
            Way::NbdStore => self.target.clone(),
        };
        let Sternas { source, target, folders, .. } = servers;
        source.stop().await?;
        target.stop().await?;
        let original = self.fenced_source()?;
        let compared_bytes = self.verify([&original, &copy], except).await?;
        std::fs::rename(&original, self.source).context("put the source's image back")?;
        folders.into_iter().try_for_each(Folder::remove)?;
        Ok(compared_bytes)
    }

    pub(super) async fn flush(&self) -> anyhow::Result<()> {
        let file = std::fs::File::options().write(true).open(&self.target).context("open the target")?;
        tokio::task::spawn_blocking(move || file.sync_all()).await?.context("flush the target")
    }

    /// Checks that the second image is a copy of the first, except for some blocks, and deletes it. Both must be unused.
    pub(super) async fn verify(&self, [source, target]: [&Path; 2], except: Blocks) -> anyhow::Result<u64> {
        let Compared { bytes, first_difference } = compare(source, target, except).await?;
        if let Some(offset) = first_difference {
            bail!("the target differs from the source at byte {offset}");
        }
        ensure!(bytes > 0, "the guest has written every block since the switch: nothing could be compared");
        std::fs::remove_file(target).context("delete the target")?;
        Ok(bytes)
    }

    pub(super) fn delete_target(&self) -> anyhow::Result<()> {
        match std::fs::remove_file(&self.target) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            deleted => deleted.context("delete the target"),
        }
    }

    /// Returns the source image's path after a migration: Sterna fences the source by renaming it.
    pub(super) fn fenced_source(&self) -> anyhow::Result<PathBuf> {
        let name = self.source.file_name().context("the source's image has a name")?.to_string_lossy();
        for entry in std::fs::read_dir(self.folder.root()).context("look for the source's image")? {
            let entry = entry.context("look for the source's image")?;
            if entry.file_name().to_string_lossy().starts_with(&*name) {
                return Ok(entry.path());
            }
        }
        bail!("the source's image has gone, though it was served in place")
    }
}

#[derive(Debug)]
pub(super) struct StorageDaemons {
    pub(super) source: StorageDaemon,
    pub(super) target: StorageDaemon,
}

impl StorageDaemons {
    /// The nodes of the mirror job: source and target.
    pub(super) const NODES: (&'static str, &'static str) = ("source", FAR_NODE);

    pub(super) async fn stop(self) -> anyhow::Result<()> {
        self.source.stop().await?;
        self.target.stop().await
    }
}

/// The ways by which Sterna moves a volume to the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Host,
    /// A volume of the other host is an NBD store of the first.
    NbdStore,
}

#[derive(Debug)]
pub(super) struct Sternas {
    pub(super) source: Daemon,
    target: Daemon,
    /// The source's folder, then the target's.
    folders: [Folder; 2],
    pub(super) volume: Volume,
    way: Way,
    store: String,
}

impl Sternas {
    pub(super) fn store(&self) -> &str {
        &self.store
    }
}

/// Returns TCP's congestion control in a host of the lab: the machine's default.
pub(super) fn congestion_control() -> anyhow::Result<String> {
    let host = Namespace::create("asked")?;
    let name = host.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control"))?;
    Ok(name.context("ask for the congestion control")?.trim().to_owned())
}
