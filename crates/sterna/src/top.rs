//! The screen of `sterna top`. The command fetches the data.

pub(crate) mod draw;
pub(crate) mod sheet;
pub(crate) mod state;
pub(crate) mod words;

pub(crate) use state::{Next, Top};

#[cfg(test)]
pub(crate) mod tests;
