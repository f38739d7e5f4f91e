//! Tests accepted commands, with their written form, and refused ones, with the reason.

use super::*;

fn words(text: &str) -> Vec<String> {
    // A blank within a word is written as `␣`.
    text.split(' ').map(|word| word.replace("␣", " ")).collect()
}

pub(super) fn refusal(text: &str, allowed: Allowed<'_>) -> Option<String> {
    read(text, allowed).err().map(|refused| refused.to_string())
}

fn read(text: &str, allowed: Allowed<'_>) -> Result<Understood, NotAllowed> {
    let monitor = "qemu-system-x86_64 -nodefaults -no-user-config -qmp unix:{qmp},server=on,wait=off ";
    Understood::read(&words(&(monitor.to_owned() + text)), allowed)
}

fn written(text: &str) -> String {
    let understood = read(text, Allowed::default()).unwrap_or_else(|refused| panic!("{text}: {refused}"));
    let written = understood.write();
    let again = Understood::read(&written, Allowed::default()).unwrap();
    assert_eq!(again.write(), written, "what was written is understood in the same way");
    let written = written[5..].join(" ");
    // A command without a display gets this one.
    let is_asked = text.contains("-display");
    if is_asked { written } else { written.trim_end_matches(" -display none").to_owned() }
}

#[test]
fn a_machine_that_says_nothing_of_a_display_has_none() {
    let command = |text| read(text, Allowed::default()).unwrap().write()[5..].join(" ");
    assert_eq!(command("-vga std"), "-vga std -display none");
    assert_eq!(command("-nographic"), "-nographic");
}

#[test]
fn what_reaches_the_host_is_refused_by_name_with_the_key_that_would_allow_it() {
    for (words, expected) in [
        ("-netdev tap,id=n,script=no,downscript=no", "without ifname="),
        ("-netdev tap,id=n", "without ifname="),
        ("-netdev bridge,id=n", "allow = [\"-netdev bridge\"]"),
        ("-nic user,hostfwd=tcp::2222-:22", "hostfwd"),
        ("-nic user,guestfwd=tcp:10.0.2.1:1-cmd:sh", "guestfwd"),
        ("-netdev user,id=n,smb=/etc", "smb"),
        ("-netdev user,id=n,tftp=/etc", "tftp"),
        ("-netdev socket,id=n,connect=127.0.0.1:22", "allow = [\"-netdev socket\"]"),
        ("-netdev tap,id=n,ifname=t,script=no,downscript=no,vhostfd=3", "vhostfd"),
        ("-net user,hostfwd=tcp::1-:1", "hostfwd"),
        ("-net tap", "-net tap"),
        ("-chardev file,id=c,path=/etc/cron.d/x", "allow = [\"-chardev file\"]"),
        ("-chardev socket,id=c,host=10.0.0.1,port=22", "host=10.0.0.1"),
        ("-chardev null,id=c,logfile=/etc/x", "logfile"),
        ("-chardev null,id=c,backend=file,path={path:x}", ""),
        ("-chardev pipe,id=c,path=/x", "-chardev pipe"),
        ("-chardev stdio,id=c", "-chardev stdio"),
        ("-D /etc/passwd", "allow = [\"-D"),
        ("-d all", "-d"),
        ("-monitor stdio", "-monitor stdio"),
        ("-monitor unix:{path:m},server=on", "-monitor unix"),
        ("-mon chardev=c", "-mon"),
        ("-readconfig /tmp/x", "-readconfig"),
        ("-set device.a.romfile=/etc/shadow", "-set"),
        ("-sandbox off", "-sandbox off"),
        ("-runas root", "-runas"),
        ("-chroot /", "-chroot"),
        ("-run-with user=root", "-run-with"),
        ("-fsdev local,path=/", "-fsdev"),
        ("-virtfs local,path=/,mount_tag=x,security_model=none", "-virtfs"),
        ("-vnc :0", "allow = [\"-vnc\"]"),
        ("-spice port=1", "-spice"),
        ("-gdb tcp::1", "allow = [\"-gdb tcp\"]"),
        ("-qtest unix:{path:x},server=on", "-qtest"),
        ("-plugin /x.so", "-plugin"),
        ("-trace events=/x", "-trace"),
        ("-pidfile /x", "-pidfile"),
        ("-L /etc", "-L"),
        ("-mem-path /etc", "-mem-path"),
        ("-add-fd fd=3,set=1", "-add-fd"),
        ("-incoming exec:sh", "-incoming exec"),
        ("-loadvm x", "-loadvm"),
        ("-daemonize", "-daemonize"),
        ("-snapshot", "-snapshot"),
        ("-s", "allow = [\"-s\"]"),
        ("-serial file:/etc/x", "-serial file"),
        ("-serial stdio", "-serial stdio"),
        ("-serial /dev/ttyS0", "-serial /dev/ttyS0"),
        ("-object memory-backend-file,id=m,mem-path=/etc/passwd,share=on", "-object memory-backend-file"),
        ("-object filter-dump,id=f,netdev=n,file=/etc/x", "-object filter-dump"),
        ("-object input-linux,id=i,evdev=/dev/input/event0", "-object input-linux"),
        ("-object can-host-socketcan,id=c", "-object can-host-socketcan"),
        ("-object tls-creds-x509,id=t,dir=/etc", "-object tls-creds-x509"),
        ("-object rng-egd,id=r,chardev=c", "-object rng-egd"),
        ("-device vhost-vsock-pci,guest-cid=3", "-device vhost-vsock-pci"),
        ("-device loader,file=/etc/shadow", "-device loader"),
        ("-device vfio-pci,host=01:00.0", "-device vfio-pci"),
        ("-device usb-kbd,pcap=/etc/x", "pcap=/etc/x"),
        ("-device virtio-net-pci,x-txburst=1", "x-txburst"),
        ("-device ipmi-bmc-sim,id=b,sdrfile=/x", "-device ipmi-bmc-sim"),
        ("-machine q35,dumpdtb=/usr/x", "dumpdtb"),
        ("-machine q35,firmware=/etc/shadow", "firmware"),
        ("-machine q35,kernel=/usr/x", "kernel"),
        ("-cpu host,realized=on", "realized"),
        ("-global virtio-net-pci.romfile=/etc/shadow", "romfile"),
        ("-smbios file=/etc/shadow", ""),
        ("-smbios type=11,path=/etc/shadow", "path=/etc/shadow"),
        ("-boot splash=/etc/shadow", "/etc/shadow"),
        ("-icount 3,rr=record,rrfile=/x", "rr="),
        ("-audiodev wav,id=a,path=/x", "-audiodev wav"),
        ("-tpmdev passthrough,id=t", "-tpmdev passthrough"),
        ("-drive file.driver=ssh,file.path=/x", "-drive ssh"),
        ("-drive file={file:a},format=qcow2", "must be one of raw"),
        ("-drive if=none,file.driver=vvfat,file.dir=/etc", "-drive vvfat"),
        ("-blockdev driver=host_device,filename=/dev/sda,node-name=n", "-blockdev host_device"),
        ("-blockdev qcow2,node-name=n,file=f", "-blockdev qcow2"),
        ("-blockdev driver=nbd,server.type=inet,server.host=h,server.port=1,node-name=n", ""),
        (
            "-blockdev driver=nbd,node-name=n,server.type=unix,server.path={disk:a},export={export:a},tls-creds=t",
            "tls-creds",
        ),
        ("/etc/shadow", ""),
        ("-hda /etc/shadow", "-hda"),
        ("-cdrom /etc/shadow", "-cdrom"),
        ("-pflash nbd:x", "-pflash"),
        ("-foo", "-foo"),
    ] {
        let refused = refusal(words, Allowed::default()).unwrap_or_else(|| panic!("{words} passes"));
        assert!(refused.contains(expected), "{words}: {refused}");
    }
}

#[test]
fn paths_are_those_that_may_be_named() {
    for words in [
        "-kernel /etc/shadow",
        "-kernel /usr/../etc/shadow",
        "-kernel /usr/./../etc/shadow",
        "-kernel boot",
        "-kernel {path:a}",
        "-bios {file:a}x",
        "-initrd /usr/a:/etc/shadow",
        "-device virtio-net-pci,romfile=/etc/shadow",
        "-object secret,id=s,file=/etc/shadow",
        "-acpitable sig=SEC0,data=/usr/lib/os-release:/etc/shadow",
        "-fw_cfg name=opt/a,file=/etc/shadow",
        "-chardev socket,id=c,path=/run/docker.sock",
        "-chardev socket,id=c,path=/usr/run/x",
        "-chardev socket,id=c,path={disk:a}",
        "-chardev socket,id=c,path={qmp}",
        "-drive file=/etc/shadow,format=raw,readonly=on",
        "-drive file=/usr/x,format=raw",
        "-drive if=pflash,format=raw,file.driver=file,file.filename=/usr/x",
        "-blockdev file,node-name=n,filename=/usr/x",
        r#"-blockdev {"driver":"raw","node-name":"n","file":{"driver":"file","filename":"/etc/shadow"}}"#,
        "-rtc base=/etc",
        "-k /etc/shadow",
        "-k ../x",
        "-object rng-random,id=r,filename=/etc/shadow",
        "-append {disk:a}",
        "-name {qmp}",
        "-drive file=nbd://10.0.0.1/x,if=virtio",
        "-drive file=nbd+unix:///x?socket=/run/other,if=virtio",
        "-drive file=nbd+unix:///victim?socket=/run/v.sock#socket={disk:a},if=none",
        "-drive file=nbd+unix:///{export:a}?socket={disk:b}",
        "-drive file=json:{},if=none",
        "-blockdev driver=nbd,server.type=unix,server.path=/run/other,node-name=n",
        "-blockdev driver=nbd,server.type=unix,server.path={disk:a},export={export:b},node-name=n",
        "-blockdev driver=nbd,server.type=unix,server.path={disk:a},export=other,node-name=n",
        "-blockdev driver=nbd,server.type=unix,server.path={disk:a},node-name=n",
    ] {
        assert!(refusal(words, Allowed::default()).is_some(), "{words} passes");
    }
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    for words in [
        "-qmp unix:{qmp},server=on,wait=off",
        "-qmp unix:{qmp},path={path:m},server=on,wait=off",
        "--m 64",
        "-m 64 -m 128",
        "-m 64,size=128",
        "-m size=64,size=64",
        "-m 64,,slots=2",
        "-m 064",
        "-machine q35 -machine pc",
        "-machine q35,type=pc",
        "-M q35 -machine pc",
        "-device VGA,driver=loader",
        "-device VGA,id=a -device VGA,id=a",
        "-device driver=VGA,driver=VGA",
        r#"-device {"driver":"VGA","driver":"loader"}"#,
        "-device {'driver':'VGA'}",
        r#"-device {"driver":["VGA"]}"#,
        "-chardev null,id=compat_monitor0",
        "-chardev null,id=serial0",
        "-chardev null,id=a -chardev null,id=a",
        "-device isa-serial,chardev=compat_monitor0",
        "-device isa-serial,chardev=c",
        "-serial chardev:compat_monitor0",
        "-device virtio-blk-pci,drive=#block1",
        "-device virtio-blk-pci,drive=other",
        "-blockdev raw,node-name=a,file=b",
        "-blockdev raw,node-name=a,file=b,file.driver=null-co -blockdev null-co,node-name=b",
        "-blockdev null-co,node-name=a,driver=file",
        "-drive if=none,readonly=on,read-only=off",
        "-drive if=none,file={file:a},file.driver=null-co",
        "-name a,,b",
        "-name a␣b,x",
        "-NAME a",
        "-Device VGA",
        "-device vga",
        "-device VGA,ID=a",
        "-nodefault",
        "-no-user",
        "-uuid",
        "-serial unix:{path:a},server=on",
        "-serial unix:{path:a},server=on,wait=off,path=/x",
        "-global a.b",
        "-global driver=ICH9-LPC,property=disable_s3,value=1,driver=x",
        "-append x -append y",
        "-kernel /usr/a -kernel /usr/b",
        "-cpu host,+x2apic,x2apic=off",
        "-netdev user,id=n,restrict=off,restrict=on",
        "-netdev user,id=n,type=tap",
    ] {
        assert!(refusal(words, Allowed::default()).is_some(), "{words} passes");
    }
    for program in ["", "sh", "/usr/bin/qemu-system-x86_64", "qemu-system-/../sh", "qemu-system-", "{name}"] {
        let command = words(&format!("{program} -nodefaults -qmp unix:{{qmp}},server=on,wait=off"));
        assert!(Understood::read(&command, Allowed::default()).is_err(), "{program}");
    }
    assert!(Understood::read(&words("qemu-system-x86_64 -nodefaults"), Allowed::default()).is_err());
}

#[test]
fn an_ordinary_machine_is_written_anew() {
    for (words, expected) in [
        ("-accel kvm -m 2048 -smp 2,maxcpus=4", None),
        ("-m 65528K -name {name},debug-threads=on -uuid 01234567-89ab-cdef-0123-456789abcdef", None),
        ("-M q35,usb=off -machine accel=kvm:tcg", Some("-machine q35,usb=off,accel=kvm:tcg")),
        (
            "-cpu host,+x2apic,-svm,hv_relaxed,hv-spinlocks=0x1fff",
            Some("-cpu host,x2apic=on,svm=off,hv-relaxed=on,hv-spinlocks=8191"),
        ),
        ("-display none -vga std -rtc base=utc,driftfix=slew -boot menu=on,strict=on", None),
        ("-serial unix:{path:serial},server,nowait", Some("-serial unix:{path:serial},server=on,wait=off")),
        (
            "-chardev socket,id=c,path={path:c},server,nowait -serial chardev:c",
            Some("-chardev socket,id=c,path={path:c},server=on,wait=off -serial chardev:c"),
        ),
        (
            "-blockdev driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
            Some(
                "-blockdev nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
            ),
        ),
        (
            r#"-blockdev {"driver":"nbd","node-name":"j","server":{"type":"unix","path":"{disk:a}"},"export":"{export:a}"}"#,
            Some("-blockdev nbd,export={export:a},node-name=j,server.path={disk:a},server.type=unix"),
        ),
        (
            "-blockdev null-co,node-name=n,size=1M -blockdev raw,node-name=d,file=n -device virtio-blk-pci,drive=d,id=x,bootindex=1",
            None,
        ),
        (
            "-drive if=virtio,discard=unmap,format=raw,file.driver=nbd,file.server.type=unix,file.server.path={disk:d},file.export={export:d},file.reconnect-delay=60",
            None,
        ),
        (
            "-drive file=nbd+unix:///{export:a}?socket={disk:a},if=virtio,format=raw",
            Some(
                "-drive if=virtio,format=raw,file.driver=nbd,file.server.type=unix,file.server.path={disk:a},file.export={export:a}",
            ),
        ),
        (
            "-drive if=pflash,readonly=on,file=/usr/share/OVMF/OVMF_CODE.fd",
            Some("-drive if=pflash,read-only=on,file=/usr/share/OVMF/OVMF_CODE.fd,format=raw"),
        ),
        (
            "-drive index=2,media=cdrom,file={file:seed}",
            Some("-drive index=2,media=cdrom,file={file:seed},format=raw"),
        ),
        ("-drive index=2,media=cdrom", None),
        ("-cdrom {file:seed}", Some("-drive index=2,media=cdrom,format=raw,file={file:seed}")),
        ("-pflash {file:vars}", Some("-drive if=pflash,format=raw,file={file:vars}")),
        (
            "-netdev tap,id=n,ifname=t0,script=no,downscript=no -device virtio-net-pci,netdev=n,mac=52:54:00:00:00:01,romfile=",
            None,
        ),
        ("-nic none", None),
        ("-chardev socket,id=t,path={tpm} -tpmdev emulator,id=t,chardev=t -device tpm-crb,tpmdev=t", None),
        (
            "-object rng-random,id=r,filename=/dev/urandom -device virtio-rng-pci,rng=r,max-bytes=1024,period=1000",
            None,
        ),
        ("-object iothread,id=i -device virtio-scsi-pci,iothread=i,id=s -nographic -no-reboot", None),
        (
            r#"-object {"qom-type":"memory-backend-ram","id":"m","size":1024}"#,
            Some("-object memory-backend-ram,id=m,size=1024"),
        ),
        (
            "-append console=ttyS0,115200␣root=/dev/vda -kernel /usr/lib/boot/vmlinuz -initrd {file:i}",
            Some("-append console=ttyS0,115200 root=/dev/vda -kernel /usr/lib/boot/vmlinuz -initrd {file:i}"),
        ),
        ("-smbios type=1,manufacturer=/x,serial=a:b -fw_cfg opt/x,string=y", None),
        ("-global PIIX4_PM.disable_s3=1", Some("-global driver=PIIX4_PM,property=disable_s3,value=1")),
        (
            "-device pcie-root-port,port=0x10,chassis=1,id=pci.1,bus=pcie.0,multifunction=yes,addr=0x2",
            Some("-device pcie-root-port,port=0x10,chassis=1,id=pci.1,bus=pcie.0,multifunction=on,addr=0x2"),
        ),
    ] {
        assert_eq!(written(words), expected.unwrap_or(&words.replace('␣', " ")), "{words}");
    }
}

#[test]
fn a_value_does_not_become_a_key_when_it_is_written() {
    for words in ["-fw_cfg name=file=/etc/shadow,string=x", "-name guest=process=x", "-fw_cfg name=,string=x"]
    {
        assert_eq!(written(words), words);
    }
}

#[test]
fn a_machine_as_proxmox_starts_it_is_understood() {
    let words = "-name web1,debug-threads=on -no-shutdown -smbios type=1,uuid=01234567-89ab-cdef-0123-456789abcdef -smp \
        2,sockets=1,cores=2,maxcpus=2 -boot menu=on,strict=on,reboot-timeout=1000,splash=/usr/share/qemu-server/bootsplash.jpg \
        -cpu kvm64,enforce,+kvm_pv_eoi,+kvm_pv_unhalt,+lahf_lm,+sep -m 2048 -object iothread,id=iothread-virtioscsi0 -device \
        pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e -device vmgenid,guid=01234567-89ab-cdef-0123-456789abcdef -device \
        piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2 -device usb-tablet,id=tablet,bus=uhci.0,port=1 -device \
        VGA,id=vga,bus=pci.0,addr=0x2 -chardev socket,path={path:qga0},server=on,wait=off,id=qga0 -device \
        virtio-serial,id=qga0,bus=pci.0,addr=0x8 -device virtserialport,chardev=qga0,name=org.qemu.guest_agent.0 -device \
        virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3,free-page-reporting=on -drive \
        if=none,id=drive-ide2,media=cdrom,aio=io_uring -device ide-cd,bus=ide.1,unit=0,drive=drive-ide2,id=ide2,bootindex=101 \
        -device virtio-scsi-pci,id=virtioscsi0,bus=pci.3,addr=0x1,iothread=iothread-virtioscsi0 -drive \
        if=none,id=drive-scsi0,cache=none,detect-zeroes=unmap,discard=unmap,format=raw,file.driver=nbd,file.server.type=unix,file.server.path={disk:disk0},file.export={export:disk0},file.reconnect-delay=60 \
        -device scsi-hd,bus=virtioscsi0.0,channel=0,scsi-id=0,lun=0,drive=drive-scsi0,id=scsi0,rotation_rate=1,write-cache=on \
        -netdev type=tap,id=net0,ifname=tap100i0,script=no,downscript=no,vhost=on -device \
        virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,addr=0x12,id=net0,rx_queue_size=1024,tx_queue_size=256,bootindex=102 \
        -machine type=pc-i440fx-8.1+pve0 -rtc driftfix=slew,base=localtime -global PIIX4_PM.disable_s3=1";
    let anew = written(&words.split_whitespace().collect::<Vec<_>>().join(" "));
    assert!(anew.contains("-machine pc-i440fx-8.1+pve0") && anew.contains("kvm-pv-eoi=on"), "{anew}");
    // A program sets up its bridge, which the administrator may allow.
    let options = ["-netdev tap".to_owned()];
    let allowed = Allowed { options: &options, folders: &[] };
    let script = "-netdev type=tap,id=n,ifname=t,script=/usr/libexec/qemu-server/pve-bridge,downscript=no";
    assert_eq!(read(script, allowed).unwrap().write()[5..7].join(" "), script);
    assert!(refusal(script, Allowed::default()).is_some());
    assert!(refusal(&script.replace("/usr", "/tmp"), allowed).is_some());
}

#[test]
fn a_network_within_qemu_reaches_nothing_and_that_is_said() {
    for (text, expected) in [
        ("-netdev user,id=n", "-netdev user,id=n,restrict=on"),
        ("-nic user,restrict=off,model=e1000", "-nic user,model=e1000,restrict=on"),
    ] {
        assert_eq!(written(text), expected);
        let warnings = read(text, Allowed::default()).unwrap().warnings().join(" ");
        assert!(warnings.contains("reaches nothing") && warnings.contains("allow = ["), "{warnings}");
    }
    let restricted = read("-netdev user,id=n,restrict=on", Allowed::default()).unwrap();
    assert_eq!(restricted.warnings(), [""; 0]);
    let options = ["-netdev user".to_owned()];
    let allowed = Allowed { options: &options, folders: &[] };
    assert_eq!(read("-netdev user,id=n", allowed).unwrap().write()[5..7], ["-netdev", "user,id=n"]);
}

#[test]
fn what_qemu_would_make_by_itself_is_said() {
    let command = words("qemu-system-x86_64 -m 64 -qmp unix:{qmp},server=on,wait=off");
    let understood = Understood::read(&command, Allowed::default()).unwrap();
    let written = understood.write()[5..].join(" ");
    assert_eq!(
        written,
        "-net nic -net user,restrict=on -monitor none -serial null -parallel null -display none -no-user-config"
    );
    assert_eq!(understood.warnings().len(), 1);
    let again = Understood::read(&understood.write(), Allowed::default()).unwrap();
    assert_eq!((again.write(), again.warnings().len()), (understood.write(), 0));
}

#[test]
fn devices_that_would_use_the_sound_of_the_host_are_refused_by_name() {
    for device in ["AC97", "ES1370", "hda-duplex", "hda-micro", "hda-output", "sb16", "usb-audio"] {
        let refused = refusal(&format!("-device intel-hda -device {device}"), Allowed::default()).unwrap();
        assert!(refused.contains(device) && refused.contains("has no audiodev"), "{refused}");
        let with = format!("-audiodev none,id=a -device intel-hda -device {device},audiodev=a");
        assert_eq!(written(&with), with);
    }
    for device in ["adlib", "cs4231a", "gus", "virtio-sound-pci"] {
        assert!(refusal(&format!("-device {device}"), Allowed::default()).is_some(), "{device}");
        // The administrator's permission does not change this.
        let options = [format!("-device {device}")];
        let allowed = Allowed { options: &options, folders: &[] };
        let refused = refusal(&format!("-device {device}"), allowed);
        assert!(refused.is_some_and(|refused| refused.contains("has no audiodev")), "{device}");
    }
}

#[test]
fn the_socket_of_a_tpm_is_served_by_swtpm_and_used_by_the_tpm_only() {
    let tpm = "-tpmdev emulator,id=t,chardev=t -device tpm-crb,tpmdev=t";
    let refused =
        |words: &str| refusal(words, Allowed::default()).unwrap_or_else(|| panic!("{words} passes"));
    for server in ["server=on", "server=on,wait=off", "server", "server=yes,wait=on"] {
        let refused = refused(&format!("-chardev socket,id=t,path={{tpm}},{server} {tpm}"));
        assert!(refused.contains("id=t has server=on"), "{refused}");
    }
    let refused = refused(&format!(
        "-chardev socket,id=t,path={{tpm}} {tpm} -chardev socket,id=u,path={{tpm}} -serial chardev:u"
    ));
    assert!(refused.contains("id=u leads to {tpm}"), "{refused}");
    written(&format!("-chardev socket,id=t,path={{tpm}},server=off {tpm}"));
}

#[test]
fn what_the_administrator_allows_is_cut_as_strictly() {
    let options = ["-vnc", "-netdev bridge", "-gdb tcp", "-nic user", "-chardev file"].map(str::to_owned);
    let allowed = Allowed { options: &options, folders: &["/srv/boot".into()] };
    let taken = "-vnc 127.0.0.1:1 -netdev bridge,id=n,br=br0 -device e1000,netdev=n -kernel /srv/boot/vmlinuz -gdb tcp::1234 \
         -nic user,hostfwd=tcp::22-:22,hostfwd=tcp::23-:23 -chardev file,id=f,path=/srv/boot/log -chardev \
         socket,id=s,path=/srv/boot/s";
    assert_eq!(read(taken, allowed).unwrap().write()[5..].join(" "), taken);
    for refused in [
        "-kernel /srv/boot/../x",
        "-netdev tap,id=n",
        "-netdev bridge,id=n,id=m",
        "-netdev bridge,id=n,type=tap",
        "-vnc unix:/run/x",
        "-vnc :1,,x",
        "-chardev file,id=f,path=/etc/x",
        "-chardev file,id=f,path=/srv/boot/a,path=/srv/boot/b",
        "-chardev file,id=compat_monitor0,path=/srv/boot/a",
        "-chardev file,backend=socket,id=f,path=/srv/boot/a",
    ] {
        assert!(refusal(refused, allowed).is_some(), "{refused} passes");
    }
}
