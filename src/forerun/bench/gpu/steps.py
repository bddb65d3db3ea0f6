"""Forwards by the number of rows, as shares of what reading the weights once takes."""

from __future__ import annotations

import torch

from forerun.bench.gpu.device_time import seconds
from forerun.bench.report import Table
from forerun.config import PREFILL_CHUNK
from forerun.models import Model, Rows
from forerun.models.base import number_format

ROWS = (1, 9, 16, 17, 32, 64, 128)
ROUNDS = 20
"""Times that each is timed."""
_BITS = {"bfloat16": 16, "float32": 32, "int8": 8, "int4": 5}
"""Of a weight, the scales and minima of groups included."""


def weight_bytes(model: Model) -> float:
    """Bytes that a step reads of the weights, about. A tied embedding is read as the output layer; another is not."""
    return model.num_parameters * _BITS[number_format(model)] / 8


def step_times(model: Model, bandwidth: float, context: int) -> Table:
    """Forwards of so many rows of one sequence after `context` positions.

    bandwidth: of a copy, bytes a second.
    """
    ideal = weight_bytes(model) / bandwidth
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
