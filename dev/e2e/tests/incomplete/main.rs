//! Tests of volumes and VMs at a host that lacks some of their blocks: the rest comes, or the host that has it takes them back.
//!
//! They are one program, because to link a program takes longer than most of them run.

mod filling;
mod filling_vm;
mod taking_back;
mod taking_back_vm;

use api::{Volume, VolumeFilling};
use e2e::Host;

fn volumes(host: &Host) -> anyhow::Result<Vec<Volume>> {
    host.ask(&["volume", "list"])
}

/// Returns what is known of the missing bytes of a host's volumes.
fn fillings(host: &Host) -> anyhow::Result<Vec<VolumeFilling>> {
    Ok(volumes(host)?.into_iter().filter_map(|volume| volume.filling).collect())
}

/// Returns the missing bytes of a host's volumes.
fn lacks(host: &Host) -> anyhow::Result<u64> {
    Ok(fillings(host)?.iter().map(|filling| filling.bytes_missing).sum())
}

/// Number of kills of daemons. For a long run set `STERNA_FILLING_KILLS=200`.
fn kills_wanted() -> anyhow::Result<u32> {
    match std::env::var("STERNA_FILLING_KILLS") {
        Ok(number) => Ok(number.parse()?),
        Err(_) => Ok(6),
    }
}
