"""Whole generations with a target and a draft model: speed over plain decoding, and whether every bit is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from forerun.config import OFF, PREFILL_CHUNK, SamplingParams
from forerun.drafters import DraftModel, DraftTree
from forerun.drafters.base import Drafter
from forerun.drafters.hybrid.hybrid import Hybrid
from forerun.drafters.lookup.prompt_lookup import PromptLookup
from forerun.drafters.lookup.suffix import Suffix
from forerun.engine import LLM
from forerun.lab.bench.measure import interleave, timed
from forerun.lab.bench.peers.worker import generate_greedily
from forerun.lab.bench.tables import Table
from forerun.models import Model, Rows
from forerun.models.base import number_format

_COPIED = 1 << 31
"""Bytes of a copy on a GPU: many times what its caches hold."""
_COPIED_HERE = 1 << 26


def seconds(run: Callable[[], object], device: torch.device, rounds: int = 20, warmup: int = 3) -> float:
    """Return the median wall-clock seconds of `run` until all of its work on the device is done."""

    def finished() -> None:
        run()
        synchronise(device)

    synchronise(device)
    return median(each.seconds for each in interleave({"": finished}, rounds, warmup)[""])


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes a second, read and written together, of a copy from the device's memory to itself."""
    size = _COPIED if device.type == "cuda" else _COPIED_HERE
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)  # zeros may be faster than data
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


Prompts = Sequence[Sequence[int]]
_HEADER = ["drafter", "tokens/s", "over plain", "tokens a step", "same tokens", "same log-probabilities"]


def speed_table(
    target: Model, draft: Model, prompts: Prompts, max_tokens: int, temperature: float, batch: int
) -> Table:
    """Compare every drafter with plain decoding, K chosen automatically; sampled text has a seed, so that it can be
    compared."""
    seed = None if temperature == 0 else 1
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True, logprobs=0)
    rows: list[list[str]] = []
    first: list[Any] = []
    plain_speed = 0.0
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "prompt-lookup": PromptLookup(),
        "suffix": Suffix(),
        "draft-model": DraftModel(draft),
        "draft-tree": DraftTree(draft),
        "hybrid of suffix and draft-model": Hybrid([Suffix(), DraftModel(draft)]),
    }
    for name, drafter in drafters.items():
        llm = LLM(target, drafter, max_batch=batch, prefix_reuse=OFF)  # no prompt is taken over from another's run
        llm.generate(list(prompts[:batch]), params)  # warms up
        run = timed(lambda llm=llm: llm.generate(list(prompts), params))  # type: ignore[misc]
        answers: Any = run.value
        first = first or answers
        num_tokens = sum(len(each.token_ids) for each in answers)
        plain_speed = plain_speed or num_tokens / run.seconds
        rows.append(
            [
                name,
                f"{num_tokens / run.seconds:.1f}",
                f"{num_tokens / run.seconds / plain_speed:.2f}",
                f"{num_tokens / sum(each.stats.num_forwards for each in answers):.2f}",
                *(
                    "yes"
                    if [getattr(each, kept) for each in answers] == [getattr(each, kept) for each in first]
                    else "NO"
                    for kept in ("token_ids", "logprobs")
                ),
            ]
        )
    how = (
        f"temperature {temperature:g}, batch {batch}, {len(prompts)} prompts of held-out code, {max_tokens} tokens each"
    )
    return Table(f"{target.name} ({target.kernels}) with {draft.name}: {how}", _HEADER, rows)


def transformers_table(target: Any, draft: Any, prompts: Prompts, max_tokens: int) -> Table:
    """Measure Transformers' own generation with the same pair, greedy, one prompt at a time.

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
    settings = {"min_new_tokens": max_tokens, **options}
    runs = [generate_greedily(target, list(prompt), max_tokens, **settings) for prompt in (prompts[0], *prompts)]
    return sum(len(tokens) for tokens, *_ in runs[1:]) / sum(elapsed for *_, elapsed in runs[1:])  # the first warms up


ROWS = (1, 9, 16, 17, 32, 64, 128)
ROUNDS = 20
"""Times that each is timed."""
_BITS = {"bfloat16": 16, "float32": 32, "int8": 8, "int4": 5}
"""Of a weight, the scales and minima of groups included."""


def step_times(model: Model, bandwidth: float, context: int) -> Table:
    """Time forwards of several numbers of rows of one sequence after `context` positions.

    bandwidth: of a copy, bytes a second.
    """
    # a tied embedding is read as the output layer; another is not, and is counted all the same
    ideal = model.num_parameters * _BITS[number_format(model)] / 8 / bandwidth
    times = {rows: _forward_seconds(model, rows, context) for rows in ROWS}
    rows = [
        [str(count), f"{1000 * each:.3f}", f"{ideal / each:.2f}", f"{each / times[16]:.2f}"]
        for count, each in times.items()
    ]
    title = (
        f"{model.name} ({number_format(model)}, kernels {model.kernels}), a forward after {context} positions; reading "
        f"its weights once at the bandwidth of a copy takes {1000 * ideal:.3f} ms"
    )
    return Table(title, ["rows", "ms", "share of that bandwidth", "over 16 rows"], rows)


def _forward_seconds(model: Model, count: int, context: int) -> float:
    cache = model.new_cache()
    tokens = torch.randint(0, model.vocab_size, (context + count,), generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, context, PREFILL_CHUNK):
        part = tokens[start : min(context, start + PREFILL_CHUNK)]
        model.forward([Rows(cache, part, num_logits=0)])
        cache.commit(range(len(part)))

    def run() -> None:
        model.forward([Rows(cache, tokens[context:])])
        cache.drop()

    try:
        return seconds(run, model.device, ROUNDS)
    finally:
        cache.free()
