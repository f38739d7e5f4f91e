//! How a volume on another server becomes larger: the server's export has grown before, and we connect anew.
//!
//! A server tells the size of an export to who connects, and judges requests by what it told. So a connection more is
//! made to ask; if there is room, the session goes on over connections that know of it.

use super::RemoteStore;
use crate::device::{ByteRange, Durability, IoFuture, ZeroMode};
use crate::error::IoError;
use crate::growth::Growth;

use rustix::io::Errno;

impl Growth for RemoteStore {
    /// What the server says now. One that takes no further connection does not tell.
    fn capacity(&self) -> IoFuture<'_, Option<u64>> {
        Box::pin(async move { Ok(Some(self.link.dial().await?.terms().size)) })
    }

    fn prepare(&self, size: u64) -> IoFuture<'_, ()> {
        Box::pin(async move {
            let now = self.geometry.get();
            if now.read_only {
                return Err(IoError::ReadOnly);
            }
            let lines = self.link.dial().await?;
            if lines.terms().size < size {
                return Err(IoError::os("grow", Errno::FBIG));
            }
            // The less is not durable, the less is written again.
            self.flush_in_time().await?;
            self.link.renew(lines, size).await?;
            let new = ByteRange::new(now.size, size - now.size);
            self.zero_checked(new, ZeroMode::MayUnmap, Durability::Volatile).await?;
            self.flush_in_time().await
        })
    }

    fn show(&self, size: u64) {
        self.geometry.show(size);
    }

    fn undo(&self) -> IoFuture<'_, ()> {
        self.link.expect_size(self.geometry.size());
        Box::pin(std::future::ready(Ok(())))
    }
}
