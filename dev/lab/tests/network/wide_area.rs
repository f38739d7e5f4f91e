//! Tests of links with delay and loss.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::Duration;

use lab::network::{BitRate, Conditions, Cut, Order, WideAreaLink, measure};

use crate::scene::{DEADLINE, Scene, Turn, expect_intact, expect_rate, interfaces, part_of, wait_until};

const RATE: BitRate = BitRate::megabits(100);

fn conditions(round_trip_ms: u64) -> Conditions {
    Conditions::of(RATE, Duration::from_millis(round_trip_ms))
}

#[test]
fn round_trips_take_what_they_are_told_to() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_wide_area(conditions(0));
    for (round_trip_us, count) in [(500, 200), (10_000, 50), (50_000, 10), (180_000, 5)] {
        let round_trip = Duration::from_micros(round_trip_us);
        scene.link.change(Conditions::of(BitRate::megabits(1000), round_trip)).unwrap();
        wait_until("a round trip takes little more than it is told to", || {
            let times = measure::round_trips(scene.source(), scene.target(), scene.address(), count).unwrap();
            assert!(times.iter().all(|time| *time >= round_trip), "{times:?}");
            // The shortest shows the link, the others how busy the processors are.
            times.iter().any(|time| *time < round_trip.mul_f64(1.2))
        });
    }
}

#[test]
fn a_wide_area_link_carries_its_rate_also_when_that_changes() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_wide_area(conditions(10));
    let flow = scene.flow(scene.address());
    expect_rate(RATE, &flow);
    let slower = BitRate::megabits(20);
    scene.link.change(Conditions::of(slower, Duration::from_millis(10))).unwrap();
    expect_rate(slower, &flow);
    drop(flow);
    let [there, back] = scene.link.carried();
    assert!(there.bytes > back.bytes && back.bytes > 0, "{there:?} {back:?}");
}

#[test]
fn a_gigabit_fills_at_180_ms_for_buffers_grow_as_far_as_that_needs() {
    let Some(_turn) = Turn::take() else { return };
    let rate = BitRate::megabits(1000);
    let scene = Scene::with_wide_area(Conditions::of(rate, Duration::from_millis(180)));
    let flow = scene.flow(scene.address());
    // With buffers of 4 MiB it would be at most 0.19. How much more it is depends on the processors.
    wait_until("a third of the link is used", || part_of(rate, &flow) > 0.33);
}

#[test]
fn what_a_wide_area_link_carries_is_intact() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_wide_area(Conditions::of(BitRate::megabits(1000), Duration::from_millis(2)));
    let connection = scene.connection(scene.address());
    // Large packets first, then single ones, with losses and jitter.
    expect_intact(connection, 16 << 20, || {
        let lossy = Conditions {
            lost_per_million: 2_000,
            jitter: Duration::from_micros(500),
            order: Order::ByArrival,
            ..scene.link.conditions()
        };
        scene.link.change(lossy).unwrap();
    });
}

#[test]
fn the_same_packets_are_lost_for_the_same_seed() {
    let Some(_turn) = Turn::take() else { return };
    let survivors = |seed| -> BTreeSet<u32> {
        const COUNT: u32 = 2000;
        const AHEAD_MAX: u32 = 100;
        let scene = Scene::with_wide_area(Conditions { lost_per_million: 50_000, seed, ..conditions(1) });
        let address = scene.address();
        let far = scene.target().run(|| UdpSocket::bind((address, 0))).unwrap().unwrap();
        let near = scene.source().run(|| UdpSocket::bind(("0.0.0.0", 0))).unwrap().unwrap();
        near.connect(far.local_addr().unwrap()).unwrap();
        let mut survivors = BTreeSet::new();
        // Packets keep their order: once a later one is there, all earlier ones have arrived or are lost.
        far.set_read_timeout(Some(DEADLINE)).unwrap();
        for number in 0..COUNT {
            near.send(&number.to_le_bytes()).unwrap();
            // Many more would not fit into the buffers on the path; and of this many, some arrive.
            while number >= AHEAD_MAX && survivors.last() < Some(&(number - AHEAD_MAX)) {
                survivors.insert(receive(&far).unwrap());
            }
        }
        far.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        while !survivors.contains(&COUNT) {
            // This packet may be lost as well.
            near.send(&COUNT.to_le_bytes()).unwrap();
            while survivors.last() < Some(&COUNT)
                && let Some(number) = receive(&far)
            {
                survivors.insert(number);
            }
        }
        survivors.remove(&COUNT);
        let part = survivors.len() as f64 / f64::from(COUNT);
        assert!((0.93..0.97).contains(&part), "{part}");
        survivors
    };
    let first = survivors(1);
    assert_eq!(first, survivors(1));
    assert_ne!(first, survivors(2));
}

fn receive(socket: &UdpSocket) -> Option<u32> {
    let mut bytes = [0; 4];
    socket.recv(&mut bytes).ok().map(|_| u32::from_le_bytes(bytes))
}

#[test]
fn jitter_is_felt_and_stays_within_its_bounds() {
    let Some(_turn) = Turn::take() else { return };
    let jitter = Duration::from_millis(4);
    let scene = Scene::with_wide_area(Conditions { jitter, ..conditions(20) });
    let times = measure::round_trips(scene.source(), scene.target(), scene.address(), 60).unwrap();
    let (least, most) = (*times.iter().min().unwrap(), *times.iter().max().unwrap());
    // Jitter both ways changes a round trip by up to twice its value, up and down; some of 60 come near that.
    assert!(least >= Duration::from_millis(12), "{times:?}");
    assert!(most - least > Duration::from_millis(6), "{times:?}");
}

#[test]
fn a_wide_area_link_that_is_down_is_unreachable_and_a_black_hole_is_silent() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_wide_area(conditions(1));
    let expect = |scene: &Scene<WideAreaLink>, kind| assert_eq!(scene.refusal(scene.address()), kind);
    expect(&scene, ErrorKind::ConnectionRefused);
    scene.link.cut(Cut::Down).unwrap();
    expect(&scene, ErrorKind::NetworkUnreachable);
    scene.link.cut(Cut::BlackHole).unwrap();
    assert!(scene.is_silent(scene.address()));
    scene.link.restore().unwrap();
    expect(&scene, ErrorKind::ConnectionRefused);
    let source = scene.source().clone();
    drop(scene);
    assert_eq!(interfaces(&source), ["lo"]);
}

#[test]
fn connections_outlive_cuts_of_a_wide_area_link() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_wide_area(conditions(10));
    let connection = scene.connection(scene.address());
    expect_intact(connection, 4 << 20, || {
        for cut in [Cut::BlackHole, Cut::Down] {
            scene.link.cut(cut).unwrap();
        }
        scene.link.restore().unwrap();
    });
}
