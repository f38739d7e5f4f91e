//! A network that guests are on, wherever they run: a switch, a client beside it, and two hosts with a place for a guest
//! each.
//!
//! ```text
//!   namespace of a host                     namespace outside                    namespace of the other host
//!   QEMU ► tap "guest" ► bridge ► veth ───► bridge "lan", 10.78.0.1 ◄─── veth ◄ bridge ◄ tap "guest" ◄ QEMU
//! ```
//!
//! It is apart from the links that the hosts' daemons talk over, as it is in most VM rooms. The switch learns where a
//! guest is from what the guest sends, as any switch does.

use std::net::Ipv4Addr;

use super::commands::ip;
use super::error::NetworkError;
use super::namespace::Namespace;

/// The address of the client beside the switch, which is an interface of the switch itself.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
/// The address that is left for the guest.
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
/// How many bits of an address are the network's.
const PREFIX_BITS: u8 = 24;
/// What the bridges are called, in each namespace.
const BRIDGE: &str = "lan";
/// What the guest's card is connected to, on either host.
const TAP: &str = "guest";
/// A host's end of its cable to the switch.
const CABLE: &str = "cable";

/// The network. It goes when its namespaces do.
#[derive(Debug)]
pub struct Lan {
    outside: Namespace,
}

impl Lan {
    /// Connects two hosts to a new switch. A host is on one such network at most.
    ///
    /// # Errors
    /// What the system says: it needs the kernel's bridge, and TUN devices.
    pub(super) fn create(hosts: [&Namespace; 2]) -> Result<Self, NetworkError> {
        let outside = Namespace::create("outside")?;
        make_bridge(&outside)?;
        ip(&outside, &["address", "add", &format!("{CLIENT}/{PREFIX_BITS}"), "dev", BRIDGE])?;
        let path = outside.path();
        let path = path.to_string_lossy();
        for (number, host) in hosts.into_iter().enumerate() {
            make_bridge(host)?;
            let port = format!("port{number}");
            ip(host, &["link", "add", CABLE, "type", "veth", "peer", "name", &port, "netns", &path])?;
            ip(host, &["tuntap", "add", TAP, "mode", "tap"])?;
            for interface in [CABLE, TAP] {
                plug_in(host, interface)?;
            }
            plug_in(&outside, &port)?;
        }
        Ok(Self { outside })
    }

    /// Where the client is.
    pub fn outside(&self) -> &Namespace {
        &self.outside
    }

    /// What a guest's card is connected to, on whichever host it runs.
    pub fn tap(&self) -> &'static str {
        TAP
    }

    /// The address of the guest, and the length of its prefix.
    pub fn guest(&self) -> (Ipv4Addr, u8) {
        (GUEST, PREFIX_BITS)
    }
}

fn make_bridge(namespace: &Namespace) -> Result<(), NetworkError> {
    ip(namespace, &["link", "add", BRIDGE, "type", "bridge"])?;
    ip(namespace, &["link", "set", BRIDGE, "up"])
}

fn plug_in(namespace: &Namespace, interface: &str) -> Result<(), NetworkError> {
    ip(namespace, &["link", "set", interface, "master", BRIDGE, "up"])
}
