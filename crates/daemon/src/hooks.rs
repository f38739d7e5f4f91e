//! Runs an administrator's hooks before and after a VM, or volumes without one, change their host or their
//! store: for routes, DNS, overlays.
//!
//! ```text
//!            disks copied                                                          ended
//!   source ───────┬─── before ─── memory ─── stands ══ commit ══ its QEMU ended ────┬─── after
//!   target ───────┴ before ─ QEMU started ── loaded ══════════════ runs ── after    └ (after, if it does not run there)
//! ```
//! A hook gets its context in its environment. After its time limit it is killed with all that it has started.
//! [`migration::hooks`] decides which one runs, and that each runs once; this module carries it out. A hook's failure is
//! an answer like any other.

mod keeper;
mod process;
mod record;

use std::sync::Arc;

use migration::MigrationId;
use migration::hooks::{HookEnd, Moment};
use migration::journal::Outcome;
use serde::{Deserialize, Serialize};

pub(crate) use self::keeper::Hooks;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HookSide {
    /// The VM leaves this host.
    Source,
    /// The VM comes to this host.
    Target,
    /// Volumes move between stores of this host.
    Both,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HookContext {
    #[serde(with = "number")]
    pub(crate) migration: MigrationId,
    /// The VM's name; empty: volumes move without a VM.
    pub(crate) vm: String,
    pub(crate) volumes: Vec<String>,
    pub(crate) side: HookSide,
    pub(crate) own: String,
    /// The other host's name at this host.
    pub(crate) other: String,
    /// The outcome of the migration, once it is known.
    pub(crate) outcome: Option<String>,
}

/// Why a hook was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookFault {
    /// It failed, could not be started, or took too long; the text says which.
    #[error("{0}")]
    Failed(String),
    /// The daemon stops, and the next one continues the hook.
    #[error("the daemon stops")]
    Stopping,
}

/// The hooks of one moving VM at one host: `before` once, and then `after` once, whichever daemon runs them.
pub(crate) struct HookRunner {
    hooks: Arc<Hooks>,
    migration: MigrationId,
    context: HookContext,
}

impl HookSide {
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Target => "target",
            Self::Both => "both",
        }
    }
}

impl HookContext {
    fn variables(&self, moment: &'static str) -> Vec<(&'static str, String)> {
        let (source, target) = match self.side {
            HookSide::Source => (&self.own, &self.other),
            HookSide::Target => (&self.other, &self.own),
            HookSide::Both => (&self.own, &self.own),
        };
        let mut variables = vec![
            ("STERNA_HOOK", moment.to_owned()),
            ("STERNA_SIDE", self.side.name().to_owned()),
            ("STERNA_MIGRATION", self.migration.to_string()),
            ("STERNA_VM", self.vm.clone()),
            ("STERNA_VOLUMES", self.volumes.join(" ")),
            ("STERNA_SOURCE_HOST", source.clone()),
            ("STERNA_TARGET_HOST", target.clone()),
        ];
        if let (Some(outcome), "after") = (&self.outcome, moment) {
            variables.push(("STERNA_OUTCOME", outcome.clone()));
        }
        variables
    }
}

impl HookRunner {
    /// Returns a runner of a migration's hooks. If an earlier daemon has recorded a context, that one is used.
    pub(crate) fn new(hooks: &Arc<Hooks>, context: HookContext) -> Arc<Self> {
        let migration = context.migration;
        hooks.expect(context.clone());
        Arc::new(Self { hooks: Arc::clone(hooks), migration, context })
    }

    /// Records another failure of the migration.
    pub(crate) fn note(&self, warning: String) {
        self.hooks.warn(self.migration, warning);
    }

    /// Runs the hook before the VM is stopped, or is started to be loaded: if it fails, the VM stays. Dropping the future kills
    /// the hook, unless the daemon stops. [`HookFault`] names the hook and its output.
    pub(crate) async fn before(&self) -> Result<(), HookFault> {
        self.hooks.expect(self.context.clone());
        let mut waits = Waits { runner: self, is_over: false };
        let end = self.hooks.run(self.migration, Moment::Before).await;
        waits.is_over = true;
        match end {
            Some(HookEnd::Good) => Ok(()),
            Some(HookEnd::Bad(fault)) => Err(HookFault::Failed(fault)),
            None => Err(HookFault::Stopping),
        }
    }

    /// Runs the hook after the VM has moved, or the move has failed; only the first call counts. A failure undoes nothing.
    pub(crate) async fn after(&self, outcome: &Outcome) {
        self.hooks.after(self.migration, outcome).await;
    }
}

impl Hooks {
    /// Runs the hook after an ended migration, if a hook was run before it.
    pub(crate) async fn after(self: &Arc<Self>, migration: MigrationId, outcome: &Outcome) {
        self.note_outcome(migration, outcome_name(outcome));
        // A failure is reported by the book.
        let _ = self.run(migration, Moment::After).await;
    }
}

/// Waits for the hook before a migration; kills it when it is dropped.
struct Waits<'a> {
    runner: &'a HookRunner,
    is_over: bool,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.runner.hooks.give_up(self.runner.migration);
        }
    }
}

fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Moved { .. } | Outcome::TakenBack => "moved",
        Outcome::Cancelled | Outcome::CancelledThere => "cancelled",
        Outcome::Failed { .. } => "failed",
        Outcome::HandedBack { .. } => "handed-back",
    }
}

mod number {
    use migration::MigrationId;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(id: &MigrationId, serializer: S) -> Result<S::Ok, S::Error> {
        id.0.serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MigrationId, D::Error> {
        u64::deserialize(deserializer).map(MigrationId)
    }
}

#[cfg(test)]
pub(crate) mod tests;
