"""Compile every Triton kernel for compute capability 9.0, in the shapes of a model of 8 B parameters. No GPU is needed.

Says of each which instructions multiply, how wide it reads, and how many registers it takes; fails where registers
spill, where a product of bfloat16 or of quantized values is made by other instructions than expected, or a kernel is
left out.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forerun.kernels.triton import (
    attention,
    elementwise as activation,
    elementwise as norm,
    linear,
    quantized_linear as grouped_linear,
    quantized_linear as quantized_linear,
    rotation,
)

TARGET = GPUTarget("cuda", 90, 32)
ENTRIES = (activation, attention, grouped_linear, linear, norm, quantized_linear, rotation)
BF16, CODES = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",
)
FLOATS, HALVES, NUMBERS, WORDS, BYTES = "*fp32", "*bf16", "i32", "*i64", "*i8"
HEADS: dict[str, Any] = {"KV_HEADS": 8, "GROUP": 4, "WIDTH": 128, "BLOCK_D": 128}
PAGES = {"LINE_NUMBERS": 128}
ROTATED = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "BLOCK": 64, "SPLITS": 4, "HAS_BIAS": True}
SQUARE = {"OUTPUTS": 4096, "INPUTS": 4096, "ROWS": 16}
CASES: list[tuple[Any, dict[str, Any], tuple[int, int], str]] = [
    (norm._add_and_norm, {"WIDTH": 4096, "BLOCK": 4096, "SPLITS": 4, "HAS_BIAS": False, "HAS_NORM": True}, (4, 3), ""),
    (activation._gated, {"WIDTH": 14336, "BLOCK": 1024, "SPLITS": 1}, (4, 3), ""),
    *(
        (linear._product, SQUARE | {"TILES": tiles, "BLOCK_N": 64, "BLOCK_K": 128, "PART": 1024}, (4, 4), BF16)
        for tiles in (1, 2, 4)
    ),
    (linear._add_splits, {"WIDTH": 128256, "BLOCK": 1024, "SPLITS": 1, "HAS_BIAS": False}, (4, 3), ""),
    (rotation._rotate_and_write, ROTATED | {"HAS_NORM": True, "LINE_NUMBERS": 128}, (4, 3), ""),
    *((attention._attend, HEADS | PAGES | {"WINDOW": window}, (4, 2), BF16) for window in (0, 4096)),
    (attention._combine, HEADS | {"WINDOW": 0, "BLOCK_G": 4}, (4, 3), ""),
    (quantized_linear._quantize_rows, {"WIDTH": 14336, "BLOCK": 16384}, (8, 3), ""),
    (quantized_linear._multiply_quantized, SQUARE | {"BLOCK_N": 16, "BLOCK_K": 256}, (4, 4), CODES),
    *(
        (
            grouped_linear._multiply_groups,
            SQUARE
            | {"GROUPS": 128, "BLOCK_N": 32, "BLOCK_G": 4, "PART": 16}
            | {"BITS": bits, "ZERO": zero, "HAS_MINIMUM": zero == 0},
            (4, 3),
            BF16,
        )
        for bits, zero in ((4, 0), (4, 8), (8, 128))
    ),
]
TYPES = {
    "words": WORDS,
    "num_rows": NUMBERS,
    "layer_start": NUMBERS,
    "eps": "fp32",
    "scale": "fp32",
    "limit": "fp32",
    "query": HALVES,
    "base": HALVES,
    "high": BYTES,
    "low": BYTES,
    "quantized": "*u8",
    "minimum": "*fp16",
}
"""Of arguments by their names; others are pointers to float32."""
OWN_TYPES: dict[Any, dict[str, str]] = {
    norm._add_and_norm: {"out": HALVES},
    activation._gated: {"out": HALVES},
    linear._product: {"x": HALVES, "weight": HALVES},
    attention._combine: {"out": HALVES},
    quantized_linear._quantize_rows: {"x": HALVES, "scale": FLOATS},
    quantized_linear._multiply_quantized: {"weight": BYTES, "scale": FLOATS},
    grouped_linear._multiply_groups: {"x": HALVES, "scale": "*fp16"},
}


OWN_OPTIONS: dict[Any, dict[str, Any]] = {quantized_linear._quantize_rows: quantized_linear.AS_WRITTEN}


def compiled(kernel: Any, constants: dict[str, Any], warps: int, stages: int) -> Any:
    names = list(inspect.signature(kernel.fn).parameters)
    types = TYPES | OWN_TYPES.get(kernel, {})
    signature = {name: "constexpr" if name in constants else types.get(name, FLOATS) for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or signature[name] == NUMBERS]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages} | OWN_OPTIONS.get(kernel, {})
    return triton.compile(source, target=TARGET, options=options)


def resources(cubin: bytes) -> str:
    """Registers, stack and local memory, by NVIDIA's disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"REG:\d+ STACK:\d+ SHARED:\d+ LOCAL:\d+", output)
    assert found, output
    return found[0]


def main() -> int:
    launched = {
        name for module in ENTRIES for name in re.findall(r"^\s+(_\w+)\[", inspect.getsource(module), re.MULTILINE)
    }
    left_out = launched - {kernel.__name__ for kernel, *_ in CASES}
    faults = [f"{name} is not compiled here" for name in sorted(left_out)]
    for kernel, constants, (warps, stages), expected in CASES:
        done = compiled(kernel, constants, warps, stages)
        ptx, used = done.asm["ptx"], resources(done.asm["cubin"])
        products = set(re.findall(r"(?:mma\.sync|wgmma)[\w.:]*", ptx))
        multiplied = ", ".join(products) or "no product"
        print(f"{kernel.__name__:<18} {used}, {done.metadata.shared} bytes of shared memory, {multiplied}")
        if "STACK:0 " not in used or "LOCAL:0" not in used:
            faults.append(f"{kernel.__name__} spills: {used}")
        if kernel in OWN_OPTIONS and re.search(r"\bfma\.", ptx):
            faults.append(f"{kernel.__name__} fuses products and sums")
        if products != ({expected} if expected else set()):
            faults.append(f"{kernel.__name__} multiplies by {products}, not by {expected or 'nothing'}")
    print("\n".join(faults) or f"{len(CASES)} kernels")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
