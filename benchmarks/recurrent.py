"""Time a model with recurrent layers beside a Llama of as many weights, and beside Transformers.

    PYTHONPATH=tests:benchmarks python benchmarks/recurrent.py
    FORERUN_INSTRUCTIONS=avx2 PYTHONPATH=tests:benchmarks python benchmarks/recurrent.py qwen3_5_text --formats int4

Random models of about 150 million parameters: 16 layers of 768, three of four recurrent. A step computes rows after 256
positions and keeps some of them; methods run in turn. "Of Llama" is seconds over the bytes of weights that are read,
beside Llama's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from decoders import of_format, of_transformers, write_model

from forerun import __version__
from forerun.lab.bench.forward import filled
from forerun.lab.bench.measure import interleave
from forerun.lab.bench.methods import Reference, quieten
from forerun.models import Model, Rows, load_model

PREFIX, PROMPT, LAYERS = 256, 512, 16
STEPS = ((1, 1), (5, 5), (5, 1), (16, 1))
"""Rows of a step, and how many are kept."""


def decoding(model: Model, tokens: list[int], rows: int, kept: int) -> Callable[[], None]:
    """Return a step of decoding: rows are computed, some kept, the others rolled back."""
    cache = filled(model, tokens[:PREFIX])

    def step() -> None:
        model.forward([Rows(cache, tokens[:rows])])
        cache.commit(range(kept))

    return step


def prompt(model: Model, tokens: list[int]) -> Callable[[], None]:
    """Return the computation of a prompt."""

    def step() -> None:
        cache = model.new_cache()
        model.forward([Rows(cache, tokens[:PROMPT], num_logits=1)])
        cache.free()

    return step


def measure(family: Path, llama: Path, number_format: str, rounds: int) -> None:
    """Print a format's figures."""
    models = {name: of_format(folder, number_format) for name, folder in (("f", family), ("l", llama))}
    tokens: list[int] = torch.randint(0, models["f"][0].vocab_size, (PROMPT,)).tolist()
    steps: dict[tuple[str, Any], Callable[[], None]] = {}
    size = []
    for name, (model, decoder) in models.items():
        size.append(decoder.weight_bytes)
        steps |= {(name, each): decoding(model, tokens, *each) for each in STEPS}
        steps[name, PROMPT] = prompt(model, tokens)
    if number_format == "bfloat16":
        reference = Reference(family, number_format)
        steps |= {("t", length): of_transformers(reference, tokens, length) for length in (1, PROMPT)}
    timed = {key: median(run.seconds for run in runs) for key, runs in interleave(steps, rounds, warmup=3).items()}
    first, five, back, many = (1e3 * timed["f", each] for each in STEPS)
    theirs = [1e3 * timed["l", each] for each in STEPS]
    print(f"{number_format}: {size[0] / 1e6:.0f} MB of weights, Llama {size[1] / 1e6:.0f}")
    print(f"  a row {first:.2f} ms, of Llama {first / theirs[0] / size[0] * size[1]:.2f}")
    print(f"  five rows over one {five / first:.2f}, Llama's {theirs[1] / theirs[0]:.2f}")
    print(f"  sixteen rows over one {many / first:.2f}, Llama's {theirs[3] / theirs[0]:.2f}")
    print(f"  four of five rolled back: {back / five:.3f} of a step that keeps all; Llama {theirs[2] / theirs[1]:.3f}")
    print(f"  a prompt of {PROMPT}: {1e3 * timed['f', PROMPT]:.0f} ms, Llama {1e3 * timed['l', PROMPT]:.0f}")
    if ("t", 1) in timed:
        plain, whole = timed["t", 1] / timed["f", (1, 1)], timed["t", PROMPT] / timed["f", PROMPT]
        print(f"  times as fast as Transformers: a row {plain:.2f}, the prompt {whole:.2f}", flush=True)


def memory(folder: Path) -> None:
    """Print what a sequence takes."""
    model = load_model(folder, "bfloat16", quantize="int4")
    cache = filled(model, list(range(PREFIX)))
    pages = cache.pool.page_nbytes
    held = [cache.nbytes - len(cache.held) * pages]
    for rows in (5, 16):
        model.forward([Rows(cache, list(range(rows)))])
        held.append(cache.nbytes - len(cache.held) * pages)
        cache.drop()
    words = ", ".join(f"{each / 2**20:.1f} MiB" for each in held)
    print(f"a sequence besides its pages: {words} after a prompt, in a step of 5 and of 16 rows")


def main() -> None:
    """Measure a family."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family", nargs="?", default="qwen3_5_text")
    parser.add_argument("--formats", nargs="*", default=["bfloat16", "int4"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    quieten()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as root:
        family, llama = Path(root) / "family", Path(root) / "llama"
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        layers = {"layer_types": kinds * (LAYERS // 4)} if options.family == "qwen3_5_text" else {}
        write_model(options.family, family, num_hidden_layers=LAYERS, **layers)
        write_model("llama", llama, num_hidden_layers=LAYERS + 4)
        print(f"forerun {__version__}, torch {torch.__version__}, transformers {tf.__version__}, {options.family}")
        for number_format in options.formats:
            measure(family, llama, number_format, options.rounds)
        memory(family)


if __name__ == "__main__":
    main()
