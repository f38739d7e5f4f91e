//! Rules for single Rust files: opening, length and words.

use crate::lexer::words;
use crate::tree::{Finding, RustFile, Tree};

/// Largest number of lines of a file. Most files should be half as long.
const LINES_MAX: usize = 600;

/// Names of modules that say nothing about their content.
const EMPTY_NAMES: [&str; 8] = ["util", "utils", "helper", "helpers", "misc", "common", "base", "stuff"];

const OMISSIONS: [&str; 4] = ["not tested", "left out", "skipping", "skipped"];

/// Crates that a daemon links.
const PRINT_NOTHING: [&str; 13] = [
    "api",
    "block",
    "chronicle",
    "daemon",
    "export",
    "hypervisor",
    "lane",
    "migration",
    "nbd_protocol",
    "report",
    "sterna",
    "transport",
    "words",
];

/// Exceptions: a file, a rule, and the reason.
const EXCEPTIONS: [(&str, Rule, &str); 1] = [(
    "crates/block/src/engine/helpers.rs",
    Rule::Name,
    "it is about helper threads, which is what the engine calls them",
)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Opening,
    Length,
    Name,
    Words,
    Ignore,
    Sleep,
    Omission,
    Print,
}

/// Applies every rule to one file.
pub(crate) fn check(file: &RustFile) -> Vec<Finding> {
    let is_excepted = |rule: Rule| EXCEPTIONS.iter().any(|(path, of, _)| *path == file.path && *of == rule);
    broken(file).into_iter().filter(|(rule, _)| !is_excepted(*rule)).map(|(_, finding)| finding).collect()
}

pub(crate) fn check_exceptions(tree: &Tree) -> Vec<Finding> {
    let is_needed = |path: &str, rule: Rule| {
        let file = tree.file(path).map(|file| RustFile::new(&file.path, &file.text));
        file.is_some_and(|file| broken(&file).iter().any(|(broken, _)| *broken == rule))
    };
    let unneeded = EXCEPTIONS.iter().filter(|(path, rule, _)| !is_needed(path, *rule));
    unneeded
        .map(|(path, rule, _)| {
            Finding::in_file(path, format!("keeps the rule {rule:?}: delete its exception"))
        })
        .collect()
}

fn broken(file: &RustFile) -> Vec<(Rule, Finding)> {
    let mut found = Vec::new();
    found.extend(opening(file).map(|finding| (Rule::Opening, finding)));
    found.extend(length(file).map(|finding| (Rule::Length, finding)));
    found.extend(name(file).map(|finding| (Rule::Name, finding)));
    found.extend(banned_words(file).into_iter().map(|finding| (Rule::Words, finding)));
    found.extend(ignore_without_reason(file).into_iter().map(|finding| (Rule::Ignore, finding)));
    found.extend(sleep_without_reason(file).into_iter().map(|finding| (Rule::Sleep, finding)));
    found.extend(prints(file).into_iter().map(|finding| (Rule::Print, finding)));
    found.extend(silent_omission(file).into_iter().map(|finding| (Rule::Omission, finding)));
    found
}

fn opening(file: &RustFile) -> Option<Finding> {
    let is_good = file.text.starts_with("//! ");
    let message = "open the file with `//!`: what it is for, and what it does not do";
    (!is_good).then(|| Finding::in_line(&file.path, 0, message))
}

fn length(file: &RustFile) -> Option<Finding> {
    let lines = file.text.lines().count();
    let message = format!("{lines} lines; at most {LINES_MAX}: split it by what it does, not by layer");
    (lines > LINES_MAX).then(|| Finding::in_file(&file.path, message))
}

fn name(file: &RustFile) -> Option<Finding> {
    let parts = file.path.split('/').flat_map(|part| part.strip_suffix(".rs").or(Some(part)));
    let empty = parts.into_iter().find(|part| EMPTY_NAMES.contains(part))?;
    Some(Finding::in_file(
        &file.path,
        format!("\"{empty}\" says nothing: name the module after what it does"),
    ))
}

fn banned_words(file: &RustFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    let lines = file.layers.code.lines().zip(file.layers.comments.lines()).enumerate();
    for (index, (code, comment)) in lines {
        let mut find = |message: &str| findings.push(Finding::in_line(&file.path, index, message));
        for word in words(code) {
            if word.split('_').any(|part| part == "src" || part == "dst") {
                find(&format!("`{word}`: write source and target"));
            }
        }
        let tight: String = code.split_whitespace().collect();
        if tight.contains("todo!(") || tight.contains("unimplemented!(") {
            find("finish it, or return an error that says what is not possible");
        }
        if tight.contains("#[allow(") || tight.contains("#![allow(") {
            find("write #[expect(lint, reason = \"…\")]: it says why, and tells when it is needed no more");
        }
        if words(comment).any(|word| ["TODO", "FIXME", "XXX", "HACK"].contains(&word)) {
            find("do it, or write down as a limit what it means for the user");
        }
    }
    findings
}

fn ignore_without_reason(file: &RustFile) -> Vec<Finding> {
    let message = "write #[ignore = \"…\"] with the reason, and run the test somewhere";
    let lines = file.layers.code.lines().enumerate();
    let bare = lines.filter(|(_, code)| code.split_whitespace().collect::<String>().contains("#[ignore]"));
    bare.map(|(index, _)| Finding::in_line(&file.path, index, message)).collect()
}

/// Finds calls that sleep in tests without a comment on their line or on the line above.
fn sleep_without_reason(file: &RustFile) -> Vec<Finding> {
    let is_test_file = file.path.contains("/tests/") || file.name() == "tests.rs";
    let mut is_test = is_test_file;
    let mut above_is_comment = false;
    let mut findings = Vec::new();
    for (index, (code, comment)) in file.layers.code.lines().zip(file.layers.comments.lines()).enumerate() {
        is_test |= code.trim() == "mod tests {";
        // Documentation of the test is not a reason for the sleep.
        let has_comment = comment.trim().starts_with("// ");
        if is_test && calls_sleep(code) && !has_comment && !above_is_comment {
            let message =
                "tests wait for what they need, not for time to pass; if they must, a comment says why";
            findings.push(Finding::in_line(&file.path, index, message));
        }
        above_is_comment = has_comment;
    }
    findings
}

/// Finds omissions that tests only print. Cargo hides the output of tests that succeed.
fn silent_omission(file: &RustFile) -> Vec<Finding> {
    let message = "cargo hides this: say it by omission::machine_lacks() or omission::kernel_lacks()";
    let is_about = |text: &str| OMISSIONS.iter().any(|words| text.to_lowercase().contains(words));
    let lines = file.layers.code.lines().zip(file.text.lines()).enumerate();
    let silent = lines.filter(|(_, (code, text))| code.contains("println!(") && is_about(text));
    silent.map(|(index, _)| Finding::in_line(&file.path, index, message)).collect()
}

/// Finds printing macros in crates that a daemon links. They panic if the output is closed, and a panic in a `Drop` ends the
/// process. Commands print by `output.rs`, which cleans the text.
fn prints(file: &RustFile) -> Vec<Finding> {
    let is_linked = PRINT_NOTHING.iter().any(|name| file.path.starts_with(&format!("crates/{name}/src/")));
    let tight = |code: &str| {
        ["eprintln!(", "println!(", "eprint!(", "print!(", "dbg!("].iter().any(|word| code.contains(word))
    };
    let lines = file.layers.code.lines().enumerate().filter(|(_, code)| is_linked && tight(code));
    let message = "log it with tracing, or print it by crates/sterna/src/output.rs";
    lines.map(|(index, _)| Finding::in_line(&file.path, index, message)).collect()
}

fn calls_sleep(code: &str) -> bool {
    let is_call = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '.');
    code.match_indices("sleep(").any(|(at, _)| is_call(at))
}

#[cfg(test)]
mod tests {
    use super::{Rule, broken};
    use crate::tree::RustFile;

    fn check(path: &str, text: &str, expected: &[Rule]) {
        let found: Vec<Rule> = broken(&RustFile::new(path, text)).into_iter().map(|(rule, _)| rule).collect();
        assert_eq!(found, expected, "{path}: {text}");
    }

    #[test]
    fn a_good_file_has_no_findings() {
        let text = "//! Good.\n\n/// Not src, not a todo!().\nfn good() { \"src, dst, #[allow(x)]\"; }\n";
        check("crates/x/src/good.rs", text, &[]);
    }

    #[test]
    fn openings_lengths_and_names_are_checked() {
        check("crates/x/src/a.rs", "fn a() {}\n", &[Rule::Opening]);
        check("crates/x/src/a.rs", &format!("//! A.\n{}", "\n".repeat(600)), &[Rule::Length]);
        check("crates/x/src/a.rs", &format!("//! A.\n{}", "\n".repeat(599)), &[]);
        check("crates/x/src/util.rs", "//! A.\n", &[Rule::Name]);
        check("crates/x/src/common/a.rs", "//! A.\n", &[Rule::Name]);
    }

    #[test]
    fn words_are_checked_in_code_and_comments_alike() {
        for line in
            ["let src = 1;", "fn f(dst_store: u8) {}", "todo!()", "unimplemented! ()", "#[allow(dead_code)]"]
        {
            check("crates/x/src/a.rs", &format!("//! A.\n{line}\n"), &[Rule::Words]);
        }
        check("crates/x/src/a.rs", "//! A.\n// FIXME: later\n", &[Rule::Words]);
    }

    #[test]
    fn what_a_daemon_links_prints_nothing() {
        check("crates/lane/src/a.rs", "//! A.\nfn f() { eprintln!(\"x\"); }\n", &[Rule::Print]);
        check("crates/lane/src/a.rs", "//! A.\n// println!( would end it\nfn f() { g(\"print!(\"); }\n", &[]);
        check("dev/lab/src/a.rs", "//! A.\nfn f() { println!(\"x\"); }\n", &[]);
    }

    #[test]
    fn what_is_left_out_is_not_told_to_nobody() {
        let line = |text: &str| format!("//! A.\nelse {{ return eprintln!(\"{text}\") }}\n");
        check("crates/x/tests/a.rs", &line("NOT TESTED: no root"), &[Rule::Omission]);
        check("crates/x/tests/a.rs", &line("io_uring is refused: skipped"), &[Rule::Omission]);
        check("crates/x/tests/a.rs", &line("engine: {name}"), &[]);
        check("crates/x/tests/a.rs", "//! A.\n// It is skipped.\neprintln!();\n", &[]);
    }

    #[test]
    fn tests_say_why_they_are_ignored_or_sleep() {
        check("crates/x/tests/a.rs", "//! A.\n#[ignore]\n", &[Rule::Ignore]);
        check("crates/x/tests/a.rs", "//! A.\n#[ignore = \"slow\"]\n", &[]);
        check("crates/x/tests/a.rs", "//! A.\nthread::sleep(x);\n", &[Rule::Sleep]);
        check("crates/x/tests/a.rs", "//! A.\n// The kernel's clock must move.\nthread::sleep(x);\n", &[]);
        check("crates/x/tests/a.rs", "//! A.\nhandle.sleep(x); is_asleep(x);\n", &[]);
        check("crates/x/src/a.rs", "//! A.\nthread::sleep(x);\n", &[]);
        check("crates/x/src/a.rs", "//! A.\n#[cfg(test)]\nmod tests {\nsleep(x).await;\n}\n", &[Rule::Sleep]);
    }
}
