"""The process that inspects large JSON bodies: parsing them would block the server's interpreter.

It reads a length of eight bytes, big-endian, and the body from standard input, and writes a line with a JSON object.
It starts fast, since it imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from forerun.utils.json_file import parse_json

LENGTH = 8
"""Bytes that hold a body's length."""
MOST_FIELDS = 64
"""Maximum number of fields that are inspected."""
_NICE = 10
_NAME = 60
_SUBJECT = "The request's body"


def measure(value: object) -> dict[str, Any]:
    """Return for each field of an object the number of values, of entries of a list, the index of the longest entry,
    the number of characters of all texts, of the longest text, and of the longest list of numbers."""
    if not isinstance(value, dict):
        return {"is_object": False, "num_fields": 0, "fields": {}}
    held = {str(name)[:_NAME]: _counts(entry) for name, entry in list(value.items())[:MOST_FIELDS]}
    return {"is_object": True, "num_fields": len(value), "fields": held}


def _counts(value: object) -> Mapping[str, int]:
    values = characters = text = numbers = 0
    pending = [value]
    while pending:
        each = pending.pop()
        values += 1
        if isinstance(each, str):
            characters += len(each)
            text = max(text, len(each))
        elif isinstance(each, list):
            if set(map(type, each)) <= {int, float}:
                numbers, values = max(numbers, len(each)), values + len(each)
            else:
                pending += each
        elif isinstance(each, dict):
            characters += sum(map(len, each))
            pending += each.values()
    sizes = [len(each) if isinstance(each, (str, list)) else 0 for each in value] if isinstance(value, list) else [0]
    entries, longest = len(sizes), sizes.index(max(sizes, default=0)) if sizes else 0
    return {
        "values": values,
        "entries": entries,
        "longest": longest,
        "characters": characters,
        "text": text,
        "numbers": numbers,
    }


def inspect(content: bytes) -> dict[str, Any]:
    """Return the report about a body; {"error": ...} if it is not JSON."""
    try:
        return measure(parse_json(content, _SUBJECT, ValueError, remedy="Send JSON."))
    except ValueError as error:
        return {"error": str(error)}


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    while len(header := source.read(LENGTH)) == LENGTH:
        content = source.read(int.from_bytes(header, "big"))
        sink.write(json.dumps(inspect(content)).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    os.nice(_NICE)
    main(sys.stdin.buffer, sys.stdout.buffer)
