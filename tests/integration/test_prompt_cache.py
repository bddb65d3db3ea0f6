"""Prompts kept on disk: the same bits after a restart, of their tenant alone, whatever becomes of the files."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from families import Folders
from forerun import LLM, ConfigError, SamplingParams
from forerun.config import EngineConfig
from forerun.engine import Choice, Engine
from forerun.engine.step import READ_AT_ONCE
from forerun.errors import OutOfPagesError
from forerun.kernels.cpu import native
from forerun.kernels.cpu.compiler import FACTS, LIBRARY
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache import prompt_cache
from forerun.kv_cache.prefix_tree import Page
from forerun.models import Model, load_draft_model, load_model
from forerun.utils.files import _Hashing, sealed_file
from forerun.utils.machine import GIB
from pool_integrity import check_integrity

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
needs_native = pytest.mark.skipif(native() is None, reason="there are no native kernels here")
pytestmark = needs_native


def prompt_of(model: Model, num_pages: int, start: int = 11) -> list[int]:
    """Whole pages, and some tokens more."""
    most = min(200, model.vocab_size)
    return [start // most, start % most, *((7 * i * i + 3 * i) % most for i in range(num_pages * PAGE + 3))]


def engine_of(model: Model, folder: Path, **options: object) -> Engine:
    """An engine after a restart: nothing is in memory."""
    assert model.pool.forget()
    return Engine(model, None, config=EngineConfig(prefix_reuse="on", prompt_cache=str(folder), **options))


def answer(engine: Engine, prompt: list[int], tenant: str | None = None) -> Choice:
    number = engine.add(prompt, replace(GREEDY, tenant=tenant))
    last = {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    assert last[number].error is None
    engine.close()  # waits for the files
    check_integrity(engine.target.pool)
    return last[number].choice


def answer_before_writing(engine: Engine, prompt: list[int]) -> None:
    """Compute an answer to its end while nothing is written yet, and only then write."""
    disk_is_free = Event()
    engine.memory.prompt_cache._thread.submit(disk_is_free.wait)
    engine.add(prompt, GREEDY)
    while engine.has_work:
        engine.step()
    disk_is_free.set()
    engine.close()


def files(folder: Path, suffix: str = "page") -> list[Path]:
    """By their last use, the first to be removed in front."""
    return sorted(folder.glob(f"*/*.{suffix}"), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def model() -> Model:
    return load_draft_model("bundled-draft", "bfloat16")


@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "recurrent", "latent"])
def test_the_same_bits_after_a_restart(kind: str, tmp_path: Path) -> None:
    family = {"recurrent": "qwen3_5_text", "latent": "deepseek_v3"}.get(kind)
    if family is not None:
        model = load_model(Path(Folders(tmp_path / "families")[family]), "float32")
    else:
        dtype = {"int8": "bfloat16"}.get(kind, kind)
        model = load_model("bundled-draft", dtype, kv_cache_dtype="int8" if kind == "int8" else "auto")
    prompt = prompt_of(model, 3)
    plain = answer(Engine(model, None, config=EngineConfig(prefix_reuse="off")), prompt)
    first = answer(engine_of(model, tmp_path / "cache"), prompt)
    again = answer(engine_of(model, tmp_path / "cache"), prompt)
    longer = prompt[: 3 * PAGE] + [1, 2, 3]
    other = answer(engine_of(model, tmp_path / "cache"), longer)
    plain_of_other = answer(Engine(model, None, config=EngineConfig(prefix_reuse="off")), longer)
    assert [each.stats.num_cached_tokens for each in (plain, first, again, other)] == [0, 0, 3 * PAGE, 3 * PAGE]
    assert (first.token_ids, first.logprobs) == (plain.token_ids, plain.logprobs)
    assert (again.token_ids, again.logprobs) == (plain.token_ids, plain.logprobs)
    assert (other.token_ids, other.logprobs) == (plain_of_other.token_ids, plain_of_other.logprobs)


def test_a_pair_after_a_restart(tmp_path: Path) -> None:
    """The target takes its prompt from disk, the draft model computes it: drafts, and the same text."""
    options = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    prompt = "def add(a, b):\n    return a + b\n\n\n" * 20
    with LLM("bundled", "draft-model", num_draft_tokens=4, prefix_reuse="off") as llm:
        plain = llm.generate(prompt, **options)
    for num_read in (0, 1):
        with LLM("bundled", "draft-model", num_draft_tokens=4, prompt_cache=tmp_path) as llm:
            found = llm.generate(prompt, **options)
            assert found.token_ids == plain.token_ids and found.stats.num_accepted_tokens > 0
            assert found.stats.num_read_tokens == found.stats.num_cached_tokens
            assert (found.stats.num_cached_tokens >= PAGE) == num_read


def test_tenants_are_apart(model: Model, tmp_path: Path) -> None:
    prompt = prompt_of(model, 2)
    engine = engine_of(model, tmp_path)
    answer(engine, prompt, "a")
    for tenant, expected in (("b", 0), (None, 0), ("a", 2 * PAGE), ("b", 2 * PAGE)):
        assert answer(engine_of(model, tmp_path), prompt, tenant).stats.num_cached_tokens == expected
    assert len(files(tmp_path)) == 3 * 2


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def swap(path: Path) -> None:
    """The second page's content under the third's name: its checksum is right."""
    first, second = path, files(path.parent.parent)[2]
    assert first != second
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize("damage", [flip, cut, empty, swap])
def test_a_damaged_file_is_a_line_in_the_log(
    damage: object, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(model, 4)
    first = answer(engine_of(model, tmp_path), prompt)
    contents = {path.name: path.read_bytes() for path in files(tmp_path)}
    damage(files(tmp_path)[1])  # of four pages the third, as the last is the first to go
    again = answer(engine_of(model, tmp_path), prompt)
    expected = PAGE if damage is swap else 2 * PAGE
    assert again.stats.num_cached_tokens == again.stats.num_read_tokens == expected
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith("The prompt is computed.") and ("damaged" in line or "has the content of" in line)
    assert {path.name: path.read_bytes() for path in files(tmp_path)} == contents  # it was written anew


def test_folders_that_are_refused(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(folder: Path, **options: object) -> str:
        with pytest.raises(ConfigError) as error:
            engine_of(model, folder, **options)
        return str(error.value)

    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "prompt-cache.json").write_text('{"version": 3}')
    assert "is of version 3, not 2. Give another folder" in refusal(newer)
    (newer / "prompt-cache.json").write_text('{"version": 2')
    assert "not JSON" in refusal(newer)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    assert "has other files, such as letter.txt" in refusal(tmp_path / "mine")
    assert "cannot be used: Not a directory" in refusal(tmp_path / "mine" / "letter.txt" / "cache")
    assert "Raise it" in refusal(tmp_path / "small", prompt_cache_size=1000 / GIB)
    engine_of(model, tmp_path / "sound")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        assert "is another user's" in refusal(tmp_path / "sound")
    with monkeypatch.context() as patch:
        (made := tmp_path / "sound" / ("0" * 32)).mkdir()
        (made / "a.page").touch()
        status = Path.stat
        denied = raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        patch.setattr(Path, "stat", lambda path, **options: (denied if path.suffix else status)(path, **options))
        assert "cannot be used: Permission denied" in refusal(tmp_path / "sound")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", raising(PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
        assert "cannot be used: Permission denied" in refusal(tmp_path / "sound")
    for folder in (tmp_path / "sound", made := tmp_path / "sound" / model.fingerprint()):
        made.mkdir(exist_ok=True)
        folder.chmod(0o770)
        assert f"{folder} may be written to by other users, who could change answers. Take" in refusal(
            tmp_path / "sound"
        )
        folder.chmod(0o700)
    made.rmdir()
    made.symlink_to(tmp_path / "newer")
    assert f"{made} is no folder" in refusal(tmp_path / "sound")
    made.unlink()
    with pytest.raises(ConfigError, match="no prompt_cache is given"):
        EngineConfig(prompt_cache_size=1)
    with pytest.raises(ConfigError, match="prefix_reuse is 'off'"):
        Engine(model, None, config=EngineConfig(prefix_reuse="off", prompt_cache=str(tmp_path / "sound")))
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    reference = load_draft_model("bundled-draft", "float32")
    with pytest.raises(ConfigError, match=r"\(reference kernels, cpu\) is not computed by the native decoder"):
        engine_of(reference, tmp_path / "sound")


def raising(error: OSError):
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("where", "name"), [(_Hashing, "write"), (os, "mkdir")])
def test_a_full_disk_is_a_line_in_the_log(
    where: object,
    name: str,
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of(model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        first = answer(engine, prompt_of(model, 2))
        answer(engine, prompt_of(model, 2, 12))
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "not kept on disk for 60 seconds" in line and "No space left on device" in line
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["prompt-cache.json"]
    monkeypatch.setattr(prompt_cache, "_PAUSE", 0.0)
    engine.memory.prompt_cache._resumes = 0.0
    again = answer(engine, prompt_of(model, 2))
    assert again.token_ids == first.token_ids and len(files(tmp_path)) == 2  # from memory, and now on disk


def test_rights_that_are_lost_are_a_line_in_the_log(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of reading as of writing, while it runs."""
    prompt = prompt_of(model, 2)
    first = answer(engine_of(model, tmp_path), prompt)
    engine = engine_of(model, tmp_path)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(Path, "read_bytes", raising(denied))
    monkeypatch.setattr(os, "utime", raising(denied))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", raising(denied))
        assert engine.memory.prompt_cache.read(prompt, None, 0)[0] == 0
    again = answer(engine, prompt)
    assert (again.stats.num_cached_tokens, again.token_ids) == (0, first.token_ids)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["Permission denied" in line for line in lines] == [True, True]
    assert len(files(tmp_path)) == 2


def test_a_page_that_was_evicted_meanwhile_is_not_written(model: Model, tmp_path: Path) -> None:
    """Nothing waits for the disk: pages that are gone when their turn comes are left out."""
    engine = engine_of(model, tmp_path)
    disk_is_free = Event()
    engine.memory.prompt_cache._thread.submit(disk_is_free.wait)
    number = engine.add(prompt_of(model, 3), GREEDY)
    while engine.has_work:
        engine.step()
    assert number == 0 and model.pool.num_published == 3
    assert model.pool.forget()
    disk_is_free.set()
    engine.close()
    assert files(tmp_path) == []
    cache = engine.memory.prompt_cache
    cache._is_there = lambda name, used: not model.pool.forget()  # it is found, then evicted, and then to be copied
    answer(engine, prompt_of(model, 3))
    assert files(tmp_path) == []


def test_a_page_that_is_evicted_while_it_is_written_is_whole(model: Model, tmp_path: Path) -> None:
    prompt = prompt_of(model, 3)
    answer(engine_of(model, tmp_path / "whole"), prompt)
    engine = engine_of(model, tmp_path / "evicted")
    cache = engine.memory.prompt_cache
    write = cache._write

    def evict_and_write(*arguments: Any) -> bool:
        assert model.pool.forget()
        pages: list[Page] = []
        model.pool.take(pages, 3)  # zeros
        model.pool.give_back(pages)
        return write(*arguments)

    cache._write = evict_and_write
    answer_before_writing(engine, prompt)
    (path,) = files(tmp_path / "evicted")
    assert path.read_bytes() == files(tmp_path / "whole")[-1].read_bytes()


@pytest.mark.parametrize("kind", ["pages", "states"])
def test_a_page_that_is_published_anew_is_not_written(kind: str, tmp_path: Path) -> None:
    """While the first pages are written, those that follow are evicted, and are then another tenant's."""
    if kind == "states":  # which alone are missing on the disk
        model = load_model(Path(Folders(tmp_path / "families")["qwen3_5_text"]), "float32")
    else:
        model = load_draft_model("bundled-draft", "bfloat16")
    prompt = prompt_of(model, 4)
    answer(engine_of(model, tmp_path / "whole"), prompt)
    engine = engine_of(model, tmp_path / "evicted")
    if kind == "states":
        answer(engine, prompt)
        (state,) = files(tmp_path / "evicted", "state")
        state.unlink()
        engine = engine_of(model, tmp_path / "evicted")
    cache = engine.memory.prompt_cache
    is_there = cache._is_there

    def look_and_replace(*arguments: Any) -> bool:
        if not is_there(*arguments):
            return False
        cache._is_there = is_there
        assert model.pool.forget()
        pages: list[Page] = []
        model.pool.take(pages, 4)
        model.pool.publish(pages, 0, 4, prompt_of(model, 4, 12), "another")
        model.pool.keep_states(pages, {4 * PAGE: [torch.ones(3)]})
        model.pool.give_back(pages)
        return True

    cache._is_there = look_and_replace
    answer_before_writing(engine, prompt)
    for suffix in ("page", "state"):
        whole = {path.name: path.read_bytes() for path in files(tmp_path / "whole", suffix)}
        found = {path.name: path.read_bytes() for path in files(tmp_path / "evicted", suffix)}
        assert found.items() <= whole.items()
        assert len(found) == {"pages": suffix == "page", "states": len(whole)}[kind]


@pytest.mark.parametrize("num_pages", [3, 11, 16])
def test_others_do_not_wait_while_a_prompt_is_read(num_pages: int, model: Model, tmp_path: Path) -> None:
    """A step reads eight pages beside the sequence that is answered, which gets a token in each."""
    prompt = prompt_of(model, num_pages)
    first = answer(engine_of(model, tmp_path), prompt)
    engine = engine_of(model, tmp_path)
    engine.add([1, 2, 3], replace(GREEDY, max_tokens=40))
    engine.step()
    number = engine.add(prompt, GREEDY)
    seen = []
    while engine.has_work:
        done = {output.request_id: output.choice for output in engine.step()}
        seen.append(model.pool.num_published)
        if number in done:
            again = done[number]
    assert seen[: num_pages // READ_AT_ONCE + 1] == [*range(8, num_pages + 1, 8), num_pages]
    assert again.stats.num_cached_tokens == again.stats.num_read_tokens == num_pages * PAGE
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    check_integrity(model.pool)


def test_several_prompts_are_read_in_turn(model: Model, tmp_path: Path) -> None:
    """Eight pages in each step, of all together; what is not on the disk does not wait for them."""
    prompts = [prompt_of(model, 8, start) for start in (11, 12, 13)]
    for prompt in prompts:
        answer(engine_of(model, tmp_path), prompt)
    engine = engine_of(model, tmp_path)
    engine.add([1, 2, 3], replace(GREEDY, max_tokens=40))
    engine.step()
    numbers = [engine.add(prompt, GREEDY) for prompt in (*prompts, [4, 5, 6])]
    last, seen = {}, []
    while engine.has_work:
        last |= {output.request_id: output.choice for output in engine.step()}
        seen.append((model.pool.num_published, sum(state.cache is not None for state in engine.scheduler.running)))
    assert seen[:3] == [(8, 3), (16, 4), (24, 5)]
    assert [last[number].stats.num_read_tokens for number in numbers] == [*3 * [8 * PAGE], 0]
    check_integrity(model.pool)


def test_a_request_is_aborted_while_its_prompt_is_read(model: Model, tmp_path: Path) -> None:
    prompt = prompt_of(model, 16)
    answer(engine_of(model, tmp_path), prompt)
    engine = engine_of(model, tmp_path)
    first = engine.add([1, 2, 3], replace(GREEDY, max_tokens=4))
    engine.step()
    second = engine.add(prompt, GREEDY)
    engine.step()
    assert model.pool.num_published == 8
    engine.abort(second)
    last = {}
    while engine.has_work:
        last |= {output.request_id: output.choice.finish_reason for output in engine.step()}
    assert last == {first: "length", second: "abort"}
    check_integrity(model.pool)


def test_no_more_is_read_than_there_is_room_for(model: Model, tmp_path: Path) -> None:
    prompt = prompt_of(model, 3)
    answer(engine_of(model, tmp_path), prompt)
    engine = engine_of(model, tmp_path)
    running = model.new_cache()
    running.feed(range(-1, 5 * PAGE - 1))
    model.pool.limit(7)
    assert engine.memory.prompt_cache.read(prompt, None) == (2, False)
    check_integrity(model.pool, [running])
    running.free()


def test_a_page_is_used_later_than_those_after_it(model: Model, tmp_path: Path) -> None:
    prompt = prompt_of(model, 4)
    answer(Engine(model, None, config=EngineConfig(prefix_reuse="on")), prompt)
    cache = prompt_cache.PromptCache(tmp_path, GIB, model.pool, model.fingerprint(), has_states=False)
    for _ in range(2):
        cache.write(prompt, None)
        cache.flush()
        assert [path.stem for path in files(tmp_path)][::-1] == list(cache._names(prompt, None))
    assert cache._folder.stat().st_mode & 0o77 == 0  # for no other user


def test_the_size_is_kept_and_ends_go_first(model: Model, tmp_path: Path) -> None:
    page = model.pool.page_nbytes + 1024
    size = 8 * page / GIB
    most = 0
    for start in range(6):
        for tenant in ("a", "b"):
            answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 3, start), tenant)
            most = max(most, sum(path.stat().st_size for path in files(tmp_path)))
    assert 4 * page < most <= 8 * page
    newest = answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 3, 5), "b")
    assert newest.stats.num_cached_tokens == 3 * PAGE
    assert (
        answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 3, 0), "a").stats.num_cached_tokens
        == 0
    )
    long = prompt_of(model, 12)  # longer than the size: its beginning is kept
    answer(engine_of(model, tmp_path, prompt_cache_size=size), long)
    cached = answer(engine_of(model, tmp_path, prompt_cache_size=size), long).stats.num_cached_tokens
    assert 6 * PAGE <= cached == len(files(tmp_path)) * PAGE


def test_files_of_the_future_are_the_first_to_go(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock was set back, or the folder comes from elsewhere."""
    size = 8 * (model.pool.page_nbytes + 1024) / GIB
    answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 8))
    tomorrow = time.time() + 86400
    for path in files(tmp_path):
        os.utime(path, (tomorrow, tomorrow))
    answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 5, 12))
    found = answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 5, 12))
    assert found.stats.num_read_tokens == 5 * PAGE
    assert not caplog.records
    for path in files(tmp_path):
        os.utime(path, (time.time() + 30, time.time() + 30))
    engine = engine_of(model, tmp_path, prompt_cache_size=size)
    for start in (13, 14):
        answer(engine, prompt_of(model, 8, start))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has no room for more" in line and "prompt_cache_size" in line


def test_a_prefix_is_not_removed_for_its_own_end(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where times of files are whole seconds, so that its files seem to be from before it was used."""
    utime = os.utime
    monkeypatch.setattr(os, "utime", lambda path, ns: utime(path, ns=(ns[0] // 10**9 * 10**9,) * 2))
    size = 8 * (model.pool.page_nbytes + 1024) / GIB
    for _ in range(2):
        answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 12))
        found = answer(engine_of(model, tmp_path, prompt_cache_size=size), prompt_of(model, 12))
        assert found.stats.num_cached_tokens == len(files(tmp_path)) * PAGE >= 6 * PAGE


def test_folders_of_other_models_that_are_empty_are_removed(model: Model, tmp_path: Path) -> None:
    engine = engine_of(model, tmp_path)
    answer(engine, prompt_of(model, 2))
    for name in "01":
        (tmp_path / (name * 32)).mkdir()
    (tmp_path / ("1" * 32) / "a.page").touch()
    engine_of(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"prompt-cache.json", "1" * 32, model.fingerprint()}


def test_pages_are_not_synced(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a power cut tears is found by its checksum."""
    engine = engine_of(model, tmp_path)
    monkeypatch.setattr(os, "fsync", raising(AssertionError("a file is synced")))
    answer(engine, prompt_of(model, 2))
    assert len(files(tmp_path)) == 2


def test_files_that_go_while_they_are_read(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer(engine_of(model, tmp_path), prompt_of(model, 2))
    read_bytes = Path.read_bytes

    def read_and_remove(path: Path) -> bytes:
        content = read_bytes(path)
        path.unlink()
        return content

    engine = engine_of(model, tmp_path)
    monkeypatch.setattr(Path, "read_bytes", read_and_remove)
    assert answer(engine, prompt_of(model, 2)).stats.num_read_tokens == 2 * PAGE
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "shape"), [("uint8", [64]), ("no_such", [64]), ("nn", [0]), ("uint8", [-1, 2]), ("uint8", None)]
)
def test_sound_files_of_something_else(
    dtype: str, shape: object, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their checksums are right, and their tensors not a page's."""
    prompt = prompt_of(model, 3)
    first = answer(engine_of(model, tmp_path), prompt)
    damaged = files(tmp_path)[1]
    with sealed_file(damaged, ConfigError) as file:
        head = {"version": 2, "file": damaged.name, "tensors": [[dtype, shape]]}
        file.write(json.dumps(head).encode() + b"\n" + bytes(64))
    again = answer(engine_of(model, tmp_path), prompt)
    assert (again.stats.num_read_tokens, again.token_ids) == (PAGE, first.token_ids)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(damaged) in line and line.endswith("The prompt is computed.")


def test_pages_that_others_take_while_a_prompt_is_read(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(engine_of(model, tmp_path), prompt_of(model, 3))
    cache = engine_of(model, tmp_path).memory.prompt_cache
    take = model.pool.take

    def take_one(pages: list[Page], count: int) -> None:
        if pages:
            raise OutOfPagesError(1, 0, 1)
        take(pages, count)

    monkeypatch.setattr(model.pool, "take", take_one)
    assert cache.read(prompt_of(model, 3), None) == (1, False)
    check_integrity(model.pool)


def test_a_tenant_of_half_a_character(model: Model, tmp_path: Path) -> None:
    for expected in (0, 2 * PAGE):
        found = answer(engine_of(model, tmp_path), prompt_of(model, 2), "\ud800")
        assert found.stats.num_read_tokens == expected


def test_what_is_read_after_a_preemption_is_not_counted(model: Model, tmp_path: Path) -> None:
    prompt = prompt_of(model, 3)
    answer(engine_of(model, tmp_path), prompt)
    engine = engine_of(model, tmp_path)
    engine.add(prompt, replace(GREEDY, max_tokens=3))
    engine.step()
    (state,) = engine.scheduler.running
    engine._loop.release(state)
    state.stats.num_preemptions += 1
    engine.scheduler.requeue(state)
    assert model.pool.forget()
    last = None
    while engine.has_work:
        (*_, last) = [last, *engine.step()]
    assert last.choice.stats.num_read_tokens == last.choice.stats.num_cached_tokens == 3 * PAGE


def test_an_end_does_not_wait_for_a_slow_disk(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(model, tmp_path)
    cache = engine.memory.prompt_cache
    write, disk_is_free = cache._write, Event()
    cache._write = lambda *arguments: disk_is_free.wait() and write(*arguments)
    monkeypatch.setattr(prompt_cache, "_MOST_SECONDS", 0.05)
    for start in range(3):
        answer(engine, prompt_of(model, 2, start))
    assert not cache._waiting
    disk_is_free.set()
    cache.flush()
    assert len(files(tmp_path)) == 1  # what was being written
    lines = [record.getMessage() for record in caplog.records]
    assert lines and all("longer than 0.05 seconds" in line for line in lines)


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    models = [load_draft_model("bundled-draft", "bfloat16") for _ in range(2)]
    engines = [engine_of(each, tmp_path) for each in models]
    prompts = [prompt_of(models[0], 2, start) for start in range(4)]
    for prompt in prompts:
        for engine in engines:
            engine.add(prompt, GREEDY)
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.close()
    assert len(files(tmp_path)) == 8 and not list(tmp_path.glob("*/.*"))
    found = [answer(engine_of(each, tmp_path), prompt).stats.num_cached_tokens for each in models for prompt in prompts]
    assert found == [2 * PAGE] * 8


def test_what_decides_the_bits_is_told_apart() -> None:
    models = [load_model("bundled-draft", each) for each in ("bfloat16", "bfloat16", "float32")]
    models += [load_model("bundled-draft", kv_cache_dtype="int8"), load_model("bundled-draft", quantize="int8")]
    first, same, *others = [each.fingerprint() for each in models]
    assert first == same and len({first, *others}) == 4
    weight = next(each for each in models[0].decoder._kept.values() if not hasattr(each, "packed"))
    weight.view(-1)[-1] += 1e-3
    assert models[0].fingerprint() != first
    library = models[1].decoder.library
    best = library.instructions
    try:
        assert library.use_instructions("portable")
        assert models[1].fingerprint() != first or best == "portable"
    finally:
        library.use_instructions(best)


def test_instruction_sets_that_are_compiled_later_change_no_bits(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, library = model.fingerprint(), model.decoder.library
    folder = tmp_path / library.path.parent.name
    folder.mkdir()
    facts = json.loads((library.path.parent / FACTS).read_text())
    (folder / FACTS).write_text(json.dumps(facts | {"instructions": ["portable"]}))
    (folder / LIBRARY).touch()
    monkeypatch.setattr(library, "path", folder / LIBRARY)
    assert model.fingerprint() == first
    for other in ("recipe", "compiler"):
        (folder / FACTS).write_text(json.dumps(facts | {other: "another"}))
        assert model.fingerprint() != first


CHILD = """
import itertools
import sys
from forerun import LLM
llm = LLM("bundled-draft", None, prompt_cache=sys.argv[1], threads=1)
for start in itertools.count(int(sys.argv[2])):
    prompt = [start // 200, start % 200, *((7 * i * i + 3 * i) % 200 for i in range(4 * 64 + 3))]
    found = llm.generate(prompt, temperature=0, max_tokens=4, ignore_eos=True)
    print(start, found.stats.num_cached_tokens, *found.token_ids, flush=True)
    if len(sys.argv) > 3:
        break
"""


@pytest.mark.slow
def test_killed_in_a_loop_by_two_processes(model: Model, tmp_path: Path) -> None:
    """Fifty times, amid writing: what is there is whole, and a process that ends by itself has written everything."""
    number = 0
    for number_of_round in range(25):
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(tmp_path), str(number)], stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for child in children:
            child.stdout.readline()
        time.sleep(0.013 * number_of_round % 0.1)
        for child in children:
            child.send_signal(signal.SIGKILL)
        lines = [line for child in children for line in child.communicate()[0].splitlines()]
        number += max([2, *(int(line.split()[0]) - number for line in lines)])
    for path in files(tmp_path):
        assert prompt_cache._read(path)
    number += 100
    for expected in (0, 4 * PAGE):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(number), "once"]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        plain = answer(Engine(model, None, config=EngineConfig(prefix_reuse="off")), prompt_of(model, 4, number))
        assert [int(each) for each in line] == [number, expected, *plain.token_ids[:4]]
