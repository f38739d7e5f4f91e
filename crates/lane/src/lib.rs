//! One thread per volume: export, filters, store and the volume's side of a migration.
