//! Operations on volumes: create, serve, export, resize, remove; and on images that are kept of them.

pub(in crate::host) mod chain;
pub(in crate::host) mod create;
pub(crate) mod export;
pub(in crate::host) mod given;
mod import;
pub(in crate::host) mod kept;
pub(in crate::host) mod remove;
pub(in crate::host) mod reserve;
pub(in crate::host) mod resize;
pub(in crate::host) mod retention;
pub(in crate::host) mod serving;
pub(in crate::host) mod within;
