"""Norm, activation, rotation: against their references, and row by row."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from forerun.kernels.triton.elementwise import add_and_norm, gated
from forerun.kernels.triton.linear import add_splits
from forerun.models.base import Rows
from triton_references import add_and_norm_reference, gated_reference, rotate_reference
from triton_rig import DEVICE, DTYPES, MARKS, Attending, close, drawn

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 4])
def test_residual_and_norm(splits: int, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(16, 96), drawn(96, seed=2), drawn(96, seed=3)
    sums = drawn(splits, 16, 96, seed=4) if splits else None
    x[5] = float("nan")
    added, normed = add_and_norm_reference(x, sums, bias, weight, 1e-5)
    out = torch.empty(16, 96, device=DEVICE, dtype=dtype)
    own = x.clone()
    add_and_norm(own, sums, bias, weight, out, 1e-5)
    others = [row for row in range(16) if row != 5]
    close(own[others], added[others], torch.float32)
    close(out[others], normed[others], dtype)
    assert out[5].isnan().all()
    alone = x[7:8].clone()
    alone_out = torch.empty(1, 96, device=DEVICE, dtype=dtype)
    add_and_norm(alone, None if sums is None else sums[:, 7:8].contiguous(), bias, weight, alone_out, 1e-5)
    assert torch.equal(alone_out[0], out[7])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_activation(splits: int, dtype: torch.dtype) -> None:
    sums = drawn(splits, 16, 2 * 200)
    out = torch.empty(16, 200, device=DEVICE, dtype=dtype)
    gated(sums, out)
    close(out, gated_reference(sums), dtype)


def test_splits_are_added_in_order() -> None:
    sums, bias = drawn(3, 16, 130), drawn(130, seed=2)
    out = torch.empty(16, 130, device=DEVICE)
    add_splits(sums, bias, out)
    assert torch.equal(out, sums[0] + sums[1] + sums[2] + bias)
    assert not torch.equal(out, sums[2] + sums[1] + sums[0] + bias)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotation_writes_to_the_rows_slots_and_nowhere_else(has_norm: bool) -> None:
    import numpy as np

    from forerun.kernels.triton.rotation import rotate_and_write
    from forerun.kernels.triton.step_arrays import pieces, write_piece
    from forerun.models.model import lay_out

    rig = Attending()
    heads, kv_heads = rig.heads
    cache = rig.planner.new_cache()
    cache.feed(range(-1, 61))
    cache.commit(range(62))
    for page in cache.pages:
        page.fill_(7.0)
    layout = lay_out([Rows(cache, [1, 2, 3, 4, 5])], rig.planner)
    cache.pages[-1].fill_(7.0)
    words = np.zeros(rig.capacity.words, np.int64)
    (tiles,) = pieces(layout.plan, rig.tile_rows, rig.capacity)
    write_piece(words, layout.plan, tiles, layout.token_ids.numpy(), rig.base.data_ptr())
    sums, bias = drawn(2, 16, rig.numbers[0].numel()), drawn(rig.numbers[0].numel(), seed=4)
    norms = drawn(2, rig.width, seed=6) if has_norm else None
    query = torch.zeros(16, heads, rig.width, device=DEVICE)
    start = rig.planner.layout.layer_starts[1]
    rotate_and_write(
        sums, bias, norms, 1e-5, rig.tables, torch.from_numpy(words).to(DEVICE), query, rig.base, start, kv_heads
    )
    numbers = (sums[0] + sums[1] + bias).view(16, -1, rig.width)[:5]
    expected = rotate_reference(numbers, norms, 1e-5, rig.tables, layout.positions.to(DEVICE), heads)
    close(query[:5], expected[:, :heads], torch.float32)
    assert not query[5:].any()
    keys, values = cache.read(1)
    close(keys[:, 62:], expected[:, heads : heads + kv_heads].transpose(0, 1), torch.float32)
    close(values[:, 62:], expected[:, heads + kv_heads :].transpose(0, 1), torch.float32)
    assert (keys[:, :62] == 7.0).all() and (values[:, :62] == 7.0).all()
    written = sum(int((page != 7.0).sum()) for page in cache.pages)
    assert written == 2 * 5 * kv_heads * rig.width
    assert not rig.base.any()
