"""A client of Sterna's HTTP API: live migration of virtual machines' disks.

    from sterna import Client

    client = Client()
    for volume in client.list_volumes():
        print(volume["name"], volume["state"])
"""

from .client import Client, MigrationFailed
from .connection import DEFAULT_SOCKET, ApiError, NoAnswer

__all__ = ["DEFAULT_SOCKET", "ApiError", "Client", "MigrationFailed", "NoAnswer"]
