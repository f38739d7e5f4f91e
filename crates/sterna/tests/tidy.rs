//! Tidy: a test of rules that reviewers should not have to check.
//!
//! It reads the repository as text: manifests, sources, scripts and documents. It builds nothing, and parses only comments,
//! strings and words of Rust. Each rule is a function from text to findings, with a test that plants a violation. The tests in
//! this file apply the rules to the repository.

#![expect(clippy::unwrap_used, reason = "the whole file is tests and their support")]

#[path = "tidy/arrows.rs"]
mod arrows;
#[path = "tidy/commands.rs"]
mod commands;
#[path = "tidy/custody.rs"]
mod custody;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/lexer.rs"]
mod lexer;
#[path = "tidy/modules.rs"]
mod modules;
#[path = "tidy/references.rs"]
mod references;
#[path = "tidy/sources.rs"]
mod sources;
#[path = "tidy/tree.rs"]
mod tree;

use std::path::Path;

use tree::{Finding, Tree};

#[test]
fn crates_depend_as_the_architecture_draws_it() {
    expect_none(&arrows::check(&Tree::read()));
}

#[test]
fn the_core_and_the_data_plane_use_no_crates_that_are_barred_there() {
    expect_none(&arrows::check_outside(&Tree::read()));
}

#[test]
fn sources_keep_the_house_style() {
    let tree = Tree::read();
    expect_none(&tree.rust().flat_map(|file| sources::check(&file)).collect::<Vec<_>>());
}

#[test]
fn exceptions_to_the_style_are_still_needed() {
    expect_none(&sources::check_exceptions(&Tree::read()));
}

#[test]
fn images_are_deleted_and_renamed_in_custody_alone() {
    let tree = Tree::read();
    expect_none(&custody::check(&tree));
    expect_none(&custody::check_exceptions(&tree));
}

#[test]
fn no_file_is_dead() {
    expect_none(&modules::check(&Tree::read()));
}

#[test]
fn documents_name_what_exists() {
    expect_none(&documents::check(&Tree::read()));
}

#[test]
fn laws_and_decisions_that_are_referred_to_exist() {
    expect_none(&references::check(&Tree::read()));
}

#[test]
fn commands_in_documents_exist() {
    let program = Path::new(env!("CARGO_BIN_EXE_sterna"));
    expect_none(&commands::check(&Tree::read(), program));
}

/// Fails with all findings, one a line.
fn expect_none(findings: &[Finding]) {
    let lines: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert!(lines.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
}
