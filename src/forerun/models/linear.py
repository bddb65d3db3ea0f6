"""The contract of linear layers, and which of them a model gets."""

from __future__ import annotations

import inspect
from typing import Protocol

from torch import Tensor, nn

from forerun.kernels.experts import PackedExperts
from forerun.kernels.plain_linear import PlainLinear
from forerun.kernels.row_invariant_linear import PackedLinear, can_pack


class Linear(Protocol):
    """y = x W^T + b.

    Attributes:
        in_features, out_features: widths of x and y.
    """

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x). residual: [..., out]."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Packed where weights of this type can be packed on their device, plain elsewhere. weight: [out, in]."""
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _are_plain_experts(module: nn.Module) -> bool:
    """Whether a module computes what Mixtral's experts do, which Transformers copies from family to family. Others
    (biases, clamps) keep their own modules and report what that costs."""
    if not type(module).__name__.endswith("Experts"):
        return False
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    ours, theirs = (inspect.unwrap(cls.forward).__code__ for cls in (type(module), MixtralExperts))
    return (ours.co_code, ours.co_names, ours.co_consts) == (theirs.co_code, theirs.co_names, theirs.co_consts)


def pack_module(module: nn.Module) -> None:
    """Replace, in place, every layer below `module` that can be packed: nn.Linear, GPT-2's Conv1D, plain experts."""
    for name, child in list(module.named_children()):
        packed = _packed(child)
        if packed is None:
            pack_module(child)
        else:
            setattr(module, name, packed)


def _packed(module: nn.Module) -> nn.Module | None:
    """A packed module in place of this one; None if there is none."""
    from transformers.pytorch_utils import Conv1D

    weights = dict(module.named_parameters(recurse=False))
    if not weights or not all(can_pack(weight.dtype, weight.device) for weight in weights.values()):
        return None
    if type(module) is nn.Linear:
        return PackedLinear(module.weight, module.bias)
    if type(module) is Conv1D:
        return PackedLinear(weights["weight"].T, weights["bias"])
    if _are_plain_experts(module):
        return PackedExperts(list(weights["gate_up_proj"]), list(weights["down_proj"]), module.get_submodule("act_fn"))
    return None
