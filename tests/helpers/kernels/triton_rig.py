"""What the tests of the Triton kernels compute with: on a GPU, or on the CPU in Triton's interpreter.

`TRITON_INTERPRET=1` must be in the environment before triton is imported; `tests/unit/kernels/test_triton.py` starts a
process in which it is. Without it these tests are marked gpu.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_paths_reference import attend_paths
from forerun.kernels.partition import AttentionShape
from forerun.kernels.triton.step_arrays import TILE, Capacity, bucket_of, pieces, write_piece
from forerun.kv_cache import PagedCache
from forerun.models.attention.base import LayerAttention
from forerun.models.attention.native import PathPlanner
from forerun.models.base import Rows
from forerun.models.fused.triton_backend import page_layout
from forerun.models.model import lay_out

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
MARKS = (
    []
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
SLOW = [pytest.mark.slow] if INTERPRETED else []
"""Of what takes seconds in the interpreter."""
NUM_TOKENS = 400


def quicken() -> None:
    """Leave out what costs the interpreter most: checks of integer overflow at every operation, and the exchange of the
    language's functions at every call of a device function, which the kernel that calls has done already."""
    from dataclasses import replace

    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched: set[str] = set()

    def call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal numbers, on the device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def close(own: Tensor, expected: Tensor, dtype: torch.dtype, most: float = 1e-5, most_rounded: float = 1e-2) -> None:
    """By the relative error of all numbers together. most: of a float32 result. most_rounded: of a bfloat16 one."""
    own, expected = own.double().cpu(), expected.double().cpu()
    assert torch.isfinite(own).all()
    error = float((own - expected).norm() / expected.norm())
    assert error < (most_rounded if dtype == torch.bfloat16 else most), error


class Attending:
    """One layer of attention, the second of two, with rotation, of rows whose numbers depend on their token alone.

    Args:
        heads: of queries, and of keys and values. width: of each.
    """

    def __init__(
        self,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (6, 2),
        width: int = 24,
    ) -> None:
        from forerun.kernels.triton.attention import PartialResults
        from forerun.kernels.triton.rotation import RotationTables

        self.form, self.heads, self.width = AttentionShape(width**-0.5, window), heads, width
        group = heads[0] // heads[1]
        self.tile_rows = TILE // group
        layers = [LayerAttention(heads[1], group, width, width, self.form)] * 2
        self.planner = PathPlanner(layers, dtype, page_layout(layers, dtype, DEVICE))
        self.base = self.planner.layout.new_page()
        self.tables = RotationTables(*(drawn(2048, width // 2, seed=seed) for seed in (7, 8)))
        self.capacity = Capacity.of(1024, self.tile_rows)
        self.partial = PartialResults.of(self.capacity.items, heads[1], width, DEVICE)
        self.numbers = drawn(NUM_TOKENS, heads[0] + 2 * heads[1], width, seed=3)

    def forward(self, batch: Sequence[Rows], dead: float = float("nan"), num_programs: int = 2) -> Tensor:
        """[rows, H, D]. dead: what the rows hold that pad the bucket."""
        from forerun.kernels.triton.attention import attend_pages
        from forerun.kernels.triton.rotation import rotate_and_write

        layout = lay_out(batch, self.planner)
        words = np.full(self.capacity.words, 1 << 50, np.int64)
        start, results = self.planner.layout.layer_starts[1], []
        for tiles in pieces(layout.plan, self.tile_rows, self.capacity):
            first, end = tiles[0].first, tiles[-1].end
            write_piece(words, layout.plan, tiles, layout.token_ids.numpy(), self.base.data_ptr())
            on_device = torch.from_numpy(words).to(DEVICE)
            sums = torch.full((1, bucket_of(end - first), self.numbers[0].numel()), dead, device=DEVICE)
            sums[0, : end - first] = self.numbers[layout.token_ids[first:end]].flatten(1)
            query = torch.full((sums.shape[1], self.heads[0], self.width), dead, device=DEVICE).to(self.base.dtype)
            out = torch.empty_like(query)
            rotate_and_write(sums, None, None, 0.0, self.tables, on_device, query, self.base, start, self.heads[1])
            attend_pages(
                query, on_device, self.base, self.partial, out, start, self.form.scale, self.form.window, num_programs
            )
            results.append(out[: end - first])
        return torch.cat(results)

    def sequence(self, tokens: Sequence[int]) -> PagedCache:
        """A cache of these tokens, in pages that were full of NaN before. No kernel computes them."""
        from triton_references import rotate_reference

        cache = self.planner.new_cache()
        heads, kv_heads = self.heads
        if tokens:
            cache.feed(range(-1, len(tokens) + 30))
            for page in cache.pages:
                page.fill_(float("nan"))
            cache.drop()
            cache.feed(range(-1, len(tokens) - 1))
            positions = torch.arange(len(tokens), device=DEVICE)
            turned = rotate_reference(self.numbers[list(tokens)], None, 0.0, self.tables, positions, heads)
            _, keys, values = turned.transpose(0, 1).split([heads, kv_heads, kv_heads])
            cache.write(1, 0, keys, values)
            cache.commit(range(len(tokens)))
        return cache

    def reference(self, batch: Sequence[Rows]) -> Tensor:
        """By the definition, in copies of the pages; the rows leave the scratch again."""
        layout = lay_out(batch, self.planner)
        heads, kv_heads = self.heads
        parts = self.numbers[layout.token_ids].cpu().split([heads, kv_heads, kv_heads], 1)
        pages = [[page.clone() for page in rows.cache.pages] for rows in batch]
        tables = self.tables.cos.cpu(), self.tables.sin.cpu()
        layouts = self.planner.layout
        expected = _on_cpu(attend_paths, parts, layout.plan.paths, pages, layouts, self.form, tables)
        for rows in batch:
            rows.cache.drop(rows.cache.num_scratch - len(rows.token_ids))
        return expected


def _on_cpu(attend, parts, paths, pages, layouts, form, tables) -> Tensor:
    from forerun.kernels.triton.page_layout import DevicePageLayout

    here = DevicePageLayout(layouts.shapes, layouts.dtype, torch.device("cpu"))
    here_pages = [[page.cpu() for page in of_sequence] for of_sequence in pages]
    return attend(*parts, paths, here_pages, here, 1, form, tables)
