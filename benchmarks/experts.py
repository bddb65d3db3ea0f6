"""Time a mixture of experts beside a dense Llama of as many weights read, and latent attention beside a Llama's.

    PYTHONPATH=tests:benchmarks python benchmarks/experts.py
    FORERUN_INSTRUCTIONS=avx2 PYTHONPATH=tests:benchmarks python benchmarks/experts.py

    PYTHONPATH=tests:benchmarks python benchmarks/experts.py --write FOLDER     # the mixture, for tests/never_slower.py

Random models: 300 million parameters, of which a row reads 60; and a decoder with latents after 4,000 positions.
Methods run in turn. "Of Llama" is seconds over the bytes of weights that are read, beside Llama's.
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
from decoders import bytes_read, of_format, of_transformers, write_model

from forerun import __version__
from forerun.lab.bench.forward import filled
from forerun.lab.bench.measure import interleave
from forerun.lab.bench.methods import Reference, quieten
from forerun.models import Model, Rows, load_tokenizer

PREFIX, PROMPT, LONG = 256, 512, 4000
MIXTURE = {"num_experts": 48, "num_experts_per_tok": 4, "moe_intermediate_size": 192, "mlp_only_layers": []}
DENSE = {"intermediate_size": 768}
LATENT = {
    "kv_lora_rank": 192,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 12,
    "first_k_dense_replace": 12,
    "max_position_embeddings": 8192,
}


def steps_of(model: Model, tokens: list[int], sizes: tuple[int, ...], prefix: int) -> dict[int, Callable[[], None]]:
    """Return steps of so many rows after a prefix, none of which are kept; of PROMPT rows, a prompt."""
    cache = filled(model, tokens[:prefix])

    def step(rows: int) -> Callable[[], None]:
        def run() -> None:
            own = model.new_cache() if rows == PROMPT else cache
            model.forward([Rows(own, tokens[prefix : prefix + rows], num_logits=min(rows, 8))])
            own.free() if rows == PROMPT else own.drop()

        return run

    return {rows: step(rows) for rows in sizes}


def mixture(family: Path, llama: Path, number_format: str, rounds: int) -> None:
    """Print a format's figures of a mixture."""
    steps: dict[tuple[str, int], Callable[[], None]] = {}
    read: dict[tuple[str, int], float] = {}
    for name, folder in (("f", family), ("l", llama)):
        model, decoder = of_format(folder, number_format)
        tokens: list[int] = torch.randint(0, model.vocab_size, (PREFIX + PROMPT,)).tolist()
        for rows, step in steps_of(model, tokens, (1, 5, PROMPT), PREFIX).items():
            steps[name, rows], read[name, rows] = step, bytes_read(decoder, step)
    if number_format == "bfloat16":
        reference = Reference(family, number_format)
        steps |= {("t", length): of_transformers(reference, tokens, length) for length in (1, PROMPT)}
    timed = {key: median(run.seconds for run in runs) for key, runs in interleave(steps, rounds, warmup=3).items()}
    first, five, whole = (1e3 * timed["f", rows] for rows in (1, 5, PROMPT))
    size = read["f", 1] / read["l", 1]
    more = read["f", 5] / read["f", 1]
    print(f"{number_format}: a row reads {read['f', 1] / 1e6:.0f} MB, Llama's {read['l', 1] / 1e6:.0f}")
    print(f"  a row {first:.2f} ms, of Llama {first / 1e3 / timed['l', 1] / size:.2f}")
    print(
        f"  five rows over one {five / first:.2f}, bytes {more:.2f}, quotient {five / first / more:.2f}, Llama's five "
        f"{timed['l', 5] / timed['l', 1]:.2f}"
    )
    print(f"  a prompt of {PROMPT}: {whole:.0f} ms, Llama {1e3 * timed['l', PROMPT]:.0f}")
    if ("t", 1) in timed:
        plain, prompt = timed["t", 1] / timed["f", 1], timed["t", PROMPT] / timed["f", PROMPT]
        print(f"  times as fast as Transformers: a row {plain:.2f}, the prompt {prompt:.2f}", flush=True)


def latent(family: Path, llama: Path, number_format: str, rounds: int) -> None:
    """Print a format's figures of latent attention."""
    steps: dict[tuple[str, int], Callable[[], None]] = {}
    sizes, pages = [], []
    for name, folder in (("f", family), ("l", llama)):
        model, decoder = of_format(folder, number_format)
        tokens: list[int] = torch.randint(0, model.vocab_size, (LONG + 8,)).tolist()
        steps |= {(name, rows): step for rows, step in steps_of(model, tokens, (1, 5), LONG).items()}
        sizes.append(decoder.weight_bytes)
        pages.append(decoder.planner.pool.page_nbytes)
    timed = {key: median(run.seconds for run in runs) for key, runs in interleave(steps, rounds, warmup=3).items()}
    first = timed["f", 1] / timed["l", 1] / sizes[0] * sizes[1]
    print(f"{number_format}: latents at {LONG} positions, a row {1e3 * timed['f', 1]:.2f} ms, of Llama {first:.2f}")
    print(
        f"  five rows over one {timed['f', 5] / timed['f', 1]:.2f}, Llama's {timed['l', 5] / timed['l', 1]:.2f}; "
        f"cache of Llama's with as many heads {pages[0] / pages[1]:.2f}",
        flush=True,
    )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="*", default=["bfloat16", "int8", "int4"])
    parser.add_argument("--only", choices=("mixture", "latent"))
    parser.add_argument("--write", type=Path, help="a folder for the mixture, with the tokenizer of smollm2")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    quieten()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if options.write:
        tokenizer = load_tokenizer("smollm2")
        # weights so wide that its text does not repeat itself
        write_model("qwen3_moe", options.write, 0.1, vocab_size=len(tokenizer), **MIXTURE)
        tokenizer.save_pretrained(options.write)
        return
    print(f"forerun {__version__}, torch {torch.__version__}, transformers {tf.__version__}")
    kinds: dict[str, tuple[Any, Any, Any]] = {
        "mixture": (mixture, ("qwen3_moe", MIXTURE), DENSE),
        "latent": (latent, ("deepseek_v3", LATENT), {"num_key_value_heads": 12, "max_position_embeddings": 8192}),
    }
    with TemporaryDirectory() as root:
        for kind, (measure, (family, sizes), dense) in kinds.items():
            if options.only in (None, kind):
                folder, llama = Path(root) / kind / "family", Path(root) / kind / "llama"
                write_model(family, folder, **sizes)
                write_model("llama", llama, **dense)
                for number_format in options.formats:
                    measure(folder, llama, number_format, options.rounds)


if __name__ == "__main__":
    main()
