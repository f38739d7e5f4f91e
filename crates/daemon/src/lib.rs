//! The control plane: HTTP API, journal, volumes, migrations.
