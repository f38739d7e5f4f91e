//! Refusals of requests that no operation of the API accepts.

use std::net::SocketAddr;

use api::{ErrorCode, Role};

/// Why no operation answers a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteError {
    #[error("the API has no {path}: is the client newer than the daemon?")]
    NotFound { path: String },
    /// The path exists, but not for this method.
    #[error("the API has no {method} for {path}: see the header Allow, and /v1/openapi.json")]
    Method { method: String, path: String },
    /// The client uses a host name that may be an attacker's.
    #[error("this host does not have that name here: write localhost or 127.0.0.1 in the address")]
    Elsewhere,
    /// The client's role is too low.
    #[error(
        "this needs the role {needed}, and \"{name}\" has the role {role}; an administrator of this host can change it: sterna \
         access set {name} --role {needed}"
    )]
    Role { name: String, role: Role, needed: Role },
    #[error(
        "this key belongs to the access token of \"{0}\", which can only be redeemed: sterna remote add https://HOST:PORT"
    )]
    Invited(String),
    /// A client without an access token tries to redeem one.
    #[error(
        "an access token is redeemed over TLS, with the key that is in the token: sterna remote add https://HOST:PORT"
    )]
    NotInvited,
    /// The client's key was revoked while it was connected.
    #[error(
        "this key is not known; an administrator of this host can grant access: sterna access grant NAME --role ROLE"
    )]
    Revoked,
    /// A web page makes a browser give orders.
    #[error(
        "a web page asks for this, and web pages may only read: use the sterna commands, or a client other than a browser"
    )]
    FromPage,
    /// The browser that gives an order on the page has not signed in, or not to this daemon.
    #[error("this browser is not signed in: run sterna page on the host, and open the link that it prints")]
    NotSignedIn,
    #[error(
        "the link was used already, or is too old: run sterna page again, and open the link that it prints"
    )]
    SignInRefused,
    /// The browser's role is too low.
    #[error(
        "this needs the role operate, and this browser has the role {role}: run sterna page again as a user with that role"
    )]
    PageRole { role: Role },
    /// Another page, or no browser, gives an order at the page's port.
    #[error("only the page itself gives orders here; programs use the API's socket, or the API over TLS")]
    OtherPage,
    /// The page has no port.
    #[error(
        "the page has no port: set web.listen in the configuration, for example listen = \"127.0.0.1:7424\", and restart the \
         daemon, which breaks no connection"
    )]
    NoPage,
    /// Another process has the port of the page.
    #[error("the page is not served yet, because {0} is in use; see which process listens there: ss -ltnp")]
    NoPageYet(SocketAddr),
}

impl RouteError {
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound { .. } => ErrorCode::RouteNotFound,
            Self::Method { .. } => ErrorCode::MethodNotAllowed,
            Self::Elsewhere
            | Self::FromPage
            | Self::NotSignedIn
            | Self::SignInRefused
            | Self::PageRole { .. }
            | Self::OtherPage
            | Self::NoPage
            | Self::NoPageYet(_)
            | Self::Role { .. }
            | Self::Invited(_)
            | Self::NotInvited
            | Self::Revoked => ErrorCode::NotPermitted,
        }
    }
}
