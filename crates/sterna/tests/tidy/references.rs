//! Checks that numbered laws, sections of the design and decisions in comments and documents exist.

use std::collections::BTreeSet;

use crate::tree::{Finding, Tree};

const DESIGN: &str = "docs/design.md";
/// The folder of the decisions, each in a file that begins with its number.
const DECISIONS: &str = "docs/decisions/";
/// The section of the laws, whose list items are the laws.
const LAWS: &str = "5";

/// Checks every source and document.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let design = tree.file(DESIGN).map_or("", |file| &file.text);
    let (sections, laws) = (numbers(design, "## "), numbers(design, ""));
    let decisions: BTreeSet<u32> = tree
        .files()
        .filter_map(|file| file.path.strip_prefix(DECISIONS)?.split('-').next()?.parse().ok())
        .collect();
    let mut findings = Vec::new();
    // The tests of these rules refer to numbers that do not exist.
    let is_read = |path: &str| (path.ends_with(".rs") || path.ends_with(".md")) && !path.contains("/tidy/");
    for file in tree.files().filter(|file| is_read(&file.path)) {
        for (index, line) in file.text.lines().enumerate() {
            let mut find = |message: String| findings.push(Finding::in_line(&file.path, index, message));
            for reference in after(line, "esign §") {
                let (section, law) = reference.split_once('.').unwrap_or((reference, ""));
                let is_known = section.parse().is_ok_and(|number: u32| sections.contains(&number));
                let is_law = law.is_empty()
                    || (section == LAWS && law.parse().is_ok_and(|number: u32| laws.contains(&number)));
                if !is_known || !is_law {
                    find(format!("{DESIGN} has no §{reference}"));
                }
            }
            for number in after(line, "ecision ").filter_map(|text| text.parse::<u32>().ok()) {
                if !decisions.contains(&number) {
                    find(format!("{DECISIONS} has no number {number}"));
                }
            }
        }
    }
    findings
}

/// Returns the numbers that begin lines after `prefix`: `## 5. The laws`, `9. A store is locked`.
fn numbers(text: &str, prefix: &str) -> BTreeSet<u32> {
    text.lines().filter_map(|line| line.strip_prefix(prefix)?.split_once(". ")?.0.parse().ok()).collect()
}

/// Returns the number after each `marker`, perhaps with a second one after a point.
fn after<'a>(line: &'a str, marker: &'a str) -> impl Iterator<Item = &'a str> {
    line.split(marker).skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        rest[..end].trim_end_matches('.')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(line: &str) -> usize {
        let design = "## 5. The laws\n\n1. One.\n9. Nine.\n\n## 6. Parts\n";
        let files = [(DESIGN, design), ("docs/decisions/0067-x.md", ""), ("crates/x/src/lib.rs", line)];
        check(&Tree::of(&files)).len()
    }

    #[test]
    fn references_to_laws_sections_and_decisions_that_do_not_exist_are_found() {
        assert_eq!(findings("// (design §5.9, §5.1). Design §6 \"Parts\". Decision 0067, decision 67."), 0);
        assert_eq!(findings("// design §5.2"), 1);
        assert_eq!(findings("// design §6.1, design §7"), 2);
        assert_eq!(findings("// decision 12"), 1);
        assert_eq!(findings("// a decision of its own"), 0);
    }
}
