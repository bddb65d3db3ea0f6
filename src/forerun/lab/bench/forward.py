"""Time of one target forward of K rows, beside Hugging Face's module.

Speculation pays when a forward of K + 1 rows costs little more than a forward of one: t(5) / t(1) says whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from forerun.config import DEFAULT_DTYPE, QUANTISATIONS
from forerun.errors import ConfigError
from forerun.kernels.cpu import references
from forerun.lab.bench.measure import Interval, bootstrap, interleave, ratio, timed
from forerun.lab.bench.methods import Reference
from forerun.lab.bench.tables import Table, decimal
from forerun.models import Model, Rows, load_model
from forerun.models.llama.native import NativeLlamaDecoder
from forerun.models.loading.find_source import find_source

TRANSFORMERS = "transformers"
REFERENCE = "llama, reference kernels"
"""The Llama decoder in PyTorch, where the native kernels compute the other."""


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One implementation at one dtype.

    Attributes:
        dtype: of the weights, or their quantisation.
        method: "transformers", a kind of decoder ("llama" or "general"), or REFERENCE.
        milliseconds: by K, of one forward.
        ratios: by K, this method's time over Transformers' in the same round; empty for Transformers itself.
        growth: t(K) / t(1) for every K above 1.
        parameters: weights that one forward multiplies.
    """

    dtype: str
    method: str
    milliseconds: dict[int, Interval]
    ratios: dict[int, Interval]
    growth: dict[int, Interval]
    parameters: int = 0


def measure(
    folder: str | Path,
    dtypes: Sequence[str],
    counts: Sequence[int],
    prefix: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[ForwardRow]:
    """Time forwards of `counts` rows after `prefix` positions, every method and count in turn, round after round.

    Raises:
        ConfigError: rows or prefix do not fit the model.
    """
    results = []
    for dtype in dtypes:
        say(f"loading {dtype}")
        models = _kinds(folder, dtype)
        model = next(iter(models.values()))
        if prefix + max(counts) > model.context_length:
            raise ConfigError(
                f"{prefix} cached and {max(counts)} new positions do not fit a context of {model.context_length}."
            )
        generator = torch.Generator().manual_seed(0)  # all methods are given the same tokens
        tokens = torch.randint(0, model.vocab_size, (prefix + max(counts),), generator=generator).tolist()
        cached, new = tokens[:prefix], tokens[prefix:]
        steps: dict[tuple[str, int], Callable[[], Tensor]] = {}
        reference = None if dtype in QUANTISATIONS else Reference(folder, dtype)
        for k in counts:
            if reference is not None:
                steps[TRANSFORMERS, k] = reference.forward_step(cached, new[:k])
            steps |= {(kind, k): _forward_step(each, cached, new[:k]) for kind, each in models.items()}
        say(f"measuring {dtype}: {rounds} rounds of {len(steps)} forwards")
        runs = interleave({f"{method} {k}": step for (method, k), step in steps.items()}, rounds, warmup=3)
        seconds = {key: [run.seconds for run in timed] for key, timed in zip(steps, runs.values(), strict=True)}
        parameters = _multiplied(folder, model)
        results += [replace(row, parameters=parameters) for row in _reduce(dtype, seconds, counts)]
    return results


def _forward_step(model: Model, prefix: list[int], tokens: list[int]) -> Callable[[], Tensor]:
    cache = model.new_cache()
    model.forward([Rows(cache, prefix, num_logits=0)])
    cache.commit(range(len(prefix)))

    def step() -> Tensor:
        logits = model.forward([Rows(cache, tokens)]).logits
        cache.drop()  # every call writes its keys and values over those of the call before
        return logits

    return step


def _kinds(folder: str | Path, dtype: str) -> dict[str, Model]:
    """By kind of decoder: the Llama decoder where it serves the model, by native kernels and by the references, and the
    general one. Weights in codes are not timed with the references, which exist to define them.

    dtype: or a quantisation.
    """
    quantize = dtype if dtype in QUANTISATIONS else None
    number_format = dtype if quantize is None else DEFAULT_DTYPE
    auto = load_model(folder, number_format, quantize=quantize)
    if auto.kind == "general":
        return {"general": auto}
    kinds = {auto.kind: auto}
    if quantize is None and isinstance(auto.decoder, NativeLlamaDecoder):
        with references():
            kinds[REFERENCE] = load_model(folder, number_format)
    return kinds | {"general": load_model(folder, number_format, "general", quantize=quantize)}


def _multiplied(folder: str | Path, model: Model) -> int:
    """Weights that one forward multiplies: all, but for a table of embeddings that is not the output layer too."""
    config = find_source(folder).config()
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    return model.num_parameters - (0 if is_tied else config.vocab_size * config.hidden_size)


def _reduce(dtype: str, seconds: dict[tuple[str, int], list[float]], rows: Sequence[int]) -> list[ForwardRow]:
    methods = list(dict.fromkeys(method for method, _ in seconds))
    results = []
    for method in methods:
        by_rows = {k: seconds[method, k] for k in rows}
        compared = method != TRANSFORMERS and TRANSFORMERS in methods
        results.append(
            ForwardRow(
                dtype,
                method,
                {k: bootstrap([1000 * t for t in by_rows[k]]) for k in rows},
                {k: ratio(by_rows[k], seconds[TRANSFORMERS, k]) for k in rows} if compared else {},
                {k: ratio(by_rows[k], by_rows[1]) for k in rows if k > 1} if 1 in by_rows else {},
            )
        )
    return results


def table(title: str, rows: Sequence[int], measured: Sequence[ForwardRow]) -> Table:
    """The table of what was measured; ratios with their intervals. rows: the values of K."""
    header = [
        "dtype, method",
        *(f"t({k}) ms" for k in rows),
        *(f"t({k}) / Transformers" for k in rows),
        *(f"t({k}) / t(1)" for k in rows if k > 1),
    ]
    lines = [
        [
            f"{row.dtype}, {row.method}",
            *(f"{row.milliseconds[k].median:.1f}" for k in rows),
            *(decimal(row.ratios.get(k)) for k in rows),
            *(decimal(row.growth.get(k)) for k in rows if k > 1),
        ]
        for row in measured
    ]
    return Table(title, header, lines)


# The roofline of a forward: it reads every weight once, and multiplies each with every row.
#
# t(rows) >= max(bytes / bandwidth, 2 * parameters * rows / arithmetic), with what this machine reads and computes
# in a
# second, measured by a sum and by a product of matrices (Williams, Waterman, Patterson 2009). Where caches hold the
# weights, or kernels are faster than these, a forward can take less. Attention and the cache are left out.

READ_BYTES = 1 << 28
"""Read to measure the bandwidth: more than caches hold."""
SIZE = 1024
"""Of the matrices that are multiplied."""
ROUNDS = 5
"""The best of them counts: a bound is wanted."""
BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Of a weight by its format; scales are left out."""


@dataclass(frozen=True, slots=True)
class Roof:
    """What the machine can do at most, with torch's present number of threads.

    Attributes:
        bandwidth: bytes per second that are read from memory.
        flops: by number format, floating-point operations per second.
    """

    bandwidth: float
    flops: dict[str, float]

    def seconds(self, parameters: int, number_format: str, rows: int) -> float:
        """The least time of a forward. Weights in codes are bound by the bandwidth alone: their products are
        forerun's, of whole numbers."""
        reading = parameters * BYTES[number_format] / self.bandwidth
        return max(reading, 2 * parameters * rows / self.flops[number_format] if number_format in self.flops else 0.0)


def measure_roof(formats: Sequence[str]) -> Roof:
    """Measured in a second or two."""
    with torch.inference_mode():
        block = torch.ones(READ_BYTES // 4)
        bandwidth = READ_BYTES / min(timed(block.sum).seconds for _ in range(ROUNDS + 1))
        flops = {}
        for name in formats:
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                matrix = torch.ones(SIZE, SIZE, dtype=dtype)
                product = partial(torch.matmul, matrix, matrix)
                flops[name] = 2 * SIZE**3 / min(timed(product).seconds for _ in range(ROUNDS + 1))
    return Roof(bandwidth, flops)


# A random Llama, large enough that its weights do not fit the processor's caches: the default model of timings.

RANDOM_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""Its configuration: 197 M parameters, small enough to measure in a minute."""


@contextmanager
def random_llama(context: int = 0) -> Iterator[str]:
    """A temporary folder with a random Llama in bfloat16, for as long as the block lasts.

    Args:
        context: positions that it must be able to compute.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    positions = max(context, int(RANDOM_LLAMA["max_position_embeddings"]))
    settings: dict[str, Any] = {**RANDOM_LLAMA, "max_position_embeddings": positions}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    with TemporaryDirectory(prefix="forerun-bench-") as folder:
        model.save_pretrained(folder)
        yield folder
