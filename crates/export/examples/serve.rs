//! Serves an image file or memory at a unix socket, for measurements and manual trials of clients. Call it as `serve SOCKET
//! ring|threads IMAGE`, or as `serve SOCKET ring|threads BYTES` for a disk in memory.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use block::engine::EngineChoice;
use block::store::file::FileStore;
use block::store::image::{Access as ImageAccess, Image};
use block::store::memory::MemoryStore;
use block::{BlockDevice, Executor};
use export::nbd::{Access, Export, Exports, Limits, Server};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, engine, disk] = &arguments[..] else { return Err("usage: serve SOCKET ENGINE DISK".into()) };
    let choice = if engine == "threads" { EngineChoice::Threads } else { EngineChoice::Ring };
    let (driver, engine) = block::engine::open(choice)?;
    let mut executor = Executor::new(driver);
    let device: Rc<dyn BlockDevice> = match disk.parse() {
        Ok(bytes) => Rc::new(MemoryStore::new(bytes)),
        Err(_) => {
            Rc::new(FileStore::new(Image::open(Path::new(disk), ImageAccess::ReadWrite)?, Rc::clone(&engine)))
        }
    };
    let (name, description) = ("disk".into(), disk.clone());
    let export = Export { name, description, device, connect: None, access: Access::ReadWrite };
    let server = Server::new(executor.handle(), engine, Exports::new([export]), Limits::STANDARD);
    server.serve(Arc::new(OwnedFd::from(UnixListener::bind(socket)?)));
    executor.run(std::future::pending::<()>());
    Ok(())
}
