//! `sterna remote …`: the daemons that this user reaches over TLS.

use api::{ClientError, Grant, RedeemGrant};
use serde::Serialize;
use transport::HostId;
use transport::pinned::AccessToken;

use crate::args::{AddRemoteArguments, RemoteCommand};
use crate::commands::{CommandError, host};
use crate::exit::Exit;
use crate::output::{self, Format, access};
use crate::remotes::{self, Remote, RemoteAddress, RemoteError, Remotes};

#[derive(Serialize)]
struct Added {
    #[serde(flatten)]
    remote: Remote,
    /// The grant of this user; `None` if the daemon knew the key already.
    grant: Option<Grant>,
}

/// The digest of this user's key.
#[derive(Serialize)]
struct Key {
    key: String,
}

pub(super) async fn run(command: RemoteCommand, format: Format) -> Result<Exit, CommandError> {
    let remotes = Remotes::of_this_user()?;
    match command {
        RemoteCommand::Add(order) => {
            let added = add(&remotes, order).await?;
            output::print(format, &added, |Added { remote, grant }| {
                let name = grant
                    .as_ref()
                    .map(|grant| format!(" as \"{}\", with the role {}", grant.name, grant.role));
                let name = name.unwrap_or_default();
                format!("{0} is known{name}; try: sterna --host {0} volume list\n", remote.address)
            })?;
        }
        RemoteCommand::List => output::print(format, &remotes.list()?, |remotes| access::remotes(remotes))?,
        RemoteCommand::Remove { address } => {
            output::print(format, &remotes.remove(&address)?, |remote| {
                format!("removed {}\n", remote.address)
            })?;
        }
        RemoteCommand::Key => {
            let key = Key { key: remotes.own_identity()?.id().to_string() };
            output::print(format, &key, |key| format!("{}\n", key.key))?;
        }
    }
    Ok(Exit::Success)
}

async fn add(remotes: &Remotes, order: AddRemoteArguments) -> Result<Added, CommandError> {
    let AddRemoteArguments { address, token_file, server_key } = order;
    let own = remotes.own_identity()?;
    let (server, grant) = match server_key {
        Some(key) => {
            let key: HostId = key.parse().map_err(|_| RemoteError::Key)?;
            remotes::client(&address, &own, key)?.host().await?;
            (key, None)
        }
        None => {
            let token = host::invitation(None, token_file.as_deref())?;
            let token: AccessToken = token.parse().map_err(RemoteError::from)?;
            (token.server, redeem(&address, &token, own).await?)
        }
    };
    Ok(Added { remote: remotes.put(&address, server)?, grant })
}

/// Registers this user's own key with the daemon; `None`: the daemon knew it already.
async fn redeem(
    address: &RemoteAddress,
    token: &AccessToken,
    own: transport::Identity,
) -> Result<Option<Grant>, CommandError> {
    let invited = remotes::client(address, &token.identity().map_err(RemoteError::from)?, token.server)?;
    let redeemed = invited.redeem_access(&RedeemGrant { key: own.id().to_string() }).await;
    match redeemed {
        Ok(grant) => Ok(Some(grant)),
        // The token may have been redeemed before, with a lost answer.
        Err(error @ (ClientError::Unreachable { .. } | ClientError::Broken(_) | ClientError::Refused(_))) => {
            match remotes::client(address, &own, token.server)?.host().await {
                Ok(_) => Ok(None),
                Err(_) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}
