"""What vLLM calls: drafts by the rows' own tokens, whichever row they are in, and never an error.

That vLLM itself runs it is tried by tests/integration/test_vllm_bridge.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.drafters import PromptLookup
from forerun.drafters.lookup.rest.build import build_index
from forerun.errors import ConfigError, DrafterError
from forerun.integrations import versions as tried, vllm
from forerun.integrations.vllm import PIECE, Proposer, Tracker, first_path
from forerun.types import Draft, Sequence

K, CONTEXT, VOCABULARY = 4, 96, 12


def config(k: int = K, context: int = CONTEXT, max_num_seqs: int = 4, **options: Any) -> Any:
    """As much of vLLM's configuration as is read."""
    model = SimpleNamespace(max_model_len=context, model="target", tokenizer="none", get_vocab_size=lambda: VOCABULARY)
    return SimpleNamespace(
        model_config=model,
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        additional_config={"forerun": options} if options else {},
    )


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "untried", lambda program: None)


class Worker:
    """Requests in rows, as vLLM's worker has them. The target's text is `texts`; drafts are accepted as far as they
    agree with it."""

    def __init__(self, proposer: Proposer, texts: list[list[int]], prompts: list[int], context: int = CONTEXT) -> None:
        self.proposer, self.texts, self.lengths = proposer, texts, list(prompts)
        self.rows = np.zeros((len(texts), context), np.int32)
        self.running = list(range(len(texts)))
        self.drafts: dict[int, list[int]] = {}
        self.steps = 0

    def step(self, waiting: set[int] = frozenset()) -> dict[int, list[int]]:
        """One step; the requests in `waiting` compute a part of their prompt. Drafts by request."""
        sampled: list[list[int]] = []
        for request in self.running:
            text, new = self.texts[request], list[int]()
            if request not in waiting:
                for drafted in [*self.drafts.get(request, []), -1]:
                    new.append(text[self.lengths[request]])
                    self.lengths[request] += 1
                    if new[-1] != drafted or self.lengths[request] == len(text):
                        break
            sampled.append(new)
        return self.ask(sampled)

    def ask(self, sampled: list[list[int]]) -> dict[int, list[int]]:
        for row, request in enumerate(self.running):
            self.rows[row] = -1  # what lies behind a row's tokens is old
            self.rows[row, : self.lengths[request]] = self.texts[request][: self.lengths[request]]
        counts = np.array([self.lengths[request] for request in self.running] + [0] * 3, np.int32)
        proposed = self.proposer.propose(sampled, counts, self.rows, slot_mappings=None)
        assert len(proposed) == len(self.running)
        self.steps += 1
        self.drafts = dict(zip(self.running, proposed))
        return self.drafts

    def end(self) -> None:
        """Requests whose text is whole leave, and the last row takes the place of each."""
        for request in [each for each in self.running if self.lengths[each] == len(self.texts[each])]:
            last = self.running.pop()
            if last != request:
                self.running[self.running.index(request)] = last


def repeating(seed: int, length: int = 60) -> list[int]:
    drawn = random.Random(seed)
    block = [drawn.randrange(VOCABULARY) for _ in range(9)]
    return (block * (length // 9 + 1))[:length]


@pytest.mark.parametrize("drafter", ["suffix", "prompt-lookup", "hybrid:sources=suffix+prompt-lookup"])
def test_requests_that_come_and_go(drafter: str) -> None:
    texts = [repeating(seed, 40 + 7 * seed) for seed in range(4)]
    worker = Worker(Proposer(config(drafter=drafter)), texts, [12] * 4)
    tokens = sum(len(text) - 12 for text in texts)
    rows = 0
    while worker.running:
        rows += len(worker.running)
        for request, draft in worker.step().items():
            assert len(draft) <= K
            length = worker.lengths[request]
            rest = texts[request][length : length + len(draft)]
            assert draft[: len(rest)] == rest or length < 22  # until the block has come twice
        worker.end()
    assert tokens / rows > 3  # of K + 1 at most


def test_drafts_are_those_of_the_rows_tokens() -> None:
    """Whatever has been in a row before: each draft is what a fresh drafter gives."""
    texts = [repeating(seed) for seed in range(3)]
    worker = Worker(Proposer(config(drafter="prompt-lookup")), texts, [20, 20, 20])
    drawn = random.Random(1)
    for _ in range(12):
        drawn.shuffle(worker.running)
        drafts = worker.step(waiting={request for request in worker.running if drawn.random() < 0.2})
        for request, draft in drafts.items():
            fresh = PromptLookup()
            sequence = Sequence(0, texts[request][: worker.lengths[request]], 0, None)  # type: ignore[arg-type]
            fresh.start(sequence)
            if draft:
                assert draft == fresh.draft([sequence], [K])[0].ids
        worker.end()
    assert worker.steps == 12


def test_two_rows_with_the_same_tokens() -> None:
    """They part later, and neither sees what the other has become."""
    texts = [repeating(1, 30) + [1] * 20, repeating(1, 30) + [2] * 20]
    worker = Worker(Proposer(config()), texts, [24, 24])
    while worker.running:
        worker.step()
        for request in worker.running:
            if 34 < worker.lengths[request] < 48:
                draft = worker.drafts[request]
                assert set(draft) == {1 + request}
        worker.end()


def test_steps_that_nobody_was_told_of() -> None:
    texts = [repeating(2)]
    proposer = Proposer(config())
    worker = Worker(proposer, texts, [20])
    worker.step()
    worker.lengths[0] += 7
    (draft,) = worker.step().values()
    assert draft == texts[0][worker.lengths[0] : worker.lengths[0] + K]
    assert len(proposer._tracker) == 1


def test_bounds() -> None:
    text = [1, 2] * 48
    proposer = Proposer(config(max_num_seqs=2))
    worker = Worker(proposer, [text], [CONTEXT - 4])
    assert worker.step()[0] == text[CONTEXT - 3 : CONTEXT - 1]  # the last token is the target's
    assert Worker(proposer, [text], [CONTEXT - 1]).step()[0] == []
    for seed in range(9):
        Worker(proposer, [repeating(seed)], [20]).step()
    assert len(proposer._tracker) == 2


def test_nothing_sampled_nothing_drafted() -> None:
    worker = Worker(Proposer(config()), [repeating(1)], [30])
    assert worker.step(waiting={0}) == {0: []}
    assert worker.step()[0] != []


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    update = PromptLookup._read
    monkeypatch.setattr(
        PromptLookup, "_read", lambda self, sequence, end: (read.append(end), update(self, sequence, end))
    )
    text = repeating(3, 4 * PIECE)
    worker = Worker(Proposer(config(context=8 * PIECE, drafter="prompt-lookup")), [text], [3 * PIECE], 8 * PIECE)
    drafts = [worker.step()[0] for _ in range(5)]
    assert [bool(draft) for draft in drafts] == [False, False, False, True, True]
    assert read[:3] == [PIECE, 2 * PIECE, 3 * PIECE]


def test_trees_give_their_best_path(tmp_path: Path) -> None:
    build_index(tmp_path / "i", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7]], VOCABULARY)
    proposer = Proposer(config(drafter=f"rest:index={tmp_path / 'i'}"))
    worker = Worker(proposer, [[9, 1, 2, 3, 4, 5, 6]], [3])
    assert worker.step()[0] == [4, 5]
    assert first_path(Draft([4, 7, 5, 6], [-1, -1, 0, 2], num_candidates=3)) == [0, 2]
    assert first_path(Draft.empty()) == []


def test_an_error_is_an_empty_draft_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(Proposer(config(drafter="prompt-lookup")), [repeating(4), repeating(5)], [20, 20])
    with monkeypatch.context() as broken:
        broken.setattr(PromptLookup, "_copy", lambda *_: 1 / 0)
        assert [worker.step() for _ in range(3)] == [{0: [], 1: []}] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ZeroDivisionError" in caplog.text
    assert all(worker.step().values())


@pytest.mark.parametrize(
    ("drafter", "reason"),
    [
        ("draft-model", "is a model drafter"),
        ("eagle", "is a head drafter"),
        ("recycling", "is a target drafter"),
        ("prediction", "reads a prediction"),
        ("hybrid", "is a model drafter .staged."),
        ("hybrid:sources=suffix+lookahead", "lookahead"),
        ("owner/model", "loads a model"),
        ("suffix:num_draft_tokens=3", "Leave out num_draft_tokens"),
        ("sufix", "Did you mean suffix"),
        ("suffix:size=3", "no option 'size'"),
    ],
)
def test_drafters_that_cannot_draft_here(drafter: str, reason: str) -> None:
    with pytest.raises((DrafterError, ConfigError), match=reason):
        Proposer(config(drafter=drafter))


def test_options_that_are_none() -> None:
    with pytest.raises(ConfigError, match="no option 'draughter' here, but: drafter, min_acceptance_prob"):
        Proposer(config(draughter="suffix"))
    with pytest.raises(ConfigError, match="min_acceptance_prob"):
        Proposer(config(min_acceptance_prob=2))
    wrong = config()
    wrong.additional_config = {"forerun": "suffix"}
    with pytest.raises(ConfigError, match="must be an object"):
        Proposer(wrong)


def test_another_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(tried, "version", lambda package: "0.99.1")
    Proposer(config())
    assert "vLLM 0.99.1 has not been tried with forerun; versions tried: 0.32. pip install vllm" in caplog.text
    broken = config()
    del broken.scheduler_config
    with pytest.raises(ConfigError, match=r"scheduler_config.*0\.99\.1"):
        Proposer(broken)

    def missing(package: str) -> str:
        raise tried.PackageNotFoundError(package)

    monkeypatch.setattr(tried, "version", missing)
    with pytest.raises(ConfigError, match=r"vLLM is not installed .* pip install vllm==0\.32\.0"):
        Proposer(config())


def test_a_row_is_compared_before_it_is_trusted() -> None:
    tracker = Tracker(4, CONTEXT)
    row = np.arange(20, dtype=np.int32)
    tracker.keep(tracker.new(row, 18))
    other = row.copy()
    other[2] = 7  # the last tokens are the same
    assert tracker.take(other, 19, 1) is None
    assert tracker.take(row, 19, 1) is not None
    assert tracker.take(row, 19, 1) is None and len(tracker) == 0
