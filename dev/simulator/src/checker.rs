//! The rules that must hold, one in each file. A checker receives the events and returns what is wrong.

pub(crate) mod content;
pub(crate) mod journal;
pub(crate) mod owner;
pub(crate) mod patience;
pub(crate) mod progress;
