//! The I/O engine of simulated lanes. They have neither files nor sockets, so it has only buffers.

use std::future::ready;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use block::engine::{AllocateMode, Engine, Interrupt, Received};
use block::{Buffer, BufferPool, ByteRange, Durability, IoError, IoFuture};

pub(super) struct NoFiles(BufferPool);

impl NoFiles {
    pub(super) fn engine(buffers: &BufferPool) -> Rc<dyn Engine> {
        Rc::new(Self(buffers.clone()))
    }
}

fn refused<T: 'static>() -> IoFuture<'static, T> {
    Box::pin(ready(Err(IoError::Unsupported)))
}

impl Engine for NoFiles {
    fn name(&self) -> &'static str {
        "simulated"
    }

    fn buffers(&self) -> &BufferPool {
        &self.0
    }

    fn read_at(&self, _: &Arc<OwnedFd>, _: u64, _: Buffer) -> IoFuture<'static, Buffer> {
        refused()
    }

    fn write_at(&self, _: &Arc<OwnedFd>, _: u64, _: Buffer, _: Durability) -> IoFuture<'static, ()> {
        refused()
    }

    fn sync(&self, _: &Arc<OwnedFd>) -> IoFuture<'static, ()> {
        refused()
    }

    fn allocate(&self, _: &Arc<OwnedFd>, _: AllocateMode, _: ByteRange) -> IoFuture<'static, ()> {
        refused()
    }

    fn accept(&self, _: &Arc<OwnedFd>) -> IoFuture<'static, OwnedFd> {
        refused()
    }

    fn receive(&self, _: &Arc<OwnedFd>, _: Buffer) -> IoFuture<'static, (Buffer, usize)> {
        refused()
    }

    fn receive_unless(&self, _: &Interrupt, _: &Arc<OwnedFd>, _: Buffer) -> IoFuture<'static, Received> {
        refused()
    }

    fn accept_unless(&self, _: &Interrupt, _: &Arc<OwnedFd>) -> IoFuture<'static, Option<OwnedFd>> {
        refused()
    }

    fn send(&self, _: &Arc<OwnedFd>, _: Vec<Buffer>) -> IoFuture<'static, ()> {
        refused()
    }

    fn run_blocking(&self, _: Box<dyn FnOnce() + Send>) -> IoFuture<'static, ()> {
        refused()
    }
}
