//! `qemu-nbd` as a store's server, for an image in any of QEMU's formats.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use rustix::process::Signal;
use testbed::program::{Program, Running};
use testbed::until;

/// A server of one image.
///
/// Dropping it kills it; the image stays.
#[derive(Debug)]
pub struct QemuNbd {
    server: Running,
    socket: PathBuf,
    image: PathBuf,
    format: &'static str,
}

impl QemuNbd {
    /// Makes an empty image of `bytes` in a folder, and serves it.
    ///
    /// # Errors
    /// If QEMU's tools are missing, or the server ends.
    pub fn start(folder: &Path, format: &'static str, bytes: u64) -> anyhow::Result<Self> {
        let (socket, image) = (folder.join("qemu-nbd.sock"), folder.join(format!("remote.{format}")));
        let create = Program::qemu_img().args(["create", "-q", "-f", format]);
        create.arg(&image).arg(bytes.to_string()).succeed()?;
        let mut server = Program::of_package("qemu-nbd", "qemu-utils")
            .args(["--persistent", "--shared=0", "--export-name=disk", "--discard=unmap", "--format", format])
            .arg("--socket")
            .arg(&socket)
            .arg(&image)
            .start()?;
        until("qemu-nbd serves", || {
            ensure!(server.is_running()?, "qemu-nbd has ended");
            Ok(UnixStream::connect(&socket).is_ok().then_some(()))
        })?;
        Ok(Self { server, socket, image, format })
    }

    /// Returns the URI of the export.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    /// Ends the server in order, checks the image, and returns a raw copy of its disk.
    ///
    /// # Errors
    /// The findings of `qemu-img check`, which does not check raw images.
    pub fn stop_and_check(self) -> anyhow::Result<PathBuf> {
        let Self { server, image, format, .. } = self;
        server.signal(Signal::TERM)?;
        server.wait()?.expect(0)?;
        let qemu_img = || Program::qemu_img();
        if format != "raw" {
            qemu_img().args(["check", "-q", "-f", format]).arg(&image).succeed()?;
        }
        let copy = image.with_extension("copy");
        qemu_img().args(["convert", "-f", format, "-O", "raw"]).args([&image, &copy]).succeed()?;
        Ok(copy)
    }
}
