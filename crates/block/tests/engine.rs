//! Tests that both engines keep the same contract.

#![expect(clippy::unwrap_used, reason = "a test that cannot prepare its scene has failed")]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use block::buffer::PAGE;
use block::engine::ring::{self, Registration, RingOptions};
use block::engine::{self, AllocateMode, Engine, EngineChoice, EngineDriver, Interrupt, Received};
use block::{Buffer, ByteRange, Durability, Executor, Handle, IoError};
use futures_channel::oneshot;
use futures_util::FutureExt;
use futures_util::future::{Either, join, join_all, select};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

fn on_each_engine<F: Future<Output = ()> + 'static>(body: impl Fn(Handle, Rc<dyn Engine>) -> F) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let Ok((driver, engine)) = engine::open(choice) else {
            assert_eq!(choice, EngineChoice::Ring);
            omission::kernel_lacks("io_uring");
            continue;
        };
        eprintln!("engine: {}", engine.name());
        let mut executor: Executor<EngineDriver> = Executor::new(driver);
        executor.run(body(executor.handle(), engine));
    }
}

fn temporary_file() -> Arc<OwnedFd> {
    Arc::new(tempfile::tempfile().unwrap().into())
}

fn stream_pair() -> (Arc<OwnedFd>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Arc::new(ours.into()), theirs)
}

#[test]
fn a_file_reads_back_what_was_written_with_many_requests_in_flight() {
    on_each_engine(|_, engine| async move {
        // More than the queue has room for.
        const BLOCKS: u64 = 3000;
        let file = temporary_file();
        let block = |index: u64| {
            let mut buffer = engine.buffers().take(512);
            buffer.as_mut_slice().unwrap().fill((index % 251) as u8 + 1);
            buffer
        };
        let writes =
            (0..BLOCKS).map(|index| engine.write_at(&file, index * 512, block(index), Durability::Volatile));
        assert!(join_all(writes).await.iter().all(Result::is_ok));
        engine.sync(&file).await.unwrap();
        let reads = (0..BLOCKS).map(|index| engine.read_at(&file, index * 512, engine.buffers().take(512)));
        for (read, index) in join_all(reads).await.into_iter().zip(0..) {
            assert_eq!(read.unwrap().as_slice(), block(index).as_slice(), "block {index}");
        }
    });
}

#[test]
fn reading_beyond_the_end_of_a_file_is_an_error_and_nothing_waits_for_it() {
    on_each_engine(|_, engine| async move {
        let file = temporary_file();
        engine.write_at(&file, 0, Buffer::copy_of(b"short"), Durability::Durable).await.unwrap();
        let read = engine.read_at(&file, 0, Buffer::zeroed(100)).await;
        assert_eq!(read.unwrap_err(), IoError::os("read", Errno::IO));
        assert_eq!(engine.read_at(&file, 0, Buffer::zeroed(5)).await.unwrap().as_slice(), b"short");
        assert!(engine.read_at(&file, 7, Buffer::zeroed(0)).await.unwrap().is_empty());
    });
}

#[test]
fn a_shared_buffer_is_not_read_into() {
    on_each_engine(|_, engine| async move {
        let file = temporary_file();
        engine.write_at(&file, 0, Buffer::copy_of(&[7; 512]), Durability::Volatile).await.unwrap();
        let buffer = Buffer::zeroed(512);
        let other = buffer.clone();
        assert_eq!(engine.read_at(&file, 0, buffer).await.unwrap_err(), IoError::os("read", Errno::INVAL));
        assert!(other.is_zero());
    });
}

#[test]
fn holes_are_punched_and_read_as_zeroes() {
    on_each_engine(|_, engine| async move {
        let file = temporary_file();
        let page = PAGE as u64;
        engine.write_at(&file, 0, Buffer::copy_of(&[9; 4 * PAGE]), Durability::Volatile).await.unwrap();
        let range = ByteRange::new(page, 2 * page);
        engine.allocate(&file, AllocateMode::PunchHole, range).await.unwrap();
        let read = engine.read_at(&file, 0, Buffer::zeroed(4 * PAGE)).await.unwrap();
        assert!(read.slice(PAGE, 2 * PAGE).is_zero());
        assert_eq!((read.as_slice()[PAGE - 1], read.as_slice()[3 * PAGE]), (9, 9));
    });
}

#[test]
fn a_descriptor_that_cannot_be_written_fails_with_the_systems_answer() {
    on_each_engine(|_, engine| async move {
        let file: Arc<OwnedFd> = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
        let written = engine.write_at(&file, 0, Buffer::copy_of(b"x"), Durability::Volatile).await;
        assert_eq!(written, Err(IoError::os("write", Errno::BADF)));
    });
}

#[test]
fn a_dropped_write_keeps_its_buffer_until_it_has_landed() {
    on_each_engine(|handle, engine| async move {
        let file = temporary_file();
        for round in 0..50_u64 {
            let mut data = engine.buffers().take(16 * PAGE);
            data.as_mut_slice().unwrap().fill(0xAB);
            let write = engine.write_at(&file, round * 65_536, data, Durability::Volatile);
            // Polled once, then dropped by `select`.
            match select(write, handle.sleep(Duration::ZERO)).await {
                Either::Left((written, _)) => written.unwrap(),
                Either::Right(_) => {}
            }
            // The next user of the memory must not see it in the file.
            let mut next = engine.buffers().take(16 * PAGE);
            next.as_mut_slice().unwrap().fill(0xCD);
        }
        let length = rustix::fs::fstat(&*file).unwrap().st_size as usize;
        engine.sync(&file).await.unwrap();
        let written = engine.read_at(&file, 0, Buffer::zeroed(length)).await.unwrap();
        assert!(written.as_slice().iter().all(|byte| [0, 0xAB].contains(byte)));
    });
}

#[test]
fn a_large_message_arrives_whole_and_in_order_through_a_small_socket() {
    on_each_engine(|_, engine| async move {
        let (ours, mut theirs) = stream_pair();
        let reader = std::thread::spawn(move || {
            let mut received = Vec::new();
            theirs.read_to_end(&mut received).unwrap();
            received
        });
        let pieces: Vec<_> = (0..100_u8).map(|index| Buffer::copy_of(&vec![index; 50_000])).collect();
        let expected: Vec<u8> = pieces.iter().flat_map(|piece| piece.as_slice().to_vec()).collect();
        engine.send(&ours, pieces).await.unwrap();
        engine.send(&ours, vec![Buffer::copy_of(b"one piece")]).await.unwrap();
        engine.send(&ours, vec![]).await.unwrap();
        rustix::net::shutdown(&*ours, rustix::net::Shutdown::Write).unwrap();
        let received = reader.join().unwrap();
        assert_eq!(received.len(), expected.len() + 9);
        assert!(received.starts_with(&expected) && received.ends_with(b"one piece"));
    });
}

#[test]
fn receiving_waits_tells_the_end_and_does_not_mind_non_blocking_sockets() {
    on_each_engine(|handle, engine| async move {
        let (ours, mut theirs) = stream_pair();
        let flags = rustix::fs::fcntl_getfl(&*ours).unwrap();
        rustix::fs::fcntl_setfl(&*ours, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
        let received = Rc::new(RefCell::new(None));
        let (slot, task_engine, socket) = (Rc::clone(&received), Rc::clone(&engine), Arc::clone(&ours));
        handle.spawn(async move {
            *slot.borrow_mut() = Some(task_engine.receive(&socket, Buffer::zeroed(100)).await.unwrap());
        });
        handle.sleep(Duration::from_millis(5)).await;
        assert!(received.borrow().is_none());
        theirs.write_all(b"hello").unwrap();
        while received.borrow().is_none() {
            handle.sleep(Duration::from_millis(1)).await;
        }
        let (buffer, length) = received.borrow_mut().take().unwrap();
        assert_eq!((length, &buffer.as_slice()[..5]), (5, &b"hello"[..]));
        drop(theirs);
        assert_eq!(engine.receive(&ours, buffer).await.unwrap().1, 0);
        let broken = engine.send(&ours, vec![Buffer::copy_of(b"x")]).await;
        assert_eq!(broken, Err(IoError::os("send", Errno::PIPE)));
    });
}

#[test]
fn one_socket_is_read_and_written_at_the_same_time() {
    on_each_engine(|_, engine| async move {
        let (ours, mut theirs) = stream_pair();
        let echo = std::thread::spawn(move || {
            let mut received = vec![0; 1 << 20];
            theirs.read_exact(&mut received).unwrap();
            theirs.write_all(&received[..10]).unwrap();
        });
        let both = join(
            engine.receive(&ours, Buffer::zeroed(10)),
            engine.send(&ours, vec![Buffer::copy_of(&vec![3; 1 << 20])]),
        );
        let (received, sent) = both.await;
        sent.unwrap();
        assert_eq!(received.unwrap().1, 10);
        echo.join().unwrap();
    });
}

#[test]
fn connections_are_accepted_and_a_dropped_accept_leaves_the_next_to_others() {
    on_each_engine(|handle, engine| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener: Arc<OwnedFd> = Arc::new(UnixListener::bind(&path).unwrap().into());
        // No client connects: the dropped accept must not take the next connection.
        let accept = engine.accept(&listener);
        assert!(matches!(select(accept, handle.sleep(Duration::from_millis(2))).await, Either::Right(_)));
        handle.sleep(Duration::from_millis(2)).await;
        let mut client = UnixStream::connect(&path).unwrap();
        let connection = Arc::new(engine.accept(&listener).await.unwrap());
        client.write_all(b"hi").unwrap();
        assert_eq!(engine.receive(&connection, Buffer::zeroed(8)).await.unwrap().1, 2);
        // The last handle closes the connection at once, registered or not.
        drop(connection);
        handle.sleep(Duration::ZERO).await;
        handle.sleep(Duration::ZERO).await;
        client.set_nonblocking(true).unwrap();
        assert_eq!(client.read(&mut [0; 8]).unwrap(), 0, "the peer sees the end");
    });
}

#[test]
fn interrupted_receives_lose_no_byte_of_the_stream() {
    const LENGTH: usize = 1 << 20;
    on_each_engine(|handle, engine| async move {
        let (ours, mut theirs) = stream_pair();
        let expected: Vec<u8> = (0..LENGTH).map(|index| (index % 251) as u8).collect();
        let sent = expected.clone();
        let writer = std::thread::spawn(move || {
            // Small pieces, so that receives are interrupted before, in and after them.
            sent.chunks(97).for_each(|piece| theirs.write_all(piece).unwrap());
        });
        let (mut received, mut interruptions) = (Vec::new(), 0);
        loop {
            let interrupt = Interrupt::default();
            let mut receiving = engine.receive_unless(&interrupt, &ours, Buffer::zeroed(1000));
            // Begun, and left to the kernel for a while or not at all.
            let early = poll_fn(|context| Poll::Ready(receiving.as_mut().poll(context))).await;
            let outcome = match early {
                Poll::Ready(outcome) => outcome,
                Poll::Pending => {
                    if interruptions % 3 == 1 {
                        handle.sleep(Duration::ZERO).await;
                    }
                    interrupt.raise();
                    receiving.await
                }
            };
            match outcome.unwrap() {
                Received::Bytes(_, 0) => break,
                Received::Bytes(buffer, length) => received.extend_from_slice(&buffer.as_slice()[..length]),
                Received::Interrupted(buffer) => {
                    assert_eq!(buffer.len(), 1000);
                    interruptions += 1;
                }
            }
        }
        writer.join().unwrap();
        assert!(received == expected, "{} of {LENGTH} bytes, {interruptions} interruptions", received.len());
    });
}

#[test]
fn an_interrupted_accept_leaves_who_comes_next_to_others() {
    on_each_engine(|handle, engine| async move {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener: Arc<OwnedFd> = Arc::new(UnixListener::bind(&path).unwrap().into());
        let interrupt = Interrupt::default();
        let mut accepting = engine.accept_unless(&interrupt, &listener);
        assert!(poll_fn(|context| Poll::Ready(accepting.as_mut().poll(context))).await.is_pending());
        handle.sleep(Duration::from_millis(1)).await;
        interrupt.raise();
        assert!(accepting.await.unwrap().is_none());
        let _client = UnixStream::connect(&path).unwrap();
        let again = Interrupt::default();
        assert!(engine.accept_unless(&again, &listener).await.unwrap().is_some());
        // A client that came before the interrupt is accepted or left in the socket, not dropped.
        let _client = UnixStream::connect(&path).unwrap();
        let late = engine.accept_unless(&again, &listener);
        again.raise();
        let accepted = late.await.unwrap();
        assert!(accepted.is_some() || engine.accept(&listener).await.is_ok());
    });
}

#[test]
fn blocking_work_runs_elsewhere_and_other_tasks_go_on() {
    on_each_engine(|handle, engine| async move {
        let here = std::thread::current().id();
        let (release, held) = std::sync::mpsc::channel::<()>();
        let work = engine::run_blocking(&engine, move || {
            held.recv().unwrap();
            std::thread::current().id()
        });
        let other = async move {
            handle.sleep(Duration::from_millis(1)).await;
            release.send(()).unwrap();
        };
        let (there, ()) = join(work, other).await;
        assert_ne!(there.unwrap(), here);
    });
}

#[test]
fn requests_after_the_driver_is_gone_are_closed_or_done_and_never_hang() {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        let Ok((driver, engine)) = engine::open(choice) else { continue };
        let (file, (ours, _theirs)) = (temporary_file(), stream_pair());
        let mut executor = Executor::new(driver);
        let pending = engine.receive(&ours, Buffer::zeroed(10));
        executor.handle().spawn(async move { drop(pending.await) });
        executor.run(executor.handle().sleep(Duration::ZERO));
        drop(executor);
        let waker = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(waker);
        let mut write = engine.write_at(&file, 0, Buffer::zeroed(10), Durability::Volatile);
        if choice == EngineChoice::Ring {
            assert_eq!(write.as_mut().poll(&mut context), Poll::Ready(Err(IoError::Closed)));
        }
    }
}

#[test]
fn writes_in_flight_when_the_driver_is_dropped_have_landed_when_it_is_gone() {
    let Ok((driver, engine)) = engine::open(EngineChoice::Ring) else {
        return omission::kernel_lacks("io_uring");
    };
    let file = temporary_file();
    let mut executor = Executor::new(driver);
    for index in 0..64 {
        let write = engine.write_at(&file, index * 4096, Buffer::copy_of(&[1; 4096]), Durability::Durable);
        executor.handle().spawn(async move { assert_eq!(write.await, Ok(())) });
    }
    executor.turn();
    drop(executor);
    let mut read = vec![0; 64 * 4096];
    let before = rustix::io::pread(&*file, &mut read, 0).unwrap();
    let first = read.clone();
    // The file stays the same, and holds whole requests.
    assert_eq!(rustix::io::pread(&*file, &mut read, 0).unwrap(), before);
    assert_eq!(read, first);
    assert_eq!(Arc::strong_count(&file), 1, "no operation holds the file");
}

#[test]
fn a_disk_is_given_the_second_of_two_writes_before_the_thread_turns_to_the_ring() {
    let Ok((driver, engine)) = ring::open(RingOptions::default()) else {
        return omission::kernel_lacks("io_uring");
    };
    let mut executor = Executor::new(driver);
    executor.run(async move {
        let file = temporary_file();
        let written = || rustix::fs::fstat(&*file).unwrap().st_size;
        let mut first = engine.write_at(&file, 0, Buffer::copy_of(&[1; 512]), Durability::Volatile);
        let mut second = engine.write_at(&file, 512, Buffer::copy_of(&[2; 512]), Durability::Volatile);
        assert!(first.as_mut().now_or_never().is_none());
        // No other operation is in flight, so a receive can be submitted with it.
        assert_eq!(written(), 0);
        assert!(second.as_mut().now_or_never().is_none());
        // N.B. the page cache takes such a write during the submission, or a kernel worker does at once.
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while written() < 1024 && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(written(), 1024, "both were submitted while this thread did not wait");
        assert!(join(first, second).await.0.is_ok());
    });
}

#[test]
fn a_lane_that_looks_before_it_sleeps_misses_no_completion_no_other_thread_and_no_timer() {
    const BURST: usize = 16;
    let Ok((driver, engine)) = ring::open(RingOptions::default()) else {
        return omission::kernel_lacks("io_uring");
    };
    let mut executor = Executor::new(driver);
    let handle = executor.handle();
    // A slow disk that completes all its requests at once, made of counters.
    let disk: Vec<Arc<OwnedFd>> =
        (0..BURST).map(|_| Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap())).collect();
    let (ask, asked) = std::sync::mpsc::channel::<(Duration, oneshot::Sender<()>)>();
    let heads = disk.clone();
    let other = std::thread::spawn(move || {
        for (time, answer) in asked {
            let began = std::time::Instant::now();
            while began.elapsed() < time {
                std::hint::spin_loop();
            }
            for head in &heads {
                assert_eq!(rustix::io::write(head, &7_u64.to_ne_bytes()), Ok(8));
            }
            // A client takes the same time again.
            while began.elapsed() < 2 * time {
                std::hint::spin_loop();
            }
            answer.send(()).unwrap();
        }
    });
    executor.run(async move {
        for burst in 0..600_u64 {
            let (answer, answered) = oneshot::channel();
            // Constant at first, so that it is learnt; then from much less to much more.
            let time = if burst < 300 { 120 } else { burst % 30 * 10 };
            let reads = disk.iter().map(|head| engine.read_at(head, 0, Buffer::zeroed(8)));
            ask.send((Duration::from_micros(time), answer)).unwrap();
            for read in join_all(reads).await {
                assert_eq!(read.unwrap().as_slice(), 7_u64.to_ne_bytes());
            }
            answered.await.unwrap();
            if burst % 10 == 0 {
                let due = handle.now() + Duration::from_micros(burst % 7 * 30);
                handle.sleep_until(due).await;
                assert!(handle.now() >= due);
            }
        }
    });
    other.join().unwrap();
}

#[test]
fn a_small_ring_without_registration_does_the_same() {
    let options = RingOptions { entries: 4, registration: Registration::Off };
    let Ok((driver, engine)) = ring::open(options) else {
        return omission::kernel_lacks("io_uring");
    };
    let mut executor = Executor::new(driver);
    executor.run(async move {
        let file = temporary_file();
        // Far more than the queue has room for, some dropped while they wait in the backlog.
        let mut dropped: Vec<_> = (0..500)
            .map(|index| {
                engine.write_at(&file, 4096 * index, Buffer::copy_of(&[9; 4096]), Durability::Volatile)
            })
            .collect();
        let kept = (0..500).map(|index| {
            let offset = 4096 * (1000 + index);
            engine.write_at(&file, offset, Buffer::copy_of(&[7; 4096]), Durability::Volatile)
        });
        let mut kept = std::pin::pin!(join_all(kept));
        let waker = std::task::Waker::noop();
        let mut context = std::task::Context::from_waker(waker);
        for write in &mut dropped {
            let _ = write.as_mut().poll(&mut context);
        }
        let _ = kept.as_mut().poll(&mut context);
        drop(dropped);
        // A read with a shared buffer is refused, although it would have to wait.
        let shared = Buffer::zeroed(4096);
        let _other = shared.clone();
        let refused = engine.read_at(&file, 0, shared).now_or_never();
        assert!(matches!(refused, Some(Err(_))), "it waits in the backlog for ever");
        assert!(kept.await.iter().all(Result::is_ok));
        let read = engine.read_at(&file, 4096 * 1000, Buffer::zeroed(4096 * 500)).await.unwrap();
        assert!(read.as_slice().iter().all(|byte| *byte == 7));
    });
}

#[test]
fn more_files_than_can_be_registered_are_used_and_closed() {
    on_each_engine(|handle, engine| async move {
        let pairs: Vec<_> = (0..100).map(|_| stream_pair()).collect();
        let sends = pairs.iter().map(|(ours, _)| engine.send(ours, vec![Buffer::copy_of(b"hello")]));
        assert!(join_all(sends).await.iter().all(Result::is_ok));
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        drop(ours);
        handle.sleep(Duration::ZERO).await;
        handle.sleep(Duration::ZERO).await;
        for mut peer in theirs {
            let mut received = Vec::new();
            peer.read_to_end(&mut received).unwrap();
            assert_eq!(received, b"hello");
        }
    });
}
