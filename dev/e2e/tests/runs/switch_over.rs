//! Makes twenty migrations in a row under load.

use e2e::play;
use e2e::switch_over::{Settings, measure};

#[test]
fn twenty_migrations_under_load_lose_nothing() {
    play(|scene| {
        let rounds = measure(scene, Settings { rounds: 20, disk_bytes: 128 << 20 })?;
        assert_eq!(rounds.rounds().len(), 20);
        // The times are printed but not checked, because the machine is shared.
        println!("{rounds}");
        Ok(())
    });
}
