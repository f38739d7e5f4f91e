//! `sterna bench` and `sterna demo`: becomes `sterna-lab`, the program that measures and shows this one.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::commands::CommandError;

const LAB: &str = "sterna-lab";
/// Its folder in a package, seen from the folder of `sterna`.
const PACKAGED: &str = "../lib/sterna";

/// Replaces this process by `sterna-lab` with the same arguments; returns only if that fails.
pub(super) fn run() -> CommandError {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => return CommandError::Program(error),
    };
    let Some(lab) = find(&program) else { return CommandError::NoLab { program } };
    let arguments = std::env::args_os().skip(1);
    let source = Command::new(&lab).args(arguments).env("STERNA_PROGRAM", program).exec();
    CommandError::Lab { program: lab, source }
}

/// Returns the program beside `sterna`, or where a package puts it.
fn find(program: &Path) -> Option<PathBuf> {
    let folder = program.parent()?;
    [folder.join(LAB), folder.join(PACKAGED).join(LAB)].into_iter().find(|path| path.is_file())
}
