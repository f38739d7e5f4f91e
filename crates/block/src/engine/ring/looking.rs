//! Decides when and how long a lane polls for the next event instead of sleeping. One such time is a *look*. Without I/O.
//!
//! A sleeping thread takes tens of microseconds to wake up on a virtual processor, and some on an idle real one. That is little
//! beside a wait of a millisecond. But if many operations end together, as on a disk that raises one interrupt for all of them, a
//! lane waits twice for each burst and knows for what:
//!
//! ```text
//!   nothing is under way:    the client has its replies       ├── look ──┤ sleep
//!                            and asks again in a moment
//!   a burst is under way:    the disk takes as long           ├── sleep ─────────────┤── look ──┤ sleep
//!                            as it took before                                expected ↑
//! ```
//!
//! Polling takes processor time from others, so it has a budget. Each operation of a burst earns a little for either kind of
//! look, and less while looks find nothing. So the cost of looks is bounded by the lane's work. An idle lane sleeps. So does a
//! lane with few operations in flight, for which a look each would cost too much.

use std::ops::Range;
use std::time::Duration;

const BURST_MIN: usize = 4;
/// The most that an operation of a burst earns, for either kind: together less than half of its processor time.
const EARNED_MAX: Duration = Duration::from_micros(2);
/// The least that it earns, so that a look is tried now and then.
const EARNED_MIN: Duration = Duration::from_nanos(50);
const CREDIT_MAX: Duration = Duration::from_micros(60);
/// The least credit for a look to be worthwhile.
const LOOK_MIN: Duration = Duration::from_micros(20);
/// The longest look: a client that has not asked again by then is not busy with the replies.
const LOOK_MAX: Duration = Duration::from_micros(40);
/// How long before its expected end the look for a burst begins, because ends vary.
const AHEAD: Duration = Duration::from_micros(15);
/// The assumed time for waking up before any was measured.
const WAKE_UP_AT_FIRST: Duration = Duration::from_micros(30);
/// A longer time was not spent waking up: other threads had the processor.
const WAKE_UP_MAX: Duration = Duration::from_micros(100);
/// Where waking up takes less, polling gains too little.
const WAKE_UP_MIN: Duration = Duration::from_micros(8);
/// Bursts with an expected time outside this range are slept through: there is no time to sleep before the look,
/// or nothing to gain.
const BURST_TIME: Range<Duration> = Duration::from_micros(50)..Duration::from_millis(1);

pub(super) struct Looking {
    client: Account,
    disk: Account,
    burst_time: Duration,
    wake_up: Duration,
}

struct Account {
    credit: Duration,
    earned: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    Client,
    Disk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Asleep,
    Awake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) expected: Expected,
    pub(super) sleep: Duration,
    /// The longest polling if nothing has come by then.
    pub(super) look: Duration,
}

impl Looking {
    /// Notes that `ended` of the `operations` file operations in flight have ended. `age` is the time since the first of them
    /// began, or since the previous ones ended.
    pub(super) fn ended(&mut self, ended: usize, operations: usize, age: Duration, seen: Seen) {
        if operations < BURST_MIN {
            return;
        }
        self.client.earn(ended);
        self.disk.earn(ended);
        // A sooner end belongs to the same burst.
        if age >= BURST_TIME.start {
            let age = if seen == Seen::Asleep { age.saturating_sub(self.wake_up) } else { age };
            // An extremely long burst says little about the next.
            self.burst_time = follow(self.burst_time, age.min(BURST_TIME.end * 2));
        }
    }

    /// Plans a wait while `operations` file operations are in flight, the oldest for `age`; `None`: sleep without a look.
    pub(super) fn plan(&self, operations: usize, age: Duration) -> Option<Plan> {
        match operations {
            0 => {
                let look = self.client.afford()?;
                Some(Plan { expected: Expected::Client, sleep: Duration::ZERO, look })
            }
            BURST_MIN.. if BURST_TIME.contains(&self.burst_time) && age < self.burst_time => {
                let look = self.disk.afford()?;
                let sleep = (self.burst_time - age).saturating_sub(AHEAD + self.wake_up);
                Some(Plan { expected: Expected::Disk, sleep, look })
            }
            _ => None,
        }
    }

    pub(super) fn woke_up(&mut self, late: Duration) {
        self.wake_up = follow(self.wake_up, late.min(WAKE_UP_MAX));
    }

    pub(super) fn looked(&mut self, expected: Expected, time: Duration, found: bool) {
        let paid = found && self.wake_up >= WAKE_UP_MIN;
        match expected {
            Expected::Client => self.client.spend(time, paid),
            Expected::Disk => self.disk.spend(time, paid),
        }
    }
}

impl Default for Looking {
    fn default() -> Self {
        let (client, disk) = (Account::default(), Account::default());
        Self { client, disk, burst_time: Duration::ZERO, wake_up: WAKE_UP_AT_FIRST }
    }
}

impl Account {
    fn earn(&mut self, operations: usize) {
        let earned = self.earned.saturating_mul(u32::try_from(operations).unwrap_or(u32::MAX));
        self.credit = self.credit.saturating_add(earned).min(CREDIT_MAX);
    }

    fn afford(&self) -> Option<Duration> {
        if self.credit < LOOK_MIN { None } else { Some(self.credit.min(LOOK_MAX)) }
    }

    fn spend(&mut self, time: Duration, paid: bool) {
        self.credit = self.credit.saturating_sub(time);
        self.earned = if paid { self.earned + EARNED_MAX / 4 } else { self.earned * 3 / 4 };
        self.earned = self.earned.clamp(EARNED_MIN, EARNED_MAX);
    }
}

impl Default for Account {
    fn default() -> Self {
        Self { credit: Duration::ZERO, earned: EARNED_MAX }
    }
}

fn follow(mean: Duration, measured: Duration) -> Duration {
    (mean * 7 + measured) / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    fn busy(burst_time: Duration) -> Looking {
        let mut looking = Looking::default();
        (0..100).for_each(|_| looking.ended(16, 16, burst_time, Seen::Awake));
        looking
    }

    #[test]
    fn a_lane_that_has_done_nothing_or_few_things_at_a_time_sleeps() {
        let mut looking = Looking::default();
        assert!((0..100).all(|operations| looking.plan(operations, us(0)).is_none()));
        (0..10_000).for_each(|_| looking.ended(1, BURST_MIN - 1, us(60), Seen::Asleep));
        assert!((0..100).all(|operations| looking.plan(operations, us(0)).is_none()));
    }

    #[test]
    fn a_client_is_looked_for_at_once_and_a_burst_shortly_before_its_end() {
        let mut looking = busy(us(200));
        let client = Plan { expected: Expected::Client, sleep: us(0), look: LOOK_MAX };
        assert_eq!(looking.plan(0, us(0)), Some(client));
        assert!((1..BURST_MIN).all(|operations| looking.plan(operations, us(0)).is_none()));
        let plan = looking.plan(16, us(90)).unwrap();
        assert_eq!((plan.expected, plan.look), (Expected::Disk, LOOK_MAX));
        assert!(
            plan.sleep > us(60) && plan.sleep <= us(65),
            "{plan:?}: to be awake 15 us before the end of 200 us"
        );
        assert_eq!(looking.plan(16, us(180)).map(|plan| plan.sleep), Some(us(0)));
        assert_eq!(looking.plan(16, us(200)), None, "it is late, and may end at any time");
        (0..100).for_each(|_| looking.ended(15, 16, us(5), Seen::Awake));
        assert!(
            looking.plan(16, us(90)).unwrap().sleep > us(60),
            "the rest of a burst says nothing of the next"
        );
    }

    #[test]
    fn a_thread_that_takes_longer_to_wake_up_is_woken_sooner_and_one_that_takes_no_time_sleeps() {
        let mut looking = busy(us(200));
        (0..100).for_each(|_| looking.woke_up(us(60)));
        let plan = looking.plan(16, us(0)).unwrap();
        assert!(plan.sleep > us(120) && plan.sleep <= us(126), "{plan:?}");
        // An end seen after waking up happened before that.
        (0..100).for_each(|_| looking.ended(16, 16, us(260), Seen::Asleep));
        assert!(looking.plan(16, us(0)).unwrap().sleep <= us(126));
        (0..100).for_each(|_| looking.woke_up(us(2)));
        let looks = (0..1000).filter(|_| {
            looking.ended(16, 16, us(200), Seen::Awake);
            looking.plan(16, us(0)).inspect(|plan| looking.looked(plan.expected, us(10), true)).is_some()
        });
        assert!(looks.count() < 200);
    }

    #[test]
    fn a_disk_that_is_quick_or_slow_is_slept_for() {
        assert_eq!(busy(us(20)).plan(16, us(0)), None);
        assert_eq!(busy(us(5000)).plan(16, us(0)), None);
        let mut looking = busy(us(130));
        looking.ended(16, 16, Duration::from_secs(3600), Seen::Asleep);
        assert!(looking.plan(16, us(0)).is_some(), "one burst of an hour is soon forgotten");
    }

    #[test]
    fn looks_in_vain_become_rare_and_looks_that_find_something_frequent() {
        let mut looking = busy(us(200));
        let looks_of = |looking: &mut Looking, found: bool| {
            let looks = (0..1000).filter(|_| {
                looking.ended(16, 16, us(200), Seen::Awake);
                let Some(plan) = looking.plan(0, us(0)) else { return false };
                looking.looked(plan.expected, if found { us(15) } else { plan.look }, found);
                true
            });
            looks.count()
        };
        let in_vain = looks_of(&mut looking, false);
        assert!((10..200).contains(&in_vain), "{in_vain} of 1000 bursts were looked for in vain");
        let found = looks_of(&mut looking, true);
        assert!(found > 900, "{found} of 1000 looks, each of which found something");
        assert_eq!(
            busy(us(200)).plan(16, us(0)),
            looking.plan(16, us(0)),
            "of the other kind nothing was learnt"
        );
    }

    proptest::proptest! {
        /// The cost of looks never exceeds the earnings of ended operations.
        #[test]
        fn looks_never_cost_more_than_has_been_earned(
            steps in proptest::collection::vec((0_usize..40, 0_usize..20, 0_u64..600, proptest::bool::ANY), 0..400),
        ) {
            let mut looking = Looking::default();
            let (mut earned, mut spent) = (us(0), us(0));
            for (ended, operations, age, found) in steps {
                looking.ended(ended, operations, us(age), Seen::Asleep);
                earned += 2 * EARNED_MAX * u32::try_from(ended).unwrap();
                if let Some(Plan { expected, look, .. }) = looking.plan(operations, us(age / 2)) {
                    let time = if found { look.min(us(age)) } else { look };
                    looking.looked(expected, time, found);
                    spent += time;
                }
                proptest::prop_assert!(spent <= earned);
            }
        }
    }
}
