//! Starts of drawn VMs in a drawn world: some fail, some never get ready, some are withdrawn.

use proptest::prelude::*;

use super::*;

/// A VM, and what happens to it.
#[derive(Clone, Debug)]
struct Fate {
    order: u16,
    wait_max_s: u64,
    /// Seconds after its start until it is ready; `None`: never. `Some(None)`, outside: nobody waits for it.
    ready_s: Option<Option<u64>>,
    /// How many attempts fail; `None`: all.
    failures: Option<u32>,
    attempt_s: u64,
    withdrawn_s: Option<u64>,
}

fn fate() -> impl Strategy<Value = Fate> {
    let ready = prop_oneof![Just(None), Just(Some(None)), (0_u64..90).prop_map(|after| Some(Some(after)))];
    let failures = prop_oneof![4 => Just(Some(0)), 2 => (1_u32..8).prop_map(Some), 1 => Just(None)];
    let withdrawn = prop_oneof![5 => Just(None), 1 => (0_u64..100).prop_map(Some)];
    (0_u16..4, 0_u64..60, ready, failures, 0_u64..10, withdrawn).prop_map(
        |(order, wait_max_s, ready_s, failures, attempt_s, withdrawn_s)| Fate {
            order,
            wait_max_s,
            ready_s,
            failures,
            attempt_s,
            withdrawn_s,
        },
    )
}

/// What the world knows of a VM.
#[derive(Clone, Debug, Default)]
struct Seen {
    first: Option<u64>,
    attempts: u32,
    /// When the present attempt ends.
    ends: Option<u64>,
    started: Option<u64>,
    is_withdrawn: bool,
}

struct World {
    fates: Vec<Fate>,
    seen: Vec<Seen>,
    starts: Starts,
    retry: Retry,
}

impl World {
    fn new(fates: Vec<Fate>, retry: Retry) -> Self {
        let candidate = |(index, fate): (usize, &Fate)| Candidate {
            name: index.to_string(),
            order: fate.order,
            is_watched: fate.ready_s.is_some(),
            wait_max: Duration::from_secs(fate.wait_max_s),
        };
        let starts = Starts::new(retry, fates.iter().enumerate().map(candidate), Duration::ZERO);
        Self { seen: vec![Seen::default(); fates.len()], fates, starts, retry }
    }

    /// Whether a VM may hold up those of a higher order at this time, by the rules of the module's description.
    fn holds_up(&self, index: usize, now: u64) -> bool {
        let (fate, seen) = (&self.fates[index], &self.seen[index]);
        let Some(first) = seen.first else { return !seen.is_withdrawn && seen.started.is_none() };
        let is_ready = match (seen.started, fate.ready_s) {
            (Some(_), None) => true,
            (Some(started), Some(Some(after))) => started + after <= now,
            _ => false,
        };
        let is_given_up =
            self.retry == Retry::Never && seen.attempts > 0 && seen.ends.is_none() && seen.started.is_none();
        !(is_ready || is_given_up || seen.is_withdrawn) && now < first + fate.wait_max_s
    }

    fn second(&mut self, now: u64) -> Result<(), TestCaseError> {
        for index in 0..self.fates.len() {
            let name = index.to_string();
            let fate = self.fates[index].clone();
            if fate.withdrawn_s == Some(now) {
                self.starts.withdraw(&name);
                self.seen[index].is_withdrawn = true;
            }
            let seen = &mut self.seen[index];
            if seen.ends.is_some_and(|ends| ends <= now) {
                seen.ends = None;
                if fate.failures.is_some_and(|failures| seen.attempts > failures) {
                    seen.started = Some(now);
                    self.starts.started(&name);
                } else {
                    self.starts.failed(&name);
                }
            }
        }
        self.starts.handle_timeout(Duration::from_secs(now));
        for name in self.starts.watched() {
            let index: usize = name.parse().unwrap();
            if let (Some(started), Some(Some(after))) = (self.seen[index].started, self.fates[index].ready_s)
                && started + after <= now
            {
                self.starts.ready(&name);
            }
        }
        while let Some(name) = self.starts.poll() {
            let index: usize = name.parse().unwrap();
            let order = self.fates[index].order;
            if self.seen[index].first.is_none() {
                let held = (0..self.fates.len())
                    .find(|other| self.fates[*other].order < order && self.holds_up(*other, now));
                prop_assert_eq!(held, None, "{} starts too early", index);
            }
            let attempt_s = self.fates[index].attempt_s;
            let seen = &mut self.seen[index];
            prop_assert!(
                !seen.is_withdrawn && seen.started.is_none() && seen.ends.is_none(),
                "{index} starts twice"
            );
            seen.first.get_or_insert(now);
            seen.attempts += 1;
            seen.ends = Some(now + attempt_s);
        }
        let in_flight = self.seen.iter().filter(|seen| seen.ends.is_some()).count();
        let withdrawn = self.seen.iter().filter(|seen| seen.ends.is_some() && seen.is_withdrawn).count();
        prop_assert!(in_flight - withdrawn <= AT_ONCE, "{in_flight} at once");
        let goes_on = self.starts.is_over() || in_flight > 0 || self.starts.poll_timeout().is_some();
        prop_assert!(goes_on, "nothing happens any more: {:?}", self.starts);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn vms_start_in_their_order_and_no_broken_one_holds_up_the_others_for_good(
        fates in prop::collection::vec(fate(), 0..12),
        retries in any::<bool>(),
    ) {
        let retry = if retries { Retry::UntilStarted } else { Retry::Never };
        let mut world = World::new(fates, retry);
        // Four orders, three rows of attempts in each, with their waits.
        for now in 0..1500 {
            world.second(now)?;
        }
        for (fate, seen) in world.fates.iter().zip(&world.seen).filter(|(_, seen)| !seen.is_withdrawn) {
            prop_assert!(seen.first.is_some(), "never tried: {fate:?}");
            let must_run = match retry {
                Retry::UntilStarted => fate.failures.is_some(),
                Retry::Never => fate.failures == Some(0),
            };
            prop_assert_eq!(must_run, seen.started.is_some(), "{:?}", fate);
            prop_assert!(retry == Retry::UntilStarted || seen.attempts == 1, "tried again: {fate:?}");
        }
        prop_assert!(retry == Retry::UntilStarted || world.starts.is_over());
    }
}

fn candidate(name: &str, order: u16, is_watched: bool) -> Candidate {
    Candidate { name: name.to_owned(), order, is_watched, wait_max: Duration::from_secs(30) }
}

#[test]
fn the_next_order_waits_until_the_database_is_ready() {
    let order = [candidate("web", 2, false), candidate("db", 1, true)];
    let mut starts = Starts::new(Retry::UntilStarted, order, Duration::ZERO);
    assert_eq!((starts.poll().as_deref(), starts.poll()), (Some("db"), None));
    starts.started("db");
    assert_eq!((starts.watched(), starts.poll()), (vec!["db".to_owned()], None));
    starts.ready("db");
    assert_eq!(starts.poll().as_deref(), Some("web"));
}

#[test]
fn what_is_not_ready_in_time_is_late_and_said_to_be() {
    let order = [candidate("web", 2, false), candidate("db", 1, true)];
    let mut starts = Starts::new(Retry::UntilStarted, order, Duration::ZERO);
    starts.poll();
    starts.started("db");
    assert_eq!(starts.poll_timeout(), Some(Duration::from_secs(30)));
    starts.handle_timeout(Duration::from_secs(30));
    assert_eq!(starts.phase("db"), Some(Phase::Done { is_late: true }));
    assert_eq!(starts.poll().as_deref(), Some("web"));
}

#[test]
fn a_vm_that_somebody_else_has_started_is_not_started_again() {
    let mut starts = Starts::new(Retry::UntilStarted, [candidate("db", 1, false)], Duration::ZERO);
    starts.started("db");
    assert_eq!((starts.poll(), starts.is_over()), (None, true));
}
