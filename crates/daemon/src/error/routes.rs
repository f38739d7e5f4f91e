//! Requests for what the API does not have.

use api::{ErrorCode, Role};

/// Why no operation answers a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteError {
    /// There is no such path.
    #[error("the API has no {path}: is the client newer than the daemon?")]
    NotFound { path: String },
    /// There is the path, and not for this method.
    #[error("the API has {path}, and not for {method}: see the header Allow, and /v1/openapi.json")]
    Method { method: String, path: String },
    /// The client calls this host by a name that may be anybody's.
    #[error("this host is not called that here: write localhost or 127.0.0.1 in the address")]
    Elsewhere,
    /// The client's role does not reach so far.
    #[error(
        "this takes the role {needed}, and \"{name}\" has the role {role}; an administrator of this host grants it: \
         sterna access set {name} --role {needed}"
    )]
    Role {
        /// What the client is called.
        name: String,
        role: Role,
        needed: Role,
    },
    /// The client has the key of an invitation.
    #[error(
        "this key is that of the invitation of \"{0}\", which can be redeemed and nothing else: sterna remote add https://HOST:PORT"
    )]
    Invited(String),
    /// An invitation is redeemed by who has none.
    #[error(
        "an invitation is redeemed over TLS, by the key that it holds: sterna remote add https://HOST:PORT"
    )]
    NotInvited,
    /// The client was known when it connected.
    #[error(
        "this key is not known any more; an administrator of this host grants access: sterna access grant NAME --role ROLE"
    )]
    Revoked,
    /// A page of somebody's makes a browser give orders.
    #[error(
        "a web page asks for this, and pages may only read: use the sterna commands, or a client that is no browser"
    )]
    FromPage,
}

impl RouteError {
    /// The cause, for programs.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound { .. } => ErrorCode::RouteNotFound,
            Self::Method { .. } => ErrorCode::MethodNotAllowed,
            Self::Elsewhere
            | Self::FromPage
            | Self::Role { .. }
            | Self::Invited(_)
            | Self::NotInvited
            | Self::Revoked => ErrorCode::NotPermitted,
        }
    }
}
