//! Tests with real clients: libnbd's tools and Python binding, QEMU's, fio's.

mod support;

use std::process::Command;

use export::nbd::Limits;
use support::clients::{run, run_python, text, write_sparse_image};
use support::{Running, SIZE, on_each_engine};

#[test]
fn nbdinfo_lists_and_describes_the_exports() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let disk = run("nbdinfo", "libnbd-bin", &["--json", &server.uri("disk")]);
        for fact in [
            r#""protocol": "newstyle-fixed""#,
            r#""structured": true"#,
            r#""export-name": "disk""#,
            r#""description": "a disk for tests""#,
            r#""export-size": 67108864"#,
            r#""is_read_only": false"#,
            r#""can_cache": true"#,
            r#""can_df": true"#,
            r#""can_fast_zero": true"#,
            r#""can_flush": true"#,
            r#""can_fua": true"#,
            r#""can_multi_conn": true"#,
            r#""can_trim": true"#,
            r#""can_zero": true"#,
            r#""block_size_minimum": 1"#,
            r#""block_size_preferred": 4096"#,
            r#""block_size_maximum": 33554432"#,
            r#""base:allocation""#,
        ] {
            assert!(disk.contains(fact), "{fact} is not in {disk}");
        }
        let frozen = run("nbdinfo", "libnbd-bin", &["--json", &server.uri("frozen")]);
        assert!(frozen.contains(r#""is_read_only": true"#), "{frozen}");
        assert!(frozen.contains(r#""can_trim": false"#), "{frozen}");
        let list = run("nbdinfo", "libnbd-bin", &["--list", "--json", &server.uri("")]);
        assert!(list.contains(r#""export-name": "disk""#) && list.contains(r#""export-name": "frozen""#));
        let unknown = Command::new("nbdinfo").arg(server.uri("other")).output().unwrap();
        assert!(!unknown.status.success());
        assert!(String::from_utf8_lossy(&unknown.stderr).contains("No such file"), "{unknown:?}");
    });
}

#[test]
fn nbdcopy_brings_an_image_in_and_out_and_leaves_its_holes() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let (image, copy) = (server.path("image"), server.path("copy"));
        write_sparse_image(&image);
        let uri = server.uri("disk");
        run("nbdcopy", "libnbd-bin", &["--connections=4", "--flush", text(&image), &uri]);
        assert!(server.probe.flushes() > 0);
        let map = run("nbdinfo", "libnbd-bin", &["--map", "--totals", &uri]);
        assert!(map.contains("hole,zero"), "{map}");
        run("nbdcopy", "libnbd-bin", &["--connections=4", &uri, text(&copy)]);
        assert!(std::fs::read(&image).unwrap() == std::fs::read(&copy).unwrap(), "the copy equals the image");
    });
}

#[test]
fn qemu_img_converts_maps_and_compares() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let (image, copy) = (server.path("image"), server.path("copy.qcow2"));
        write_sparse_image(&image);
        let uri = server.uri("disk");
        let qemu_img = |arguments: &[&str]| run("qemu-img", "qemu-utils", arguments);
        qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", text(&image), &uri]);
        qemu_img(&["compare", "-f", "raw", "-F", "raw", text(&image), &uri]);
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &uri, text(&copy)]);
        qemu_img(&["compare", "-f", "raw", "-F", "qcow2", text(&image), text(&copy)]);
        let map = qemu_img(&["map", "--output=json", "-f", "raw", &uri]);
        assert!(map.contains(r#""data": false"#) && map.contains(r#""data": true"#), "{map}");
    });
}

#[test]
fn qemu_io_reads_writes_zeroes_discards_and_flushes() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let uri = server.uri("disk");
        let qemu_io = |commands: &[&str]| {
            let mut arguments = vec!["-f", "raw"];
            commands.iter().for_each(|command| arguments.extend(["-c", command]));
            arguments.push(&uri);
            run("qemu-io", "qemu-utils", &arguments)
        };
        qemu_io(&[
            "write -P 0xa5 0 1M",
            "write -f -P 0x5a 1M 64k",
            "write -z 512k 64k",
            "write -z -u -f 576k 64k",
            "discard 0 64k",
            "aio_write -P 0x11 4M 128k",
            "aio_write -P 0x22 5M 128k",
            "aio_flush",
            "flush",
        ]);
        let seen = qemu_io(&[
            "read -P 0 0 64k",
            "read -P 0xa5 64k 448k",
            "read -P 0 512k 128k",
            "read -P 0xa5 640k 384k",
            "read -P 0x5a 1M 64k",
            "read -P 0x11 4M 128k",
            "read -P 0x22 5M 128k",
            "read -P 0 2M 2M",
        ]);
        assert!(!seen.contains("Pattern verification failed"), "{seen}");
    });
}

#[test]
fn libnbd_finds_every_command_and_error_as_the_protocol_has_it() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        run_python(&server.socket_uri_in_python(), include_str!("clients/commands.py"));
    });
}

#[test]
fn libnbd_negotiates_option_by_option() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        run_python(&server.socket_uri_in_python(), include_str!("clients/options.py"));
    });
}

#[test]
fn fio_finds_what_it_wrote() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        let uri = format!("--uri={}", server.uri("disk"));
        let size = format!("--size={SIZE}");
        let common = ["--name=t", "--ioengine=nbd", &uri, &size, "--group_reporting", "--iodepth=16"];
        let verifying =
            ["--rw=randwrite", "--bs=8k", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"];
        run("fio", "fio", &[&common[..], &verifying].concat());
        let mixed = ["--rw=randrw", "--rwmixread=70", "--bssplit=512/30:8k/40:256k/30", "--io_size=64m"];
        run("fio", "fio", &[&common[..], &mixed].concat());
    });
}
