"""Time of one target forward of K rows, beside Hugging Face's module.

Speculation pays when a forward of K + 1 rows costs little more than a forward of one: t(5) / t(1) says whether it does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.config import DEFAULT_DTYPE, DTYPES, QUANTISATIONS, UNQUANTIZED
from forerun.errors import ConfigError
from forerun.kernels.cpu import references
from forerun.kernels.cpu.prefetching import reader
from forerun.lab.bench.measure import Interval, bootstrap, interleave, ratio
from forerun.lab.bench.methods import Reference
from forerun.lab.bench.random_model import opened
from forerun.lab.bench.tables import Columns, Table, decimal, percent
from forerun.lab.plan.measured import product_flops, read_bandwidth
from forerun.lab.results.files import without_folders
from forerun.models import LanguageModel, Model, Rows, load_model, number_format
from forerun.models.fused.native import NativeDecoder
from forerun.models.loading.source import find_source
from forerun.types import Cache

STORED = "stored"
"""A number format: what forerun serves a model in by default, so quantized weights as the files have them."""
TRANSFORMERS = "transformers"
REFERENCE = "llama, reference kernels"
"""The fused decoder in PyTorch, where the native kernels compute the other."""
READING = "reading"
"""The weights, without a product."""
MOST_LOGITS = 64
"""Rows of a forward whose logits are all computed, as those of drafts are; of more, as of a prompt, the last row's."""


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One implementation with one dtype and number of rows.

    Attributes:
        dtype: of the weights, or their quantization; of STORED, what that is, such as "Q4_K_M".
        method: "transformers", a kind of decoder ("llama" or "general"), or REFERENCE.
        rows: K.
        seconds: of one forward.
        over_transformers: this method's time over Transformers' in the same round; None for Transformers itself.
        growth: t(K) / t(1); None for one row.
        parameters: weights that one forward multiplies.
        nbytes: of these, as forerun's own decoder keeps them.
        bandwidth: bytes per second at which the kernels' threads read these weights in the same rounds, and compute
            nothing; without native kernels, those at which torch reads memory.
    """

    dtype: str
    method: str
    rows: int
    seconds: Interval
    over_transformers: Interval | None
    growth: Interval | None
    parameters: int
    nbytes: float
    bandwidth: float


def forward_table(title: str, rows: Sequence[ForwardRow]) -> Table:
    """Return the table of these rows."""
    columns: Columns[ForwardRow] = {
        "dtype, method": lambda row: f"{row.dtype}, {row.method}",
        "K": lambda row: str(row.rows),
        "t(K) ms": lambda row: f"{1e3 * row.seconds.median:.1f}",
        "t(K) / Transformers": lambda row: decimal(row.over_transformers),
        "t(K) / t(1)": lambda row: decimal(row.growth),
        "weights MB": lambda row: f"{row.nbytes / 1e6:,.1f}",
        "GB/s": lambda row: f"{row.nbytes / row.seconds.median / 1e9:.1f}",
        "of memory's speed": lambda row: percent(row.nbytes / row.seconds.median / row.bandwidth),
    }
    return Table.of(title, columns, rows)


def time_forwards(
    model: str,
    dtypes: Sequence[str],
    counts: Sequence[int],
    prefix: int,
    rounds: int,
    say: Callable[[str], None] = lambda _: None,
    *,
    others: bool = False,
) -> list[ForwardRow]:
    """Time forwards of `counts` rows after `prefix` positions, every method and count in turn, round after round.

    Args:
        model: as `random_model.opened` takes it.
        dtypes: of DTYPES or QUANTISATIONS, STORED, or the type of the model's files, which stands for it.
        others: beside the decoder that serves the model, also the other ones and Transformers' module.

    Raises:
        ConfigError: rows or prefix do not fit the model; there is no such shape, or the files are not of that type.
    """
    results = []
    for dtype in dtypes:  # in a function, so that no two number formats are in memory together
        with opened(model, dtype, say) as name:
            results += _measured(name, dtype, counts, prefix, rounds, say, others)
    return results


def _measured(
    name: str,
    dtype: str,
    counts: Sequence[int],
    prefix: int,
    rounds: int,
    say: Callable[[str], None],
    others: bool,
) -> list[ForwardRow]:
    say(f"loading {dtype}")
    models = _decoders(name, dtype, others)
    model = next(iter(models.values()))
    dtype = number_format(model)  # what it is served in, whatever the user called it
    if prefix + max(counts) > model.context_length:
        raise ConfigError(
            f"{prefix} cached and {max(counts)} new positions do not fit a context of {model.context_length}."
        )
    generator = torch.Generator().manual_seed(0)  # all methods are given the same tokens
    tokens = torch.randint(0, model.vocab_size, (prefix + max(counts),), generator=generator).tolist()
    cached = tokens[:prefix]
    new = tokens[prefix:]
    caches = {kind: filled(each, cached) for kind, each in models.items()}
    read, size = _weights_reader(model)
    steps: dict[tuple[str, int], Callable[[], object]] = {(READING, 0): read}
    reference = Reference(name, dtype) if others and dtype in DTYPES else None
    for k in counts:
        num_logits = k if k <= MOST_LOGITS else 1
        if reference is not None:
            steps[TRANSFORMERS, k] = reference.forward_step(cached, new[:k], num_logits)
        steps |= {(kind, k): forward_step(models[kind], caches[kind], new[:k], num_logits) for kind in models}
    say(f"measuring {dtype}: {rounds} rounds of {len(steps)} steps")
    timed = interleave(steps, rounds, warmup=min(3, rounds))
    seconds = {key: [run.seconds for run in each] for key, each in timed.items()}
    parameters = _multiplied(name, model)
    bandwidth = size / statistics.median(seconds.pop((READING, 0)))
    decoder = model.decoder
    nbytes = decoder.weight_bytes if isinstance(decoder, NativeDecoder) else parameters * BYTES.get(dtype, 2.0)
    return [
        ForwardRow(
            dtype,
            method,
            k,
            bootstrap(seconds[method, k]),
            None
            if reference is None or method == TRANSFORMERS
            else ratio(seconds[method, k], seconds[TRANSFORMERS, k]),
            ratio(seconds[method, k], seconds[method, 1]) if k > 1 and 1 in counts else None,
            parameters,
            nbytes,
            bandwidth,
        )
        for method in dict.fromkeys(method for method, _ in seconds)
        for k in counts
    ]


def _weights_reader(model: Model) -> tuple[Callable[[], object], int]:
    """Return a function that reads the model's weights as its kernels do and computes nothing, and how many bytes it
    reads. Without native kernels torch reads other memory."""
    decoder = model.decoder
    if isinstance(decoder, NativeDecoder):
        weights = [layer.packed for layer in decoder.linear_layers() if not layer.is_on_disk]
        if weights:
            return reader(decoder.library, weights), sum(each.nbytes for each in weights)
    numbers = torch.ones(READ_MIB * 2**18)
    return numbers.sum, numbers.nbytes


def filled(model: LanguageModel, prefix: list[int]) -> Cache:
    """Return a cache of these tokens."""
    cache = model.new_cache()
    model.forward([Rows(cache, prefix, num_logits=0)])
    cache.commit(range(len(prefix)))
    return cache


def forward_step(model: LanguageModel, cache: Cache, tokens: list[int], num_logits: int) -> Callable[[], Tensor]:
    def step() -> Tensor:
        logits = model.forward([Rows(cache, tokens, num_logits=num_logits)]).logits
        cache.drop()  # every call writes its keys and values over those of the call before
        return logits

    return step


def _decoders(folder: str | Path, dtype: str, others: bool) -> dict[str, Model]:
    """Load the model by kind of decoder: Llama's where it serves the model, with native and with reference kernels, and
    the general one. Quantized weights are not timed with the reference kernels, which exist to define them.

    dtype: as `time_forwards`. others: False for the first of these alone.
    """
    is_dtype = dtype in DTYPES
    quantize = UNQUANTIZED if is_dtype else None
    if dtype in QUANTISATIONS:
        quantize = dtype
    file_type = find_source(folder).file_type()
    if quantize is None and dtype not in (STORED, file_type):
        raise ConfigError(
            f"--dtypes has {dtype!r}, but the weights of {without_folders(str(folder))} are stored as "
            f"{file_type or 'numbers'}. Give {STORED!r} for these, or one of {', '.join((*DTYPES, *QUANTISATIONS))}."
        )
    activations = dtype if is_dtype else DEFAULT_DTYPE
    auto = load_model(folder, activations, quantize=quantize)
    decoders = {auto.kind: auto}
    if auto.kind == "general" or not others:
        return decoders
    if auto.quantize is None and isinstance(auto.decoder, NativeDecoder):
        with references():
            decoders[REFERENCE] = load_model(folder, activations, quantize=quantize)
    return decoders | {"general": load_model(folder, activations, "general", quantize=quantize)}


def _multiplied(folder: str | Path, model: Model) -> int:
    """Count the weights that one forward multiplies: all but an embedding table that is not the output layer too."""
    config = find_source(folder).config()
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    return model.num_parameters - (0 if is_tied else config.vocab_size * config.hidden_size)


READ_MIB = 256
"""Read to measure the bandwidth: more than caches hold."""
BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0} | {
    name: bits / 8 for name, (bits, _) in QUANTISATIONS.items()
}
"""Bytes of a weight by its format, without scales."""


@dataclass(frozen=True, slots=True)
class Roof:
    """The roofline of a forward, which reads every weight once and multiplies each with every row.

    t(rows) >= max(bytes / bandwidth, 2 * parameters * rows / flops) (Williams, Waterman, Patterson 2009). Where caches
    hold the weights, or kernels are faster than those that were measured, a forward can take less. Attention and the
    KV cache are left out.

    Attributes:
        bandwidth: bytes per second that are read from memory.
        flops: by number format, floating-point operations per second.
    """

    bandwidth: float
    flops: dict[str, float]

    def seconds(self, parameters: int, nbytes: float, number_format: str, rows: int) -> float:
        """Return the least time of a forward of so many weights in so many bytes. Quantized weights are bound by the
        bandwidth alone: their products are of integers."""
        reading = nbytes / self.bandwidth
        return max(reading, 2 * parameters * rows / self.flops[number_format] if number_format in self.flops else 0.0)


def measure_roof(formats: Sequence[str]) -> Roof:
    """Measure the roofline with torch's present number of threads, in a second or two."""
    with torch.inference_mode():
        flops = {name: product_flops(getattr(torch, name)) for name in formats if name in DTYPES}
        return Roof(read_bandwidth(READ_MIB), flops)
