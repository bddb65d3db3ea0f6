"""The tokens that native kernels pick of rows of logits: the largest, its probability, and the few largest."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels.cpu.library import Library
from kernel_cases import drawn


def picked(library: Library, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns and the probabilities [R] of the largest of the first `width` logits."""
    count, stride = logits.shape
    columns, probabilities = torch.empty(count, dtype=torch.int64), torch.empty(count)
    library.argmax(logits.data_ptr(), count, width, stride, columns.data_ptr(), probabilities.data_ptr())
    return columns, probabilities


def test_the_largest_and_its_probability_are_those_of_softmax(library: Library) -> None:
    logits = 9 * drawn(9, 70)
    logits[5], logits[6, 3:50] = 1, 7  # the first of equal ones
    for width in (1, 15, 16, 33, 70):
        columns, probabilities = picked(library, logits, width)
        first = logits[:, :width]
        assert torch.equal(columns, torch.from_numpy(first.numpy().argmax(-1)))
        torch.testing.assert_close(probabilities, first.softmax(-1).amax(-1), rtol=1e-5, atol=0)


def test_a_row_with_a_number_that_is_not_finite_has_no_largest(library: Library) -> None:
    logits = drawn(7, 37)
    logits[1, 0], logits[2, 20], logits[3, 36] = torch.nan, torch.nan, torch.nan
    logits[4, 5], logits[5, 36] = torch.inf, -torch.inf
    columns, probabilities = picked(library, logits, 37)
    assert (columns[1:6] == -1).all() and not probabilities[1:6].any()
    assert torch.equal(columns[[0, 6]], logits[[0, 6]].argmax(-1))


def test_the_few_largest_are_in_order_and_of_equal_ones_the_first(library: Library) -> None:
    logits = drawn(5, 700)
    logits[1], logits[2] = logits[1].sort().values, -torch.inf
    logits[3] = logits[3].round()
    for count in (1, 3, 8):
        for width in (count, 127, 300, 700):
            rows, found = logits[:, :width].contiguous(), torch.empty(5, count, dtype=torch.int64)
            library.topk(rows.data_ptr(), 5, width, count, found.data_ptr())
            assert torch.equal(found, rows.sort(stable=True, descending=True).indices[:, :count])
