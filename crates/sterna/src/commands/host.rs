//! `sterna host …`

use std::fs::File;
use std::io::{self, BufRead as _, IsTerminal as _, Read, Write as _};
use std::path::Path;

use api::{Client, JoinHost, NewIdentity, NewInvitation, RemovePeer, SetHost, SetPeer};

use crate::args::HostCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, hosts};

const INVITATION_VARIABLE: &str = "STERNA_INVITATION";
/// Largest number of bytes that are read of an invitation, more than any has.
const INVITATION_BYTES_MAX: u64 = 64 << 10;

pub(super) async fn run(client: &Client, command: HostCommand, format: Format) -> Result<Exit, CommandError> {
    match command {
        HostCommand::Init { name } => {
            let name = name.unwrap_or_else(host_name);
            let identity = client.create_identity(&NewIdentity { name }).await?;
            output::print(format, &identity, hosts::identity)?;
        }
        HostCommand::Invite { minutes, allow_machines } => {
            let order = NewInvitation { lifetime_s: minutes * 60, allow_machines };
            let invitation = client.invite(&order).await?;
            output::print(format, &invitation, hosts::invitation)?;
        }
        HostCommand::Join(order) => {
            let allow_machines = order.allow_machines.then_some(true);
            let token = invitation(order.token, order.token_file.as_deref())?;
            let order = JoinHost { token, address: Some(order.address), allow_machines };
            output::print(format, &client.join_host(&order).await?, hosts::joined)?;
        }
        HostCommand::List => {
            let own = client.host().await?;
            output::print(format, &client.peers().await?, |peers| {
                hosts::peers(peers) + &hosts::drained(&own)
            })?;
        }
        HostCommand::Drain => {
            output::print(format, &client.set_host(SetHost { drained: true }).await?, hosts::drained)?;
        }
        HostCommand::Undrain => {
            output::print(format, &client.set_host(SetHost { drained: false }).await?, hosts::undrained)?;
        }
        HostCommand::Show { name: None } => {
            output::print(format, &client.identity().await?, hosts::identity)?;
        }
        HostCommand::Show { name: Some(name) } => {
            output::print(format, &client.peer(&name).await?, hosts::peer)?;
        }
        HostCommand::Set { name, change } => {
            let allow_machines =
                (change.allow_machines || change.deny_machines).then_some(change.allow_machines);
            let addresses = Some(change.addresses).filter(|addresses| !addresses.is_empty());
            let change = SetPeer { allow_machines, addresses };
            output::print(format, &client.set_peer(&name, &change).await?, |peer| {
                let trust = if allow_machines.is_some() { hosts::trust(peer) } else { String::new() };
                let reached = if change.addresses.is_some() { hosts::reached(peer) } else { String::new() };
                trust + &reached
            })?;
        }
        HostCommand::Remove { name, force } => {
            let removed = client.remove_peer(&name, RemovePeer { force }).await?;
            output::print(format, &removed, |removed| format!("removed host {}\n", removed.name))?;
        }
    }
    Ok(Exit::Success)
}

/// Returns the invitation from the argument, the file, the environment or the prompt.
pub(super) fn invitation(argument: Option<String>, file: Option<&Path>) -> Result<String, CommandError> {
    let unread = |path: &Path| {
        let path = path.to_owned();
        move |source| CommandError::File { path, source }
    };
    let standard_input = Path::new("/dev/stdin");
    let text = match (argument, file) {
        (Some(token), _) => token,
        (None, Some(path)) if path == Path::new("-") => {
            from_standard_input().map_err(unread(standard_input))?
        }
        (None, Some(path)) => File::open(path).and_then(read_whole).map_err(unread(path))?,
        (None, None) => match std::env::var(INVITATION_VARIABLE) {
            Ok(token) => token,
            Err(_) => ask().map_err(unread(standard_input))?,
        },
    };
    Ok(last_line(&text).to_owned())
}

/// Returns the line of the token: what `host invite` has printed ends with it.
fn last_line(text: &str) -> &str {
    text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default()
}

/// Prompts on a terminal; from a pipe it reads everything.
fn ask() -> io::Result<String> {
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return from_standard_input();
    }
    // A failure loses only the prompt itself.
    let _ = write!(io::stderr(), "token: ");
    let mut line = String::new();
    stdin.lock().take(INVITATION_BYTES_MAX).read_line(&mut line)?;
    Ok(line)
}

fn from_standard_input() -> io::Result<String> {
    read_whole(io::stdin().lock())
}

fn read_whole(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    from.take(INVITATION_BYTES_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// Returns the system's host name, without characters that a host's name cannot have.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().map(|character| if character.is_ascii_alphanumeric() { character } else { '-' }).collect()
}

#[cfg(test)]
mod tests {
    use super::last_line;

    #[test]
    fn a_token_is_found_in_all_that_an_invitation_prints() {
        assert_eq!(last_line("token\n"), "token");
        assert_eq!(
            last_line("on the other host:\n\nsterna host join a:1\n\nat its prompt:\n\ntoken \n\n"),
            "token"
        );
        assert_eq!(last_line(" \n"), "");
    }
}
