//! `sterna metrics`

use api::Client;
use serde::Serialize;

use crate::commands::CommandError;
use crate::exit::Exit;
use crate::output::{self, Format};

/// The figures in a JSON document.
#[derive(Serialize)]
struct Metrics {
    /// The figures in Prometheus' text format.
    metrics: String,
}

pub(super) async fn run(client: &Client, format: Format) -> Result<Exit, CommandError> {
    let told = Metrics { metrics: client.metrics().await? };
    output::print(format, &told, |told| told.metrics.clone())?;
    Ok(Exit::Success)
}
