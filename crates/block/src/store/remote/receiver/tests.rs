//! Tests replies in pieces of every length, lying replies, and bytes that are no replies.

use futures_channel::oneshot;
use nbd_protocol::reply::Extent;
use nbd_protocol::{SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, error};
use proptest::prelude::*;

use super::*;
use crate::change::Change;
use crate::device::{ByteRange, Durability, ZeroMode};
use crate::store::remote::in_flight::{Answer, Failure};
use crate::store::remote::request::Request;

const CONTEXT: u32 = 7;

struct Scene {
    receiver: Receiver,
    in_flight: InFlight,
    completed: Vec<Completed>,
}

impl Scene {
    fn new(structured: bool) -> Self {
        let receiver = Receiver::new(structured);
        Self { receiver, in_flight: InFlight::default(), completed: Vec::new() }
    }

    fn insert(&mut self, request: &Request) -> u64 {
        let buffer = match request {
            Request::Read(range) => Some(Buffer::copy_of(&vec![0xEE; range.length as usize])),
            _ => None,
        };
        self.in_flight.insert(request, buffer, Some(CONTEXT), oneshot::channel().0)
    }

    fn read(&mut self, offset: u64, length: u64) -> u64 {
        self.insert(&Request::Read(ByteRange::new(offset, length)))
    }

    fn take(&mut self, bytes: &[u8], step: usize) -> Result<(), Violation> {
        let mut kept = Vec::new();
        for piece in bytes.chunks(step) {
            kept.extend_from_slice(piece);
            let taken = self.receiver.take(&kept, &mut self.in_flight, &mut self.completed)?;
            assert!(taken <= kept.len());
            kept.drain(..taken);
        }
        Ok(())
    }

    fn results(&mut self) -> Vec<Result<Answer, Failure>> {
        self.completed.drain(..).map(|completed| completed.result).collect()
    }
}

fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    let parts = [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data];
    parts.concat()
}

fn chunk(is_last: u16, kind: u16, cookie: u64, parts: &[&[u8]]) -> Vec<u8> {
    let payload = parts.concat();
    let mut bytes = STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&is_last.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    bytes.extend_from_slice(&payload);
    bytes
}

fn data(is_last: u16, cookie: u64, offset: u64, bytes: &[u8]) -> Vec<u8> {
    chunk(is_last, 1, cookie, &[&offset.to_be_bytes(), bytes])
}

fn hole(is_last: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    chunk(is_last, 2, cookie, &[&offset.to_be_bytes(), &length.to_be_bytes()])
}

fn extents(cookie: u64, context: u32, list: &[(u32, u32)]) -> Vec<u8> {
    let list: Vec<u8> = list
        .iter()
        .flat_map(|(length, state)| [length.to_be_bytes(), state.to_be_bytes()].concat())
        .collect();
    chunk(1, 5, cookie, &[&context.to_be_bytes(), &list])
}

#[test]
fn answers_in_any_order_and_in_pieces_of_any_length_reach_their_requests() {
    for step in [1, 2, 3, 7, 16, 100, 1 << 20] {
        let mut scene = Scene::new(true);
        let first = scene.read(4096, 300);
        let second = scene.read(0, 100);
        let flush = scene.insert(&Request::Flush);
        let described = scene.insert(&Request::Describe(ByteRange::new(0, 8192)));
        let bytes = [
            data(0, first, 4296, &[3; 100]),
            simple(flush, 0, &[]),
            hole(1, second, 0, 100),
            hole(0, first, 4196, 100),
            extents(described, CONTEXT, &[(4096, 0), (1 << 20, 3)]),
            data(0, first, 4096, &[1; 100]),
            chunk(1, 0, first, &[]),
        ];
        scene.take(&bytes.concat(), step).unwrap();
        let [Ok(Answer::Done), Ok(Answer::Data(zeroes)), Ok(Answer::Extents(told)), Ok(Answer::Data(read))] =
            &scene.results()[..]
        else {
            panic!("steps of {step}")
        };
        assert!(zeroes.is_zero());
        assert_eq!(told, &[Extent { length: 4096, state: 0 }, Extent { length: 1 << 20, state: 3 }]);
        assert_eq!(read.as_slice(), [vec![1; 100], vec![0; 100], vec![3; 100]].concat());
        assert_eq!(scene.in_flight.len(), 0);
    }
}

#[test]
fn simple_replies_bring_the_data_of_a_read_and_nothing_else() {
    let mut scene = Scene::new(false);
    let (read, failed, flush) = (scene.read(0, 64), scene.read(64, 64), scene.insert(&Request::Flush));
    let bytes =
        [simple(failed, error::EIO, &[]), simple(read, 0, &[9; 64]), simple(flush, error::ENOSPC, &[])];
    scene.take(&bytes.concat(), 5).unwrap();
    let [Err(Failure::Refused(error::EIO)), Ok(Answer::Data(buffer)), Err(Failure::Refused(error::ENOSPC))] =
        &scene.results()[..]
    else {
        panic!("the wrong answers")
    };
    assert_eq!(buffer.as_slice(), [9; 64]);
}

#[test]
fn an_error_among_chunks_fails_the_read_and_its_words_are_passed_over() {
    let mut scene = Scene::new(true);
    let read = scene.read(0, 100);
    let told =
        chunk(0, (1 << 15) + 2, read, &[&5_u32.to_be_bytes(), &[0, 5], b"moved", &50_u64.to_be_bytes()]);
    let second = chunk(0, (1 << 15) + 1, read, &[&28_u32.to_be_bytes(), &[0, 0]]);
    scene.take(&[data(0, read, 0, &[1; 50]), told, second, chunk(1, 0, read, &[])].concat(), 3).unwrap();
    assert!(matches!(scene.results()[..], [Err(Failure::Refused(5))]), "the first counts");
}

#[test]
fn what_was_changed_comes_with_the_answer_and_only_if_it_was() {
    let mut scene = Scene::new(true);
    let zeroes =
        |offset, durability| Change::Zero(ByteRange::new(offset, 4096), ZeroMode::MayUnmap, durability);
    let good = scene.insert(&Request::Change(zeroes(0, Durability::Volatile)));
    let bad = scene.insert(&Request::Change(zeroes(4096, Durability::Durable)));
    scene.take(&[simple(good, 0, &[]), simple(bad, error::EIO, &[])].concat(), 100).unwrap();
    let changes: Vec<_> = scene.completed.iter().map(|completed| completed.change.is_some()).collect();
    assert_eq!(changes, [true, false]);
}

#[test]
fn many_data_are_received_where_they_belong() {
    let mut scene = Scene::new(true);
    let memory = Buffer::zeroed(1 << 20).slice(4096, 200_000);
    let request = Request::Read(ByteRange::new(0, 200_000));
    let read = scene.in_flight.insert(&request, Some(memory), None, oneshot::channel().0);
    let reply = data(1, read, 0, &vec![5; 200_000]);
    scene.take(&reply[..128], 128).unwrap();
    // 100 bytes of data have come with the head.
    for length in [60_000, 99_900, 40_000] {
        let mut loan = scene.receiver.lend(&mut scene.in_flight).unwrap();
        loan.buffer.as_mut_slice().unwrap()[..length].fill(5);
        scene.receiver.give_back(loan, length, &mut scene.in_flight);
    }
    scene.take(&[], 1).unwrap();
    scene.receiver.take(&[], &mut scene.in_flight, &mut scene.completed).unwrap();
    let [Ok(Answer::Data(buffer))] = &scene.results()[..] else { panic!("it is not done") };
    assert!(buffer.len() == 200_000 && buffer.as_slice().iter().all(|byte| *byte == 5));
}

#[test]
fn lies_end_the_connection() {
    let check = |structured: bool, what: &str, lie: &dyn Fn(&mut Scene) -> Vec<u8>| {
        let mut scene = Scene::new(structured);
        let bytes = lie(&mut scene);
        assert!(scene.take(&bytes, 4096).is_err(), "{what}");
    };
    check(true, "a cookie of nobody", &|_| simple(3, 0, &[]));
    check(true, "an answer for the second time", &|scene| {
        let flush = scene.insert(&Request::Flush);
        [simple(flush, 0, &[]), simple(flush, 0, &[])].concat()
    });
    check(true, "the cookie of an earlier request in the same place", &|scene| {
        let flush = scene.insert(&Request::Flush);
        scene.take(&simple(flush, 0, &[]), 100).unwrap();
        assert_ne!(scene.insert(&Request::Flush), flush);
        simple(flush, 0, &[])
    });
    check(false, "a chunk that was not agreed on", &|scene| chunk(1, 0, scene.read(0, 10), &[]));
    check(true, "a simple reply with data", &|scene| simple(scene.read(0, 10), 0, &[0; 10]));
    check(true, "an error that is none", &|scene| {
        chunk(1, (1 << 15) + 1, scene.read(0, 10), &[&0_u32.to_be_bytes(), &[0, 0]])
    });
    for (offset, length) in [(0, 1), (4095, 2), (4096 + 99, 2), (5000, 1), (u64::MAX, 1), (u64::MAX - 1, 4)] {
        check(true, "data that was not asked for", &|scene| {
            data(1, scene.read(4096, 100), offset, &vec![0; length])
        });
        check(true, "a hole that was not asked for", &|scene| {
            hole(1, scene.read(4096, 100), offset, length as u32)
        });
    }
    check(true, "an endless hole", &|scene| hole(1, scene.read(0, 100), 0, u32::MAX));
    check(true, "the same data twice", &|scene| {
        let read = scene.read(0, 100);
        [data(0, read, 0, &[1; 80]), data(1, read, 0, &[1; 80])].concat()
    });
    check(true, "a read that is answered in part", &|scene| data(1, scene.read(0, 100), 0, &[1; 99]));
    check(true, "a read without data", &|scene| chunk(1, 0, scene.read(0, 100), &[]));
    check(true, "data for a flush", &|scene| data(1, scene.insert(&Request::Flush), 0, &[1; 9]));
    check(true, "extents for a read", &|scene| extents(scene.read(0, 100), CONTEXT, &[(1, 0)]));
    let describe = |scene: &mut Scene| scene.insert(&Request::Describe(ByteRange::new(0, 4096)));
    check(true, "extents of another context", &|scene| extents(describe(scene), CONTEXT + 1, &[(1, 0)]));
    check(true, "an empty extent", &|scene| extents(describe(scene), CONTEXT, &[(1, 0), (0, 0)]));
    check(true, "no extents", &|scene| chunk(1, 0, describe(scene), &[]));
    check(true, "no extents, simply", &|scene| simple(describe(scene), 0, &[]));
}

#[test]
fn a_list_of_extents_keeps_no_more_memory_than_is_wanted() {
    let mut scene = Scene::new(true);
    let described = scene.insert(&Request::Describe(ByteRange::new(0, 4096)));
    scene.take(&extents(described, CONTEXT, &vec![(1, 0); 1 << 20]), 100_001).unwrap();
    let [Ok(Answer::Extents(told))] = &scene.results()[..] else { panic!("it is not done") };
    assert_eq!(told.len(), 4096);
}

/// Generates almost valid replies: fields come from a small set, so that cookies and ranges often fit.
fn nearly_a_reply() -> impl Strategy<Value = Vec<u8>> {
    let cookie = prop_oneof![8 => (0_u64..4).prop_map(|key| key << 32 | key), 1 => any::<u64>()];
    let offset = prop_oneof![(0_u64..5).prop_map(|block| block * 50), any::<u64>()];
    prop_oneof![
        (cookie.clone(), prop_oneof![3 => Just(0), 1 => any::<u32>()]).prop_map(|(cookie, error)| simple(
            cookie,
            error,
            &[]
        )),
        (cookie.clone(), 0_u16..4, offset.clone(), 1_usize..120)
            .prop_map(|(cookie, flags, offset, length)| data(flags, cookie, offset, &vec![1; length])),
        (cookie.clone(), 0_u16..4, offset, 0_u32..120)
            .prop_map(|(cookie, flags, offset, length)| hole(flags, cookie, offset, length)),
        (cookie.clone(), 0_u32..9, proptest::collection::vec((0_u32..3, any::<u32>()), 0..4))
            .prop_map(|(cookie, context, list)| extents(cookie, context, &list)),
        (cookie, any::<u16>(), proptest::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(cookie, kind, payload)| chunk(1, kind, cookie, &[&payload])),
        proptest::collection::vec(any::<u8>(), 0..40),
    ]
}

proptest! {
    #[test]
    fn no_server_makes_us_panic_or_completes_a_read_in_part(
        replies in proptest::collection::vec(nearly_a_reply(), 0..12), step in 1_usize..200, structured: bool,
    ) {
        let mut scene = Scene::new(structured);
        scene.read(0, 100);
        scene.read(100, 50);
        scene.insert(&Request::Flush);
        scene.insert(&Request::Describe(ByteRange::new(0, 4096)));
        let _ = scene.take(&replies.concat(), step);
        for result in scene.results() {
            if let Ok(Answer::Data(buffer)) = result {
                prop_assert!(buffer.len() == 100 || buffer.len() == 50);
            }
        }
        prop_assert!(scene.in_flight.len() <= 4);
    }
}
