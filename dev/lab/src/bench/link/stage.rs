//! Two hosts with the links of a part, and the servers on them.

use std::cell::Cell;
use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Context as _;
use api::ExportSettings;
use testbed::{Daemon, Folder};

use super::Route;
use crate::bench::copying::Copying;
use crate::bench::image::{Holes, Images};
use crate::bench::runner::Ground;
use crate::bench::server::{CopyMode, NAME, Setup, StorageDaemon, file_nodes, remote_node};
use crate::bench::tools::STORAGE_DAEMON;
use crate::demo::{Progress, STORES, start_daemon};
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
pub(in crate::bench) struct Stage {
    pub(super) route: Route,
    pub(super) images: Images,
    /// The source's host, then the target's.
    pub(super) hosts: [Namespace; 2],
    links: Vec<WideAreaLink>,
    /// The next server's port, on either host: no other program is in their namespaces.
    next_port: Cell<u16>,
}

impl Stage {
    pub(super) async fn set(
        ground: &Ground<'_>,
        route: Route,
        progress: &mut Progress,
    ) -> anyhow::Result<Self> {
        let images = Images::make(&ground.folder, ground.size_bytes, Holes::None, progress).await?;
        let mut hosts = Hosts::create([SOURCE_NAME, TARGET_NAME])?;
        let links = route.rates.iter().map(|&rate| {
            let conditions = Conditions::of(rate, route.round_trip);
            hosts.wide_area_link([0, 1], conditions)
        });
        let links = links.collect::<Result<Vec<_>, _>>()?;
        let host = |number| hosts.get(number).cloned().context("there are two hosts");
        let hosts = [host(0)?, host(1)?];
        Ok(Self { route, images, hosts, links, next_port: Cell::new(FIRST_PORT) })
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

    /// Starts QEMU's daemons, one on each host.
    pub(super) async fn storage_daemons(
        &self,
        ground: &Ground<'_>,
        mode: CopyMode,
    ) -> anyhow::Result<Copying> {
        self.images.make_target()?;
        let serves_at = (self.target_address(), self.new_port());
        let setup = Setup {
            command: STORAGE_DAEMON.command_in(&self.hosts[1]),
            name: "qemu-target",
            nodes: file_nodes("target", &self.images.target).to_vec(),
            exported: "target",
            port: Some(serves_at),
        };
        let target = StorageDaemon::launch(&ground.folder, setup).await.context("on the target host")?;
        let mut nodes = file_nodes("source", &self.images.source).to_vec();
        nodes.push(remote_node(FAR_NODE, serves_at));
        let command = STORAGE_DAEMON.command_in(&self.hosts[0]);
        let setup = Setup { command, name: "qemu-source", nodes, exported: "source", port: None };
        let source = StorageDaemon::launch(&ground.folder, setup).await.context("on the source host")?;
        let (source, target) = (Box::new(source), Some(Box::new(target)));
        Ok(Copying::Mirror { source, target, node: FAR_NODE, mode, speed: 0 })
    }

    /// Starts Sterna's daemons, one on each host. The source's serves the image, and can migrate it to the other.
    pub(super) async fn sternas(&self, ground: &Ground<'_>, way: Way) -> anyhow::Result<Copying> {
        let folder = || Folder::create(ground.folder.root(), STORES);
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
        let target = start_sterna(ground, &self.hosts[1], &folders[1]).await?;
        if way == Way::NbdStore {
            self.images.make_target()?;
            let export =
                ExportSettings { listen: Some(format!("{address}:{port}")), ..ExportSettings::default() };
            target.export_volume(NAME, &self.images.target, export).await?;
        }
        let source = start_sterna(ground, &self.hosts[0], &folders[0]).await?;
        if way == Way::Host {
            target.create_identity(TARGET_NAME).await?;
            source.create_identity(SOURCE_NAME).await?;
            source.join(&target, &format!("{address}:{port}")).await?;
        }
        let uri = source.add_volume(NAME, &self.images.source).await?.uri;
        let copy = (way == Way::NbdStore).then(|| self.images.target.clone());
        let (target, folders) = (Some(target), folders.into());
        Ok(Copying::Sterna {
            source: Box::new(source),
            target: target.map(Box::new),
            folders,
            uri,
            to: store,
            impact_percent: None,
            copy,
        })
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
}

async fn start_sterna(ground: &Ground<'_>, host: &Namespace, folder: &Folder) -> anyhow::Result<Daemon> {
    let command = host.command(ground.program);
    start_daemon(command, folder).await.with_context(|| format!("on the {} host", host.name()))
}

/// The ways by which Sterna moves a volume to the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Way {
    Host,
    /// A volume of the other host is an NBD store of the first.
    NbdStore,
}

/// Returns TCP's congestion control in a host of the lab: the machine's default.
pub(super) fn congestion_control() -> anyhow::Result<String> {
    let host = Namespace::create("asked")?;
    let name = host.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control"))?;
    Ok(name.context("ask for the congestion control")?.trim().to_owned())
}
