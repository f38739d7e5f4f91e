//! The host in a terminal: what `sterna top` shows, and how. Where it comes from is the command's affair.

pub(crate) mod draw;
pub(crate) mod sheet;
pub(crate) mod state;
pub(crate) mod words;

pub(crate) use state::{Next, Top};

#[cfg(test)]
pub(crate) mod tests;
