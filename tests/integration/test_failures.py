"""A forward or a drafter that fails in the middle of a batch: whoever goes on gets the bits of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from families import make_family
from forerun import LLM, Block, Eagle, EagleTree, Medusa, SamplingParams
from forerun.models import Forward, Model, Rows, load_model, load_tokenizer
from heads import FITTED

HEADS: dict[str, Any] = {"eagle": Eagle, "eagle-tree": EagleTree, "block": Block, "medusa": Medusa}
DRAFTERS = ["draft-model", "draft-tree", "staged", *HEADS, "early-exit", "suffix", "recycling", "hybrid"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, logprobs=2, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=14, logprobs=2, ignore_eos=True),
]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 8, 1, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8, 8]]


def failing_cases(drafters: Sequence[str], but: Sequence[str] = ()) -> list[Any]:
    """Each drafter with a failure before or after the work, which one changes from row to row; the other is slow."""
    return [
        pytest.param(name, after, marks=[] if after == bool(number % 2) else pytest.mark.slow)
        for number, name in enumerate(name for name in drafters if name not in but)
        for after in (False, True)
    ]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, family_folder: Callable[[str], Path]) -> Path:
    """A draft model that agrees with the target now and then: another seed, the target's tokenizer."""
    folder = make_family("llama", tmp_path_factory.mktemp("draft"), seed=1)
    load_tokenizer(family_folder("llama")).save_pretrained(folder)
    return folder


@pytest.fixture
def target(family_folder: Callable[[str], Path]) -> Model:
    return load_model(family_folder("llama"), "float32")


@pytest.fixture(scope="module")
def plain(family_folder: Callable[[str], Path], draft: Path) -> list[Any]:
    """What plain decoding says, undisturbed, computed by a model that no test touches."""
    folder = family_folder("llama")
    return answers(open_llm(load_model(folder, "float32"), load_tokenizer(folder), None, draft))


def open_llm(target: Model, tokenizer: Any, drafter: str | None, draft: Path) -> LLM:
    spec: Any = drafter
    if drafter in ("draft-model", "draft-tree", "staged"):
        spec = f"{drafter}:model={draft}"
    elif drafter == "hybrid":
        spec = f"hybrid:sources=suffix+{draft}"
    elif drafter in HEADS:
        spec = HEADS[drafter](FITTED[drafter.removesuffix("-tree")](target, PROMPTS))
    return LLM(target, spec, num_draft_tokens=6 if drafter else 0, tokenizer=tokenizer)


def answers(llm: LLM) -> list[Any]:
    """Tokens and their log-probabilities, to the bit."""
    results: Any = llm.generate([prompt for prompt in PROMPTS for _ in PARAMS], PARAMS * len(PROMPTS))
    return [(result.token_ids, result.logprobs) for result in results]


def failing(model: Any, calls: Sequence[int], after: bool, monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Let these calls of a method fail, of those for several sequences, before or after the work is done.

    A sequence that fails alone would end. Returns the numbers of the calls that failed.
    """
    inner, failed, count = getattr(model, name), [], 0

    def forward(batch: Sequence[Rows], *rest: Any) -> Forward:
        nonlocal count
        count += len(batch) > 1
        fails = len(batch) > 1 and count in calls
        result = inner(batch, *rest) if after or not fails else None
        if fails:
            failed.append(count)
            raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(model, name, forward)
    return failed


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("drafter", "after"), failing_cases(DRAFTERS))
def test_a_target_forward_that_fails(
    drafter: str,
    after: bool,
    plain: list[Any],
    target: Model,
    draft: Path,
    family_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer(family_folder("llama"))
    llm = open_llm(target, tokenizer, drafter, draft)
    failed = failing(target, (1, 5, 9), after, monkeypatch, "forward")
    assert answers(llm) == plain
    assert len(failed) == 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("drafter", "after"), failing_cases(DRAFTERS, but=("suffix", "recycling")))
def test_a_drafters_forward_that_fails(
    drafter: str,
    after: bool,
    plain: list[Any],
    target: Model,
    draft: Path,
    family_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer(family_folder("llama"))
    llm = open_llm(target, tokenizer, drafter, draft)
    model: Any = target
    if drafter != "early-exit":
        source: Any = llm.drafter if drafter != "hybrid" else llm.drafter._sources[1].drafter
        model = source.model
    name = {"early-exit": "forward_first", "block": "draft"}.get(drafter, "forward")
    calls = (2, 5, 8) if drafter == "block" else (2, 8, 16)  # all of a draft is one call
    failed = failing(model, calls, after, monkeypatch, name)
    assert answers(llm) == plain
    assert len(failed) == 3
