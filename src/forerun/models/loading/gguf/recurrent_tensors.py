"""How tensors of recurrent layers in GGUF files differ from Transformers' parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from forerun.models.loading.gguf.file import GgufTensor
from forerun.models.spec.recurrence import RECURRENT_ROLES, Recurrence

_STATES = {
    "norm": "ssm_norm.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "conv1d": "ssm_conv1d",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "short_convolution": {
        "in_proj_qkv": "shortconv.in_proj",
        "out_proj": "shortconv.out_proj",
        "conv1d": "shortconv.conv",
    },
    "delta_rule": {
        "in_proj_qkv": "attn_qkv",
        "in_proj_z": "attn_gate",
        "in_proj_b": "ssm_beta",
        "in_proj_a": "ssm_alpha",
        "out_proj": "ssm_out",
        **_STATES,
    },
    "state_space": {"in_proj_qkv": "ssm_in", "out_proj": "ssm_out", **_STATES},
}
"""Role or parameter of a kind of recurrence -> llama.cpp's name of it. The first of the roles that share a module names
it."""
_WITH_KIND = {*RECURRENT_ROLES, "conv1d"}
"""Those that may have a weight and a bias."""


@dataclass(frozen=True, slots=True)
class RecurrentTensors:
    """The tensors of recurrent layers, by the names of the parameters of layer 0 that they are.

    Attributes:
        names: the file's name of a tensor -> the parameter, and its place among the tensors that are one parameter.
        shapes: Transformers'; of parameters that the file has with others.
        rows, columns: Transformers' order of the file's rows or columns, int64; of those that are in another order.
        rates: those that are -exp of the parameter.
    """

    names: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    rates: frozenset[str] = frozenset()

    @classmethod
    def of(cls, shape: Recurrence | None, layer: str, *, is_tiled: bool) -> RecurrentTensors:
        """Return those of a decoder with such layers, if there are any.

        Args:
            layer: the path of layer 0, with a dot behind it. is_tiled: value heads of the file are.
        """
        if shape is None:
            return cls()
        names = dict[str, tuple[str, int]]()
        parameters = dict[str, str]()
        for part, theirs in _names(shape).items():
            path = shape.modules.get(part) or shape.parameters.get(part)
            if path is None:
                continue
            place = int(part == "in_proj_z" and path == shape.modules["in_proj_qkv"])
            parameters[part] = f"{layer}{path}.weight" if part in (*_WITH_KIND, "norm") else layer + path
            for kind in ("weight", "bias") if part in _WITH_KIND else ():
                names[f"blk.0.{theirs}.{kind}"] = f"{layer}{path}.{kind}", place
            if part not in _WITH_KIND:
                names[f"blk.0.{theirs}"] = parameters[part], 0
        reordered = is_tiled and not shape.heads_are_tiled and shape.heads != shape.key_heads
        rows = {parameters[part]: order for part, order in _grouped(shape).items()} if reordered else {}
        if parameters.get("in_proj_z") == parameters["in_proj_qkv"]:  # the converter puts all gates behind
            runs = [
                run for part in ("in_proj_qkv", "in_proj_z") if (run := shape.rows(part, in_pairs=False)) is not None
            ]
            rows[parameters["in_proj_qkv"]] = torch.cat(runs).argsort()
        out = parameters["out_proj"]
        columns = {out: rows.pop(out)} if reordered else {}
        sizes = {"conv1d": (shape.channels, 1, shape.conv_kernel), "norm": (-1,), **dict.fromkeys(_HEADS, (-1,))}
        shapes = {parameters[part]: size for part, size in sizes.items() if part in parameters}
        rates = frozenset(parameters[part] for part in ("A_log",) if part in parameters)
        return cls(names, shapes, rows, columns, rates)


def _names(shape: Recurrence) -> dict[str, str]:
    """Return llama.cpp's names by role or parameter. One of beta and decay together is not taken apart."""
    names = {**_NAMES[shape.kind]}
    if "in_proj_b" in names and shape.modules["in_proj_b"] == shape.modules["in_proj_a"]:
        names |= {"in_proj_b": "ssm_ba"}
        del names["in_proj_a"]
    return names


def shaped(shapes: Mapping[str, tuple[int, ...]], parameter: str, tensor: GgufTensor) -> GgufTensor:
    """Return the tensor of a parameter with Transformers' shape, where its size is that of such a shape."""
    shape = shapes.get(parameter, tensor.shape)
    size = prod(tensor.shape)
    shape = tuple(size if width == -1 else width for width in shape)
    if shape == tensor.shape or prod(shape) != size:
        return tensor
    rows = tensor.blocks.reshape(-1) if len(shape) == 1 else tensor.blocks.reshape(*shape[:-1], -1)
    return replace(tensor, shape=shape, blocks=rows)


_HEADS = ("A_log", "dt_bias", "D")
"""Numbers of each head."""


def _grouped(shape: Recurrence) -> dict[str, Tensor]:
    """Return where tiled heads stand by role or parameter, those of a key head one after another."""
    heads = torch.arange(shape.heads).view(-1, shape.key_heads).T.reshape(-1)
    values = (heads[:, None] * shape.value_width + torch.arange(shape.value_width)).reshape(-1)
    channels = torch.arange(shape.channels)
    first = shape.starts["value"]
    channels[first : first + len(values)] = first + values
    return {
        **dict.fromkeys(("in_proj_qkv", "conv1d"), channels),
        **dict.fromkeys(("in_proj_z", "out_proj"), values),
        **dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), heads),
    }
