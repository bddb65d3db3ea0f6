"""Whatever a JSON file holds, its reader gives values or the caller's error with file and key."""

import json
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from forerun.errors import ConfigError, ModelLoadError
from forerun.utils.json_file import Fields, parse_json, read_json

SOUND = json.dumps({"layers": 4, "epsilon": 1e-6, "name": "ö", "rope": {"theta": 1e4}, "sizes": [1, 2], "on": True})


def file_with(folder: Path, content: bytes | str) -> Path:
    path = folder / "config.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_values(tmp_path: Path) -> None:
    fields = Fields.read(file_with(tmp_path, SOUND), ModelLoadError)
    assert fields.integer("layers", low=1) == 4
    assert fields.number("layers") == 4.0 and isinstance(fields.number("layers"), float)
    assert fields.number("epsilon", low=0, high=1) == 1e-6
    assert fields.string("name") == "ö"
    assert fields.flag("on") is True
    assert fields.list_of("sizes", int) == [1, 2]
    assert fields.fields("rope").number("theta") == 1e4
    assert "layers" in fields and "missing" not in fields


def test_whole_floats_are_integers_and_booleans_are_no_numbers() -> None:
    fields = Fields("f", {"a": 4096.0, "b": True, "c": 0.5}, ModelLoadError)
    assert fields.integer("a") == 4096 and isinstance(fields.integer("a"), int)
    for call in (lambda: fields.integer("b"), lambda: fields.number("b"), lambda: fields.integer("c")):
        with pytest.raises(ModelLoadError):
            call()


def test_null_and_a_missing_key_are_the_default() -> None:
    fields = Fields("f", {"a": None}, ModelLoadError)
    assert fields.integer("a", 3) == 3 and fields.string("b", None) is None and fields.fields("a", None) is None
    with pytest.raises(ModelLoadError, match=r"^f: a is None, but must be a whole number\. "):
        fields.integer("a")
    with pytest.raises(ModelLoadError, match=r"^f: b is missing; it must be a string\. "):
        fields.string("b")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe{}",
        b'{"a": "\xe9"}',
        "[" * 10_000 + "]" * 10_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        "9" * 5_000,
        '{"a": 1} x',
    ],
    ids=["empty", "truncated", "utf-16", "latin-1", "nested lists", "nested objects", "digits", "more after it"],
)
def test_what_is_no_json_is_named(tmp_path: Path, content: bytes | str) -> None:
    path = file_with(tmp_path, content)
    with pytest.raises(ModelLoadError) as raised:
        read_json(path, ModelLoadError, remedy="Do this.")
    assert str(raised.value).startswith(f"{path}: it ") and str(raised.value).endswith(". Do this.")


def test_an_error_shows_nothing_of_the_content() -> None:
    with pytest.raises(ModelLoadError) as raised:
        parse_json('{"prompt": "confidential', "file:3", ModelLoadError)
    assert "confidential" not in str(raised.value)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    closed = file_with(tmp_path, "{}")
    closed.chmod(0)
    unreadable = [] if os.access(closed, os.R_OK) else [closed]  # root reads everything
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", tmp_path / "nul\0", Path("/dev/zero"), *unreadable):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            read_json(path, ModelLoadError)


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path, "1" * 101)
    assert read_json(path, ModelLoadError, max_bytes=101)
    with pytest.raises(ModelLoadError, match="larger than 100 bytes"):
        read_json(path, ModelLoadError, max_bytes=100)


@pytest.mark.parametrize("value", [None, 1, 1.5, "x", [], True, [[[[[1]]]]]])
def test_what_is_no_object_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: it holds .*, but must hold an object"):
        Fields.read(file_with(tmp_path, json.dumps(value)), ModelLoadError)


GETTERS = {
    "integer": lambda fields: fields.integer("a", low=0, high=1e6),
    "number": lambda fields: fields.number("a", low=0, high=1e6),
    "string": lambda fields: fields.string("a"),
    "choice": lambda fields: fields.string("a", choices=("x", "y")),
    "flag": lambda fields: fields.flag("a"),
    "integers": lambda fields: fields.list_of("a", int),
    "strings": lambda fields: fields.list_of("a", str),
    "object": lambda fields: fields.fields("a"),
}
WRONG = {
    "integer": [
        "-1",
        "1000001",
        "1.5",
        '"1"',
        "true",
        "[1]",
        "{}",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "9" * 4000,
    ],
    "number": ["-1", "1e7", '"1"', "false", "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "9" * 4000],
    "string": ["1", "1.5", "true", '["x"]', "{}", r'"\ud800"'],
    "choice": ['"z"', "1", '["x"]', "{}"],
    "flag": ["0", "1", '"true"', "[]"],
    "integers": ["1", '"12"', "[1.5]", "[true]", "[null]", "[[1]]", "[NaN]", "[Infinity]"],
    "strings": ['"xy"', "[1]", "[null]", r'["\ud800"]', "{}"],
    "object": ["1", "[]", '"x"', "true"],
}


@pytest.mark.parametrize(("method", "value"), [(method, value) for method, values in WRONG.items() for value in values])
def test_values_of_other_types_are_named(tmp_path: Path, method: str, value: str) -> None:
    path = file_with(tmp_path, f'{{"a": {value}}}')
    fields = Fields.read(path, ModelLoadError)
    with pytest.raises(ModelLoadError) as raised:
        GETTERS[method](fields)
    text = str(raised.value)
    assert text.startswith(f"{path}: a is ") and ", but must be " in text and len(text) < 400 + len(str(path))


def test_an_object_within_has_its_place() -> None:
    inner = Fields("config.json", {"rope": {"theta": "x"}}, ModelLoadError).fields("rope")
    with pytest.raises(ModelLoadError, match=r"^config\.json: rope: theta is 'x', but must be a number\."):
        inner.number("theta")


def test_private_texts_are_not_shown() -> None:
    fields = Fields(
        "f", {"a": "secret", "b": ["secret"], "c": {"d": {"e": "secret"}}, "n": 3}, ConfigError, private=True
    )
    for call in (
        lambda: fields.integer("a"),
        lambda: fields.string("b"),
        lambda: fields.string("c"),
        lambda: fields.fields("c").fields("d").integer("e"),
    ):
        with pytest.raises(ConfigError, match=r"is (a string|a list|an object), but must be") as raised:
            call()
        assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="n is 3, but"):
        fields.string("n")


def test_any_damage_gives_values_or_the_error(tmp_path: Path) -> None:
    draw = random.Random(1)
    for _ in range(2000):
        content = bytearray(SOUND.encode())
        if draw.random() < 0.3:
            del content[draw.randrange(len(content)) :]
        for _ in range(draw.randrange(1, 4)):
            if content:
                content[draw.randrange(len(content))] = draw.randrange(256)
        try:
            fields = Fields.parse(bytes(content), "f", ModelLoadError)
            fields.integer("layers", 1, low=1)
            fields.number("epsilon", 1.0)
            fields.string("name", "")
            fields.list_of("sizes", int, [])
            fields.flag("on", False)
            rope = fields.fields("rope", None)
            if rope is not None:
                rope.number("theta", 1.0)
        except ModelLoadError as raised:
            assert str(raised).startswith("f: ")  # noqa: PT017 (either way is right)


def test_reading_takes_the_memory_of_what_is_there(tmp_path: Path) -> None:
    path = file_with(tmp_path, SOUND)
    tracemalloc.start()
    try:
        assert read_json(path, ConfigError) == json.loads(SOUND)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    path.write_bytes(b" " * (3 << 20) + b"1")
    assert read_json(path, ConfigError) == 1
    with pytest.raises(ConfigError, match="larger than 3,000,000 bytes"):
        read_json(path, ConfigError, max_bytes=3_000_000)
