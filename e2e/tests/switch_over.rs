//! Makes twenty migrations in a row under load.

use e2e::play;
use e2e::switch_over::{Settings, measure};

#[test]
fn twenty_migrations_under_load_lose_nothing() {
    play(|scene| {
        let rounds = measure(scene, Settings { rounds: 20, disk_bytes: 128 << 20 })?;
        assert_eq!(rounds.rounds().len(), 20);
        // Only for the log: the timing of a shared machine is not checked.
        println!("{rounds}");
        Ok(())
    });
}
