//! Decides about a test: when it ends, and what is deleted then.

use std::time::Duration;

use crate::standbys::book::{Stage, TestRecord, Why};

/// Time between two looks at the room of the store.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What a test finds around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) now_unix_ms: u64,
    /// Whether the store has more free than the reserve that standbys leave.
    pub(super) has_room: bool,
    /// Why it was told to end.
    pub(super) told: Option<Why>,
}

/// What is to be done for a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Make,
    /// Look again after this time, or when it is told to end.
    Wait(Duration),
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
                None => Step::Wait(left.min(LOOK_EVERY)),
            }
        }
        Stage::Ending { why } => Step::Clear(why.clone()),
        Stage::Ended { .. } => Step::Nothing,
    }
}

/// Returns how far a test is after a start of the daemon. One that was being made is cleared away.
pub(super) fn after_start(stage: Stage) -> Stage {
    match stage {
        Stage::Making => Stage::Ending { why: Why::Interrupted },
        stage => stage,
    }
}

/// Returns the name of a test's volume. One volume alone has the name that was ordered.
pub(super) fn volume_name(ordered: Option<&str>, volume: &str, volumes: usize) -> String {
    match ordered {
        None => format!("{volume}-test"),
        Some(name) if volumes == 1 => name.to_owned(),
        Some(name) => format!("{name}-{volume}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u64 = 10_000;

    fn test(stage: Stage) -> TestRecord {
        TestRecord {
            name: "v-test".to_owned(),
            ordered_point: None,
            point: None,
            volumes: Vec::new(),
            begun_unix_ms: 0,
            ends_unix_ms: END,
            stage,
        }
    }

    fn at(now_unix_ms: u64) -> Look {
        Look { now_unix_ms, has_room: true, told: None }
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
        assert_eq!(volume_name(None, "v", 2), "v-test");
        assert_eq!(volume_name(Some("try"), "v", 1), "try");
        assert_eq!(volume_name(Some("try"), "v", 2), "try-v");
    }
}
