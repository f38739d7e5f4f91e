//! Decides about a test: when it ends, and what is deleted then.

use std::time::Duration;

use crate::standbys::book::{BootCheck, Booted, Stage, TestRecord, Why};

/// Time between two looks at the room of the store.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Time between two looks at the consoles.
const CONSOLE_EVERY: Duration = Duration::from_millis(500);

/// What a test finds around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) now_unix_ms: u64,
    /// Whether the store has more free than the reserve that standbys leave.
    pub(super) has_room: bool,
    /// Whether the text that it waits for is on a console.
    pub(super) is_seen: bool,
    /// Why it was told to end.
    pub(super) told: Option<Why>,
}

/// What is to be done for a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Make,
    /// Look again after this time, or when it is told to end.
    Wait(Duration),
    /// Note durably what the check of the consoles has found.
    Note(Booted),
    /// Note durably that it ends.
    End(Why),
    /// Delete everything, then note durably that it has ended.
    Clear(Why),
    /// It has ended.
    Nothing,
}

/// Returns what is to be done next.
pub(super) fn next(test: &TestRecord, look: &Look) -> Step {
    match &test.stage {
        Stage::Making => look.told.clone().map_or(Step::Make, Step::End),
        Stage::Running => {
            let left = Duration::from_millis(test.ends_unix_ms.saturating_sub(look.now_unix_ms));
            match &look.told {
                Some(why) => Step::End(why.clone()),
                None if left.is_zero() => Step::End(Why::Over),
                None if !look.has_room => Step::End(Why::NoRoom),
                None => check_boot(test, look).unwrap_or(Step::Wait(left.min(LOOK_EVERY))),
            }
        }
        Stage::Ending { why } => Step::Clear(why.clone()),
        Stage::Ended { .. } => Step::Nothing,
    }
}

/// Returns what follows from the check of the consoles, if there is one that the test waits for, or ends with.
fn check_boot(test: &TestRecord, look: &Look) -> Option<Step> {
    let BootCheck { timeout_ms, ends_test, found, .. } = test.boot_check.as_ref()?;
    let since = test.made_unix_ms.unwrap_or(test.begun_unix_ms);
    let after_ms = look.now_unix_ms.saturating_sub(since);
    match found {
        Some(booted) if *ends_test => {
            Some(Step::End(if booted.is_seen { Why::Booted } else { Why::NotBooted }))
        }
        Some(_) => None,
        None if look.is_seen => Some(Step::Note(Booted { is_seen: true, after_ms })),
        None if after_ms >= *timeout_ms => Some(Step::Note(Booted { is_seen: false, after_ms })),
        None => Some(Step::Wait(CONSOLE_EVERY)),
    }
}

/// Returns how far a test is after a start of the daemon. One that was being made is cleared away.
pub(super) fn after_start(stage: Stage) -> Stage {
    match stage {
        Stage::Making => Stage::Ending { why: Why::Interrupted },
        stage => stage,
    }
}

/// Returns the name of a test's volume or VM. One alone has the name that was ordered.
pub(super) fn name_of(ordered: Option<&str>, of: &str, count: usize) -> String {
    match ordered {
        None => format!("{of}-test"),
        Some(name) if count == 1 => name.to_owned(),
        Some(name) => format!("{name}-{of}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::standbys::book::TestNetworks;

    const END: u64 = 10_000;

    fn test(stage: Stage) -> TestRecord {
        TestRecord {
            name: "v-test".to_owned(),
            ordered_point: None,
            point: None,
            volumes: Vec::new(),
            vms: Vec::new(),
            networks: TestNetworks::Apart,
            boot_check: None,
            begun_unix_ms: 0,
            made_unix_ms: None,
            ends_unix_ms: END,
            stage,
        }
    }

    fn at(now_unix_ms: u64) -> Look {
        Look { now_unix_ms, has_room: true, is_seen: false, told: None }
    }

    #[test]
    fn a_test_ends_at_its_time_when_it_is_told_and_before_it_takes_the_reserve() {
        let running = test(Stage::Running);
        assert_eq!(next(&running, &at(END - 1)), Step::Wait(Duration::from_millis(1)));
        assert_eq!(next(&running, &at(0)), Step::Wait(LOOK_EVERY));
        assert_eq!(next(&running, &at(END)), Step::End(Why::Over));
        assert_eq!(next(&running, &Look { has_room: false, ..at(0) }), Step::End(Why::NoRoom));
        let told = Look { told: Some(Why::Promoted), ..at(END) };
        assert_eq!(next(&running, &told), Step::End(Why::Promoted));
        assert_eq!(next(&test(Stage::Making), &told), Step::End(Why::Promoted));
    }

    #[test]
    fn a_check_of_the_console_passes_or_fails_in_time_and_ends_the_test_unless_more_was_ordered() {
        let checked = |ends_test, found| {
            let check = BootCheck { text: "login:".to_owned(), timeout_ms: 3000, ends_test, found };
            TestRecord { boot_check: Some(check), made_unix_ms: Some(1000), ..test(Stage::Running) }
        };
        let booted = |is_seen, after_ms| Booted { is_seen, after_ms };
        for ends_test in [true, false] {
            let waiting = checked(ends_test, None);
            assert_eq!(next(&waiting, &at(3999)), Step::Wait(CONSOLE_EVERY));
            assert_eq!(next(&waiting, &at(4000)), Step::Note(booted(false, 3000)));
            let seen = Look { is_seen: true, ..at(4000) };
            assert_eq!(next(&waiting, &seen), Step::Note(booted(true, 3000)));
        }
        for (is_seen, why) in [(true, Why::Booted), (false, Why::NotBooted)] {
            let found = Some(booted(is_seen, 7));
            assert_eq!(next(&checked(true, found), &at(0)), Step::End(why));
            assert_eq!(next(&checked(false, found), &at(0)), Step::Wait(LOOK_EVERY));
        }
    }

    #[test]
    fn everything_is_deleted_before_a_test_has_ended_also_after_a_restart() {
        let ending = Stage::Ending { why: Why::Over };
        assert_eq!(next(&test(ending.clone()), &at(0)), Step::Clear(Why::Over));
        assert_eq!(after_start(ending.clone()), ending);
        assert_eq!(after_start(Stage::Running), Stage::Running);
        assert_eq!(after_start(Stage::Making), Stage::Ending { why: Why::Interrupted });
        let ended = Stage::Ended { why: Why::Over, at_unix_ms: 1 };
        assert_eq!(next(&test(after_start(ended)), &at(END)), Step::Nothing);
    }

    #[test]
    fn one_volume_has_the_name_that_was_ordered_and_several_have_their_own_besides() {
        assert_eq!(name_of(None, "v", 2), "v-test");
        assert_eq!(name_of(Some("try"), "v", 1), "try");
        assert_eq!(name_of(Some("try"), "v", 2), "try-v");
    }
}
