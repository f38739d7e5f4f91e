//! The notices that wait for one destination: a machine without I/O.
//!
//! They are sent in order, one at a time. What is not taken is tried again, after ever longer pauses, for a day. Too many push the
//! oldest out: a destination that is away costs a bounded amount of memory, and nobody's time.

use std::collections::VecDeque;
use std::time::Duration;

use api::Notice;

/// The most notices that wait.
const WAITING_MAX: usize = 256;
/// The pause after the first failure. It doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// Older ones are of no use.
const AGE_MAX_MS: u64 = 24 * 3600 * 1000;

/// The notices for one destination.
#[derive(Debug, Default)]
pub(super) struct Post {
    waiting: VecDeque<Notice>,
    is_sending: bool,
    /// When the first one may be sent; failures since the last success; the last of these.
    not_before: Duration,
    failures: u32,
    fault: Option<String>,
    lost: u64,
}

impl Post {
    /// Adds notices at the end.
    pub(super) fn add(&mut self, notices: impl IntoIterator<Item = Notice>) {
        self.waiting.extend(notices);
        // The first one may be on its way.
        let kept = usize::from(self.is_sending);
        while self.waiting.len() > WAITING_MAX {
            self.waiting.remove(kept);
            self.lost += 1;
        }
    }

    pub(super) fn waiting(&self) -> impl ExactSizeIterator<Item = &Notice> {
        self.waiting.iter()
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    pub(super) fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Returns the notice to send at `now`. [`Self::ended`] must follow.
    pub(super) fn take(&mut self, now: Duration, now_unix_ms: u64) -> Option<Notice> {
        if self.is_sending || now < self.not_before {
            return None;
        }
        let is_old = |notice: &Notice| now_unix_ms.saturating_sub(notice.time_unix_ms) > AGE_MAX_MS;
        while self.waiting.front().is_some_and(is_old) {
            self.waiting.pop_front();
            self.lost += 1;
        }
        let first = self.waiting.front().cloned();
        self.is_sending = first.is_some();
        if first.is_none() {
            (self.failures, self.fault) = (0, None);
        }
        first
    }

    /// Takes whether the notice that was sent was taken.
    pub(super) fn ended(&mut self, now: Duration, result: Result<(), String>) {
        self.is_sending = false;
        match result {
            Ok(()) => {
                self.waiting.pop_front();
                (self.failures, self.fault) = (0, None);
            }
            Err(fault) => {
                let pause = PAUSE_MIN * 2_u32.pow(self.failures.min(16));
                self.not_before = now + pause.min(PAUSE_MAX);
                self.failures = self.failures.saturating_add(1);
                self.fault = Some(fault);
            }
        }
    }

    /// Returns when there is something to send; `None`: not before another one is added, or the present one has ended.
    pub(super) fn wakes_at(&self) -> Option<Duration> {
        (!self.is_sending && !self.waiting.is_empty()).then_some(self.not_before)
    }
}

#[cfg(test)]
mod tests {
    use api::{NoticeEvent, NoticeLevel, Part};

    use super::*;

    fn notice(number: u64) -> Notice {
        Notice {
            id: number.to_string(),
            time_unix_ms: 0,
            host: "alpha".to_owned(),
            event: NoticeEvent::Begun,
            level: NoticeLevel::Problem,
            part: Part::Store,
            name: None,
            message: String::new(),
        }
    }

    #[test]
    fn notices_are_sent_in_order_and_again_until_they_are_taken() {
        let mut post = Post::default();
        post.add([notice(1), notice(2)]);
        let (mut now, mut tries) = (Duration::ZERO, 0);
        let mut taken = Vec::new();
        while let Some(at) = post.wakes_at() {
            now = now.max(at);
            let Some(sent) = post.take(now, 0) else { panic!("it wakes in vain") };
            assert!(post.take(now, 0).is_none(), "one at a time");
            tries += 1;
            let is_taken = tries % 4 == 0;
            post.ended(now, if is_taken { Ok(()) } else { Err("no".to_owned()) });
            taken.extend(is_taken.then_some(sent.id));
        }
        assert_eq!(taken, ["1", "2"]);
        assert_eq!(now, 2 * Duration::from_secs(1 + 2 + 4));
    }

    #[test]
    fn a_destination_that_is_away_for_long_costs_little() {
        let mut post = Post::default();
        let (mut now, mut tries) = (Duration::ZERO, 0);
        while now < Duration::from_secs(24 * 3600) {
            post.add([notice(tries)]);
            now = now.max(post.wakes_at().unwrap());
            let sent = post.take(now, 0);
            post.add([notice(tries)]);
            assert_eq!(post.waiting().next(), sent.as_ref(), "it is on its way, so it stays");
            post.ended(now, Err("no".to_owned()));
            tries += 1;
        }
        assert!(post.waiting().len() <= WAITING_MAX && post.lost() > 0);
        assert!(tries < 24 * 3600 / 300 + 20, "{tries}");
    }

    #[test]
    fn what_is_a_day_old_is_not_sent() {
        let mut post = Post::default();
        post.add([notice(1)]);
        assert_eq!(post.take(Duration::ZERO, AGE_MAX_MS + 1), None);
        assert_eq!((post.waiting().len(), post.lost(), post.wakes_at()), (0, 1, None));
    }
}
