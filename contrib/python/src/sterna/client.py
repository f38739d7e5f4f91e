"""The client: the operations of the API, and what takes more than one of them."""

from __future__ import annotations

import time

from .operations import Operations
from .types import MigrateVolume, Migration

ENDED = ("moved", "cancelled", "failed", "handed-back")
"""States of a migration in which nothing more happens to it."""
_WAIT_MS = 10_000


class MigrationFailed(Exception):
    """A migration has ended, and its volumes are where they were; `migration` says why."""

    def __init__(self, migration: Migration) -> None:
        super().__init__(f"migration {migration['id']} is {migration['state']}: {migration.get('message') or ''}")
        self.migration = migration


class Client(Operations):
    """A daemon, as who may use its socket sees it. Each call is one connection: it may be used by several threads."""

    def wait_for_migration(self, id: str, timeout: float | None = None) -> Migration:
        """Waits until a migration has ended, and returns it; `timeout` is in seconds.

        Raises TimeoutError; the migration goes on then.
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
        """Moves a volume, and returns when it is there. Raises MigrationFailed, TimeoutError."""
        migration = self.wait_for_migration(self.migrate(volume, order)["id"], timeout)
        if migration["state"] != "moved":
            raise MigrationFailed(migration)
        return migration
