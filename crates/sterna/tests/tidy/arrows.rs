//! Checks that the drawing of crates in ARCHITECTURE.md and the manifests agree.

use std::collections::{BTreeMap, BTreeSet};

use crate::tree::{Finding, Tree, in_package};

const DRAWING: &str = "ARCHITECTURE.md";
/// The heading below which the first code block is the drawing.
const HEADING: &str = "## Crates and arrows";

/// Crates that only decide, with the outside crates that they may use. None of these brings a runtime,
/// socket, file, clock or randomness.
const PURE: [(&str, &[&str]); 2] = [
    ("chronicle", &["crc32c", "serde", "thiserror"]),
    ("migration", &["crc32c", "postcard", "serde", "thiserror"]),
];

/// Crates of the data plane, which runs on its own executor and must not use crates of the control plane.
const DATA_PLANE: [&str; 3] = ["block", "export", "lane"];
const CONTROL_PLANE_ONLY: [&str; 8] =
    ["anyhow", "axum", "clap", "hyper", "hyper-util", "reqwest", "tokio", "tracing-subscriber"];

/// Compares the drawing with the manifests, and finds arrows that point upwards.
pub(crate) fn check(tree: &Tree) -> Vec<Finding> {
    let drawn = match drawn(tree) {
        Ok(drawn) => drawn,
        Err(finding) => return vec![finding],
    };
    let manifests = manifests(tree);
    let names: BTreeSet<&str> = manifests.keys().map(String::as_str).collect();
    let mut findings = Vec::new();
    for name in &names {
        if !drawn.iter().any(|(user, _)| user == name) {
            findings.push(Finding::in_file(
                DRAWING,
                format!("the crate {name} is not drawn under \"{HEADING}\""),
            ));
        }
    }
    for (level, (user, drawn_uses)) in drawn.iter().enumerate() {
        let Some(manifest) = manifests.get(user) else {
            findings.push(Finding::in_file(DRAWING, format!("{user} is drawn, but there is no such crate")));
            continue;
        };
        let own: BTreeSet<&str> = manifest.all().filter(|name| names.contains(name)).collect();
        let drawn_uses: BTreeSet<&str> = drawn_uses.iter().map(String::as_str).collect();
        for used in own.difference(&drawn_uses) {
            let message =
                format!("the arrow {user} → {used} is not drawn in {DRAWING}: do without it, or draw it");
            findings.push(Finding::in_file(&manifest.path, message));
        }
        for used in drawn_uses.difference(&own) {
            findings
                .push(Finding::in_file(DRAWING, format!("the arrow {user} → {used} is drawn, but not used")));
        }
        for used in own {
            if !drawn[level + 1..].iter().any(|(below, _)| below == used) {
                let message =
                    format!("the arrow {user} → {used} points upwards: {used} must not be drawn above it");
                findings.push(Finding::in_file(&manifest.path, message));
            }
        }
    }
    findings
}

pub(crate) fn check_outside(tree: &Tree) -> Vec<Finding> {
    let manifests = manifests(tree);
    let mut findings = Vec::new();
    for (name, outside) in PURE {
        let Some(manifest) = manifests.get(name) else { continue };
        for used in manifest.uses.iter().filter(|used| !manifests.contains_key(*used)) {
            if !outside.contains(&used.as_str()) {
                let message =
                    format!("{name} decides and does no I/O: {used} is not among {}", outside.join(", "));
                findings.push(Finding::in_file(&manifest.path, message));
            }
        }
    }
    for name in DATA_PLANE {
        let Some(manifest) = manifests.get(name) else { continue };
        for used in manifest.uses.iter().filter(|used| CONTROL_PLANE_ONLY.contains(&used.as_str())) {
            let message =
                format!("{used} belongs to the control plane, {name} to the path of a guest's request");
            findings.push(Finding::in_file(&manifest.path, message));
        }
    }
    findings
}

#[derive(Default)]
struct Manifest {
    path: String,
    /// Dependencies of its library or program, and of its build.
    uses: BTreeSet<String>,
    /// Dependencies of its tests and benchmarks.
    tests_use: BTreeSet<String>,
}

impl Manifest {
    fn all(&self) -> impl Iterator<Item = &str> {
        self.uses.union(&self.tests_use).map(String::as_str)
    }
}

fn manifests(tree: &Tree) -> BTreeMap<String, Manifest> {
    let mut manifests = BTreeMap::new();
    for file in tree.files() {
        if let Some((name, "Cargo.toml")) = in_package(&file.path) {
            manifests
                .insert(name.to_owned(), Manifest { path: file.path.clone(), ..read_manifest(&file.text) });
        }
    }
    manifests
}

/// Reads the names of dependencies: the first word of each line of such a section, or the last of its heading.
fn read_manifest(text: &str) -> Manifest {
    let mut manifest = Manifest::default();
    let mut section = String::new();
    for line in text.lines().map(str::trim) {
        if let Some(heading) = line.strip_prefix('[') {
            section = heading.trim_end_matches(']').to_owned();
            // [dependencies.name] or [target.'…'.dependencies.name]
            if let Some((of, name)) = section.clone().rsplit_once('.')
                && of.ends_with("dependencies")
            {
                add(&mut manifest, of, name);
            }
        } else if section.ends_with("dependencies") && !line.starts_with('#') {
            let name = line.split(['=', '.', ' ']).next().unwrap().trim_matches('"');
            if !name.is_empty() {
                add(&mut manifest, &section, name);
            }
        }
    }
    manifest
}

fn add(manifest: &mut Manifest, section: &str, name: &str) {
    let uses =
        if section.ends_with("dev-dependencies") { &mut manifest.tests_use } else { &mut manifest.uses };
    uses.insert(name.to_owned());
}

/// Returns the crates of the drawing with their dependencies, from top to bottom.
fn drawn(tree: &Tree) -> Result<Vec<(String, Vec<String>)>, Finding> {
    let missing =
        |what: &str| Finding::in_file(DRAWING, format!("{what}: the arrows between crates are drawn there"));
    let text = &tree.file(DRAWING).ok_or_else(|| missing("there is no such file"))?.text;
    let (_, below) =
        text.split_once(HEADING).ok_or_else(|| missing(&format!("there is no \"{HEADING}\"")))?;
    let block =
        below.split("```").nth(1).ok_or_else(|| missing("there is no code block below the heading"))?;
    let lines = block.lines().skip(1).filter(|line| !line.trim().is_empty());
    Ok(lines
        .map(|line| {
            let (user, uses) = line.split_once('→').unwrap_or((line, ""));
            let uses = uses.split(',').map(str::trim).filter(|name| !name.is_empty());
            (user.trim().to_owned(), uses.map(str::to_owned).collect())
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::{check, check_outside};
    use crate::tree::{Finding, Tree};

    const DRAWING: &str = "## Crates and arrows\n\n```text\ntop    → middle, low\nmiddle → low\nlow\n```\n";

    /// Checks the drawing against three manifests.
    fn findings(drawing: &str, top: &str, middle: &str, low: &str) -> Vec<String> {
        let tree = Tree::of(&[
            ("ARCHITECTURE.md", drawing),
            ("crates/top/Cargo.toml", top),
            ("crates/middle/Cargo.toml", middle),
            ("crates/low/Cargo.toml", low),
        ]);
        check(&tree).iter().map(Finding::to_string).collect()
    }

    const TOP: &str = "[dependencies]\nmiddle.workspace = true\nserde = \"1\"\n[dev-dependencies]\nlow = { path = \"x\" }\n";
    const MIDDLE: &str = "[dependencies.low]\nworkspace = true\n";

    #[test]
    fn a_true_drawing_has_no_findings() {
        assert_eq!(findings(DRAWING, TOP, MIDDLE, ""), [""; 0]);
    }

    #[test]
    fn arrows_that_are_not_drawn_or_not_used_or_point_upwards_are_found() {
        let undrawn = findings(&DRAWING.replace("middle, low", "middle"), TOP, MIDDLE, "");
        assert!(undrawn.len() == 1 && undrawn[0].contains("top → low is not drawn"), "{undrawn:?}");
        let unused = findings(DRAWING, TOP, "", "");
        assert!(unused.len() == 1 && unused[0].contains("middle → low is drawn, but not used"), "{unused:?}");
        let upwards = findings(&DRAWING.replace("low\n```", "low → top\n```"), TOP, MIDDLE, TOP);
        assert!(
            upwards.iter().any(|finding| finding.contains("low → top points upwards")) || upwards.len() > 1
        );
        let missing = findings("## Crates and arrows\n```\ntop → middle, low\n```", TOP, "", "");
        assert!(
            missing.iter().any(|finding| finding.contains("the crate middle is not drawn")),
            "{missing:?}"
        );
        assert_eq!(findings("", TOP, MIDDLE, "").len(), 1);
    }

    #[test]
    fn a_clock_in_the_core_and_a_runtime_in_the_data_plane_are_found() {
        let found = |path: &str, manifest: &str| check_outside(&Tree::of(&[(path, manifest)])).len();
        assert_eq!(found("crates/migration/Cargo.toml", "[dependencies]\nrand = \"1\"\n"), 1);
        assert_eq!(found("crates/migration/Cargo.toml", "[dev-dependencies]\nrand = \"1\"\n"), 0);
        assert_eq!(found("crates/lane/Cargo.toml", "[target.'cfg(unix)'.dependencies]\ntokio = \"1\"\n"), 1);
        assert_eq!(found("crates/daemon/Cargo.toml", "[dependencies]\ntokio.workspace = true\n"), 0);
    }
}
