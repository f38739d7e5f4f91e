//! The shared bytes of devices, files and exports: read from the system.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, ToSocketAddrs as _, UdpSocket};
use std::path::{Path, PathBuf};

use block::store::{Below, LoopDevice};
use migration::custody::{Identity, Stack};
use nbd_protocol::{NbdUri, Server};

/// Depth of devices on devices that is followed.
const DEPTH_MAX: usize = 32;
const SYS: &str = "/sys";

/// The stacks of images that have been examined.
pub(super) struct Stacks {
    sys: PathBuf,
    known: BTreeMap<u64, Stack>,
}

impl Stacks {
    pub(super) fn new() -> Self {
        Self { sys: SYS.into(), known: BTreeMap::new() }
    }

    /// Returns the stack of an image. After an error the image may share bytes with any other.
    pub(super) fn of(&mut self, identity: &Identity) -> io::Result<Stack> {
        match identity {
            Identity::Device(number) => self.of_device(*number, DEPTH_MAX),
            Identity::File { device, inode } => self.of_file(*device, *inode, DEPTH_MAX),
            Identity::Export(uri) => of_export(uri),
        }
    }

    fn of_file(&mut self, device: u64, inode: u64, depth: usize) -> io::Result<Stack> {
        let mut stack = Stack::of(Identity::File { device, inode });
        // The number of a file system without a device has no major number.
        if rustix::fs::major(device) != 0 {
            stack.lies_in(self.of_device(device, depth)?);
        }
        Ok(stack)
    }

    fn of_device(&mut self, number: u64, depth: usize) -> io::Result<Stack> {
        if let Some(known) = self.known.get(&number) {
            return Ok(known.clone());
        }
        let mut stack = Stack::of(Identity::Device(number));
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let folder = match self.sys.join(format!("dev/block/{major}:{minor}")).canonicalize() {
            Ok(folder) => folder,
            // The device was removed: it has no bytes.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(stack),
            Err(error) => return Err(error),
        };
        let Some(depth) = depth.checked_sub(1) else {
            return Err(io::Error::other("devices stand on each other too deeply"));
        };
        if folder.join("partition").exists() {
            let disk = number_in(&folder.join("../dev"))?;
            stack.lies_in(self.of_device(disk, depth)?);
        }
        if folder.join("loop/backing_file").exists() {
            let devices = block::store::loop_devices()?;
            // It may be let go at this moment.
            match devices.iter().find(|device| device.number == number).map(LoopDevice::below).transpose()? {
                Some(Below::File { device, inode }) => stack.is(self.of_file(device, inode, depth)?),
                Some(Below::Device(number)) => stack.is(self.of_device(number, depth)?),
                Some(Below::Lost) | None => {}
            }
        }
        let uuid = std::fs::read_to_string(folder.join("dm/uuid")).unwrap_or_default();
        // These are parts of a group or a disk, as their makers say; another mapping may be all of what it maps.
        let is_part = uuid.starts_with("LVM-") || uuid.starts_with("part");
        for below in folders_in(&folder.join("slaves"))? {
            let below = self.of_device(number_in(&below.join("dev"))?, depth)?;
            if is_part { stack.lies_in(below) } else { stack.is(below) }
        }
        self.known.insert(number, stack.clone());
        Ok(stack)
    }
}

fn folders_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| entry.map(|entry| entry.path())).collect(),
    }
}

/// Reads the number of a device, as the system writes it: `8:1`.
fn number_in(path: &Path) -> io::Result<u64> {
    let text = std::fs::read_to_string(path)?;
    block::store::device_number(text.trim_end())
        .ok_or_else(|| io::Error::other(format!("{} has no number of a device", path.display())))
}

/// Returns the stack of an export: its name at each possible place of its server. Only the server knows which export is the
/// default, so that name may mean any of them.
fn of_export(uri: &str) -> io::Result<Stack> {
    let parsed: NbdUri = uri.parse().map_err(io::Error::other)?;
    // Some servers read the slash as a part of the name, and others do not.
    let export = parsed.export.trim_start_matches('/');
    let mut stack = Stack::of(Identity::Export(uri.to_owned()));
    for end in ends_of(&parsed.server)? {
        let server = Identity::Export(end.clone());
        match export {
            "" => stack.whole.insert(server),
            export => {
                stack.whole.insert(Identity::Export(format!("{end} {export}")));
                stack.below.insert(server)
            }
        };
    }
    Ok(stack)
}

/// Returns the places where a server may be.
fn ends_of(server: &Server) -> io::Result<Vec<String>> {
    match server {
        Server::Unix(path) => Ok(vec![match rustix::fs::stat(path) {
            Ok(found) => format!("socket {}:{}", found.st_dev, found.st_ino),
            // No server listens there yet; a later one gets this name.
            Err(_) => format!("socket {}", path.display()),
        }]),
        Server::Tcp { host, port } => {
            let found = (host.as_str(), *port)
                .to_socket_addrs()
                .map_err(|error| io::Error::other(format!("where {host} is cannot be found out: {error}")))?;
            Ok(found.map(|address| end_at(address.ip(), *port)).collect())
        }
    }
}

/// Returns whether a host's name, or address, means this host.
pub(super) fn is_here(host: &str, port: u16) -> bool {
    let found = (host, port).to_socket_addrs();
    found.is_ok_and(|mut found| found.any(|address| end_at(address.ip(), port) == format!("here {port}")))
}

/// Names an address; all addresses of this host count as one place.
fn end_at(address: IpAddr, port: u16) -> String {
    let address = address.to_canonical();
    let is_here = address.is_loopback() || address.is_unspecified() || UdpSocket::bind((address, 0)).is_ok();
    if is_here { format!("here {port}") } else { format!("{address} {port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_spellings_of_an_export_overlap_and_two_exports_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, link) = (folder.path().join("nbd.sock"), folder.path().join("link"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        let unix = |path: &Path, export: &str| NbdUri::unix(path, export).to_string();
        let same = [
            ("nbd://127.0.0.1:10809/x".to_owned(), "nbd://127.0.0.1/x".to_owned()),
            ("nbd://localhost/x".to_owned(), "nbd://127.0.0.1/x".to_owned()),
            ("nbd://[::1]/x".to_owned(), "nbd://127.0.0.1/x".to_owned()),
            ("nbd://127.0.0.1/x".to_owned(), "nbd://127.0.0.1//x".to_owned()),
            ("nbd://127.0.0.1/x".to_owned(), "nbd://127.0.0.1/".to_owned()),
            (unix(&socket, "x"), unix(&link, "x")),
        ];
        for (one, other) in same {
            assert!(of_export(&one).unwrap().overlaps(&of_export(&other).unwrap()), "{one} {other}");
        }
        let apart = [
            ("nbd://127.0.0.1/x".to_owned(), "nbd://127.0.0.1/y".to_owned()),
            ("nbd://127.0.0.1/x".to_owned(), "nbd://127.0.0.1:10810/x".to_owned()),
            ("nbd://192.0.2.1/x".to_owned(), "nbd://192.0.2.2/x".to_owned()),
            (unix(&socket, "x"), unix(&socket, "y")),
        ];
        for (one, other) in apart {
            assert!(!of_export(&one).unwrap().overlaps(&of_export(&other).unwrap()), "{one} {other}");
        }
    }

    /// Devices by number: where they are, and what is said of them.
    #[test]
    fn a_partition_lies_in_its_disk_and_a_mapping_is_what_it_maps() {
        let folder = tempfile::tempdir().unwrap();
        let sys = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(sys.join("dev/block")).unwrap();
        let add = |number: &str, path: &str, files: &[(&str, &str)]| {
            let device = sys.join("devices").join(path);
            for (name, content) in [&[("dev", number)], files].concat() {
                std::fs::create_dir_all(device.join(name).parent().unwrap()).unwrap();
                std::fs::write(device.join(name), content).unwrap();
            }
            std::os::unix::fs::symlink(&device, sys.join("dev/block").join(number)).unwrap();
        };
        add("8:0", "sda", &[]);
        add("8:1", "sda/sda1", &[("partition", "1")]);
        add("8:2", "sda/sda2", &[("partition", "2")]);
        add("252:0", "dm-0", &[("dm/uuid", "CRYPT-a"), ("slaves/sda1/dev", "8:1")]);
        add("252:1", "dm-1", &[("dm/uuid", "LVM-a"), ("slaves/sda2/dev", "8:2")]);
        add("252:2", "dm-2", &[("dm/uuid", "LVM-b"), ("slaves/sda2/dev", "8:2")]);
        let mut stacks = Stacks { sys, known: BTreeMap::new() };
        let mut of = |major, minor| stacks.of(&Identity::Device(rustix::fs::makedev(major, minor))).unwrap();
        let (disk, one, two) = (of(8, 0), of(8, 1), of(8, 2));
        let (crypt, first, second) = (of(252, 0), of(252, 1), of(252, 2));
        for (upper, lower) in
            [(&one, &disk), (&crypt, &one), (&crypt, &disk), (&first, &two), (&first, &disk)]
        {
            assert!(upper.overlaps(lower), "{upper:?} {lower:?}");
        }
        for (upper, lower) in [(&one, &two), (&crypt, &two), (&first, &second), (&crypt, &first)] {
            assert!(!upper.overlaps(lower), "{upper:?} {lower:?}");
        }
    }
}
