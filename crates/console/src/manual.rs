//! Manual pages, made of the command line itself.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

/// Writes a page for a command that was built, and for each of its subcommands, into `folder`.
///
/// # Errors
/// If a file cannot be written.
pub fn write_manual(command: &Command, version: &str, folder: &Path) -> io::Result<()> {
    write_page(command, None, version, folder)
}

fn write_page(command: &Command, above: Option<&str>, version: &str, folder: &Path) -> io::Result<()> {
    let mut page = Vec::new();
    let name = render(command, above, version, &mut page)?;
    File::create(folder.join(format!("{name}.1")))?.write_all(&page)?;
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
    shown.into_iter().try_for_each(|command| write_page(command, Some(&name), version, folder))
}

/// Renders the page of a command below the page `above`, and returns its name.
fn render(command: &Command, above: Option<&str>, version: &str, page: &mut Vec<u8>) -> io::Result<String> {
    let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut shown = command.clone();
    if above.is_some() {
        // The options of all commands are on the first page.
        shown = shown.mut_args(|argument| {
            let is_of_all = argument.is_global_set();
            argument.hide(is_of_all)
        });
    }
    let man = Man::new(shown).source(format!("sterna {version}")).manual("Sterna");
    man.render_title(page)?;
    man.render_name_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(page)?;
    }
    if let Some(text) = command.get_after_long_help().or_else(|| command.get_after_help()) {
        let heading = if text.to_string().starts_with("Exit codes") { "EXIT STATUS" } else { "EXAMPLES" };
        writeln!(page, ".SH \"{heading}\"\n.nf\n{}\n.fi", roff(&text.to_string()))?;
    }
    let see = match above {
        Some(above) if above.contains('-') => format!("{}, {}", reference(above), reference(first(above))),
        Some(above) => reference(above),
        None => "the documents in /usr/share/doc/sterna".to_owned(),
    };
    let what = if above.is_some() { ". The options of all commands are in sterna(1)" } else { "" };
    writeln!(page, ".SH \"SEE ALSO\"\n{see}{what}.")?;
    Ok(name)
}

fn reference(page: &str) -> String {
    format!("\\fB{}\\fR(1)", page.replace('-', "\\-"))
}

fn first(page: &str) -> &str {
    page.split('-').next().unwrap_or(page)
}

/// Returns a text whose lines are printed as they are.
fn roff(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // A line that begins so would be a request.
        if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command};

    use super::write_manual;

    #[test]
    fn a_page_has_its_own_options_and_examples_and_leads_to_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let leaf = Command::new("list").arg(Arg::new("long").long("long")).after_help("Example:\n.dot -x");
        let mut command = Command::new("tool")
            .arg(Arg::new("everywhere").long("everywhere").global(true))
            .after_help("Exit codes:\n  0  success")
            .subcommand(Command::new("disk").subcommand(leaf));
        command.build();
        write_manual(&command, "1", folder.path()).unwrap();
        let page = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let (whole, list) = (page("tool.1"), page("tool-disk-list.1"));
        assert!(whole.contains("everywhere") && whole.contains(".SH \"EXIT STATUS\""), "{whole}");
        assert!(!list.contains("everywhere") && list.contains("long"), "{list}");
        assert!(list.contains(".SH \"EXAMPLES\"") && list.contains("\n\\&.dot \\-x\n"), "{list}");
        assert!(list.contains("\\fBtool\\-disk\\fR(1), \\fBtool\\fR(1)"), "{list}");
        assert!(!list.contains("EXTRA") && !whole.contains("EXTRA"));
    }
}
