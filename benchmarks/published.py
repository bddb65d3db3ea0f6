"""Measure how long checkpoints of other programs take to load, how much memory, and a step, beside GGUF's.

    PYTHONPATH=src:benchmarks python benchmarks/published.py [--shape llama-1b] [LAYOUT ...]

Weights are random bytes in the layouts: what loading and steps take depends on shapes and types alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.lab.bench.random_model import MIXTURE, SHAPES, Shape, opened
from forerun.models import Rows, load_model
from loading import measure

GROUP = 128
_GGUF = {MIXTURE: MIXTURE, "Q8_0": "int8"}
CONFIGS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "FP8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    "W4A16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


def tensors_of(layout: str, path: str, out: int, width: int) -> dict[str, Tensor]:
    """Return the tensors of a matrix of random numbers."""
    words = torch.randint(-(2**31), 2**31, (out, width // 8), dtype=torch.int64).int()
    scale = 0.004 * torch.rand(out, width // GROUP) + 0.001
    if layout == "AWQ":
        zeros = torch.randint(-(2**31), 2**31, (width // GROUP, out // 8), dtype=torch.int64).int()
        found = {"qweight": words.view(width, out // 8), "qzeros": zeros, "scales": scale.T.half().contiguous()}
    elif layout == "W4A16":
        found = {"weight_packed": words, "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor([out, width])}
    elif layout == "FP8":
        codes = torch.randn(out, width).to(torch.float8_e4m3fn)
        found = {"weight": codes, "weight_scale_inv": scale[: -(-out // GROUP)].contiguous()}
    else:
        found = {"weight": 0.02 * torch.randn(out, width, dtype=torch.bfloat16)}
    return {f"{path}.{key}": each for key, each in found.items()}


def write(folder: Path, layout: str, shape: Shape) -> None:
    """Write a Llama of a shape, with its embedding in bfloat16."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = shape.intermediate
    sizes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)}
    sizes |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
    sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "rms_norm_eps": 1e-5}
    config |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "vocab_size": shape.vocab_size}
    config |= {"num_key_value_heads": shape.kv_heads, "tie_word_embeddings": True, "max_position_embeddings": 4096}
    config |= {"quantization_config": CONFIGS[layout]} if CONFIGS[layout] else {}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    table = 0.02 * torch.randn(shape.vocab_size, hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": norm}
    for layer in range(shape.layers):
        path = f"model.layers.{layer}"
        for name, (out, width) in sizes.items():
            tensors |= tensors_of(layout, f"{path}.{name}", out, width)
        tensors |= {f"{path}.{each}.weight": norm.clone() for each in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors")


def measured(path: str, layout: str) -> dict[str, Any]:
    """Return seconds and bytes of loading, and milliseconds of a step of one row and of five."""
    row, model = measure(path, "stored", 2), load_model(path)
    for count in (1, 5):
        times = []
        for _ in range(12):
            cache, start = model.new_cache(), time.perf_counter()
            model.forward([Rows(cache, [7] * count)])
            times.append(1e3 * (time.perf_counter() - start))
        row[f"{count} rows, ms"] = statistics.median(times)
    return row


def main() -> None:
    """Measure the layouts of the command line, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", nargs="*", default=[*CONFIGS, *_GGUF])
    parser.add_argument("--shape", default="llama-1b", choices=SHAPES)
    options = parser.parse_args()
    for layout in options.layouts:
        with TemporaryDirectory() as folder, opened(f"random:{options.shape}", _GGUF.get(layout, "int4")) as file:
            path = file if layout in _GGUF else folder
            if layout not in _GGUF:
                write(Path(folder), layout, SHAPES[options.shape])
            nbytes = sum(each.stat().st_size for each in (Path(path).iterdir() if path == folder else [Path(path)]))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measured, (path, layout))
        print(layout, f"file {nbytes / 1e6:,.0f}", *(f"{k} {v:,.1f}" if k != "weights" else v for k, v in row.items()))


if __name__ == "__main__":
    main()
