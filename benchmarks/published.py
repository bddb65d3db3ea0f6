"""Measure what a Llama of random bytes takes to load in the layouts of other programs, and a step, beside GGUF's.

PYTHONPATH=src:benchmarks python benchmarks/published.py [LAYOUT ...]
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from loading import measure
from safetensors.torch import save_file
from torch import Tensor

from forerun.lab.bench.random_model import Q4_K_M, SHAPES, opened
from forerun.models import Rows, load_model

NAME, GROUP = "llama-1b", 128
_GGUF = {Q4_K_M: Q4_K_M, "Q8_0": "int8"}
CONFIGS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "FP8": {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    "W4A16": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
}


def tensors_of(layout: str, path: str, out: int, width: int) -> dict[str, Tensor]:
    """Return the tensors of a matrix of random numbers."""
    words = torch.randint(-(2**31), 2**31, (out, width // 8)).int()
    scale = 0.004 * torch.rand(out, width // GROUP) + 0.001
    found = {"weight": 0.02 * torch.randn(out, width, dtype=torch.bfloat16)}
    if layout == "AWQ":
        zeros = torch.randint(-(2**31), 2**31, (width // GROUP, out // 8)).int()
        found = {"qweight": words.view(width, out // 8), "qzeros": zeros, "scales": scale.T.half().contiguous()}
    elif layout == "W4A16":
        found = {"weight_packed": words, "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor([out, width])}
    elif layout == "FP8":
        found = {"weight": found["weight"].to(torch.float8_e4m3fn), "weight_scale_inv": scale[: out // GROUP].clone()}
    return {f"{path}.{key}": each for key, each in found.items()}


def write(folder: Path, layout: str) -> None:
    """Write the model, with its embedding in bfloat16."""
    shape = SHAPES[NAME]
    hidden, inner, keys = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
    sizes = {
        f"self_attn.{name}_proj": (out, hidden) for name, out in zip("qkvo", (hidden, keys, keys, hidden), strict=True)
    }
    sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "vocab_size": shape.vocab_size}
    config |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "tie_word_embeddings": True}
    config |= {"num_key_value_heads": shape.kv_heads, "quantization_config": CONFIGS[layout] or None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    norm = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.norm.weight": norm}
    tensors["model.embed_tokens.weight"] = 0.02 * torch.randn(shape.vocab_size, hidden, dtype=torch.bfloat16)
    for layer in range(shape.layers):
        path = f"model.layers.{layer}"
        for name, (out, width) in sizes.items():
            tensors |= tensors_of(layout, f"{path}.{name}", out, width)
        tensors |= {f"{path}.{each}.weight": norm.clone() for each in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors")


def measured(path: str) -> dict[str, Any]:
    """Return seconds and megabytes of loading, and milliseconds of a step of one row and of five."""
    row, times = measure(path, "stored", 2), []
    for _ in range(4):  # in memory that the process has had before, which a machine gives at once
        start, model = time.perf_counter(), load_model(path)
        times.append(time.perf_counter() - start)
    row["seconds again"] = min(times)
    for count in (1, 5):
        times = []
        for _ in range(12):
            cache, start = model.new_cache(), time.perf_counter()
            model.forward([Rows(cache, [7] * count)])
            times.append(1e3 * (time.perf_counter() - start))
        row[f"{count} rows, ms"] = statistics.median(times)
    return row


if __name__ == "__main__":
    for layout in sys.argv[1:] or (*CONFIGS, *_GGUF):
        with ExitStack() as stack, multiprocessing.get_context("spawn").Pool(1) as pool:
            if layout in CONFIGS:
                path = stack.enter_context(TemporaryDirectory())
                write(Path(path), layout)
            else:
                path = stack.enter_context(opened(f"random:{NAME}", _GGUF[layout]))
            files = Path(path).glob("*") if layout in CONFIGS else [Path(path)]
            nbytes = sum(each.stat().st_size for each in files) / 1e6
            row = pool.apply(measured, (path,))
        print(layout, f"file {nbytes:,.0f} MB", {key: v if key == "weights" else round(v, 2) for key, v in row.items()})
