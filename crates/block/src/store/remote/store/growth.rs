//! Growth of a volume on another server: the server's export has grown before, and the store connects anew.
//!
//! A server reports the size of an export when a client connects, and checks requests against that. So one more connection is
//! made to ask. If there is room, the session continues over connections with the new size.

use super::RemoteStore;
use crate::device::{ByteRange, Durability, IoFuture, ZeroMode};
use crate::error::IoError;
use crate::growth::Growth;

use rustix::io::Errno;

impl Growth for RemoteStore {
    /// Returns the present size on the server. Fails if the server takes no further connection.
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
            // The more is durable, the less is written again.
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
