//! What a session needs of its host.

use std::future::Future;
use std::time::Duration;

use migration::journal::{Record, Stage};
use migration::{CommitFault, MigrationId};

/// The time of a host.
pub trait Clock {
    /// Returns the time since an instant that stays the same.
    fn now(&self) -> Duration;

    /// Resolves at a time of this clock.
    fn sleep_until(&self, at: Duration) -> impl Future<Output = ()>;
}

/// The journal of a host.
pub trait Journal {
    /// Returns the stage of a migration, if the journal has it.
    fn stage(&self, migration: MigrationId) -> Option<Stage>;

    /// Makes records durable that end a migration.
    fn commit_end(&self, records: Vec<Record>) -> impl Future<Output = Result<(), CommitFault>>;
}

/// What a session runs on.
#[derive(Debug)]
pub struct Surroundings<J, C, S> {
    /// The host's journal.
    pub journal: J,
    /// The host's clock.
    pub clock: C,
    /// Resolves when the host stops.
    pub stopping: S,
}
