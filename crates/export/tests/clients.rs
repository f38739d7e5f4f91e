//! Real clients, told apart by nothing but what they do: libnbd's tools and Python binding, QEMU's, fio's.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on has failed")]

mod support;

use std::path::Path;
use std::process::{Command, Output};

use export::nbd::Limits;
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
        run_python(&server, include_str!("clients/commands.py"));
    });
}

#[test]
fn libnbd_negotiates_option_by_option() {
    on_each_engine(|choice| {
        let server = Running::start(choice, Limits::STANDARD);
        run_python(&server, include_str!("clients/options.py"));
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

/// Runs a client, which must succeed, and returns what it printed.
#[track_caller]
fn run(program: &str, package: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output =
        output.unwrap_or_else(|error| panic!("run {program}: {error}; install the package {package}"));
    check(program, &output)
}

/// Runs a script with `nbd` imported, and `uri(NAME)` telling where an export is.
#[track_caller]
fn run_python(server: &Running, script: &str) {
    // The binding belongs to the system's own interpreter, whatever else is on the path.
    let python = "/usr/bin/python3";
    let prelude = format!(
        "try:\n    import nbd\nexcept ImportError:\n    raise SystemExit('install the package python3-libnbd')\n\
         def uri(name):\n    return 'nbd+unix:///' + name + '?socket={}'\n",
        server.socket().display()
    );
    run(python, "python3", &["-c", &format!("{prelude}{script}")]);
}

#[track_caller]
fn check(program: &str, output: &Output) -> String {
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} failed with {}:\n{out}\n{error}", output.status);
    out.into_owned()
}

/// An image of the size of the disk: data at the start, in the middle and at the end.
fn write_sparse_image(path: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(SIZE).unwrap();
    let data: Vec<u8> = (0..3_u32 << 20).map(|index| (index.wrapping_mul(40_503) >> 8) as u8).collect();
    for offset in [0, SIZE / 2 + 4096, SIZE - data.len() as u64] {
        file.write_all_at(&data, offset).unwrap();
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
