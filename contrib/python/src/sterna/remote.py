"""A daemon that is asked over TLS, with the keys that `sterna remote add` has kept."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import pathlib
import socket
import ssl
import urllib.parse

SCHEME = "https://"
"""The beginning of the address of a daemon that is asked over TLS."""
PORT = 7425
"""The port of a daemon whose address has none."""


class Remote:
    """A daemon that is known by its key alone; names and authorities in its certificate are ignored."""

    def __init__(self, host: str, port: int, key: str, identity: pathlib.Path) -> None:
        self.host, self.port, self.key = host, port, key
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        # N.B. `connect` compares the key before anything is sent.
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self._context.load_cert_chain(identity / "certificate.pem", identity / "key.pem")

    @classmethod
    def of(cls, address: str) -> Remote:
        """Returns the daemon at an address. Raises ValueError if this user has not added it."""
        parts = urllib.parse.urlsplit(address)
        host, port = parts.hostname or "", parts.port or PORT
        written = f"{SCHEME}[{host}]:{port}" if ":" in host else f"{SCHEME}{host}:{port}"
        config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        folder = pathlib.Path(config) / "sterna"
        try:
            remotes = json.loads((folder / "remotes.json").read_text())["remotes"]
        except FileNotFoundError:
            remotes = []
        for remote in remotes:
            if remote["address"] == written:
                return cls(host, port, remote["key"], folder / "identity")
        raise ValueError(f"{written} is no daemon that this user has added: sterna remote add {written}")

    def connection(self, timeout: float | None) -> http.client.HTTPConnection:
        """Returns a connection with the daemon, which the first request opens."""
        return _TlsConnection(self, timeout)

    def connect(self, timeout: float | None) -> ssl.SSLSocket:
        """Connects, and checks that the daemon has the key that was added. Raises OSError."""
        plain = socket.create_connection((self.host, self.port), timeout)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secure = self._context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise
        found = hashlib.sha256(public_key(secure.getpeercert(binary_form=True) or b"")).hexdigest()
        if found != self.key:
            secure.close()
            raise ConnectionError(f"who answers at {self.host}:{self.port} has the key {found}, and not {self.key}")
        return secure


class _TlsConnection(http.client.HTTPConnection):
    def __init__(self, remote: Remote, timeout: float | None) -> None:
        super().__init__(remote.host, remote.port, timeout=timeout)
        self._remote, self._wait = remote, timeout

    def connect(self) -> None:
        self.sock = self._remote.connect(self._wait)


def public_key(certificate: bytes) -> bytes:
    """Returns the SubjectPublicKeyInfo of a certificate in DER, or nothing if it is no certificate."""
    body = _content(_content(certificate, 0), 0)
    # Version, serial number, algorithm, issuer, validity and subject come before the key.
    at = 0
    for _ in range(6):
        at = _end(body, at)
    return body[at : _end(body, at)]


def _head(der: bytes, at: int) -> tuple[int, int]:
    """Returns the position and length of the content of the value at `at`."""
    if at + 2 > len(der):
        return len(der), 0
    length = der[at + 1]
    if length < 0x80:
        return at + 2, length
    more = length & 0x7F
    return at + 2 + more, int.from_bytes(der[at + 2 : at + 2 + more])


def _content(der: bytes, at: int) -> bytes:
    begin, length = _head(der, at)
    return der[begin : begin + length]


def _end(der: bytes, at: int) -> int:
    begin, length = _head(der, at)
    return min(begin + length, len(der))
