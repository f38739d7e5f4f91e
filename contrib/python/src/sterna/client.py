"""The client: the operations of the API, and two functions that wait for a migration."""

from __future__ import annotations

import time

from .operations import Operations
from .types import MigrateVolume, Migration

ENDED = ("moved", "cancelled", "failed", "handed-back")
"""Final states of a migration."""
_WAIT_MS = 10_000


class MigrationFailed(Exception):
    """A migration has ended without moving its volumes; `migration` says why."""

    def __init__(self, migration: Migration) -> None:
        super().__init__(f"migration {migration['id']} is {migration['state']}: {migration.get('message') or ''}")
        self.migration = migration


class Client(Operations):
    """A client of a daemon. Each call opens its own connection, so several threads may use one client."""

    def wait_for_migration(self, id: str, timeout: float | None = None) -> Migration:
        """Waits until a migration has ended, and returns it. `timeout` is in seconds.

        Raises TimeoutError. The migration continues in this case.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        seen = None
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"migration {id} has not ended")
            wait_ms = _WAIT_MS if left is None else min(_WAIT_MS, int(left * 1000) + 1)
            migration = self.show_migration(id, after=seen, wait_ms=wait_ms)
            if migration["state"] in ENDED:
                return migration
            seen = migration["change"]

    def migrate_and_wait(self, volume: str, order: MigrateVolume, timeout: float | None = None) -> Migration:
        """Moves a volume, and returns when it has moved. Raises MigrationFailed, TimeoutError."""
        migration = self.wait_for_migration(self.migrate(volume, order)["id"], timeout)
        if migration["state"] != "moved":
            raise MigrationFailed(migration)
        return migration
