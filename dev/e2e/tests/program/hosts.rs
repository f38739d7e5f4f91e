//! Two daemons are paired, find each other again after a restart, and forget each other.

use serde_json::Value;
use testbed::own_address;

use crate::scene::{Scene, code, until, wait_until};

/// A daemon that listens for others at an address that does not exist.
pub(crate) fn host() -> (Scene, String) {
    let mut scene = Scene::new();
    let address = scene.listen_for_hosts().unwrap();
    scene.start(None);
    (scene, address.to_string())
}

pub(crate) fn init(scene: &Scene, name: &str) -> String {
    let (exit, identity) = scene.json(&["host", "init", "--name", name]);
    assert_eq!((exit, identity["name"].as_str()), (0, Some(name)), "{identity}");
    identity["id"].as_str().unwrap().to_owned()
}

/// Waits until a daemon is connected with another host.
pub(crate) fn wait_connected(scene: &Scene, name: &str) -> Value {
    until(&format!("{name} is connected"), || {
        Some(scene.json(&["host", "show", name]).1).filter(|peer| peer["connected"] == true)
    })
}

#[test]
fn two_hosts_are_paired_and_find_each_other_again() {
    let ((mut one, address), (two, _)) = (host(), host());
    let (exit, error) = one.json(&["host", "invite"]);
    assert_eq!((exit, code(&error)), (4, "no_identity"));
    let [id_of_one, id_of_two] = [init(&one, "one"), init(&two, "two")];
    let (exit, error) = one.json(&["host", "init", "--name", "again"]);
    assert_eq!((exit, code(&error)), (4, "identity_exists"));
    let (_, invitation) = one.json(&["host", "invite", "--minutes", "5"]);
    assert_eq!(invitation["addresses"][0], address.as_str());
    let token = invitation["token"].as_str().unwrap();
    let text = two.run(&["host", "join", &address, token]);
    assert_eq!((text.code, text.stdout.contains("one (")), (0, true), "{text:?}");
    for (scene, name, id) in [(&one, "two", &id_of_two), (&two, "one", &id_of_one)] {
        let peer = wait_connected(scene, name);
        assert_eq!(peer["id"], id.as_str());
        assert!(scene.run(&["host", "show", name]).stdout.contains("ROUND TRIP"));
        assert!(scene.run(&["host", "list"]).stdout.contains("connected"));
    }
    one.stop();
    one.start(None);
    wait_connected(&one, "two");
    wait_connected(&two, "one");
    let (exit, removed) = one.json(&["host", "remove", "two"]);
    assert_eq!((exit, removed["id"].as_str()), (0, Some(id_of_two.as_str())));
    assert_eq!(one.json(&["host", "list"]).1, Value::Array(Vec::new()));
    wait_until("two is told that one has removed it", || {
        two.run(&["host", "show", "one"]).stdout.contains("it does not know this host")
    });
    let (exit, error) = one.json(&["host", "show", "two"]);
    assert_eq!((exit, code(&error)), (3, "host_not_found"));
}

#[test]
fn two_hosts_that_have_both_got_other_addresses_find_each_other_again_by_an_order() {
    let ((mut one, former), (mut two, former_of_two)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &former, &token]);
    wait_connected(&one, "two");
    one.stop();
    two.stop();
    let moved = |scene: &Scene, former: &str| {
        let address = own_address().unwrap().to_string();
        let text = std::fs::read_to_string(scene.path("sterna.toml")).unwrap();
        std::fs::write(scene.path("sterna.toml"), text.replace(former, &address)).unwrap();
        address
    };
    let address = moved(&one, &former);
    moved(&two, &former_of_two);
    one.start(None);
    two.start(None);
    for wrong in ["10.0.0.1", ":7423", "fd00::2:7423", "rack3-b:0", "rack 3:7423"] {
        let (exit, error) = two.json(&["host", "set", "one", "--address", wrong]);
        assert_eq!((exit, code(&error)), (2, "invalid_request"), "{wrong}: {error}");
    }
    let said = two.succeed(&["host", "set", "one", "--address", &address]);
    assert!(said.contains(&format!("one is called at {address}")), "{said}");
    wait_connected(&one, "two");
    // It is known after a restart, and the permissions are as before.
    two.stop();
    two.start(None);
    let peer = wait_connected(&two, "one");
    assert_eq!((&peer["links"][0]["address"], &peer["machines"]), (&address.into(), &false.into()), "{peer}");
}

#[test]
fn a_host_tells_its_version_and_what_goes_over_its_links() {
    let ((one, address), (two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let token = one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    two.succeed(&["host", "join", &address, &token]);
    wait_connected(&one, "two");
    let until = |scene: &Scene, name: &str, what: &str, is_so: &dyn Fn(&Value) -> bool| {
        let look = || Ok(Some(scene.json(&["host", "show", name]).1).filter(|peer| is_so(peer)));
        testbed::until(what, look).unwrap()
    };
    for (scene, name) in [(&one, "two"), (&two, "one")] {
        let version = env!("CARGO_PKG_VERSION");
        let peer = until(scene, name, "its version", &|peer| peer["program_version"] == version);
        assert!(peer["protocol_version"].as_u64().unwrap() >= 7, "{peer}");
        let text = scene.succeed(&["host", "show", name]);
        assert!(text.contains(&format!("{version} (protocol ")) && text.contains("at present"), "{text}");
        assert!(scene.succeed(&["host", "list"]).contains(version));
    }
    let image = one.path("image");
    std::fs::write(&image, vec![7; 16 << 20]).unwrap();
    one.succeed(&["volume", "create", "v", "--store", "a", "--image", &image.display().to_string()]);
    one.succeed(&["migrate", "v", "--to", "two:a", "--bandwidth", "4MiB/s", "--detach"]);
    let rate = |peer: &Value, name: &str| peer[name].as_u64().unwrap();
    let fast = 1 << 20;
    let sends = until(&one, "two", "that it sends", &|peer| rate(peer, "bytes_sent_per_second") > fast);
    until(&two, "one", "that it receives", &|peer| rate(peer, "bytes_received_per_second") > fast);
    let of_connections = sends["connections"].as_array().unwrap().iter();
    let sum: u64 = of_connections.filter_map(|connection| connection["bytes_sent_per_second"].as_u64()).sum();
    assert_eq!(sum, rate(&sends, "bytes_sent_per_second"), "{sends}");
    one.run(&["migration", "watch", "m0"]);
    // An idle connection reports no rate.
    until(&one, "two", "that nothing is sent any more", &|peer| {
        rate(peer, "bytes_sent_per_second") < 64 << 10
    });
}

#[test]
fn an_invitation_is_read_from_a_file_and_from_the_environment() {
    let ((one, address), (two, _), (three, _), (four, _)) = (host(), host(), host(), host());
    for (scene, name) in [(&one, "one"), (&two, "two"), (&three, "one"), (&four, "four")] {
        init(scene, name);
    }
    let invitation = || one.json(&["host", "invite"]).1["token"].as_str().unwrap().to_owned();
    std::fs::write(two.path("invitation"), invitation() + "\n").unwrap();
    let file = two.path("invitation").display().to_string();
    let joined = two.succeed(&["host", "join", &address, "--token-file", &file, "--allow-machines"]);
    assert!(joined.contains("one may bring VMs"), "{joined}");
    let mut command = three.command(&["host", "join", &address, "--json"]);
    let joined = command.env("STERNA_INVITATION", invitation()).output().unwrap();
    let joined: Value = serde_json::from_slice(&joined.stdout).unwrap();
    assert_eq!((&joined["name"], &joined["calls_itself"]), (&"one-2".into(), &"one".into()), "{joined}");
    assert_eq!(one.json(&["host", "show", "one-2"]).1["calls_itself"], "one");
    let (exit, error) = four.json(&["host", "join", &address, "--token-file", "/nowhere"]);
    assert_eq!(exit, 2, "{error}");
    let (exit, error) = four.json(&["host", "join", &address]);
    assert_eq!((exit, code(&error)), (4, "invitation_refused"));
}

#[test]
fn a_host_may_bring_machines_only_after_that_was_said() {
    let ((one, address), (two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let (_, invitation) = one.json(&["host", "invite", "--allow-machines"]);
    two.succeed(&["host", "join", &address, invitation["token"].as_str().unwrap()]);
    let machines = |scene: &Scene, name: &str| scene.json(&["host", "show", name]).1["machines"].as_bool();
    assert_eq!([machines(&one, "two"), machines(&two, "one")], [Some(true), Some(false)]);
    assert!(two.succeed(&["host", "set", "one", "--allow-machines"]).contains("one may bring VMs"));
    assert!(one.succeed(&["host", "set", "two", "--deny-machines"]).contains("two may bring no VMs"));
    assert_eq!([machines(&one, "two"), machines(&two, "one")], [Some(false), Some(true)]);
    assert!(one.succeed(&["host", "list"]).contains("denied"));
    assert_eq!(one.json(&["host", "set", "nobody", "--deny-machines"]).0, 3);
    assert_eq!(one.run(&["host", "set", "two"]).code, 2);
}

/// A disk that takes ten minutes at this rate, so that nothing ends by itself while a test runs.
const SLOW_BYTES: usize = 8 << 20;
const SLOW: [&str; 3] = ["--bandwidth", "16KiB/s", "--detach"];

#[test]
fn what_is_between_two_hosts_says_so_and_keeps_them_together() {
    let ((one, address), (two, _)) = (host(), host());
    init(&one, "one");
    init(&two, "two");
    let (_, invitation) = one.json(&["host", "invite"]);
    two.succeed(&["host", "join", &address, invitation["token"].as_str().unwrap()]);
    std::fs::write(one.path("image"), vec![7; SLOW_BYTES]).unwrap();
    let image = one.path("image").display().to_string();
    one.succeed(&["volume", "create", "v", "--store", "a", "--image", &image]);
    let refused = |scene: &Scene, line: &[&str], expected: (i32, &str), words: &str| {
        let (exit, error) = scene.json(line);
        assert_eq!((exit, code(&error)), expected, "{line:?}: {error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{line:?}: {error}");
    };
    refused(&one, &["migrate", "v", "--to", "two"], (4, "host_refused"), "--to HOST:STORE: a, b");
    refused(&one, &["migrate", "v", "--to", "one:b"], (2, "invalid_request"), "is this host");
    let post_copy = ["migrate", "v", "--to", "two:a", "--memory", "post-copy"];
    refused(&one, &post_copy, (2, "invalid_request"), "has no memory");

    one.succeed(&[&["migrate", "v", "--to", "two:a"], SLOW.as_slice()].concat());
    let (_, arriving) = two.json(&["volume", "show", "v"]);
    assert_eq!((&arriving["state"], &arriving["store"]), (&"arriving".into(), &"a".into()), "{arriving}");
    assert_eq!(arriving["size_bytes"], SLOW_BYTES, "{arriving}");
    assert!(two.succeed(&["migration", "show", "m0"]).contains("one knows"));
    refused(&two, &["volume", "remove", "v"], (4, "volume_busy"), "sterna migration cancel m0");
    refused(&one, &["volume", "resize", "v", "16MiB"], (4, "already_migrating"), "m0");
    for (scene, name) in [(&one, "two"), (&two, "one")] {
        refused(scene, &["host", "remove", name], (4, "host_in_use"), "sterna migration cancel m0");
    }
    one.succeed(&["migration", "cancel", "m0"]);
    assert_eq!(one.run(&["migration", "watch", "m0"]).code, 6);

    one.succeed(&["migrate", "v", "--to", "two:a", "--serve-here"]);
    let (_, forwarded) = one.json(&["volume", "show", "v"]);
    assert_eq!((&forwarded["state"], &forwarded["host"]), (&"forwarding".into(), &"two".into()));
    assert!(one.succeed(&["volume", "list"]).contains("at two"));
    refused(&one, &["migrate", "v", "--to", "b"], (3, "volume_not_found"), "is at host \"two\"");
    refused(&one, &["host", "remove", "two"], (4, "host_in_use"), "sterna volume remove v");
    one.succeed(&["host", "remove", "two", "--force"]);
}

#[test]
fn tokens_that_are_no_good_are_refused_with_their_reason() {
    let ((one, address), (two, _), (three, _)) = (host(), host(), host());
    for (scene, name) in [(&one, "one"), (&two, "two"), (&three, "three")] {
        init(scene, name);
    }
    let (_, invitation) = one.json(&["host", "invite"]);
    let token = invitation["token"].as_str().unwrap();
    assert_eq!(two.run(&["host", "join", &address, token]).code, 0);
    let check = |address: &str, token: &str, expected: &str, words: &str| {
        let (exit, error) = three.json(&["host", "join", address, token]);
        assert_eq!((exit, code(&error)), (4, expected), "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
    };
    check(&address, token, "invitation_refused", "redeemed already");
    check(&address, &token[..token.len() - 4], "invitation_refused", "copy the whole line again");
    check(&address, "nonsense", "invitation_refused", "this is no invitation");
    let closed = own_address().unwrap().to_string();
    check(&closed, token, "host_unreachable", "refused");
}
