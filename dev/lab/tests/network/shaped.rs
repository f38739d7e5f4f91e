//! Tests of links without delay.

use std::io::ErrorKind;

use lab::network::{BitRate, Cut};

use crate::scene::{Scene, Turn, expect_intact, expect_rate};

const RATE: BitRate = BitRate::megabits(200);

#[test]
fn a_shaped_link_carries_its_rate_also_when_that_changes() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_shaped(RATE);
    let flow = scene.flow(scene.address());
    expect_rate(RATE, &flow);
    let slower = BitRate::megabits(50);
    scene.link.set_rate(slower).unwrap();
    expect_rate(slower, &flow);
}

#[test]
fn a_shaped_link_that_is_down_is_unreachable_at_once() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_shaped(RATE);
    scene.link.cut(Cut::Down).unwrap();
    assert_eq!(scene.refusal(scene.address()), ErrorKind::NetworkUnreachable);
    scene.link.restore().unwrap();
    // No program listens, but the host answers.
    assert_eq!(scene.refusal(scene.address()), ErrorKind::ConnectionRefused);
}

#[test]
fn a_black_hole_in_a_shaped_link_tells_nobody() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_shaped(RATE);
    scene.link.cut(Cut::BlackHole).unwrap();
    assert!(scene.is_silent(scene.address()));
    // A rate that is set during a cut holds afterwards, and does not restore the link.
    let slower = BitRate::megabits(50);
    scene.link.set_rate(slower).unwrap();
    assert!(scene.is_silent(scene.address()));
    scene.link.restore().unwrap();
    expect_rate(slower, &scene.flow(scene.address()));
}

#[test]
fn connections_outlive_cuts_of_a_shaped_link() {
    let Some(_turn) = Turn::take() else { return };
    let mut scene = Scene::with_shaped(RATE);
    let connection = scene.connection(scene.address());
    expect_intact(connection, 4 << 20, || {
        for cut in [Cut::BlackHole, Cut::Down] {
            scene.link.cut(cut).unwrap();
        }
        scene.link.restore().unwrap();
    });
}
