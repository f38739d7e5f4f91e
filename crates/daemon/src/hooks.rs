//! Runs what an administrator has configured before and after a VM, or volumes without one, change their host or
//! their store: routes, DNS, overlays.
//!
//! ```text
//!            disks copied                                                          ended
//!   source ───────┬─── before ─── memory ─── stands ══ commit ══ its QEMU ended ────┬─── after
//!   target ───────┴ before ─ QEMU started ── loaded ══════════════ runs ── after    └ (after, if it does not run there)
//! ```
//! A hook gets its context in its environment, and is killed with all that it has started if it takes too long. Which one runs,
//! and that each does once, is decided by [`migration::hooks`]; this module carries it out. A hook's failure is an answer like
//! any other.

mod keeper;
mod process;
mod record;

use std::sync::Arc;

use migration::MigrationId;
use migration::hooks::{HookEnd, Moment};
use migration::journal::Outcome;
use serde::{Deserialize, Serialize};

pub(crate) use self::keeper::Hooks;

/// On which side of a VM's way a host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HookSide {
    /// The VM leaves it.
    Source,
    /// The VM comes to it.
    Target,
    /// Both: volumes move between its stores.
    Both,
}

/// What a hook is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HookContext {
    /// The migration, by the number that it has at this host.
    #[serde(with = "number")]
    pub(crate) migration: MigrationId,
    /// Name of the VM; empty: volumes move without one.
    pub(crate) vm: String,
    /// Names of its volumes.
    pub(crate) volumes: Vec<String>,
    /// Which side this host is.
    pub(crate) side: HookSide,
    /// What this host calls itself.
    pub(crate) own: String,
    /// What the other host is called here.
    pub(crate) other: String,
    /// How the migration ended, once that is known.
    pub(crate) outcome: Option<String>,
}

/// Why a hook was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookFault {
    /// It failed, could not be started, or took too long; in words for people.
    #[error("{0}")]
    Failed(String),
    /// The daemon stops; the next one goes on with the hook.
    #[error("the daemon stops")]
    Stopping,
}

/// The hooks of one VM on its way, at one host: `before` once, and then `after` once, whichever daemon runs them.
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
    /// The environment of a hook.
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
    /// A runner of a migration's hooks. What they are told is what the first daemon has recorded, if one has.
    pub(crate) fn new(hooks: &Arc<Hooks>, context: HookContext) -> Arc<Self> {
        let migration = context.migration;
        hooks.expect(context.clone());
        Arc::new(Self { hooks: Arc::clone(hooks), migration, context })
    }

    /// Notes something besides that went wrong, for people.
    pub(crate) fn note(&self, warning: String) {
        self.hooks.warn(self.migration, warning);
    }

    /// Before the VM is stopped, or is started to be loaded: if this fails, it is to stay. Dropping the future kills
    /// what runs, unless the daemon stops.
    ///
    /// # Errors
    /// [`HookFault`], which names the hook and what it said.
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

    /// After the VM has moved, or has not; the first call counts. Nothing is undone by a failure.
    pub(crate) async fn after(&self, outcome: &Outcome) {
        self.hooks.after(self.migration, outcome).await;
    }
}

impl Hooks {
    /// Runs what is after a migration that has ended, if anything was before it.
    pub(crate) async fn after(self: &Arc<Self>, migration: MigrationId, outcome: &Outcome) {
        self.note_outcome(migration, outcome_name(outcome));
        // Of a failure people are told.
        let _ = self.run(migration, Moment::After).await;
    }
}

/// Waits for what runs before; what nobody waits for any more is killed.
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

/// A migration's number as it is kept.
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
