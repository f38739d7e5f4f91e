//! The limit of a volume's bytes in flight to its owner, and the queue of requests that wait for room.
//!
//! ```text
//!   requests ──► pieces, first come first served ──► [ window of the volume ] ──► in flight at the owner
//! ```
//! Each volume has its own window, so a volume whose owner hangs blocks no other one. A piece keeps its share until the owner has
//! answered or restarted, even if its client has gone. So the owner never holds more than this of one volume.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use block::signal::Signal;

/// The limit of bytes in flight. It fills 350 Mbit/s at 180 ms; the owner sets as much aside for each volume
/// ([`super::Service`]).
pub(super) const WINDOW_BYTES: u64 = 8 << 20;
/// The minimum share of a piece: limits small pieces in flight to the owner's number of concurrent calls.
const PIECE_BYTES_MIN: u64 = 16 << 10;

#[derive(Default)]
pub(super) struct Window {
    state: Rc<WindowState>,
}

#[derive(Default)]
struct WindowState {
    used: Cell<u64>,
    next: Cell<u64>,
    /// Numbers of the waiting pieces, in their order of arrival.
    waiting: RefCell<BTreeSet<u64>>,
    changed: Signal,
}

/// A share of the window; dropping it gives it back.
pub(crate) struct Permit {
    state: Rc<WindowState>,
    bytes: u64,
}

struct Place<'a> {
    state: &'a WindowState,
    number: u64,
}

impl Window {
    pub(super) async fn enter(&self, bytes: usize) -> Permit {
        let (state, bytes) = (&self.state, (bytes as u64).clamp(PIECE_BYTES_MIN, WINDOW_BYTES));
        let has_room = || state.used.get() + bytes <= WINDOW_BYTES;
        if !state.waiting.borrow().is_empty() || !has_room() {
            let place = Place::last(state);
            state.changed.wait_for(|| (place.is_first() && has_room()).then_some(())).await;
        }
        state.used.set(state.used.get() + bytes);
        Permit { state: Rc::clone(state), bytes }
    }
}

impl<'a> Place<'a> {
    fn last(state: &'a WindowState) -> Self {
        let number = state.next.get();
        state.next.set(number + 1);
        state.waiting.borrow_mut().insert(number);
        Self { state, number }
    }

    fn is_first(&self) -> bool {
        self.state.waiting.borrow().first() == Some(&self.number)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.state.waiting.borrow_mut().remove(&self.number);
        self.state.changed.notify();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.state.used.set(self.state.used.get() - self.bytes);
        self.state.changed.notify();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn pieces_enter_in_the_order_in_which_they_came_and_who_gives_up_is_in_nobodys_way() {
        let window = Window::default();
        let half = (WINDOW_BYTES / 2) as usize;
        let first = window.enter(half).now_or_never().unwrap();
        let second = window.enter(half).now_or_never().unwrap();
        let mut large = Box::pin(window.enter(half));
        let mut small = Box::pin(window.enter(1));
        assert!(large.as_mut().now_or_never().is_none() && small.as_mut().now_or_never().is_none());
        drop(first);
        assert!(small.as_mut().now_or_never().is_none(), "it overtakes a larger one");
        drop(large);
        let small = small.now_or_never().unwrap();
        assert!(window.enter(half).now_or_never().is_none(), "there is no room for it");
        drop((second, small));
        assert_eq!(window.state.used.get(), 0);
        assert!(window.enter(2 * WINDOW_BYTES as usize).now_or_never().is_some());
    }
}
