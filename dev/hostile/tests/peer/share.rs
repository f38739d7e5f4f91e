//! Tests of a paired host that takes more than its share of places and names, and sends messages about volumes of others.

use std::time::{Duration, Instant};

use api::MigrationState;
use migration::message::{ToSource, ToTarget};
use migration::wire::Message;
use migration::{MigrationId, VolumeId};
use transport::Session;

use crate::evil::Evil;
use crate::victim::{Victim, run};
use crate::{MIGRATION, OTHER, SECRET, channel, offer, offered};

/// Longest time of any step, which only a hang reaches.
const PATIENCE: Duration = Duration::from_secs(60);
/// More migrations than this host's limit for its own orders.
const SILENT: u64 = 8;

fn own(number: u64) -> VolumeId {
    let mut id = [0xE7; 16];
    id[0] = number as u8;
    VolumeId(id)
}

/// Offers volumes and then sends nothing more.
fn offer_in_silence(evil: &Evil, session: &Session, numbers: std::ops::Range<u64>) {
    for number in numbers {
        let name = format!("silent{number}");
        assert_eq!(offered(evil, session, number, offer(own(number), &name, None)), Ok(()));
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

fn names(victim: &Victim) -> Vec<String> {
    run(victim.client.volumes()).unwrap().into_iter().map(|volume| volume.name).collect()
}

#[test]
fn a_hostile_host_keeps_no_order_of_this_host_waiting() {
    let (alpha, beta, evil) = (Victim::start("alpha"), Victim::start("beta"), Evil::new());
    let join = api::JoinHost { token: alpha.invite(), address: None, allow_machines: None };
    run(beta.client.join_host(&join)).unwrap();
    alpha.volume("secret", SECRET);
    let session = evil.join(&alpha.invite()).unwrap();
    offer_in_silence(&evil, &session, 0..SILENT);
    let order = serde_json::from_str(r#"{"to": "beta"}"#).unwrap();
    let mut seen = run(alpha.client.migrate("secret", &order)).unwrap();
    assert_ne!(seen.state, MigrationState::Queued, "{seen:?}");
    while seen.state == MigrationState::Running {
        let watch = api::Watch { after: Some(seen.change), wait_ms: 1000 };
        seen = run(alpha.client.migration(&seen.id, watch)).unwrap();
    }
    assert_eq!(seen.state, MigrationState::Moved, "{seen:?}");
    beta.check("secret", SECRET);
}

#[test]
fn what_a_removed_host_was_bringing_ends_and_gives_everything_back() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    alpha.volume("other", OTHER);
    let session = evil.join(&alpha.invite()).unwrap();
    offer_in_silence(&evil, &session, 0..SILENT);
    assert_eq!(names(&alpha).len(), 1 + SILENT as usize);
    run(alpha.client.remove_peer("evil", api::RemovePeer { force: true })).unwrap();
    until("the end of what it was bringing", || names(&alpha) == ["other"]);
    let all = run(alpha.client.migrations()).unwrap();
    assert!(all.iter().all(|migration| migration.state.has_ended()), "{all:?}");
    let said = all.iter().filter_map(|migration| migration.message.as_deref());
    assert_eq!(said.filter(|said| said.contains("the host \"evil\" was removed")).count(), SILENT as usize);
    // The names are free again for all hosts.
    alpha.volume("silent0", SECRET);
    let other = Evil::new();
    let session = other.join(&alpha.invite()).unwrap();
    offer_in_silence(&other, &session, 1..3);
    alpha.check("other", OTHER);
}

#[test]
fn more_than_its_share_is_refused_with_what_is_used_up() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let session = evil.join(&alpha.invite()).unwrap();
    let mut huge = offer(own(0), "huge", None);
    let volume = huge.volumes.remove(0);
    huge.volumes = (0..60)
        .map(|number| {
            let mut one = volume.clone();
            (one.volume, one.name) = (own(number), format!("huge{number}"));
            one
        })
        .collect();
    // Invalid names, and the name of another user's volume, take no place.
    alpha.volume("secret", SECRET);
    for name in ["\u{1b}[2J", "../secret", "", "a\nb", "secret"] {
        assert!(offered(&evil, &session, 100, offer(own(100), name, None)).is_err(), "{name:?}");
    }
    let mut refused = Vec::new();
    for number in 0..70 {
        let name = format!("silent{number}");
        if let Err(reason) = offered(&evil, &session, 200 + number, offer(own(number), &name, None)) {
            refused.push(reason);
        }
    }
    assert_eq!(refused.len(), 6, "{refused:?}");
    assert!(refused[0].contains("limits.peer_migrations"), "{refused:?}");
    assert!(offered(&evil, &session, 300, huge).is_err());
    assert_eq!(run(alpha.client.volumes()).unwrap().len(), 65);
    alpha.check("secret", SECRET);
}

#[test]
fn words_of_a_hostile_host_reach_nobody_as_they_are() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    alpha.volume("secret", SECRET);
    let session = evil.join(&alpha.invite()).unwrap();
    let client = alpha.client.clone();
    let ordered = std::thread::spawn(move || {
        let order = serde_json::from_str(r#"{"to": "evil"}"#).unwrap();
        run(client.migrate("secret", &order))
    });
    let detail = "no\n2026-01-01T00:00:00Z ERROR forged\u{1b}]0;x\u{7}\u{202e}".to_owned();
    // The preflight check finds no obstacle. The refusal of the offer has control characters.
    let question = evil.opened(&session, "a look ahead", |message| match message {
        Message::Survey { question, .. } => Some(question),
        _ => None,
    });
    evil.open(&session, &Message::Surveyed { question, surveyed: migration::wire::Surveyed::default() });
    let migration = evil.opened(&session, "an offer", |message| match message {
        Message::Open { migration, .. } => Some(migration),
        _ => None,
    });
    let refusal = migration::wire::Refusal { code: migration::wire::RefusalCode::Busy, detail };
    evil.open(&session, &Message::Refused { migration, refusal });
    let said = match ordered.join().unwrap() {
        Ok(migration) => format!("{migration:?}"),
        Err(error) => error.to_string(),
    };
    assert!(said.contains("forged") && !said.contains(['\n', '\u{1b}', '\u{7}', '\u{202e}']), "{said:?}");
    alpha.check("secret", SECRET);
}

#[test]
fn late_words_about_what_has_ended_change_nothing() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let session = evil.join(&alpha.invite()).unwrap();
    offer_in_silence(&evil, &session, 5..6);
    let line = channel(MIGRATION, evil.id(), session.peer(), 5, 0);
    let migration = MigrationId(5);
    evil.say(&session, line, &Message::ToTarget { migration, message: ToTarget::Discard });
    evil.wait(&session, "the end", |_, _, payload| {
        let message = migration::wire::decode(payload).ok()?;
        matches!(message, Message::ToSource { message: ToSource::Discarded { .. }, .. }).then_some(())
    });
    until("its name to be free", || names(&alpha).is_empty());
    // Another volume has this name now. The host has no right to the memory of a VM on it.
    alpha.volume("silent5", SECRET);
    for word in [ToTarget::Prepare(migration::Attempt(9)), ToTarget::Discard] {
        evil.say(&session, line, &Message::ToTarget { migration, message: word });
    }
    let memory = channel(crate::MACHINE, evil.id(), session.peer(), 5, 0);
    for head in [vec![1, 12, 1, b'x'], vec![1, 13, 16], vec![1], Vec::new(), vec![0xff; 300]] {
        evil.send(&session, memory, head, Vec::new());
    }
    alpha.volume("other", OTHER);
    alpha.check("silent5", SECRET);
}
