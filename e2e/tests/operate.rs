//! The commands of `docs/operate.md`, as they stand there, one after the other, on a system that has nothing of Sterna yet.

use anyhow::{Context as _, ensure};
use e2e::blocks::{Block, blocks};
use e2e::throw_away_root::{ThrowAwayRoot, package, repository};

/// The version that is there at first, and the one that is there when it is upgraded.
const VERSIONS: [(&str, &str); 2] = [("first", "0.1.0"), ("next", "0.1.0+next")];
/// The heading below which there is the next one.
const UPGRADE: &str = "## Upgrade";

/// The heading below which everything goes.
const UNINSTALL: &str = "## Uninstall";

/// Commands of another page that such a host runs before that.
struct Other {
    document: &'static str,
    /// Below which heading; `None`: all of them.
    heading: Option<&'static str>,
    /// What they take for granted.
    before: &'static str,
    /// What takes that away again.
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

/// What the page takes for granted: somebody who may become root, and a folder with a package.
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
    // What one block exports holds for those behind it: they are typed into one terminal.
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

/// Runs what other pages say.
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

/// Commands as somebody types them who works in a folder of root's. Root needs nobody's leave, and there may be no sudo.
fn script(exported: &str, commands: &str) -> String {
    format!("sudo() {{ \"$@\"; }}\ncd /root/work\n{exported}{commands}")
}
