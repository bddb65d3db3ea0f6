"""The address of a number in a page, as the native kernels compute it."""

import pytest
import torch

from forerun.kernels.cpu import references
from forerun.kernels.cpu.page_layout import LANES, PAGE, PageLayout
from forerun.kernels.quantize import quantize_symmetric

SHAPES = [(3, 5, 5), (2, 64, 64), (2, 64, 64), (1, 8, 20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_has_its_place(dtype: torch.dtype) -> None:
    layout = PageLayout(SHAPES, dtype)
    pages = [torch.zeros(layout.size, dtype=dtype) for _ in range(2)]
    slots = [0, 15, 16, 63, 64, 64 + 33]
    start = 0
    for layer, (heads, key_width, value_width) in enumerate(SHAPES):
        keys = torch.randn(heads, len(slots), key_width)
        values = torch.randn(heads, len(slots), value_width)
        layout.write(pages, layer, slots, keys, values)
        assert layout.layer_starts[layer] == start
        assert start * dtype.itemsize % 64 == 0
        for i, slot in enumerate(slots):
            page, at = pages[slot // PAGE], slot % PAGE
            for head in range(heads):
                key_start = start + ((head * (PAGE // LANES) + at // LANES) * key_width) * LANES + at % LANES
                found = page[key_start : key_start + key_width * LANES : LANES]
                assert torch.equal(found, keys[head, i].to(dtype))
                chunks = -(-value_width // LANES)
                value_start = start + heads * PAGE * key_width + (head * chunks * PAGE + at) * LANES
                parts = [page[value_start + c * PAGE * LANES :][:LANES] for c in range(chunks)]
                padded = torch.cat([values[head, i], torch.zeros(chunks * LANES - value_width)])
                assert torch.equal(torch.cat(parts), padded.to(dtype))
        stored_keys, stored_values = layout.read(pages, layer, slots)
        assert torch.equal(stored_keys, keys.to(dtype)) and torch.equal(stored_values, values.to(dtype))
        start += heads * PAGE * (key_width + -(-value_width // LANES) * LANES)
    assert (layout.size, layout.nbytes) == (start, start * dtype.itemsize)


def test_int8_numbers_are_bytes_with_a_scale_for_each_row_and_head() -> None:
    layout = PageLayout(SHAPES, torch.int8)
    pages = [layout.new_page() for _ in range(2)]
    slots, start = [0, 15, 16, 63, 64, 64 + 33], 0
    for layer, (heads, key_width, value_width) in enumerate(SHAPES):
        keys, values = torch.randn(heads, len(slots), key_width), torch.randn(heads, len(slots), value_width)
        keys[-1, 1, 0], values[0, 2] = torch.nan, 0
        layout.write(pages, layer, slots, keys, values)
        assert layout.layer_starts[layer] == start and start % 64 == 0
        chunks = -(-value_width // LANES)
        numbers = heads * PAGE * (key_width + chunks * LANES)
        for name, stored, written in zip(("keys", "values"), layout.read(pages, layer, slots), (keys, values)):
            codes, scale = quantize_symmetric(written)
            assert torch.equal(stored.nan_to_num(7), (codes * scale).nan_to_num(7))
            for i, slot in enumerate(slots):
                page, at = pages[slot // PAGE], slot % PAGE
                behind = page[start + numbers :][: 8 * heads * PAGE].view(torch.float32).view(2, heads, PAGE)
                found = behind[int(name == "values"), :, at]
                assert torch.equal(found.nan_to_num(7), scale[:, i, 0].nan_to_num(7))
                for head in range(heads):
                    key_start = start + ((head * (PAGE // LANES) + at // LANES) * key_width) * LANES + at % LANES
                    value_start = start + heads * PAGE * key_width + (head * chunks * PAGE + at) * LANES
                    found = page[key_start : key_start + key_width * LANES : LANES]
                    if name == "values":
                        parts = [page[value_start + c * PAGE * LANES :][:LANES] for c in range(chunks)]
                        found = torch.cat(parts)[:value_width]
                    assert torch.equal(found, codes[head, i].to(torch.int8))
        start += numbers + 8 * heads * PAGE
    assert (layout.size, layout.nbytes) == (start, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_slots_are_moved_and_copied_with_all_that_belongs_to_them(dtype: torch.dtype) -> None:
    layout = PageLayout(SHAPES, dtype)
    pages = [layout.new_page() for _ in range(2)]
    for layer, (heads, key_width, value_width) in enumerate(SHAPES):
        layout.write(pages, layer, range(100), torch.randn(heads, 100, key_width), torch.randn(heads, 100, value_width))
    slots, copies = [60, 63, 64, 80, 99], [page.clone() for page in pages]
    expected = [layout.read(pages, layer, [*range(60), *slots]) for layer in range(len(SHAPES))]
    layout.move(pages, slots, 60)
    with references():
        layout.move(copies, slots, 60)
    target = layout.new_page()
    layout.copy_first(pages[0], target, 39)
    for layer, (keys, values) in enumerate(expected):
        for moved in (pages, copies):
            found = layout.read(moved, layer, range(65))
            assert torch.equal(found[0], keys) and torch.equal(found[1], values)
        found = layout.read([target], layer, range(39))
        assert torch.equal(found[0], keys[:, :39]) and torch.equal(found[1], values[:, :39])


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        PageLayout(SHAPES, torch.float16)
