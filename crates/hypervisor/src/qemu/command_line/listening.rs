//! Finds the ports and sockets on which a VM's QEMU would listen on this host, and checks whether it could.
//!
//! ```text
//!   command ──► -vnc, -spice, -gdb, -s, -serial, -chardev, -netdev … ──► addresses ──► each bound for a moment ──► faults
//! ```
//! QEMU ends at its start if one of them is taken, after the disks were copied. So they are checked before. Only the VM uses the
//! paths in its own folder (`{path:NAME}`).

use std::io;
use std::net::{TcpListener, ToSocketAddrs as _, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use super::parser::{Values, parse};

const VNC_PORT: u16 = 5900;
const VNC_WEBSOCKET_PORT: u16 = 5700;
const DEBUGGER_PORT: u16 = 1234;
const ANYWHERE: &str = "0.0.0.0";

#[derive(Clone, Debug, PartialEq, Eq)]
enum Address {
    /// The first free port of a range.
    Tcp {
        host: String,
        ports: (u16, u16),
    },
    Udp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Listening {
    what: String,
    address: Address,
}

/// Returns the parts of a command that could not listen here, each with advice. May sleep.
pub fn taken(command: &[String]) -> Vec<String> {
    let listening = find(command.get(1..).unwrap_or_default());
    listening.iter().filter_map(|listening| listening.address.fault(&listening.what)).collect()
}

fn find(words: &[String]) -> Vec<Listening> {
    let mut found = Vec::new();
    for argument in parse(words) {
        let value = argument.value.unwrap_or_default();
        let addresses = match argument.option.as_str() {
            "-vnc" => vnc(&value),
            "-display" => value.strip_prefix("vnc=").map(vnc).unwrap_or_default(),
            "-spice" => spice(&Values::read(&value)),
            "-s" => vec![Address::tcp("", DEBUGGER_PORT)],
            "-gdb" => character_device(&value, Server::Always),
            "-serial" | "-parallel" | "-monitor" | "-qmp" | "-qmp-pretty" | "-debugcon" => {
                character_device(&value, Server::IfSaid)
            }
            "-chardev" => socket_or_datagrams(&Values::read(&value)),
            "-netdev" | "-nic" | "-net" => network(&Values::read(&value)),
            _ => Vec::new(),
        };
        let what = format!("{} {value}", argument.option).trim_end().to_owned();
        found.extend(addresses.into_iter().map(|address| Listening { what: what.clone(), address }));
    }
    // A relative path is in the VM's own folder.
    found.retain(|listening| !matches!(&listening.address, Address::Unix(path) if path.is_relative()));
    found
}

/// Whether a one-word description listens by default.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Server {
    Always,
    IfSaid,
}

fn vnc(value: &str) -> Vec<Address> {
    let values = Values::read(value);
    let display = values.pairs().into_iter().next().filter(|(key, _)| key.is_empty()).map(|(_, word)| word);
    let display = display.unwrap_or_default();
    if values.is_on("reverse") {
        return Vec::new();
    }
    if let Some(path) = display.strip_prefix("unix:") {
        return vec![Address::Unix(path.into())];
    }
    let Some((host, Ok(number))) =
        display.rsplit_once(':').map(|(host, number)| (host, number.parse::<u16>()))
    else {
        return Vec::new();
    };
    let port = |first: u16, number: u16| first.saturating_add(number);
    let last = values.get("to").and_then(|to| to.parse().ok()).unwrap_or(number).max(number);
    let ports = (port(VNC_PORT, number), port(VNC_PORT, last));
    let mut addresses = vec![Address::Tcp { host: bare(host), ports }];
    match values.get("websocket").as_deref() {
        Some("on") => addresses.push(Address::tcp(host, port(VNC_WEBSOCKET_PORT, number))),
        Some(said) => addresses.extend(said.parse().ok().map(|port| Address::tcp(host, port))),
        None => {}
    }
    addresses
}

fn spice(values: &Values) -> Vec<Address> {
    let host = values.get("addr").unwrap_or_default();
    if values.is_on("unix") {
        return vec![Address::Unix(host.into())];
    }
    let ports = ["port", "tls-port"].into_iter().filter_map(|key| values.get(key)?.parse().ok());
    ports.map(|port| Address::tcp(&host, port)).collect()
}

/// A character device in one word: `tcp:HOST:PORT,server=on`, `unix:PATH,server`, `udp:HOST:PORT@HOST:PORT`.
fn character_device(value: &str, server: Server) -> Vec<Address> {
    let values = Values::read(value);
    let Some((_, first)) = values.pairs().into_iter().next() else { return Vec::new() };
    let Some((kind, place)) = first.split_once(':') else { return Vec::new() };
    let listens = server == Server::Always || values.is_on("server");
    let inet =
        |place: &str| place.rsplit_once(':').and_then(|(host, port)| Some((bare(host), port.parse().ok()?)));
    let found = match kind {
        "tcp" | "telnet" | "websocket" | "tn3270" if listens => {
            inet(place).map(|(host, port)| Address::Tcp { host, ports: (port, port) })
        }
        "udp" => {
            let local = place.split_once('@').and_then(|(_, local)| inet(local));
            local.map(|(host, port)| Address::Udp { host, port })
        }
        "unix" if listens => Some(Address::Unix(place.into())),
        // A device behind a mux listens as it would alone.
        "mon" => return character_device(&value.replacen("mon:", "", 1), server),
        _ => None,
    };
    found.into_iter().collect()
}

fn socket_or_datagrams(values: &Values) -> Vec<Address> {
    let said = |key| values.get(key).unwrap_or_default();
    let number = |key| values.get(key).and_then(|text| text.parse::<u16>().ok());
    match values.driver().as_str() {
        "socket" if values.is_on("server") => match (values.get("path"), number("port")) {
            // An abstract socket is in a name space of its own.
            (Some(_), _) if values.is_on("abstract") => Vec::new(),
            (Some(path), _) => vec![Address::Unix(path.into())],
            (None, Some(port)) => {
                let ports = (port, number("to").unwrap_or(port).max(port));
                vec![Address::Tcp { host: bare(&said("host")), ports }]
            }
            (None, None) => Vec::new(),
        },
        "udp" => {
            let port = number("localport");
            port.map(|port| Address::Udp { host: bare(&said("localaddr")), port }).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

fn network(values: &Values) -> Vec<Address> {
    match values.driver().as_str() {
        "user" => {
            let rules = values.pairs().into_iter().filter(|(key, _)| key == "hostfwd");
            rules.filter_map(|(_, rule)| forwarding(&rule)).collect()
        }
        "socket" => {
            let listen = values.get("listen");
            let address = listen.as_deref().and_then(|listen| listen.rsplit_once(':'));
            address
                .and_then(|(host, port)| Some(Address::tcp(host, port.parse().ok()?)))
                .into_iter()
                .collect()
        }
        "stream" if values.is_on("server") => {
            let said = |key| values.get(key).unwrap_or_default();
            match said("addr.type").as_str() {
                "unix" => vec![Address::Unix(said("addr.path").into())],
                "inet" => {
                    let port = said("addr.port").parse().ok();
                    port.map(|port| Address::tcp(&said("addr.host"), port)).into_iter().collect()
                }
                _ => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

/// `tcp:HOST:PORT-GUEST:PORT`, where most may be left out.
fn forwarding(rule: &str) -> Option<Address> {
    let (here, _) = rule.rsplit_once('-')?;
    let (kind, rest) = here.split_once(':').unwrap_or(("tcp", here));
    let (host, port) = rest.rsplit_once(':')?;
    let (host, port) = (bare(host), port.parse().ok()?);
    Some(match kind {
        "udp" => Address::Udp { host, port },
        _ => Address::Tcp { host, ports: (port, port) },
    })
}

fn bare(host: &str) -> String {
    host.trim_start_matches('[').trim_end_matches(']').to_owned()
}

impl Address {
    fn tcp(host: &str, port: u16) -> Self {
        Self::Tcp { host: bare(host), ports: (port, port) }
    }

    fn fault(&self, what: &str) -> Option<String> {
        match self {
            // QEMU chooses a port.
            Self::Tcp { ports: (0, _), .. } | Self::Udp { port: 0, .. } => None,
            Self::Tcp { host, ports: (first, last) } => {
                let mut refused = None;
                for port in *first..=*last {
                    match resolve(host, port).and_then(|addresses| TcpListener::bind(&*addresses)) {
                        Ok(_) => return None,
                        Err(error) => refused = refused.or(Some(error)),
                    }
                }
                let ports = if first == last { first.to_string() } else { format!("{first} to {last}") };
                refused.map(|error| inet_fault(what, &format!("port {ports}"), host, &error))
            }
            Self::Udp { host, port } => {
                let bound = resolve(host, *port).and_then(|addresses| UdpSocket::bind(&*addresses));
                bound.err().map(|error| inet_fault(what, &format!("UDP port {port}"), host, &error))
            }
            Self::Unix(path) => unix_fault(what, path),
        }
    }
}

fn resolve(host: &str, port: u16) -> io::Result<Vec<std::net::SocketAddr>> {
    let host = if host.is_empty() { ANYWHERE } else { host };
    Ok((host, port).to_socket_addrs()?.collect())
}

fn inet_fault(what: &str, port: &str, host: &str, error: &io::Error) -> String {
    let at = if host.is_empty() { String::new() } else { format!(" of {host}") };
    match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "{what}: {port}{at} is in use there: stop the program that uses it (ss -lntup), or restart the VM with another port"
        ),
        io::ErrorKind::AddrNotAvailable => format!(
            "{what}: {host} is no address of that host: add it there, or restart the VM with an address that both hosts have, or \
             with none"
        ),
        _ => format!("{what}: QEMU could not listen on {port}{at} there: {error}"),
    }
}

fn unix_fault(what: &str, path: &Path) -> Option<String> {
    if path.parent().is_some_and(|folder| !folder.is_dir()) {
        return Some(format!(
            "{what}: the folder of {} does not exist there: create it, or put the socket into the VM's own folder \
             ({{path:NAME}})",
            path.display()
        ));
    }
    // QEMU removes a leftover socket; it would also take away a socket that is served.
    UnixStream::connect(path).is_ok().then(|| {
        format!(
            "{what}: another program serves {} there: stop it, or put the socket into the VM's own folder ({{path:NAME}})",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn command(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn everything_that_listens_is_found() {
        let tcp = |host: &str, port| Address::tcp(host, port);
        let udp = |host: &str, port| Address::Udp { host: host.to_owned(), port };
        let unix = |path: &str| Address::Unix(path.into());
        for (words, expected) in [
            ("-vnc :1", vec![tcp("", 5901)]),
            ("-vnc 127.0.0.1:2,websocket=on", vec![tcp("127.0.0.1", 5902), tcp("127.0.0.1", 5702)]),
            ("-vnc [::1]:0,to=9", vec![Address::Tcp { host: "::1".to_owned(), ports: (5900, 5909) }]),
            ("-display vnc=:3", vec![tcp("", 5903)]),
            ("-vnc none", vec![]),
            ("-vnc unix:/run/vnc", vec![unix("/run/vnc")]),
            ("-vnc viewer:5500,reverse=on", vec![]),
            ("-spice port=5930,addr=10.0.0.1", vec![tcp("10.0.0.1", 5930)]),
            ("-s", vec![tcp("", 1234)]),
            ("-gdb tcp::9000", vec![tcp("", 9000)]),
            ("-serial tcp:localhost:4444,server=on,wait=off", vec![tcp("localhost", 4444)]),
            ("-serial tcp:console:4444", vec![]),
            ("-serial mon:telnet::4445,server", vec![tcp("", 4445)]),
            ("-serial udp::4555@:4556", vec![udp("", 4556)]),
            ("-monitor unix:/run/m,server=on,wait=off", vec![unix("/run/m")]),
            ("-monitor unix:own,server=on", vec![]),
            ("-serial stdio", vec![]),
            ("-chardev socket,id=a,host=::1,port=7,server=on", vec![tcp("::1", 7)]),
            ("-chardev socket,id=a,path=/run/a,server=on,wait=off", vec![unix("/run/a")]),
            ("-chardev socket,id=a,path=/run/a", vec![]),
            ("-chardev udp,id=a,port=1,localport=8", vec![udp("", 8)]),
            (
                "-nic user,hostfwd=tcp::2222-:22,hostfwd=udp:10.0.0.1:53-:53",
                vec![tcp("", 2222), udp("10.0.0.1", 53)],
            ),
            ("-netdev user,id=n", vec![]),
            ("-netdev socket,id=n,listen=:9999", vec![tcp("", 9999)]),
            (
                "-netdev stream,id=n,server=on,addr.type=inet,addr.host=::1,addr.port=9998",
                vec![tcp("::1", 9998)],
            ),
        ] {
            let found: Vec<_> =
                find(&command(words)).into_iter().map(|listening| listening.address).collect();
            assert_eq!(found, expected, "{words}");
        }
    }

    #[test]
    fn what_is_taken_is_named_and_what_is_free_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let taken_by = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken_by.local_addr().unwrap().port();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let datagram_port = datagrams.local_addr().unwrap().port();
        let served = folder.path().join("served");
        let _served_by = UnixListener::bind(&served).unwrap();
        let left_over = folder.path().join("left-over");
        drop(UnixListener::bind(&left_over).unwrap());
        let faults = |words: String| taken(&command(&format!("qemu {words}")));
        for (words, expected) in [
            (format!("-gdb tcp:127.0.0.1:{port}"), "is in use there"),
            (format!("-nic user,hostfwd=tcp:127.0.0.1:{port}-:22"), "is in use there"),
            (format!("-serial udp::1@127.0.0.1:{datagram_port}"), "is in use there"),
            ("-vnc 192.0.2.1:0".to_owned(), "is no address of that host"),
            (format!("-serial unix:{},server=on", served.display()), "another program serves"),
            ("-serial unix:/no/folder/socket,server=on".to_owned(), "the folder of"),
        ] {
            let faults = faults(words.clone());
            assert!(faults.len() == 1 && faults[0].contains(expected), "{words}: {faults:?}");
        }
        assert_eq!(faults("-gdb tcp:127.0.0.1:0".to_owned()), [""; 0]);
        let words = format!("-monitor unix:{},server=on", left_over.display());
        assert_eq!(faults(words), [""; 0]);
        // The next port is as good.
        let words = format!("-chardev socket,id=a,host=127.0.0.1,port={port},to=65535,server=on");
        assert_eq!(faults(words), [""; 0]);
    }
}
