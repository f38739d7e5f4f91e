//! A separate libvirt daemon for tests in its own mount namespace, with a domain whose guest checks its disk.
//!
//! ```text
//!   Libvirtd ──► unshare: a name of its own, /etc/libvirt, /run/libvirt, /var/lib/libvirt … in memory ──► libvirtd, on a socket of the test's
//!      └─ virsh
//! ```
//! The machine's own libvirt is not changed, and nothing is left behind.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal};
use testbed::{Host, Program, until};

use crate::vm::{Vm, Work};

/// Name of the domain in libvirt.
pub const DOMAIN: &str = "web1";
/// Folders of the machine that libvirtd gets as empty folders of its own.
const FOLDERS: &str = "/etc/libvirt /var/lib/libvirt /var/log/libvirt /run/libvirt";
/// libvirt's cache about QEMU, in cargo's target folder, because filling it takes seconds.
const CACHE: &str = "tmp/libvirt-cache";
/// Starts libvirtd. QEMU runs as root, but libvirt looks up its own user nevertheless.
const SCRIPT: &str = r#"
set -e
hostname "$NAME"
for folder in $FOLDERS; do mkdir -p "$folder"; mount -t tmpfs tmpfs "$folder"; done
mkdir -p /etc/libvirt/qemu /var/cache/libvirt
mount --bind "$CACHE" /var/cache/libvirt
for names in passwd group; do
  cp "/etc/$names" "$OWN/$names"
  grep -q ^libvirt-qemu: "/etc/$names" || echo "$names" | sed -n \
    's/passwd/libvirt-qemu:x:64055:64055::\/:\/usr\/sbin\/nologin/p; s/group/libvirt-qemu:x:64055:/p' >> "$OWN/$names"
  mount --bind "$OWN/$names" "/etc/$names"
done
printf '%s\n' 'user = "root"' 'group = "root"' 'security_driver = "none"' 'remember_owner = 0' 'namespaces = []' \
  'cgroup_controllers = []' 'stdio_handler = "file"' "migration_port_min = $PORT" \
  "migration_port_max = $((PORT + PORTS - 1))" > /etc/libvirt/qemu.conf
printf '%s\n' "unix_sock_dir = \"$OWN\"" 'auth_unix_rw = "none"' "log_outputs = \"3:file:$OWN/log\"" \
  "host_uuid = \"$(cat /proc/sys/kernel/random/uuid)\"" > "$OWN/libvirtd.conf"
exec libvirtd --pid-file "$OWN/pid" --config "$OWN/libvirtd.conf"
"#;

/// The ports of one libvirtd for the memory of its domains.
const PORTS: u16 = 8;
/// libvirt's own range of these.
const PORTS_FROM: u16 = 49152;
const PORTS_TO: u16 = 65_000;

/// Returns the first port of a range for one libvirtd. With the same range two of them take the same port, and the memory of one
/// test's domain may reach another's QEMU.
fn ports() -> anyhow::Result<u16> {
    static BEGUN: AtomicU32 = AtomicU32::new(0);
    let ranges = u32::from((PORTS_TO - PORTS_FROM) / PORTS);
    let first = std::process::id().wrapping_mul(37);
    for _ in 0..ranges {
        let range = first.wrapping_add(BEGUN.fetch_add(1, Ordering::Relaxed)) % ranges;
        let port = PORTS_FROM + PORTS * u16::try_from(range)?;
        let is_free = |port: u16| std::net::TcpListener::bind(("0.0.0.0", port)).is_ok();
        if (port..port + PORTS).all(is_free) {
            return Ok(port);
        }
    }
    anyhow::bail!("no range of {PORTS} ports is free")
}

/// libvirt's daemon. Dropping it ends it and its domains.
#[derive(Debug)]
pub struct Libvirtd {
    own: PathBuf,
    daemon: Child,
}

impl Libvirtd {
    /// Starts libvirtd with its sockets in the folder of `host`. If the machine lacks it, reports
    /// the omission and returns `None`.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start(host: &Host) -> anyhow::Result<Option<Self>> {
        Self::start_as(host, "sterna-test")
    }

    /// Starts it as [`Libvirtd::start`], on a machine that seems to have this name: libvirt migrates between names only.
    ///
    /// # Errors
    /// If it does not start.
    pub fn start_as(host: &Host, name: &str) -> anyhow::Result<Option<Self>> {
        let lacks = if !rustix::process::geteuid().is_root() {
            Some("root, to run a libvirtd of a test's own")
        } else if Program::of_package("libvirtd", "libvirt-daemon").arg("--version").run().is_err() {
            Some("libvirtd: the packages libvirt-daemon, libvirt-daemon-driver-qemu and libvirt-clients")
        } else {
            None
        };
        if let Some(what) = lacks {
            omission::machine_lacks(what);
            return Ok(None);
        }
        let own = host.path("libvirt");
        std::fs::create_dir(&own)?;
        let cache = testbed::program::target_folder()?.join(CACHE);
        std::fs::create_dir_all(&cache)?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--uts", "sh", "-c", SCRIPT]).env("OWN", &own).env("FOLDERS", FOLDERS);
        command.env("NAME", name).env("PORT", ports()?.to_string()).env("PORTS", PORTS.to_string());
        command.env("CACHE", cache);
        let said = std::fs::File::create(own.join("said"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said).process_group(0);
        let daemon = command.spawn().context("start libvirtd in a mount name space of its own")?;
        let mut started = Self { own, daemon };
        until("libvirtd answers", || {
            if let Some(status) = started.daemon.try_wait()? {
                let said = ["said", "log"].map(|name| std::fs::read_to_string(started.own.join(name)));
                anyhow::bail!("libvirtd has ended: {status}: {said:?}");
            }
            Ok(started.virsh(&["version"]).is_ok().then_some(()))
        })?;
        Ok(Some(started))
    }

    /// Returns the path of the socket for Sterna.
    ///
    /// # Errors
    /// If its path is no Unicode.
    pub fn socket(&self) -> anyhow::Result<String> {
        self.own.join("libvirt-sock").to_str().map(str::to_owned).context("a folder that is not UTF-8")
    }

    /// Returns the output of a virsh command.
    ///
    /// # Errors
    /// If the command fails.
    pub fn virsh(&self, words: &[&str]) -> anyhow::Result<String> {
        Program::of_package("virsh", "libvirt-clients").args(["-c", &self.uri()?]).args(words).succeed()
    }

    /// Returns the URI by which virsh reaches it.
    ///
    /// # Errors
    /// Those of [`Self::socket`].
    pub fn uri(&self) -> anyhow::Result<String> {
        Ok(format!("qemu:///system?socket={}", self.socket()?))
    }

    /// Migrates the domain's memory to another libvirt, whose definition has `there` instead of each of `here`.
    ///
    /// # Errors
    /// If libvirt refuses, or does not complete it.
    pub fn migrate(&self, to: &Self, (here, there): (&str, &str)) -> anyhow::Result<()> {
        let definition = self.virsh(&["dumpxml", DOMAIN, "--migratable"])?;
        ensure!(definition.contains(here), "{here} in {definition}");
        let file = self.own.join("there.xml");
        std::fs::write(&file, definition.replace(here, there))?;
        let file = file.to_str().context("a folder that is not UTF-8")?;
        let uri = to.uri()?;
        let how = ["migrate", "--live", "--persistent", "--undefinesource", DOMAIN, &uri];
        let memory = ["--migrateuri", "tcp://127.0.0.1", "--xml", file, "--persistent-xml", file];
        self.virsh(&[&how[..], &memory[..]].concat()).map(drop)
    }

    /// Defines and starts a domain on these images, which its guest uses as one disk, and waits until it works.
    ///
    /// # Errors
    /// If the guest does not begin to work.
    pub fn domain(&self, host: &Host, images: &[(&Path, &str)], fill_bytes: u64) -> anyhow::Result<Vm> {
        let disks: Vec<String> = images
            .iter()
            .zip('a'..)
            .map(|((image, format), letter)| {
                format!(
                    "<disk type='file' device='disk'><driver name='qemu' type='{format}' cache='none'/><source file='{}'/>\
                     <target dev='vd{letter}' bus='virtio'/></disk>",
                    image.display()
                )
            })
            .collect();
        self.start_domain(host, &disks, fill_bytes)
    }

    /// Defines and starts a domain whose only disk is a volume, and waits until it works.
    ///
    /// # Errors
    /// If the guest does not begin to work.
    pub fn domain_on_volume(&self, host: &Host, volume: &api::Volume, fill_bytes: u64) -> anyhow::Result<Vm> {
        let disk = format!(
            "<disk type='network' device='disk'><driver name='qemu' type='raw' cache='none'/>\
             <source protocol='nbd' name='{}'><host transport='unix' socket='{}'/></source>\
             <target dev='vda' bus='virtio'/></disk>",
            volume.name, volume.socket
        );
        self.start_domain(host, &[disk], fill_bytes)
    }

    fn start_domain(&self, host: &Host, disks: &[String], fill_bytes: u64) -> anyhow::Result<Vm> {
        let console = Vm::expect(&host.path("console"), Work::on_disk(fill_bytes).options(disks.len())?)?;
        let hardware = console.options().hardware;
        // libvirt rounds memory up to whole MiB, with which an emulated guest of QEMU before 9.0 loses writes in a migration
        // (docs/vm.md): so QEMU gets its memory once more, and the last word counts.
        let object = format!("memory-backend-ram,id=odd,size={}K", hardware.memory_kib);
        let size = format!("{}K", hardware.memory_kib);
        let memory = ["-object", object.as_str(), "-machine", "memory-backend=odd", "-m", size.as_str()];
        let words = [console.guest_words()?.to_vec(), memory.map(str::to_owned).to_vec()].concat();
        let words: String =
            words.iter().map(|word| format!("<qemu:arg value='{}'/>", word.replace('&', "&amp;"))).collect();
        let disks = disks.concat();
        let definition = format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>{DOMAIN}</name>\
             <description>what stays as it is</description><memory unit='KiB'>{}</memory><vcpu current='1'>2</vcpu>\
             <os><type arch='x86_64' machine='{}'>hvm</type></os><features><acpi/></features><devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{disks}\
             <controller type='usb' model='none'/><memballoon model='none'/></devices>\
             <qemu:commandline>{words}</qemu:commandline></domain>",
            hardware.memory_kib, hardware.machine
        );
        let file = self.own.join("domain.xml");
        std::fs::write(&file, definition)?;
        self.virsh(&["define", file.to_str().context("a folder that is not UTF-8")?])?;
        self.virsh(&["start", DOMAIN])?;
        console.work_on(1)?;
        Ok(console)
    }

    /// Returns the domain's live definition, and the one for its next start.
    ///
    /// # Errors
    /// If libvirt does not report it.
    pub fn definitions(&self) -> anyhow::Result<[String; 2]> {
        Ok([self.virsh(&["dumpxml", DOMAIN])?, self.virsh(&["dumpxml", DOMAIN, "--inactive"])?])
    }

    /// Checks that both definitions have all of `words`, and none of `not`.
    ///
    /// # Errors
    /// If they do not; the message has the definitions.
    pub fn check_definitions(&self, words: &[&str], not: &[&str]) -> anyhow::Result<()> {
        for definition in self.definitions()? {
            ensure!(words.iter().all(|word| definition.contains(word)), "{words:?} in {definition}");
            ensure!(!not.iter().any(|word| definition.contains(word)), "none of {not:?} in {definition}");
        }
        Ok(())
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        let _ = self.virsh(&["destroy", DOMAIN]);
        // This ends libvirtd and its helpers; the domains have ended already.
        if let Some(group) = i32::try_from(self.daemon.id()).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
        let _ = self.daemon.wait();
    }
}
