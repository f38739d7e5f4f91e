//! Tests of `migrate --keep-chain`: only the top of a qcow2 chain moves, and keeps its backing file.

use crate::scene::{Scene, code, qemu_img, qemu_io};

/// A chain of three, of 32 MiB: the base is full of 0x11, the middle has 2 MiB of 0x22, and of the top one MiB is data,
/// one is zero over the base, one is zero over the middle, and one is compressed. The names in it are relative.
fn chain(scene: &Scene) -> String {
    let folder = scene.path("chain");
    std::fs::create_dir(&folder).unwrap();
    let path = |name: &str| folder.join(name).display().to_string();
    let (base, middle, top) = (path("base.raw"), path("middle.qcow2"), path("top.qcow2"));
    std::fs::write(&base, vec![0x11; 32 << 20]).unwrap();
    let make = |backing: &str, format: &str, image: &str| {
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, image, "32M"]);
    };
    make("base.raw", "raw", &middle);
    qemu_io(&["-c", "write -P 0x22 4M 2M", &middle]);
    make("middle.qcow2", "qcow2", &top);
    let [data, over_base, over_middle] = ["write -P 0x33 1M 1M", "write -z 2M 1M", "write -z 4M 1M"];
    qemu_io(&["-c", data, "-c", over_base, "-c", over_middle, "-c", "write -c -P 0x44 8M 1M", &top]);
    top
}

/// Bytes that an image takes on the disk.
fn allocated(path: &str) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn only_the_top_of_a_chain_moves_and_stands_on_the_same_base() {
    let scene = Scene::started();
    let top = chain(&scene);
    let flat = scene.path("expected").display().to_string();
    qemu_img(&["convert", "-O", "raw", &top, &flat]);
    let before = allocated(&top);
    scene.succeed(&["volume", "add", "v", "--image", &top]);
    scene.succeed(&["migrate", "v", "--to", "a", "--keep-chain"]);
    let there = scene.path("a/v.qcow2").display().to_string();
    // It can move again in the same way.
    scene.succeed(&["migrate", "v", "--to", "b", "--keep-chain"]);
    assert!(std::fs::metadata(&there).is_err());
    let moved = scene.path("b/v.qcow2").display().to_string();
    scene.succeed(&["volume", "remove", "v", "--keep-image"]);
    qemu_img(&["check", "-q", &moved]);
    qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "raw", &moved, &flat]);
    let told = qemu_img(&["info", "--backing-chain", &moved]);
    let middle = scene.path("chain/middle.qcow2").canonicalize().unwrap();
    assert!(told.contains(&format!("backing file: {}", middle.display())), "{told}");
    assert!(told.contains("base.raw"), "{told}");
    let after = allocated(&moved);
    // 1 MiB was decompressed. The whole disk would be 32 MiB.
    assert!(after <= before + (3 << 19) + (1 << 20), "{after} of {before}");
}

#[test]
fn guest_that_writes_meanwhile_finds_everything_over_the_base() {
    let scene = Scene::started();
    let base = scene.path("base.raw").display().to_string();
    // The guest's disk is compared with zeroes where it has not written.
    std::fs::File::create(&base).unwrap().set_len(crate::scene::DISK_BYTES).unwrap();
    let top = scene.path("top.qcow2").display().to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &top]);
    scene.succeed(&["volume", "add", "v", "--image", &top]);
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "a", "--keep-chain", "--bandwidth", "8MiB/s"]);
    scene.succeed(&["migrate", "v", "--to", "b", "--keep-chain"]);
    crate::scene::stop_and_verify(guest);
    scene.succeed(&["volume", "remove", "v", "--keep-image"]);
    let moved = scene.path("b/v.qcow2").display().to_string();
    qemu_img(&["check", "-q", &moved]);
    assert!(qemu_img(&["info", &moved]).contains("backing file"));
}

#[test]
fn chain_that_cannot_be_kept_is_refused_with_the_reason() {
    let mut scene = Scene::new();
    scene.configure("[stores.r]\nnbd = 'nbd+unix:///v?socket=/nonexistent/socket'\n");
    scene.start(None);
    let top = chain(&scene);
    scene.succeed(&["volume", "add", "v", "--image", &top]);
    let refused = |order: &[&str], words: &str| {
        let (exit, value) = scene.json(&[&["migrate"], order].concat());
        let message = value["error"]["message"].as_str().unwrap_or_default();
        assert!(exit != 0 && message.contains(words), "{order:?}: {value}");
    };
    refused(&["v", "--to", "r", "--keep-chain"], "only a store that is a folder");
    refused(&["v", "--to", "a", "--keep-chain", "--format", "raw"], "a raw image has no backing file");
    scene.succeed(&["volume", "create", "w", "--store", "b", "--size", "1MiB"]);
    refused(&["w", "--to", "a", "--keep-chain"], "is not qcow2");
    scene.succeed(&["volume", "create", "x", "--store", "b", "--size", "1MiB", "--format", "qcow2"]);
    refused(&["x", "--to", "a", "--keep-chain"], "has no backing file");
    // It is served, and its backing file was moved since.
    std::fs::rename(scene.path("chain/middle.qcow2"), scene.path("chain/elsewhere.qcow2")).unwrap();
    let (exit, value) = scene.json(&["migrate", "v", "--to", "a", "--keep-chain"]);
    assert_eq!((exit, code(&value)), (4, "image_unsuitable"), "{value}");
    assert!(value["error"]["message"].as_str().unwrap().contains("middle.qcow2"), "{value}");
    assert!(scene.images("a").is_empty());
    // It can move when it is flattened.
    scene.succeed(&["migrate", "v", "--to", "a"]);
}
