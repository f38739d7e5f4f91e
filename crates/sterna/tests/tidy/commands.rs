//! Checks that commands and options in documents exist.
//!
//! Commands are in blocks that begin with "```sh", one a line. Only commands of Sterna, make and cargo are checked.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use crate::tree::{Finding, Tree};

/// Checks the commands of all documents; `program` is `sterna`.
pub(crate) fn check(tree: &Tree, program: &Path) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().filter(|file| file.path.ends_with(".md")) {
        for (index, command) in commands(&file.text) {
            if let Err(message) = check_command(tree, program, &command) {
                findings.push(Finding::in_line(
                    &file.path,
                    index,
                    format!("`{}`: {message}", command.join(" ")),
                ));
            }
        }
    }
    findings
}

/// Returns the commands of a document as lists of words, each with its line, counted from zero.
fn commands(text: &str) -> Vec<(usize, Vec<String>)> {
    let mut commands = Vec::new();
    let mut is_shell = false;
    let mut begun = String::new();
    for (index, line) in text.lines().enumerate() {
        let fence = line.trim_start();
        if fence.starts_with("```") {
            is_shell = !is_shell && fence == "```sh";
        } else if is_shell {
            if let Some(first) = line.strip_suffix('\\') {
                begun.push_str(first);
                continue;
            }
            begun.push_str(line);
            let parts = std::mem::take(&mut begun);
            commands.extend(split(&parts).into_iter().map(|words| (index, words)));
        }
    }
    commands
}

/// Splits a line at pipes, `&&`, `;` and `$(`, and each part at spaces; drops comments, quotes, redirections,
/// `sudo` and settings of variables.
fn split(line: &str) -> Vec<Vec<String>> {
    let line = line.split(" #").next().unwrap();
    let line = if line.starts_with('#') { "" } else { line };
    let parts = line.split(['|', '&', ';', '(', ')']);
    let is_redirection =
        |word: &str| word.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(['<', '>']);
    let words = parts.map(|part| {
        let words = part.split_whitespace().filter(|word| !is_redirection(word));
        let words = words.map(|word| word.trim_matches(['"', '\'', '$']).to_owned());
        words
            .skip_while(|word| word == "sudo" || (word.contains('=') && !word.starts_with('-')))
            .collect::<Vec<_>>()
    });
    words.filter(|words| !words.is_empty()).collect()
}

fn check_command(tree: &Tree, program: &Path, command: &[String]) -> Result<(), String> {
    let (first, rest) = command.split_first().unwrap();
    match first.as_str() {
        "make" => rest.iter().try_for_each(|target| check_target(tree, target)),
        "cargo" => check_cargo(tree, rest),
        "sterna" | "target/release/sterna" => check_sterna(program, rest),
        script if script.starts_with("scripts/") && tree.file(script).is_none() => {
            Err("there is no such script".into())
        }
        _ => Ok(()),
    }
}

fn check_target(tree: &Tree, target: &str) -> Result<(), String> {
    let makefile = tree.file("Makefile").ok_or("there is no Makefile")?;
    let rule = format!("{target}:");
    match makefile.text.lines().any(|line| line.starts_with(&rule)) {
        true => Ok(()),
        false => Err(format!("the Makefile has no target {target}")),
    }
}

/// Checks packages, tests, benchmarks, examples and features of a cargo command.
fn check_cargo(tree: &Tree, arguments: &[String]) -> Result<(), String> {
    for pair in arguments.windows(2) {
        let [option, name] = pair else { continue };
        let ending = match option.as_str() {
            "-p" | "--package" => format!("{name}/Cargo.toml"),
            "--test" => {
                let folder = format!("/tests/{name}/main.rs");
                let is_folder = tree.files().any(|file| file.path.ends_with(&folder));
                if is_folder { folder } else { format!("/tests/{name}.rs") }
            }
            "--bench" => format!("/benches/{name}.rs"),
            "--example" => format!("/examples/{name}.rs"),
            "--features" => {
                check_feature(tree, name)?;
                continue;
            }
            _ => continue,
        };
        if !tree.files().any(|file| file.path.ends_with(&ending)) {
            return Err(format!("there is no {name} for {option}"));
        }
    }
    Ok(())
}

fn check_feature(tree: &Tree, name: &str) -> Result<(), String> {
    let declaration = format!("{name} = [");
    let mut manifests = tree.files().filter(|file| file.path.ends_with("/Cargo.toml"));
    match manifests.any(|file| file.text.lines().any(|line| line.starts_with(&declaration))) {
        true => Ok(()),
        false => Err(format!("no crate has a feature {name}")),
    }
}

/// Runs the command with `--help` at the end, which changes nothing, but refuses unknown words.
fn check_sterna(program: &Path, arguments: &[String]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).arg("--help").output().unwrap();
    let refusal = String::from_utf8_lossy(&output.stderr);
    let lines: BTreeSet<&str> = refusal.lines().filter(|line| line.starts_with("error:")).collect();
    if output.status.success() { Ok(()) } else { Err(lines.into_iter().collect()) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{check, split};
    use crate::tree::Tree;

    fn findings(block: &str) -> usize {
        let tree = Tree::of(&[
            ("README.md", &format!("```sh\n{block}\n```\nmake nothing\n")),
            ("Makefile", "test: lint\n\techo\n"),
            ("crates/x/Cargo.toml", "[features]\nodd = []\n"),
            ("crates/x/tests/one.rs", ""),
            ("scripts/build", ""),
        ]);
        check(&tree, Path::new(env!("CARGO_BIN_EXE_sterna"))).len()
    }

    #[test]
    fn lines_are_split_into_commands() {
        let words =
            split("sudo A=1 qemu-img info \"$(sterna volume show web1 --json | jq -r .uri)\" & # a comment");
        let words: Vec<String> = words.iter().map(|words| words.join(" ")).collect();
        assert_eq!(words[..3], ["qemu-img info ", "sterna volume show web1 --json", "jq -r .uri"]);
    }

    #[test]
    fn commands_that_exist_pass() {
        assert_eq!(findings("make test\nscripts/build && cargo test -p x --test one --features odd"), 0);
        assert_eq!(findings("sterna volume create web1 \\\n  --size 4GiB --json 2>log\nls -l"), 0);
    }

    #[test]
    fn commands_that_do_not_exist_are_found() {
        assert_eq!(findings("make tea\nscripts/brew\ncargo test -p tea\ncargo test --test tea"), 4);
        assert_eq!(findings("cargo test --features tea\nsterna tea\nsterna volume list --tea"), 3);
        assert_eq!(findings("true && sterna volume create web1 --size tea 2>log"), 1);
    }
}
