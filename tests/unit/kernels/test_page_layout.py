"""The address of a number in a page, as the native kernels compute it."""

import pytest
import torch

from forerun.kernels.cpu.page_layout import LANES, PAGE, PageLayout

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


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        PageLayout(SHAPES, torch.float16)
