"""Sums along rows have the same bits whatever rows stand beside."""

import torch

from forerun.sampling.draw import running_sums, sums_in_pairs


def test_rows_have_the_bits_that_they_have_alone() -> None:
    values = torch.rand(7, 301, generator=torch.Generator().manual_seed(1))
    expected = torch.cat([values[row : row + 1].double().cumsum(-1) for row in range(7)])
    for sums in (running_sums(values), sums_in_pairs(values), sums_in_pairs(values[2:])):
        assert sums.dtype == torch.float64 and torch.equal(sums, expected[-len(sums) :])
    assert sums_in_pairs(values[:0]).shape == (0, 301)
