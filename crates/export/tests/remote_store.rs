//! Sterna's server and its client of it: a remote store on an export keeps the contract of a device, even when its
//! server is restarted meanwhile.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use block::conformance::Suite;
use block::engine::{self, Engine, EngineChoice};
use block::filter::align::Align;
use block::store::image;
use block::store::remote::NbdUri;
use block::{BlockDevice, Buffer, Durability, Executor, FileStore, Handle, Image, RemoteImage, RemoteStore};
use export::nbd::{Access, Export, Exports, Limits, Server};
use futures_channel::oneshot;
use futures_util::future::{join, join_all};

struct Running {
    socket: PathBuf,
    image: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(folder: &Path, size: u64) -> Self {
        let (socket, image) = (folder.join("socket"), folder.join("image"));
        drop(Image::create(&image, size).unwrap());
        let mut server = Self { socket, image, stop: None, thread: None };
        server.serve();
        server
    }

    fn serve(&mut self) {
        // Bound here, so that clients can connect from now on.
        let listener = Arc::new(OwnedFd::from(UnixListener::bind(&self.socket).unwrap()));
        let path = self.image.clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let (driver, engine) = engine::open(EngineChoice::Auto).unwrap();
            let mut executor = Executor::new(driver);
            let handle = executor.handle();
            // The last server's requests may be on their way to the disk.
            let image =
                Image::open_waiting(&path, block::Access::ReadWrite, |_| image::Patience::Wait).unwrap();
            let store = Rc::new(FileStore::new(image, Rc::clone(&engine)));
            let device = Rc::new(Align::new(store, engine.buffers().clone(), handle.clone()));
            let name = "disk".to_owned();
            let export =
                Export { name, description: String::new(), device, connect: None, access: Access::ReadWrite };
            let server = Server::new(handle, engine, Exports::new([export]), Limits::STANDARD);
            server.serve(listener);
            executor.run(async move {
                let _ = stopped.await;
                server.shutdown(Duration::from_secs(10)).await;
            });
        });
        (self.stop, self.thread) = (Some(stop), Some(thread));
    }

    fn restart(&mut self) {
        self.end();
        std::fs::remove_file(&self.socket).unwrap();
        self.serve();
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    fn store(&self, engine: &Rc<dyn Engine>, handle: &Handle) -> Rc<RemoteStore> {
        let uri = NbdUri::unix(&self.socket, "disk");
        let image = RemoteImage::connect(&uri, block::Access::ReadWrite).unwrap();
        Rc::new(RemoteStore::new(image, Rc::clone(engine), handle.clone()))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
    }
}

fn on_each_engine<F: Future<Output = ()> + 'static>(body: impl Fn(Rc<dyn Engine>, Handle) -> F) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let Ok((driver, engine)) = engine::open(choice) else {
            omission::kernel_lacks("io_uring");
            continue;
        };
        let mut executor = Executor::new(driver);
        let handle = executor.handle();
        executor.run(body(engine, handle));
    }
}

#[test]
fn a_remote_store_on_our_own_export_keeps_the_contract() {
    on_each_engine(|engine, handle| async move {
        let kept = RefCell::new(Vec::new());
        let make_handle = handle.clone();
        let factory = |size| {
            let folder = tempfile::tempdir().unwrap();
            let server = Running::start(folder.path(), size);
            let store = server.store(&engine, &make_handle);
            kept.borrow_mut().push((server, folder));
            store as Rc<dyn BlockDevice>
        };
        let name = format!("remote store on our export on {}", engine.name());
        Suite::new(&name, handle, factory).sizes(&[(256 << 10) + 512, (96 << 10) + 1]).run().await;
    });
}

#[test]
fn nothing_is_lost_when_our_server_is_started_again_in_the_middle() {
    on_each_engine(|engine, handle| async move {
        const BLOCKS: u64 = 64;
        let folder = tempfile::tempdir().unwrap();
        let mut server = Running::start(folder.path(), 16 << 20);
        let store = server.store(&engine, &handle);
        for round in 1..=5_u8 {
            let writes = (0..BLOCKS).map(|block| {
                store.write(block * 65_536, Buffer::copy_of(&[round; 65_536]), Durability::Volatile)
            });
            // Polled in turn: the writes are in flight when the server stops.
            let restart = async { server.restart() };
            let (written, ()) = join(join_all(writes), restart).await;
            assert!(written.iter().all(Result::is_ok), "round {round}: {written:?}");
            let reads = (0..BLOCKS).map(|block| store.read(block * 65_536, Buffer::zeroed(65_536)));
            for (read, block) in join_all(reads).await.into_iter().zip(0..) {
                let read = read.unwrap();
                assert!(read.as_slice().iter().all(|byte| *byte == round), "round {round}, block {block}");
            }
        }
        assert_eq!(store.flush().await, Ok(()));
        drop(store);
        server.end();
        let bytes = std::fs::read(folder.path().join("image")).unwrap();
        assert!(bytes[..BLOCKS as usize * 65_536].iter().all(|byte| *byte == 5));
    });
}
