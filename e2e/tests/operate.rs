//! The commands of `docs/operate.md`, as they stand there, one after the other, on a system that has nothing of Sterna yet.

use anyhow::{Context as _, ensure};
use e2e::throw_away_root::{ThrowAwayRoot, package, repository};

/// The version that is there at first, and the one that is there when it is upgraded.
const VERSIONS: [(&str, &str); 2] = [("first", "0.1.0"), ("next", "0.1.0+next")];
/// The heading below which there is the next one.
const UPGRADE: &str = "## Upgrade";

/// What the page takes for granted: somebody who may become root, and a folder with a package.
const BEFORE: &str = "useradd --create-home alice; mkdir /root/work; ln -s /mnt/first /root/work/target";
const NEXT: &str = "ln -sfn /mnt/next /root/work/target";

/// A block of commands, with the heading that it stands below.
#[derive(Debug)]
struct Block {
    heading: String,
    commands: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut heading, mut block) = (Vec::new(), String::new(), None::<String>);
    for line in page.lines() {
        match (&mut block, line) {
            (Some(_), "```") => {
                let commands = block.take().unwrap_or_default();
                blocks.push(Block { heading: heading.clone(), commands });
            }
            (Some(commands), line) => commands.extend([line, "\n"]),
            (None, "```sh") => block = Some(String::new()),
            (None, line) if line.starts_with("## ") => line.clone_into(&mut heading),
            _ => {}
        }
    }
    blocks
}

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
    let mut upgraded = false;
    for Block { heading, commands } in &blocks {
        if heading == UPGRADE && !upgraded {
            root.succeed(NEXT)?;
            upgraded = true;
        }
        // Root needs nobody's leave, and there may be no sudo.
        let script = format!("sudo() {{ \"$@\"; }}\ncd /root/work\n{exported}{commands}");
        let outcome = root.run(&script)?;
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
    root.succeed(
        "test -s /srv/fast/web1.img -a ! -e /var/lib/sterna -a ! -e /etc/sterna && ! command -v sterna",
    )?;
    Ok(())
}
