//! Text output of `sterna access` and `sterna remote`.

use std::time::{Duration, SystemTime};

use api::{Access, Grant, NewlyGranted, PageLink};

use super::{dash, table};
use crate::remotes::Remote;

pub(crate) fn list(access: &Access) -> String {
    let mut text = match (&access.problem, &access.listen, &access.key) {
        (Some(problem), ..) => format!("no user may use the API: {problem}\n"),
        (None, Some(listen), Some(key)) => {
            format!("the API is served over TLS at {listen}, with the key {key}\n")
        }
        _ => "the API is not served over TLS (api_tls.listen in the configuration)\n".to_owned(),
    };
    let mut table = table(&["NAME", "ROLE", "KEY"], &[]);
    for grant in &access.grants {
        let key = grant.key.clone().unwrap_or_else(|| format!("invited, for {} min more", minutes(grant)));
        table.add_row([grant.name.clone(), grant.role.to_string(), key]);
    }
    text.push_str(&format!("{table}\n"));
    text
}

/// Returns a new grant, with the command for the user's machine.
pub(crate) fn granted(granted: &NewlyGranted) -> String {
    let NewlyGranted { grant, token, listen } = granted;
    let port = listen.as_deref().and_then(|listen| listen.rsplit(':').next()).unwrap_or("PORT");
    let Some(token) = token else {
        return format!("{} is known by a key, with the role {}\n", grant.name, grant.role);
    };
    format!(
        "{} may have the role {}; on that user's machine, within {} min:\n\nsterna remote add https://HOST:{port}\n\nand enter \
         this access token at its prompt:\n\n{token}\n",
        grant.name,
        grant.role,
        minutes(grant),
    )
}

/// Returns a link to the page, with what to do with it.
pub(crate) fn page_link(link: &PageLink) -> String {
    // The daemon writes http://ADDRESS/web/#…
    let address = link.url.trim_start_matches("http://").split('/').next().unwrap_or_default();
    format!(
        "{}\n\nopen this link in a browser within {} min: it works once, and gives that browser the role {} for {} h; if the \
         browser is on another machine, run there first: ssh -L {address}:{address} HOST\n",
        link.url,
        link.lifetime_s / 60,
        link.role,
        link.session_s / 3600,
    )
}

/// Returns this user's daemons as a table.
pub(crate) fn remotes(remotes: &[Remote]) -> String {
    let mut table = table(&["DAEMON", "KEY"], &[]);
    for remote in remotes {
        table.add_row([&remote.address, &remote.key]);
    }
    format!("{table}\n")
}

fn minutes(grant: &Grant) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let left = grant.invited_until_unix_ms.map(|until| Duration::from_millis(until).saturating_sub(now));
    left.map_or_else(dash, |left| left.as_secs().div_ceil(60).to_string())
}
