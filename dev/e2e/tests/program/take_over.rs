//! Tests of `sterna serve --take-over`: another daemon takes over the clients of the running one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::Duration;

use testbed::nbd_client::{Operation, WriteDurability};
use testbed::own_address;

use crate::operations::pair;
use crate::scene::{Scene, code, outcome_of, program, stop_and_verify};

const TIMES: u32 = 20;

#[test]
fn twenty_daemons_in_a_row_break_no_connection_and_lose_nothing() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest_without_reconnects();
    let before = guest.mark();
    for number in 0..TIMES {
        // From then on each take-over interrupts a migration between two stores, which resumes.
        if number == TIMES / 2 {
            scene.succeed(&["migrate", "v", "--to", "b", "--bandwidth", "1MiB/s", "--detach"]);
        }
        scene.take_over(&[]).unwrap();
        assert_eq!(guest.failure(), None, "after {number}");
    }
    // It may have come to its end by now.
    scene.run(&["migration", "set", "m0", "--bandwidth", "none"]);
    scene.succeed(&["migration", "watch", "m0"]);
    assert_eq!(scene.store_of_volume(), "b");
    let summary = guest.between(&before, &guest.mark());
    println!("{TIMES} daemons took over; the guest waited {:?} at most", summary.longest_stall);
    // It bounds what is bound to be long if a connection is made anew by a client that waits before it tries again. The figure
    // itself depends on the machine.
    assert!(summary.longest_stall < Duration::from_secs(2), "{summary:?}");
    stop_and_verify(guest);
    assert_eq!(scene.log().unwrap().matches("NBD client adopted").count(), TIMES as usize);
    scene.stop();
}

#[test]
fn whoever_connects_meanwhile_waits_and_is_served() {
    let mut scene = Scene::started();
    scene.create_volume();
    scene.begin_to_take_over(&[("STERNA_FAIL_POINT", "before-take-up")]).unwrap();
    // Nobody had a connection, so it does not die.
    assert_eq!(scene.wait_for_former().unwrap(), 0);
    let mut client = scene.connect();
    client.perform(Operation::Flush).unwrap();
    // A client that has said nothing yet.
    let mut silent = UnixStream::connect(scene.path("run/volumes/v.sock")).unwrap();
    let mut greeting = [0; 18];
    silent.read_exact(&mut greeting).unwrap();
    scene.wait_for_answer().unwrap();
    scene.take_over(&[]).unwrap();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0, "it has to begin anew");
    client.perform(Operation::Flush).unwrap();
}

/// Negotiates by hand, by NBD_OPT_EXPORT_NAME.
fn choose(stream: &mut (impl Read + Write)) {
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut chosen = 3_u32.to_be_bytes().to_vec();
    chosen.extend([&b"IHAVEOPT"[..], &1_u32.to_be_bytes(), &1_u32.to_be_bytes(), b"v"].concat());
    stream.write_all(&chosen).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
}

#[test]
fn clients_of_other_hosts_go_on_and_new_ones_find_the_port() {
    let mut scene = Scene::started();
    let address = own_address().unwrap().to_string();
    scene.succeed(&["volume", "create", "v", "--store", "a", "--size", "1MiB", "--listen", &address]);
    let mut stream = TcpStream::connect(&address).unwrap();
    choose(&mut stream);
    let flush = [&0x2560_9513_u32.to_be_bytes()[..], &3_u32.to_be_bytes(), &[5; 8], &[0; 12]].concat();
    for _ in 0..3 {
        scene.take_over(&[]).unwrap();
        stream.write_all(&flush).unwrap();
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..], [&[0; 4][..], &[5; 8]].concat());
        choose(&mut TcpStream::connect(&address).unwrap());
    }
    let (_, volume) = scene.json(&["volume", "show", "v"]);
    assert_eq!(volume["state"], "serving", "{volume}");
}

#[test]
fn a_client_whose_volume_is_at_another_host_goes_on_whichever_daemon_is_taken_over() {
    let (mut one, mut two) = pair();
    let mut client = one.connect();
    one.succeed(&["migrate", "v", "--to", "two:a"]);
    for round in 0..3_u8 {
        one.take_over(&[]).unwrap();
        let data = vec![round + 1; 4096];
        client
            .perform(Operation::Write {
                offset: 8192,
                data: data.clone(),
                durability: WriteDurability::Volatile,
            })
            .unwrap();
        two.take_over(&[]).unwrap();
        let read = Operation::Read { offset: 8192, buffer: vec![0; 4096] };
        let Operation::Read { buffer, .. } = client.perform(read).unwrap() else { unreachable!() };
        assert!(buffer == data, "round {round}");
    }
    one.stop();
    two.stop();
}

#[test]
fn of_two_that_ask_at_once_one_goes_on() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    scene.begin_to_take_over(&[]).unwrap();
    let mut command = Command::new(program());
    command.args(["serve", "--take-over", "--config"]).arg(scene.folder().configuration());
    let other = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    assert_eq!(scene.wait_for_former().unwrap(), 0);
    // Whichever came first, the other one is refused, finds the folder taken, or takes over from the first.
    testbed::until("one of them serves", || Ok((scene.run(&["volume", "list"]).code == 0).then_some(())))
        .unwrap();
    // It may have ended.
    let _ = testbed::signal(other.id(), rustix::process::Signal::TERM);
    other.wait_with_output().unwrap();
    if scene.take_end().unwrap().is_some() {
        scene.start(None);
    }
    stop_and_verify(guest);
}

#[test]
fn half_a_request_goes_to_the_next_daemon() {
    let mut scene = Scene::started();
    scene.create_volume();
    let mut stream = UnixStream::connect(scene.path("run/volumes/v.sock")).unwrap();
    choose(&mut stream);
    let write = [&0x2560_9513_u32.to_be_bytes()[..], &1_u32.to_be_bytes(), &7_u64.to_be_bytes()].concat();
    let write = [&write[..], &4096_u64.to_be_bytes(), &4096_u32.to_be_bytes(), &[9; 4096]].concat();
    for cut in [3, 28, 2000] {
        stream.write_all(&write[..cut]).unwrap();
        scene.take_over(&[]).unwrap();
        stream.write_all(&write[cut..]).unwrap();
        let mut reply = [0; 16];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7], "cut at {cut}");
    }
    let read = Operation::Read { offset: 4096, buffer: vec![0; 4096] };
    let Operation::Read { buffer, .. } = scene.connect().perform(read).unwrap() else { unreachable!() };
    assert!(buffer.iter().all(|byte| *byte == 9));
}

#[test]
fn whichever_daemon_dies_in_between_clients_connect_again_and_lose_nothing() {
    for (point, former_dies) in [
        ("before-pass-on", true),
        ("after-pass-on", true),
        ("before-take-up", false),
        ("after-take-up", false),
    ] {
        let mut scene = Scene::new();
        scene.start(former_dies.then_some(point));
        scene.create_volume();
        let guest = scene.start_guest();
        let environment: &[_] = if former_dies { &[] } else { &[("STERNA_FAIL_POINT", point)] };
        scene.begin_to_take_over(environment).unwrap();
        let code = scene.wait_for_former().unwrap();
        assert_eq!(code, if former_dies { 137 } else { 0 }, "{point}");
        if former_dies {
            scene.wait_for_answer().unwrap();
        } else {
            scene.wait_for_death();
            scene.start(None);
        }
        stop_and_verify(guest);
        scene.stop();
    }
}

#[test]
fn a_daemon_that_is_killed_while_it_waits_takes_nothing_along() {
    let mut scene = Scene::started();
    scene.create_volume();
    let guest = scene.start_guest();
    for _ in 0..5 {
        scene.begin_to_take_over(&[]).unwrap();
        // At any moment: before it has asked, while the other one ends, or after that.
        scene.signal(rustix::process::Signal::KILL).unwrap();
        scene.wait();
        match scene.let_former_go_on().unwrap() {
            Some(code) => {
                assert_eq!(code, 0);
                scene.start(None);
            }
            None => scene.succeed_in_listing(),
        }
    }
    stop_and_verify(guest);
}

#[test]
fn where_nobody_serves_it_just_starts() {
    let mut scene = Scene::new();
    scene.begin_to_take_over(&[]).unwrap();
    scene.wait_for_answer().unwrap();
    assert!(scene.log().unwrap().contains("there is no daemon to take over from"));
    scene.stop();
    assert!(!scene.path("data/take-over.sock").exists());
}

#[test]
fn a_daemon_of_a_service_manager_is_left_to_that() {
    let mut scene = Scene::new();
    let manager = scene.path("notify.sock");
    let _manager = UnixDatagram::bind(&manager).unwrap();
    scene.start_with(&[("NOTIFY_SOCKET", manager.to_str().unwrap())]).unwrap();
    scene.create_volume();
    let mut client = scene.connect();
    let mut command = Command::new(program());
    command.args(["--json", "serve", "--take-over", "--config"]).arg(scene.folder().configuration());
    let outcome = outcome_of(command);
    let value: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((outcome.code, code(&value)), (8, "serve_failed"), "{value}");
    assert!(value["error"]["message"].as_str().unwrap().contains("systemctl restart sterna"), "{value}");
    client.perform(Operation::Flush).unwrap();
}

#[test]
fn a_service_manager_keeps_a_deleted_image_until_its_space_is_freed() {
    let mut scene = Scene::new();
    let path = scene.path("notify.sock");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    scene.start_with(&[("NOTIFY_SOCKET", path.to_str().unwrap())]).unwrap();
    scene.create_volume();
    scene.succeed(&["migrate", "v", "--to", "b"]);
    let wait_for = |words: [&str; 2]| {
        let mut message = [0; 4096];
        loop {
            let length = manager.recv(&mut message).unwrap();
            let said = String::from_utf8_lossy(&message[..length]).into_owned();
            if words.iter().all(|word| said.contains(word)) {
                return said.lines().find(|line| line.starts_with("FDNAME=")).unwrap().to_owned();
            }
        }
    };
    let kept = wait_for(["FDSTORE=1", "FDNAME=deleted."]);
    assert_eq!(wait_for(["FDSTOREREMOVE=1", "FDNAME=deleted."]), kept);
}

impl Scene {
    fn succeed_in_listing(&self) {
        self.succeed(&["volume", "list"]);
    }
}
