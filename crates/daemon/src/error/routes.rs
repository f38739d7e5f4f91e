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
}

impl RouteError {
    /// The cause, for programs.
    pub(crate) fn code(&self) -> ErrorCode {
        match self {
            Self::NotFound { .. } => ErrorCode::RouteNotFound,
            Self::Method { .. } => ErrorCode::MethodNotAllowed,
        }
    }
}
