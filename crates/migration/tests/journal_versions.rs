//! One version of the journal's format is read; what it writes keeps its numbers.

use migration::Attempt;
use migration::journal::{
    CodecError, ExportAccess, FailureCode, Forwarding, Frames, HEADER, ImageFormat, Outcome, Place,
    Promotion, ReservedContent, Stage, VERSION,
};

#[test]
fn a_journal_of_another_version_is_refused_by_name_and_not_read() {
    for version in [VERSION - 1, VERSION + 1] {
        let mut bytes = HEADER.to_vec();
        *bytes.last_mut().unwrap() = version;
        let refused = Frames::new(&bytes).err().unwrap();
        assert_eq!(refused, CodecError::Version { found: version });
        assert!(refused.to_string().contains(&format!("version {version}")), "{refused}");
    }
}

/// Stored numbers are trusted for ever: inserting or removing a variant would turn an export into a device.
#[test]
fn what_was_written_once_is_never_renumbered() {
    fn number(value: &impl serde::Serialize) -> u8 {
        postcard::to_stdvec(value).unwrap()[0]
    }
    let numbered = |of: &str, numbers: &[u8]| {
        assert_eq!(numbers, (0..numbers.len() as u8).collect::<Vec<_>>(), "{of} of journals that there are");
    };
    let text = String::new;
    numbered(
        "places",
        &[Place::File(text()), Place::Device(text()), Place::Nbd(text())].map(|at| number(&at)),
    );
    numbered("formats", &[ImageFormat::Raw, ImageFormat::Qcow2].map(|format| number(&format)));
    numbered(
        "reservations",
        &[ReservedContent::Left, ReservedContent::Kept, ReservedContent::HalfMade].map(|what| number(&what)),
    );
    numbered("accesses", &[ExportAccess::ReadWrite, ExportAccess::ReadOnly].map(|access| number(&access)));
    numbered(
        "forwardings",
        &[Forwarding::WhileConnected, Forwarding::Always].map(|forwarding| number(&forwarding)),
    );
    numbered(
        "promotions",
        &[Promotion::Ticket, Promotion::Force { branches: Vec::new() }].map(|promotion| number(&promotion)),
    );
    let failed = Outcome::Failed { code: FailureCode::TargetFull, detail: text() };
    let outcomes = [
        Outcome::Moved { left_over: text() },
        Outcome::Cancelled,
        failed,
        Outcome::HandedBack { detail: text() },
        Outcome::CancelledThere,
        Outcome::TakenBack,
    ];
    numbered("outcomes", &outcomes.map(|outcome| number(&outcome)));
    let attempt = Attempt(1);
    let stages = [
        Stage::Copying,
        Stage::Prepared(attempt),
        Stage::Released(attempt),
        Stage::Owned(attempt),
        Stage::HandedBack,
        Stage::Ended(Outcome::Cancelled),
        Stage::Discarding(Outcome::Cancelled),
    ];
    numbered("stages", &stages.map(|stage| number(&stage)));
    let failures = [
        FailureCode::TargetFull,
        FailureCode::TargetFaulty,
        FailureCode::TargetHung,
        FailureCode::SourceUnreadable,
        FailureCode::HandoverRefused,
        FailureCode::DaemonStopped,
        FailureCode::Internal,
        FailureCode::HostRefused,
        FailureCode::PromotedElsewhere,
        FailureCode::GivenUp,
        FailureCode::VmStayed,
        FailureCode::NotBegun,
        FailureCode::HookFailed,
        FailureCode::NotConverging,
    ];
    numbered("failures", &failures.map(|failure| number(&failure)));
}
