"""Answers to many requests: as those of the same request alone, in bounded memory, none lost."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel, adversaries
from forerun import LLM
from forerun.engine import EngineThread
from forerun.errors import DeviceError, QueueFullError
from forerun.server.batch.files import BatchJournal
from forerun.server.batch.lines import BatchFile, BatchLine
from forerun.server.batch.run import BatchRun
from small_tokenizers import byte_level

TOKENIZER = byte_level()
MAX_BATCH = 4


def line(custom_id: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def lines(count: int) -> list[str]:
    """Greedy and seeded ones, several prompts and choices, and some that cannot be served."""
    rng = random.Random(5)
    made = []
    for number in range(count):
        prompt = [[rng.randrange(11) for _ in range(3)] for _ in range(rng.choice([1, 1, 2, 3]))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 12)}
        kind = rng.randrange(5)
        if kind == 0:
            body |= {"temperature": 0}
        elif kind == 1:
            body |= {"seed": number, "n": rng.randrange(1, 4)}
        elif kind == 2:
            body |= {"seed": number, "logprobs": 2, "stop": ["a"]}
        elif kind == 3:
            body |= {"temperature": 0.7}  # the batch's seed
        else:
            body |= {"top_p": 0} if number % 2 else {"prompt": [*prompt, [999]], "seed": 1}
        made.append(line(f"line {number}", **body))
    return made


@pytest.fixture
def llm() -> LLM:
    fake: Any = FakeModel(vocab_size=len(TOKENIZER))
    drafter = adversaries({}, len(TOKENIZER))["random"]
    return LLM(fake, drafter, tokenizer=TOKENIZER, num_draft_tokens=3, max_batch=MAX_BATCH)


def answers(llm: LLM, asked: Iterator[BatchLine]) -> Iterator[tuple[int, dict[str, Any]]]:
    with EngineThread(llm.shared) as thread:
        yield from BatchRun(llm, thread, "it", 3).answers(asked)
        assert thread.drain(60)
    assert not llm.engine.has_work


def whole(llm: LLM, path: Path) -> dict[int, dict[str, Any]]:
    with BatchFile(path) as file:
        found = list(answers(llm, file.requests(lambda _: True, "it", 4096)))
        assert len(found) == file.num_lines
        return dict(found)


def test_every_line_has_the_answer_that_it_has_alone(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(lines(60)))
    together = whole(llm, tmp_path / "in")
    assert sorted(together) == list(range(60))
    assert [together[index]["custom_id"] for index in range(60)] == [f"line {index}" for index in range(60)]
    statuses = [together[index]["response"]["status_code"] for index in range(60)]
    assert set(statuses) == {200, 400}
    for index in range(0, 60, 7):  # each alone, with its place among the lines
        with BatchFile(tmp_path / "in") as file:
            [(_, alone)] = answers(llm, file.requests(lambda at, index=index: at == index, "it", 4096))
        assert json.dumps(alone) == json.dumps(together[index])


def test_answers_of_lenient_schemas_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    llm = LLM("bundled")
    given = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "x-guidance": {"lenient": True}}
    body = {"prompt": ["hello", "world"], "max_tokens": 40, "temperature": 0}
    schemas = [given | {"uniqueItems": True}, given | {"not": {"enum": [[]]}}]
    forms = [{"type": "json_schema", "json_schema": {"name": "it", "schema": schema}} for schema in schemas]
    made = [line(f"{number}", **body, response_format=form) for number, form in enumerate(forms)]
    (tmp_path / "in").write_text("\n".join([*made, line("cut", **body | {"max_tokens": 1}, response_format=forms[0])]))
    found = whole(llm, tmp_path / "in")
    last = [found[index]["response"]["body"]["warnings"][-1] for index in range(3)]
    assert last[:2] == [
        "The answer breaks its schema: $: uniqueItems",
        "The answer is checked: it keeps to its schema.",
    ]
    assert "not checked" in last[2]


def test_no_more_is_read_than_is_computed(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(lines(80)))
    fake: Any = llm.target
    most = 0

    def look(_: Any) -> None:
        nonlocal most
        most = max(most, len(llm.engine.scheduler))

    fake.before_forward = look
    num_read = 0

    def counted(asked: Iterator[BatchLine]) -> Iterator[BatchLine]:
        nonlocal num_read
        for each in asked:
            num_read += 1
            yield each

    num_answered, ahead = 0, 0
    with BatchFile(tmp_path / "in") as file:
        for _ in answers(llm, counted(file.requests(lambda _: True, "it", 4096))):
            num_answered += 1
            ahead = max(ahead, num_read - num_answered)
    assert num_answered == 80
    assert most <= 2 * MAX_BATCH and ahead <= 2 * MAX_BATCH + 1


@pytest.mark.parametrize("capacity", [3, 4, 6])
def test_a_queue_that_is_too_small_loses_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    """The engine refuses what exceeds `capacity`: 3 choices are the most that a request of these lines has."""
    (tmp_path / "in").write_text("\n".join(lines(40)))
    undisturbed = whole(llm, tmp_path / "in")
    enqueue, refused = llm.engine.enqueue, 0

    def bounded(request: Any) -> None:
        nonlocal refused
        if len(llm.engine.scheduler) + request.params.n > capacity:
            refused += 1
            raise QueueFullError("no room")
        enqueue(request)

    monkeypatch.setattr(llm.engine, "enqueue", bounded)
    assert whole(llm, tmp_path / "in") == undisturbed
    assert refused


def test_what_finds_no_room_even_alone_is_refused(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise QueueFullError("no room")

    monkeypatch.setattr(llm.engine, "enqueue", full)
    (tmp_path / "in").write_text("\n".join(line(f"{i}", prompt=[[1], [2]]) for i in range(9)))
    found = whole(llm, tmp_path / "in")
    assert [each["response"]["status_code"] for each in found.values()] == [429] * 9


def test_a_prompt_that_fails_ends_its_line_alone(llm: LLM, tmp_path: Path) -> None:
    fake: Any = llm.target

    def fail(batch: Any) -> None:
        if any((rows.cache.tokens or rows.token_ids)[0] == 5 for rows in batch):
            raise OSError("secret")

    fake.before_forward = fail
    made = [line(f"{i}", prompt=[[1], [5 if i % 3 == 0 else 2], [3]], temperature=0) for i in range(9)]
    (tmp_path / "in").write_text("\n".join(made))
    found = whole(llm, tmp_path / "in")
    assert [found[i]["response"]["status_code"] for i in range(9)] == [500, 200, 200] * 3
    assert "secret" not in json.dumps(found)
    assert all(cache.freed for cache in fake.caches)


def test_a_run_that_was_stopped_anywhere_ends_with_the_same_bytes(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(lines(30)))

    def until(stop: int, name: str) -> bytes | None:
        """Up to so many answers; the file of answers if that was all."""
        with BatchFile(tmp_path / "in") as file, BatchJournal(tmp_path / name, {}, file.num_lines) as journal:
            asked = file.requests(lambda index: not journal.has(index), "it", 4096)
            running = answers(llm, asked)
            for (index, answer), _ in zip(running, range(stop)):
                journal.add(index, answer)
            running.close()
            if journal.num_done < file.num_lines:
                return None
            journal.write_out(tmp_path / f"{name}.out")
        return (tmp_path / f"{name}.out").read_bytes()

    undisturbed = until(1000, "undisturbed")
    assert undisturbed is not None
    for step in (1, 4, 11):
        found, name, cuts = None, f"by {step}", 3
        while found is None:
            found = until(step, name)
            path = tmp_path / name
            if found is None and cuts:
                cuts -= 1
                path.write_bytes(path.read_bytes()[:-3])  # as a kill inside a line leaves it
        assert found == undisturbed


def test_a_failed_device_ends_the_run_and_is_no_answer(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = llm.target.forward
    calls = []

    def lost(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 3:
            raise DeviceError("The device has failed.")
        return forward(*arguments)

    monkeypatch.setattr(llm.target, "forward", lost)
    (tmp_path / "in").write_text("\n".join(lines(20)))
    found: list[Any] = []
    with BatchFile(tmp_path / "in") as file, pytest.raises(DeviceError, match="has failed"):
        found.extend(answers(llm, file.requests(lambda _: True, "it", 4096)))
    assert all("failed" not in json.dumps(answer) for answer in found)
