//! Tests the executor alone: tasks, timers, and wake-ups from other threads.

use std::cell::Cell;
use std::sync::mpsc;

use futures_util::future::{Either, join_all, pending, select};

use super::*;
use crate::engine::{self, EngineChoice, EngineDriver};

/// A driver whose clock moves only when the executor waits, and which cannot be woken.
struct Virtual {
    now: Duration,
    parks: Rc<RefCell<Vec<Option<Duration>>>>,
}

struct Nobody;

impl Unpark for Nobody {
    fn unpark(&self) {}
}

impl Driver for Virtual {
    fn now(&self) -> Duration {
        self.now
    }

    fn park(&mut self, deadline: Option<Duration>) {
        self.parks.borrow_mut().push(deadline);
        self.now = self.now.max(deadline.expect("nothing would ever end this wait"));
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::new(Nobody)
    }
}

fn on_virtual_time() -> (Executor<Virtual>, Rc<RefCell<Vec<Option<Duration>>>>) {
    let parks = Rc::default();
    (Executor::new(Virtual { now: Duration::ZERO, parks: Rc::clone(&parks) }), parks)
}

fn on_each_driver(body: impl Fn(Executor<EngineDriver>)) {
    for choice in [EngineChoice::Ring, EngineChoice::Threads] {
        if let Ok((driver, _engine)) = engine::open(choice) {
            body(Executor::new(driver));
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn timers_fire_in_order_and_those_of_one_instant_as_they_were_set() {
    let (mut executor, _) = on_virtual_time();
    let (handle, order) = (executor.handle(), Rc::new(RefCell::new(Vec::new())));
    let sleeps = [3, 1, 2, 1, 0].into_iter().zip('a'..).map(|(seconds, name)| {
        let (order, sleep, handle) = (Rc::clone(&order), handle.sleep(seconds * SECOND), handle.clone());
        async move {
            sleep.await;
            order.borrow_mut().push((name, handle.now().as_secs()));
        }
    });
    executor.run(join_all(sleeps));
    assert_eq!(*order.borrow(), [('e', 0), ('b', 1), ('d', 1), ('c', 2), ('a', 3)]);
}

#[test]
fn the_executor_does_not_wait_once_its_main_task_is_done() {
    let (mut executor, parks) = on_virtual_time();
    assert_eq!(executor.run(async { 7 }), 7);
    let done = Rc::new(Cell::new(false));
    let task = Rc::clone(&done);
    executor.handle().spawn(async move { task.set(true) });
    executor.run_until(|| done.get());
    assert!(parks.borrow().is_empty());
}

#[test]
fn a_dropped_sleep_wakes_nobody_and_leaves_no_timer() {
    let (mut executor, parks) = on_virtual_time();
    let handle = executor.handle();
    executor.run(async move {
        for _ in 0..1000 {
            let (short, long) = (handle.sleep(SECOND), handle.sleep(100 * SECOND));
            assert!(matches!(select(short, long).await, Either::Left(_)));
        }
        assert!(handle.inner.timers.borrow().is_empty());
    });
    assert_eq!(parks.borrow().len(), 1000, "one wait a sleep");
}

#[test]
fn a_deadline_that_has_passed_lets_other_tasks_run_once() {
    let (mut executor, _) = on_virtual_time();
    let (handle, others) = (executor.handle(), Rc::new(Cell::new(0)));
    let task = Rc::clone(&others);
    executor.run(async move {
        handle.spawn(async move { task.set(task.get() + 1) });
        assert_eq!(others.get(), 0);
        handle.sleep(Duration::ZERO).await;
        assert_eq!(others.get(), 1);
    });
}

#[test]
fn a_task_is_woken_from_another_thread_while_the_driver_waits() {
    on_each_driver(|mut executor| {
        for _ in 0..200 {
            let (sender, receiver) = futures_channel::oneshot::channel();
            let thread = std::thread::spawn(move || sender.send(7).unwrap());
            assert_eq!(executor.run(receiver), Ok(7));
            thread.join().unwrap();
        }
    });
}

#[test]
fn many_wake_ups_from_many_threads_are_all_seen() {
    on_each_driver(|mut executor| {
        let (sender, mut receiver) = futures_channel::mpsc::unbounded();
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    (0..5000).for_each(|number| sender.unbounded_send(number).unwrap());
                })
            })
            .collect();
        drop(sender);
        let sum = executor.run(async move {
            let mut sum = 0_u64;
            while let Some(number) = futures_util::StreamExt::next(&mut receiver).await {
                sum += number;
            }
            sum
        });
        assert_eq!(sum, 4 * (0..5000).sum::<u64>());
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn an_unpark_ends_the_wait_of_a_loop_that_looks_at_something_else() {
    on_each_driver(|mut executor| {
        let stop = Arc::new(AtomicBool::new(false));
        let (unparker, flag) = (executor.driver().unparker(), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            flag.store(true, Ordering::SeqCst);
            unparker.unpark();
        });
        executor.run_until(|| stop.load(Ordering::SeqCst));
        thread.join().unwrap();
    });
}

#[test]
fn a_wait_ends_at_its_deadline_not_before() {
    on_each_driver(|mut executor| {
        let handle = executor.handle();
        executor.run(async move {
            let start = handle.now();
            handle.sleep(Duration::from_millis(3)).await;
            assert!(handle.now() - start >= Duration::from_millis(3));
        });
    });
}

struct Counted(Rc<Cell<u32>>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

#[test]
fn tasks_are_dropped_with_the_executor_and_on_request_without_being_polled_again() {
    let drops = Rc::new(Cell::new(0));
    let (mut executor, _) = on_virtual_time();
    let handle = executor.handle();
    let spawn = || {
        let counted = Counted(Rc::clone(&drops));
        handle.spawn(async move {
            let _counted = counted;
            pending::<()>().await;
        });
    };
    spawn();
    executor.run(handle.sleep(Duration::ZERO));
    assert_eq!(drops.get(), 0);
    executor.drop_tasks();
    assert_eq!(drops.get(), 1);
    spawn();
    drop(executor);
    assert_eq!(drops.get(), 2);
}

#[test]
fn a_task_may_spawn_when_it_is_dropped() {
    struct Spawns(Handle, Rc<Cell<u32>>);
    impl Drop for Spawns {
        fn drop(&mut self) {
            let done = Rc::clone(&self.1);
            self.0.spawn(async move { done.set(done.get() + 1) });
        }
    }
    let (mut executor, _) = on_virtual_time();
    let (handle, done) = (executor.handle(), Rc::new(Cell::new(0)));
    let spawns = Spawns(handle.clone(), Rc::clone(&done));
    handle.spawn(async move { drop(spawns) });
    executor.run(handle.sleep(Duration::ZERO));
    assert_eq!(done.get(), 1);
    let spawns = Spawns(handle.clone(), Rc::clone(&done));
    handle.spawn(async move {
        let _spawns = spawns;
        pending::<()>().await;
    });
    executor.run(handle.sleep(Duration::ZERO));
    executor.drop_tasks();
    assert_eq!(executor.run(async { 3 }), 3, "it works on");
    drop(executor);
}

#[test]
fn a_wake_up_that_comes_too_late_does_not_poll_the_next_task_in_the_slot() {
    let (mut executor, _) = on_virtual_time();
    let handle = executor.handle();
    let (keep, kept) = mpsc::channel();
    handle.spawn(std::future::poll_fn(move |context| {
        keep.send(context.waker().clone()).unwrap();
        Poll::Ready(())
    }));
    executor.run(handle.sleep(Duration::ZERO));
    let polls = Rc::new(Cell::new(0));
    let counted = Rc::clone(&polls);
    for _ in 0..4 {
        let counted = Rc::clone(&counted);
        handle.spawn(std::future::poll_fn(move |_| {
            counted.set(counted.get() + 1);
            Poll::<()>::Pending
        }));
    }
    executor.run(handle.sleep(Duration::ZERO));
    assert_eq!(polls.get(), 4);
    kept.recv().unwrap().wake();
    executor.run(handle.sleep(Duration::ZERO));
    assert_eq!(polls.get(), 4);
}
