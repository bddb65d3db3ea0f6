"""The machine on which forerun runs, measured: bandwidth, arithmetic, and what layers, rows and steps take beside them.

The two bundled models, of different depth, are timed in the engine. What their forwards take beyond the roofline is
shared between layers and rows; what their steps take beyond the forwards is the engine's and the drafter's part.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET, DEFAULT_DTYPE, QUANTISATIONS, UNQUANTIZED, SamplingParams
from forerun.drafters import Binding, make_drafter
from forerun.engine.step_times import step_costs
from forerun.errors import ConfigError
from forerun.kernels.cpu import native
from forerun.kernels.cpu.prefetching import reader
from forerun.lab.bench.measure import timed
from forerun.lab.bench.replay import MedianCurve, target_costs
from forerun.lab.plan.machines import Machine, Overheads, Placed
from forerun.lab.plan.options import PlanOptions
from forerun.lab.plan.shapes import model_shape
from forerun.models import LanguageModel, find_tokenizer, load_model
from forerun.speculation.predictor import CostsByK
from forerun.utils import workloads
from forerun.utils.device import is_quick_at_bfloat16
from forerun.utils.machine import model as processor_name, total_memory

_SIZES = (4, 16, 64, 256)
"""MiB at which the bandwidth is measured: caches are faster than memory."""
_SIDE = 1024
"""Of the matrices by which arithmetic is measured."""
_ROUNDS = 7
_ROWS = (1, 2, 4, 8)
_CONTEXT = 256
_MOST = 4


def measured_machine(say: Callable[[str], None] = lambda _: None) -> Machine:
    """Measure this machine, in some seconds."""
    say("measuring this machine: bandwidth and arithmetic")
    bandwidth = MedianCurve([size * 2**20 for size in _SIZES], list(map(read_bandwidth, _SIZES)))
    bare = Machine(
        processor_name(), total_memory(), bandwidth, max(map(product_flops, (torch.float32, torch.bfloat16)))
    )
    say("measuring this machine: what layers, rows and steps take beside them")
    return replace(bare, overheads=_overheads(bare))


def read_bandwidth(size: int) -> float:
    """Measure the bytes per second at which so many MiB are read."""
    numbers = torch.ones(size * 2**18)
    library = native()
    return size * 2**20 / _seconds(numbers.sum if library is None else reader(library, [numbers]))


def product_flops(dtype: torch.dtype) -> float:
    """Measure the operations per second of a product of matrices; of float32 where bfloat16 is computed by it."""
    if dtype == torch.bfloat16 and not is_quick_at_bfloat16():
        dtype = torch.float32
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _seconds(partial(torch.matmul, matrix, matrix))


def _overheads(bare: Machine) -> Overheads:
    target = load_model(BUNDLED_TARGET)
    draft = load_model(BUNDLED_DRAFT)
    samples = [*_beyond(target, BUNDLED_TARGET, bare), *_beyond(draft, BUNDLED_DRAFT, bare)]
    layer, layer_row = fit(samples)
    with torch.inference_mode():
        costs = _bundled_steps(target)
    one = Placed(model_shape(BUNDLED_DRAFT), replace(bare, overheads=Overheads(layer, layer_row)))
    forward = one.forward(1, 1, _CONTEXT)
    tokens = [(costs.draft[k] + costs.rest[k] - costs.rest[0]) / k - forward for k in range(1, _MOST + 1)]
    return Overheads(layer, layer_row, costs.rest[0], max(0.0, statistics.median(tokens)))


def fit(samples: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Fit the seconds of a layer and of a layer's row, neither negative, to samples: layers, rows, seconds beyond the
    roofline."""
    layers = np.array([[count, count * rows] for count, rows, _ in samples], dtype=np.float64)
    beyond = np.array([seconds for _, _, seconds in samples])
    both = np.linalg.lstsq(layers, beyond, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [max(0.0, float(column @ beyond / (column @ column))) for column in layers.T]
    errors = [float(((column * value - beyond) ** 2).sum()) for column, value in zip(layers.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])


def _beyond(model: LanguageModel, name: str, bare: Machine) -> list[tuple[int, int, float]]:
    """Return layers, rows, and the seconds of a forward beyond the roofline."""
    shape = model_shape(name)
    placed = Placed(shape, bare)
    with torch.inference_mode():
        curve = target_costs(model, _CONTEXT, _ROUNDS, _ROWS)
    return [(shape.layers or 1, rows, curve(rows) - placed.forward(rows, 1, _CONTEXT)) for rows in _ROWS]


def _bundled_steps(target: LanguageModel) -> CostsByK:
    tokenizer = find_tokenizer(BUNDLED_TARGET)
    prompt = tokenizer(workloads.load_workload("code", 1)[0].prompt)["input_ids"][:_CONTEXT]
    drafter = make_drafter(BUNDLED_DRAFT, Binding(target, tokenizer, 0))[0]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return step_costs(target, tokenizer, lambda: drafter, _MOST, prompt, params)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of the shortest of a few rounds: interruptions are not the machine's."""
    return min(timed(work).seconds for _ in range(_ROUNDS))


NGRAM_DRAFTER = "suffix"
"""Measured for drafts without a model."""
MOST = 8
"""Largest K that is measured."""
CONTEXT = 256
TOKENS = 24
_ARGUMENTS = {"float32": ("float32", UNQUANTIZED), "bfloat16": ("bfloat16", UNQUANTIZED)} | {
    name: ("bfloat16", name) for name in QUANTISATIONS
}


def measured_steps(model: str, draft: str | None, options: PlanOptions) -> CostsByK:
    """Measure the costs of chains of up to MOST tokens.

    Args:
        draft: a draft model, or the text of a drafter; None: n-gram drafts.

    Raises:
        ConfigError: the number format is none that forerun serves.
        ModelLoadError, DrafterError: as `LLM`.
    """
    if options.precision is not None and options.precision not in _ARGUMENTS:
        raise ConfigError(
            f"--precision is {options.precision!r}, which forerun does not compute in, so it cannot be measured. Give "
            f"one of {', '.join(_ARGUMENTS)}, or leave --measure out."
        )
    dtype, quantize = (DEFAULT_DTYPE, None) if options.precision is None else _ARGUMENTS[options.precision]
    target = load_model(model, dtype, quantize=quantize)
    tokenizer = find_tokenizer(model)
    drafter, _ = make_drafter(draft or NGRAM_DRAFTER, Binding(target, tokenizer, 0))
    text = workloads.load_workload("copying", 1)[0].prompt
    prompt = [1] * 8 if tokenizer is None else tokenizer(text, verbose=False)["input_ids"]
    most = min(CONTEXT, options.context, target.context_length // 2)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with torch.inference_mode():
        return step_costs(target, tokenizer, lambda: drafter, min(MOST, options.most), prompt[:most], params)
