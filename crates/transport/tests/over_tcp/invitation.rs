//! Pairs two hosts by an invitation, and checks every way in which that is refused.

use std::time::Duration;

use crate::support::{Host, message};
use transport::{GarbledToken, JoinError, Priority, RefusalReason, Settings, Token};

const HOUR: Duration = Duration::from_secs(3600);

fn refusal(error: &JoinError) -> RefusalReason {
    match error {
        JoinError::Handshake { reason, .. } => match **reason {
            transport::HandshakeError::Refused { refusal, .. } => refusal,
            ref other => panic!("{other}"),
        },
        other => panic!("{other}"),
    }
}

#[test]
fn an_invitation_makes_two_hosts_known_to_each_other() {
    let (inviter, joiner) = (Host::start("inviter", |_| {}), Host::start("joiner", |_| {}));
    let token: Token = inviter.endpoint.invite(HOUR).unwrap().to_string().parse().unwrap();
    let peer = joiner.endpoint.join(&token).unwrap();
    assert_eq!((peer.id, peer.name.as_str()), (inviter.identity.id(), "inviter"));
    joiner.known.add(peer.clone());
    joiner.endpoint.session(&peer).send(message(Priority::Control, "hello", ""));
    assert_eq!(inviter.inbox.deliveries(1)[0].message.head(), "hello");
    let back = transport::Peers::find(&*inviter.known, joiner.identity.id()).unwrap();
    assert_eq!(back.name, "joiner");
    assert_eq!(back.links[0].address, joiner.endpoint.addresses()[0].to_string());
}

#[test]
fn an_invitation_is_good_for_one_host() {
    let [inviter, joiner, other] = ["inviter", "joiner", "other"].map(|name| Host::start(name, |_| {}));
    let token = inviter.endpoint.invite(HOUR).unwrap();
    joiner.endpoint.join(&token).unwrap();
    // Its answer may have been lost: the same host may ask again.
    joiner.endpoint.join(&token).unwrap();
    assert_eq!(refusal(&other.endpoint.join(&token).unwrap_err()), RefusalReason::InvitationUsed);
}

/// Returns the token of the same invitation with another secret, as somebody would forge it.
fn with_another_secret(token: &Token) -> Token {
    /// The text before the digits, and the offset of the secret in them: after the inviter and the invitation.
    const PREFIX: &str = "sterna-invitation-1-";
    const SECRET: std::ops::Range<usize> = 48..80;
    let text = token.to_string();
    let digits = text.strip_prefix(PREFIX).unwrap().as_bytes();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    let mut bytes: Vec<u8> = digits.chunks(2).map(byte).collect();
    bytes.truncate(bytes.len() - 4);
    bytes[SECRET].iter_mut().for_each(|byte| *byte ^= 0xff);
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let forged: Token = format!("{PREFIX}{digits}").parse().unwrap();
    assert_eq!((forged.inviter(), forged.invitation()), (token.inviter(), token.invitation()));
    assert!(forged != *token);
    forged
}

#[test]
fn who_knows_of_an_invitation_and_not_its_secret_is_refused_and_it_stays_good() {
    let [inviter, thief, joiner] = ["inviter", "thief", "joiner"].map(|name| Host::start(name, |_| {}));
    let token = inviter.endpoint.invite(HOUR).unwrap();
    let refused = thief.endpoint.join(&with_another_secret(&token)).unwrap_err();
    assert_eq!(refusal(&refused), RefusalReason::InvitationProof);
    assert!(transport::Peers::find(&*inviter.known, thief.identity.id()).is_none(), "it is stored");
    joiner.endpoint.join(&token).unwrap();
}

#[test]
fn a_host_that_was_removed_does_not_come_back_by_the_invitation_that_it_has_redeemed() {
    let [inviter, joiner] = ["inviter", "joiner"].map(|name| Host::start(name, |_| {}));
    let token = inviter.endpoint.invite(HOUR).unwrap();
    joiner.endpoint.join(&token).unwrap();
    inviter.endpoint.end_invitations_of(joiner.identity.id());
    assert_eq!(refusal(&joiner.endpoint.join(&token).unwrap_err()), RefusalReason::InvitationUsed);
    joiner.endpoint.join(&inviter.endpoint.invite(HOUR).unwrap()).unwrap();
}

#[test]
fn of_hosts_that_redeem_one_invitation_at_the_same_time_one_is_stored() {
    let inviter = Host::start("inviter", |_| {});
    let joiners = ["one", "two", "three", "four"].map(|name| Host::start(name, |_| {}));
    for _ in 0..5 {
        let token = inviter.endpoint.invite(HOUR).unwrap();
        let together = std::sync::Barrier::new(joiners.len());
        let join = |joiner: &Host| {
            together.wait();
            joiner.endpoint.join(&token).is_ok()
        };
        let join = &join;
        let joined = std::thread::scope(|scope| {
            let threads: Vec<_> = joiners.iter().map(|joiner| scope.spawn(move || join(joiner))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(|joined| *joined).count()
        });
        assert_eq!(joined, 1);
    }
}

#[test]
fn what_is_wrong_with_a_token_is_told_apart() {
    let [inviter, joiner, third] = ["inviter", "joiner", "third"].map(|name| Host::start(name, |_| {}));
    let token = inviter.endpoint.invite(Duration::ZERO).unwrap();
    assert!(matches!(joiner.endpoint.join(&token), Err(JoinError::Expired)));
    let token = inviter.endpoint.invite(HOUR).unwrap();
    assert!(matches!(inviter.endpoint.join(&token), Err(JoinError::Own)));
    let text = token.to_string();
    assert_eq!(text[..text.len() - 2].parse::<Token>(), Err(GarbledToken::Damaged));
    let elsewhere = token.clone().at(third.endpoint.addresses()[0].to_string());
    let error = joiner.endpoint.join(&elsewhere).unwrap_err().to_string();
    assert!(error.contains(&third.identity.id().to_string()), "{error}");
    let address = inviter.endpoint.addresses()[0];
    let Host { endpoint, known, identity, .. } = inviter;
    endpoint.stop();
    let _again = Host::start_as(identity, known, |settings: &mut Settings| settings.listen = vec![address]);
    assert_eq!(refusal(&joiner.endpoint.join(&token).unwrap_err()), RefusalReason::InvitationUnknown);
}

#[test]
fn a_host_that_does_not_listen_cannot_invite() {
    let host = Host::start("host", |settings| settings.listen.clear());
    assert!(matches!(host.endpoint.invite(HOUR), Err(JoinError::NotListening)));
}
