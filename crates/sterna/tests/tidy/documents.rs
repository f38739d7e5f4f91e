//! Checks that links, files and names in backticks in documents exist.

use std::collections::BTreeSet;

use crate::lexer::words;
use crate::tree::{File, Finding, Tree};

/// Endings of files that a document may name in backticks.
const FILE_ENDINGS: [&str; 4] = [".rs", ".md", ".toml", ".py"];

/// Checks every Markdown file.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let mut known = BTreeSet::new();
    for file in tree.files().filter(|file| is_code(&file.path)) {
        // Variants are sent and stored in snake case.
        known.extend(words(&file.text).flat_map(|word| [word.to_owned(), snake(word)]));
    }
    tree.files()
        .filter(|file| file.path.ends_with(".md"))
        .flat_map(|file| check_one(tree, &known, file))
        .collect()
}

fn is_code(path: &str) -> bool {
    path.ends_with(".rs") || path.ends_with(".toml") || path.starts_with("scripts/") || path == "Makefile"
}

fn check_one(tree: &Tree, known: &BTreeSet<String>, file: &File) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut is_block = false;
    for (index, line) in file.text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if !is_block {
            let mut find = |message: String| findings.push(Finding::in_line(&file.path, index, message));
            for link in links(line).filter(|link| !leads_somewhere(tree, &file.path, link)) {
                find(format!("the link to {link} leads nowhere"));
            }
            for name in line.split('`').skip(1).step_by(2) {
                if is_file_name(name) && !is_there(tree, name) {
                    find(format!("there is no file {name}"));
                } else if is_identifier(name) && !words(name).all(|word| known.contains(word)) {
                    find(format!("the code knows no {name}"));
                }
            }
        }
    }
    findings
}

/// Returns the targets in `](…)`.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

fn leads_somewhere(tree: &Tree, from: &str, link: &str) -> bool {
    if link.contains("://") || link.starts_with('#') {
        return true;
    }
    let folder = from.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in link.split('#').next().unwrap().split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    let path = parts.join("/");
    tree.has(&path) && (is_packaged(&path) || !is_packaged(from))
}

/// Returns whether a package has this file, or this folder (`scripts/install`).
fn is_packaged(path: &str) -> bool {
    let top = path.split('/').next().unwrap_or_default();
    ["docs", "contrib"].contains(&top)
        || ["README.md", "CHANGELOG.md", "LICENSE", "ARCHITECTURE.md", "CONTRIBUTING.md"].contains(&path)
}

/// Returns whether it is a name such as `lane/src/thread.rs` or `thread.rs`, not a pattern or an example of a user's file.
fn is_file_name(name: &str) -> bool {
    let is_plain = name.chars().all(|c| c.is_alphanumeric() || "_-./".contains(c));
    is_plain && !name.starts_with(['/', '.']) && FILE_ENDINGS.iter().any(|ending| name.ends_with(ending))
}

/// Returns whether a file exists. Files are named from the root, or by the end of their path.
fn is_there(tree: &Tree, name: &str) -> bool {
    tree.files().any(|file| file.path == name || file.path.ends_with(&format!("/{name}")))
}

/// Returns whether it is a name such as `Copy::advance()`, `advance()` or `a_test_that_proves_something`. A
/// single word may be anything.
fn is_identifier(name: &str) -> bool {
    let bare = name.trim_end_matches("()");
    let is_plain = bare.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':');
    let is_path = bare.contains("::");
    let is_call = name.ends_with("()");
    is_plain && (is_path || is_call || bare.matches('_').count() >= 2)
}

/// Converts `VolumeNotFound` to `volume_not_found`.
fn snake(word: &str) -> String {
    let mut snake = String::new();
    for character in word.chars() {
        if character.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(character.to_lowercase());
    }
    snake
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tree::Tree;

    fn findings(document: &str) -> usize {
        let code = "pub fn advance() {} struct Copy; fn a_test_of_three() {} enum E { NotThereYet }";
        let tree = Tree::of(&[("docs/page.md", document), ("crates/x/src/lib.rs", code), ("README.md", "")]);
        check(&tree).len()
    }

    #[test]
    fn what_exists_may_be_named() {
        assert_eq!(
            findings("[a](../README.md) [b](https://example.org/x) [c](page.md#there) [d](../docs)"),
            0
        );
        assert_eq!(
            findings(
                "`x/src/lib.rs` `lib.rs` `Copy::advance()` `a_test_of_three` `not_there_yet` `volume` `/etc/x.toml`"
            ),
            0
        );
        assert_eq!(findings("```sh\n`no/such.rs`\n```\n"), 0);
    }

    #[test]
    fn what_does_not_exist_is_found() {
        assert_eq!(findings("[a](README.md)\n[b](../no.md#x)"), 2);
        // A package has documents, and no sources.
        assert_eq!(findings("[a](../crates/x/src/lib.rs)"), 1);
        assert_eq!(findings("`x/src/gone.rs`, `retreat()`\n`Copy::retreat`, `a_test_of_four`"), 4);
    }
}
