"""Linear layers of models: their interface, what makes them from weights, and the replacement of Transformers'
modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from forerun.kernels.block_weight import BlockWeight
from forerun.kernels.cpu import native_for
from forerun.kernels.cpu.linear import NativeLinear
from forerun.kernels.quantize import QuantizedWeight
from forerun.kernels.torch.linear import (
    JoinedLinear,
    PackedExperts,
    PackedLinear,
    PlainLinear,
    QuantizedEmbedding,
    QuantizedLinear,
    can_pack,
)

_ROWS = 32
"""Rows of each call of a router, whose product is not packed."""


def is_router(module: nn.Module) -> bool:
    """Return whether a module is one of Transformers' routers, by the name that every family uses."""
    return type(module).__name__.endswith("Router")


def call_in_blocks(router: nn.Module) -> None:
    """Make a router compute blocks of 32 rows, the last one padded with zeros.

    Args:
        router: [..., hidden] -> a tensor, or several, with a row for each of T rows. Called with more arguments, it
            computes as before.
    """
    compute = router.forward

    def forward(hidden_states: Tensor, *more: Any, **named: Any) -> Any:
        if more or named:
            return compute(hidden_states, *more, **named)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        count = len(rows)
        filled = torch.cat([rows, rows.new_zeros(-count % _ROWS, rows.shape[1])])
        blocks = [compute(block) for block in filled.view(-1, _ROWS, rows.shape[1]).unbind()]
        if isinstance(blocks[0], Tensor):
            return torch.cat(blocks)[:count]
        return tuple(torch.cat(parts)[:count] for parts in zip(*blocks, strict=True))

    router.forward = forward


class Linear(Protocol):
    """A linear layer, y = x W^T + b.

    Attributes:
        in_features, out_features: widths of x and y.
    """

    in_features: int
    out_features: int

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b. x: [..., in] -> [..., out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + forward(x). residual: [..., out]."""

    def rows(self, index: Tensor) -> Tensor:
        """Return rows of W as numbers. index: [n] int64 -> [n, in] float32."""


class LinearPart(NamedTuple):
    """The outputs that one of Transformers' parameters gives to a linear layer.

    Attributes:
        name: of the parameter, such as "model.layers.0.self_attn.q_proj.weight".
        weight: [out, in], as Transformers holds it.
        rows: int64, the rows to keep, in this order; None: all rows in order.
        is_transposed: the parameter is [in, out].
    """

    name: str
    weight: Tensor
    rows: Tensor | None = None
    is_transposed: bool = False


def of_rows(bias: Tensor | None, rows: Tensor | None) -> Tensor | None:
    """Select these rows of a layer's bias (`Part.rows`)."""
    return bias if bias is None or rows is None else bias[rows]


def at_path(module: nn.Module, path: str) -> Any:
    """Return a module, parameter or buffer at a path below a module."""
    parent, _, leaf = path.rpartition(".")
    return getattr(module.get_submodule(parent), leaf)


def place(parent: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a path below another one."""
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in parent._modules:
            parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(leaf, module)


class Maker(Protocol):
    """Makes a decoder's layers from its weights."""

    def linear(self, parts: Sequence[LinearPart], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """Make one layer whose outputs are those of the parts, concatenated. is_head: it is the output layer."""

    def embedding(self, part: LinearPart) -> Tensor | QuantizedEmbedding:
        """Return a table that gives rows, [n, hidden], when indexed with [n] token ids."""


class FloatMaker:
    """Makes layers of float weights (`Maker`).

    Args:
        make: a layer of its weight [out, in] and bias.
    """

    def __init__(self, make: Callable[[Tensor, Tensor | None], Linear] | None = None) -> None:
        self._make = make or make_linear

    def linear(self, parts: Sequence[LinearPart], bias: Tensor | None = None, *, is_head: bool = False) -> Linear:
        """Make one layer whose outputs are those of the parts, concatenated (`Maker.linear`)."""
        weights = [part.weight if part.rows is None else part.weight[part.rows] for part in parts]
        return self._make(weights[0].contiguous() if len(weights) == 1 else torch.cat(weights), bias)

    def embedding(self, part: LinearPart) -> Tensor:
        """Return a table that gives rows, [n, hidden], when indexed with [n] token ids (`Maker.embedding`)."""
        return part.weight.detach()


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Make a packed layer if weights of this type can be packed on their device, else a plain one. weight: [out,
    in]."""
    if can_pack(weight.dtype, weight.device):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def make_quantized_linear(weights: Sequence[QuantizedWeight | BlockWeight], bias: Tensor | None = None) -> Linear:
    """Make a layer of quantized weights whose outputs are concatenated: native if available, unless the formats differ;
    native decoders make one layer per format."""
    if len({weight.form for weight in weights}) > 1:
        return JoinedLinear(weights, bias)
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    values = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    weight = BlockWeight.cat(blocks) if blocks else QuantizedWeight.cat(values)
    library = native_for(weight.device)
    return QuantizedLinear(weight, bias) if library is None else NativeLinear(library, weight, bias)


def _are_plain_experts(module: nn.Module) -> bool:
    """Return whether a module computes what Mixtral's experts do, which Transformers copies from family to family.
    Other experts (with biases, clamps) keep their own modules, and the self-test reports what that costs."""
    if not type(module).__name__.endswith("Experts"):
        return False
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    ours, theirs = (inspect.unwrap(cls.forward).__code__ for cls in (type(module), MixtralExperts))
    return (ours.co_code, ours.co_names, ours.co_consts) == (theirs.co_code, theirs.co_names, theirs.co_consts)


def pack_module(module: nn.Module, maker: Maker | None = None, head: nn.Module | None = None, prefix: str = "") -> None:
    """Replace, in place, every layer below `module` that can be packed: nn.Linear, GPT-2's Conv1D, plain experts.
    Routers keep their modules, and are called in blocks of rows.

    Args:
        maker: of the linear layers; None: of floats.
        head: the output layer. prefix: of the names of the parameters below `module`.
    """
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if is_router(child) and all(can_pack(weight.dtype, weight.device) for weight in child.parameters()):
            call_in_blocks(child)
        packed = _packed(child) if maker is None else _made(child, maker, child is head, path)
        if packed is None:
            pack_module(child, maker, head, path + ".")
        else:
            setattr(module, name, packed)


def _made(module: nn.Module, maker: Maker, is_head: bool, path: str) -> nn.Module | None:
    """Return a module whose layers the maker makes, in place of `module`; None if there is none."""
    from transformers.pytorch_utils import Conv1D

    if type(module) not in (nn.Linear, Conv1D):
        return _packed(module)
    weights = dict(module.named_parameters(recurse=False))
    weight = weights["weight"].T if type(module) is Conv1D else weights["weight"]
    linear = maker.linear([LinearPart(f"{path}.weight", weight)], weights.get("bias"), is_head=is_head)
    assert isinstance(linear, nn.Module)
    return linear


def _packed(module: nn.Module) -> nn.Module | None:
    """Return a packed module in place of `module`; None if there is none."""
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


def module_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module with their names:
    parameters, buffers, and the tensors that packed layers keep as plain attributes, in the modules' order."""
    for path, part in module.named_modules(prefix=prefix.removesuffix(".")):
        tensors = {**vars(part), **part._parameters, **part._buffers}
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                yield (f"{path}.{name}" if path else name), tensor
