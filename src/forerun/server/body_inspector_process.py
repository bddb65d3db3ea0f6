"""What large JSON bodies hold, told by a process of its own: reading them keeps the interpreter from everything else.

A length of eight bytes, big-endian, and the body come on standard input; an object goes out on a line. It begins at
once, since it imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from forerun.utils.json_file import parse_json

LENGTH = 8
"""Bytes of a body's length."""
MOST_FIELDS = 64
"""Of which it is told what they hold."""
_NICE = 10
_NAME = 60
_PLACE = "The request's body"


def weigh(value: object) -> dict[str, Any]:
    """The object's fields by name: how many values they hold, how many entries a list has, and how many characters
    all texts together, the longest text, and the longest list of numbers."""
    if not isinstance(value, dict):
        return {"is_object": False, "num_fields": 0, "fields": {}}
    held = {str(name)[:_NAME]: _weight(entry) for name, entry in list(value.items())[:MOST_FIELDS]}
    return {"is_object": True, "num_fields": len(value), "fields": held}


def _weight(value: object) -> Mapping[str, int]:
    values = characters = text = numbers = 0
    waiting = [value]
    while waiting:
        each = waiting.pop()
        values += 1
        if isinstance(each, str):
            characters += len(each)
            text = max(text, len(each))
        elif isinstance(each, list):
            if set(map(type, each)) <= {int, float}:
                numbers, values = max(numbers, len(each)), values + len(each)
            else:
                waiting += each
        elif isinstance(each, dict):
            characters += sum(map(len, each))
            waiting += each.values()
    entries = len(value) if isinstance(value, list) else 1
    return {"values": values, "entries": entries, "characters": characters, "text": text, "numbers": numbers}


def answer(content: bytes) -> dict[str, Any]:
    """What is told of a body."""
    try:
        return weigh(parse_json(content, _PLACE, ValueError, remedy="Send JSON."))
    except ValueError as error:
        return {"error": str(error)}


def main(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the input ends."""
    while len(header := source.read(LENGTH)) == LENGTH:
        content = source.read(int.from_bytes(header, "big"))
        sink.write(json.dumps(answer(content)).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    os.nice(_NICE)
    main(sys.stdin.buffer, sys.stdout.buffer)
