//! Small file systems that tests mount as stores or on a volume. This needs root.
//!
//! ```text
//!   plain:    ext4 ─ loop device ─ file
//!   sharing:  XFS or btrfs ─ loop device ─ file
//!   faulty:   ext4 ─ loop device ─ nbdfuse ─ nbdkit (memory; fails or hangs when told to)
//!   export:   ext4 ─ loop device ─ nbdfuse ─ a volume of the daemon under test
//! ```

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rustix::process::Signal;

use crate::loop_device::LoopDevice;
use crate::program::{Program, Running};
use crate::wait::until;

/// Options without journal and checksums, so that an error affects only its request, not a group of blocks
/// or the whole file system.
const WITHOUT_JOURNAL: &[&str] = &["-O", "^has_journal,^metadata_csum"];

/// A mounted file system.
///
/// Dropping it unmounts it, and removes its devices and processes.
#[derive(Debug)]
pub struct FileSystem {
    /// The mount point; `None` once it is unmounted.
    folder: Option<PathBuf>,
    /// Detached after unmounting, and before the server of the disk ends.
    device: LoopDevice,
    disk: Option<Served>,
}

/// A file system whose files can share blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// XFS, which overwrites blocks in place unless they are shared.
    Xfs,
    /// btrfs, which never overwrites a block.
    Btrfs,
}

impl Sharing {
    /// Each of them.
    pub const EACH: [Self; 2] = [Self::Xfs, Self::Btrfs];
    /// The smallest size of both, in bytes.
    pub const BYTES_MIN: u64 = 512 << 20;

    /// Returns its name to the kernel.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// Returns whether the kernel has it. A module that is not loaded yet counts as missing.
    ///
    /// # Errors
    /// If the kernel does not say.
    pub fn is_known(self) -> anyhow::Result<bool> {
        let known =
            std::fs::read_to_string("/proc/filesystems").context("read which file systems there are")?;
        Ok(known.split_whitespace().any(|word| word == self.name()))
    }

    fn make(self) -> Program {
        match self {
            Self::Xfs => Program::of_package("mkfs.xfs", "xfsprogs").args(["-q", "-f", "-m", "reflink=1"]),
            Self::Btrfs => Program::of_package("mkfs.btrfs", "btrfs-progs").args(["-q", "-f"]),
        }
    }
}

/// Makes the disk of [`FileSystem::on_faulty_disk`] fail or hang.
#[derive(Debug)]
pub struct Faults {
    fail_reads: PathBuf,
    fail_writes: PathBuf,
    nbdkit: i32,
}

impl FileSystem {
    /// Mounts an empty ext4 of so many bytes over a folder.
    ///
    /// # Errors
    /// If this is not root, or a program is missing.
    pub fn plain(folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        ensure_root()?;
        let image = folder.with_extension("ext4");
        std::fs::File::create_new(&image)?.set_len(bytes).context("set the size of an image")?;
        let device = LoopDevice::attach_uncached(&image)?;
        Self::mount(folder, device, None, WITHOUT_JOURNAL)
    }

    /// Mounts an empty file system of so many bytes over a folder, whose files can share blocks.
    ///
    /// # Errors
    /// If this is not root, or a program is missing.
    pub fn sharing(kind: Sharing, folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        ensure_root()?;
        let image = folder.with_extension(kind.name());
        std::fs::File::create_new(&image)?.set_len(bytes).context("set the size of an image")?;
        let device = LoopDevice::attach_uncached(&image)?;
        kind.make().arg(device.path()).succeed()?;
        Program::of_package("mount", "mount").arg(device.path()).arg(folder).succeed()?;
        Ok(Self { folder: Some(folder.to_owned()), device, disk: None })
    }

    /// Mounts an empty ext4 of so many bytes over a folder, on an NBD export.
    ///
    /// # Errors
    /// If this is not root, or a program is missing.
    pub fn on_export(folder: &Path, uri: &str, bytes: u64) -> anyhow::Result<Self> {
        ensure_root()?;
        let file = folder.with_extension("disk");
        let nbdfuse = Program::of_package("nbdfuse", "libnbd-bin").arg(&file).arg(uri);
        let served = Served::start(nbdfuse, file, bytes, None)?;
        let device = LoopDevice::attach_uncached(&served.file)?;
        Self::mount(folder, device, Some(served), &[])
    }

    /// Returns the file in sysfs that shows and sets the scheduler of its disk.
    ///
    /// # Errors
    /// Its device has no name.
    pub fn scheduler(&self) -> anyhow::Result<PathBuf> {
        let disk = self.device.path().file_name().context("a device has a name")?;
        Ok(Path::new("/sys/block").join(disk).join("queue/scheduler"))
    }

    /// Lets it become read-only, as after an error. Open files stay open.
    ///
    /// # Errors
    /// If the kernel has no way to order that.
    pub fn become_read_only(&self) -> anyhow::Result<()> {
        let folder = self.folder.as_ref().context("it is mounted")?;
        let mount = Program::of_package("mount", "mount").args(["-o", "remount,errors=remount-ro"]);
        mount.arg(folder).succeed()?;
        let disk = self.device.path().file_name().context("a device has a name")?;
        let trigger = Path::new("/sys/fs/ext4").join(disk).join("trigger_fs_error");
        std::fs::write(trigger, "1").context("order an error of the file system")
    }

    /// Kills the program that serves its disk, so that the system has a file that does not answer.
    ///
    /// # Errors
    /// No program serves it.
    pub fn lose_disk(&self) -> anyhow::Result<()> {
        let served = self.disk.as_ref().context("its disk is a file")?;
        served.nbdfuse.signal(Signal::KILL)?;
        // The kernel remembers for a second what the program has said of the file.
        until("the disk is lost", || Ok(self.device.file_is_lost()?.then_some(())))
    }

    /// Unmounts it and checks its consistency.
    ///
    /// # Errors
    /// What the checker found.
    pub fn unmount_and_check(mut self) -> anyhow::Result<()> {
        let folder = self.folder.take().context("it is mounted")?;
        Program::of_package("umount", "mount").arg(folder).succeed()?;
        let check = Program::of_package("e2fsck", "e2fsprogs").args(["-f", "-n"]);
        check.arg(self.device.path()).succeed().map(drop)
    }

    /// Mounts an empty ext4 of so many bytes over a folder, on a disk with faults at command.
    ///
    /// # Errors
    /// If this is not root, or a program is missing.
    pub fn on_faulty_disk(folder: &Path, bytes: u64) -> anyhow::Result<(Self, Faults)> {
        ensure_root()?;
        let (served, faults) = Served::with_faults(folder, bytes)?;
        let device = LoopDevice::attach_uncached(&served.file)?;
        Ok((Self::mount(folder, device, Some(served), WITHOUT_JOURNAL)?, faults))
    }

    fn mount(
        folder: &Path,
        device: LoopDevice,
        disk: Option<Served>,
        features: &[&str],
    ) -> anyhow::Result<Self> {
        // There are no reserved blocks, so that root and other users have the same free space.
        let make = Program::of_package("mkfs.ext4", "e2fsprogs");
        make.args(["-q", "-F", "-m", "0"]).args(features).arg(device.path()).succeed()?;
        let mount = Program::of_package("mount", "mount").args(["-o", "errors=continue"]);
        mount.arg(device.path()).arg(folder).succeed()?;
        Ok(Self { folder: Some(folder.to_owned()), device, disk })
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            unmount(folder);
        }
    }
}

/// A folder that is mounted at a second path as well, as a share at another host.
///
/// Dropping it unmounts it.
#[derive(Debug)]
pub struct SecondMount {
    folder: PathBuf,
}

/// Access to a folder at its second path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountedFor {
    /// Read and write access.
    Writing,
    /// Access for reading only.
    Reading,
}

impl SecondMount {
    /// Mounts `shared` over the empty `folder`.
    ///
    /// # Errors
    /// If this is not root, or a program is missing.
    pub fn of(shared: &Path, folder: &Path, mounted_for: MountedFor) -> anyhow::Result<Self> {
        ensure_root()?;
        let mount = || Program::of_package("mount", "mount");
        mount().arg("--bind").arg(shared).arg(folder).succeed()?;
        let mounted = Self { folder: folder.to_owned() };
        if mounted_for == MountedFor::Reading {
            mount().args(["-o", "remount,bind,ro"]).arg(folder).succeed()?;
        }
        Ok(mounted)
    }

    /// Mounts an empty file system of `bytes` in memory over `folder`.
    ///
    /// # Errors
    /// Those of [`SecondMount::of`].
    pub fn in_memory(folder: &Path, bytes: u64) -> anyhow::Result<Self> {
        ensure_root()?;
        let mount = Program::of_package("mount", "mount").args(["-t", "tmpfs", "-o"]);
        mount.arg(format!("size={bytes},mode=700")).arg("tmpfs").arg(folder).succeed()?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// Mounts an overlay of these layers over `folder`.
    ///
    /// # Errors
    /// Those of [`SecondMount::of`].
    pub fn overlay(layers: &str, folder: &Path) -> anyhow::Result<Self> {
        ensure_root()?;
        let mount = Program::of_package("mount", "mount").args(["-t", "overlay", "overlay", "-o", layers]);
        mount.arg(folder).succeed()?;
        Ok(Self { folder: folder.to_owned() })
    }
}

impl Drop for SecondMount {
    fn drop(&mut self) {
        unmount(&self.folder);
    }
}

impl Faults {
    /// Fails every read with EIO from here on.
    ///
    /// # Errors
    /// If the sign for it cannot be set.
    pub fn fail_reads(&self) -> anyhow::Result<()> {
        std::fs::write(&self.fail_reads, b"").context("let reads fail")
    }

    /// Fails every write with EIO from here on.
    ///
    /// # Errors
    /// If the sign for it cannot be set.
    pub fn fail_writes(&self) -> anyhow::Result<()> {
        std::fs::write(&self.fail_writes, b"").context("let writes fail")
    }

    /// Ends all faults from here on.
    ///
    /// # Errors
    /// If a sign cannot be removed.
    pub fn recover(&self) -> anyhow::Result<()> {
        for sign in [&self.fail_reads, &self.fail_writes] {
            match std::fs::remove_file(sign) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).context("end faults");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes every request wait until the returned value is dropped.
    ///
    /// # Errors
    /// If the disk is gone.
    pub fn hang(&self) -> anyhow::Result<Hung<'_>> {
        self.signal(Signal::STOP)?;
        Ok(Hung(self))
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let nbdkit = rustix::process::Pid::from_raw(self.nbdkit).context("a process without a number")?;
        Ok(rustix::process::kill_process(nbdkit, signal)?)
    }
}

/// A disk that hangs until this is dropped.
#[derive(Debug)]
pub struct Hung<'a>(&'a Faults);

impl Drop for Hung<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.signal(Signal::CONT) {
            eprintln!("a disk hangs for ever: {error:#}");
        }
    }
}

/// An NBD export as a file.
#[derive(Debug)]
struct Served {
    file: PathBuf,
    nbdfuse: Running,
    /// The nbdkit server, if it was started here.
    _nbdkit: Option<Running>,
}

impl Served {
    /// Serves a disk in memory by nbdkit, with faults at command.
    fn with_faults(folder: &Path, bytes: u64) -> anyhow::Result<(Self, Faults)> {
        let beside = |extension: &str| folder.with_extension(extension);
        let (socket, file) = (beside("nbd"), beside("disk"));
        let (fail_reads, fail_writes) = (beside("fail-reads"), beside("fail-writes"));
        let sign = |kind: &str, path: &Path| format!("error-{kind}-file={}", path.display());
        let nbdkit = Program::of_package("nbdkit", "nbdkit")
            .args(["--foreground", "--unix"])
            .arg(&socket)
            .args(["--filter=error", "memory"])
            .arg(bytes.to_string())
            .args(["error=EIO", "error-pread-rate=100%", "error-pwrite-rate=100%"])
            .args([sign("pread", &fail_reads), sign("pwrite", &fail_writes)])
            .start()?;
        let faults = Faults { fail_reads, fail_writes, nbdkit: nbdkit.number()? };
        let mut nbdkit = nbdkit;
        until("nbdkit serves", || {
            ensure!(nbdkit.is_running()?, "nbdkit has ended");
            Ok(UnixStream::connect(&socket).is_ok().then_some(()))
        })?;
        let nbdfuse = Program::of_package("nbdfuse", "libnbd-bin").arg(&file).arg("--unix").arg(&socket);
        Ok((Self::start(nbdfuse, file, bytes, Some(nbdkit))?, faults))
    }

    /// Starts nbdfuse, and waits until its file exists.
    fn start(nbdfuse: Program, file: PathBuf, bytes: u64, nbdkit: Option<Running>) -> anyhow::Result<Self> {
        std::fs::File::create_new(&file).context("make a file to mount over")?;
        let mut nbdfuse = nbdfuse.start()?;
        until("nbdfuse shows the disk as a file", || {
            ensure!(nbdfuse.is_running()?, "nbdfuse has ended");
            Ok((std::fs::metadata(&file)?.len() == bytes).then_some(()))
        })?;
        Ok(Self { file, nbdfuse, _nbdkit: nbdkit })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        unmount(&self.file);
    }
}

fn ensure_root() -> anyhow::Result<()> {
    ensure!(rustix::process::geteuid().is_root(), "mounting needs root");
    Ok(())
}

fn unmount(path: &Path) {
    let umount = || Program::of_package("umount", "mount");
    if umount().arg(path).succeed().is_ok() {
        return;
    }
    // A failed test may have left a file open in it.
    if let Err(error) = umount().arg("--lazy").arg(path).succeed() {
        eprintln!("{} stays mounted: {error:#}", path.display());
    }
}
