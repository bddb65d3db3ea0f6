"""SiLU has the same bits wherever a number lies, and equals PyTorch's."""

import pytest
import torch
from torch.nn import functional as F

from forerun.kernels.torch.elementwise import silu


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(100, 1024), (9, 8200), (33, 1023)])
def test_rows_have_the_bits_that_they_have_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, width = shape
    wide = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1), dtype=dtype) * 3
    x = wide[:, :width]
    together = silu(x)
    assert torch.equal(together, torch.cat([silu(x[i : i + 1].clone()) for i in range(rows)]))
    torch.testing.assert_close(together, F.silu(x))


def test_large_magnitudes() -> None:
    assert silu(torch.tensor([-200.0, 200.0, 0.0])).tolist() == [-0.0, 200.0, 0.0]
