//! One connection, from greeting to end: negotiates, then lets [`exchange`] do the work.

mod exchange;

use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use block::{Buffer, IoError};

use crate::nbd::negotiation::{self, Agreement, INPUT_LENGTH_MAX, Negotiation, Step, encode_greeting};
use crate::nbd::server::{ConnectionPhase, Member, Shared, Stage};

/// Serves one connection to its end.
pub(super) async fn run(server: &Rc<Shared>, member: &Rc<Member>, socket: Arc<OwnedFd>) {
    // Replies go out whole, so there is nothing to wait for. A unix socket has no such option and needs none.
    let _ = rustix::net::sockopt::set_tcp_nodelay(&*socket, true);
    match negotiate_in_time(server, member, &socket).await {
        Ok(Some((agreement, first_bytes))) => {
            let name = agreement.export.name.clone();
            tracing::info!(export = %name, "NBD client connected");
            *member.phase.borrow_mut() = ConnectionPhase::Serving(name.clone());
            let ending = exchange::exchange(server, member, &socket, &agreement, &first_bytes).await;
            tracing::info!(export = %name, ?ending, "NBD client disconnected");
        }
        Ok(None) => {}
        Err(failure) => tracing::info!(%failure, "NBD negotiation failed"),
    }
    // Ends what is under way on the socket, so that its memory is freed; the peer may have done so before.
    let _ = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
}

/// Why a negotiation failed.
#[derive(Debug, thiserror::Error)]
enum NegotiationFailure {
    #[error("the connection broke: {0}")]
    Broken(IoError),
    #[error("the client broke the protocol: {0}")]
    Violation(negotiation::Violation),
    #[error("the client took too long")]
    TimedOut,
}

/// Negotiates, unless the deadline or the server's end comes first; `None` if client or server has taken its leave.
async fn negotiate_in_time(
    server: &Shared,
    member: &Member,
    socket: &Arc<OwnedFd>,
) -> Result<Option<(Agreement, Vec<u8>)>, NegotiationFailure> {
    let mut negotiating = pin!(negotiate(server, socket));
    let mut deadline = pin!(server.handle.sleep(server.limits.negotiation_timeout));
    poll_fn(|context| {
        member.wake_on_stage(context);
        if server.stage() != Stage::Serving {
            return Poll::Ready(Ok(None));
        }
        if let Poll::Ready(result) = negotiating.as_mut().poll(context) {
            return Poll::Ready(result);
        }
        deadline.as_mut().poll(context).map(|()| Err(NegotiationFailure::TimedOut))
    })
    .await
}

/// Negotiates; with the agreement come the bytes that the client has sent after it.
async fn negotiate(
    server: &Shared,
    socket: &Arc<OwnedFd>,
) -> Result<Option<(Agreement, Vec<u8>)>, NegotiationFailure> {
    use NegotiationFailure::{Broken, Violation};
    let engine = &*server.engine;
    let mut machine = Negotiation::new();
    let mut input = Vec::new();
    let mut output = Vec::new();
    encode_greeting(&mut output);
    loop {
        if !output.is_empty() {
            engine.send(socket, vec![Buffer::copy_of(&output)]).await.map_err(Broken)?;
            output.clear();
        }
        let (used, step) = machine.advance(&input, &server.exports, &mut output).map_err(Violation)?;
        input.drain(..used);
        match step {
            Step::Continue => {}
            Step::NeedBytes => {
                // What is kept never needs to grow beyond `INPUT_LENGTH_MAX`.
                let room = INPUT_LENGTH_MAX.saturating_sub(input.len()).max(1);
                let buffer = engine.buffers().take(room);
                let (buffer, count) = engine.receive(socket, buffer).await.map_err(Broken)?;
                if count == 0 {
                    return Ok(None);
                }
                input.extend_from_slice(&buffer.as_slice()[..count]);
            }
            Step::Agreed(agreement) => {
                if !output.is_empty() {
                    engine.send(socket, vec![Buffer::copy_of(&output)]).await.map_err(Broken)?;
                }
                return Ok(Some((agreement, input)));
            }
            Step::Aborted => {
                // The client may have left without waiting for this.
                let _ = engine.send(socket, vec![Buffer::copy_of(&output)]).await;
                return Ok(None);
            }
        }
    }
}
