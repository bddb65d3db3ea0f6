"""Attention over pages, along each row's own path, in plain PyTorch: the definition of the native kernels.

Rotation and cache write included. Everything is float32; keys and values are rounded to the pages' format when they
are written, and read from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from forerun.kernels.cpu.page_layout import PageLayout
from forerun.kernels.partition import AttentionShape, RowPaths

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines by position, each [positions, D / 2]."""


def attend_paths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: RowPaths,
    pages: Sequence[Sequence[Tensor]],
    layout: PageLayout,
    layer: int,
    form: AttentionShape,
    rotation: Rotation | None = None,
) -> Tensor:
    """Write the rows' keys and values, then attend with every row to its own path.

    Args:
        query: [rows, H, D]. key: [rows, H_kv, D]. value: [rows, H_kv, D_v]. All float32.
        pages: by sequence, its pages in order.
        rotation: turns queries and keys by their positions; None: they are taken as they are.

    Returns:
        [rows, H, D_v] float32.
    """
    if rotation is not None:
        position = torch.from_numpy(paths.position).long()
        query, key = rotate(query, position, rotation), rotate(key, position, rotation)
    sequences, slots = paths.sequence.tolist(), paths.slot.tolist()
    for sequence, group in groupby(range(len(slots)), sequences.__getitem__):
        rows = list(group)
        new = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
        layout.write(pages[sequence], layer, [slots[row] for row in rows], *new)
    out = [query.new_empty(0, query.shape[1], value.shape[2])]
    for row, sequence in enumerate(sequences):
        path = path_of(paths, row)
        seen = path if form.window is None else path[-form.window :]
        keys, values = layout.read(pages[sequence], layer, seen)
        out.append(_attend_row(query[row], keys.float(), values.float(), form).unsqueeze(0))
    return torch.cat(out)


def path_of(paths: RowPaths, row: int) -> list[int]:
    """The slots that a row sees, in order."""
    tail: list[int] = paths.tail[paths.tail_start[row] : paths.tail_start[row + 1]].tolist()
    return [*range(int(paths.prefix[row])), *tail]


def rotate(x: Tensor, position: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pairs (i, i + D / 2) of every head by the angles of the row's position, as Transformers does.

    Args:
        x: [rows, heads, D]. position: [rows] int64.
    """
    cos, sin = (table[position].unsqueeze(1) for table in rotation)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, form: AttentionShape) -> Tensor:
    """query: [H, D]; keys: [H_kv, n, D]; values: [H_kv, n, D_v] -> [H, D_v]."""
    heads, group = len(query), len(query) // len(keys)
    scores = torch.einsum("hgd,hnd->hgn", query.view(-1, group, query.shape[1]), keys) * form.scale
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    n = scores.shape[2]
    if form.sinks is not None:
        scores = torch.cat([scores, form.sinks.to(scores.dtype).view(-1, group, 1)], 2)
    weights = torch.softmax(scores, -1)[..., :n]
    return torch.einsum("hgn,hnd->hgd", weights, values).reshape(heads, -1)
