//! What starting the VMs of a standby takes: their definitions, small files and TPM states, which a promotion needs.
//!
//! ```text
//!   source: describing ── pieces, each answered ──► keeping: parsed, checked, durable ──► a promotion: VMs of this host, started
//! ```
//! A standby describes each VM whose volumes are all in it. The description is that of a stopped VM which moves
//! ([`crate::vms::orders::cold`]), so the same checks apply.

mod describing;
mod keeping;
