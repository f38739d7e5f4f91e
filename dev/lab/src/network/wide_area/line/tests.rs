//! Tests of a line, with a clock that jumps.

use proptest::prelude::*;

use super::*;
use crate::network::BitRate;

/// 8 Mbit/s: a byte takes a microsecond.
fn conditions(round_trip_us: u64) -> Conditions {
    Conditions::of(BitRate::megabits(8), us(round_trip_us))
}

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

fn packet(name: u8, bytes: usize) -> Packet {
    Packet::plain(&vec![name; bytes])
}

/// Returns everything that arrives, with its time, calling back whenever the line asks.
fn arrivals(line: &mut Line) -> Vec<(Duration, u8)> {
    let mut arrived = Vec::new();
    while let Some(now) = line.next() {
        while let Some(packet) = line.pop(now) {
            arrived.push((now, packet.bytes()[Packet::HEADER_BYTES]));
        }
    }
    arrived
}

#[test]
fn packets_follow_each_other_on_the_wire_and_then_fly() {
    let mut line = Line::new(conditions(1000), 0);
    assert_eq!(line.next(), None);
    for name in [1, 2] {
        assert_eq!(line.push(us(10), packet(name, 100)), Pushed::Accepted);
    }
    assert!(line.pop(us(609)).is_none());
    assert_eq!(arrivals(&mut line), [(us(610), 1), (us(710), 2)]);
    // An idle wire does not save up time.
    line.push(us(5000), packet(3, 100));
    assert_eq!(arrivals(&mut line), [(us(5600), 3)]);
}

#[test]
fn what_does_not_fit_into_the_queue_is_refused_but_an_empty_queue_takes_anything() {
    let mut line = Line::new(Conditions { queue_bytes_max: 250, ..conditions(0) }, 0);
    let pushed = |line: &mut Line, now, name| line.push(us(now), packet(name, 100));
    assert_eq!(pushed(&mut line, 0, 1), Pushed::Accepted);
    assert_eq!(pushed(&mut line, 0, 2), Pushed::Accepted);
    assert_eq!(pushed(&mut line, 0, 3), Pushed::Refused);
    // The first has left after 100 us.
    assert_eq!(pushed(&mut line, 100, 4), Pushed::Accepted);
    assert_eq!(arrivals(&mut line), [(us(100), 1), (us(200), 2), (us(300), 4)]);
    assert_eq!(line.push(us(400), packet(5, 1000)), Pushed::Accepted);
}

#[test]
fn other_conditions_hold_for_what_waits_and_not_for_what_flies() {
    let mut line = Line::new(conditions(2000), 0);
    for name in [1, 2, 3] {
        line.push(us(0), packet(name, 100));
    }
    line.change(us(100), Conditions::of(BitRate::megabits(4), us(4000)));
    assert_eq!(arrivals(&mut line), [(us(1100), 1), (us(2300), 2), (us(2500), 3)]);
}

#[test]
fn a_line_that_was_cleared_begins_anew() {
    let mut line = Line::new(conditions(100), 0);
    line.push(us(0), packet(1, 100));
    line.push(us(0), packet(2, 100));
    assert!(line.pop(us(150)).is_some());
    line.clear();
    assert_eq!(arrivals(&mut line), []);
    line.push(us(1000), packet(3, 100));
    assert_eq!(arrivals(&mut line), [(us(1150), 3)]);
}

#[test]
fn losses_come_as_often_as_asked_and_the_same_for_a_seed() {
    let survivors = |seed| {
        let lossy = Conditions { lost_per_million: 100_000, queue_bytes_max: u64::MAX, ..conditions(100) };
        let mut line = Line::new(lossy, seed);
        for index in 0..10_000_u64 {
            line.push(us(index), packet(u8::try_from(index % 251).unwrap(), 1));
        }
        arrivals(&mut line).into_iter().map(|(_, name)| name).collect::<Vec<_>>()
    };
    let first = survivors(7);
    assert!((8_800..9_200).contains(&first.len()), "{}", first.len());
    assert_eq!(first, survivors(7));
    assert_ne!(first, survivors(8));
}

#[test]
fn jitter_spreads_arrivals_around_the_delay_and_reorders_only_if_asked() {
    let spread = |order| {
        let conditions = Conditions { jitter: us(400), order, ..conditions(2000) };
        let mut line = Line::new(conditions, 3);
        for name in 0..200 {
            // Each packet is alone on the wire, for a microsecond.
            line.push(us(u64::from(name) * 10), packet(name, 1));
        }
        arrivals(&mut line)
    };
    let kept: Vec<u8> = spread(Order::Kept).into_iter().map(|(_, name)| name).collect();
    assert!(kept.is_sorted(), "{kept:?}");
    let free = spread(Order::ByArrival);
    assert!(!free.iter().map(|(_, name)| name).is_sorted());
    let delays = free.iter().map(|(arrival, name)| *arrival - us(u64::from(*name) * 10 + 1));
    assert!(delays.clone().all(|delay| (us(600)..=us(1400)).contains(&delay)));
    assert!(delays.clone().any(|delay| delay < us(700)) && delays.clone().any(|delay| delay > us(1300)));
}

proptest! {
    /// However late and irregular the calls are, the same packets arrive, in the same order, and not earlier.
    #[test]
    fn coming_late_changes_nothing_but_when_it_is_noticed(
        packets in prop::collection::vec((0_u64..500, 1_usize..400), 1..40),
        pauses in prop::collection::vec(1_u64..700, 1..40),
        jitter in 0_u64..300,
    ) {
        let conditions = Conditions { jitter: us(jitter), queue_bytes_max: u64::MAX, ..conditions(400) };
        let (mut prompt, mut late) = (Line::new(conditions, 1), Line::new(conditions, 1));
        let mut now = 0;
        for (index, (pause, bytes)) in packets.iter().enumerate() {
            now += pause;
            let name = u8::try_from(index).unwrap();
            prompt.push(us(now), packet(name, *bytes));
            late.push(us(now), packet(name, *bytes));
        }
        let expected = arrivals(&mut prompt);
        let mut noticed = Vec::new();
        for pause in pauses.iter().cycle() {
            while let Some(packet) = late.pop(us(now)) {
                noticed.push((us(now), packet.bytes()[Packet::HEADER_BYTES]));
            }
            if late.next().is_none() {
                break;
            }
            now += pause;
        }
        let names = |arrived: &[(Duration, u8)]| arrived.iter().map(|(_, name)| *name).collect::<Vec<_>>();
        prop_assert_eq!(names(&expected), names(&noticed));
        prop_assert!(expected.iter().zip(&noticed).all(|((right, _), (late, _))| right <= late));
        prop_assert_eq!(expected.len(), packets.len());
    }
}
