"""Whole generations with a target and a draft model: speed over plain decoding, and whether every bit is the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forerun.bench.gpu.device_time import synchronise
from forerun.bench.report import Table
from forerun.config import OFF, SamplingParams
from forerun.drafters.base import Drafter
from forerun.drafters.hybrid.hybrid import Hybrid
from forerun.drafters.model.draft_model import DraftModel
from forerun.drafters.model.draft_tree import DraftTree
from forerun.drafters.text.prompt_lookup import PromptLookup
from forerun.drafters.text.suffix import Suffix
from forerun.engine import LLM
from forerun.models import Model

Prompts = Sequence[Sequence[int]]
_HEADER = ["drafter", "tokens/s", "over plain", "tokens a step", "same tokens", "same log-probabilities"]


@dataclass(frozen=True, slots=True)
class Answers:
    """What a run gave.

    Attributes:
        tokens: by prompt. logprobs: by prompt, of each token.
        speed: tokens a second. length: tokens a forward of the target.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    speed: float
    length: float


def drafters(draft: Model) -> dict[str, Drafter]:
    """Those that are compared, by name."""
    return {
        "prompt-lookup": PromptLookup(),
        "suffix": Suffix(),
        "draft-model": DraftModel(draft),
        "draft-tree": DraftTree(draft),
        "hybrid of suffix and draft-model": Hybrid([Suffix(), DraftModel(draft)]),
    }


def speed_table(
    target: Model, draft: Model, prompts: Prompts, max_tokens: int, temperature: float, batch: int
) -> Table:
    """Every drafter beside plain decoding, K chosen by itself; drawn text with a seed, so that it can be compared."""
    seed = None if temperature == 0 else 1
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    plain = answers(_llm(target, None, batch), prompts, params, batch)
    rows = [["none", f"{plain.speed:.1f}", "1.00", f"{plain.length:.2f}", "", ""]]
    for name, drafter in drafters(draft).items():
        own = answers(_llm(target, drafter, batch), prompts, params, batch)
        same = [own.tokens == plain.tokens, own.logprobs == plain.logprobs]
        rows.append(
            [
                name,
                f"{own.speed:.1f}",
                f"{own.speed / plain.speed:.2f}",
                f"{own.length:.2f}",
                *("yes" if each else "NO" for each in same),
            ]
        )
    how = (
        f"temperature {temperature:g}, batch {batch}, {len(prompts)} prompts of held-out code, {max_tokens} tokens each"
    )
    return Table(f"{target.name} ({target.kernels}) with {draft.name}: {how}", _HEADER, rows)


def _llm(target: Model, drafter: Drafter | None, batch: int) -> LLM:
    """No prompt is taken over from another drafter's run."""
    return LLM(target, drafter, max_batch=batch, prefix_reuse=OFF)


def answers(llm: LLM, prompts: Prompts, params: SamplingParams, batch: int) -> Answers:
    """Generate for all prompts, so many at a time. The first ones are generated twice, and timed once."""
    llm.generate(list(prompts[:batch]), params)
    tokens: list[list[int]] = []
    logprobs: list[list[float]] = []
    steps = 0
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        for each in llm.generate(list(prompts[first : first + batch]), params):
            tokens.append(list(each.token_ids))
            logprobs.append([entry.logprob for entry in each.logprobs or ()])
            steps += each.stats.num_forwards
    elapsed = time.perf_counter() - start
    count = sum(map(len, tokens))
    return Answers(tokens, logprobs, count / elapsed, count / max(1, steps))


def transformers_table(target: Any, draft: Any, prompts: Prompts, max_tokens: int) -> Table:
    """Transformers' own generation with the same pair, greedy, one prompt at a time.

    target, draft: of Transformers, with its default attention, on the device.
    """
    runs: Mapping[str, dict[str, Any]] = {"generate": {}, "assisted generation": {"assistant_model": draft}}
    rows: list[list[str]] = []
    plain = 0.0
    for name, options in runs.items():
        speed = _transformers_speed(target, prompts, max_tokens, options)
        plain = plain or speed
        rows.append([name, f"{speed:.1f}", f"{speed / plain:.2f}"])
    return Table("Transformers with the same pair, greedy, batch 1", ["", "tokens/s", "over generate"], rows)


def _transformers_speed(target: Any, prompts: Prompts, max_tokens: int, options: dict[str, Any]) -> float:
    elapsed, count = 0.0, 0
    for number, prompt in enumerate((prompts[0], *prompts)):
        given = torch.tensor([list(prompt)], device=target.device)
        start = time.perf_counter()
        out = target.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, min_new_tokens=max_tokens,
            do_sample=False, pad_token_id=0, **options,
        )  # fmt: skip
        synchronise(given.device)
        if number:  # the first warms up
            elapsed += time.perf_counter() - start
            count += out.shape[1] - given.shape[1]
    return count / elapsed
