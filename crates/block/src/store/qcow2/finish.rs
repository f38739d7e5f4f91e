//! Requests that continue when their future is dropped.
//!
//! A request that changes an image must not stop half-way: its claims on ranges and locks of tables show that it is in flight,
//! and the kernel continues with its data. A request that waits for tables must also not pause while its caller does other work,
//! because others wait for the same tables: it becomes a task of its own.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_channel::oneshot;

use crate::error::IoError;
use crate::executor::Handle;

/// Returns a future that, once begun, runs to its end: if it is dropped before, as a task of `handle`.
pub(super) fn finish<T: 'static>(handle: &Handle, request: impl Future<Output = T> + 'static) -> Finish<T> {
    Finish { request: Some(Box::pin(request)), handle: handle.clone(), has_begun: false }
}

/// Runs a request as a task of its own and waits for it. Fails with the request's error, or with [`IoError::Closed`] if the
/// executor ends before it.
pub(super) async fn as_task<T: 'static>(
    handle: &Handle,
    request: impl Future<Output = Result<T, IoError>> + 'static,
) -> Result<T, IoError> {
    let (sender, receiver) = oneshot::channel();
    handle.spawn(async move {
        let _ = sender.send(request.await);
    });
    receiver.await.map_err(|_| IoError::Closed)?
}

pub(super) struct Finish<T: 'static> {
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
