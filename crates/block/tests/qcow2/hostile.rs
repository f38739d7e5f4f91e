//! Tests damaged images: they are refused by name, or fail requests. No code panics or takes unbounded memory.

use std::path::Path;

use block::store::qcow2::{HeaderError, Qcow2Error, Qcow2Image};
use block::{Access, BlockDevice, Buffer, ByteRange, Durability};

use crate::tools::{Random, alone, folder, on_each_engine, path_in, run, text, when_free};

const MIB: u64 = 1 << 20;

/// Makes a small image with data, changes its bytes, and returns why it is refused.
fn refusal(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let folder = folder();
    let path = path_in(&folder, "disk.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&path), "8M"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 1M 1M", text(&path)]);
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes);
    std::fs::write(&path, bytes).unwrap();
    let mut told = Vec::new();
    for access in [Access::ReadOnly, Access::ReadWrite] {
        match when_free(|| Qcow2Image::open(&path, access)) {
            Err(Qcow2Error::Header { reason, .. }) => told.push(reason.to_string()),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it is accepted"),
        }
    }
    assert_eq!(told[0], told[1]);
    told.swap_remove(0)
}

fn set_u32(offset: usize, value: u32) -> impl FnOnce(&mut Vec<u8>) {
    move |bytes| bytes[offset..offset + 4].copy_from_slice(&value.to_be_bytes())
}

fn set_u64(offset: usize, value: u64) -> impl FnOnce(&mut Vec<u8>) {
    move |bytes| bytes[offset..offset + 8].copy_from_slice(&value.to_be_bytes())
}

#[test]
fn what_cannot_be_served_says_why() {
    let check = |told: String, expected: &str| assert!(told.contains(expected), "{told}");
    check(refusal(|bytes| bytes.truncate(60)), "ends within the header");
    check(refusal(Vec::clear), "no qcow2 image");
    check(refusal(set_u32(0, 0x5146_49fc)), "no qcow2 image");
    check(refusal(|bytes| bytes[8..].fill(0xff)), "cluster size");
    check(refusal(set_u32(4, 4)), "version 4");
    check(refusal(set_u32(20, 8)), "cluster size");
    check(refusal(set_u32(20, 63)), "cluster size");
    check(refusal(set_u32(32, 2)), "encryption");
    check(refusal(set_u64(72, 1)), "qemu-img check -r all");
    check(refusal(set_u64(72, 2)), "corrupt");
    check(refusal(set_u64(72, 4)), "external data file");
    check(refusal(set_u64(72, 8)), "compression");
    check(refusal(set_u64(72, 16)), "extended L2");
    check(refusal(set_u64(72, 1 << 40)), "not known");
    check(refusal(set_u32(96, 7)), "refcount width");
    check(refusal(set_u32(100, 8)), "header length");
    check(refusal(set_u32(100, u32::MAX)), "header length");
    check(refusal(set_u64(24, u64::MAX)), "size");
    check(refusal(set_u64(24, 1 << 50)), "first-level entries");
    check(refusal(set_u32(36, 0)), "first-level entries");
    check(refusal(set_u32(36, u32::MAX)), "the most");
    check(refusal(set_u32(36, 1 << 20)), "beyond the end");
    check(refusal(set_u64(40, 1 << 40)), "beyond the end");
    check(refusal(set_u64(40, !0xffff)), "beyond the end");
    check(refusal(set_u64(40, 512)), "first-level table");
    check(refusal(set_u64(48, 0)), "refcount table");
    check(refusal(set_u64(48, 1 << 40)), "beyond the end");
    check(refusal(set_u32(56, 0)), "refcount table");
    check(refusal(set_u32(56, u32::MAX)), "the most");
    // The tables' own entries: a second-level table, and a refcount block.
    check(refusal(set_u64(0x30000, 1 << 63 | 1 << 40)), "beyond the end");
    check(refusal(set_u64(0x30000, 1 << 63 | 0x40200)), "first-level table");
    check(refusal(set_u64(0x10000, 1 << 40)), "beyond the end");
    check(refusal(set_u64(0x10000, 0)), "counts not even the header");
    // Names and extensions.
    let name = |offset, length| {
        move |bytes: &mut Vec<u8>| {
            set_u64(8, offset)(bytes);
            set_u32(16, length)(bytes);
        }
    };
    check(refusal(name(1 << 20, 4)), "name of its backing file");
    check(refusal(name(600, 1024)), "name of its backing file");
    check(refusal(name(0xfffe, 4)), "name of its backing file");
    check(refusal(set_u32(116, u32::MAX)), "extension's length");
}

#[test]
fn qemu_s_own_unsupported_images_are_named() {
    let folder = folder();
    let check = |name: &str, options: &[&str], expected: &str| {
        let path = path_in(&folder, name);
        let mut arguments = vec!["create", "-q", "-f", "qcow2"];
        arguments.extend(options);
        arguments.extend([text(&path), "8M"]);
        run("qemu-img", &arguments);
        let Err(error) = when_free(|| Qcow2Image::open(&path, Access::ReadWrite)) else {
            panic!("{name} is accepted")
        };
        assert!(error.to_string().contains(expected), "{error}");
    };
    check("zstd", &["-o", "compression_type=zstd"], "compression");
    check("extended", &["-o", "extended_l2=on"], "extended L2");
    let data = format!("data_file={}", text(&path_in(&folder, "data")));
    check("external", &["-o", &data], "external data file");
    assert!(matches!(
        Qcow2Image::open(&path_in(&folder, "data"), Access::ReadOnly),
        Err(Qcow2Error::Header { reason: HeaderError::NotQcow2, .. })
    ));
}

#[test]
fn images_that_cannot_be_made_are_refused() {
    let folder = folder();
    for (cluster_size, size) in
        [(0, MIB), (256, MIB), (3 << 10, MIB), (4 << 20, MIB), (65_536, 100), (512, 1 << 45), (65_536, !511)]
    {
        let path = path_in(&folder, "disk.qcow2");
        let made = Qcow2Image::create(&path, size, &alone(cluster_size));
        assert!(matches!(made, Err(Qcow2Error::Options { .. })), "{cluster_size} {size}");
        assert!(!path.exists());
    }
}

/// Damages tables at random, then reads everything and writes here and there: any answer will do.
#[test]
fn damaged_tables_fail_requests_and_nothing_else() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let (whole, path) = (path_in(&folder, "whole"), path_in(&folder, "disk.qcow2"));
        make_varied(&whole);
        let bytes = std::fs::read(&whole).unwrap();
        let mut random = Random::new(21);
        let (mut opened, mut failed) = (0, 0);
        for _ in 0..250 {
            let mut damaged = bytes.clone();
            for _ in 0..1 + random.below(6) {
                damage(&mut damaged, &mut random);
            }
            std::fs::write(&path, &damaged).unwrap();
            for access in [Access::ReadOnly, Access::ReadWrite] {
                let image = match lane.open_when_free(&path, access).await {
                    Ok(image) => image,
                    Err(Qcow2Error::Header { .. } | Qcow2Error::Backing { .. }) => continue,
                    Err(error) => panic!("{error:?}"),
                };
                let size = image.size();
                assert!(size < 1 << 40);
                let Ok(device) = block::store::Qcow2Store::open(image, &lane.handle, &lane.engine).await
                else {
                    continue;
                };
                opened += 1;
                failed += use_everything(&device, access, size.min(16 * MIB), &mut random).await;
            }
        }
        assert!(opened > 100 && failed > 10, "{opened} were opened, {failed} requests failed");
    });
}

fn make_varied(path: &Path) {
    let raw = path.with_extension("raw");
    let data: Vec<u8> = (0..2 * MIB).map(|index| (index / 900 % 7) as u8).collect();
    std::fs::write(&raw, data).unwrap();
    run(
        "qemu-img",
        &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k", text(&raw), text(path)],
    );
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 256k 256k", "-c", "write -z 600k 64k", text(path)]);
    run("qemu-img", &["snapshot", "-c", "one", text(path)]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 2 300k 64k", text(path)]);
}

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    let length = bytes.len() as u64;
    let entry = (random.below(length.min(1 << 17)) & !7) as usize;
    match random.below(8) {
        0 => bytes.truncate(random.below(length) as usize),
        1 => bytes[random.below(104) as usize] = random.below(256) as u8,
        2 => bytes[entry..entry + 8].fill(0xff),
        3 => bytes[entry..entry + 8].fill(0),
        // Points to another cluster, or marks as zero or compressed.
        4 => bytes[entry..entry + 8].copy_from_slice(&(1 << 63 | random.below(length) & !4095).to_be_bytes()),
        5 => bytes[entry + 7] ^= 1,
        6 => bytes[entry] ^= 0x40,
        _ => bytes[entry + random.below(8) as usize] ^= 1 << random.below(8),
    }
    bytes.resize(bytes.len().max(1 << 17), 0);
}

async fn use_everything(device: &dyn BlockDevice, access: Access, size: u64, random: &mut Random) -> usize {
    let mut failed = 0;
    let mut count = |is_ok: bool| failed += usize::from(!is_ok);
    let step = 256 << 10;
    let pieces: Vec<u64> = (0..size / step * step).step_by(step as usize).collect();
    for offset in pieces {
        count(device.read(offset, Buffer::zeroed(step as usize)).await.is_ok());
        count(device.allocation(ByteRange::new(offset, step)).await.is_ok());
        if access == Access::ReadOnly {
            continue;
        }
        let place = offset + random.below(60) * 4096;
        let data = Buffer::copy_of(&[3; 8192]);
        count(device.write(place, data, Durability::Volatile).await.is_ok());
        count(device.discard(ByteRange::new(offset + 4096, random.below(60) * 4096)).await.is_ok());
    }
    count(device.flush().await.is_ok());
    failed
}
