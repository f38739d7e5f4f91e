//! Finds dead files: Rust files that no module names, and files beside them that nothing reads.

use std::collections::BTreeSet;

use crate::tree::{Finding, RustFile, Tree, in_package};

/// Files that cargo, clippy and readers find by themselves.
const KNOWN_NAMES: [&str; 3] = ["Cargo.toml", "clippy.toml", "README.md"];

/// Finds dead files in packages and below `scripts/`.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let alive = alive(tree);
    let mut findings = Vec::new();
    for file in tree.files() {
        let path = file.path.as_str();
        let name = path.rsplit('/').next().unwrap();
        let is_dead = if let Some((_, own)) = in_package(path) {
            let is_known = KNOWN_NAMES.contains(&name) || name.ends_with(".snap");
            if name.ends_with(".rs") {
                !alive.contains(path)
            } else {
                !is_known && !is_named(tree, path, name) && !is_read_with_folder(tree, own)
            }
        } else {
            path.starts_with("scripts/") && !is_named(tree, path, name)
        };
        if is_dead {
            findings.push(Finding::in_file(
                path,
                "nothing uses this file: name it where it belongs, or delete it",
            ));
        }
    }
    findings
}

/// Returns the Rust files that cargo compiles, from its roots along `mod name;`.
fn alive(tree: &Tree) -> BTreeSet<String> {
    let mut alive = BTreeSet::new();
    let mut next: Vec<String> =
        tree.files().filter(|file| is_root(&file.path)).map(|file| file.path.clone()).collect();
    while let Some(path) = next.pop() {
        if let Some(file) = tree.file(&path)
            && alive.insert(path.clone())
        {
            let declared = declared_modules(&RustFile::new(&file.path, &file.text));
            next.extend(declared.into_iter().filter(|path| tree.file(path).is_some()));
        }
    }
    alive
}

/// Returns whether cargo makes a target of this file by itself.
fn is_root(path: &str) -> bool {
    let Some((_, path)) = in_package(path) else { return false };
    match path.split('/').collect::<Vec<_>>()[..] {
        ["build.rs"] | ["src", "lib.rs" | "main.rs"] => true,
        ["src", "bin", file] | ["tests" | "benches" | "examples", file] => file.ends_with(".rs"),
        ["src", "bin", _, "main.rs"] | ["tests" | "benches" | "examples", _, "main.rs"] => true,
        _ => false,
    }
}

/// Returns the possible paths of a file's `mod name;` lines.
fn declared_modules(file: &RustFile) -> Vec<String> {
    let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let stem = file.name().trim_end_matches(".rs");
    let is_folders_own = is_root(&file.path) || stem == "mod";
    let below = if is_folders_own { folder.to_owned() } else { format!("{folder}/{stem}") };
    let mut given = None;
    let mut paths = Vec::new();
    for (code, text) in file.layers.code.lines().zip(file.text.lines()) {
        let line = code.trim();
        if line.starts_with("#[path") {
            // The code layer has no strings, so the name comes from the text.
            given = text.split('"').nth(1).map(|path| normal(&format!("{folder}/{path}")));
        } else if let Some(name) = module_name(line) {
            match given.take() {
                Some(path) => paths.push(path),
                None => paths.extend([format!("{below}/{name}.rs"), format!("{below}/{name}/mod.rs")]),
            }
        }
    }
    paths
}

/// Returns the name in `mod name;`, with any visibility.
fn module_name(line: &str) -> Option<&str> {
    let rest = line.strip_suffix(';')?;
    let (visibility, name) = rest.rsplit_once("mod ")?;
    let visibility = visibility.trim();
    (visibility.is_empty() || visibility.starts_with("pub")).then_some(name)
}

/// Resolves `..` in a path.
fn normal(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns whether another source file, a script or the Makefile has this name.
fn is_named(tree: &Tree, path: &str, name: &str) -> bool {
    let is_reader = |path: &str| {
        path.ends_with(".rs")
            || path == "Makefile"
            || path.starts_with("scripts/")
            || path.starts_with(".ci/")
    };
    tree.files().any(|file| file.path != path && is_reader(&file.path) && file.text.contains(name))
}

/// Returns whether a test names the folder of data that contains a file, and so reads all of it.
fn is_read_with_folder(tree: &Tree, own: &str) -> bool {
    let mut parts = own.splitn(3, '/');
    let (Some("tests"), Some(folder), Some(_)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    tree.files().any(|file| file.path.ends_with(".rs") && file.text.contains(&format!("\"tests/{folder}\"")))
}

#[cfg(test)]
mod tests {
    use super::check;
    use crate::tree::{Finding, Tree};

    #[test]
    fn files_that_no_module_names_are_dead() {
        let tree = Tree::of(&[
            ("crates/x/src/lib.rs", "mod one;\npub(crate) mod two;\n#[path = \"odd/four.rs\"]\nmod three;\n"),
            ("crates/x/src/one.rs", "mod inner;"),
            ("crates/x/src/one/inner.rs", ""),
            ("crates/x/src/two/mod.rs", "mod inner;"),
            ("crates/x/src/two/inner.rs", ""),
            ("crates/x/src/odd/four.rs", ""),
            ("crates/x/src/three.rs", ""),
            ("crates/x/src/dead.rs", "mod deader;"),
            ("crates/x/src/dead/deader.rs", ""),
            ("crates/x/tests/test.rs", "mod support;"),
            ("crates/x/tests/support/mod.rs", ""),
            ("crates/x/tests/support/lost.rs", ""),
            ("dev/e2e/src/lib.rs", ""),
            ("dev/e2e/src/lost.rs", ""),
        ]);
        let dead = ["src/three.rs", "src/dead.rs", "src/dead/deader.rs", "tests/support/lost.rs"];
        let dead = dead.map(|path| format!("crates/x/{path}"));
        assert_eq!(paths(&check(&tree)), [&dead[..], &["dev/e2e/src/lost.rs".to_owned()]].concat());
    }

    #[test]
    fn other_files_are_dead_when_nothing_names_them() {
        let tree = Tree::of(&[
            ("crates/x/src/lib.rs", "const PROGRAM: &str = \"client.py\";"),
            ("crates/x/tests/client.py", ""),
            ("crates/x/leftover.state", ""),
            ("crates/x/tests/folders.rs", "read(\"tests/read\")"),
            ("crates/x/tests/read/one/two.state", ""),
            ("crates/x/tests/unread/three.state", ""),
            ("scripts/build", ""),
            ("scripts/old", ""),
            ("Makefile", "all:\n\tscripts/build\n"),
        ]);
        assert_eq!(
            paths(&check(&tree)),
            ["crates/x/leftover.state", "crates/x/tests/unread/three.state", "scripts/old"]
        );
    }

    fn paths(findings: &[Finding]) -> Vec<String> {
        findings.iter().map(|finding| finding.to_string().split(':').next().unwrap().to_owned()).collect()
    }
}
