"""What the tests of the native kernels compute with: weights of every kind, attention of one layer, forced machines."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_paths_reference import attend_paths
from forerun.config import ARM_INSTRUCTIONS, INSTRUCTIONS, X86_INSTRUCTIONS
from forerun.kernels.block_weight import BLOCK_TYPES, BlockWeight
from forerun.kernels.cpu import native
from forerun.kernels.cpu.library import Library
from forerun.kernels.partition import AttentionShape
from forerun.kernels.quantize import GROUP, QuantizedWeight, quantize_int4, quantize_int8
from forerun.kernels.torch.linear import QuantizedLinear
from forerun.kv_cache import PagedCache
from forerun.models.attention.base import LayerAttention, Layout
from forerun.models.attention.native import NativeAttention, PathPlanner
from forerun.models.base import Rows
from forerun.models.model import lay_out

_QUANTIZED = ("int8", "int8-groups", "int8-zeros", "int4-groups", "int4-minima", "int4-zeros")
KINDS = ("float32", "bfloat16", *_QUANTIZED, *(f"{kind}-by-bytes" for kind in _QUANTIZED))
NUM_TOKENS = 300
_OTHERS = X86_INSTRUCTIONS if platform.machine() in ("aarch64", "arm64") else ARM_INSTRUCTIONS
SETS = [name for name in INSTRUCTIONS if name not in _OTHERS]
"""The instruction sets of this kind of processor, the best first."""
BFLOAT16_READERS = ("amx", "avx512bf16")
"""Instruction sets that round the rows of a product with bfloat16."""
THREADS = (1, 2, 3, 5, 8, 16)
"""Numbers of them that must not change a bit."""
Numbers = tuple[Tensor, Tensor, Tensor]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: str, out: int, size: int, seed: int = 0) -> Tensor | QuantizedWeight:
    """A matrix [out, size]. "int8-groups" is GGUF's Q8_0, "int4-groups" Q4_0, "int4-minima" Q4_1; "-zeros" have a zero
    for each group of 96; what ends in "-by-bytes" takes activations of 8 bits."""
    if kind.endswith("-by-bytes"):
        weight = weight_of(kind.removesuffix("-by-bytes"), out, size, seed)
        assert isinstance(weight, QuantizedWeight)
        return replace(weight, activation_bits=8)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(out, size, generator=generator)
    if kind in ("float32", "bfloat16"):
        return numbers.to(getattr(torch, kind))
    if kind == "int8":
        return quantize_int8(numbers)
    if kind == "int4-minima":
        return quantize_int4(numbers)
    bits, zero, codes = (8, 128, 256) if kind.startswith("int8") else (4, 8, 16)
    group = 3 * GROUP if kind.endswith("-zeros") else GROUP
    shape = out, -(-size // group)
    values = torch.randint(0, codes, (out, size), generator=generator).to(torch.uint8)
    scale = torch.rand(shape, generator=generator)
    if kind.endswith("-zeros"):  # scales are as bfloat16 has them, and smaller than float16 has them
        zeros = torch.randint(0, codes, shape, generator=generator).to(torch.uint8)
        return QuantizedWeight(bits, values, zeros, (scale * 1e-6).bfloat16().float(), None, group)
    return QuantizedWeight(bits, values, zero, scale.half(), None, group)


SCALES_AT = (
    dict.fromkeys(BLOCK_TYPES, (0,)) | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)) | {"Q6_K": (208,)}
)
"""By type of blocks, the bytes at which a block has its float16 scale and minimum; MXFP4 has an exponent."""


def blocks_of(type_name: str, out: int, size: int, seed: int = 0) -> BlockWeight:
    """Random blocks. Of six rows, the first has the smallest scales, the second none, the third and fourth bytes of all
    ones and of zeros, with scales of both signs."""
    form, random = BLOCK_TYPES[type_name], np.random.default_rng(seed)
    blocks = random.integers(0, 256, (out, size // form.block_size, form.block_bytes), np.uint8)
    blocks[2::6], blocks[3::6] = 255, 0
    for place in SCALES_AT[type_name]:
        scale = random.normal(0, 1e-3, blocks.shape[:2]).astype(np.float16)
        scale[::6], scale[1::6] = 6e-8, 0
        blocks[..., place : place + 2] = scale.view(np.uint8).reshape(*scale.shape, 2)
    if type_name == "MXFP4":
        blocks[..., 0] = random.integers(110, 130, blocks.shape[:2])
        blocks[::6, :, 0], blocks[1::6, :, 0] = 0, 1
    blocks = blocks.reshape(out, -1)
    blocks.flags.writeable = False  # as a file's memory
    return BlockWeight(type_name, (out, size), blocks)


def as_read(library: Library, weight: Tensor | QuantizedWeight, x: Tensor) -> Tensor:
    """Rows as a product reads them: rounded where the instruction set in use multiplies bfloat16."""
    if library.instructions in BFLOAT16_READERS and isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
        return x.bfloat16().float()
    return x


def product_of(weight: Tensor | QuantizedWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """By the reference, or in float64."""
    if isinstance(weight, QuantizedWeight):
        return QuantizedLinear(weight, bias).forward(x)
    y = x.double() @ weight.double().T
    return (y if bias is None else y + bias).float()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def using(instructions: str) -> Iterator[Library]:
    """The library, which computes with these. The test is skipped where there is none, or the processor lacks them."""
    library = native()
    if library is None:
        pytest.skip("there are no native kernels here")
    before = library.instructions
    if instructions not in library.supported:
        pytest.skip(f"the processor lacks {instructions}")
    assert library.use_instructions(instructions), f"{library.path} was not compiled for {instructions}"
    yield library
    library.use_instructions(before)


def each_set(library: Library) -> Iterator[str]:
    """Force one instruction set after another, of those that the processor has."""
    before = library.instructions
    try:
        for name in library.supported:
            assert library.use_instructions(name), f"{library.path} was not compiled for {name}"
            yield name
    finally:
        library.use_instructions(before)


class Attending:
    """One layer of native attention, the second of two, and numbers that depend on a token alone.

    Args:
        heads: of queries, and of keys and values. widths: of a key, and of a value.
    """

    def __init__(
        self,
        library: Library,
        form: AttentionShape,
        dtype: torch.dtype = torch.bfloat16,
        heads: tuple[int, int] = (6, 2),
        widths: tuple[int, int] = (48, 40),
    ) -> None:
        self.form, self.heads, self.widths = form, heads, widths
        self.attention = NativeAttention(library, torch.float32, dtype)
        layers = [LayerAttention(heads[1], heads[0] // heads[1], *widths, form)] * 2
        self.planner: PathPlanner = self.attention.planner(layers, torch.device("cpu"))

    def numbers(self, tokens: Tensor) -> Numbers:
        """Queries, keys and values of tokens."""
        generator = torch.Generator().manual_seed(3)
        (heads, kv_heads), (width, value_width) = self.heads, self.widths
        shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
        query, key, value = (torch.randn(NUM_TOKENS, *shape, generator=generator)[tokens] for shape in shapes)
        return query, key, value

    def forward(self, batch: Sequence[Rows]) -> Tensor:
        layout = lay_out(batch, self.planner)
        return self.attention.forward(1, *self.numbers(layout.token_ids), layout, self.form)

    def sequence(self, tokens: Sequence[int]) -> PagedCache:
        cache = self.planner.new_cache()
        if tokens:
            self.forward([Rows(cache, list(tokens))])
            cache.commit(range(len(tokens)))
        return cache

    def reference(self, batch: Sequence[Rows]) -> Tensor:
        """By the definition, in copies of the pages; the rows leave the scratch again."""
        layout: Layout = lay_out(batch, self.planner)
        caches = [rows.cache for rows in batch]
        pages = [[page.clone() for page in cache.pages] for cache in caches if isinstance(cache, PagedCache)]
        query, key, value = self.numbers(layout.token_ids)
        out = attend_paths(query, key, value, layout.plan.paths, pages, self.planner.layout, 1, self.form)
        for cache in caches:
            cache.drop()
        return out.flatten(1)
