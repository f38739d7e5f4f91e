//! Tests of hostile clients of a volume.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::ensure;
use e2e::until;

use crate::raw::{Request, attach, connect, is_greeted, reply, wait_for_end};
use crate::{connections, undisturbed};

const READ: u16 = 0;
const WRITE: u16 = 1;
/// Largest number of connections of a volume.
const CONNECTIONS_MAX: usize = 64;

#[test]
fn clients_that_dawdle_are_cut_and_a_crowd_is_refused() {
    undisturbed(|scene, volume| {
        let (mut dawdlers, mut refused) = (Vec::new(), 0);
        // Each of thousands of clients takes a place if there is one, and sends half of a message.
        for _ in 0..3000 {
            let mut stream = connect(&volume.socket)?;
            if is_greeted(&mut stream)? {
                // The first may be disconnected before the last connect, and others take their places.
                stream.write_all(b"\0\0")?;
                dawdlers.push(stream);
            } else {
                refused += 1;
            }
        }
        ensure!(connections(scene)? <= CONNECTIONS_MAX, "more are connected than there are places");
        ensure!(dawdlers.len() > CONNECTIONS_MAX / 2, "only {} were let in", dawdlers.len());
        ensure!(refused > 0, "nobody was refused");
        for dawdler in dawdlers {
            wait_for_end(dawdler)?;
        }
        until("the guest is alone again", || Ok((connections(scene)? == 1).then_some(())))?;
        drop(attach(&volume.socket)?);
        Ok(())
    });
}

#[test]
fn clients_that_never_read_their_replies_cost_bounded_memory_and_nobody_else() {
    // The common limit of 256 MiB, 64 MiB for each connection, and the daemon's own memory.
    const GROWTH_MAX: u64 = 448 << 20;
    undisturbed(|scene, volume| {
        let before = scene.resident_bytes()?;
        let mut silent = Vec::new();
        for _ in 0..16 {
            let mut stream = attach(&volume.socket)?;
            stream.set_write_timeout(Some(Duration::from_millis(100)))?;
            let request = Request::read(0, 8 << 20).bytes();
            // Each would get 3 GiB of replies if the daemon did not stop reading.
            let _ = stream.write_all(&request.repeat(400));
            silent.push(stream);
        }
        let growth = scene.resident_bytes()?.saturating_sub(before);
        ensure!(growth < GROWTH_MAX, "the daemon has grown by {growth} bytes");
        Ok(())
    });
}

#[test]
fn connections_that_break_in_the_midst_of_requests_harm_nobody() {
    undisturbed(|_, volume| {
        let write = Request::read(0, 1 << 20).command(WRITE);
        for round in 0..300_usize {
            let mut stream = attach(&volume.socket)?;
            // These ranges are beyond the guest's part. The last one announces a payload that never arrives completely.
            let reads = Request::read(0, 64 << 10).bytes().repeat(round % 7);
            stream.write_all(&reads)?;
            stream.write_all(&write.bytes()[..round % 29])?;
            if round % 29 == 28 {
                stream.write_all(&vec![0xee; round * 1000])?;
            }
            match round % 3 {
                // The client closes with unread replies, so the server sees a reset.
                0 => drop(stream),
                // The client closes only its sending side.
                1 => {
                    stream.shutdown(Shutdown::Write)?;
                    wait_for_end(stream)?;
                }
                _ => stream.shutdown(Shutdown::Both)?,
            }
        }
        Ok(())
    });
}

#[test]
fn requests_with_every_wrong_field_are_refused_one_by_one() {
    undisturbed(|_, volume| {
        let mut stream = attach(&volume.socket)?;
        let good = Request::read(0, 512);
        let mut wrong: Vec<Request> = [8, 9, 255, u16::MAX].map(|command| good.command(command)).to_vec();
        wrong.extend((0..16).filter(|bit| *bit != 0).map(|bit| Request { flags: 1 << bit, ..good }));
        wrong
            .extend([u64::MAX, 1 << 63, 1 << 62, volume.size_bytes].map(|offset| Request { offset, ..good }));
        wrong.extend([0, u32::MAX, (32 << 20) + 1].map(|length| Request { length, ..good }));
        // These have no negotiated context, or ranges beyond the end. A flush with a range is harmless, so it is not here.
        wrong.push(good.command(7));
        for command in [4, 5, 6] {
            wrong.push(Request { offset: volume.size_bytes, ..good.command(command) });
            wrong.push(Request { offset: u64::MAX - 100, ..good.command(command) });
        }
        for request in wrong {
            stream.write_all(&request.bytes())?;
            let error = reply(&mut stream)?;
            ensure!(error != 0 || may_succeed(&request), "{request:?} was carried out");
            if error == 0 {
                skip(&mut stream, &request)?;
            }
            // The connection stays open.
            stream.write_all(&good.bytes())?;
            ensure!(reply(&mut stream)? == 0, "a good request after {request:?}");
            skip(&mut stream, &good)?;
        }
        for magic in [0, u32::MAX, good.magic ^ 1] {
            let mut stream = attach(&volume.socket)?;
            stream.write_all(&Request { magic, ..good }.bytes())?;
            wait_for_end(stream)?;
        }
        Ok(())
    });
}

/// Returns whether a request may succeed: a read with a meaningless flag, or an empty read.
fn may_succeed(request: &Request) -> bool {
    request.command == READ && (request.flags == 1 || request.length == 0)
}

fn skip(stream: &mut UnixStream, request: &Request) -> anyhow::Result<()> {
    stream.read_exact(&mut vec![0; request.length as usize])?;
    Ok(())
}
