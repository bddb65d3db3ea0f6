"""The activation x / (1 + e^-x), whose bits do not depend on where in a tensor a number lies.

PyTorch's own computes whole vectors one way and what is left at the end of a thread's part another way, which now and
then differ in the last bit; where such a part ends follows from the number of rows and of threads. Its exponential has
one way for both, and sums and quotients are rounded rightly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def silu(x: Tensor) -> Tensor:
    """x: floats of any shape."""
    divisor = x.neg().exp_().add_(1)
    return torch.div(x, divisor, out=divisor)


class Silu(nn.Module):
    """The same in place of a module of Transformers or PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        """As `silu`."""
        return silu(x)
