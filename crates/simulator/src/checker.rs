//! What must hold, one rule a file. Each checker is told what happened and says what is wrong.

pub(crate) mod content;
pub(crate) mod journal;
pub(crate) mod owner;
pub(crate) mod patience;
pub(crate) mod progress;
