//! Blocks of commands in documents.

/// A block of commands, with the heading above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The line of the heading, `## …`; empty above the first.
    pub heading: String,
    /// The commands of the block.
    pub commands: String,
}

/// Returns the `sh` blocks of a page, in their order.
pub fn blocks(page: &str) -> Vec<Block> {
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

#[cfg(test)]
mod tests {
    use super::{Block, blocks};

    #[test]
    fn only_what_is_to_be_run_is_taken_with_the_heading_above_it() {
        let page = "```sh\na\n```\n## One\n```text\nb\n```\n### Two\n```sh\nc \\\n  d\n## no heading\n```\n";
        let block =
            |heading: &str, commands: &str| Block { heading: heading.into(), commands: commands.into() };
        assert_eq!(blocks(page), [block("", "a\n"), block("## One", "c \\\n  d\n## no heading\n")]);
    }
}
