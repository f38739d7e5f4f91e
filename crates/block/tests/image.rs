//! Tests images: their making, and their locks.

#![expect(clippy::unwrap_used, reason = "a test that cannot prepare its scene has failed")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use block::engine::{self, EngineChoice};
use block::store::image::Patience;
use block::{Access, BlockDevice, Buffer, Durability, Executor, FileStore, Image, ImageError};
use futures_util::future::join_all;

const SIZE: u64 = 1 << 20;
/// How often a program is repeated until it finds an image unlocked: far more often than needed.
const RETRIES: u32 = 1000;

/// Names the image that [`holds_an_image_until_told`] holds in another process.
const IMAGE_VARIABLE: &str = "STERNA_TEST_IMAGE";

fn image_in(folder: &tempfile::TempDir) -> std::path::PathBuf {
    folder.path().join("disk.raw")
}

#[test]
fn a_new_image_is_sparse_has_its_size_and_is_its_owners() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    let image = Image::create(&path, SIZE).unwrap();
    assert_eq!((image.size(), image.access()), (SIZE, Access::ReadWrite));
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.len(), metadata.blocks(), metadata.mode() & 0o777), (SIZE, 0, 0o600));
}

#[test]
fn what_cannot_be_made_says_why_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    assert!(matches!(Image::create(&path, u64::MAX), Err(ImageError::TooLarge { .. })));
    assert!(matches!(Image::create(&path, i64::MAX as u64), Err(ImageError::TooLarge { .. })));
    assert!(!path.exists());
    std::fs::write(&path, b"mine").unwrap();
    assert!(matches!(Image::create(&path, SIZE), Err(ImageError::Exists { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    let elsewhere = folder.path().join("missing").join("disk.raw");
    assert!(matches!(Image::create(&elsewhere, SIZE), Err(ImageError::NotFound { .. })));
}

#[test]
fn what_is_no_image_says_why() {
    let folder = tempfile::tempdir().unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let open = |path: &Path| Image::open(path, access);
        assert!(matches!(open(&image_in(&folder)), Err(ImageError::NotFound { .. })));
        assert!(matches!(open(folder.path()), Err(ImageError::NotRegular { .. })));
        assert!(matches!(open(Path::new("/dev/null")), Err(ImageError::NotRegular { .. })));
    }
    let path = image_in(&folder);
    std::fs::write(&path, [0; 1000]).unwrap();
    let image = Image::open(&path, Access::ReadOnly).unwrap();
    assert!(image.check_holds(1000).is_ok());
    let error = image.check_holds(1001).unwrap_err();
    assert!(error.to_string().ends_with("has 1000 bytes and needs 1001"), "{error}");
}

#[test]
fn one_writer_or_several_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    let writer = Image::create(&path, SIZE).unwrap();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        let Err(ImageError::Locked { holder, .. }) = Image::open(&path, access) else {
            panic!("{access:?} beside a writer")
        };
        assert_eq!(holder.process, Some(std::process::id()));
    }
    drop(writer);
    let readers = [open_free(&path, Access::ReadOnly), open_free(&path, Access::ReadOnly)];
    assert!(matches!(Image::open(&path, Access::ReadWrite), Err(ImageError::Locked { .. })));
    drop(readers);
    open_free(&path, Access::ReadWrite);
}

#[test]
fn the_end_of_an_odd_image_is_locked_as_well() {
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    let writer = Image::create(&path, SIZE + 77).unwrap();
    assert!(matches!(Image::open(&path, Access::ReadWrite), Err(ImageError::Locked { .. })));
    drop(writer);
    open_free(&path, Access::ReadWrite);
}

/// Opens an unused image. Another test's starting process has all our files, and their locks, until its exec.
fn open_free(path: &Path, access: Access) -> Image {
    Image::open_waiting(path, access, |_| Patience::Wait).unwrap()
}

/// This is no test, but the other process of the tests below.
#[test]
fn holds_an_image_until_told() {
    let Some(path) = std::env::var_os(IMAGE_VARIABLE) else { return };
    let _image = open_free(Path::new(&path), Access::ReadWrite);
    println!("\nheld");
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// This is no test: it writes an image over and over until it is killed.
#[test]
fn writes_an_image_until_killed() {
    let Some(path) = std::env::var_os(IMAGE_VARIABLE) else { return };
    let (driver, engine) = engine::open(EngineChoice::Auto).unwrap();
    let store = FileStore::new(open_free(Path::new(&path), Access::ReadWrite), engine);
    Executor::new(driver).run(async move {
        let data = Buffer::copy_of(&[0xEE; 16_384]);
        for round in 0_u64.. {
            let offsets = (0..SIZE).step_by(data.len());
            let writes = offsets.map(|offset| store.write(offset, data.clone(), Durability::Durable));
            assert!(join_all(writes).await.iter().all(Result::is_ok));
            if round == 0 {
                println!("\nheld");
            }
        }
    });
}

#[test]
fn no_write_of_a_killed_process_lands_once_its_image_can_be_had() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = image_in(&folder);
    drop(Image::create(&path, SIZE).unwrap());
    for _ in 0..5 {
        let mut child = run_in_another_process(&path, "writes_an_image_until_killed");
        child.kill().unwrap();
        let image = open_free(&path, Access::ReadWrite);
        let (driver, engine) = engine::open(EngineChoice::Auto).unwrap();
        let store = FileStore::new(image, engine);
        Executor::new(driver).run(async move {
            store.write(0, Buffer::copy_of(&vec![0x11; SIZE as usize]), Durability::Durable).await.unwrap();
            for _ in 0..20 {
                let read = store.read(0, Buffer::zeroed(SIZE as usize)).await.unwrap();
                assert!(read.as_slice().iter().all(|byte| *byte == 0x11), "a write of the dead landed");
            }
        });
        child.wait().unwrap();
    }
}

fn hold_in_another_process(path: &Path) -> Child {
    run_in_another_process(path, "holds_an_image_until_told")
}

/// Starts one of the two above, and waits until it has the image.
fn run_in_another_process(path: &Path, what: &str) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", what, "--nocapture"])
        .env(IMAGE_VARIABLE, path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "held"));
    child
}

#[test]
fn the_lock_of_a_killed_process_is_waited_for_and_its_holder_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    drop(Image::create(&path, SIZE).unwrap());
    let mut child = hold_in_another_process(&path);
    let id = child.id();
    let Err(ImageError::Locked { holder, .. }) = Image::open(&path, Access::ReadWrite) else {
        panic!("two processes have the image")
    };
    assert_eq!(holder.process, Some(id));
    assert!(holder.program.is_some());
    let mut waits = 0;
    let image = Image::open_waiting(&path, Access::ReadWrite, |holder| {
        if waits == 0 {
            // Later it may be gone before it can be named.
            assert_eq!(holder.process, Some(id));
            child.kill().unwrap();
        }
        waits += 1;
        Patience::Wait
    });
    assert_eq!(image.unwrap().size(), SIZE);
    assert!(waits >= 1);
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

#[test]
fn waiting_ends_when_the_caller_has_no_more_patience() {
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    let _held = Image::create(&path, SIZE).unwrap();
    let mut asked = 0;
    let opened = Image::open_waiting(&path, Access::ReadWrite, |_| {
        asked += 1;
        if asked < 3 { Patience::Wait } else { Patience::GiveUp }
    });
    assert!(matches!(opened, Err(ImageError::Locked { .. })));
    assert_eq!(asked, 3);
}

#[test]
fn an_image_that_is_replaced_while_waited_for_is_not_the_one_that_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    let held = Image::create(&path, SIZE).unwrap();
    let mut held = Some(held);
    let image = Image::open_waiting(&path, Access::ReadWrite, |_| {
        if held.is_some() {
            std::fs::rename(&path, folder.path().join("fenced.raw")).unwrap();
            std::fs::write(&path, [0; 4096]).unwrap();
            held = None;
        }
        Patience::Wait
    });
    assert_eq!(image.unwrap().size(), 4096);
}

fn is_installed(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !found {
        omission::machine_lacks(&format!("{program}: scripts/install-packages test installs it"));
    }
    found
}

#[test]
fn qemu_refuses_an_image_that_is_served() {
    if !is_installed("qemu-img") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    let copy = folder.path().join("copy.raw");
    let run = |arguments: &[&str]| {
        let output = Command::new("qemu-img").args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (path, copy) = (path.to_str().unwrap(), copy.to_str().unwrap());
    let image = Image::create(Path::new(path), SIZE).unwrap();
    let resize = ["resize", "-f", "raw", path, "2M"];
    let (done, told) = run(&resize);
    assert!(!done && told.contains("Failed to get \"write\" lock"), "{told}");
    let (done, told) = run(&["convert", "-f", "raw", path, copy]);
    assert!(!done && told.contains("Failed to get shared \"write\" lock"), "{told}");
    assert!(run(&["convert", "-U", "-f", "raw", path, copy]).0, "unless it is told to share");
    drop(image);
    // Another test's starting process has its lock for a moment longer.
    let free = (0..RETRIES).any(|_| run(&resize).0);
    assert!(free, "and once it is not served any more");
}

#[test]
fn an_image_that_qemu_uses_is_refused() {
    if !is_installed("qemu-io") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = image_in(&folder);
    // Made without an image's lock, which another test's starting process would have for a moment longer.
    std::fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = qemu.stdin.take().unwrap();
    // Its answer shows that it has the image open.
    writeln!(input, "length").unwrap();
    let mut answer = BufReader::new(qemu.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(answer.any(|line| line.contains("1 MiB")));
    let Err(ImageError::Locked { holder, .. }) = Image::open(&path, Access::ReadWrite) else {
        panic!("QEMU writes it")
    };
    assert_eq!((holder.process, holder.program.as_deref()), (Some(qemu.id()), Some("qemu-io")));
    drop(input);
    qemu.wait().unwrap();
    open_free(&path, Access::ReadWrite);
}
