//! Signing in to the page for browsers.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Role;

/// A link with which one browser signs in to the page, and then has its buttons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PageLink {
    /// The address of the page, with a key that works once. **It holds a secret.**
    pub url: String,
    /// The rights of the browser: those of the client that asks, and at most `operate`.
    pub role: Role,
    /// How long the key can be used, in seconds.
    pub lifetime_s: u64,
    /// How long the browser stays signed in, in seconds.
    pub session_s: u64,
}
