#!/usr/bin/env python3
"""Makes the client's types and methods from the OpenAPI document of the daemon.

    generate.py             writes src/sterna/types.py and src/sterna/operations.py
    generate.py --check     checks that both files are up to date; exits with 1 if not

Requests are sent by connection.py, which is written by hand.
"""

import argparse
import json
import keyword
import pathlib
import re
import sys
import textwrap

FOLDER = pathlib.Path(__file__).resolve().parent
DOCUMENT = FOLDER.parent.parent / "docs" / "openapi.json"
WIDTH = 120
PRIMITIVES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
MADE = '"""{what}\n\nMade by generate.py from docs/openapi.json: do not change it by hand.\n"""\n'


class Unknown(Exception):
    """The document has an element that this program does not know."""


def reference(schema):
    return schema["$ref"].rsplit("/", 1)[1]


def type_of(schema):
    """Returns the Python type of a schema within another one."""
    if "$ref" in schema:
        return reference(schema)
    if "oneOf" in schema:
        return " | ".join(type_of(part) for part in schema["oneOf"])
    if "enum" in schema:
        return f"Literal[{', '.join(json.dumps(value) for value in schema['enum'])}]"
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(type_of({**schema, "type": one}) for one in kind)
    if kind == "array":
        return f"list[{type_of(schema['items'])}]"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"dict[str, {type_of(schema['additionalProperties'])}]"
    if kind in PRIMITIVES:
        return PRIMITIVES[kind]
    raise Unknown(f"a schema {schema}")


def comment(text, indent=""):
    lines = textwrap.wrap(" ".join(text.split()), WIDTH - len(indent) - 2)
    return "".join(f"{indent}# {line}\n" for line in lines)


def docstring(text, indent):
    text = " ".join(text.split()).replace("\\", "\\\\")
    lines = textwrap.wrap(text, WIDTH - len(indent) - 6)
    if len(lines) == 1:
        return f'{indent}"""{lines[0]}"""\n'
    return f'{indent}"""' + f"\n{indent}".join(lines) + f'\n{indent}"""\n'


def typed_dict(name, schema):
    required = set(schema.get("required", []))
    body = docstring(schema.get("description", name), "    ") + "\n"
    fields = schema.get("properties", {})
    for field, kind in fields.items():
        if keyword.iskeyword(field):
            raise Unknown(f"a field {field} of {name}")
        of = type_of(kind)
        body += comment(kind.get("description", ""), "    ")
        body += f"    {field}: {of if field in required else f'NotRequired[{of}]'}\n"
    return f"class {name}(TypedDict):\n{body}\n\n"


def types(document):
    out = MADE.format(what="What the API takes and answers. Fields that may be left out are NotRequired.")
    out += "\nfrom __future__ import annotations\n\nfrom typing import Literal, NotRequired, TypedDict\n\n\n"
    unions = ""
    for name, schema in sorted(document["components"]["schemas"].items()):
        if "enum" in schema:
            values = ",\n".join(f"    {json.dumps(value)}" for value in schema["enum"])
            out += comment(schema.get("description", ""))
            out += f"{name} = Literal[\n{values},\n]\n\n\n"
        elif "oneOf" in schema:
            parts = []
            for part in schema["oneOf"]:
                [kind] = part["properties"]["kind"]["enum"]
                part_name = name + kind.title().replace("-", "")
                out += typed_dict(part_name, part)
                parts.append(part_name)
            unions += comment(schema.get("description", "")) + f"{name} = {' | '.join(parts)}\n"
        elif "properties" in schema:
            out += typed_dict(name, schema)
        else:
            raise Unknown(f"the schema {name}")
    return out + unions


def name_of(parameter):
    """Returns the Python name of a parameter: keywords of Python, for example `from`, get an underscore."""
    return parameter + "_" if keyword.iskeyword(parameter) else parameter


def method(path, verb, operation):
    parameters = operation.get("parameters", [])
    in_path = [one for one in parameters if one["in"] == "path"]
    in_query = [one for one in parameters if one["in"] == "query"]
    arguments = ["self"] + [f"{name_of(one['name'])}: {type_of(one['schema'])}" for one in in_path]
    call = [json.dumps(verb.upper())]
    template = path
    for one in in_path:
        template = template.replace("{" + one["name"] + "}", "{segment(" + name_of(one["name"]) + ")}")
    call.append(("f" if in_path else "") + json.dumps(template))
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        arguments.append(f"order: {reference(body)}")
        call.append("order=order")
    if in_query:
        arguments.append("*")
        names = []
        for one in in_query:
            of = type_of(one["schema"])
            if one.get("required"):
                raise Unknown(f"a required parameter {one['name']} of {path}")
            arguments.append(f"{name_of(one['name'])}: {of if 'None' in of else of + ' | None'} = None")
            names.append(f"{json.dumps(one['name'])}: {name_of(one['name'])}")
        call.append("query={" + ", ".join(names) + "}")
    statuses = [status for status in operation["responses"] if status != "default"]
    [content] = operation["responses"][statuses[0]]["content"].items()
    answer = type_of(content[1]["schema"])
    how = "self.ask_text" if content[0] == "text/plain" else "self.ask"
    if len(statuses) > 1:
        call.append(f"statuses=({', '.join(statuses)})")
    doc = operation["summary"]
    described = "; ".join(f"{name_of(one['name'])}: {one['description']}" for one in in_query if one.get("description"))
    if described:
        doc += f" {described}"
    signature = f"    def {operation['operationId']}({', '.join(arguments)}) -> {answer}:\n"
    if len(signature) > WIDTH:
        signature = f"    def {operation['operationId']}(\n        " + ",\n        ".join(arguments)
        signature += f",\n    ) -> {answer}:\n"
    return signature + docstring(doc, "        ") + f"        return {how}({', '.join(call)})\n\n"


def operations(document):
    used = set()
    body = ""
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            made = method(path, verb, operation)
            used |= set(re.findall(r"(?::|->|list\[) ?(?:list\[)?([A-Z][A-Za-z]+)", made))
            body += made
    names = sorted(used & set(document["components"]["schemas"]))
    out = MADE.format(what="The operations of the API, one method each.")
    out += "\nfrom __future__ import annotations\n\nfrom .connection import Connection, segment\n"
    out += "from .types import (\n" + "".join(f"    {name},\n" for name in names) + ")\n\n\n"
    out += 'class Operations(Connection):\n    """All operations of the daemon."""\n\n'
    return out + body.rstrip("\n") + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    document = json.loads(DOCUMENT.read_text())
    late = []
    for name, text in (("types.py", types(document)), ("operations.py", operations(document))):
        file = FOLDER / "src" / "sterna" / name
        if not arguments.check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            late.append(name)
    if late:
        sys.exit(f"{', '.join(late)}: not what docs/openapi.json says; run contrib/python/generate.py")


if __name__ == "__main__":
    main()
