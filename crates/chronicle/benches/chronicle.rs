//! What the chronicle costs.

fn main() {}
