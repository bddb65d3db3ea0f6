"""A file of answers: bounded, forgetting the oldest, and sound whatever becomes of its end."""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

import numpy as np
import pytest

from forerun import ConfigError
from forerun.drafters.lookup.remembered import answer_file
from forerun.drafters.lookup.remembered.answer_file import NUM_SEGMENTS, AnswerFile

LEAST_BYTES = 4096 * (1 + NUM_SEGMENTS)
ONE = b"1" * 16
TWO = b"2" * 16
VOCAB = 70_000


def opened(
    path: Path, num_bytes: int | None = LEAST_BYTES, vocab_size: int = VOCAB, fingerprint: str = "f"
) -> AnswerFile:
    return AnswerFile(path, num_bytes, vocab_size, fingerprint, default_bytes=LEAST_BYTES)


def content(file: AnswerFile) -> list[tuple[bytes, list[int]]]:
    """All answers, the oldest first."""
    kind = f">u{file.header.token_bytes}"
    return [
        (tenant, np.frombuffer(tokens, kind).tolist()) for tenant, tokens in file.answers(file.tenants(), file.number)
    ]


def numbered(number: int) -> list[int]:
    """An answer that tells its number in every token, of a length of its own."""
    return [number] * (1 + number * 37 % 90)


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with opened(path) as file:
        file.append(ONE, [1, 2, VOCAB - 1])
        file.append(TWO, [3])
    with opened(path, None) as file:
        assert content(file) == [(ONE, [1, 2, VOCAB - 1]), (TWO, [3])]
        file.append(ONE, [4])
    with opened(path) as file:
        assert content(file)[2:] == [(ONE, [4])]
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["answers"]


@pytest.mark.parametrize("vocab_size", [300, VOCAB])
def test_the_size_stays_and_the_oldest_go_first(tmp_path: Path, vocab_size: int) -> None:
    path = tmp_path / "answers"
    with opened(path, vocab_size=vocab_size) as file:
        for number in range(1, 250):
            file.append(ONE, numbered(number))
    assert path.stat().st_size == LEAST_BYTES
    with opened(path, vocab_size=vocab_size) as file:
        kept = [ids for _, ids in content(file)]
        first = kept[0][0]
        assert kept == [numbered(number) for number in range(first, 250)]
        # all but the segment that is being written over is full
        assert file.num_tokens * file.header.token_bytes > 0.5 * LEAST_BYTES
    assert 1 < first < 249


def test_of_whom_something_is_forgotten_is_told(tmp_path: Path) -> None:
    with opened(tmp_path / "answers") as file:
        file.append(TWO, [1])
        while not file.forgotten:
            assert (TWO, [1]) in content(file)
            file.append(ONE, numbered(file.number))
        assert file.forgotten == {ONE, TWO}
        assert file.tenants() == [ONE]


def filled(path: Path, per_segment: int = 2) -> int:
    """Fill all segments with so many answers of one tenant each; return the bytes of a segment."""
    with opened(path) as file:
        size = file.header.segment_bytes
        for number in range(1, 1 + NUM_SEGMENTS * per_segment):
            file.append(ONE, [number] * (size // per_segment // 4 - 12))
        assert len(content(file)) == NUM_SEGMENTS * per_segment
        return size


def test_after_damage_in_the_middle_what_is_written_over_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    size = filled(path)
    data = bytearray(path.read_bytes())
    data[4096 + 3 * size] ^= 1
    path.write_bytes(data)
    with opened(path) as file:
        assert [ids[0] for _, ids in content(file)] == [1, 2, 3, 4, 5, 6, *range(9, 17)]
        file.append(TWO, [7_000] * 400)
        assert file.forgotten == {ONE}
        assert [ids[0] for tenant, ids in content(file) if tenant == ONE] == [3, 4, 5, 6, *range(9, 17)]
        assert content(file)[-1] == (TWO, [7_000] * 400)


@pytest.mark.parametrize("length", [400, 2500])
def test_a_write_that_is_cut_short_at_a_turn_mixes_no_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Of several pieces the third is cut."""
    path = tmp_path / "answers"
    filled(path)
    write_at = answer_file._write_at
    left = [1] * (length // 1000)

    def torn(file: FileIO, content: bytes, at: int) -> None:
        if left:
            left.pop()
            return write_at(file, content, at)
        write_at(file, content[: len(content) // 2], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path) as file:
        with monkeypatch.context() as patched:
            patched.setattr(answer_file, "_write_at", torn)
            with pytest.raises(OSError, match="No space"):
                file.append(TWO, [7_000] * length)
        assert file.forgotten == {ONE}
        for _ in range(2):
            assert next(ids[0] for tenant, ids in content(file) if tenant == ONE) == 3 + 2 * (length // 1000)
            assert all({*ids} == {7_000} for tenant, ids in content(file) if tenant == TWO)
            file.append(TWO, [7_000])
        assert content(file)[-2:] == [(TWO, [7_000])] * 2


def test_what_is_written_over_meanwhile_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    filled(path)
    with opened(path) as file:
        reading = file.answers([ONE, TWO], file.number)
        next(reading)
        for _ in range(6):
            file.append(TWO, [7_000] * 900)
        assert {tenant for tenant, _ in reading} == {ONE}


def test_an_answer_longer_than_a_segment_is_in_several(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    answer = [number % VOCAB for number in range(2500)]
    with opened(path) as file:
        file.append(ONE, answer)
        held = content(file)
        assert len(held) == 3
        assert [token for _, ids in held for token in ids] == answer
    with opened(path) as file:
        assert content(file) == held


@pytest.mark.parametrize("cut", [1, 20, 45, 100])
def test_a_torn_end_is_cut_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "answers"
    with opened(path) as file:
        file.append(ONE, [1] * 20)
        whole = 4096 + file._at
        file.append(ONE, [2] * 20)
    data = bytearray(path.read_bytes())
    data[whole + cut :] = bytes(len(data) - whole - cut)
    path.write_bytes(data)
    with opened(path) as file:
        assert content(file) == [(ONE, [1] * 20)]
        file.append(TWO, [3])
    with opened(path) as file:
        assert content(file) == [(ONE, [1] * 20), (TWO, [3])]


def test_damage_anywhere_loses_answers_and_changes_none(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with opened(path) as file:
        for number in range(1, 250):
            file.append(ONE, numbered(number))
        before = [ids for _, ids in content(file)]
    sound = path.read_bytes()
    for at in range(4096, len(sound), 611):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x55]) + sound[at + 1 :])
        with opened(path) as file:
            found = [ids for _, ids in content(file)]
            assert all(ids in before for ids in found)
            file.append(TWO, [5, 6])
        with opened(path) as file:
            assert content(file)[-1] == (TWO, [5, 6])


def test_another_size_keeps_the_newest_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with opened(path, 4 * LEAST_BYTES) as file:
        name = file.header.hashed("key")
        for number in range(1, 150):
            file.append(ONE, numbered(number))
    with opened(path) as file:
        assert file.header.hashed("key") == name
        kept = [ids for _, ids in content(file)]
        assert kept[0][0] > 1
        assert kept == [numbered(number) for number in range(kept[0][0], 150)]
        file.append(TWO, [7])
    assert path.stat().st_size == LEAST_BYTES
    with opened(path, 8 * LEAST_BYTES) as file:
        assert [ids for _, ids in content(file)] == [*kept, [7]]
    assert path.stat().st_size > 7 * LEAST_BYTES


def test_one_process_has_it(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with opened(path), pytest.raises(ConfigError, match=r"in use by another process.*file of its own"):
        opened(path)
    opened(path).close()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (b"", "no file of answers"),
        (b"GGUF and more" * 1000, "no file of answers"),
        (b'{"format": "forerun-answers", "version": 1', "damaged"),
        (b'{"format": "forerun-answers", "version": 9}'.ljust(9000), "version 9"),
    ],
)
def test_a_file_of_others_is_refused_and_stays(tmp_path: Path, found: bytes, expected: str) -> None:
    path = tmp_path / "answers"
    path.write_bytes(found)
    with pytest.raises(ConfigError, match=expected):
        opened(path)
    assert path.read_bytes() == found
    assert [each.name for each in tmp_path.iterdir()] == ["answers"]


def test_a_file_of_another_tokenizer_or_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    opened(path).close()
    with pytest.raises(ConfigError, match="another tokenizer"):
        opened(path, fingerprint="g")
    with pytest.raises(ConfigError, match="another tokenizer"):
        opened(path, vocab_size=60_000)
    os.truncate(path, LEAST_BYTES - 1)
    with pytest.raises(ConfigError, match="cut short"):
        opened(path)


def test_a_target_with_other_padding_has_the_answers_that_it_can_say(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    with opened(path) as file:
        file.append(ONE, [1, 2])
        file.append(ONE, [VOCAB - 1, 2])
    with opened(path, vocab_size=VOCAB - 1) as file:
        assert content(file) == [(ONE, [1, 2])]
    with opened(path, vocab_size=VOCAB + 64) as file:
        assert len(content(file)) == 2
    opened(tmp_path / "without", fingerprint="").close()
    with pytest.raises(ConfigError, match="another tokenizer"):
        opened(tmp_path / "without", vocab_size=VOCAB - 1, fingerprint="")


def test_who_names_no_tenant_is_nobody_else_and_files_hash_names_differently(tmp_path: Path) -> None:
    with opened(tmp_path / "one") as one, opened(tmp_path / "two") as two:
        names = [file.header.hashed(tenant) for file in (one, two) for tenant in (None, "", "key", "=key")]
    assert len({*names}) == 8


@pytest.mark.parametrize("name", ["", "/", "a\0b"])
def test_what_names_no_file_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"remember .* cannot be"):
        opened(Path(name))


def test_what_is_no_file_or_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"remember '{tmp_path}' cannot be used"):
        opened(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be"):
        opened(tmp_path / "file" / "answers")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        opened(tmp_path / "pipe")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        opened(tmp_path / "answers")
    assert not (tmp_path / "answers").exists()


def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: FileIO, content: bytes, at: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(tmp_path / "answers") as file:
        file.append(ONE, [1])
        with monkeypatch.context() as patched:
            patched.setattr(answer_file, "_write_at", full)
            with pytest.raises(OSError, match="No space"):
                file.append(ONE, [2])
        file.append(ONE, [3])
        assert content(file) == [(ONE, [1]), (ONE, [3])]
        os.truncate(file.path, 100)
        assert content(file) == []
