//! Tests of the differences after each change that a user may make to a running QEMU.

use hypervisor::RunState;
use hypervisor::qemu::{SeenDevice, SeenDrive};

use super::*;
use crate::vms::AdoptedDisk;

const COMMAND: &str = "qemu -blockdev driver=nbd,node-name=data,server.type=unix,server.path=/run/x.sock,export=x,reconnect-delay=60 \
     -device virtio-blk-pci,drive=data,id=vdb,addr=0x8 -drive if=virtio,format=raw,file=nbd+unix:///r?socket=/run/r.sock -device ide-cd,id=cd0";

fn export(volume: &str) -> Leaf {
    Leaf::Export { socket: format!("/run/{volume}.sock").into(), name: volume.to_owned() }
}

fn drive(device: &str, leaf: Option<Leaf>, drivers: &[&str]) -> SeenDrive {
    SeenDrive {
        device: device.to_owned(),
        leaves: leaf.into_iter().collect(),
        drivers: drivers.iter().map(|driver| (*driver).to_owned()).collect(),
        is_limited: false,
    }
}

fn device(name: Option<&str>, kind: &str) -> SeenDevice {
    SeenDevice { name: name.map(str::to_owned), kind: kind.to_owned(), settings: BTreeMap::new() }
}

fn as_started() -> Look {
    let mut disk = device(Some("vdb"), "virtio-blk-pci");
    disk.settings.insert("addr".to_owned(), "08.0".to_owned());
    Look {
        state: RunState::Running,
        devices: vec![disk, device(Some("cd0"), "ide-cd"), device(None, "virtio-blk-pci")],
        drives: vec![
            drive("/machine/peripheral/vdb/virtio-backend", Some(export("x")), &["nbd"]),
            drive("/machine/peripheral-anon/device[0]/virtio-backend", Some(export("r")), &["raw", "nbd"]),
            drive("cd0", None, &[]),
        ],
        works: Vec::new(),
    }
}

fn found(adopted: Option<&Adopted>, change: impl FnOnce(&mut Look)) -> String {
    let made = Made::of(&COMMAND.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    let mut look = as_started();
    change(&mut look);
    let (known, seen) = shapes(&made, look, adopted, Path::new("/run"));
    let found = differences(&known, &seen, made::is_kind, made::is_setting);
    migration::vm::shape::sentence(&found)
}

#[test]
fn a_vm_is_as_it_was_started() {
    assert_eq!(found(None, |_| {}), "");
}

#[test]
fn what_was_done_to_a_vm_is_named() {
    let cases: [(&str, fn(&mut Look)); 11] = [
        ("over the volume y", |look| look.drives[0].leaves = BTreeSet::from([export("y")])),
        ("the export \"x\" at /tmp/x.sock", |look| {
            let other = Leaf::Export { socket: "/tmp/x.sock".into(), name: "x".to_owned() };
            look.drives[0].leaves = BTreeSet::from([other]);
        }),
        ("/ov.qcow2", |look| {
            look.drives[1].leaves.insert(Leaf::File("/ov.qcow2".to_owned()));
            look.drives[1].drivers.insert("qcow2".to_owned());
        }),
        ("throttle", |look| {
            look.drives[0].drivers.insert("throttle".to_owned());
        }),
        ("vdb was removed", |look| drop((look.drives.remove(0), look.devices.remove(0)))),
        ("hot was added", |look| {
            look.devices.push(device(Some("hot"), "virtio-blk-pci"));
            look.drives.push(drive("/machine/peripheral/hot/virtio-backend", Some(export("y")), &["nbd"]));
        }),
        ("nic9 was added", |look| look.devices.push(device(Some("nic9"), "virtio-net-pci"))),
        ("cd0 over /iso", |look| look.drives[2].leaves = BTreeSet::from([Leaf::File("/iso".to_owned())])),
        ("addr=09.0", |look| drop(look.devices[0].settings.insert("addr".to_owned(), "09.0".to_owned()))),
        ("limited", |look| look.drives[0].is_limited = true),
        ("job", |look| look.works.push("QEMU's job \"j\" (mirror) works on its disks".to_owned())),
    ];
    for (expected, change) in cases {
        let said = found(None, change);
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

#[test]
fn an_adopted_disk_is_over_its_volume_and_nothing_else() {
    let disk = |device: &str, volume: &str| AdoptedDisk {
        proved: Vec::new(),
        found: None,
        copy: crate::vms::CopyNote::None,
        given_back: None,
        volume: volume.to_owned(),
        number: 0,
        device: device.to_owned(),
        drive: String::new(),
        node: "data".to_owned(),
        child: None,
        format: "raw".to_owned(),
        file: "/srv/x.raw".into(),
        size_bytes: 0,
        is_read_only: false,
        cache_direct: false,
        cache_no_flush: false,
        detect_zeroes: "off".to_owned(),
    };
    let adopted = Adopted {
        monitor_user: None,
        user: None,
        name: "ad".to_owned(),
        monitor: "/run/qmp".into(),
        disks: vec![
            disk("/machine/peripheral/vdb/virtio-backend", "x"),
            disk("/machine/peripheral-anon/device[0]/virtio-backend", "r"),
        ],
        added_unix_ms: 0,
        libvirt: None,
        is_bound: false,
    };
    assert_eq!(found(Some(&adopted), |_| {}), "");
    let swapped = found(Some(&adopted), |look| {
        look.drives[0].leaves = BTreeSet::from([Leaf::File("/srv/y.raw".to_owned())]);
    });
    assert!(swapped.contains("vdb") && swapped.contains("/srv/y.raw"), "{swapped}");
    let gone = found(Some(&adopted), |look| drop(look.drives.remove(1)));
    assert!(gone.contains("the volume r was removed"), "{gone}");
    let medium =
        found(Some(&adopted), |look| look.drives[2].leaves = BTreeSet::from([Leaf::File("/iso".to_owned())]));
    assert!(medium.contains("/iso"), "{medium}");
}
