//! How much may be asked of a volume's owner at a time, and what keeps a request from asking for more.
//!
//! ```text
//!   requests ──► pieces, first come first served ──► [ window of the volume ] ──► asked for, and not answered yet
//! ```
//! Each volume has a window of its own, so one whose owner hangs keeps nothing that another one needs. A piece has its
//! part of it until the owner has answered or is another process, also if nobody waits for it any more: what the owner
//! holds of one volume is never more than this.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use block::signal::Signal;

/// Bytes that may be asked for or sent, and not answered. It fills 350 Mbit/s at 180 ms; the owner sets as much aside for
/// each volume ([`super::Service`]).
pub(super) const WINDOW_BYTES: u64 = 8 << 20;
/// What a piece costs at least: of the smallest ones no more are under way than the owner carries out at a time.
const PIECE_BYTES_MIN: u64 = 16 << 10;

/// The window of one volume.
#[derive(Default)]
pub(super) struct Window {
    state: Rc<State>,
}

#[derive(Default)]
struct State {
    used: Cell<u64>,
    next: Cell<u64>,
    /// Numbers of the pieces that wait, in the order in which they came.
    waiting: RefCell<BTreeSet<u64>>,
    changed: Signal,
}

/// A part of the window; dropping it gives it back.
pub(crate) struct Permit {
    state: Rc<State>,
    bytes: u64,
}

/// A place among those who wait.
struct Place<'a> {
    state: &'a State,
    number: u64,
}

impl Window {
    /// Waits until a piece of so many bytes has room.
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
    fn last(state: &'a State) -> Self {
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
