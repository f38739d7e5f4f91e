//! A network for guests on any host: a switch, a client beside it, and two hosts with a place for a guest each.
//!
//! ```text
//!   namespace of a host                     namespace outside                    namespace of the other host
//!   QEMU ► tap "guest" ► bridge ► veth ───► bridge "lan", 10.78.0.1 ◄─── veth ◄ bridge ◄ tap "guest" ◄ QEMU
//! ```
//!
//! It is separate from the links between the hosts' daemons, as in most server rooms. Like any switch, this one learns a guest's
//! place from the guest's packets.

use std::net::Ipv4Addr;

use super::commands::ip;
use super::error::NetworkError;
use super::namespace::Namespace;

/// The client's address, on an interface of the switch itself.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const PREFIX_BITS: u8 = 24;
const BRIDGE: &str = "lan";
const TAP: &str = "guest";
const CABLE: &str = "cable";

/// A network of guests. It ends with its namespaces.
#[derive(Debug)]
pub struct Lan {
    outside: Namespace,
}

impl Lan {
    /// Connects two hosts to a new switch. A host is on at most one such network. It needs the kernel's bridge, and TUN devices.
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

    /// Returns the namespace of the client outside.
    pub fn outside(&self) -> &Namespace {
        &self.outside
    }

    /// Returns the interface for a guest's card, the same on both hosts.
    pub fn tap(&self) -> &'static str {
        TAP
    }

    /// Returns the address of the guest, and the length of its prefix.
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
