//! One connection, from greeting to end: negotiates, then lets [`exchange`] do the work.

mod exchange;

use std::future::{Future, poll_fn};
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use block::{Buffer, IoError};

use self::exchange::Ending;

use crate::nbd::caller::Caller;
use crate::nbd::negotiation::{self, Agreement, INPUT_LENGTH_MAX, Negotiation, Step, TlsMode};
use crate::nbd::passing::{PassedConnection, PassedSession};
use crate::nbd::protocol::negotiation::encode_greeting;
use crate::nbd::server::{ConnectionPhase, Member, Shared, Stage};
use crate::nbd::stream::{Stream, TlsFailure};
use crate::nbd::tls::Encryption;

/// Time to end a negotiation when connections are passed on: guests wait meanwhile.
const PASSING_WAIT: Duration = Duration::from_millis(50);

pub(super) async fn run(
    server: &Rc<Shared>,
    member: &Rc<Member>,
    socket: &Arc<OwnedFd>,
    encryption: &Encryption,
) {
    let plain = Stream::Plain(Rc::clone(&server.engine), Arc::clone(socket));
    match negotiate_in_time(server, member, plain, encryption).await {
        Ok(Some(negotiated)) => {
            let encrypted = negotiated.stream.is_encrypted();
            tracing::info!(export = %negotiated.agreement.export.name, encrypted, "NBD client connected");
            member.encrypted.set(encrypted);
            return use_export(server, member, socket, negotiated).await;
        }
        Ok(None) => {}
        Err(failure) => tracing::info!(%failure, "NBD negotiation failed"),
    }
    close(socket);
}

/// Continues a connection that another server has passed on, and serves it to its end.
pub(super) async fn take_up(
    server: &Rc<Shared>,
    member: &Rc<Member>,
    socket: &Arc<OwnedFd>,
    session: PassedSession,
) {
    let export = session.export.clone();
    match session.agree_again(&server.exports) {
        Ok((agreement, first_bytes)) => {
            tracing::info!(%export, unread = first_bytes.len(), "NBD client adopted");
            let stream = Stream::Plain(Rc::clone(&server.engine), Arc::clone(socket));
            use_export(server, member, socket, Negotiated { agreement, stream, first_bytes }).await;
        }
        Err(reason) => {
            tracing::warn!(%export, %reason, "an NBD client has to connect again");
            close(socket);
        }
    }
}

/// Serves an export to a client, until the client ends that or is passed on.
async fn use_export(
    server: &Rc<Shared>,
    member: &Rc<Member>,
    socket: &Arc<OwnedFd>,
    Negotiated { agreement, stream, first_bytes }: Negotiated,
) {
    let name = agreement.export.name.clone();
    *member.phase.borrow_mut() = ConnectionPhase::Serving(name.clone());
    let caller = Caller::new(Arc::clone(socket));
    let ending = exchange::exchange(server, member, &stream, (&agreement, caller), &first_bytes).await;
    if let Some(Ending::PassedOn(unread)) = ending {
        match socket.try_clone() {
            Ok(passed) => {
                let answered = member.requests_answered.get();
                let session = PassedSession::of(&agreement, unread.0, answered);
                tracing::debug!(export = %name, "NBD client handed over");
                let connection = PassedConnection { socket: passed, session: Some(session) };
                return server.passed.borrow_mut().push(connection);
            }
            Err(error) => tracing::warn!(export = %name, %error, "an NBD client has to connect again"),
        }
        return close(socket);
    }
    say_goodbye(server, member, &stream).await;
    tracing::info!(export = %name, ?ending, "NBD client disconnected");
    close(socket);
}

/// Ends all operations on the socket, so that their memory is freed; the peer may have done so before.
fn close(socket: &OwnedFd) {
    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
}

struct Negotiated {
    agreement: Agreement,
    stream: Stream,
    first_bytes: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
enum NegotiationFailure {
    #[error("the connection broke: {0}")]
    Broken(IoError),
    #[error("the client broke the protocol: {0}")]
    Violation(negotiation::Violation),
    #[error("the client sent more than it may before TLS")]
    EarlyBytes,
    #[error(transparent)]
    Tls(#[from] TlsFailure),
    #[error("the client took too long")]
    TimedOut,
}

/// Negotiates, unless the deadline or the server's end comes first. Returns `None` if client or server has ended it.
async fn negotiate_in_time(
    server: &Shared,
    member: &Member,
    plain: Stream,
    encryption: &Encryption,
) -> Result<Option<Negotiated>, NegotiationFailure> {
    let mut negotiating = pin!(negotiate(server, plain, encryption));
    let mut deadline = pin!(server.handle.sleep(server.limits.negotiation_timeout));
    let mut passing = None;
    poll_fn(|context| {
        member.wake_on_stage(context);
        match server.stage() {
            Stage::Serving => {}
            // Most negotiations end in a moment, and then another server continues.
            Stage::Passing => {
                let passing = passing.get_or_insert_with(|| Box::pin(server.handle.sleep(PASSING_WAIT)));
                if passing.as_mut().poll(context).is_ready() {
                    return Poll::Ready(Ok(None));
                }
            }
            Stage::Draining | Stage::Closed => return Poll::Ready(Ok(None)),
        }
        if let Poll::Ready(result) = negotiating.as_mut().poll(context) {
            return Poll::Ready(result);
        }
        deadline.as_mut().poll(context).map(|()| Err(NegotiationFailure::TimedOut))
    })
    .await
}

/// Negotiates, at first on a plain stream.
async fn negotiate(
    server: &Shared,
    mut stream: Stream,
    encryption: &Encryption,
) -> Result<Option<Negotiated>, NegotiationFailure> {
    use NegotiationFailure::{Broken, EarlyBytes, Tls, Violation};
    let mut machine = Negotiation::with_tls(match encryption {
        Encryption::Off => TlsMode::Off,
        Encryption::Offered(_) => TlsMode::Offered,
        Encryption::Required(_) => TlsMode::Required,
    });
    let mut input = Vec::new();
    let mut output = Vec::new();
    encode_greeting(&mut output);
    loop {
        if !output.is_empty() {
            stream.send(vec![Buffer::copy_of(&output)]).await.map_err(Broken)?;
            output.clear();
        }
        let (used, step) = machine.advance(&input, &server.exports, &mut output).map_err(Violation)?;
        input.drain(..used);
        match step {
            Step::Continue => {}
            Step::NeedBytes => {
                // `input` never needs to grow beyond `INPUT_LENGTH_MAX`.
                let room = INPUT_LENGTH_MAX.saturating_sub(input.len()).max(1);
                let buffer = server.engine.buffers().take(room);
                let (buffer, count) = stream.receive(buffer).await.map_err(Broken)?;
                if count == 0 {
                    return Ok(None);
                }
                input.extend_from_slice(&buffer.as_slice()[..count]);
            }
            Step::StartTls => {
                let (Encryption::Offered(credentials) | Encryption::Required(credentials)) = encryption
                else {
                    return Err(Tls(TlsFailure::Begun));
                };
                // N.B. Bytes from before the handshake may be anybody's, and must not count as encrypted.
                if !input.is_empty() {
                    return Err(EarlyBytes);
                }
                stream.send(vec![Buffer::copy_of(&output)]).await.map_err(Broken)?;
                output.clear();
                stream = stream.begin_tls(credentials.accept().map_err(TlsFailure::from)?).await?;
                machine.begin_tls();
            }
            Step::Agreed(agreement) => {
                if !output.is_empty() {
                    stream.send(vec![Buffer::copy_of(&output)]).await.map_err(Broken)?;
                }
                return Ok(Some(Negotiated { agreement, stream, first_bytes: input }));
            }
            Step::Aborted => {
                // The client may have left without waiting for this.
                let _ = stream.send(vec![Buffer::copy_of(&output)]).await;
                let _ = stream.end().await;
                return Ok(None);
            }
        }
    }
}

/// Ends an encrypted stream in order; a client that does not read keeps its place for a limited time.
async fn say_goodbye(server: &Shared, member: &Member, stream: &Stream) {
    if !stream.is_encrypted() {
        return;
    }
    let mut ending = pin!(stream.end());
    let mut deadline = pin!(server.handle.sleep(server.limits.linger_timeout));
    poll_fn(|context| {
        member.wake_on_stage(context);
        let is_over = server.stage() == Stage::Closed
            || ending.as_mut().poll(context).is_ready()
            || deadline.as_mut().poll(context).is_ready();
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}
