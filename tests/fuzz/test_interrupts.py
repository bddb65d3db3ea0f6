"""KeyboardInterrupt at a random line, then the same engine goes on: the right tokens or our error, and no hang."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, strategies as st

from doubles import FakeModel, PieceTokenizer
from families import VOCAB, make_family
from forerun import LLM, Drafter, SamplingParams
from forerun.drafters import (
    Block,
    CrossVocab,
    DraftModel,
    DraftTree,
    Eagle,
    EagleTree,
    EarlyExit,
    Hybrid,
    Lookahead,
    Medusa,
    MedusaTree,
    Prediction,
    PromptLookup,
    Recycling,
    Rest,
    Staged,
    Suffix,
)
from forerun.drafters.lookup.rest.build import build_index
from forerun.engine import Engine, StepOutput
from forerun.errors import ForerunError, InterruptedRequestError
from forerun.models import Model, load_model
from forerun.utils.vocabulary import fingerprint
from fuzzing import examples
from heads import fitted_block, fitted_head
from medusa_heads import random_medusa
from pool_integrity import check_integrity
from pooled import PooledModel

from .interrupting import Hang, Interrupts


class Letters(PieceTokenizer):
    """A token for each letter, with what drafters ask a tokenizer for."""

    all_special_ids = ()

    def __init__(self, letters: str) -> None:
        super().__init__([letter.encode() for letter in letters])
        self.added_tokens_decoder: dict[int, str] = {}

    def get_vocab(self) -> dict[str, int]:
        return {piece.decode(): token_id for token_id, piece in enumerate(self.pieces)}


LETTERS = "".join(chr(97 + i) for i in range(11)) + "".join(chr(0x100 + i) for i in range(VOCAB - 11))
TOKENIZER = Letters(LETTERS[:11])
OTHERS = Letters(LETTERS[10::-1])
MANY = Letters(LETTERS)
LIMIT = 60
"""Seconds after which something hangs."""
LINES = 200_000
"""Lines of forerun that nothing here needs."""


@cache
def llama() -> Model:
    return load_model(make_family("llama", Path(mkdtemp())), "float32")


@cache
def index() -> Path:
    """Of what the target says."""
    path = Path(mkdtemp()) / "index"
    texts = [FakeModel(order=2, num_contexts=13).greedy(prompt, 20) for prompt in PROMPTS]
    build_index(path, texts, 11, fingerprint=fingerprint(TOKENIZER))
    return path


def target(kind: str) -> Any:
    if kind == "small pool":
        return PooledModel(9, order=2, num_contexts=13)
    return llama() if kind in OF_LLAMA else FakeModel(order=2, num_contexts=13)


def draft() -> FakeModel:
    """Agrees with the target in most contexts."""
    model = FakeModel(order=2, num_contexts=13)
    model.table[::4] = model.table[::4].roll(1, -1)
    return model


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "draft-model": lambda: DraftModel(draft()),
    "draft-tree": lambda: DraftTree(draft()),
    "staged": lambda: Staged(draft(), Suffix(share=True)),
    "prompt-lookup": lambda: PromptLookup(min_ngram=1),
    "suffix": Suffix,
    "shared suffix": lambda: Suffix(share=True, max_shared_tokens=40),
    "lookahead": Lookahead,
    "recycling": Recycling,
    "shared recycling": lambda: Recycling(share=True),
    "prediction": Prediction,
    "hybrid": lambda: Hybrid([Suffix(share=True), DraftModel(draft())]),
    "rest": lambda: Rest(index(), min_ngram=1, max_ngram=4),
    "cross-vocab": lambda: CrossVocab(draft(), tokenizer=OTHERS),
    "cross-vocab by tokens": lambda: CrossVocab(draft(), "draft-tree", "tokens", tokenizer=OTHERS),
    "small pool": lambda: None,
    "llama": lambda: None,
    "early-exit": lambda: EarlyExit(1),
    "merged hybrid": lambda: Hybrid([Suffix(), Recycling(share=True)], "merge"),
    "eagle": lambda: Eagle(fitted_head(llama(), PROMPTS)),
    "eagle-tree": lambda: EagleTree(fitted_head(llama(), PROMPTS)),
    "block": lambda: Block(fitted_block(llama(), PROMPTS)),
    "medusa": lambda: Medusa(random_medusa(llama())),
    "medusa-tree": lambda: MedusaTree(random_medusa(llama())),
}
OF_LLAMA = ("llama", "early-exit", "eagle", "eagle-tree", "block", "medusa", "medusa-tree")
"""Those whose target is a real model."""
PROMPTS = [[1, 2, 3], [4, 5, 4, 5, 4], [6, 7]]
KINDS = [
    {"temperature": 0.0},
    {"seed": 3},
    {"temperature": 0.0, "frequency_penalty": 0.5, "stop": ("k",)},
]


def requests(drafter: Drafter | None) -> list[tuple[list[int], SamplingParams]]:
    params = [SamplingParams(max_tokens=12, tenant="t", **kind) for kind in KINDS]
    if drafter is not None and drafter.traits.reads_prediction:
        params = [replace(each, prediction=[1, 2, 3] * 4) for each in params]
    return list(zip(PROMPTS, params))


def open_llm(kind: str, k: int | str) -> LLM:
    drafter = DRAFTERS[kind]()
    tokenizer = MANY if kind in OF_LLAMA else TOKENIZER
    return LLM(target(kind), drafter, num_draft_tokens=k if drafter else 0, tokenizer=tokenizer, seed=0)


@cache
def plain(kind: str, index: int) -> tuple[str, list[int]]:
    llm = open_llm("llama" if kind in OF_LLAMA else "none", 0)
    prompt, params = requests(None)[index]
    result: Any = llm.generate(prompt, params)
    return result.text, result.token_ids


def work(kind: str, llm: LLM, interrupts: Interrupts) -> str | ForerunError | None:
    """A stream, between whose chunks another call is interrupted. What the stream gave; None if it was interrupted."""
    (first, *others) = requests(llm.drafter)
    text = ""
    try:
        with interrupts:
            stream = llm.stream(*first)
            text += next(stream).text
            interrupts.stream_open = True
            results: Any = llm.generate([prompt for prompt, _ in others], [params for _, params in others])
        assert [result.token_ids for result in results] == [plain(kind, 1)[1], plain(kind, 2)[1]]
    except KeyboardInterrupt:
        if not interrupts.stream_open:
            return None
    try:
        with Interrupts(limit=LINES):
            return text + "".join(chunk.text for chunk in stream)
    except ForerunError as error:
        return error


@contextmanager
def time_limit() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang("time is up")

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


@cache
def num_lines(kind: str, k: int | str) -> int:
    counting = Interrupts()
    work(kind, open_llm(kind, k), counting)
    return counting.count


def interrupts_at(kind: str, k: int | str, seed: int) -> Interrupts:
    """Any of the lines, each as likely as the others: small seeds must not mean the first of them."""
    return Interrupts(random.Random(f"{kind} {k} {seed}").randrange(num_lines(kind, k)))


def assert_nothing_left(llm: LLM) -> None:
    assert not llm.engine.has_work
    assert not llm.shared._inboxes
    assert all(cache.freed or not cache.nbytes for cache in getattr(llm.target, "caches", ()))
    if llm.target.pool is not None:
        check_integrity(llm.target.pool)
    for drafter in parts(llm.drafter):
        for name, value in vars(drafter).items():
            if isinstance(value, dict) and any(type(key).__name__ == "Sequence" for key in value):
                raise AssertionError(f"{type(drafter).__name__}.{name} still holds {value}")


def parts(drafter: Any) -> list[Any]:
    if drafter is None:
        return []
    inner = [source.drafter for source in getattr(drafter, "_sources", [])]
    if hasattr(drafter, "_inner"):
        inner.append(drafter._inner)
    models = [drafter.drafting_model] if hasattr(drafter, "drafting_model") else []
    return [drafter, *models, *(part for each in inner for part in parts(each))]


GIVEN: Any = {"seed": st.integers(0, 2**32), "k": st.sampled_from([4, "auto"])}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", DRAFTERS)
@examples(2)
@given(**GIVEN)
def test_another_call_is_interrupted(kind: str, seed: int, k: int | str) -> None:
    llm = open_llm(kind, k)
    interrupts = interrupts_at(kind, k, seed)
    with time_limit():
        streamed = work(kind, llm, interrupts)
        assert streamed is None or isinstance(streamed, InterruptedRequestError) or streamed == plain(kind, 0)[0], (
            interrupts.where
        )
        for index, (prompt, params) in enumerate(requests(llm.drafter)):
            result: Any = llm.generate(prompt, params)
            assert (result.text, result.token_ids) == plain(kind, index), interrupts.where
        assert_nothing_left(llm)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", DRAFTERS)
@examples(2)
@given(**GIVEN)
def test_a_step_is_interrupted(kind: str, seed: int, k: int | str) -> None:
    """No request is lost: each has one result, which is right, or the error that says it was interrupted."""
    llm = open_llm(kind, k)
    interrupts = interrupts_at(kind, k, seed)
    ids = [llm.engine.add(prompt, params) for prompt, params in requests(llm.drafter)]
    last: dict[int, StepOutput] = {}
    with time_limit():
        try:
            with interrupts:
                run(llm.engine, last)
        except KeyboardInterrupt:
            with Interrupts(limit=LINES):
                run(llm.engine, last)
        for index, request_id in enumerate(ids):
            output = last[request_id]
            if output.choice is None:
                assert isinstance(output.error, InterruptedRequestError), interrupts.where
            else:
                assert output.choice.token_ids == plain(kind, index)[1], interrupts.where
        assert_nothing_left(llm)


def run(engine: Engine, last: dict[int, StepOutput]) -> None:
    while engine.has_work:
        for output in engine.step():
            assert output.request_id not in last
            if output.choice is not None or output.error is not None:
                last[output.request_id] = output
