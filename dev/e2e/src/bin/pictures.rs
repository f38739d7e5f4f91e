//! Makes the pictures of the documents: `scripts/pictures`.

use std::path::PathBuf;

use clap::Parser;

/// Makes pictures of the page, of a report and of `sterna top`, with two busy hosts.
#[derive(Debug, Parser)]
struct Arguments {
    folder: PathBuf,
}

fn main() -> anyhow::Result<()> {
    e2e::pictures::make(&Arguments::parse().folder)
}
