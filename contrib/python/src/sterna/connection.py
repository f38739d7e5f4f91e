"""Sends requests to a daemon, over its unix socket or TLS. The operations of the API are in operations.py."""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.parse
from typing import Any, Mapping

from .remote import SCHEME, Remote

DEFAULT_SOCKET = "/run/sterna/sterna.sock"
"""The socket of an installed daemon. The environment variable STERNA_HOST names another daemon, as for the command line."""


class ApiError(Exception):
    """The daemon has refused the order, or could not carry it out.

    `code` is for programs, and its meaning never changes. `message` is for people, and says what to do next.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class NoAnswer(Exception):
    """No daemon answers, or its answer cannot be read. **N.B.** The daemon may still have carried out the order."""


class Connection:
    """The address of a daemon, and requests to it.

    `path` is the socket, or `https://HOST:PORT` of a daemon that this user has added by `sterna remote add`. None means the address in
    STERNA_HOST (`unix:PATH` or `https://HOST:PORT`) or, without that, the socket of an installed daemon. `timeout` is the longest wait
    for an answer in seconds. None means no limit, which suits orders that copy an image.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, timeout: float | None = None) -> None:
        self.path = os.fspath(path) if path else _place_of(os.environ.get("STERNA_HOST", ""))
        self.timeout = timeout
        self._remote = Remote.of(self.path) if self.path.startswith(SCHEME) else None

    def ask(
        self,
        method: str,
        path: str,
        order: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        statuses: tuple[int, ...] = (),
    ) -> Any:
        """Sends a request, and returns the JSON of the answer. `statuses` are further statuses that are no errors."""
        status, body = self.exchange(method, path, order, query)
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise NoAnswer(f"{method} {path}: the answer with status {status} is no JSON") from error
        if 200 <= status < 300 or status in statuses:
            return answer
        told = answer.get("error", {}) if isinstance(answer, dict) else {}
        raise ApiError(status, told.get("code", ""), told.get("message", f"{method} {path}: status {status}"))

    def ask_text(self, method: str, path: str) -> str:
        """Sends a request whose answer is text, not JSON."""
        status, body = self.exchange(method, path, None, None)
        if not 200 <= status < 300:
            raise ApiError(status, "", body.decode(errors="replace"))
        return body.decode()

    def exchange(
        self, method: str, path: str, order: Mapping[str, Any] | None, query: Mapping[str, Any] | None
    ) -> tuple[int, bytes]:
        """Sends one request, and returns the status and the body of its answer."""
        said = {name: _in_query(value) for name, value in (query or {}).items() if value is not None}
        if said:
            path += "?" + urllib.parse.urlencode(said)
        body = None if order is None else json.dumps(order).encode()
        headers: dict[str, str] = {} if body is None else {"Content-Type": "application/json"}
        status, _, answer = self.exchange_bytes(method, path, body, headers)
        return status, answer

    def exchange_bytes(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """Sends one request unchanged, and returns the status, the type and the body of its answer."""
        connection = self._remote.connection(self.timeout) if self._remote else _UnixConnection(self.path, self.timeout)
        try:
            try:
                connection.request(method, path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                # The daemon may refuse a request before it has read all of it, and then closes the connection.
                pass
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type", ""), response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no daemon answers at {self.path}: {error}") from error
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _place_of(host: str) -> str:
    if not host:
        return DEFAULT_SOCKET
    if not host.startswith(("unix:", SCHEME)):
        raise ValueError(f"STERNA_HOST is {host}: this client knows unix:PATH and https://HOST:PORT only")
    return host.removeprefix("unix:")


def segment(name: str) -> str:
    """Returns a name as a part of a path."""
    return urllib.parse.quote(name, safe="")


def _in_query(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
