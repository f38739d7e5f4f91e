//! Tests of a local user who tries to get files of root, their content, or another VM's monitor by having a QEMU adopted.
//!
//! The test acts as root in the user's folder, as the user could: links, hard links (where the kernel lets users make them), and
//! other files in place of the image, at any moment, also while the daemon is down.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{Volume, VolumeState};
use e2e::remote_user::RemoteUser;
use e2e::{Host, Outcome, until};
use rustix::fs::{CWD, FileType, Mode, OFlags, RenameFlags, mknodat, renameat_with};
use testbed::nbd_client::{Client, ClientOptions, Operation};

const QEMU: &str = "qemu-system-x86_64";
pub(crate) const USER: u32 = 24_005;
pub(crate) const VM: &str = "users";
const DISK_BYTES: usize = 4 << 20;
/// Time during which the image is exchanged at random moments.
const EXCHANGES_FOR: Duration = Duration::from_secs(5);
const SECRET: u8 = 0x5e;

/// A user's folder with QEMU's image and monitor, and beside it a file that only root may read.
pub(crate) struct User {
    folder: PathBuf,
    secret: PathBuf,
    qemu: Child,
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl User {
    fn start(scene: &Host) -> anyhow::Result<Self> {
        let folder = scene.path("user");
        let secret = scene.path("secret");
        std::fs::create_dir(&folder)?;
        // It is as large as the image, so that its size is no obstacle.
        std::fs::write(&secret, vec![SECRET; DISK_BYTES])?;
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600))?;
        std::fs::write(folder.join("disk"), vec![1; DISK_BYTES])?;
        for path in [&folder, &folder.join("disk")] {
            chown(path, Some(USER), Some(USER))?;
        }
        let monitor = folder.join("qmp");
        // QEMU holds it with O_PATH, which allows no access. Any user may do so for a file whose folder is passable.
        let _held = rustix::fs::open(&secret, OFlags::PATH, Mode::empty())?;
        let qemu = Command::new(QEMU)
            .uid(USER)
            .gid(USER)
            .args(["-accel", "tcg", "-m", "32", "-nodefaults", "-display", "none", "-qmp"])
            .arg(format!("unix:{},server=on,wait=off", monitor.display()))
            .arg("-drive")
            .arg(format!("file={},format=raw,if=virtio", folder.join("disk").display()))
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("start {QEMU}; the package qemu-system-x86 has it"))?;
        let user = Self { folder, secret, qemu };
        // QEMU makes its monitor before it has opened its image for good.
        until("QEMU can be adopted", || Ok((user.adopt(scene)?.code == 0).then_some(())))?;
        scene.sterna(["vm", "release", VM])?.success()?;
        Ok(user)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub(crate) fn adopt(&self, scene: &Host) -> anyhow::Result<Outcome> {
        adopt(scene, &self.path("qmp"))
    }

    /// Replaces the image by another object, and renames the image to `away`.
    fn exchange(&self, how: &str) -> anyhow::Result<()> {
        std::fs::rename(self.path("disk"), self.path("away"))?;
        self.make_trap(how, &self.path("disk"))
    }

    fn make_trap(&self, how: &str, at: &Path) -> anyhow::Result<()> {
        match how {
            "a link" | "a link of root" => symlink(&self.secret, at)?,
            "a hard link" => std::fs::hard_link(&self.secret, at)?,
            "a pipe" => mknodat(CWD, at, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?,
            _ => std::fs::create_dir(at)?,
        }
        if !["a hard link", "a link of root"].contains(&how) {
            std::os::unix::fs::lchown(at, Some(USER), Some(USER))?;
        }
        Ok(())
    }

    fn put_back(&self) -> anyhow::Result<()> {
        let disk = self.path("disk");
        if disk.symlink_metadata()?.is_dir() {
            std::fs::remove_dir(&disk)?;
        } else {
            std::fs::remove_file(&disk)?;
        }
        Ok(std::fs::rename(self.path("away"), disk)?)
    }

    /// Checks that the file of root is unchanged and only root's.
    fn check(&self, when: &str) -> anyhow::Result<()> {
        let found = std::fs::metadata(&self.secret)?;
        ensure!(
            (found.uid(), found.mode() & 0o777) == (0, 0o600),
            "{when}: root's file was given away: {found:?}"
        );
        Ok(())
    }
}

fn adopt(scene: &Host, monitor: &Path) -> anyhow::Result<Outcome> {
    let monitor = monitor.to_str().context("a folder that is not UTF-8")?;
    scene.sterna(["vm", "adopt", VM, "--qmp", monitor])
}

/// Returns the first byte of the volume, if it is served.
fn first_byte(scene: &Host) -> anyhow::Result<Option<u8>> {
    let volumes: Vec<Volume> = scene.ask(&["volume", "list"])?;
    let Some(volume) = volumes.into_iter().find(|volume| volume.state == VolumeState::Serving) else {
        return Ok(None);
    };
    let Ok(mut client) = Client::connect(&volume.uri.parse()?, ClientOptions::default()) else {
        return Ok(None);
    };
    let read = client.perform(Operation::Read { offset: 0, buffer: vec![0; 4096] })?;
    let Operation::Read { buffer, .. } = read else { anyhow::bail!("something else was read") };
    Ok(buffer.first().copied())
}

pub(crate) fn play(test: impl FnOnce(&mut Host, &User) -> anyhow::Result<()>) {
    if !rustix::process::geteuid().is_root() {
        return omission::machine_lacks("root, to run QEMU as another user");
    }
    e2e::play_unstarted(|scene| {
        scene.start()?;
        for folder in ["", "run"] {
            std::fs::set_permissions(scene.path(folder), std::fs::Permissions::from_mode(0o711))?;
        }
        let user = User::start(scene)?;
        test(scene, &user)
    });
}

#[test]
fn a_user_who_exchanges_an_image_gets_nothing_of_root() {
    play(|scene, user| {
        for how in ["a link", "a link of root", "a hard link", "a pipe", "a folder"] {
            user.exchange(how)?;
            let refused = user.adopt(scene)?;
            ensure!(refused.code != 0, "{how}: {refused:?}");
            user.check(how)?;
            user.put_back()?;

            user.adopt(scene)?.success().context(how)?;
            ensure!(first_byte(scene)? == Some(1), "{how}: another disk is served");
            user.exchange(how)?;
            scene.sterna(["vm", "release", VM])?;
            user.check(how)?;
            user.put_back()?;
            scene.sterna(["vm", "release", VM])?.success().context(how)?;
            user.check(how)?;
            let found = std::fs::metadata(user.path("disk"))?;
            ensure!(found.uid() == USER, "{how}: {found:?}");
        }
        Ok(())
    });
}

#[test]
fn a_user_who_exchanges_an_image_while_the_daemon_is_down_is_served_nothing_of_root() {
    play(|scene, user| {
        user.adopt(scene)?.success()?;
        for how in ["a link", "a hard link", "a pipe", "a folder"] {
            scene.stop()?;
            user.exchange(how)?;
            scene.start()?;
            let found = until("it is known whether the volume is served", || {
                let volumes: Vec<Volume> = scene.ask(&["volume", "list"])?;
                let is_known =
                    |volume: &Volume| matches!(volume.state, VolumeState::Serving | VolumeState::Failed);
                Ok(volumes.into_iter().find(is_known))
            })?;
            ensure!(found.state == VolumeState::Failed, "{how}: {found:?}");
            user.check(how)?;
            scene.stop()?;
            user.put_back()?;
            scene.start()?;
            until("the volume is served again", || Ok(first_byte(scene)?.filter(|byte| *byte == 1)))?;
        }
        scene.sterna(["vm", "release", VM])?.success()?;
        user.check("at the end")
    });
}

#[test]
fn a_user_who_exchanges_an_image_at_random_moments_gets_nothing_of_root() {
    play(|scene, user| {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let exchanges = threads.spawn(|| {
                for how in ["a link", "a hard link"].into_iter().cycle() {
                    let trap = user.path("trap");
                    let _ = std::fs::remove_file(&trap);
                    user.make_trap(how, &trap)?;
                    let mut moment = 1_u64;
                    for _ in 0..50 {
                        if is_over.load(Ordering::Relaxed) {
                            return Ok(());
                        }
                        renameat_with(CWD, &trap, CWD, user.path("disk"), RenameFlags::EXCHANGE)?;
                        // The trap exists for up to a millisecond, and is absent for as long.
                        moment = moment
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        // The test tries random moments, so it sleeps instead of waiting for an event.
                        std::thread::sleep(Duration::from_micros(moment >> 54));
                    }
                }
                anyhow::Ok(())
            });
            let tried = || {
                let give_up_at = Instant::now() + EXCHANGES_FOR;
                let mut adopted = 0_u32;
                while Instant::now() < give_up_at {
                    adopted += u32::from(user.adopt(scene)?.code == 0);
                    user.check("after an adoption")?;
                    ensure!(first_byte(scene)? != Some(SECRET), "root's file is served");
                    scene.sterna(["vm", "release", VM])?;
                    user.check("after a release")?;
                }
                anyhow::Ok(adopted)
            };
            let tried = tried();
            is_over.store(true, Ordering::Relaxed);
            exchanges.join().map_err(|_| anyhow::anyhow!("the exchanges have panicked"))??;
            tried.map(drop)
        })?;
        // QEMU is unchanged, and can be adopted once its image is back.
        let is_away = std::fs::symlink_metadata(user.path("trap"))?;
        if is_away.is_file() && is_away.uid() == USER {
            renameat_with(CWD, user.path("trap"), CWD, user.path("disk"), RenameFlags::EXCHANGE)?;
        }
        scene.sterna(["vm", "release", VM])?;
        user.adopt(scene)?.success()?;
        ensure!(first_byte(scene)? == Some(1), "another disk is served");
        scene.sterna(["vm", "release", VM])?.success()?;
        user.check("at the end")
    });
}

#[test]
fn a_user_who_exchanges_a_monitor_has_no_other_vm_told_anything() {
    play(|scene, user| {
        user.adopt(scene)?.success()?;
        let others = scene.path("others.qmp");
        let listener = UnixListener::bind(&others)?;
        listener.set_nonblocking(true)?;
        std::fs::rename(user.path("qmp"), user.path("kept"))?;
        symlink(&others, user.path("qmp"))?;
        for order in [["vm", "list"].as_slice(), &["vm", "release", VM], &["vm", "resume", VM]] {
            scene.sterna(order)?;
            ensure!(
                listener.accept().is_err(),
                "{order:?}: the daemon has connected to another VM's monitor"
            );
        }
        // A file of another user has the same name, without a link.
        std::fs::remove_file(user.path("qmp"))?;
        std::fs::rename(&others, user.path("qmp"))?;
        let refused = scene.sterna(["vm", "release", VM])?;
        ensure!(refused.code != 0, "{refused:?}");
        std::fs::rename(user.path("kept"), user.path("qmp"))?;
        scene.sterna(["vm", "release", VM])?.success()?;
        user.check("at the end")
    });
}

#[test]
fn an_adoption_says_what_would_keep_the_vm_from_moving() {
    play(|scene, user| {
        let told = user.adopt(scene)?.success()?;
        let vm: api::Vm = scene.ask(&["vm", "show", VM])?;
        let version =
            vm.hypervisor.as_deref().and_then(|name| name.strip_prefix("QEMU ")).unwrap_or_default();
        // Earlier versions lose writes to the memory of an emulated VM.
        let is_early =
            version.split('.').next().is_some_and(|major| major.parse().is_ok_and(|major: u32| major < 9));
        let obstacle = vm.whole_move.and_then(|whole| whole.obstacle).unwrap_or_default();
        ensure!(obstacle.contains("it is emulated") == is_early, "{version}: {obstacle}");
        ensure!(told.contains("cannot move as a whole") == is_early, "{told}");
        ensure!(told.contains("it is emulated") == is_early, "{told}");
        Ok(())
    });
}

#[test]
fn an_answer_says_the_same_of_a_monitor_that_is_not_there_and_of_what_root_alone_can_see() {
    play(|scene, user| {
        let hidden = scene.path("hidden");
        std::fs::create_dir(&hidden)?;
        std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o700))?;
        std::fs::write(hidden.join("file"), "")?;
        UnixListener::bind(hidden.join("closed")).map(drop)?;
        mknodat(CWD, hidden.join("pipe"), FileType::Fifo, Mode::RUSR, 0)?;
        symlink(&hidden, user.path("way"))?;
        let tls = testbed::own_address()?;
        scene.stop()?;
        scene.configure(&format!("[api_tls]\nlisten = '{tls}'\n"))?;
        scene.start()?;
        ensure!(scene.wait_for_log("the API is served over TLS")?);
        let operator = RemoteUser::admit(scene, tls, "ann", "operate")?;
        let answer = |path: PathBuf| {
            let monitor = path.display().to_string();
            let outcome = operator.run(scene, &["vm", "adopt", VM, "--qmp", &monitor])?;
            let path = path.to_str().context("a folder that is not UTF-8")?;
            anyhow::Ok((
                outcome.code,
                outcome.stderr.replace(path, "PATH"),
                outcome.stdout.replace(path, "PATH"),
            ))
        };
        let expected = answer(scene.path("hidden/none"))?;
        for path in [
            "hidden/file",
            "hidden",
            "hidden/pipe",
            "hidden/closed",
            "hidden/file/below",
            "user/way/file",
            "none/at/all",
        ] {
            let found = answer(scene.path(path))?;
            ensure!(found == expected, "{path}: {found:?} instead of {expected:?}");
        }
        // An administrator gets the reason.
        let busy = user.path("qmp");
        let _client = UnixStream::connect(&busy)?;
        let log = scene.path("hidden/file");
        for (path, reason) in [
            (scene.path("hidden/none"), "No such file"),
            (log, "is no socket"),
            (busy, "another program, such as libvirt, may be connected"),
        ] {
            let told = adopt(scene, &path)?;
            ensure!(told.code != 0 && told.stderr.contains(reason), "{}: {told:?}", path.display());
        }
        Ok(())
    });
}
