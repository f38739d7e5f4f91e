//! What a VM's definition may name that another host has sent: QEMU carries out what its command says, as whoever runs it.
//!
//! ```text
//!   option ──► known to reach nothing of this host, or allowed by [machines] ──► each path: a place, below /usr, or below a
//!                                                                                 folder of [machines]
//! ```
//! Whatever is not known is refused. Definitions of this host's own administrator are not looked at.

use std::path::{Component, Path, PathBuf};

use super::movable::SYSTEM_FOLDER;
use super::parser::{Argument, Values, parse};

/// Why a definition of another host's is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAllowed {
    /// An option that is not known to be harmless.
    #[error(
        "{what} is nothing that a VM from another host may name here; if it may: allow = [\"{entry}\"] below [machines] in \
         that host's configuration"
    )]
    Option {
        /// The words.
        what: String,
        /// What would allow it.
        entry: String,
    },
    /// A path of this host.
    #[error(
        "{option}: {path} is no file that a VM from another host may name here; if it may: folders = [\"{folder}\"] below \
         [machines] in that host's configuration"
    )]
    Path {
        /// The option.
        option: String,
        /// The path.
        path: String,
        /// The folder that would have to be named.
        folder: String,
    },
}

/// Options that reach nothing of the host but files that they name, whatever they say.
const HARMLESS: [&str; 47] = [
    "-M",
    "-accel",
    "-acpitable",
    "-action",
    "-append",
    "-bios",
    "-boot",
    "-cdrom",
    "-compat",
    "-cpu",
    "-dtb",
    "-enable-kvm",
    "-fda",
    "-fdb",
    "-fw_cfg",
    "-global",
    "-hda",
    "-hdb",
    "-hdc",
    "-hdd",
    "-icount",
    "-initrd",
    "-k",
    "-kernel",
    "-m",
    "-machine",
    "-mem-prealloc",
    "-msg",
    "-name",
    "-no-acpi",
    "-no-fd-bootchk",
    "-no-hpet",
    "-no-reboot",
    "-no-shutdown",
    "-no-user-config",
    "-nodefaults",
    "-nographic",
    "-nouserconfig",
    "-numa",
    "-overcommit",
    "-pflash",
    "-rtc",
    "-smbios",
    "-smp",
    "-usb",
    "-uuid",
    "-vga",
];
/// Options that are harmless with some values: what the value begins with.
const WITH: [(&str, &[&str]); 12] = [
    ("-audiodev", &["none"]),
    ("-blockdev", &["file", "nbd", "null-co", "qcow2", "raw", "throttle"]),
    ("-chardev", &["null", "ringbuf", "socket"]),
    ("-display", &["none"]),
    ("-monitor", &["none"]),
    ("-netdev", &["hubport", "tap", "user"]),
    ("-nic", &["none", "tap", "user"]),
    ("-parallel", &["none", "null"]),
    ("-serial", &["none", "null"]),
    ("-spice", &[]),
    ("-tpmdev", &["emulator"]),
    ("-vnc", &["none"]),
];
/// Objects that reach nothing of the host.
const OBJECTS: [&str; 8] = [
    "iothread",
    "memory-backend-memfd",
    "memory-backend-ram",
    "rng-builtin",
    "rng-random",
    "secret",
    "thread-context",
    "throttle-group",
];
/// Beginnings of the names of devices that reach the host besides what a migration refuses.
const DEVICES: [&str; 4] = ["vhost-", "u2f-passthru", "usb-mtp", "virtio-input-host"];
/// Keys of any value that reach the host: programs that are run, sockets that are listened at, descriptors, other servers.
const KEYS: [&str; 24] = [
    "addr.host",
    "addr.port",
    "cmd",
    "downscript",
    "dumpdtb",
    "fd",
    "fds",
    "guestfwd",
    "helper",
    "host",
    "hostfwd",
    "logfile",
    "port",
    "script",
    "server.host",
    "server.port",
    "smb",
    "smbserver",
    "tftp",
    "tls-creds",
    "url",
    "vhostfd",
    "vhostfds",
    "websocket",
];
/// Where the kernel's source of randomness is.
const RANDOM: [&str; 2] = ["/dev/random", "/dev/urandom"];

/// What a host's administrator allows besides.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allowed<'a> {
    /// Options, alone or with the beginning of their value: `-vnc`, `-netdev bridge`.
    pub options: &'a [String],
    /// Folders whose files may be named.
    pub folders: &'a [PathBuf],
}

/// Looks whether a command, with its variables as they are written, names only what it may.
///
/// # Errors
/// [`NotAllowed`].
pub fn check(command: &[String], allowed: Allowed<'_>) -> Result<(), NotAllowed> {
    for argument in parse(command.get(1..).unwrap_or_default()) {
        check_argument(&argument, allowed)?;
    }
    Ok(())
}

fn check_argument(argument: &Argument, allowed: Allowed<'_>) -> Result<(), NotAllowed> {
    let text = argument.value.as_deref().unwrap_or_default();
    let option = if argument.option.is_empty() { "-hda" } else { argument.option.as_str() };
    let values = Values::read(text);
    let begins = values.driver();
    let driver = begins.split([':', '=']).next().unwrap_or_default();
    let entry = format!("{option} {driver}");
    let is_allowed = allowed.options.iter().any(|known| *known == option || *known == entry);
    let refuse = |what: String| Err(NotAllowed::Option { what, entry: entry.trim_end().to_owned() });
    if !is_allowed {
        let is_known = HARMLESS.contains(&option)
            || WITH.iter().any(|(known, with)| *known == option && with.contains(&driver))
            || option == "-object" && OBJECTS.contains(&driver)
            || option == "-device" && !DEVICES.iter().any(|begin| driver.starts_with(begin))
            || option == "-drive"
            || ["-serial", "-parallel"].contains(&option)
                && (driver == "chardev" || text.starts_with("unix:{path:"))
            || option == "-qmp" && text.starts_with("unix:{qmp}");
        if !is_known {
            return refuse(format!("{option} {driver}").trim_end().to_owned());
        }
    }
    for (key, value) in values.pairs() {
        if !is_allowed && reaches_out(option, &key, &value) {
            return refuse(format!("{option} {key}={value}"));
        }
        let value = value.strip_prefix("unix:").unwrap_or(&value);
        if names_path(option, &key, value) && !may_name(value, allowed) {
            let folder = Path::new(value).parent().unwrap_or(Path::new(value)).display().to_string();
            return Err(NotAllowed::Path { option: option.to_owned(), path: value.to_owned(), folder });
        }
    }
    // QEMU's own network runs programs unless it is told not to.
    let is_tap = ["-netdev", "-nic"].contains(&option) && driver == "tap";
    if is_tap
        && !is_allowed
        && ["script", "downscript"].iter().any(|key| values.get(key).as_deref() != Some("no"))
    {
        return refuse(format!("{option} tap without script=no,downscript=no"));
    }
    Ok(())
}

/// Whether a key and its value reach something of this host, or another server.
fn reaches_out(option: &str, key: &str, value: &str) -> bool {
    let is_script_off = ["script", "downscript"].contains(&key) && value == "no";
    let last = key.rsplit('.').next().unwrap_or(key);
    let is_driver = key.ends_with(".driver") || ["-drive", "-blockdev"].contains(&option) && key == "driver";
    let drivers =
        WITH.iter().find(|(known, _)| *known == "-blockdev").map_or(&[][..], |(_, drivers)| drivers);
    match option {
        // What a device calls so is within the VM.
        "-device" | "-global" | "-append" | "-name" => false,
        _ if is_driver => !drivers.contains(&value),
        "-drive" if key == "file" => value.contains("://") && !value.contains("socket={disk:"),
        _ => (KEYS.contains(&key) || KEYS.contains(&last)) && !is_script_off,
    }
}

/// Whether a value is a path, or may be one.
fn names_path(option: &str, key: &str, value: &str) -> bool {
    // Words for the guest.
    let is_text = ["-append", "-name", "-uuid", "-rtc", "-cpu", "-k", "-vga"].contains(&option)
        || ["-smbios", "-fw_cfg"].contains(&option) && key != "file"
        || option == "-object" && key == "data"
        || option == "-device" && ["serial", "id", "drive"].contains(&key);
    let is_file = |key: &str| {
        ["file", "filename", "path", "romfile", "rootdir", "evdev", "mem-path"]
            .contains(&key.rsplit('.').next().unwrap_or(key))
    };
    let is_alone = [
        "-kernel", "-initrd", "-dtb", "-bios", "-cdrom", "-pflash", "-hda", "-hdb", "-hdc", "-hdd", "-fda",
        "-fdb",
    ];
    // Of -blockdev, `file` is the name of a node.
    let is_node = option == "-blockdev" && key.rsplit('.').next() == Some("file") && !value.contains('/');
    let is_address = value.contains("socket={disk:");
    !is_text
        && !value.is_empty()
        && !is_node
        && !is_address
        && (value.starts_with('/') || value.contains("..") || is_file(key) || is_alone.contains(&option))
}

fn may_name(path: &str, allowed: Allowed<'_>) -> bool {
    // What is behind a place is the VM's own; nothing may lead out of it again.
    let is_plain = !Path::new(path).components().any(|component| component == Component::ParentDir);
    let is_place = path.starts_with('{') && path.ends_with('}');
    let is_below = |folder: &Path| Path::new(path).starts_with(folder);
    is_plain
        && (is_place
            || RANDOM.contains(&path)
            || is_below(Path::new(SYSTEM_FOLDER))
            || allowed.folders.iter().any(|folder| is_below(folder)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(words: &str, allowed: Allowed<'_>) -> Option<String> {
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let mut arguments = parse(&words).into_iter();
        arguments
            .find_map(|argument| check_argument(&argument, allowed).err())
            .map(|refused| refused.to_string())
    }

    #[test]
    fn what_reaches_the_host_is_refused_by_name_with_the_key_that_would_allow_it() {
        let strict = Allowed::default();
        for (words, expected) in [
            ("-netdev tap,id=n,script=/tmp/x", "allow = [\"-netdev tap\"]"),
            ("-netdev tap,id=n", "without script=no"),
            ("-netdev bridge,id=n", "allow = [\"-netdev bridge\"]"),
            ("-nic user,hostfwd=tcp::2222-:22", "hostfwd"),
            ("-nic user,guestfwd=tcp:10.0.2.1:1-cmd:sh", "guestfwd"),
            ("-netdev user,id=n,smb=/etc", "smb"),
            ("-chardev file,id=c,path=/etc/cron.d/x", "allow = [\"-chardev file\"]"),
            ("-chardev socket,id=c,path=/run/docker.sock", "folders = [\"/run\"]"),
            ("-chardev socket,id=c,host=10.0.0.1,port=22", "host=10.0.0.1"),
            ("-chardev null,id=c,logfile=/etc/x", "logfile"),
            ("-chardev pipe,id=c,path=/x", "-chardev pipe"),
            ("-D /etc/passwd", "allow = [\"-D"),
            ("-d all", "-d"),
            ("-monitor stdio", "-monitor stdio"),
            ("-monitor unix:{path:m},server=on", "-monitor unix"),
            ("-mon chardev=c", "-mon"),
            ("-readconfig /tmp/x", "-readconfig"),
            ("-qmp tcp::4444,server=on", "-qmp tcp"),
            ("-sandbox off", "-sandbox off"),
            ("-runas root", "-runas"),
            ("-fsdev local,path=/", "-fsdev"),
            ("-vnc :0", "-vnc"),
            ("-serial file:/etc/x", "-serial file"),
            ("-object memory-backend-file,id=m,mem-path=/etc/passwd,share=on", "-object memory-backend-file"),
            ("-object filter-dump,id=f,netdev=n,file=/etc/x", "-object filter-dump"),
            ("-object secret,id=s,file=/etc/shadow", "/etc/shadow"),
            ("-device virtio-net-pci,romfile=/etc/shadow", "/etc/shadow"),
            ("-device vhost-vsock-pci,guest-cid=3", "-device vhost-vsock-pci"),
            ("-device loader,file=/etc/shadow", "/etc/shadow"),
            ("-machine q35,dumpdtb=/usr/x", "dumpdtb"),
            ("-kernel /etc/shadow", "folders = [\"/etc\"]"),
            ("-kernel /usr/../etc/shadow", "/usr/../etc/shadow"),
            ("-drive file=nbd://10.0.0.1/x,if=virtio", "nbd://"),
            ("-drive file=nbd+unix:///x?socket=/run/other,if=virtio", "socket=/run/other"),
            ("-drive file.driver=ssh,file.path=/x", "file.driver=ssh"),
            ("-blockdev driver=host_device,filename=/dev/sda,node-name=n", "-blockdev host_device"),
            (
                "-blockdev driver=nbd,server.type=inet,server.host=h,server.port=1,node-name=n",
                "server.host=h",
            ),
            ("-blockdev driver=nbd,server.type=unix,server.path=/run/other,node-name=n", "/run/other"),
            (
                r#"-blockdev {"driver":"raw","file":{"driver":"file","filename":"/etc/shadow"}}"#,
                "/etc/shadow",
            ),
            ("/etc/shadow", "/etc/shadow"),
        ] {
            let refused = refusal(words, strict).unwrap_or_else(|| panic!("{words} passes"));
            assert!(refused.contains(expected) && refused.contains("[machines]"), "{words}: {refused}");
        }
    }

    #[test]
    fn an_ordinary_machine_passes_and_what_is_allowed_does() {
        let strict = Allowed::default();
        for words in [
            "-accel kvm -m 2048 -smp 2 -name {name} -machine q35,usb=off -cpu host -nodefaults -display none -vga std",
            "-qmp unix:{qmp},server=on,wait=off -serial unix:{path:serial},server=on,wait=off -serial chardev:c",
            "-blockdev driver=nbd,node-name=root,server.type=unix,server.path={disk:root},export={export:root},reconnect-delay=60",
            "-blockdev raw,node-name=d,file=n -drive file=nbd+unix:///{export:a}?socket={disk:a},if=virtio",
            "-device virtio-blk-pci,drive=root,bootindex=1 -device virtio-net-pci,netdev=n,mac=52:54:00:00:00:01,romfile=",
            "-drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/OVMF_CODE.fd -drive if=pflash,format=raw,file={file:vars}",
            "-netdev user,id=n -netdev tap,id=n,ifname=t0,script=no,downscript=no -nic none",
            "-chardev socket,id=t,path={tpm} -tpmdev emulator,id=t,chardev=t -device tpm-crb,tpmdev=t",
            "-object rng-random,id=r,filename=/dev/urandom -object iothread,id=i -append root=/dev/vda",
            "-kernel /usr/lib/boot/vmlinuz -smbios type=1,manufacturer=/x",
        ] {
            assert_eq!(refusal(words, strict), None, "{words}");
        }
        let options = ["-vnc".to_owned(), "-netdev bridge".to_owned()];
        let loose = Allowed { options: &options, folders: &["/srv/boot".into()] };
        let words = "-vnc 127.0.0.1:1 -netdev bridge,id=n,br=br0 -kernel /srv/boot/vmlinuz";
        assert_eq!(refusal(words, loose), None);
        assert!(refusal("-kernel /srv/boot/../x", loose).is_some());
        assert!(refusal("-netdev tap,id=n", loose).is_some());
    }
}
