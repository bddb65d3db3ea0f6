"""Attention over pages: one program adds up SPLIT keys for a tile of rows, a second kernel adds these results in order.

A tile is up to TILE // group consecutive rows of one sequence, each with its query heads of one key head. Where all of
its rows have the same slots, which is everywhere in a chain, they share what is read. Where a tree's rows differ, each
reads its own path, in the order of positions; so its bits are those of a chain that holds the same tokens.

Keys are added PAGE at a time from a multiple of SPLIT on, whatever else is in the tile: keys that a row does not see
have the weight zero, and numbers that are not finite are kept from rows that do not see them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.triton.step_arrays import LINE, SPLIT, TILE, TILE_WORDS, row_start

_PAGE = tl.constexpr(PAGE)
_SPLIT = tl.constexpr(SPLIT)
_TILE = tl.constexpr(TILE)
_ITEMS = tl.constexpr(0)
_TILES_AT = tl.constexpr(1)
_ITEMS_AT = tl.constexpr(2)
_TAILS_AT = tl.constexpr(3)
_PAGES_AT = tl.constexpr(4)
_TILE_WORDS = tl.constexpr(TILE_WORDS)
_POSITION = tl.constexpr(row_start("position"))
_TILE_OF_ROW = tl.constexpr(row_start("tile"))
_PREFIX = tl.constexpr(row_start("prefix"))
_TAIL = tl.constexpr(row_start("tail"))


@triton.jit
def _added(query, keys, values, visible, scale, largest, total, result):
    """Add some keys to the running softmax: the largest score, the sum of weights, the weighted values."""
    is_sound = tl.abs(values.to(tl.float32)) < float("inf")
    bad = tl.max(tl.where(is_sound, 0, 1), 1)
    values = tl.where(is_sound, values, 0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where((bad > 0)[None, :], float("nan"), scores)  # who sees such a key gets NaN, nobody else
    scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    reference = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp(largest - reference)
    weights = tl.exp(scores - reference[:, None])
    result = tl.dot(weights.to(values.dtype), values, result * kept[:, None], input_precision="ieee")
    return new, total * kept + tl.sum(weights, 1), result


@triton.jit
def _loaded(addresses, is_there, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Load keys, and the values of the same slots, which lie after the keys of all heads."""
    return tl.load(addresses, is_there, 0.0), tl.load(addresses + KV_HEADS * _PAGE * WIDTH, is_there, 0.0)


@triton.jit
def _path_offsets(words, tails, pages, row, seen, WIDTH: tl.constexpr, LINE_NUMBERS: tl.constexpr):
    """Return the offsets of the keys at positions `seen` of one row's path, and which of them exist."""
    is_there = seen <= tl.load(words + _POSITION + row)
    prefix = tl.load(words + _PREFIX + row)
    tail = tails + tl.load(words + _TAIL + row)
    slot = tl.where(seen < prefix, seen, tl.load(tail + seen - prefix, is_there & (seen >= prefix), 0))
    page = tl.load(pages + slot // _PAGE, is_there, 0)
    return page * LINE_NUMBERS + slot % _PAGE * WIDTH, is_there


@triton.jit
def _split_result(
    words,
    tile,
    taken,
    position,
    keys_start,
    start,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    LINE_NUMBERS: tl.constexpr,
):
    """Add up the keys at positions start to start + _SPLIT for the rows of a tile."""
    BLOCK_D: tl.constexpr = taken.shape[1]
    first_row = tl.load(tile)
    tile_rows = tl.load(tile + 1)
    shared = tl.load(tile + 3)
    length = tl.load(tile + 5)
    pages = words + tl.load(words + _PAGES_AT) + tl.load(tile + 2)
    tails = words + tl.load(words + _TAILS_AT)
    members = tl.arange(0, _TILE) // GROUP
    slots = tl.arange(0, _PAGE)
    columns = tl.arange(0, BLOCK_D)[None, :]
    largest = tl.full([_TILE], float("-inf"), tl.float32)
    total = tl.zeros([_TILE], tl.float32)
    result = tl.zeros([_TILE, BLOCK_D], tl.float32)
    end = tl.minimum(start + _SPLIT, length)
    if WINDOW > 0:
        seen_from = tl.min(tl.where(members < tile_rows, position, length)) - WINDOW + 1
        start = tl.where(seen_from >= end, end, tl.maximum(start, seen_from // _PAGE * _PAGE))
    while start < end:
        seen = start + slots
        visible = seen[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (seen[None, :] > position[:, None] - WINDOW)
        if start + _PAGE <= shared:
            addresses = keys_start + tl.load(pages + start // _PAGE) * LINE_NUMBERS + slots[:, None] * WIDTH + columns
            is_there = (seen < length)[:, None] & (columns < WIDTH)
            keys, values = _loaded(addresses, is_there, KV_HEADS, WIDTH)
            largest, total, result = _added(taken, keys, values, visible, scale, largest, total, result)
        else:
            member = tile_rows * 0
            while member < tile_rows:
                offsets, of_row = _path_offsets(words, tails, pages, first_row + member, seen, WIDTH, LINE_NUMBERS)
                is_there = of_row[:, None] & (columns < WIDTH)
                keys, values = _loaded(keys_start + offsets[:, None] + columns, is_there, KV_HEADS, WIDTH)
                own = visible & (members == member)[:, None]
                largest, total, result = _added(taken, keys, values, own, scale, largest, total, result)
                member += 1
        start += _PAGE
    return largest, total, result


@triton.jit
def _attend(
    query,
    words,
    base,
    results,
    stats,
    layer_start,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    LINE_NUMBERS: tl.constexpr,
):
    head = tl.program_id(1)
    lanes = tl.arange(0, _TILE)
    columns = tl.arange(0, BLOCK_D)[None, :]
    num_items = tl.load(words + _ITEMS)
    items = words + tl.load(words + _ITEMS_AT)
    keys_start = base + layer_start + head * _PAGE * WIDTH
    item = tl.program_id(0).to(tl.int64)
    while item < num_items:
        tile = words + tl.load(words + _TILES_AT) + tl.load(items + 2 * item) * _TILE_WORDS
        start = tl.load(items + 2 * item + 1) * _SPLIT
        in_tile = lanes // GROUP < tl.load(tile + 1)
        rows = tl.load(tile) + lanes // GROUP
        position = tl.load(words + _POSITION + rows, in_tile, -1)
        queries = query + (rows * KV_HEADS + head) * GROUP * WIDTH + lanes % GROUP * WIDTH
        taken = tl.load(queries[:, None] + columns, in_tile[:, None] & (columns < WIDTH), 0.0)
        largest, total, result = _split_result(
            words, tile, taken, position, keys_start, start, scale, KV_HEADS, GROUP, WIDTH, WINDOW, LINE_NUMBERS
        )
        entry = item * KV_HEADS + head
        tl.store(stats + entry * 2 * _TILE + lanes, largest)
        tl.store(stats + entry * 2 * _TILE + _TILE + lanes, total)
        out = results + (entry * _TILE + lanes)[:, None] * WIDTH + columns
        tl.store(out, result, (lanes >= 0)[:, None] & (columns < WIDTH))
        item += tl.num_programs(0)


@triton.jit
def _combine(
    words,
    results,
    stats,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    members = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    in_group = members < GROUP
    inside = in_group[:, None] & (columns < WIDTH)[None, :]
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    result = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    index = tl.load(words + _TILE_OF_ROW + row)
    if index >= 0:
        tile = words + tl.load(words + _TILES_AT) + index * _TILE_WORDS
        lanes = (row - tl.load(tile)) * GROUP + members
        first_item = tl.load(tile + 4)
        position = tl.load(words + _POSITION + row)
        split = position * 0
        if WINDOW > 0:
            split = tl.maximum(position - WINDOW + 1, 0) // _SPLIT
        while split <= position // _SPLIT:
            entry = (first_item + split) * KV_HEADS + head
            part_largest = tl.load(stats + entry * 2 * _TILE + lanes, in_group, 0.0)
            part_total = tl.load(stats + entry * 2 * _TILE + _TILE + lanes, in_group, 0.0)
            part = tl.load(results + (entry * _TILE + lanes)[:, None] * WIDTH + columns[None, :], inside, 0.0)
            new = tl.maximum(largest, part_largest)
            kept = tl.exp(largest - new)
            taken = tl.exp(part_largest - new)
            total = total * kept + part_total * taken
            result = result * kept[:, None] + part * taken[:, None]
            largest = new
            split += 1
        result = result / tl.where(in_group, total, 1.0)[:, None]
        heads = row * KV_HEADS * GROUP + head * GROUP + members
        tl.store(out + heads[:, None] * WIDTH + columns[None, :], result.to(out.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True, eq=False)
class PartialResults:
    """Memory for the partial results of all splits, reused layer by layer.

    Attributes:
        results: [items, H_kv, TILE, D] float32. stats: [items, H_kv, 2, TILE] float32: largest score, sum of weights.
    """

    results: Tensor
    stats: Tensor

    @classmethod
    def of(cls, num_items: int, num_kv_heads: int, width: int, device: torch.device) -> PartialResults:
        results = torch.zeros(num_items, num_kv_heads, TILE, width, dtype=torch.float32, device=device)
        return cls(results, torch.zeros(num_items, num_kv_heads, 2, TILE, dtype=torch.float32, device=device))


def attend_pages(
    query: Tensor,
    words: Tensor,
    base: Tensor,
    partial: PartialResults,
    out: Tensor,
    layer_start: int,
    scale: float,
    window: int | None,
    num_programs: int,
) -> None:
    """Attend with every row to its own path in the pages. Dead rows, which have no tile, are left out.

    Args:
        query: [rows, H, D] in the pages' type, rotated.
        words: `step_arrays`, on the device. base: the dummy page.
        out: [rows, H, D] of any float type, written.
        layer_start: the first number of the layer in a page.
        num_programs: that share the work of each key head. It changes no bit.
    """
    rows, heads, width = query.shape
    num_kv_heads = partial.results.shape[1]
    group = heads // num_kv_heads
    shape = {"KV_HEADS": num_kv_heads, "GROUP": group, "WIDTH": width}
    shape |= {"BLOCK_D": max(16, triton.next_power_of_2(width)), "WINDOW": window or 0}
    _attend[(num_programs, num_kv_heads)](
        query,
        words,
        base,
        partial.results,
        partial.stats,
        layer_start,
        scale,
        **shape,
        LINE_NUMBERS=LINE // base.element_size(),
        num_warps=4,
        num_stages=2,
    )
    _combine[(rows, num_kv_heads)](
        words, partial.results, partial.stats, out, **shape, BLOCK_G=triton.next_power_of_2(group), num_warps=4
    )
