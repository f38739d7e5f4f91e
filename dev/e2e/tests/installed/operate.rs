//! Runs the commands of `docs/operate.md`, one after the other, on a system without Sterna.

use anyhow::{Context as _, ensure};
use e2e::blocks::{Block, blocks};
use e2e::throw_away_root::{ThrowAwayRoot, package, repository};

const VERSIONS: [(&str, &str); 2] = [("first", "0.1.0"), ("next", "0.1.0+next")];
const UPGRADE: &str = "## Upgrade";

const UNINSTALL: &str = "## Uninstall";

/// Commands of another page that run before the removal.
struct Other {
    document: &'static str,
    /// The heading of the commands; `None`: the whole page.
    heading: Option<&'static str>,
    /// Commands that run before these.
    before: &'static str,
    /// Commands that undo these.
    after: &'static str,
}

const OTHERS: [Other; 6] = [
    other("docs/api.md", None),
    Other {
        before: "cp /etc/sterna/sterna.toml /etc/sterna/sterna.toml.new",
        after: "rm /etc/sterna/sterna.toml.new",
        ..other("docs/configuration.md", None)
    },
    other("docs/journal.md", None),
    other("docs/observe.md", Some("## In a terminal")),
    Other {
        before: "mkdir -p /var/lib/prometheus/node-exporter",
        ..other("docs/observe.md", Some("## Figures"))
    },
    other("docs/observe.md", Some("## The audit log")),
];

const fn other(document: &'static str, heading: Option<&'static str>) -> Other {
    Other { document, heading, before: "", after: "" }
}

/// Commands before the page: a user with sudo, and a folder with a package.
const BEFORE: &str = "useradd --create-home alice; mkdir /root/work; ln -s /mnt/first /root/work/target";
const NEXT: &str = "ln -sfn /mnt/next /root/work/target";

#[test]
fn the_commands_of_the_page_do_what_it_says() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        omission::machine_lacks("root, to boot a system that is thrown away");
        return Ok(());
    }
    let packages = tempfile::tempdir()?;
    for (folder, version) in VERSIONS {
        package(version, &packages.path().join(folder))?;
    }
    let page = std::fs::read_to_string(repository().join("docs/operate.md"))?;
    let blocks = blocks(&page);
    ensure!(blocks.iter().any(|block| block.heading == UPGRADE), "{blocks:?}");

    let root = ThrowAwayRoot::boot(packages.path())?;
    root.succeed(BEFORE)?;
    // Exports of a block hold for later blocks, because all run in one shell.
    let mut exported = String::new();
    let (mut upgraded, mut others) = (false, false);
    for Block { heading, commands } in &blocks {
        if heading == UNINSTALL && !std::mem::replace(&mut others, true) {
            run_others(&root, &exported)?;
        }
        if heading == UPGRADE && !upgraded {
            root.succeed(NEXT)?;
            upgraded = true;
        }
        let outcome = root.run(&script(&exported, commands))?;
        if outcome.code != 0 {
            let log = root.succeed("journalctl --unit sterna --no-pager --lines 40")?;
            outcome.expect(0).with_context(|| format!("{heading}:\n{commands}\n{log}"))?;
        }
        exported.extend(commands.lines().filter(|line| line.starts_with("export ")).flat_map(|l| [l, "\n"]));
        if heading == UPGRADE {
            let version = root.succeed("dpkg-query --show --showformat '${Version}' sterna")?;
            ensure!(version == VERSIONS[1].1, "{version} is installed");
        }
    }
    ensure!(others, "the page has no {UNINSTALL}");
    root.succeed(
        "test -s /srv/fast/web1.img -a ! -e /var/lib/sterna -a ! -e /etc/sterna && ! command -v sterna",
    )?;
    Ok(())
}

/// Runs the commands of other pages.
fn run_others(root: &ThrowAwayRoot, exported: &str) -> anyhow::Result<()> {
    for Other { document, heading: wanted, before, after } in OTHERS {
        let page = std::fs::read_to_string(repository().join(document))?;
        let blocks =
            blocks(&page).into_iter().filter(|block| wanted.is_none_or(|heading| block.heading == heading));
        let commands: String = blocks.map(|block| block.commands).collect();
        ensure!(!commands.is_empty(), "{document} has no commands below {wanted:?}");
        root.succeed(&script(exported, &format!("{before}\n{commands}\n{after}"))).context(document)?;
    }
    Ok(())
}

/// Returns commands for root in root's folder, without `sudo`, which may be missing.
fn script(exported: &str, commands: &str) -> String {
    format!("sudo() {{ \"$@\"; }}\ncd /root/work\n{exported}{commands}")
}
