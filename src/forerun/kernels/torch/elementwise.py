"""Root-mean-square norm and SiLU in plain PyTorch, whose bits do not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Normalise rows by their root mean square, [T, hidden] -> [T, hidden], in fewer operations than F.rms_norm (9.8
    against 13 us).

    Args:
        weight: [hidden] in the type to compute in. eps: [] in that type, on the same device.
    """
    wide = x.to(weight.dtype, copy=True)
    length = torch.linalg.vector_norm(wide, 2, -1, True)
    inverse = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return wide.mul_(inverse).mul_(weight).to(x.dtype)


# PyTorch's own SiLU computes whole vectors one way and the remainder of a thread's part another way, which differ in
# the last bit now and then; where such a part ends follows from the number of rows and of threads. Its exponential has
# one way for both, and sums and quotients are rounded correctly.


def silu(x: Tensor) -> Tensor:
    """Compute x / (1 + e^-x). x: floats of any shape."""
    divisor = x.neg().exp_().add_(1)
    return torch.div(x, divisor, out=divisor)


class Silu(nn.Module):
    """`silu` as a module, in place of one of Transformers or PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute `silu`."""
        return silu(x)
