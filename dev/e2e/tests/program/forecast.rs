//! Tests of forecasts: what a dry run expects, what it learns from migrations, and what it leaves behind.

use serde_json::Value;

use crate::scene::{Scene, wait_until};

/// Bytes of the volume's data.
const DATA_BYTES: usize = 32 << 20;

fn scene() -> Scene {
    let scene = Scene::started();
    std::fs::write(scene.path("image"), vec![7; DATA_BYTES]).unwrap();
    let image = scene.path("image").display().to_string();
    scene.succeed(&["volume", "create", "v", "--store", "a", "--image", &image]);
    scene
}

fn forecast(scene: &Scene, to: &str, more: &[&str]) -> Value {
    let (exit, plan) = scene.json(&[["migrate", "v", "--to", to, "--dry-run"].as_slice(), more].concat());
    assert_eq!(exit, 0, "{plan}");
    plan["forecast"].clone()
}

#[test]
fn a_way_that_nothing_has_gone_is_probed_and_nothing_of_it_is_left() {
    let scene = scene();
    let listing = || {
        let files = std::fs::read_dir(scene.path("b")).unwrap();
        files.map(|file| file.unwrap().file_name()).collect::<Vec<_>>()
    };
    let before = listing();
    let told = forecast(&scene, "b", &[]);
    assert_eq!(
        (&told["learned_from"], &told["probed"], &told["ends_percent"]),
        (&0.into(), &true.into(), &100.into())
    );
    let seconds = |figure: &str| told["seconds"][figure].as_f64().unwrap();
    assert!(
        0.0 < seconds("least") && seconds("least") < seconds("middle") && seconds("middle") < seconds("most"),
        "{told}"
    );
    assert_eq!(listing(), before);
    let text = scene.succeed(&["migrate", "v", "--to", "b", "--dry-run"]);
    assert!(text.contains("nothing has gone this way yet: its disks were probed for a moment"), "{text}");
}

#[test]
fn an_ordered_limit_says_how_long_it_will_take() {
    let scene = scene();
    let told = forecast(&scene, "b", &["--bandwidth", "4MiB/s"]);
    let seconds = |figure: &str| told["seconds"][figure].as_f64().unwrap();
    assert!(7.5 < seconds("least") && seconds("most") < 9.5, "{told}");
}

#[test]
fn ended_migrations_are_learned_from_also_over_a_restart() {
    let mut scene = scene();
    for to in ["b", "a"] {
        scene.succeed(&["migrate", "v", "--to", to]);
    }
    wait_until("it has learned", || forecast(&scene, "b", &[])["learned_from"] == 1);
    scene.kill();
    scene.start(None);
    let told = forecast(&scene, "b", &[]);
    assert_eq!((&told["learned_from"], &told["probed"]), (&1.into(), &false.into()), "{told}");
    // What was expected stays beside what came.
    scene.succeed(&["migrate", "v", "--to", "b"]);
    let show = || scene.json(&["migration", "show", "v"]).1;
    wait_until("its forecast is kept", || show()["forecast"]["learned_from"] == 1);
    let text = scene.succeed(&["migration", "show", "v"]);
    assert!(text.contains("expected"), "{text}");
}
