//! Tests that written data reads back, in Sterna and QEMU, and that the image stays clean.

use std::os::unix::fs::MetadataExt;

use block::device::push_extent;
use block::store::qcow2::{Qcow2Error, Qcow2Image};
use block::{Access, BlockDevice, Buffer, ByteRange, Durability, ExtentKind, ZeroMode};

use crate::tools::{
    alone, check_clean, check_equal, check_whole, folder, on_each_engine, path_in, read, run, text, work,
    write,
};

const MIB: u64 = 1 << 20;

/// Works on a new image, closes it, checks it by QEMU, and repeats that with QEMU's own writes in between.
fn check_work(cluster_size: u64, size: u64, batches: usize) {
    on_each_engine(move |lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        let mut model = vec![0; size as usize];
        drop(Qcow2Image::create(&path, size, &alone(cluster_size)).unwrap());
        check_clean(&path);
        for seed in 1..4 {
            let device = lane.open(&path, Access::ReadWrite).await;
            assert_eq!((device.geometry().size, device.geometry().discards), (size, true));
            work(&device, &mut model, seed, batches).await;
            device.flush().await.unwrap();
            // QEMU finds it valid even while it is served.
            assert_eq!(check_whole_while_served(&path), 0);
            drop(device);
            check_clean(&path);
            check_equal(&path, &model);
            run("qemu-io", &["-f", "qcow2", "-c", "write -P 7 4096 8192", text(&path)]);
            model[4096..4096 + 8192].fill(7);
        }
    });
}

fn check_whole_while_served(path: &std::path::Path) -> u64 {
    let copy = path.with_extension("copy");
    run("cp", &["--sparse=always", text(path), text(&copy)]);
    let leaks = check_whole(&copy);
    std::fs::remove_file(copy).unwrap();
    leaks
}

#[test]
fn images_with_the_usual_clusters_stay_clean_and_equal() {
    check_work(64 << 10, 24 * MIB, 40);
}

#[test]
fn images_whose_size_is_no_whole_block_stay_clean_and_equal() {
    check_work(64 << 10, 5 * MIB + 3 * 512, 30);
}

#[test]
fn images_with_clusters_of_a_block_stay_clean_and_equal() {
    // A second-level table describes 2 MiB, and a refcount block 8 MiB.
    check_work(4096, 24 * MIB + 512, 40);
}

#[test]
fn images_with_the_smallest_clusters_stay_clean_and_equal() {
    // The refcount table grows several times: one of its clusters describes 8 MiB.
    check_work(512, 20 * MIB, 10);
}

#[test]
fn images_with_the_largest_clusters_stay_clean_and_equal() {
    check_work(2 * MIB, 24 * MIB, 10);
}

#[test]
fn a_new_image_takes_no_space_for_its_disk_and_discarding_gives_it_back() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        let image = Qcow2Image::create(&path, 1 << 40, &alone(64 << 10)).unwrap();
        assert_eq!((image.size(), image.cluster_size(), image.has_backing()), (1 << 40, 64 << 10, false));
        let allocated = || std::fs::metadata(&path).unwrap().blocks() * 512;
        assert!(allocated() < MIB, "{}", allocated());
        let device = lane.serve(image).await;
        write(&device, 1 << 39, &vec![1; 8 << 20]).await;
        device.flush().await.unwrap();
        assert!(allocated() > 8 << 20);
        device.discard(ByteRange::new(0, 1 << 40)).await.unwrap();
        device.flush().await.unwrap();
        assert!(allocated() < MIB, "{}", allocated());
        assert_eq!(read(&device, 1 << 39, 4096).await, vec![0; 4096]);
        // Data written there again takes the former place.
        let length = std::fs::metadata(&path).unwrap().len();
        write(&device, 1 << 39, &vec![2; 4 << 20]).await;
        device.flush().await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
        assert!(allocated() > 4 << 20);
        drop(device);
        check_clean(&path);
    });
}

#[test]
fn extents_tell_data_from_holes() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        let device = lane.serve(Qcow2Image::create(&path, 64 * MIB, &alone(64 << 10)).unwrap()).await;
        write(&device, 5 * MIB, &vec![1; 64 << 10]).await;
        write(&device, 9 * MIB + 4096, &[1; 4096]).await;
        device
            .write_zeroes(ByteRange::new(20 * MIB, MIB), ZeroMode::KeepAllocated, Durability::Durable)
            .await
            .unwrap();
        device.discard(ByteRange::new(5 * MIB, 64 << 10)).await.unwrap();
        let mut expected = Vec::new();
        let (data, hole) = (ExtentKind::Data, ExtentKind::Hole);
        let mut position = 0;
        for (length, kind) in
            [(9 * MIB, hole), (64 << 10, data), (11 * MIB - (64 << 10), hole), (MIB, data), (43 * MIB, hole)]
        {
            push_extent(&mut expected, ByteRange::new(position, length), kind);
            position += length;
        }
        assert_eq!(device.allocation(ByteRange::new(0, 64 * MIB)).await.unwrap(), expected);
        device.flush().await.unwrap();
        drop(device);
        check_clean(&path);
    });
}

#[test]
fn a_read_only_image_refuses_writes_and_may_be_read_by_several() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        run("qemu-img", &["create", "-q", "-f", "qcow2", text(&path), "10M"]);
        run("qemu-io", &["-f", "qcow2", "-c", "write -P 9 1M 1M", text(&path)]);
        let (first, second) =
            (lane.open(&path, Access::ReadOnly).await, lane.open(&path, Access::ReadOnly).await);
        assert!(matches!(Qcow2Image::open(&path, Access::ReadWrite), Err(Qcow2Error::Image(_))));
        for device in [&first, &second] {
            assert_eq!(read(device, MIB, 4096).await, vec![9; 4096]);
            block::conformance::check_read_only(
                "qcow2",
                std::rc::Rc::new(lane.open(&path, Access::ReadOnly).await),
            )
            .await;
        }
    });
}

#[test]
fn qemu_refuses_an_image_that_is_served() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        let device = lane.serve(Qcow2Image::create(&path, MIB, &alone(64 << 10)).unwrap()).await;
        let output = crate::tools::try_run("qemu-io", &["-f", "qcow2", "-c", "write 0 4k", text(&path)]);
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains("lock"), "{output:?}");
        drop(device);
    });
}

#[test]
fn compressed_clusters_are_read_and_replaced() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let (raw, path) = (path_in(&folder, "raw"), path_in(&folder, "disk.qcow2"));
        let mut model: Vec<u8> = (0..8 * MIB).map(|index| (index / 700 % 251) as u8).collect();
        std::fs::write(&raw, &model).unwrap();
        run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&raw), text(&path)]);
        let device = lane.open(&path, Access::ReadWrite).await;
        assert!(read(&device, 0, model.len()).await == model);
        work(&device, &mut model, 5, 20).await;
        device.flush().await.unwrap();
        drop(device);
        check_clean(&path);
        check_equal(&path, &model);
    });
}

#[test]
fn internal_snapshots_keep_what_they_had() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        let mut model = vec![0; 16 * MIB as usize];
        run("qemu-img", &["create", "-q", "-f", "qcow2", text(&path), "16M"]);
        let device = lane.open(&path, Access::ReadWrite).await;
        work(&device, &mut model, 6, 20).await;
        device.flush().await.unwrap();
        drop(device);
        run("qemu-img", &["snapshot", "-c", "before", text(&path)]);
        let before = model.clone();
        let device = lane.open(&path, Access::ReadWrite).await;
        work(&device, &mut model, 7, 20).await;
        device.flush().await.unwrap();
        drop(device);
        check_clean(&path);
        check_equal(&path, &model);
        run("qemu-img", &["snapshot", "-a", "before", text(&path)]);
        check_clean(&path);
        check_equal(&path, &before);
        run("qemu-img", &["snapshot", "-d", "before", text(&path)]);
        check_clean(&path);
    });
}

#[test]
fn images_of_version_2_are_served() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "compat=0.10", text(&path), "8M"]);
        let mut model = vec![0; 8 * MIB as usize];
        let device = lane.open(&path, Access::ReadWrite).await;
        work(&device, &mut model, 8, 30).await;
        device.flush().await.unwrap();
        drop(device);
        check_clean(&path);
        check_equal(&path, &model);
    });
}

#[test]
fn a_durable_write_into_a_new_cluster_is_there_without_a_flush() {
    on_each_engine(|lane| async move {
        let folder = folder();
        let path = path_in(&folder, "disk.qcow2");
        let device = lane.serve(Qcow2Image::create(&path, 8 * MIB, &alone(64 << 10)).unwrap()).await;
        let mut model = vec![0; 8 * MIB as usize];
        for block in [3_u64, 700, 4] {
            let data = Buffer::copy_of(&[block as u8; 4096]);
            device.write(block * 4096, data, Durability::Durable).await.unwrap();
            model[block as usize * 4096..][..4096].fill(block as u8);
            let copy = path.with_extension("copy");
            std::fs::copy(&path, &copy).unwrap();
            check_clean(&copy);
            check_equal(&copy, &model);
        }
    });
}
