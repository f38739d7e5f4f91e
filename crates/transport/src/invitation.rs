//! Pairs two hosts: one makes a token, the other redeems it.
//!
//! ```text
//!   inviter                                  the one who joins
//!     invite() ── token, on paper or by mail ──►  join()
//!     ◄── TLS, pinned to the inviter's identifier in the token ──
//!     ◄── Join: proof of the secret, name, links ────────────────
//!     checks the proof, stores the peer
//!     ─── Joined: proof of the secret, name, links ─────────────►  stores the peer
//! ```
//!
//! The secret is never sent: each side shows an HMAC of it over both identifiers and over a value that only this TLS connection
//! has. An invitation is for one host. That host may redeem it again until it is removed, since an answer may be lost.

mod book;
mod token;

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

use ring::hmac;
use tokio::time::timeout;
use tokio_rustls::TlsStream;

pub(crate) use book::{Book, Judgement};
pub use token::{GarbledToken, Token};

use crate::context::Context;
use crate::dial;
use crate::frame::{Control, JoinReply, JoinRequest, Refusal, WireLink};
use crate::greeting::{HandshakeError, RefusalReason, Wire};
use crate::host_id::HostId;
use crate::identity;
use crate::own_networks;
use crate::peer::{LINKS_MAX, Link, Peer};

const EXPORT_LABEL: &[u8] = b"EXPORTER-sterna-join";

/// Names an invitation of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InvitationId(pub [u8; 16]);

/// The side that a proof is of, so that it cannot be sent back.
#[derive(Clone, Copy)]
enum Side {
    Joiner,
    Inviter,
}

pub(crate) fn invite(
    context: &Context,
    listening: &[SocketAddr],
    now: SystemTime,
    lifetime: Duration,
) -> Result<Token, JoinError> {
    let own = own_networks::addresses();
    let told = |link: Link| match link.address.parse() {
        Ok(address) => own_networks::told(address, &own).iter().map(ToString::to_string).collect(),
        // A host's name.
        Err(_) => vec![link.address],
    };
    let mut addresses: Vec<String> = own_links(context, listening).into_iter().flat_map(told).collect();
    addresses.truncate(LINKS_MAX);
    if addresses.is_empty() {
        return Err(JoinError::NotListening);
    }
    let mut book = context.invitations.lock().unwrap_or_else(PoisonError::into_inner);
    let (invitation, secret) = book.add(now, now + lifetime).ok_or(JoinError::TooManyInvitations)?;
    Ok(Token { inviter: context.id(), invitation, secret, expires: now + lifetime, addresses })
}

pub(crate) async fn join(
    context: &Context,
    listening: &[SocketAddr],
    token: &Token,
) -> Result<Peer, JoinError> {
    if token.inviter == context.id() {
        return Err(JoinError::Own);
    }
    if token.expires < SystemTime::now() {
        return Err(JoinError::Expired);
    }
    let mut last = None;
    for address in &token.addresses {
        match timeout(context.settings.limits.handshake_max, join_at(context, listening, token, address))
            .await
        {
            Ok(Ok(peer)) => return Ok(peer),
            // The host itself has refused: it would do so at its other addresses too.
            Ok(Err(error @ HandshakeError::Refused { .. })) => return Err(JoinError::of(address, error)),
            Ok(Err(error)) => last = Some((address, error)),
            Err(_) => last = Some((address, HandshakeError::Timeout)),
        }
    }
    Err(last.map_or(JoinError::NotListening, |(address, error)| JoinError::of(address, error)))
}

async fn join_at(
    context: &Context,
    listening: &[SocketAddr],
    token: &Token,
    address: &str,
) -> Result<Peer, HandshakeError> {
    let mut wire = dial::call(context, None, address, token.inviter).await?;
    let key = hmac::Key::new(hmac::HMAC_SHA256, &token.secret);
    let bytes = |side| proven_bytes(&wire, side, context.id(), token.inviter);
    let (ours, theirs) = (bytes(Side::Joiner)?, bytes(Side::Inviter)?);
    let request = JoinRequest {
        invitation: token.invitation,
        proof: tag(&key, &ours),
        name: context.settings.identity.name().to_owned(),
        links: wire_links(&links_as_seen(
            own_links(context, listening),
            wire.stream.get_ref().0.local_addr().ok(),
        )),
    };
    wire.write(&Control::Join(request)).await?;
    let Control::Joined(reply) = wire.read_control().await? else { return Err(HandshakeError::Unexpected) };
    if hmac::verify(&key, &theirs, &reply.proof).is_err() {
        let refusal = RefusalReason::InvitationProof;
        return Err(HandshakeError::Refused { by: wire.host, refusal });
    }
    peer(token.inviter, reply.name, reply.links).ok_or(HandshakeError::Unexpected)
}

pub(crate) async fn welcome(
    context: &Context,
    mut wire: Wire,
    request: JoinRequest,
) -> Result<(), HandshakeError> {
    let came = wire.host;
    let bytes = |side| proven_bytes(&wire, side, came, context.id());
    let (theirs, ours) = (bytes(Side::Joiner)?, bytes(Side::Inviter)?);
    let secret = match redeem(context, came, &theirs, request) {
        Ok(secret) => secret,
        Err(refusal) => {
            wire.refuse(refusal.clone()).await;
            return Err(HandshakeError::JoinRefused { came, refusal: refusal.into() });
        }
    };
    let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
    let seen = wire.stream.get_ref().0.local_addr().into_iter().collect::<Vec<_>>();
    let links = wire_links(&own_links(context, &seen));
    let name = context.settings.identity.name().to_owned();
    wire.write(&Control::Joined(JoinReply { proof: tag(&key, &ours), name, links })).await?;
    // An orderly end, so that the reply arrives.
    drop(tokio::io::AsyncWriteExt::shutdown(&mut wire.stream).await);
    Ok(())
}

/// Checks an invitation, stores the host that shows it, and notes the redemption, under one lock. So of two hosts that show the
/// same invitation one is stored, and a removal happens before or after all of it.
fn redeem(context: &Context, came: HostId, proven: &[u8], request: JoinRequest) -> Result<[u8; 32], Refusal> {
    let mut book = context.invitations.lock().unwrap_or_else(PoisonError::into_inner);
    let invitation = request.invitation;
    let secret = match book.judge(&invitation, came, SystemTime::now()) {
        Judgement::Good { secret } => secret,
        Judgement::Unknown => return Err(Refusal::InvitationUnknown),
        Judgement::Expired => return Err(Refusal::InvitationExpired),
        Judgement::Used => return Err(Refusal::InvitationUsed),
    };
    let key = hmac::Key::new(hmac::HMAC_SHA256, &secret);
    hmac::verify(&key, proven, &request.proof).map_err(|_| Refusal::InvitationProof)?;
    let peer = peer(came, request.name, request.links).ok_or(Refusal::Protocol)?;
    context.peers.joined(&peer, InvitationId(invitation)).map_err(|reason| {
        tracing::error!(peer = %came.short(), reason, "failed to store a host that has joined");
        Refusal::NotStored
    })?;
    book.redeemed(&invitation, came);
    Ok(secret)
}

/// Returns the bytes that both sides sign with the secret: this TLS connection, and both hosts.
fn proven_bytes(wire: &Wire, side: Side, joiner: HostId, inviter: HostId) -> Result<Vec<u8>, HandshakeError> {
    let label = EXPORT_LABEL;
    let exported = match &wire.stream {
        TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; 32], label, None),
        TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; 32], label, None),
    };
    let exported = exported.map_err(std::io::Error::other)?;
    let side = match side {
        Side::Joiner => b"joiner ",
        Side::Inviter => b"inviter",
    };
    Ok([&side[..], &exported, &joiner.0, &inviter.0].concat())
}

fn tag(key: &hmac::Key, bytes: &[u8]) -> [u8; 32] {
    let mut tag = [0; 32];
    tag.copy_from_slice(hmac::sign(key, bytes).as_ref());
    tag
}

/// Returns the links of this host: as configured, or the addresses that it listens on.
fn own_links(context: &Context, listening: &[SocketAddr]) -> Vec<Link> {
    let configured = &context.settings.links;
    if !configured.is_empty() {
        return configured.iter().take(LINKS_MAX).cloned().collect();
    }
    listening.iter().take(LINKS_MAX).map(|address| Link::new(address.to_string())).collect()
}

/// Replaces the unspecified address in links by this connection's local address, which the peer can reach.
fn links_as_seen(links: Vec<Link>, local: Option<SocketAddr>) -> Vec<Link> {
    let seen = |link: Link| match (link.address.parse::<SocketAddr>(), local) {
        (Ok(address), Some(local)) if address.ip().is_unspecified() => {
            Link { address: SocketAddr::new(local.ip(), address.port()).to_string(), ..link }
        }
        _ => link,
    };
    links.into_iter().map(seen).collect()
}

fn wire_links(links: &[Link]) -> Vec<WireLink> {
    let wire = |link: &Link| WireLink {
        address: link.address.clone(),
        speed_bits_per_second: link.speed_bits_per_second,
    };
    links.iter().map(wire).collect()
}

/// Makes a peer from its own description; returns `None` if that is invalid.
fn peer(id: HostId, name: String, links: Vec<WireLink>) -> Option<Peer> {
    identity::check_name(&name).ok()?;
    let link = |WireLink { address, speed_bits_per_second }| Link { address, speed_bits_per_second };
    let links: Vec<Link> = links.into_iter().map(link).collect();
    let is_valid = links.len() <= LINKS_MAX && links.iter().all(Link::is_plain);
    is_valid.then_some(Peer { id, name, links })
}

/// Why two hosts could not be paired.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// This host has no address that the other could call.
    #[error("this host does not listen for others: give it an address to listen on")]
    NotListening,
    /// The limit of open invitations is reached.
    #[error("too many invitations are open: wait until some have expired")]
    TooManyInvitations,
    /// The token is this host's own.
    #[error("this host made this invitation itself: redeem it on the other host")]
    Own,
    /// The token's time is over.
    #[error("the invitation's time is over: ask for a new one (or set the clocks right)")]
    Expired,
    /// The other host could not be reached, or has refused.
    #[error("cannot join the host at {address}: {reason}{}", advice(reason))]
    Handshake {
        /// The address that was tried last.
        address: String,
        /// The error of that attempt.
        reason: Box<HandshakeError>,
    },
    /// The endpoint was stopped meanwhile.
    #[error("this host is being stopped")]
    Stopped,
}

/// Returns what to look at if a host cannot be reached.
fn advice(reason: &HandshakeError) -> &'static str {
    match reason {
        HandshakeError::Io(error) if error.kind() == ErrorKind::ConnectionRefused => {
            "; is it listening? There: sterna host show, and hosts.listen in its configuration"
        }
        HandshakeError::Timeout => "; is the address right, and does every firewall let the port through?",
        HandshakeError::Io(error) if is_unreachable(error.kind()) => {
            "; is the address right, and does every firewall let the port through?"
        }
        _ => "",
    }
}

fn is_unreachable(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::TimedOut)
}

impl JoinError {
    fn of(address: &str, reason: HandshakeError) -> Self {
        Self::Handshake { address: address.to_owned(), reason: Box::new(reason) }
    }
}
