//! Runs real clients, and makes the images that they copy.

use std::path::Path;
use std::process::{Command, Output};

use super::SIZE;

#[track_caller]
pub(crate) fn run(program: &str, package: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output =
        output.unwrap_or_else(|error| panic!("run {program}: {error}; install the package {package}"));
    check(program, &output)
}

/// Runs a script with `nbd` imported. Its `uri(NAME)` returns an export's address by the Python expression `address`.
#[track_caller]
pub(crate) fn run_python(address: &str, script: &str) {
    // The binding belongs to the system's own interpreter, whatever else is on the path.
    let python = "/usr/bin/python3";
    let prelude = format!(
        "try:\n    import nbd\nexcept ImportError:\n    raise SystemExit('install the package python3-libnbd')\n\
         connect = nbd.NBD.connect_uri\n\
         def connect_with_certificates(handle, address):\n    \
             handle.set_uri_allow_local_file(True)\n    connect(handle, address)\n\
         nbd.NBD.connect_uri = connect_with_certificates\n\
         def uri(name):\n    return {address}\n"
    );
    run(python, "python3", &["-c", &format!("{prelude}{script}")]);
}

#[track_caller]
fn check(program: &str, output: &Output) -> String {
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} failed with {}:\n{out}\n{error}", output.status);
    out.into_owned()
}

/// Writes an image of the size of the disk: data at the start, in the middle and at the end.
pub(crate) fn write_sparse_image(path: &Path) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).unwrap();
    file.set_len(SIZE).unwrap();
    let data: Vec<u8> = (0..3_u32 << 20).map(|index| (index.wrapping_mul(40_503) >> 8) as u8).collect();
    for offset in [0, SIZE / 2 + 4096, SIZE - data.len() as u64] {
        file.write_all_at(&data, offset).unwrap();
    }
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
