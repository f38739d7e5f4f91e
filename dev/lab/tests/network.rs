//! Tests of the lab's hosts and links, with the kernel's own TCP at both ends.
//!
//! Namespaces need root; where they are refused, these tests are left out. Other tests use the processors too. The tests
//! therefore wait, up to a minute, for bounds that need an idle machine.

#![expect(clippy::unwrap_used, reason = "a test that cannot prepare its scene has failed")]

#[path = "network/scene.rs"]
mod scene;
#[path = "network/shaped.rs"]
mod shaped;
#[path = "network/wide_area.rs"]
mod wide_area;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use lab::network::{BitRate, Conditions, Hosts, Namespace, NetworkError, measure};

use crate::scene::{Scene, Turn, interfaces, wait_until};

/// Names the parent's namespace to the child of a test.
const PARENT: &str = "STERNA_TEST_PARENT_NAMESPACE";

#[test]
fn a_host_has_nothing_but_its_own_loopback() {
    let Some(_turn) = Turn::take() else { return };
    let host = Namespace::create("a").unwrap();
    assert_eq!(interfaces(&host), ["lo"]);
    let output = host.command("readlink").arg("/proc/self/ns/net").output().unwrap();
    let inside = String::from_utf8(output.stdout).unwrap();
    let here = std::fs::read_link("/proc/self/ns/net").unwrap();
    assert!(inside.starts_with("net:[") && inside.trim() != here.to_str().unwrap(), "{inside} {here:?}");
}

#[test]
fn three_hosts_have_as_many_links_as_they_are_given() {
    let Some(_turn) = Turn::take() else { return };
    let mut hosts = Hosts::create(["a", "b", "c"]).unwrap();
    let rate = BitRate::megabits(1000);
    let first = hosts.shaped_link([0, 1], rate).unwrap();
    let second = hosts.shaped_link([0, 1], rate).unwrap();
    let third = hosts.wide_area_link([1, 2], Conditions::of(rate, Duration::from_millis(1))).unwrap();
    let [a, b, c] = [0, 1, 2].map(|host| hosts.get(host).unwrap());
    for (source, target, address) in [
        (a, b, first.addresses()[1]),
        (a, b, second.addresses()[1]),
        (b, a, second.addresses()[0]),
        (c, b, third.addresses()[0]),
    ] {
        assert_eq!(measure::round_trips(source, target, address, 1).unwrap().len(), 1);
    }
    assert_eq!(interfaces(b), ["lo", "shaped0", "shaped1", "wide2"]);
    drop((first, third));
    assert_eq!(interfaces(a), ["lo", "shaped1"]);
    assert_eq!(interfaces(b), ["lo", "shaped1"]);
}

#[test]
fn without_the_right_to_it_the_error_says_what_to_do() {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    // Capabilities belong to a thread, and to the threads that it starts.
    let checked = std::thread::spawn(|| {
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
            .unwrap();
        lab::network::check()
    });
    let error = checked.join().unwrap().unwrap_err();
    assert!(matches!(error, NetworkError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("run this as root"), "{error}");
}

#[test]
fn a_killed_process_leaves_no_host_behind() {
    let Some(_turn) = Turn::take() else { return };
    let parent = Namespace::create("parent").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_holds_hosts", "--nocapture"])
        .env(PARENT, parent.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with("ready")), "it never began");
    // The other end of this interface is in a host of the child, and ends with it.
    assert_eq!(interfaces(&parent), ["lo", "probe"]);
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the child's host is gone", || interfaces(&parent) == ["lo"]);
}

/// Is the process that the test above kills, not a test.
#[test]
fn child_that_holds_hosts() {
    let Some(parent) = std::env::var_os(PARENT) else { return };
    let scene = Scene::with_wide_area(Conditions::of(BitRate::megabits(100), Duration::from_millis(1)));
    let mut add = scene.source().command("ip");
    add.args(["link", "add", "probe", "type", "veth", "peer", "name", "probe", "netns"]).arg(parent);
    assert!(add.status().unwrap().success());
    println!("ready");
    std::io::stdout().flush().unwrap();
    // Waits to be killed.
    std::io::stdin().lines().for_each(drop);
}
