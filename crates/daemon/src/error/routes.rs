//! Requests for what the API does not have.

use api::ErrorCode;

/// Why no operation answers a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RouteError {
    /// There is no such path.
    #[error("the API has no {path}: is the client newer than the daemon?")]
    NotFound {
        /// The path.
        path: String,
    },
    /// There is the path, and not for this method.
    #[error("the API has {path}, and not for {method}: see the header Allow, and /v1/openapi.json")]
    Method {
        /// The method.
        method: String,
        /// The path.
        path: String,
    },
    /// The client calls this host by a name that may be anybody's.
    #[error("this host is not called that here: write localhost or 127.0.0.1 in the address")]
    Elsewhere,
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
            Self::Elsewhere | Self::FromPage => ErrorCode::NotPermitted,
        }
    }
}
