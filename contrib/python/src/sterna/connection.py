"""One request after the other to the daemon, over its unix socket or TLS. It knows no operation: those are in operations.py."""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.parse
from typing import Any, Mapping

from .remote import SCHEME, Remote

DEFAULT_SOCKET = "/run/sterna/sterna.sock"
"""Where a daemon that was installed listens. STERNA_HOST in the environment names another one, as for the command line."""


class ApiError(Exception):
    """The daemon has answered that it does not do what was asked.

    `code` is for programs, and never changes its meaning; `message` is for people, and says what to do next.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class NoAnswer(Exception):
    """No daemon answers, or its answer is none. **N.B.** An order may have been carried out all the same."""


class Connection:
    """The way to a daemon.

    `path` is the socket, or `https://HOST:PORT` of a daemon that this user has added by `sterna remote add`; None: what STERNA_HOST says
    (`unix:PATH` or `https://HOST:PORT`), or the place where an installed daemon has it. `timeout` is how many seconds an answer may take,
    None: without end; orders that copy an image take their time.
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
        """Asks, and returns what the JSON of the answer says. `statuses` are those that are answers besides successes."""
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
        """Asks for what is no JSON."""
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
        """Sends one request as it is, and returns the status, the type and the body of its answer."""
        connection = self._remote.connection(self.timeout) if self._remote else _UnixConnection(self.path, self.timeout)
        try:
            try:
                connection.request(method, path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                # A daemon that has answered what it does not want to read all of does not wait for the rest.
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
    """A name as a part of a path."""
    return urllib.parse.quote(name, safe="")


def _in_query(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
