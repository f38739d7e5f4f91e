//! Checks whether a VM could move at all: finds the options that tie it to one host.
//!
//! QEMU would refuse some of these when the VM is to move, and silently leave the others behind. Either is too late, so they are
//! looked for when a VM is added. QEMU is asked at run time for properties that the command does not show.

use super::parser::{Values, parse};

/// A part that keeps a VM from moving, with advice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} {reason}")]
pub struct Unmovable {
    /// The words of the command.
    pub what: String,
    /// The reason, with advice.
    pub reason: &'static str,
}

/// Everything that keeps a VM from moving; at least one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacles(pub Vec<Unmovable>);

impl std::error::Error for Obstacles {}

impl std::fmt::Display for Obstacles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let texts: Vec<String> = self.0.iter().map(Unmovable::to_string).collect();
        f.write_str(&texts.join("; "))
    }
}

impl Obstacles {
    /// Returns an error if there are any.
    pub(super) fn check(found: Vec<Unmovable>) -> Result<(), Self> {
        if found.is_empty() { Ok(()) } else { Err(Self(found)) }
    }
}

/// Options that Sterna gives itself, or that would take QEMU out of its control.
const OPTIONS: [(&str, &str); 8] = [
    ("-incoming", "is given by Sterna when a VM arrives: leave it out"),
    ("-S", "is given by Sterna when a VM arrives: leave it out"),
    ("-daemonize", "would detach QEMU from Sterna, which keeps it running anyway: leave it out"),
    ("-snapshot", "keeps writes in a temporary file, which would be left behind: leave it out"),
    ("-loadvm", "starts from a snapshot in a local image: leave it out"),
    ("-virtfs", "shares a folder of this host: put what the guest needs on a volume"),
    ("-fsdev", "shares a folder of this host: put what the guest needs on a volume"),
    ("-usbdevice", "may be a device of this host: use -device with an emulated one"),
];

const DEVICES: [(&str, &str); 8] = [
    ("vfio-", "is a device of this host: detach it before, or use an emulated one"),
    ("usb-host", "is a device of this host: detach it before, or use an emulated one"),
    ("vhost-user-fs", "shares a folder of this host (virtiofs): put what the guest needs on a volume"),
    ("vhost-user-", "keeps state in a process of this host, which does not move"),
    ("virtio-9p-", "shares a folder of this host: put what the guest needs on a volume"),
    ("ivshmem-", "shares memory with others on this host"),
    ("nvdimm", "keeps data in a file of this host: put it on a volume"),
    ("scsi-block", "is a device of this host: serve it as a volume (sterna volume add --device)"),
];

/// Options whose value is a path of an image, by their name alone.
const IMAGES: [&str; 11] =
    ["-hda", "-hdb", "-hdc", "-hdd", "-cdrom", "-fda", "-fdb", "-sd", "-mtdblock", "-pflash", "-cdimage"];

/// The folder of the distributions' firmware: the same on hosts with the same packages.
pub(super) const SYSTEM_FOLDER: &str = "/usr/";

const LOCAL_IMAGE: &str = "is a local file, which would be left behind: a disk is made a volume (sterna volume add) and \
    its place is {disk:NAME}; a small image, such as of cloud-init or of UEFI variables, goes into [files] and its place \
    is {file:NAME}; firmware that is the same on all hosts is below /usr and read-only";

const TPM_OF_OTHERS: &str = "keeps its state in a process (swtpm) that Sterna did not start: stop the VM and add it with \
    sterna vm add; its definition has path={tpm} in the TPM's -chardev, and state = \"FOLDER\" below [tpm], the folder of \
    that swtpm's state";
const TPM_OF_HOST: &str = "is a chip of this host: use a software TPM, with path={tpm} in its -chardev";

/// Checks a command for such options, and names all of them.
pub fn check(command: &[String]) -> Result<(), Obstacles> {
    let mut found: Vec<Unmovable> = check_tpm(command).err().into_iter().collect();
    let mut words = command.iter().skip(1);
    while let Some(word) = words.next() {
        // QEMU takes options with one hyphen or with two.
        let option = word.strip_prefix('-').filter(|rest| rest.starts_with('-')).unwrap_or(word);
        let mut fault = |what: String, reason| found.push(Unmovable { what, reason });
        if let Some((_, reason)) = OPTIONS.iter().find(|(name, _)| *name == option) {
            fault(word.clone(), reason);
            continue;
        }
        let is_image = IMAGES.contains(&option);
        if !is_image && !["-device", "-drive", "-blockdev"].contains(&option) {
            continue;
        }
        let Some(value) = words.next() else { break };
        let values = Values::read(value);
        match option {
            "-device" => {
                let driver = values.driver();
                if let Some((_, reason)) = DEVICES.iter().find(|(begin, _)| driver.starts_with(begin)) {
                    fault(format!("{word} {driver}"), reason);
                }
            }
            _ if is_image => {
                let is_system = option == "-cdrom" && value.starts_with(SYSTEM_FOLDER);
                if !is_portable(value) && !is_system {
                    fault(format!("{word} {value}"), LOCAL_IMAGE);
                }
            }
            _ => {
                if let Some(path) = local_image(&values, option) {
                    fault(format!("{word} {path}"), LOCAL_IMAGE);
                }
            }
        }
    }
    Obstacles::check(found)
}

fn check_tpm(command: &[String]) -> Result<(), Unmovable> {
    let arguments = parse(command.get(1..).unwrap_or_default());
    let of = |option: &str| {
        let found = arguments.iter().filter(move |argument| argument.option == option);
        found.map(|argument| Values::read(argument.value.as_deref().unwrap_or_default())).collect::<Vec<_>>()
    };
    let devices = of("-chardev");
    for tpm in of("-tpmdev") {
        let what = format!("-tpmdev {}", tpm.driver());
        if tpm.driver() != "emulator" {
            return Err(Unmovable { what, reason: TPM_OF_HOST });
        }
        let device = devices.iter().find(|device| device.get("id") == tpm.get("chardev"));
        if device.and_then(|device| device.get("path")).as_deref() != Some("{tpm}") {
            return Err(Unmovable { what, reason: TPM_OF_OTHERS });
        }
    }
    Ok(())
}

fn local_image(values: &Values, option: &str) -> Option<String> {
    let is_read_only = values.is_on("readonly") || values.is_on("read-only");
    // In -blockdev, `file` is the name of a node.
    let is_path =
        |key: &str| key == "filename" || key.ends_with(".filename") || (option == "-drive" && key == "file");
    let is_system = |path: &str| is_read_only && path.starts_with(SYSTEM_FOLDER);
    let paths = values.pairs().into_iter().filter(|(key, _)| is_path(key)).map(|(_, path)| path);
    paths.into_iter().find(|path| !is_portable(path) && !is_system(path))
}

/// Returns whether a path means the same on another host: a place, or an address of a server.
pub(super) fn is_portable(path: &str) -> bool {
    ["{file:", "{disk:", "nbd:", "nbd+unix:", "nbds:"].iter().any(|begin| path.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use super::check;

    fn refusal(words: &str) -> Option<String> {
        let command: Vec<String> = words.split(' ').map(str::to_owned).collect();
        check(&command).err().map(|unmovable| unmovable.to_string())
    }

    #[test]
    fn what_ties_a_machine_to_its_host_is_named() {
        for (words, expected) in [
            ("qemu -snapshot", "-snapshot keeps writes"),
            ("qemu -tpmdev passthrough,id=t,path=/dev/tpm0", "a chip of this host"),
            ("qemu -chardev socket,id=c,path=/run/x -tpmdev emulator,id=t,chardev=c", "[tpm]"),
            ("qemu -chardev socket,id=c,path={tpm} -tpmdev emulator,id=t,chardev=d", "[tpm]"),
            ("qemu --incoming tcp:0:1", "--incoming is given"),
            ("qemu -device vfio-pci,host=01:00.0", "-device vfio-pci is a device"),
            (r#"qemu -device {"driver":"usb-host"}"#, "-device usb-host is a device"),
            ("qemu -device vhost-user-fs-pci,chardev=c", "virtiofs"),
            ("qemu -hda /srv/disk.img", "-hda /srv/disk.img is a local file"),
            ("qemu -drive file=/srv/disk.img,if=virtio", "-drive /srv/disk.img is a local file"),
            ("qemu -drive if=virtio,file=/srv/disk,,1.img", "-drive /srv/disk,1.img is a local file"),
            ("qemu -cdrom /srv/seed.iso", "[files]"),
            ("qemu -blockdev file,filename=/srv/disk.img,node-name=f", "is a local file"),
            (
                r#"qemu -blockdev {"driver":"raw","file":{"driver":"file","filename":"/d"}}"#,
                "-blockdev /d is",
            ),
            ("qemu -drive if=pflash,format=raw,file=/usr/share/OVMF/VARS.fd", "is a local file"),
            ("qemu -pflash /usr/share/OVMF/VARS.fd", "is a local file"),
            ("qemu -drive file=disk.img", "-drive disk.img is a local file"),
        ] {
            let refusal = refusal(words).unwrap_or_else(|| panic!("{words} passes"));
            assert!(refusal.contains(expected), "{words}: {refusal}");
        }
    }

    #[test]
    fn everything_that_ties_a_vm_to_its_host_is_named_at_once() {
        let refusal =
            refusal("qemu -snapshot -device vfio-pci,host=01:00.0 -cdrom /srv/seed.iso -m 64").unwrap();
        for expected in ["-snapshot keeps", "-device vfio-pci is", "-cdrom /srv/seed.iso is"] {
            assert!(refusal.contains(expected), "{expected}: {refusal}");
        }
    }

    #[test]
    fn what_moves_passes() {
        for words in [
            "qemu -m 256 -device virtio-blk-pci,drive=root -nic user",
            "qemu -blockdev driver=nbd,server.type=unix,server.path={disk:root},node-name=n",
            "qemu -blockdev raw,file=n,node-name=root",
            "qemu -drive file=nbd+unix:///v?socket={disk:root},if=virtio",
            "qemu -drive if=pflash,format=raw,readonly=on,file=/usr/share/OVMF/CODE.fd",
            "qemu -drive if=pflash,format=raw,file={file:vars} -cdrom {file:seed}",
            "qemu -kernel /boot/vmlinuz -device",
            "qemu -tpmdev emulator,id=t,chardev=c -chardev socket,id=c,path={tpm} -device tpm-crb,tpmdev=t",
        ] {
            assert_eq!(refusal(words), None, "{words}");
        }
    }
}
