//! The addresses at which others may reach this machine, where it listens on all of them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Returns the addresses of this machine's networks, the one towards the default route first. Those of loopback are last, and
/// those of a single link are left out: they are nothing without its name.
pub(crate) fn addresses() -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = towards_the_default_route().into_iter().collect();
    // A system that does not list them has only that one.
    for interface in getifaddrs().into_iter().flatten() {
        let address = interface.address.as_ref().and_then(|address| {
            let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
        });
        let Some(address) = address.filter(|address| !is_of_one_link(*address)) else { continue };
        if interface.flags.contains(InterfaceFlags::IFF_UP) && !found.contains(&address) {
            found.push(address);
        }
    }
    found.sort_by_key(IpAddr::is_loopback);
    found
}

/// Returns the addresses to be told for one that is listened on: itself, or if it is unspecified those of its kind in `own`.
/// Addresses of loopback only if there are no others.
pub(crate) fn told(listening: SocketAddr, own: &[IpAddr]) -> Vec<SocketAddr> {
    if !listening.ip().is_unspecified() {
        return vec![listening];
    }
    // The unspecified address of IPv6 takes connections of IPv4 as well.
    let is_taken = |address: &&IpAddr| address.is_ipv4() || listening.is_ipv6();
    let taken: Vec<&IpAddr> = own.iter().filter(is_taken).collect();
    let outside = taken.iter().any(|address| !address.is_loopback());
    let wanted = taken.into_iter().filter(|address| !outside || !address.is_loopback());
    wanted.map(|address| SocketAddr::new(*address, listening.port())).collect()
}

fn is_of_one_link(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Returns the address of the network with the default route. The socket sends nothing: the system only chooses a route.
fn towards_the_default_route() -> Option<IpAddr> {
    // Addresses for documentation: nobody has them.
    let far =
        [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];
    far.into_iter().find_map(|far| {
        let here = if far.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind(SocketAddr::new(here, 0)).ok()?;
        socket.connect(SocketAddr::new(far, 9)).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unspecified_address_is_told_as_those_of_the_networks() {
        let own: Vec<IpAddr> =
            ["10.0.0.5", "2001:db8::5", "127.0.0.1", "::1"].map(|text| text.parse().unwrap()).to_vec();
        for (listening, own, expected) in [
            ("0.0.0.0:7423", &own[..], &["10.0.0.5:7423"][..]),
            ("[::]:7423", &own, &["10.0.0.5:7423", "[2001:db8::5]:7423"]),
            ("10.0.0.9:1", &own, &["10.0.0.9:1"]),
            ("0.0.0.0:7423", &own[2..], &["127.0.0.1:7423"]),
            ("0.0.0.0:7423", &[], &[]),
        ] {
            let told =
                told(listening.parse().unwrap(), own).iter().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!(told, expected, "{listening}");
        }
    }

    #[test]
    fn this_machine_has_an_address_and_loopback_is_last() {
        let found = addresses();
        assert!(!found.is_empty() && found.is_sorted_by_key(IpAddr::is_loopback), "{found:?}");
        assert!(!found.iter().any(IpAddr::is_unspecified), "{found:?}");
    }
}
