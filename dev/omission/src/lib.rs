//! Tests that leave something out say so, and fail where nothing may be left out. For tests only.
//!
//! ```text
//!   a check cannot be made
//!     ├─ machine_lacks: a package, root …   ─► STERNA_TESTS_MUST_RUN=1 ? the test fails : left out
//!     └─ kernel_lacks: io_uring …           ─► left out: nobody who runs the tests can help it
//!                                                  │
//!                      standard error, and the file that STERNA_TESTS_LEFT_OUT names, which `make test` shows
//! ```
//! cargo hides what a test says that succeeds. A check that is left out without a word looks like one that was made.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

/// If it is `1`, what the machine could have and lacks is a failure. `make test` sets it.
pub const MUST_RUN: &str = "STERNA_TESTS_MUST_RUN";
/// Names a file to which each omission is appended as a line.
pub const LEFT_OUT: &str = "STERNA_TESTS_LEFT_OUT";

/// Says that the rest of the calling test is left out because of what can be had: a package, root. The caller returns.
///
/// `what` completes "the machine lacks".
///
/// # Panics
/// If [`MUST_RUN`] says that everything must run.
#[expect(clippy::panic, reason = "this is how a test fails")]
pub fn machine_lacks(what: &str) {
    let line = line("machine", what);
    if std::env::var_os(MUST_RUN).is_some_and(|value| value == "1") {
        panic!("{line}; provide it, or leave such tests out with {MUST_RUN}=0");
    }
    tell(&line);
}

/// Says that the rest of the calling test is left out because the kernel, or what confines us, does not have what it is
/// about. The caller returns.
///
/// `what` completes "the kernel lacks".
pub fn kernel_lacks(what: &str) {
    tell(&line("kernel", what));
}

fn line(who: &str, what: &str) -> String {
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(Path::file_stem).map(|stem| stem.to_string_lossy());
    // cargo appends a hash; the name may have hyphens of its own.
    let program = program.as_deref().and_then(|stem| stem.rsplit_once('-')).map_or("", |(name, _)| name);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a thread of a test");
    // What programs say of it may have several lines.
    let what = what.split_whitespace().collect::<Vec<_>>().join(" ");
    format!("left out: {program}: {test}: the {who} lacks {what}")
}

fn tell(line: &str) {
    eprintln!("{line}");
    let Some(file) = std::env::var_os(LEFT_OUT) else { return };
    let file = File::options().create(true).append(true).open(&file);
    // One write, so that lines of tests that run at the same time stay whole.
    let told = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
    if let Err(error) = told {
        eprintln!("{LEFT_OUT} names no file that can be written: {error}");
    }
}
