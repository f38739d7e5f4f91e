//! `sterna host …`

use api::{Client, JoinHost, NewIdentity, NewInvitation, RemovePeer};

use crate::args::HostCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, hosts};

pub(super) async fn run(client: &Client, command: HostCommand, format: Format) -> Result<Exit, CommandError> {
    match command {
        HostCommand::Init { name } => {
            let name = name.unwrap_or_else(host_name);
            let identity = client.create_identity(&NewIdentity { name }).await?;
            output::print(format, &identity, hosts::identity)?;
        }
        HostCommand::Invite { minutes } => {
            let invitation = client.invite(&NewInvitation { lifetime_s: minutes * 60 }).await?;
            output::print(format, &invitation, hosts::invitation)?;
        }
        HostCommand::Join(order) => {
            let order = JoinHost { token: order.token, address: Some(order.address) };
            output::print(format, &client.join_host(&order).await?, hosts::joined)?;
        }
        HostCommand::List => output::print(format, &client.peers().await?, hosts::peers)?,
        HostCommand::Show { name: None } => {
            output::print(format, &client.identity().await?, hosts::identity)?;
        }
        HostCommand::Show { name: Some(name) } => {
            output::print(format, &client.peer(&name).await?, hosts::peer)?;
        }
        HostCommand::Remove { name, force } => {
            let removed = client.remove_peer(&name, RemovePeer { force }).await?;
            output::print(format, &removed, |removed| format!("{} is no longer known here\n", removed.name))?;
        }
    }
    Ok(Exit::Success)
}

/// The name that the system has, as far as a host can be called so.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().map(|character| if character.is_ascii_alphanumeric() { character } else { '-' }).collect()
}
