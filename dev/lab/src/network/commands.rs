//! `ip` and `tc`, run inside a namespace.

use std::process::{Command, Stdio};

use super::error::NetworkError;
use super::namespace::Namespace;

const PACKAGE: &str = "iproute2";

/// Runs `ip` with `arguments` in `namespace`. The error of a failure holds its output.
pub(super) fn ip(namespace: &Namespace, arguments: &[&str]) -> Result<(), NetworkError> {
    run(namespace, "ip", arguments)
}

/// Runs `tc` with `arguments` in `namespace`. The error of a failure holds its output.
pub(super) fn tc(namespace: &Namespace, arguments: &[&str]) -> Result<(), NetworkError> {
    run(namespace, "tc", arguments)
}

fn run(namespace: &Namespace, program: &'static str, arguments: &[&str]) -> Result<(), NetworkError> {
    // A process belongs to the namespace of the thread that starts it.
    let output = namespace.run(|| Command::new(program).args(arguments).stdin(Stdio::null()).output())?;
    let output = output.map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => NetworkError::NoProgram { program, package: PACKAGE },
        _ => NetworkError::System { what: "start a program in a namespace", source },
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let command = format!("{program} {}", arguments.join(" "));
    Err(NetworkError::Command { command, status: output.status, said })
}
