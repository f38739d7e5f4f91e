//! Tests of a hostile paired host. It tries every operation on every volume, number, channel and role, before, during and after
//! migrations of others and of its own. It must learn and change nothing that it has no right to.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "peer/evil.rs"]
mod evil;
#[path = "peer/share.rs"]
mod share;
#[path = "peer/victim.rs"]
mod victim;

use chronicle::Generation;
use evil::Evil;
use lane::FencingToken;
use lane::peer::head::{Address, Answered, Fault, Operation};
use migration::journal::{Forwarding, ImageFormat, Origin};
use migration::message::{ToSource, ToTarget};
use migration::vm::cold::Form;
use migration::wire::{
    Allocation, LeftBehind, Message, Offer, OfferedStrategy, OfferedVm, OfferedVolume, Sharing, Survey,
};
use migration::{Attempt, MigrationId, VolumeId};
use transport::{HostId, Session};
use victim::{SIZE, Victim, run};

const SECRET: u8 = 0x11;
const OTHER: u8 = 0x22;

/// Kinds of channels in their numbers.
const MIGRATION: u64 = 1;
const FORWARDING: u64 = 2;
const MACHINE: u64 = 3;

/// Returns the channel between `source` and `target` for a migration with this number at `source`.
fn channel(kind: u64, source: HostId, target: HostId, number: u64, position: u64) -> u64 {
    let direction = if source.0 > target.0 { 4 } else { 0 };
    position << 56 | number << 3 | direction | kind
}

/// Returns every operation on a store or a volume.
fn operations() -> [Operation; 9] {
    let (offset, length) = (4096, 4096);
    [
        Operation::Attach,
        Operation::Read { offset, length: 4096 },
        Operation::Write { offset, durable: true },
        Operation::Flush,
        Operation::Discard { offset, length },
        Operation::WriteZeroes { offset, length, keep_allocated: false, durable: false },
        Operation::Allocation { offset: 0, length: SIZE },
        Operation::Lease { answer: [7; 32] },
        Operation::LeaseIsHeld,
    ]
}

/// Tries every operation with every number and role, and expects a refusal each time.
fn try_everything(evil: &Evil, session: &Session, volumes: &[VolumeId]) {
    let (me, them) = (evil.id(), session.peer());
    let replicas = [0, 1].map(Address::Replica);
    let owners = volumes.iter().map(|volume| Address::Owner(volume.0));
    let addresses: Vec<_> = replicas.into_iter().chain(owners).collect();
    let mut calls = Vec::new();
    for number in [0, 1, 2, 900] {
        for (source, target) in [(me, them), (them, me)] {
            for kind in [MIGRATION, FORWARDING] {
                for position in [0, 1, 70] {
                    let channel = channel(kind, source, target, number, position);
                    for (address, operation) in addresses
                        .iter()
                        .flat_map(|address| operations().map(|operation| (*address, operation)))
                    {
                        calls.push(evil.call(session, channel, (address, operation), None));
                        let fence = Some(FencingToken::new(number, position));
                        calls.push(evil.call(session, channel, (address, operation), fence));
                    }
                }
                // Other messages on all channels. Some are answered with "nothing".
                for message in handover(number, volumes) {
                    evil.say(session, channel(kind, source, target, number, 0), &message);
                }
            }
            let machine = channel(MACHINE, source, target, number, 0);
            evil.call(session, machine, (addresses[0], Operation::Flush), None);
        }
    }
    for call in calls {
        let (outcome, payload) = evil.outcome(session, call);
        assert_eq!((outcome, payload.len()), (Err(Fault::Gone), 0));
    }
}

/// Everything that is said when volumes change hands.
fn handover(number: u64, volumes: &[VolumeId]) -> Vec<Message> {
    let migration = MigrationId(number);
    let attempt = Attempt(1);
    let generations: Vec<_> = volumes.iter().map(|volume| (*volume, Generation(9))).collect();
    let to_target = [
        ToTarget::Prepare(attempt),
        ToTarget::Abort(Attempt::ALL),
        ToTarget::Commit { attempt, generations: generations.clone() },
        ToTarget::Discard,
    ];
    let to_source = [
        ToSource::Prepared(attempt),
        ToSource::Query(attempt),
        ToSource::HandedBack { attempt, generations: generations.clone(), detail: String::new() },
        ToSource::Unknown,
        ToSource::Cancelled,
        ToSource::TakenByForce { generations },
    ];
    let to_target = to_target.map(|message| Message::ToTarget { migration, message });
    let to_source = to_source.map(|message| Message::ToSource { migration, message });
    to_target.into_iter().chain(to_source).collect()
}

fn offer(volume: VolumeId, name: &str, vm: Option<OfferedVm>) -> Offer {
    let volume = OfferedVolume {
        volume,
        name: name.to_owned(),
        size_bytes: SIZE,
        block_size_bytes: 65536,
        generation: Generation(0),
        format: ImageFormat::Raw,
        left_behind: LeftBehind::Nothing,
        origin: Origin::Unknown,
    };
    Offer {
        volumes: vec![volume],
        store: String::new(),
        format: None,
        allocation: Allocation::Thin,
        forwarding: Forwarding::WhileConnected,
        vm,
        sharing: Sharing::Refused,
        strategy: OfferedStrategy::default(),
    }
}

/// Offers a migration; tells whether it was taken, or why not.
fn offered(evil: &Evil, session: &Session, number: u64, offer: Offer) -> Result<(), String> {
    let migration = MigrationId(number);
    evil.open(session, &Message::Open { migration, offer });
    evil.opened(session, "an answer to an offer", |message| match message {
        Message::Accepted { migration: of, .. } if of == migration => Some(Ok(())),
        Message::Refused { migration: of, refusal } if of == migration => Some(Err(refusal.detail)),
        _ => None,
    })
}

fn surveyed(evil: &Evil, session: &Session, question: u64, survey: Survey) -> Vec<String> {
    evil.open(session, &Message::Survey { question, survey });
    evil.opened(session, "an answer to a look ahead", |message| match message {
        Message::Surveyed { question: of, surveyed } if of == question => {
            Some(surveyed.refusals.into_iter().map(|refusal| refusal.detail).collect())
        }
        _ => None,
    })
}

fn id(volume: &api::Volume) -> VolumeId {
    let digits = volume.id.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
    let bytes: Vec<u8> = digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect();
    VolumeId(bytes.try_into().unwrap())
}

#[test]
fn a_paired_host_gets_nothing_that_it_was_not_given_before_during_and_after_a_migration_of_others() {
    let (alpha, beta, evil) = (Victim::start("alpha"), Victim::start("beta"), Evil::new());
    let join = api::JoinHost { token: alpha.invite(), address: None, allow_machines: None };
    run(beta.client.join_host(&join)).unwrap();
    let [secret, other] = [alpha.volume("secret", SECRET), alpha.volume("other", OTHER)];
    let volumes = [id(&secret), id(&other)];
    let sessions = [&alpha, &beta].map(|victim| evil.join(&victim.invite()).unwrap());
    let attack = || sessions.iter().for_each(|session| try_everything(&evil, session, &volumes));
    attack();
    assert!(alpha.refused("evil") > 0 && beta.refused("evil") > 0);
    // It is so slow that the attack happens during it.
    let order = r#"{"to": "beta", "bandwidth_bytes_per_second": 1048576}"#;
    let moving = run(alpha.client.migrate("secret", &serde_json::from_str(order).unwrap())).unwrap();
    attack();
    let mut seen = moving;
    while seen.state == api::MigrationState::Running {
        let watch = api::Watch { after: Some(seen.change), wait_ms: 1000 };
        seen = run(alpha.client.migration(&seen.id, watch)).unwrap();
    }
    assert_eq!(seen.state, api::MigrationState::Moved, "{seen:?}");
    attack();
    beta.check("secret", SECRET);
    alpha.check("other", OTHER);
    let honest = run(beta.client.peer("alpha")).unwrap();
    assert_eq!(honest.refused_requests, 0, "an honest host is not refused");
}

#[test]
fn what_a_host_brings_gives_it_a_right_to_that_alone_and_as_long_as_it_brings_it() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let secret = id(&alpha.volume("secret", SECRET));
    let session = evil.join(&alpha.invite()).unwrap();
    let (me, them, own) = (evil.id(), session.peer(), VolumeId([0xE7; 16]));
    assert_eq!(offered(&evil, &session, 5, offer(own, "own", None)), Ok(()));
    let line = channel(MIGRATION, me, them, 5, 0);
    let write = Operation::Write { offset: 0, durable: false };
    let may = |channel, address| evil.ask(&session, channel, (address, write)).0;
    assert_eq!(may(line, Address::Replica(0)), Ok(Answered::Done));
    for address in [Address::Replica(1), Address::Owner(secret.0), Address::Owner(own.0)] {
        assert_eq!(may(line, address), Err(Fault::Gone), "{address:?}");
    }
    let not_its_own = [
        channel(MIGRATION, me, them, 5, 1),
        channel(MIGRATION, them, me, 5, 0),
        channel(MIGRATION, me, them, 6, 0),
        channel(FORWARDING, me, them, 5, 0),
    ];
    for channel in not_its_own {
        assert_eq!(may(channel, Address::Replica(0)), Err(Fault::Gone), "{channel:#x}");
    }
    // An existing volume cannot be offered, nor under another name.
    assert!(offered(&evil, &session, 6, offer(secret, "secret", None)).is_err());
    // It ends its own migration, but its channel is still open.
    let migration = MigrationId(5);
    evil.say(&session, line, &Message::ToTarget { migration, message: ToTarget::Discard });
    evil.wait(&session, "the end", |_, _, payload| {
        let message = migration::wire::decode(payload).ok()?;
        matches!(message, Message::ToSource { message: ToSource::Discarded { .. }, .. }).then_some(())
    });
    assert_eq!(may(line, Address::Replica(0)), Err(Fault::Gone));
    alpha.check("secret", SECRET);
}

#[test]
fn a_look_ahead_gives_no_identity_away() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let secret = id(&alpha.volume("secret", SECRET));
    let session = evil.join(&alpha.invite()).unwrap();
    let asks = alpha.client.clone();
    let plan = std::thread::spawn(move || {
        let order = serde_json::from_str(r#"{"to": "evil"}"#).unwrap();
        run(asks.plan_migration("secret", &order)).map(drop)
    });
    let (question, told) = evil.opened(&session, "a look ahead", |message| match message {
        Message::Survey { question, survey } => Some((question, survey.offer.volumes[0].volume)),
        _ => None,
    });
    assert_ne!(told, secret);
    evil.open(&session, &Message::Surveyed { question, surveyed: migration::wire::Surveyed::default() });
    plan.join().unwrap().unwrap();
    try_everything(&evil, &session, &[told, secret]);
    alpha.check("secret", SECRET);
}

#[test]
fn a_host_that_may_bring_no_machines_learns_nothing_of_files() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let session = evil.join(&alpha.invite()).unwrap();
    let path = alpha.file("there", b"1234").display().to_string();
    let ask = |question, path: &str, bytes: u64| {
        let file = format!(
            r#"{{"option":"-cdrom","path":"{path}","used":"WhileItRuns","bytes":{bytes},"hash":""}}"#
        );
        let head = format!(
            r#"{{"name":"m","definition":"","files":[],"needs":{{"only_files":true,"files":[{file}]}}}}"#
        );
        let length = u32::try_from(head.len()).unwrap();
        let vm = [&1_u32.to_le_bytes()[..], &length.to_le_bytes(), head.as_bytes()].concat();
        let survey = Survey { offer: offer(VolumeId([3; 16]), "v", None), held_bytes: vec![0], vm };
        surveyed(&evil, &session, question, survey)
    };
    let [there, gone, wrong] = [ask(1, &path, 4), ask(2, "/nowhere", 4), ask(3, &path, 5)];
    assert_eq!(there.len(), 1, "{there:?}");
    assert!(there[0].contains("--allow-machines"), "{there:?}");
    assert_eq!((&gone, &wrong), (&there, &there));
    let machine = Some(OfferedVm { name: "m".to_owned(), form: Form::Live });
    let refused = offered(&evil, &session, 1, offer(VolumeId([3; 16]), "v", machine));
    assert_eq!(refused, Err(there[0].clone()));
    // The request of a host with permission is examined.
    run(alpha.client.set_peer("evil", &api::SetPeer { allow_machines: Some(true), addresses: None }))
        .unwrap();
    assert!(!ask(4, &path, 4).contains(&there[0]));
}

#[test]
fn a_host_that_was_removed_does_not_come_back_by_its_invitation() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let token = alpha.invite();
    evil.join(&token).unwrap();
    // The first answer may have been lost.
    evil.join(&token).unwrap();
    run(alpha.client.remove_peer("evil", api::RemovePeer { force: true })).unwrap();
    let again = evil.join(&token).map(drop);
    assert!(again.as_ref().is_err_and(|error| error.contains("redeemed already")), "{again:?}");
    assert_eq!(run(alpha.client.peers()).unwrap(), []);
}

#[test]
fn a_host_that_floods_takes_nothing_from_others() {
    let (alpha, evil) = (Victim::start("alpha"), Evil::new());
    let secret = id(&alpha.volume("secret", SECRET));
    let session = evil.join(&alpha.invite()).unwrap();
    let write = (Address::Owner(secret.0), Operation::Write { offset: 0, durable: true });
    let mut last = 0;
    for number in 0..20_000_u64 {
        let line = channel(FORWARDING, evil.id(), session.peer(), number % 999, number % 256);
        last = evil.call(&session, line, write, None);
        if number % 100 == 0 {
            let survey = Survey { offer: offer(secret, "secret", None), held_bytes: vec![0], vm: Vec::new() };
            evil.open(&session, &Message::Survey { question: number, survey });
            evil.open(
                &session,
                &Message::Open { migration: MigrationId(number), offer: offer(secret, "secret", None) },
            );
        }
    }
    // Another user's volume meanwhile.
    alpha.volume("other", OTHER);
    assert_eq!(evil.outcome(&session, last).0, Err(Fault::Gone));
    alpha.check("secret", SECRET);
    alpha.check("other", OTHER);
    assert!(alpha.refused("evil") >= 19_000, "{}", alpha.refused("evil"));
}
