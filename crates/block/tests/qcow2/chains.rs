//! Tests images with backing files.

use std::path::Path;

use block::store::qcow2::{BackingFile, Format, Qcow2Error, Qcow2Image, Qcow2Options, probe_format};
use block::{Access, BlockDevice, ByteRange, ExtentKind, ImageError};

use crate::tools::{
    alone, check_clean, check_equal, folder, on_each_engine, path_in, read, run, text, try_run, when_free,
    work, write,
};

const MIB: u64 = 1 << 20;

fn on(path: &str, format: Format) -> Qcow2Options {
    let backing = Some(BackingFile { path: path.to_owned(), format });
    Qcow2Options { cluster_size: 64 << 10, backing }
}

fn make_base(path: &Path, model: &mut [u8]) {
    let length = 5 * MIB as usize + 1000;
    model[..length].fill(0x11);
    model[MIB as usize..2 * MIB as usize].fill(0);
    std::fs::write(path, &model[..length]).unwrap();
    run("fallocate", &["-p", "-o", "1MiB", "-l", "1MiB", text(path)]);
}

#[test]
fn a_chain_of_three_is_read_written_and_left_alone_below() {
    on_each_engine(|lane| async move {
        let folder = folder();
        std::fs::create_dir(folder.path().join("below")).unwrap();
        let base = path_in(&folder, "below/base.raw");
        let (middle, top) = (path_in(&folder, "below/middle.qcow2"), path_in(&folder, "top.qcow2"));
        let mut model = vec![0; 12 * MIB as usize];
        make_base(&base, &mut model);
        // Names are relative to the image that has them, whatever the folder of the process.
        let size = 12 * MIB;
        run(
            "qemu-img",
            &[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-b",
                "base.raw",
                "-F",
                "raw",
                "-o",
                "cluster_size=4k",
                text(&middle),
                "9M",
            ],
        );
        run("qemu-io", &["-f", "qcow2", "-c", "write -P 0x22 3M 3M", "-c", "write -z 4M 64k", text(&middle)]);
        model[3 * MIB as usize..6 * MIB as usize].fill(0x22);
        model[4 * MIB as usize..][..64 << 10].fill(0);
        let image = when_free(|| Qcow2Image::create(&top, size, &on("below/middle.qcow2", Format::Qcow2)));
        let image = image.unwrap();
        let named: Vec<_> = image.backing_files().map(Path::to_owned).collect();
        assert_eq!(named, [middle.clone(), base.clone()]);
        let below = [std::fs::read(&middle).unwrap(), std::fs::read(&base).unwrap()];
        let device = lane.serve(image).await;
        assert!(read(&device, 0, model.len()).await == model);
        let expected = [
            (MIB, ExtentKind::Data),
            (MIB, ExtentKind::Hole),
            (2 * MIB, ExtentKind::Data),
            (64 << 10, ExtentKind::Hole),
            (2 * MIB - (64 << 10), ExtentKind::Data),
            (6 * MIB, ExtentKind::Hole),
        ];
        let found = device.allocation(ByteRange::new(0, size)).await.unwrap();
        let found: Vec<_> = found.iter().map(|extent| (extent.range.length, extent.kind)).collect();
        assert_eq!(found, expected);
        // Partial clusters of images below are merged, and do not show again after a discard.
        write(&device, 8192, &[0x33; 4096]).await;
        model[8192..8192 + 4096].fill(0x33);
        device.discard(ByteRange::new(0, 512 << 10)).await.unwrap();
        model[..512 << 10].fill(0);
        assert!(read(&device, 0, model.len()).await == model);
        work(&device, &mut model, 11, 40).await;
        device.flush().await.unwrap();
        drop(device);
        check_clean(&top);
        check_equal(&top, &model);
        assert!(
            below == [std::fs::read(&middle).unwrap(), std::fs::read(&base).unwrap()],
            "something below was written"
        );
    });
}

#[test]
fn version_2_over_a_base_zeroes_by_writing() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let (base, top) = (path_in(&folder, "base.raw"), path_in(&folder, "top.qcow2"));
        let mut model = vec![0; 6 * MIB as usize];
        make_base(&base, &mut model);
        run(
            "qemu-img",
            &[
                "create",
                "-q",
                "-f",
                "qcow2",
                "-b",
                text(&base),
                "-F",
                "raw",
                "-o",
                "compat=0.10",
                text(&top),
                "6M",
            ],
        );
        let device = lane.open(&top, Access::ReadWrite).await;
        device.discard(ByteRange::new(0, 3 * MIB)).await.unwrap();
        model[..3 * MIB as usize].fill(0);
        work(&device, &mut model, 12, 20).await;
        device.flush().await.unwrap();
        drop(device);
        check_clean(&top);
        check_equal(&top, &model);
    });
}

#[test]
fn files_below_may_be_shared_but_not_written() {
    let folder = folder();
    let base = path_in(&folder, "base.qcow2");
    drop(Qcow2Image::create(&base, MIB, &alone(64 << 10)).unwrap());
    let [first, second] = ["first.qcow2", "second.qcow2"].map(|name| {
        let create = || Qcow2Image::create(&path_in(&folder, name), MIB, &on("base.qcow2", Format::Qcow2));
        when_free(create).unwrap()
    });
    let Err(Qcow2Error::Image(ImageError::Locked { .. })) = Qcow2Image::open(&base, Access::ReadWrite) else {
        panic!("it is written under those that stand on it")
    };
    let output = try_run("qemu-io", &["-f", "qcow2", "-c", "write 0 4k", text(&base)]);
    assert!(!output.status.success());
    drop((first, second));
    run("qemu-io", &["-f", "qcow2", "-c", "write 0 4k", text(&base)]);
    let _writer = when_free(|| Qcow2Image::open(&base, Access::ReadWrite)).unwrap();
    let Err(error) = Qcow2Image::open(&path_in(&folder, "first.qcow2"), Access::ReadOnly) else {
        panic!("it stands on what is being written")
    };
    assert!(matches!(error, Qcow2Error::Backing { .. }), "{error}");
}

#[test]
fn chains_that_cannot_be_used_are_named() {
    let folder = folder();
    let create =
        |name: &str, options: &Qcow2Options| Qcow2Image::create(&path_in(&folder, name), MIB, options);
    let check = |name: &str, options: &Qcow2Options, expected: &str| {
        let Err(error) = create(name, options) else { panic!("{name} was made") };
        let mut told = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            told = format!("{told}: {error}");
            source = error.source();
        }
        assert!(told.contains(expected), "{name}: {told}");
        assert!(!path_in(&folder, name).exists(), "{name} is left behind");
    };
    check("a", &on("nowhere.raw", Format::Raw), "nowhere.raw does not exist");
    check("a", &on("nbd://host/disk", Format::Raw), "no path of a file");
    check("a", &on("json:{\"driver\":\"raw\"}", Format::Raw), "no path of a file");
    check("a", &on("x.vmdk", Format::Other("vmdk".to_owned())), "of format vmdk");
    check("a", &on(&"x".repeat(1024), Format::Raw), "take a shorter path");
    check("a", &on("a", Format::Qcow2), "in its own chain");
    std::fs::write(path_in(&folder, "text"), b"This is no image at all.").unwrap();
    check("a", &on("text", Format::Qcow2), "no qcow2 image");
    drop(create("b", &on("text", Format::Raw)).unwrap());
    assert!(create("c", &on("file:text", Format::Raw)).is_ok());
}

#[test]
fn loops_and_endless_chains_are_refused() {
    let folder = folder();
    let rebase = |image: &str, backing: &str| {
        run(
            "qemu-img",
            &["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", backing, text(&path_in(&folder, image))],
        );
    };
    for name in ["0", "1", "2"] {
        drop(Qcow2Image::create(&path_in(&folder, name), MIB, &alone(64 << 10)).unwrap());
    }
    rebase("0", "1");
    rebase("1", "2");
    rebase("2", "1");
    for name in ["0", "1", "2"] {
        for access in [Access::ReadOnly, Access::ReadWrite] {
            let Err(error) = when_free(|| Qcow2Image::open(&path_in(&folder, name), access)) else {
                panic!("{name} is a loop")
            };
            assert!(error.to_string().contains("in its own chain"), "{error}");
        }
    }
    rebase("2", "");
    let mut below = "2".to_owned();
    for index in 3.. {
        let name = index.to_string();
        let create = || Qcow2Image::create(&path_in(&folder, &name), MIB, &on(&below, Format::Qcow2));
        match when_free(create) {
            Ok(_) => below = name,
            Err(error) => {
                assert!(matches!(error, Qcow2Error::TooDeep { .. }), "{error}");
                assert_eq!(index, 3 + block::store::qcow2::CHAIN_MAX - 1);
                break;
            }
        }
    }
}

#[test]
fn a_backing_file_of_unknown_format_is_told_by_its_beginning() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let (base, top) = (path_in(&folder, "base"), path_in(&folder, "top.qcow2"));
        drop(Qcow2Image::create(&base, MIB, &alone(4096)).unwrap());
        run("qemu-io", &["-f", "qcow2", "-c", "write -P 5 0 1M", text(&base)]);
        assert_eq!(probe_format(&base).unwrap(), Format::Qcow2);
        drop(Qcow2Image::create(&top, MIB, &alone(64 << 10)).unwrap());
        // `-F ""` leaves the format out.
        run("qemu-img", &["rebase", "-u", "-f", "qcow2", "-b", "base", "-F", "qcow2", text(&top)]);
        let mut bytes = std::fs::read(&top).unwrap();
        let place = bytes.windows(4).position(|bytes| bytes == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
        // An unknown extension.
        bytes[place] = 0x01;
        std::fs::write(&top, bytes).unwrap();
        let device = lane.open(&top, Access::ReadOnly).await;
        assert_eq!(read(&device, 0, 4096).await, vec![5; 4096]);
    });
}
