//! The figures of `bench machine`. The names of fields are a contract with readers of the JSON.

use anyhow::Context as _;
use serde::Serialize;

use crate::bench::{Environment, Summary};

/// All figures of `bench machine`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineReport {
    /// The machine and the programs that were measured.
    pub environment: Environment,
    /// Size of each VM's disk in bytes; half of it is data.
    pub size_bytes: u64,
    /// Memory of each VM in bytes.
    pub memory_bytes: u64,
    /// Number of rounds, each of which measured everything.
    pub rounds: u32,
    /// Figures of the idle VMs, then of the busy ones.
    pub loads: Vec<LoadFigures>,
}

/// Downtimes of VMs under the same load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadFigures {
    /// The VMs' load: `idle` or `busy`.
    pub name: &'static str,
    /// With Sterna, disk and memory: from the stop at the source until the source learns that the target runs, in milliseconds.
    pub sterna_downtime_ms: Summary,
    /// The part of Sterna's downtime until memory and devices were loaded, in milliseconds.
    pub sterna_memory_ms: Summary,
    /// With QEMU alone, memory only: from STOP at the source to RESUME at the target, in milliseconds.
    pub qemu_downtime_ms: Summary,
    /// Sterna's downtime less QEMU's, round by round.
    pub added_ms: Summary,
}

impl LoadFigures {
    pub(super) fn of(
        name: &'static str,
        sterna_downtime_ms: Summary,
        sterna_memory_ms: Summary,
        qemu_downtime_ms: Summary,
    ) -> anyhow::Result<Self> {
        let added_ms =
            Summary::of_pairs(&sterna_downtime_ms, &qemu_downtime_ms, |sterna, qemu| sterna - qemu);
        let added_ms = added_ms.context("both were measured as often")?;
        Ok(Self { name, sterna_downtime_ms, sterna_memory_ms, qemu_downtime_ms, added_ms })
    }
}
