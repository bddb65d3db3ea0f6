"""GGUF headers: valid ones are read, and damaged ones are refused by name."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.gguf.file import GgufFile
from gguf_files import MAGIC, add_key, entry, info, raw, text

ONE = info("a", [8], 0, 0)
DATA = b"\0" * 32
U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Build a file with all types of values, and a tensor of each relevant shape."""
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    values: dict[str, Any] = {
        "a.text": "Grüße 你好",
        "a.empty": "",
        "a.flag": True,
        "a.tokens": ["a", "bc", "é"],
        "a.scores": [0.5, -1.0],
        "a.types": [1, 2, 3],
    }
    for key, value in values.items():
        add_key(writer, key, value)
    writer.add_int8("n.i8", -3)
    writer.add_uint8("n.u8", 200)
    writer.add_int16("n.i16", -300)
    writer.add_uint16("n.u16", 60000)
    writer.add_int32("n.i32", -70000)
    writer.add_int64("n.i64", -(2**40))
    writer.add_uint64("n.u64", 2**63)
    writer.add_float32("n.f32", 0.25)
    writer.add_float64("n.f64", 0.1)
    random = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", random.random((3, 8), np.float32))
    writer.add_tensor("norm.weight", random.random(5, np.float32))
    packed = gguf.quants.quantize(random.random((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf"


def content_of(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of a file in comparable form."""
    tensors = {name: (t.shape, t.type_name, t.blocks.tobytes()) for name, t in file.tensors.items()}
    return dict(file.metadata), tensors


def open_bytes(content: bytes, folder: Path) -> GgufFile:
    (folder / "made.gguf").write_bytes(content)
    return GgufFile.open(folder / "made.gguf")


def read_or_refusal(content: bytes, folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | str:
    """Return the contents of a file, or the reason why it is refused."""
    try:
        return content_of(open_bytes(content, folder))
    except ModelLoadError as error:
        return str(error)


def test_what_is_read_is_what_the_gguf_package_reads(small: Path) -> None:
    file, reader = GgufFile.open(small), gguf.GGUFReader(small)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(file.metadata) == theirs
    assert file.metadata["n.u64"] == 2**63 and file.metadata["a.flag"] is True
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type_name == tensor.tensor_type.name
        assert ours.blocks.tobytes() == tensor.data.tobytes()
        assert ours.blocks.shape[:-1] == ours.shape[:-1]


def test_blocks_are_the_files_own_and_cannot_be_written(small: Path) -> None:
    tensor = GgufFile.open(small).tensors["output.weight"]
    assert not tensor.blocks.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tensor.blocks[0, 0] = 1


def test_every_prefix_is_refused_or_read_the_same(small: Path, tmp_path: Path) -> None:
    content, whole = small.read_bytes(), content_of(GgufFile.open(small))
    found = [read_or_refusal(content[:length], tmp_path) for length in range(len(content))]
    assert all("made.gguf: " in each for each in found if isinstance(each, str))
    read = [each for each in found if not isinstance(each, str)]
    assert all(each == whole for each in read)
    assert len(read) < 32  # only the padding after the last tensor may be missing


def test_of_single_flipped_bits_in_the_header_nothing_crashes(small: Path, tmp_path: Path) -> None:
    """Flip single bits: GGUF has no checksum, so a flipped bit may change one value unnoticed, but nothing else."""
    content, (keys, tensors) = small.read_bytes(), content_of(GgufFile.open(small))
    end = len(content) - sum(-(-len(data) // 32) * 32 for _, _, data in tensors.values())
    random = np.random.default_rng(1)
    refused = 0
    for place in random.choice(end, 200, replace=False):
        changed = bytearray(content)
        changed[place] ^= 1 << random.integers(8)
        found = read_or_refusal(bytes(changed), tmp_path)
        if isinstance(found, str):
            assert "made.gguf: " in found
            refused += 1
            continue
        new_keys, new_tensors = found
        assert len(new_keys.items()) == len(keys) and len(new_tensors) == len(tensors)
        same_keys = [key for key in keys if key in new_keys and repr(new_keys[key]) == repr(keys[key])]
        same_tensors = [name for name in tensors if new_tensors.get(name) == tensors[name]]
        assert len(same_keys) + len(same_tensors) >= len(keys) + len(tensors) - 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it cannot be read: .*empty"),
        (b"GGU", "its header is cut off in its first four bytes"),
        (b"PK\3\4" + DATA, r"it is no GGUF file: it begins with b'PK"),
        (b"version https://git-lfs", "pointer of Git LFS"),
        (b"tjgg" + DATA, "GGJT"),
        (b"FUGG" + DATA, "big-endian"),
        (MAGIC + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (raw(version=1), "its version of GGUF is 1; forerun reads 2 and 3"),
        (raw(version=4), "version of GGUF is 4"),
        (raw(num_keys=2**63), "it says that it has 9,223,372,036,854,775,808 keys"),
        (raw(num_tensors=2**40), "it says that it has 1,099,511,627,776 tensors"),
        (raw(num_keys=60_000), "its header is cut off in a key's name"),
        (raw([struct.pack("<Q", 2**62) + b"abc"]), "its header is cut off in a key's name"),
        (raw([entry("", U8, b"\1")]), "a key has no name"),
        (raw([entry(b"\xff", U8, b"\1")]), "a key's name is not UTF-8"),
        (raw([entry("k", STRING, struct.pack("<Q", 2**31))]), "cut off in the key 'k'"),
        (raw([entry("k", STRING, struct.pack("<Q", 9))]), "cut off in the key 'k'"),
        (raw([entry("k", STRING, text(b"\xc3("))]), "the key 'k' is not UTF-8"),
        (raw([entry("k", 13, DATA)]), "the key 'k' holds a value of type 13, which GGUF has not"),
        (raw([entry("k", BOOL, b"\2")]), "the key 'k' is neither true nor false"),
        (raw([entry("k", U8, b"\1")] * 2), "it has the key 'k' twice"),
        (
            raw([entry("k", ARRAY, array(U8, 2**62))]),
            "it says that it has 4,611,686,018,427,387,904 elements with the key 'k'",
        ),
        (raw([entry("k", ARRAY, array(U64, 2**20))]), "cut off in the key 'k'"),
        (raw([entry("k", ARRAY, array(STRING, 2**20))]), "cut off in the key 'k'"),
        (raw([entry("k", ARRAY, array(ARRAY, 1, array(U8, 1, b"\1")))]), "the key 'k' holds an array of arrays"),
        (raw([entry("k", ARRAY, array(99, 0))]), "value of type 99"),
        (raw([entry("general.alignment", U32, u32(0))], [ONE], DATA), "general.alignment is 0, but must be a power"),
        (raw([entry("general.alignment", U32, u32(48))], [ONE], DATA), "general.alignment is 48"),
        (raw([entry("general.alignment", STRING, text("32"))], [ONE], DATA), "general.alignment is '32'"),
        (raw([entry("general.alignment", U32, u32(2**31))], [ONE], DATA), "it is cut off"),
        (raw([], [info("", [8], 0, 0)], DATA), "a tensor has no name"),
        (raw([], [ONE, info("a", [8], 0, 32)], DATA * 2), "it has the tensor 'a' twice"),
        (raw([], [info("a", [], 0, 0)], DATA), "tensor 'a' has 0 dimensions"),
        (raw([], [info("a", [1] * 5, 0, 0)], DATA), "tensor 'a' has 5 dimensions"),
        (raw([], [text("a") + u32(2**32 - 1)], DATA), "tensor 'a' has 4,294,967,295 dimensions"),
        (raw([], [info("a", [8, 0], 0, 0)], DATA), r"tensor 'a' has the shape \[0, 8\], which holds nothing"),
        (raw([], [info("a", [2**63, 2**63], 0, 0)], DATA), "it is cut off: tensor 'a' ends"),
        (raw([], [info("a", [9], 0, 0)], DATA), "it is cut off: tensor 'a' ends 4 bytes behind the file's end"),
        (raw([], [info("a", [8], 0, 2**63)], DATA), "tensor 'a' lies at 9,223,372,036,854,775,808 instead of 0"),
        (raw([], [info("a", [8], 0, 4)], DATA * 2), "tensor 'a' lies at 4 instead of 0"),
        (raw([], [ONE, info("b", [8], 0, 0)], DATA), "tensor 'b' lies at 0 instead of 32"),
        (raw([], [ONE, info("b", [8], 0, 64)], DATA * 3), "tensor 'b' lies at 64 instead of 32"),
        (raw([], [ONE], DATA + b"\0"), "it holds 1 bytes after its last tensor"),
        (raw([], [info("a", [8], 4711, 0)], DATA), "tensor 'a' is of type 4711, which is none"),
        (raw([], [info("a", [8], 8, 0)], DATA), "tensor 'a' has rows of 8 numbers, and Q8_0 packs 32 together"),
    ],
)
def test_a_header_that_cannot_be(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=said) as caught:
        open_bytes(content, tmp_path)
    assert "made.gguf: " in str(caught.value) and str(caught.value).endswith("Download or convert it anew.")
    assert not isinstance(caught.value, UnsupportedModelError)


@pytest.mark.parametrize(("number", "name"), [(9, "Q8_1"), (15, "Q8_K"), (24, "I8"), (28, "F64")])
def test_a_type_that_is_not_read_is_named(number: int, name: str, tmp_path: Path) -> None:
    content = raw([], [info("blk.0.attn_q.weight", [256], number, 0)], DATA * 64)
    with pytest.raises(UnsupportedModelError, match=rf"'blk\.0\.attn_q\.weight' is stored as {name}, .* are F32, F16"):
        open_bytes(content, tmp_path)


def test_names_in_messages_are_escaped_and_short(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        open_bytes(raw([entry("\x1b[31m" + "k" * 1000, 13, DATA)]), tmp_path)
    assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_header_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.models.loading.gguf.file.MAX_BYTES", 64)
    with pytest.raises(ModelLoadError, match="its header is longer than 64 bytes"):
        open_bytes(raw([entry("k", STRING, text("v" * 40))], [ONE], DATA), tmp_path)


def test_a_file_without_tensors_is_read(tmp_path: Path) -> None:
    file = open_bytes(raw([entry("k", U32, u32(7))]), tmp_path)
    assert dict(file.metadata) == {"k": 7} and not file.tensors


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path, tmp_path / "nowhere.gguf", Path("a\0b")):
        with pytest.raises(ModelLoadError, match="it cannot be read"):
            GgufFile.open(path)
