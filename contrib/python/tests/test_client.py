"""Tests the client with a real daemon, which STERNA_HOST names and which has the stores a and b.

Run by dev/e2e/tests/clients/python.rs: python3 -m unittest discover --start-directory contrib/python/tests
"""

import inspect
import json
import os
import pathlib
import socket
import sys
import tempfile
import threading
import typing
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(FOLDER / "src"))

import sterna  # noqa: E402
import sterna.types  # noqa: E402

MIB = 1 << 20


class EveryOperation(unittest.TestCase):
    """The client has all operations of the document, and the daemon serves the same document."""

    def test_each_operation_of_the_daemon_has_a_method_with_its_parameters(self):
        document = sterna.Client().ask("GET", "/v1/openapi.json")
        for path, verbs in document["paths"].items():
            for verb, operation in verbs.items():
                method = getattr(sterna.Client, operation["operationId"], None)
                self.assertIsNotNone(method, f"{verb} {path}")
                # A word of Python's has an underscore at its end.
                known = {name.rstrip("_") for name in inspect.signature(method).parameters} - {"self"}
                wanted = {parameter["name"] for parameter in operation.get("parameters", [])}
                wanted |= {"order"} if "requestBody" in operation else set()
                self.assertEqual(known, wanted, f"{verb} {path}")

    def test_each_schema_has_a_type_with_its_fields(self):
        document = json.loads((FOLDER.parent.parent / "docs" / "openapi.json").read_text())
        for name, schema in document["components"]["schemas"].items():
            known = getattr(sterna.types, name)
            if "properties" in schema:
                fields = typing.get_type_hints(known, include_extras=True)
                self.assertEqual(set(fields), set(schema["properties"]), name)
                self.assertEqual(known.__required_keys__ & set(schema.get("required", [])), set(schema.get("required", [])))


class RealDaemon(unittest.TestCase):
    def setUp(self):
        self.client = sterna.Client(timeout=60)

    def make(self, name):
        source = {"kind": "create", "size_bytes": 8 * MIB, "store": "a"}
        volume = self.client.create_volume({"name": name, "source": source})
        self.addCleanup(self.remove, name)
        return volume

    def remove(self, name):
        try:
            self.client.remove_volume(name, force=True)
        except sterna.ApiError as error:
            self.assertEqual(error.code, "volume_not_found")

    def test_a_volume_is_made_moved_grown_and_removed(self):
        self.assertEqual(self.make("v")["state"], "serving")
        plan = self.client.plan_migration("v", {"to": "b"})
        self.assertTrue(plan["can_begin"], plan)
        moved = self.client.migrate_and_wait("v", {"to": "b"}, timeout=60)
        self.assertEqual(moved["state"], "moved")
        volume = self.client.show_volume("v")
        self.assertEqual((volume["store"], volume["generation"]), ("b", 1))
        self.assertEqual(self.client.resize_volume("v", {"size_bytes": 16 * MIB})["size_bytes"], 16 * MIB)
        recorded = self.client.show_history(moved["id"])
        self.assertEqual(recorded["migration"]["id"], moved["id"])
        self.assertIn(moved["id"], [known["id"] for known in self.client.list_migrations()])
        removed = self.client.remove_volume("v", keep_image=False)
        self.assertEqual(removed["image_fate"], "deleted")
        self.assertNotIn("v", [known["name"] for known in self.client.list_volumes()])

    def test_a_migration_is_slowed_down_waited_for_and_cancelled(self):
        with tempfile.NamedTemporaryFile() as image:
            image.write(os.urandom(8 * MIB))
            image.flush()
            os.chmod(image.name, 0o644)
            source = {"kind": "create", "store": "a", "image": image.name}
            self.client.create_volume({"name": "slow", "source": source})
        self.addCleanup(self.remove, "slow")
        begun = self.client.migrate("slow", {"to": "b", "bandwidth_bytes_per_second": MIB})
        with self.assertRaises(TimeoutError):
            self.client.wait_for_migration(begun["id"], timeout=0.2)
        changed = self.client.change_migration(begun["id"], {"bandwidth_bytes_per_second": 2 * MIB})
        self.assertEqual(changed["id"], begun["id"])
        self.client.cancel_migration(begun["id"])
        ended = self.client.wait_for_migration(begun["id"], timeout=60)
        self.assertEqual(ended["state"], "cancelled")
        with self.assertRaises(sterna.ApiError) as refused:
            self.client.cancel_migration(begun["id"])
        self.assertEqual((refused.exception.status, refused.exception.code), (409, "not_migrating"))

    def test_what_is_refused_says_so(self):
        with self.assertRaises(sterna.ApiError) as refused:
            self.client.show_volume("a name/with a slash?")
        error = refused.exception
        self.assertEqual((error.status, error.code), (404, "volume_not_found"))
        self.assertIn("a name/with a slash?", error.message)

    def test_what_is_no_json_and_what_is_said_with_another_status_is_an_answer(self):
        self.assertIn("# TYPE", self.client.show_metrics())
        self.assertIn("ready", self.client.show_readiness())
        self.assertEqual(self.client.show_health()["pid"], self.client.show_host()["pid"])


class NoDaemon(unittest.TestCase):
    def test_nobody_and_nonsense_are_no_answers(self):
        with self.assertRaises(sterna.NoAnswer):
            sterna.Client("/nowhere.sock").show_host()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "socket")
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()

            def babble():
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nno!")

            thread = threading.Thread(target=babble)
            thread.start()
            with self.assertRaises(sterna.NoAnswer):
                sterna.Client(path, timeout=10).show_host()
            thread.join()
            listener.close()


if __name__ == "__main__":
    unittest.main()
