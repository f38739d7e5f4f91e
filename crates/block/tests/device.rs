//! Tests block devices as stores, on loop devices: the behaviour shared with files, and their own.
//!
//! Loop devices need root; without it these tests are left out.

#![expect(clippy::unwrap_used, reason = "a test that cannot prepare its scene has failed")]

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use block::conformance::{Suite, check_read_only};
use block::engine::{self, Engine, EngineChoice};
use block::store::image::Patience;
use block::store::{DeviceUser, Kind};
use block::{
    Access, BlockDevice, Buffer, ByteRange, Durability, Executor, Extent, ExtentKind, FileStore, Handle,
    Image, ImageError, ZeroMode,
};

const SIZE: u64 = 8 << 20;

struct LoopDevice {
    path: PathBuf,
    file: PathBuf,
    folder: tempfile::TempDir,
}

impl LoopDevice {
    fn new(size: u64, options: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            omission::machine_lacks("root, which loop devices need");
            return None;
        }
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = folder.path().join("disk");
        std::fs::File::create(&file).unwrap().set_len(size).unwrap();
        let path = run("losetup", &[&["--find", "--show"], options, &[text(&file)]].concat());
        Some(Self { path: path.trim_end().into(), file, folder })
    }

    /// Opens it as soon as it is free: another test's starting process has all our files for a moment.
    fn open(&self) -> Image {
        Image::open_waiting(&self.path, Access::ReadWrite, |_| Patience::Wait).unwrap()
    }

    /// Returns the bytes of the disk below, past every cache of the device.
    fn bytes_below(&self) -> Vec<u8> {
        std::fs::read(&self.file).unwrap()
    }

    fn sectors_below(&self) -> u64 {
        std::fs::metadata(&self.file).unwrap().blocks()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // While it is still open the kernel takes note, and detaches it at the last close.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn on_both<F: Future<Output = ()> + 'static>(
    size: u64,
    options: &[&str],
    body: impl Fn(LoopDevice, Rc<dyn Engine>, Handle) -> F,
) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let Ok((driver, engine)) = engine::open(choice) else {
            omission::kernel_lacks("io_uring");
            continue;
        };
        let Some(device) = LoopDevice::new(size, options) else { return };
        let mut executor = Executor::new(driver);
        let handle = executor.handle();
        executor.run(body(device, engine, handle));
    }
}

/// Runs the suite for volumes on larger devices, so that the volume's end is not the device's.
fn check_conformance(sector: &'static str) {
    on_both(SIZE, &[], move |_, engine, handle| async move {
        let name = format!("device with sectors of {sector} bytes on {}", engine.name());
        let factory = |size: u64| {
            let device = LoopDevice::new((1 << 20).max(size), &["--sector-size", sector]).unwrap();
            let image = device.open().narrowed_to(size).unwrap();
            assert_eq!(image.kind(), Kind::Device);
            Rc::new(FileStore::new(image, Rc::clone(&engine))) as Rc<dyn BlockDevice>
        };
        Suite::new(&name, handle, factory).run().await;
    });
}

#[test]
fn a_device_with_sectors_of_512_bytes_keeps_the_contract() {
    check_conformance("512");
}

#[test]
fn a_device_with_sectors_of_4096_bytes_keeps_the_contract() {
    check_conformance("4096");
}

#[test]
fn a_discard_zeroes_and_gives_space_back_and_zeroes_that_are_to_stay_take_it() {
    on_both(SIZE, &[], |device, engine, _| async move {
        let store = FileStore::new(device.open(), engine);
        assert!(store.geometry().discards);
        let whole = ByteRange::new(0, SIZE);
        store.write(0, Buffer::copy_of(&vec![0xAA; SIZE as usize]), Durability::Durable).await.unwrap();
        let full = device.sectors_below();
        store.discard(ByteRange::new(0, SIZE / 2)).await.unwrap();
        store.flush().await.unwrap();
        let read = store.read(0, Buffer::copy_of(&vec![1; SIZE as usize])).await.unwrap();
        assert!(block::buffer::is_zero(&read.as_slice()[..SIZE as usize / 2]));
        assert!(read.as_slice()[SIZE as usize / 2..].iter().all(|byte| *byte == 0xAA));
        assert!(device.sectors_below() < full);
        store.write_zeroes(whole, ZeroMode::KeepAllocated, Durability::Durable).await.unwrap();
        assert!(device.sectors_below() >= SIZE / 512, "{} sectors", device.sectors_below());
        assert!(block::buffer::is_zero(&device.bytes_below()));
        let extents = store.allocation(whole).await.unwrap();
        assert_eq!(extents, [Extent { range: whole, kind: ExtentKind::Data }]);
    });
}

#[test]
fn what_lies_behind_the_volume_on_a_larger_device_is_never_touched() {
    for volume in [SIZE / 2, SIZE / 2 - 512, SIZE / 2 - 4000, 100] {
        on_both(SIZE, &[], move |device, engine, _| async move {
            std::fs::write(&device.file, vec![0x77; SIZE as usize]).unwrap();
            run("losetup", &["--set-capacity", text(&device.path)]);
            let image = device.open().narrowed_to(volume).unwrap();
            assert_eq!(image.size(), volume);
            let store = FileStore::new(image, engine);
            let whole = ByteRange::new(0, volume);
            store.write(0, Buffer::copy_of(&vec![1; volume as usize]), Durability::Volatile).await.unwrap();
            store.flush().await.unwrap();
            let below = device.bytes_below();
            assert!(below[..volume as usize].iter().all(|byte| *byte == 1));
            for round in 0..3 {
                match round {
                    0 => store.discard(whole).await.unwrap(),
                    1 => store.write_zeroes(whole, ZeroMode::MayUnmap, Durability::Durable).await.unwrap(),
                    _ => {
                        store
                            .write_zeroes(whole, ZeroMode::KeepAllocated, Durability::Durable)
                            .await
                            .unwrap();
                    }
                }
                store.flush().await.unwrap();
                let below = device.bytes_below();
                assert!(below[..volume as usize].iter().all(|byte| *byte == 0), "round {round}");
                assert!(below[volume as usize..].iter().all(|byte| *byte == 0x77), "round {round}");
            }
        });
    }
}

#[test]
fn a_device_that_is_too_small_is_refused() {
    let Some(device) = LoopDevice::new(SIZE, &[]) else { return };
    assert_eq!(device.open().size(), SIZE);
    let narrowed = device.open().narrowed_to(SIZE + 1);
    assert!(matches!(narrowed, Err(ImageError::TooSmall { size: SIZE, .. })));
}

#[test]
fn a_device_has_one_user_and_is_free_as_soon_as_that_is_gone() {
    on_both(SIZE, &[], |device, engine, _| async move {
        for access in [Access::ReadWrite, Access::ReadOnly] {
            // A helper thread may have the file of the last one for an instant longer.
            let image = Image::open_waiting(&device.path, access, |_| Patience::Wait).unwrap();
            let store = FileStore::new(image, Rc::clone(&engine));
            store.read(0, Buffer::zeroed(4096)).await.unwrap();
            let Err(ImageError::Locked { holder, .. }) = Image::open(&device.path, Access::ReadWrite) else {
                panic!("two users")
            };
            assert!(holder.process.is_none_or(|process| process == std::process::id()), "{holder}");
        }
        Image::open_waiting(&device.path, Access::ReadWrite, |_| Patience::Wait).unwrap();
    });
}

#[test]
fn the_process_that_has_a_device_is_named_and_waited_for() {
    let Some(device) = LoopDevice::new(SIZE, &[]) else { return };
    // It opens the device exclusively, as a file system would, and takes no lock.
    let script = "import os, sys; os.open(sys.argv[1], os.O_RDWR | os.O_EXCL); print('held', flush=True); sys.stdin.read()";
    let mut child = Command::new("python3")
        .args(["-c", script, text(&device.path)])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut told)
        .unwrap();
    let (mut is_named, mut looks) = (false, 0);
    let image = Image::open_waiting(&device.path, Access::ReadWrite, |holder| {
        // A process that attaches another device examines this one as well, for a moment.
        if !is_named && holder.process == Some(child.id()) {
            is_named = true;
            child.kill().unwrap();
        }
        looks += 1;
        // Until it is reaped its files may still be closing.
        let may_go_on = if is_named { child.wait().is_ok() } else { looks < 100 };
        if may_go_on { Patience::Wait } else { Patience::GiveUp }
    });
    assert!(is_named, "it was not named");
    child.wait().unwrap();
    assert_eq!(image.unwrap().size(), SIZE);
}

#[test]
fn a_mounted_device_is_refused_and_the_place_named() {
    let Some(device) = LoopDevice::new(SIZE, &[]) else { return };
    let place = device.folder.path().join("mounted here");
    std::fs::create_dir(&place).unwrap();
    run("mkfs.ext4", &["-q", text(&device.path)]);
    run("mount", &[text(&device.path), text(&place)]);
    let results = [Access::ReadWrite, Access::ReadOnly].map(|access| Image::open(&device.path, access));
    run("umount", &[text(&place)]);
    for result in results {
        let Err(error) = result else { panic!("it is mounted") };
        let ImageError::DeviceInUse { user, .. } = &error else { panic!("{error}") };
        assert_eq!(*user, DeviceUser::Mount(place.clone()));
        assert!(error.to_string().contains("is mounted at"), "{error}");
    }
    drop(device.open());
}

#[test]
fn a_disk_of_which_a_partition_is_mounted_is_refused() {
    let Some(device) = LoopDevice::new(4 * SIZE, &["--partscan"]) else { return };
    let place = device.folder.path().join("mounted");
    std::fs::create_dir(&place).unwrap();
    // Instead of a partition table, which not every kernel reads.
    run("addpart", &[text(&device.path), "1", "2048", "32768"]);
    let partition = format!("{}p1", text(&device.path));
    run("mkfs.ext4", &["-q", &partition]);
    run("mount", &[&partition, text(&place)]);
    let result = Image::open(&device.path, Access::ReadWrite);
    run("umount", &[text(&place)]);
    let Err(ImageError::DeviceInUse { user, .. }) = result else { panic!("its partition is mounted") };
    assert_eq!(user, DeviceUser::Mount(place));
}

#[test]
fn a_device_that_is_part_of_another_is_refused_and_that_one_named() {
    let Some(device) = LoopDevice::new(SIZE, &[]) else { return };
    if !std::fs::read_to_string("/proc/devices").unwrap().contains("device-mapper") {
        return omission::kernel_lacks("the device mapper");
    }
    let name = format!("sterna-test-{}", std::process::id());
    let table = format!("0 1024 linear {} 0", text(&device.path));
    run("dmsetup", &["create", &name, "--table", &table]);
    let result = Image::open(&device.path, Access::ReadWrite);
    run("dmsetup", &["remove", &name]);
    let Err(error) = result else { panic!("it is part of another device") };
    let ImageError::DeviceInUse { user: DeviceUser::Device(user), .. } = &error else { panic!("{error}") };
    assert!(user.starts_with("dm-"), "{error}");
}

#[test]
fn swap_space_is_refused() {
    let Some(device) = LoopDevice::new(SIZE, &[]) else { return };
    run("mkswap", &["-q", text(&device.path)]);
    run("swapon", &["--priority", "0", text(&device.path)]);
    let result = Image::open(&device.path, Access::ReadWrite);
    run("swapoff", &[text(&device.path)]);
    let Err(ImageError::DeviceInUse { user, .. }) = result else { panic!("the system swaps to it") };
    assert_eq!(user, DeviceUser::Swap);
}

#[test]
fn a_read_only_device_is_read_and_refused_for_writing() {
    on_both(SIZE, &["--read-only"], |device, engine, _| async move {
        let refused = Image::open(&device.path, Access::ReadWrite);
        assert!(matches!(refused, Err(ImageError::ReadOnlyDevice { .. })));
        let image = Image::open(&device.path, Access::ReadOnly).unwrap();
        check_read_only("device", Rc::new(FileStore::new(image, engine))).await;
    });
}
