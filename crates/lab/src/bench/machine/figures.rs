//! The figures of `bench machine`. Names of fields are a contract with those who read the JSON.

use anyhow::Context as _;
use serde::Serialize;

use crate::bench::{Environment, Summary};

/// Everything that was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MachineReport {
    /// On what.
    pub environment: Environment,
    /// Size of either VM's disk in bytes; half of it is data.
    pub size_bytes: u64,
    /// Memory of either VM in bytes.
    pub memory_bytes: u64,
    /// How often everything was measured.
    pub rounds: u32,
    /// The idle VM, then the busy one.
    pub loads: Vec<LoadFigures>,
}

/// How long VMs stood still that did the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadFigures {
    /// What they did: `idle` or `busy`.
    pub name: &'static str,
    /// With Sterna, disk and memory: from the stand at the source until the source heard that it runs at the target, in
    /// milliseconds.
    pub sterna_downtime_ms: Summary,
    /// The part of it until memory and devices were loaded.
    pub sterna_memory_ms: Summary,
    /// With QEMU alone, memory without the disk: from its event STOP at the source to RESUME at the target, in
    /// milliseconds.
    pub qemu_downtime_ms: Summary,
    /// The difference, round by round.
    pub added_ms: Summary,
}

impl LoadFigures {
    /// Puts the figures of one load together.
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
