//! Hosts, and the address plan of their links.

use std::net::Ipv4Addr;

use super::error::NetworkError;
use super::lan::Lan;
use super::namespace::Namespace;
use super::rate::BitRate;
use super::shaped::ShapedLink;
use super::wide_area::{Conditions, WideAreaLink};

/// Links between the hosts of one network: one byte of an address numbers them.
const LINKS_MAX: usize = 256;

/// Hosts with only the links that are made between them.
///
/// Link number *n*, counted from zero in the order of creation, has the network `10.77.n.0/30`; its first host is `10.77.n.1` and
/// its second `10.77.n.2`. Namespaces are isolated, so every network may use the same addresses.
#[derive(Debug)]
pub struct Hosts {
    namespaces: Vec<Namespace>,
    links_made: usize,
}

/// The addresses of a link's ends, in the order in which its hosts were named.
pub type Addresses = [Ipv4Addr; 2];

#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) namespace: Namespace,
    /// The interface's name, the same at both ends.
    pub(super) interface: String,
    pub(super) address: Ipv4Addr,
}

impl End {
    pub(super) const PREFIX_BITS: u8 = 30;

    pub(super) fn address_with_prefix(&self) -> String {
        format!("{}/{}", self.address, Self::PREFIX_BITS)
    }
}

impl Hosts {
    /// Makes hosts, numbered in the order of their names. Fails with [`NetworkError::Refused`] without root.
    pub fn create<const COUNT: usize>(names: [&str; COUNT]) -> Result<Self, NetworkError> {
        let namespaces = names.into_iter().map(Namespace::create).collect::<Result<_, _>>()?;
        Ok(Self { namespaces, links_made: 0 })
    }

    /// Returns the host of this number; `None` if there is none.
    pub fn get(&self, host: usize) -> Option<&Namespace> {
        self.namespaces.get(host)
    }

    /// Makes a link without delay between two hosts.
    ///
    /// # Panics
    /// If a number has no host.
    pub fn shaped_link(&mut self, hosts: [usize; 2], rate: BitRate) -> Result<ShapedLink, NetworkError> {
        let ends = self.next_ends("shaped", hosts)?;
        ShapedLink::create(ends, rate)
    }

    /// Makes a link with delay and loss between two hosts.
    ///
    /// # Panics
    /// If a number has no host.
    pub fn wide_area_link(
        &mut self,
        hosts: [usize; 2],
        conditions: Conditions,
    ) -> Result<WideAreaLink, NetworkError> {
        let ends = self.next_ends("wide", hosts)?;
        WideAreaLink::create(ends, conditions)
    }

    /// Makes a network for a guest of either host, beside the hosts' links.
    ///
    /// # Panics
    /// If a number has no host.
    pub fn lan(&self, hosts: [usize; 2]) -> Result<Lan, NetworkError> {
        Lan::create(hosts.map(|host| &self.namespaces[host]))
    }

    /// Returns both ends of the next link, by the address plan.
    fn next_ends(&mut self, kind: &str, hosts: [usize; 2]) -> Result<[End; 2], NetworkError> {
        let too_many = |_| NetworkError::TooManyLinks { links: LINKS_MAX };
        let number = u8::try_from(self.links_made).map_err(too_many)?;
        self.links_made += 1;
        Ok([(hosts[0], 1), (hosts[1], 2)].map(|(host, last)| End {
            namespace: self.namespaces[host].clone(),
            interface: format!("{kind}{number}"),
            address: Ipv4Addr::new(10, 77, number, last),
        }))
    }
}
