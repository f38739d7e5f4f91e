//! Tests of definitions that are derived from commands as users and tools write them.

use std::path::Path;

use super::*;
use crate::vms::AdoptedDisk;

fn disk(number: u32, drive: &str, node: &str, file: &Path) -> AdoptedDisk {
    AdoptedDisk {
        volume: format!("web1-{number}"),
        number,
        device: format!("/machine/peripheral/d{number}"),
        drive: drive.to_owned(),
        node: node.to_owned(),
        child: None,
        format: "raw".to_owned(),
        file: file.to_owned(),
        size_bytes: 1 << 20,
        is_read_only: false,
        cache_direct: true,
        cache_no_flush: false,
        detect_zeroes: "unmap".to_owned(),
        proved: Vec::new(),
        found: None,
        copy: crate::vms::CopyNote::None,
        given_back: None,
    }
}

/// A host with a few files, and a VM.
struct Scene {
    folder: tempfile::TempDir,
    disks: Vec<AdoptedDisk>,
    running: Running,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["disk.raw", "seed.iso", "vars.fd"] {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let large = std::fs::File::create(folder.path().join("large.iso")).unwrap();
        large.set_len(super::super::manifest::FILES_BYTES_MAX as u64 + 1).unwrap();
        let running = Running { machine_type: "pc-i440fx-7.2".to_owned(), ..Running::default() };
        Self { folder, disks: Vec::new(), running }
    }

    fn with(mut self, drive: &str, node: &str) -> Self {
        let number = u32::try_from(self.disks.len()).unwrap();
        self.disks.push(disk(number, drive, node, &self.folder.path().join("disk.raw")));
        self
    }

    /// Marks files of the command, whose paths begin with `DIR/`, as in use, and devices as present.
    fn running(mut self, images: &[&str], devices: &[&str]) -> Self {
        self.running.images = images.iter().map(|image| self.at(image)).collect();
        self.running.named_devices = devices.iter().map(|device| (*device).to_owned()).collect();
        self
    }

    fn at(&self, text: &str) -> String {
        text.replace("DIR", self.folder.path().to_str().unwrap())
    }

    fn derive(&self, words: &str) -> Result<Derived, String> {
        let command = self.at(words).split(' ').map(str::to_owned).collect();
        let program = "/usr/bin/qemu-system-x86_64".into();
        let process =
            Launched { program, command, folder: self.folder.path().to_owned(), ..Launched::default() };
        let adopted = Adopted {
            libvirt: None,
            name: "web1".to_owned(),
            monitor: "/run/web1.qmp".into(),
            disks: self.disks.clone(),
            added_unix_ms: 0,
            is_bound: false,
            monitor_user: None,
            user: None,
        };
        derive(&adopted, &process, &self.running).map_err(|error| error.to_string())
    }

    /// Returns the command of the definition as one line, without the common beginning and end.
    fn command(&self, words: &str) -> String {
        let derived = self.derive(words).unwrap();
        let written: toml::Table = toml::from_str(&derived.text).unwrap();
        let words = written["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
        let line = words.collect::<Vec<_>>().join(" ");
        let line = line
            .strip_prefix("qemu-system-x86_64 -machine pc-i440fx-7.2")
            .unwrap_or_else(|| panic!("{line}"));
        let line =
            line.strip_suffix("-qmp unix:{qmp},server=on,wait=off").unwrap_or_else(|| panic!("{line}"));
        line.trim().to_owned()
    }
}

#[test]
fn a_disk_of_blockdev_gets_its_volume_and_the_device_stays() {
    let scene = Scene::new().with("", "d").running(&[], &["root"]);
    let command = scene.command(
        "qemu -m 256 -M pc,accel=tcg -blockdev file,node-name=f,filename=DIR/disk.raw -blockdev raw,node-name=d,file=f \
         -device virtio-blk-pci,drive=d,id=root -display none -qmp unix:/run/web1.qmp,server=on,wait=off",
    );
    let export = "driver=nbd,node-name=sterna-nbd-0,server.type=unix,server.path={disk:disk0},export={export:disk0},\
        reconnect-delay=60,read-only=off,cache.direct=on,cache.no-flush=off,discard=unmap";
    let format = "driver=raw,node-name=d,file=sterna-nbd-0,detect-zeroes=unmap,read-only=off,cache.direct=on,\
        cache.no-flush=off,discard=unmap";
    assert_eq!(
        command,
        format!(
            "-m 256 -machine accel=tcg -blockdev {export} -blockdev {format} -device virtio-blk-pci,drive=d,id=root \
             -display none"
        )
    );
}

#[test]
fn a_disk_that_was_released_and_adopted_again_is_found_by_its_device() {
    let words = [
        "qemu -blockdev file,node-name=f,filename=DIR/disk.raw -blockdev raw,node-name=d,file=f -device \
         virtio-blk-pci,drive=d,id=root",
        "qemu -drive file=DIR/disk.raw,format=raw,if=none,id=d -device virtio-blk-pci,drive=d,id=root",
    ];
    for words in words {
        let mut scene = Scene::new().with("", "sterna-file-3").running(&[], &["root"]);
        // Its image is in another store since.
        scene.disks[0].file = "/srv/large/web1.img".into();
        for device in ["root", "/machine/peripheral/root/virtio-backend"] {
            scene.disks[0].device = device.to_owned();
            let derived = scene.derive(words).unwrap();
            assert!(derived.text.contains("{disk:disk0}"), "{}", derived.text);
            assert!(!derived.text.contains("sterna-file-3"), "the device uses d: {}", derived.text);
        }
        scene.disks[0].device = "/machine/peripheral/other".to_owned();
        assert!(scene.derive(words).is_err());
    }
}

#[test]
fn everything_that_keeps_a_vm_is_named_at_once() {
    let scene = Scene::new().with("", "d").running(&[], &["added"]);
    let refused = scene
        .derive(
            "qemu -blockdev file,node-name=f,filename=DIR/disk.raw -blockdev raw,node-name=d,file=f -device \
             virtio-blk-pci,drive=d,id=root -drive file=DIR/other.raw,if=virtio -drive file=DIR/third.raw,if=virtio",
        )
        .unwrap_err();
    for what in
        ["other.raw is a disk", "third.raw is a disk", "device added was added", "device root was removed"]
    {
        assert!(refused.contains(what), "{what}: {refused}");
    }
}

#[test]
fn a_disk_of_drive_keeps_what_is_not_of_its_file() {
    let scene = Scene::new().with("drive-scsi0", "#block1").running(&[], &["scsi0", "scsihw0"]);
    let command = scene.command(
        "kvm -id 100 -device virtio-scsi-pci,id=scsihw0 -drive \
         file=DIR/disk.raw,if=none,id=drive-scsi0,cache=none,aio=io_uring,format=raw,detect-zeroes=unmap,l2-cache-size=1M \
         -device scsi-hd,bus=scsihw0.0,drive=drive-scsi0,id=scsi0 -vnc unix:/run/100.vnc,password=on -daemonize -pidfile /run/x",
    );
    let expected = "-device virtio-scsi-pci,id=scsihw0 -drive if=none,id=drive-scsi0,cache=none,detect-zeroes=unmap,\
        discard=unmap,format=raw,file.driver=nbd,file.server.type=unix,file.server.path={disk:disk0},\
        file.export={export:disk0},file.reconnect-delay=60 -device scsi-hd,bus=scsihw0.0,drive=drive-scsi0,id=scsi0 -vnc \
        unix:{path:vnc},password=on -accel kvm -accel tcg";
    assert_eq!(command, expected);
}

#[test]
fn disks_are_found_by_their_paths_where_they_have_no_names() {
    for words in ["-drive file=DIR/disk.raw,if=virtio", "-drive file=disk.raw,if=virtio"] {
        let scene = Scene::new().with("virtio0", "#block1");
        assert!(
            scene.command(&format!("qemu {words}")).starts_with("-drive if=virtio,discard=unmap"),
            "{words}"
        );
    }
    for words in ["-hda DIR/disk.raw", "-hda ./disk.raw", "DIR/disk.raw", "disk.raw"] {
        let scene = Scene::new().with("ide0-hd0", "#block1");
        assert!(scene.command(&format!("qemu {words}")).starts_with("-drive index=0,media=disk,"), "{words}");
    }
    let missing = Scene::new().with("ide0-hd0", "#block1").derive("qemu -m 32").unwrap_err();
    assert!(missing.contains("/machine/peripheral/d0 is not found in the command"), "{missing}");
}

#[test]
fn small_images_go_along_and_others_are_named() {
    let scene = Scene::new().running(&["DIR/seed.iso"], &[]);
    let command =
        scene.command("qemu -cdrom DIR/seed.iso -drive if=pflash,format=raw,file=DIR/vars.fd -nographic");
    let expected = "-drive index=2,media=cdrom,file={file:file0} -drive if=pflash,format=raw,file={file:file1} -nographic";
    assert_eq!(command, expected);
    // It was ejected since.
    let ejected = Scene::new().derive("qemu -cdrom DIR/large.iso").unwrap();
    assert!(ejected.text.contains("index=2,media=cdrom\""), "{}", ejected.text);
    assert!(ejected.left_behind[0].contains("large.iso, which is ejected"));
    let large =
        Scene::new().running(&["DIR/large.iso"], &[]).derive("qemu -cdrom DIR/large.iso").unwrap_err();
    assert!(large.contains("too large"), "{large}");
    for words in ["-drive file=DIR/disk.raw,if=virtio", "-blockdev file,filename=DIR/disk.raw,node-name=f"] {
        let refused = Scene::new().derive(&format!("qemu {words}")).unwrap_err();
        assert!(refused.contains("was not adopted"), "{refused}");
    }
    // Firmware as libvirt writes it.
    let command = Scene::new().command(
        r#"qemu -machine q35,pflash1=vars -blockdev {"driver":"file","filename":"DIR/vars.fd","node-name":"varsf"} -blockdev {"driver":"raw","file":"varsf","node-name":"vars"} -nographic"#,
    );
    assert!(
        command.contains(r#"{"driver":"file","filename":"{file:file0}","node-name":"varsf"}"#),
        "{command}"
    );
}

#[test]
fn sockets_and_logs_are_the_machines_own_and_what_people_look_at_stays_behind() {
    let derived = Scene::new()
        .derive(
            "qemu -chardev socket,id=mon,path=/run/m,server=on,wait=off -mon chardev=mon,mode=control -chardev \
             socket,id=qga0,path=/run/qga,server,nowait -chardev stdio,id=out,mux=on -chardev file,id=log,path=/var/x -serial \
             file:/var/y -serial mon:stdio -monitor vc -display gtk,gl=on -gdb tcp::1 -D /var/z",
        )
        .unwrap();
    for said in [
        "socket,id=qga0,path={path:qga0},server,wait=off",
        "null,id=out,mux=on",
        "file,id=log,path={path:log}",
        "file:{path:serial}",
        r#""-display", "none""#,
        r#""-monitor", "none""#,
    ] {
        assert!(derived.text.contains(said), "{said}: {}", derived.text);
    }
    assert!(!derived.text.contains("/run/m") && !derived.text.contains("-gdb"), "{}", derived.text);
    assert_eq!(derived.left_behind.len(), 5, "{:?}", derived.left_behind);
}

#[test]
fn what_would_be_lost_to_the_guest_is_refused_by_name() {
    for (words, expected) in [
        ("-netdev tap,id=n,fd=33", "an open descriptor"),
        ("-netdev vhost-user,id=n,chardev=c", "vhost-user keeps state"),
        ("-chardev tty,id=t,path=/dev/ttyS0", "is a device of this host"),
        ("-serial /dev/ttyS0", "is a device of this host"),
        ("-readconfig /etc/vm.conf", "reads options from a file"),
        ("-chardev socket,id=c,path=/run/tpm -tpmdev emulator,id=t,chardev=c", "that Sterna did not start"),
        ("-device vfio-pci,host=01:00.0", "vfio-pci is a device"),
        ("-virtfs local,path=/srv", "-virtfs shares a folder"),
        ("-device virtio-rng-pci,id=gone", "the device gone was removed"),
    ] {
        let refused = Scene::new().derive(&format!("qemu {words}")).unwrap_err();
        assert!(refused.contains(expected), "{words}: {refused}");
    }
    let added = Scene::new().running(&[], &["hot"]).derive("qemu -m 32").unwrap_err();
    assert!(added.contains("the device hot was added"), "{added}");
    let mut scene = Scene::new();
    scene.running.unnamed_devices = 1;
    assert!(scene.derive("qemu -m 32").unwrap_err().contains("a device without a name was added"));
    assert!(scene.derive("qemu -device virtio-rng-pci").is_ok());
}
