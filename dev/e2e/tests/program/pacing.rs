//! Tests of migrations that give way to the guests of their disks.

use crate::scene::{Scene, stop_and_verify, wait_until};

#[test]
fn a_migration_gives_way_to_guests_until_it_is_told_not_to() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let order = ["migrate", "v", "--to", "b", "--impact", "1%", "--bandwidth", "1MiB/s", "--detach"];
    scene.succeed(&order);
    let pace = || scene.json(&["migration", "show", "m0"]).1["pace"].clone();
    wait_until("it is paced", || pace()["guests_lose_percent"].is_number());
    let said = scene.succeed(&["migration", "set", "m0", "--impact", "none"]);
    assert!(said.contains("does not give way to guests"), "{said}");
    wait_until("it is not paced", || pace().is_null());
    // The order is kept with its last impact, for restarts and for a retry.
    scene.succeed(&["migration", "set", "m0", "--impact", "30%", "--bandwidth", "none"]);
    wait_until("it has moved", || scene.json(&["migration", "show", "m0"]).1["state"] == "moved");
    stop_and_verify(guest);
}

#[test]
fn migrations_without_an_impact_give_way_by_default() {
    gives_way_without_an_impact("# impact_percent is left out\n");
}

#[test]
fn the_default_of_the_configuration_holds_for_migrations_without_an_impact() {
    gives_way_without_an_impact("[limits]\nimpact_percent = 5\n");
}

fn gives_way_without_an_impact(configuration: &str) {
    let mut scene = Scene::new();
    scene.configure(configuration);
    scene.start(None);
    scene.create_volume();
    let guest = scene.start_guest();
    scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
    let shown = || scene.json(&["migration", "show", "m0"]).1;
    wait_until("it is paced", || shown()["pace"]["bytes_per_second"].is_number());
    // Guests and its limit take turns.
    wait_until("its limit holds it", || shown()["limited_by"] == "bandwidth");
    scene.succeed(&["migration", "cancel", "m0"]);
    stop_and_verify(guest);
}

#[test]
fn a_deadline_that_will_be_missed_is_said() {
    let scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    let slowly = ["--bandwidth", "64KiB/s", "--impact", "10%", "--deadline", "3s", "--detach"];
    scene.succeed(&[["migrate", "v", "--to", "b"].as_slice(), &slowly].concat());
    let show = || scene.json(&["migration", "show", "m0"]).1;
    assert!(show()["deadline"]["unix_ms"].is_u64());
    // Guests would lose nothing by its haste, because the limit slows it down.
    wait_until("it is late", || show()["deadline"]["late"] == true);
    assert!(scene.succeed(&["migration", "show", "m0"]).contains("it will be missed"));
    scene.succeed(&["migration", "cancel", "m0"]);
    stop_and_verify(guest);
}

#[test]
fn an_impact_that_is_none_is_refused() {
    let scene = Scene::started();
    scene.create_volume();
    for wrong in ["0%", "91%", "half"] {
        let outcome = scene.run(&["migrate", "v", "--to", "b", "--impact", wrong]);
        assert_eq!(outcome.code, 2, "{outcome:?}");
        assert!(outcome.stderr.contains("1% to 90%"), "{outcome:?}");
    }
    let outcome = scene.run(&["migration", "set", "m0"]);
    assert_eq!(outcome.code, 2, "{outcome:?}");
}
