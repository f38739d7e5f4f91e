//! `sterna access …`: access to the daemon over TLS.

use api::{Client, NewGrant, SetGrant};

use crate::args::AccessCommand;
use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format, access};

pub(super) async fn run(
    client: &Client,
    command: AccessCommand,
    format: Format,
) -> Result<Exit, CommandError> {
    match command {
        AccessCommand::Grant(order) => {
            let (name, role, key) = (order.name, order.role, order.key);
            let order = NewGrant { name, role, key, lifetime_s: order.minutes * 60 };
            output::print(format, &client.grant_access(&order).await?, access::granted)?;
        }
        AccessCommand::List => output::print(format, &client.access().await?, access::list)?,
        AccessCommand::Set { name, role } => {
            let changed = client.set_access(&name, &SetGrant { role }).await?;
            output::print(format, &changed, |grant| {
                format!("{} now has the role {}\n", grant.name, grant.role)
            })?;
        }
        AccessCommand::Revoke { name } => {
            let revoked = client.revoke_access(&name).await?;
            output::print(format, &revoked, |grant| format!("revoked the access of {}\n", grant.name))?;
        }
    }
    Ok(Exit::Success)
}

/// `sterna page`
pub(super) async fn show_page_link(client: &Client, format: Format) -> Result<Exit, CommandError> {
    output::print(format, &client.page_link().await?, access::page_link)?;
    Ok(Exit::Success)
}
