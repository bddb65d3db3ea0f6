"""What every drafter drafts for the bundled target, and what the target says with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from forerun import LLM, SamplingParams
from forerun.utils import workloads
from golden.processor import BITS, common, computing_with, torch_key
from golden.sources import digest
from heads import text_of

_NUM_NEW, _K = 24, 5
REQUESTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=_NUM_NEW, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=_NUM_NEW, ignore_eos=True),
}
_TIMED = {"hybrid"}
"""Drafters whose drafts depend on measured times."""
_FITTED = {"mtp"}
"""Those whose head is fitted here, by sums whose last bits depend on the processor."""


@cache
def _plain() -> LLM:
    return LLM("bundled", None, prefix_reuse="off")


@cache
def _prompts() -> list[list[int]]:
    tokenizer: Any = _plain().tokenizer
    found = [tokenizer(case.prompt)["input_ids"] for case in workloads.load_workload("code", 4)]
    return sorted(found, key=len)[:2]


@cache
def _reference(how: str) -> list[list[int]]:
    return _said(_plain(), how)


def _said(llm: LLM, how: str, prediction: list[list[int]] | None = None) -> list[list[int]]:
    params = [REQUESTS[how]] * len(_prompts())
    if prediction is not None:
        params = [replace(each, prediction=said) for each, said in zip(params, prediction, strict=True)]
    results: Any = llm.generate(_prompts(), params)
    return [each.token_ids for each in results]


def drafter(name: str) -> str:
    """Return the text of a drafter."""
    return "\n".join([f"# {name}", *_lines(name)]) + "\n"


def _lines(name: str) -> Iterator[str]:
    # without prefixes that another test has computed, which a head has no states of
    llm = LLM(_plain().target, text_of(name), num_draft_tokens=_K, tokenizer=_plain().tokenizer, prefix_reuse="off")
    drafting: Any = llm.drafter
    drafts: list[Any] = []
    draft = drafting.draft

    def noted(*arguments: Any, **named: Any) -> Any:
        found = draft(*arguments, **named)
        drafts.extend(found)
        return found

    drafting.draft = noted
    instructions = common()
    for how in REQUESTS:
        drafts.clear()
        reads = drafting.traits.reads_prediction
        with computing_with(instructions):
            answers = _said(llm, how, [_wrong(each) for each in _reference(how)] if reads else None)
        yield ""
        yield f"## {how}"
        for tokens in answers:
            yield f"tokens = {' '.join(map(str, tokens))}"
        if name not in _TIMED | _FITTED:
            count = f"{len(drafts)} of {sum(map(len, drafts))} tokens"
            yield f"{BITS}drafts, {instructions}, {torch_key()} = {count}, {_digest(drafts)}"


def _wrong(tokens: list[int]) -> list[int]:
    """Return a prediction that is right but for its middle."""
    middle = len(tokens) // 2
    return [*tokens[:middle], 7, *tokens[middle + 2 :]]


def _digest(drafts: list[Any]) -> str:
    found = [(list(map(int, each.token_ids)), list(map(int, each.parents))) for each in drafts]
    return digest(repr(found).encode())
