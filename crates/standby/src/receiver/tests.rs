//! Tests of what the simulator does not play.

use super::*;
use crate::Replication;
use crate::owner::{self, State};
use crate::wire::Answer;

const ID: StandbyId = StandbyId(1);
const LIFE: LifeId = LifeId(2);
const SIZE: BlockCount = BlockCount(16);

fn settings(kept_by: KeptBy) -> Settings {
    Settings { spool_blocks: 100, points_blocks: Some(100), kept_by, keep: Keep::DEFAULT }
}

/// Carries everything out at once. Returns the actions.
fn carry_out(standby: &mut Standby) -> Vec<Action> {
    let mut done = Vec::new();
    while let Some(action) = standby.poll_action() {
        let ended = match &action {
            Action::FlushSpool(volume) => Some(Event::SpoolFlushed(*volume)),
            Action::Measure(sealed) => Some(Event::Measured(sealed.blocks)),
            Action::KeepPoint(..) => Some(Event::PointKept),
            Action::OpenInPlace(_) => Some(Event::Opened(Grown::Yes)),
            Action::Apply(_) => Some(Event::Applied(Grown::Yes)),
            Action::FlushImage => Some(Event::ImageFlushed),
            Action::MakeDurable(number, _) => Some(Event::Durable(*number)),
            _ => None,
        };
        done.push(action);
        ended.into_iter().for_each(|event| standby.handle_event(Duration::ZERO, event));
    }
    done
}

fn receive(standby: &mut Standby, stream: u64, message: ToStandby) -> Vec<Action> {
    standby.handle_event(Duration::ZERO, Event::Received(StreamId(stream), message));
    carry_out(standby)
}

fn offer(standby: &mut Standby, stream: u64) -> Answer {
    let offer = ToStandby::Offer { standby: ID, generation: Generation(1), life: LIFE, acknowledged: None };
    let answer = receive(standby, stream, offer).into_iter().find_map(|action| match action {
        Action::Send(_, ToOwner::Answer(answer)) => Some(answer),
        _ => None,
    });
    answer.unwrap()
}

fn epoch(standby: &mut Standby, stream: u64, number: u64) {
    let (epoch, blocks) = (Epoch(number), BlockRange::new(number, number + 1));
    let base = (number > 1).then(|| Epoch(number - 1));
    receive(standby, stream, ToStandby::Begin { epoch, base, blocks: 1, sizes: vec![SIZE] });
    let extent = ToStandby::Extent { volume: VolumeIndex(0), blocks, content: Content::Payload };
    receive(standby, stream, extent);
    receive(standby, stream, ToStandby::Seal { epoch, age_ms: 0 });
}

/// Returns a standby with two epochs, one of them a point, that a migration has used.
fn consumed(kept_by: KeptBy) -> Standby {
    let mut standby = Standby::begin(settings(kept_by), ID);
    offer(&mut standby, 7);
    epoch(&mut standby, 7, 1);
    epoch(&mut standby, 7, 2);
    assert_eq!(points(&standby), [1]);
    standby.handle_event(Duration::ZERO, Event::Consume);
    let done = carry_out(&mut standby);
    // The image is kept before it is written to, if that costs nothing.
    assert_eq!(points(&standby), if kept_by == KeptBy::Reflink { vec![1, 2] } else { vec![1] });
    assert!(done.iter().any(|action| matches!(action, Action::Consumed(Some(at)) if at.epoch == Epoch(2))));
    // The owner need not ask.
    let told = Action::Send(StreamId(7), ToOwner::Answer(Answer::Consumed));
    assert!(done.contains(&told), "{done:?}");
    standby
}

fn given_back(kept_by: KeptBy, image: Image) -> (Standby, Answer) {
    let mut standby = consumed(kept_by);
    assert_eq!(offer(&mut standby, 8), Answer::Consumed);
    standby.handle_event(Duration::ZERO, Event::Returned(image));
    carry_out(&mut standby);
    let answer = offer(&mut standby, 9);
    (standby, answer)
}

#[test]
fn an_image_that_a_failed_migration_has_not_written_to_is_a_recovery_point_as_before() {
    let (standby, answer) = given_back(KeptBy::Undo, Image::AsLeft);
    let Answer::Receiving { watermark, has_point, is_mixed, .. } = answer else { panic!("{answer:?}") };
    assert_eq!((watermark.unwrap().epoch, has_point, is_mixed), (Epoch(2), true, false));
    assert_eq!(standby.record().points.len(), 1);
}

#[test]
fn an_image_that_a_failed_migration_has_written_to_lacks_only_what_its_owner_knows() {
    for (kept_by, points) in [(KeptBy::Undo, 0), (KeptBy::Reflink, 2)] {
        let (mut standby, answer) = given_back(kept_by, Image::Touched);
        let Answer::Receiving { watermark, has_point, is_mixed, .. } = answer else { panic!("{answer:?}") };
        assert_eq!((watermark.unwrap().epoch, has_point, is_mixed), (Epoch(2), points > 0, true));
        assert_eq!(standby.record().points.len(), points);
        // The next epoch makes it one.
        epoch(&mut standby, 9, 3);
        assert_eq!(standby.record().image, ImageState::AsOfWatermark);
        let answer = offer(&mut standby, 10);
        assert!(matches!(answer, Answer::Receiving { has_point: true, is_mixed: false, .. }), "{answer:?}");
    }
}

#[test]
fn an_owner_that_learns_of_a_mixture_seals_nothing_that_it_has_cut_before() {
    let second = Duration::from_secs(1);
    let settings = owner::Settings {
        every: second,
        first_cut: second,
        rpo: 60 * second,
        wait_max: second,
        ring_blocks: 100,
        spool_blocks: 0,
        extent_blocks: 16,
        catch_up_blocks: 100,
    };
    let mut owner = Replication::begin(settings, ID, LIFE, vec![SIZE]);
    let mut now = Duration::ZERO;
    // Returns the numbers of the epochs that it announces. It has room for all, and all is read at once.
    let mut play = |owner: &mut Replication, event: Option<owner::Event>| {
        now += second;
        owner.handle_timeout(now);
        event.into_iter().for_each(|event| owner.handle_event(now, event));
        let mut begun = Vec::new();
        while let Some(action) = owner.poll_action() {
            let next = match action {
                owner::Action::CloseGates => owner::Event::GatesClosed,
                owner::Action::MakeDurable(number, _) => owner::Event::Durable(number),
                owner::Action::FlushStores => owner::Event::StoresFlushed,
                owner::Action::SendExtent { read, .. } => {
                    owner::Event::ReadEnded { read, outcome: owner::Outcome::Done }
                }
                owner::Action::Send(stream, ToStandby::Begin { epoch, .. }) => {
                    begun.push(epoch.0);
                    owner::Event::Received(stream, ToOwner::Ready { epoch })
                }
                owner::Action::Send(stream, ToStandby::Seal { epoch, .. }) => {
                    owner::Event::Received(stream, ToOwner::Acknowledged { epoch })
                }
                _ => continue,
            };
            owner.handle_event(now, next);
            owner.handle_event(now, owner::Event::MaySend(100));
        }
        begun
    };
    let answered = |stream, answer| Some(owner::Event::Received(stream, ToOwner::Answer(answer)));
    let receiving = |watermark, is_mixed| Answer::Receiving {
        watermark,
        sealed_through: watermark.map_or(Epoch(0), |at: Watermark| at.epoch),
        has_point: false,
        is_mixed,
    };
    play(&mut owner, Some(owner::Event::StreamBegins(StreamId(7))));
    play(&mut owner, answered(StreamId(7), receiving(None, false)));
    let newest = (0..3).flat_map(|_| play(&mut owner, None)).max().unwrap();
    play(&mut owner, answered(StreamId(7), Answer::Consumed));
    assert_eq!(owner.state(Duration::ZERO), State::Used);
    play(&mut owner, Some(owner::Event::StreamBegins(StreamId(8))));
    // Nothing was written since. It sends an epoch all the same, which it cuts after the answer.
    let open = owner.open_epoch();
    let at = Watermark { standby: ID, life: LIFE, epoch: Epoch(newest) };
    let at_once = play(&mut owner, answered(StreamId(8), receiving(Some(at), true)));
    assert!(at_once.is_empty(), "{at_once:?}");
    assert_eq!(play(&mut owner, None), [open.0]);
    assert_ne!(owner.state(Duration::ZERO), State::Used);
}

fn points(standby: &Standby) -> Vec<u64> {
    standby.record().points.iter().map(|point| point.watermark.epoch.0).collect()
}

#[test]
fn a_point_counts_what_it_keeps_and_not_what_was_sent() {
    let mut standby = Standby::begin(settings(KeptBy::Undo), ID);
    offer(&mut standby, 7);
    epoch(&mut standby, 7, 1);
    epoch(&mut standby, 7, 2);
    assert_eq!(points(&standby), [1]);
    // A discard is one block of the spool. What it discards is kept by the point.
    let (epoch, base) = (Epoch(3), Some(Epoch(2)));
    receive(&mut standby, 7, ToStandby::Begin { epoch, base, blocks: 1, sizes: vec![SIZE] });
    let blocks = BlockRange::new(0, 16);
    receive(&mut standby, 7, ToStandby::Extent { volume: VolumeIndex(0), blocks, content: Content::Zeroes });
    standby.handle_event(Duration::ZERO, Event::Received(StreamId(7), ToStandby::Seal { epoch, age_ms: 0 }));
    loop {
        match standby.poll_action().unwrap() {
            Action::FlushSpool(volume) => standby.handle_event(Duration::ZERO, Event::SpoolFlushed(volume)),
            Action::MakeDurable(number, _) => standby.handle_event(Duration::ZERO, Event::Durable(number)),
            Action::Measure(_) => break,
            _ => {}
        }
    }
    standby.handle_event(Duration::ZERO, Event::Measured(100));
    carry_out(&mut standby);
    assert_eq!(points(&standby), [2], "the older one gives way");
}

#[test]
fn the_oldest_points_give_way_to_the_reserve_and_the_last_one_never() {
    let mut standby = Standby::begin(settings(KeptBy::Undo), ID);
    offer(&mut standby, 7);
    (1..5).for_each(|number| epoch(&mut standby, 7, number));
    assert_eq!(points(&standby), [1, 2, 3]);
    standby.handle_event(Duration::ZERO, Event::Room(-2));
    carry_out(&mut standby);
    assert_eq!(points(&standby), [3]);
    // There is room for what the next point keeps, and no more.
    standby.handle_event(Duration::ZERO, Event::Room(1));
    epoch(&mut standby, 7, 5);
    assert_eq!(points(&standby), [3, 4]);
    standby.handle_event(Duration::ZERO, Event::Room(-100));
    carry_out(&mut standby);
    assert_eq!(points(&standby), [0; 0]);
    // Without room there is no point beside the image; the image goes on.
    epoch(&mut standby, 7, 6);
    assert_eq!(points(&standby), [0; 0]);
    assert_eq!(standby.record().watermark.unwrap().epoch, Epoch(6));
}

#[test]
fn an_epoch_without_room_is_refused_until_there_is_as_much() {
    let mut standby = Standby::begin(settings(KeptBy::Undo), ID);
    offer(&mut standby, 7);
    (1..3).for_each(|number| epoch(&mut standby, 7, number));
    let begin = |epoch| ToStandby::Begin { epoch, base: Some(Epoch(2)), blocks: 10, sizes: vec![SIZE] };
    let is_full = |done: &[Action]| {
        let refused = ToOwner::Refused { reason: RefusedBecause::NoSpace };
        done.contains(&Action::Send(StreamId(7), refused))
    };
    receive(&mut standby, 7, begin(Epoch(3)));
    standby.handle_event(Duration::ZERO, Event::Room(0));
    standby.handle_event(Duration::ZERO, Event::StoreFull(4));
    let done = carry_out(&mut standby);
    assert!(is_full(&done) && done.contains(&Action::DropUnsealed), "{done:?}");
    // The oldest point is gone for it, and it is said before the blocks are sent again.
    assert_eq!(points(&standby), [0; 0]);
    standby.handle_event(Duration::ZERO, Event::Room(3));
    assert!(is_full(&receive(&mut standby, 7, begin(Epoch(4)))));
    standby.handle_event(Duration::ZERO, Event::Room(4));
    let done = receive(&mut standby, 7, begin(Epoch(5)));
    assert!(done.contains(&Action::Send(StreamId(7), ToOwner::Ready { epoch: Epoch(5) })), "{done:?}");
    receive(&mut standby, 7, ToStandby::Seal { epoch: Epoch(5), age_ms: 0 });
    assert_eq!(standby.record().watermark.unwrap().epoch, Epoch(5));
}

fn dropped(actions: &[Action], epoch: u64) -> bool {
    actions.iter().any(|action| matches!(action, Action::DropPoint(at) if at.epoch == Epoch(epoch)))
}

#[test]
fn the_newest_state_stays_for_a_test_as_long_as_that_needs_it_although_no_points_are_kept() {
    for kept_by in [KeptBy::Undo, KeptBy::Reflink] {
        let mut standby = Standby::begin(Settings { keep: Keep::NONE, ..settings(kept_by) }, ID);
        offer(&mut standby, 7);
        epoch(&mut standby, 7, 1);
        let until = Duration::from_secs(100);
        standby.handle_event(Duration::ZERO, Event::TestBegins(None, until));
        let done = carry_out(&mut standby);
        let cloned = |at: &Action| matches!(at, Action::Clone(at) if at.epoch == Epoch(1));
        let (kept, cloned) = (
            done.iter().position(|action| matches!(action, Action::KeepPoint(..))),
            done.iter().position(cloned),
        );
        assert!(kept.is_some() && kept < cloned, "{done:?}");
        // A second one has to wait for its order until the first is complete.
        standby.handle_event(Duration::ZERO, Event::TestBegins(None, until));
        assert!(carry_out(&mut standby).contains(&Action::RefuseTest(Refusal::NoSuchPoint)));
        epoch(&mut standby, 7, 2);
        epoch(&mut standby, 7, 3);
        // What it has to keep is counted as for every other point.
        assert_eq!(standby.record().points.iter().map(|point| point.blocks).collect::<Vec<_>>(), [1]);
        standby.handle_event(Duration::ZERO, Event::TestEnded);
        assert!(dropped(&carry_out(&mut standby), 1));
        assert_eq!(standby.record().points, []);
    }
}

#[test]
fn a_promotion_ends_the_making_of_a_clone_before_its_point_can_change() {
    let mut standby = Standby::begin(settings(KeptBy::Undo), ID);
    offer(&mut standby, 7);
    epoch(&mut standby, 7, 1);
    epoch(&mut standby, 7, 2);
    let first = standby.record().points[0].watermark;
    standby.handle_event(Duration::ZERO, Event::TestBegins(Some(first), Duration::from_secs(100)));
    assert!(carry_out(&mut standby).contains(&Action::Clone(first)));
    standby.handle_event(Duration::ZERO, Event::OwnerLost);
    let order = PromoteOrder { owner_is_lost: true, age_max: Duration::MAX, point: Some(first) };
    standby.handle_event(Duration::ZERO, Event::Promote(order));
    let done = carry_out(&mut standby);
    let place = |wanted: &Action| done.iter().position(|action| action == wanted);
    let ended = place(&Action::EndTest);
    assert!(ended.is_some() && ended < place(&Action::RestorePoint(first)), "{done:?}");
    standby.handle_event(Duration::ZERO, Event::TestBegins(None, Duration::from_secs(100)));
    assert!(carry_out(&mut standby).contains(&Action::RefuseTest(Refusal::Ended)));
}
