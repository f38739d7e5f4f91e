#!/usr/bin/env python3
"""Sends a daemon valid and invalid requests of the operations in its OpenAPI document, and checks the answers.

    fuzz.py [--rounds N] [--seed N]      STERNA_HOST names the daemon; its volumes may be made, changed and removed

For each operation: values of wrong types, missing and additional fields, numbers beyond their limits, odd names, methods that a path
does not have, bodies that are no JSON, too long, or sent with another type. The document must have each answer. An error must be
JSON of the documented form, with a listed code other than `internal` and the status that docs/api.md gives that code. The daemon
must keep running. A failure prints the seed and the request.
"""

import argparse
import json
import pathlib
import random
import re
import sys
import urllib.parse

FOLDER = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(FOLDER / "src"))

from sterna.connection import Connection, NoAnswer  # noqa: E402

METHODS = ("GET", "PUT", "POST", "PATCH", "DELETE")
# A body that is longer than the daemon accepts.
HUGE = 64 << 20
NAMES = ("v", "w", "a", "b", "m0", "m1", "x" * 300, "", "..", "a/b", "\u0000", "ä", "%", "-", "a b", "b:c", "m99999999999999999999")
TEXTS = NAMES + ("/", "/etc/passwd", "/dev/null", "/nowhere/image.raw", "nbd://127.0.0.1:1/x", "nbd+unix:///x?socket=/nowhere", "1", "null")
NUMBERS = (0, 1, -1, 511, 512, 4096, 1 << 20, 1 << 31, (1 << 53) + 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1.5, -0.0, 1e300)
# Sensible values by the names of fields, so that orders pass the first check.
SENSE = {
    "name": ("v", "w"),
    "store": ("a", "b", None),
    "to": ("a", "b"),
    "kind": ("create", "create", "add"),
    "size_bytes": (1 << 20, 2 << 20, 4 << 20),
    "bandwidth_bytes_per_second": (1 << 20, 1 << 30, None),
    "image": (None, "/nowhere"),
    "listen": (None,),
    "socket_mode": (None, "0660"),
    "socket_owner": (None,),
}
# A valid size must fit the disk of the test.
SIZES = (0, 512, 4096, 1 << 20, 1000, -4096, 1 << 62, (1 << 64) - 4096)


class Fault(Exception):
    """An answer that breaks the rules."""


class Fuzzer:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.connection = Connection(timeout=60)
        status, body = self.connection.exchange("GET", "/v1/openapi.json", None, None)
        self.document = json.loads(body)
        self.schemas = self.document["components"]["schemas"]
        self.codes = statuses_by_code()
        self.process = self.connection.ask("GET", "/health")["pid"]
        self.asked = 0
        self.statuses = {}

    def value(self, schema, depth=0):
        """Returns a value that mostly fits a schema."""
        if self.random.random() < 0.03:
            return self.anything(depth)
        if "$ref" in schema:
            return self.value(self.schemas[schema["$ref"].rsplit("/", 1)[1]], depth)
        if "oneOf" in schema:
            return self.value(self.random.choice(schema["oneOf"]), depth)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self.random.choice(kind)
        if "properties" in schema:
            return self.object(schema, depth)
        if kind == "array":
            return [self.value(schema["items"], depth + 1) for _ in range(self.random.randint(0, 3))]
        if kind == "object":
            more = schema["additionalProperties"]
            return {self.random.choice(TEXTS): self.value(more, depth + 1) for _ in range(self.random.randint(0, 3))}
        return {
            "string": lambda: self.random.choice(TEXTS),
            "integer": lambda: self.random.choice(NUMBERS + SIZES),
            "number": lambda: self.random.choice(NUMBERS),
            "boolean": lambda: self.random.random() < 0.5,
            "null": lambda: None,
        }[kind or "null"]()

    def object(self, schema, depth):
        required = set(schema.get("required", []))
        # Half of the orders have few optional fields, because many random ones seldom fit together.
        optional = self.random.choice((0.4, 0.08))
        made = {}
        for name, field in schema["properties"].items():
            keep = 0.97 if name in required or name in ("size_bytes", "store", "kind") else optional
            if self.random.random() < keep:
                makes_sense = name in SENSE and self.random.random() < 0.75
                made[name] = self.random.choice(SENSE[name]) if makes_sense else self.value(field, depth + 1)
        if self.random.random() < 0.1:
            made[self.random.choice(("more", "", "__proto__", "force"))] = self.anything(depth + 1)
        return made

    def anything(self, depth):
        if depth > 3:
            return None
        return self.random.choice(
            (None, True, self.random.choice(NUMBERS), self.random.choice(TEXTS), [], {}, [[]], {"kind": "add"}, "y" * 5000)
        )

    def path(self, template, operation):
        named = self.random.choice(NAMES if self.random.random() < 0.4 else ("v", "w", "a", "b", "m0", "m1", "m2"))
        path = re.sub(r"\{[^}]+\}", lambda _: urllib.parse.quote(named, safe=self.random.choice(("", "%"))), template)
        query = {}
        for parameter in operation.get("parameters", []):
            if parameter["in"] == "query" and self.random.random() < 0.5:
                value = self.value(parameter["schema"], 4)
                query[parameter["name"]] = json.dumps(value) if not isinstance(value, str) else value
        if "wait_ms" in query:
            query["wait_ms"] = self.random.choice(("0", "1", "-1", "x"))
        if self.random.random() < 0.05:
            query["more"] = "1"
        return path + ("?" + urllib.parse.urlencode(query) if query else "")

    def one(self, template, verb, operation):
        """Sends one request of an operation."""
        path, body, headers = self.path(template, operation), None, {}
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            body = json.dumps(self.value(schema)).encode()
            headers["Content-Type"] = "application/json"
            draw = self.random.random()
            if draw < 0.05:
                body = body[: len(body) // 2]
            elif draw < 0.08:
                body = b"\xff\xfe{}"
            elif draw < 0.10:
                body = b"[" * 20_000
            elif draw < 0.12:
                body = None
            elif draw < 0.15:
                headers["Content-Type"] = "text/plain"
        self.ask(verb.upper(), path, body, headers, operation)

    def wrong_methods(self, template, verbs):
        path = re.sub(r"\{[^}]+\}", "v", template)
        for method in METHODS:
            if method.lower() in verbs:
                continue
            status, answer = self.ask(method, path, None, {}, None)
            if status != 405 or answer["error"]["code"] != "method_not_allowed":
                raise Fault(f"{method} {path}: {status} where 405 is due")

    def too_much(self, template, verb, operation):
        path = re.sub(r"\{[^}]+\}", "v", template)
        body = b'{"name": "' + b"x" * HUGE + b'"}'
        try:
            status, _ = self.ask(verb.upper(), path, body, {"Content-Type": "application/json"}, operation)
        except NoAnswer:
            # The daemon has closed the connection during the sending. It must answer the next request.
            self.connection.ask("GET", "/health")
            return
        # 403: the user may not use this operation, and the daemon says so before it reads the body.
        if status not in (403, 413):
            raise Fault(f"{verb} {path}: {status} for {HUGE} bytes")

    def ask(self, method, path, body, headers, operation):
        try:
            status, content_type, content = self.connection.exchange_bytes(method, path, body, headers)
        except NoAnswer as error:
            if body is not None and len(body) >= HUGE:
                raise
            raise Fault(f"{method} {path} {shown(body)}: {error}") from error
        self.asked += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1
        asked = f"{method} {path} {shown(body)}: {status} {content[:300]!r}"
        documented = (operation or {}).get("responses", {})
        if str(status) in documented and status < 400:
            if "application/json" in documented[str(status)]["content"]:
                json.loads(content)
            return status, None
        if str(status) in documented:
            return status, json.loads(content)
        if status < 400:
            raise Fault(f"{asked}: a status that the document does not have")
        if not content_type.startswith("application/json"):
            raise Fault(f"{asked}: an error that is no JSON")
        answer = json.loads(content)
        if set(answer) != {"error"} or set(answer["error"]) != {"code", "message"} or not answer["error"]["message"]:
            raise Fault(f"{asked}: an error of another form")
        code = answer["error"]["code"]
        if code == "internal" or self.codes.get(code) != status:
            raise Fault(f"{asked}: docs/api.md gives {code} the status {self.codes.get(code)}")
        return status, answer

    def run(self, rounds):
        operations = [
            (path, verb, operation)
            for path, verbs in self.document["paths"].items()
            for verb, operation in verbs.items()
        ]
        for path, verbs in self.document["paths"].items():
            self.wrong_methods(path, verbs)
        for path, verb, operation in operations:
            if "requestBody" in operation:
                self.too_much(path, verb, operation)
        for _ in range(rounds):
            self.random.shuffle(operations)
            for path, verb, operation in operations:
                self.one(path, verb, operation)
            if self.connection.ask("GET", "/health")["pid"] != self.process:
                raise Fault("the daemon is another process")


def shown(body):
    return "" if body is None else body[:500].decode(errors="replace")


def statuses_by_code():
    """Returns the status of each error code, from the table of docs/api.md."""
    table = (FOLDER.parent.parent / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", table, re.MULTILINE)
    return {code: int(status) for status, codes in rows for code in re.findall(r"`([a-z_]+)`", codes)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="requests of each operation")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    fuzzer = Fuzzer(arguments.seed)
    try:
        fuzzer.run(arguments.rounds)
    except (Fault, NoAnswer) as fault:
        sys.exit(f"seed {arguments.seed}, after {fuzzer.asked} requests: {fault}")
    counted = ", ".join(f"{status}: {count}" for status, count in sorted(fuzzer.statuses.items()))
    print(f"{fuzzer.asked} requests; {counted}")


if __name__ == "__main__":
    main()
