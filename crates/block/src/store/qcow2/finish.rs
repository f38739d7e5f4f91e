//! Requests that go on when nobody waits for them any more.
//!
//! A request that changes an image may not stop half-way: what it holds (claims on ranges, locks of tables) says that
//! it is under way, and the kernel goes on with what it was given. Where it waits for tables it also may not stand
//! still while its caller looks elsewhere, because others wait for the same tables: then it is a task of its own.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_channel::oneshot;

use crate::error::IoError;
use crate::executor::Handle;

/// Makes a future that, once it has begun, runs to its end: if it is dropped before, as a task of `handle`.
pub(super) fn finish<T: 'static>(handle: &Handle, request: impl Future<Output = T> + 'static) -> Finish<T> {
    Finish { request: Some(Box::pin(request)), handle: handle.clone(), has_begun: false }
}

/// Runs a request as a task of its own and waits for it.
///
/// # Errors
/// Its own, and [`IoError::Closed`] if the executor ends before it.
pub(super) async fn as_task<T: 'static>(
    handle: &Handle,
    request: impl Future<Output = Result<T, IoError>> + 'static,
) -> Result<T, IoError> {
    let (sender, receiver) = oneshot::channel();
    handle.spawn(async move {
        // The receiver is gone if nobody wants to know.
        let _ = sender.send(request.await);
    });
    receiver.await.map_err(|_| IoError::Closed)?
}

/// The future of [`finish`].
pub(super) struct Finish<T: 'static> {
    /// `None` once it has ended.
    request: Option<Pin<Box<dyn Future<Output = T>>>>,
    handle: Handle,
    has_begun: bool,
}

impl<T> Future for Finish<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        let Some(request) = &mut self.request else { return Poll::Pending };
        let polled = request.as_mut().poll(context);
        if polled.is_ready() {
            self.request = None;
        }
        polled
    }
}

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        if let Some(request) = self.request.take_if(|_| self.has_begun) {
            self.handle.spawn(async move {
                request.await;
            });
        }
    }
}
