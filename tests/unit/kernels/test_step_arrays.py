"""The arrays of a step: their parts, and how a forward is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.kernels.cpu.page_layout import PAGE
from forerun.kernels.partition import AttentionShape
from forerun.kernels.triton.page_layout import DevicePageLayout
from forerun.kernels.triton.product_cut import Cut, power_of_2_from
from forerun.kernels.triton.step_arrays import (
    BUCKETS,
    LINE,
    MAX_ROWS,
    NO_TILE,
    SPLIT,
    TILE_WORDS,
    Capacity,
    bucket_of,
    pieces,
    row_start,
    write_piece,
)
from forerun.kv_cache import PagedCache
from forerun.models.attention.base import LayerAttention
from forerun.models.attention.native import PathPlanner
from forerun.models.base import Rows
from forerun.models.fused.triton_backend import page_layout
from forerun.models.model import lay_out

CPU = torch.device("cpu")
CAPACITY = Capacity.of(2048, 4)


@pytest.fixture
def planner() -> PathPlanner:
    layers = [LayerAttention(2, 4, 16, 16, AttentionShape(0.25))] * 2
    return PathPlanner(layers, torch.float32, page_layout(layers, torch.float32, CPU))


def prefilled(planner: PathPlanner, length: int) -> PagedCache:
    cache = planner.new_cache()
    cache.feed(range(-1, length - 1))
    cache.commit(range(length))
    return cache


def field(words: np.ndarray, name: str, count: int) -> list[int]:
    return words[row_start(name) :][:count].tolist()


def test_rows_tiles_items_tails_and_pages(planner: PathPlanner) -> None:
    base = planner.layout.new_page()
    chain, tree = prefilled(planner, 300), prefilled(planner, 62)
    parents = [-1, 0, 0, 1]
    layout = lay_out([Rows(chain, [5, 6, 7, 8, 9]), Rows(tree, [1, 2, 3, 4], parents)], planner)
    (tiles,) = pieces(layout.plan, 4, CAPACITY)
    words = np.full(CAPACITY.words, -77, np.int64)
    count = write_piece(words, layout.plan, tiles, layout.token_ids.numpy(), base.data_ptr())
    assert field(words, "token", 10) == [5, 6, 7, 8, 9, 1, 2, 3, 4, 0]
    assert field(words, "position", 9) == [300, 301, 302, 303, 304, 62, 63, 63, 64]
    assert field(words, "slot", 9) == [slot % PAGE for slot in (300, 301, 302, 303, 304, 62, 63, 64, 65)]
    assert field(words, "tile", 11) == [0, 0, 0, 0, 1, 2, 2, 2, 2, NO_TILE, NO_TILE]
    items, tiles_at, items_at, tails_at, pages_at = words[:5].tolist()
    assert items == 2 + 2 + 1 and SPLIT == 256
    assert words[items_at : items_at + 2 * items].reshape(-1, 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    numbers = words[tiles_at : tiles_at + 3 * TILE_WORDS].reshape(3, -1).tolist()
    assert [each[:2] for each in numbers] == [[0, 4], [4, 1], [5, 4]]
    assert [each[2] for each in numbers] == [0, 0, len(chain.pages)]
    assert [each[4:] for each in numbers] == [[0, 304], [2, 305], [4, 65]]
    assert numbers[0][3] > 1 << 30 and numbers[2][3] == 0
    pages = [*chain.pages, *tree.pages]
    assert count == pages_at + len(pages)
    for page, lines in zip(pages, words[pages_at:count].tolist(), strict=True):
        assert base.data_ptr() + LINE * lines == page.data_ptr()
    for row, slot in enumerate((62, 63, 64, 65), 5):
        assert base.data_ptr() + LINE * field(words, "page", 9)[row] == tree.pages[slot // PAGE].data_ptr()
    tails, starts = words[tails_at:pages_at].tolist(), field(words, "tail", 9)
    assert tails[starts[7] : starts[8]] == [64] and tails[starts[8] :] == [65]
    assert field(words, "prefix", 9)[5:] == [63, 64, 63, 64]


def test_a_forward_is_cut_where_a_bucket_or_the_room_ends(planner: PathPlanner) -> None:
    rows = [Rows(prefilled(planner, 10), list(range(90))) for _ in range(5)]
    plan = lay_out(rows, planner).plan
    sizes = [sum(tile.end - tile.first for tile in piece) for piece in pieces(plan, 4, CAPACITY)]
    assert sum(sizes) == 450 and max(sizes) <= MAX_ROWS and len(sizes) == 2
    narrow = list(pieces(plan, 4, Capacity(5, CAPACITY.words)))
    assert all(sum(tile.splits for tile in piece) <= 5 for piece in narrow)
    few_words = Capacity(CAPACITY.items, row_start("tail") + MAX_ROWS + 40)
    words = np.zeros(few_words.words, np.int64)
    for piece in pieces(plan, 4, few_words):
        assert write_piece(words, plan, piece, None, 0) <= few_words.words
    ends = [tile.end for piece in narrow for tile in piece]
    assert ends == sorted(ends) and ends[-1] == 450


def test_buckets() -> None:
    assert [bucket_of(count) for count in (1, 16, 17, 33, 256)] == [16, 16, 32, 64, 256]
    assert list(BUCKETS) == sorted(BUCKETS) and BUCKETS[-1] == MAX_ROWS


def test_a_cut_follows_the_shape_alone() -> None:
    assert Cut.of(4096, 4096, 2) == Cut(64, 128, 4)
    assert Cut.of(28672, 4096, 2) == Cut(64, 128, 1)
    assert Cut.of(128256, 4096, 2).splits == 1
    assert Cut.of(33, 40, 4) == Cut(64, 64, 1)
    assert [power_of_2_from(number) for number in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


def test_pages_are_copied_moved_read_and_written() -> None:
    layout = DevicePageLayout([(2, 8, 8)] * 3, torch.float32, CPU)
    pages = [layout.new_page() for _ in range(3)]
    assert all(page.data_ptr() % LINE == 0 and len(page) == layout.size for page in pages)
    keys, values = torch.randn(2, 130, 8), torch.randn(2, 130, 8)
    layout.write(pages, 1, range(130), keys, values)
    assert not pages[0][: layout.layer_starts[1]].any() and not pages[0][layout.layer_starts[2] :].any()
    for own, expected in zip(layout.read(pages, 1, [129, 3, 64]), (keys, values), strict=True):
        assert torch.equal(own, expected[:, [129, 3, 64]])
    layout.move(pages, [62, 64, 66, 129], 61)
    assert torch.equal(layout.read(pages, 1, range(61, 65))[1], values[:, [62, 64, 66, 129]])
    assert torch.equal(layout.read(pages, 1, [60, 65])[0], keys[:, [60, 65]])
    copy = layout.new_page()
    layout.copy_first(pages[0], copy, 5)
    assert torch.equal(layout.read([copy], 1, range(5))[0], keys[:, :5])
    assert not layout.read([copy], 1, range(5, 64))[0].any()
    assert [each.shape[1] for each in layout.read(pages, 0, [])] == [0, 0]
    with pytest.raises(ValueError, match="do not lie in one page"):
        DevicePageLayout([(2, 8, 8), (2, 16, 16)], torch.float32, CPU)
