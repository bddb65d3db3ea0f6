"""How tensors of recurrent layers in GGUF files differ from Transformers' parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from forerun.models.fused.parts import RECURRENT_ROLES, Recurrence
from forerun.models.fused.spec import DecoderSpec
from forerun.models.loading.gguf.tensors import GgufTensor

_STATES = {
    "norm": "ssm_norm.weight",
    "rate": "ssm_a",
    "step_bias": "ssm_dt.bias",
    "skip": "ssm_d",
    "taps": "ssm_conv1d",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "short_convolution": {"mixed": "shortconv.in_proj", "mixed_out": "shortconv.out_proj", "taps": "shortconv.conv"},
    "delta_rule": {
        "mixed": "attn_qkv",
        "mixed_gate": "attn_gate",
        "beta": "ssm_beta",
        "decay": "ssm_alpha",
        "mixed_out": "ssm_out",
        **_STATES,
    },
    "state_space": {"mixed": "ssm_in", "mixed_out": "ssm_out", **_STATES},
}
"""Role or number of a kind of recurrence -> llama.cpp's name of it. The first of the roles that share a module names
it."""
_WITH_KIND = {*RECURRENT_ROLES, "taps"}
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
    def of(cls, spec: DecoderSpec, layer: str, *, is_tiled: bool) -> RecurrentTensors:
        """Return those of a decoder.

        Args:
            layer: the path of layer 0, with a dot behind it. is_tiled: value heads of the file are.
        """
        shape = spec.recurrence
        if shape is None:
            return cls()
        names, parameters = dict[str, tuple[str, int]](), dict[str, str]()
        for part, theirs in _names(spec, shape).items():
            path = spec.modules.get(part) or shape.numbers.get(part)
            if path is None:
                continue
            place = int(part == "mixed_gate" and path == spec.modules["mixed"])
            parameters[part] = f"{layer}{path}.weight" if part in (*_WITH_KIND, "norm") else layer + path
            for kind in ("weight", "bias") if part in _WITH_KIND else ():
                names[f"blk.0.{theirs}.{kind}"] = f"{layer}{path}.{kind}", place
            if part not in _WITH_KIND:
                names[f"blk.0.{theirs}"] = parameters[part], 0
        reordered = is_tiled and not shape.heads_are_tiled and shape.heads != shape.key_heads
        rows = {parameters[part]: order for part, order in _grouped(shape).items()} if reordered else {}
        if parameters.get("mixed_gate") == parameters["mixed"]:  # the converter puts all gates behind
            runs = [run for part in ("mixed", "mixed_gate") if (run := shape.rows(part)) is not None]
            rows[parameters["mixed"]] = torch.cat(runs).argsort()
        out = parameters["mixed_out"]
        columns = {out: rows.pop(out)} if reordered else {}
        sizes = {"taps": (shape.channels, 1, shape.num_taps), "norm": (-1,), **dict.fromkeys(_HEADS, (-1,))}
        shapes = {parameters[part]: size for part, size in sizes.items() if part in parameters}
        rates = frozenset(parameters[part] for part in ("rate",) if part in parameters)
        return cls(names, shapes, rows, columns, rates)


def _names(spec: DecoderSpec, shape: Recurrence) -> dict[str, str]:
    """Return llama.cpp's names by role or number. One of beta and decay together is not taken apart."""
    names = {**_NAMES[shape.kind]}
    if "beta" in names and spec.modules["beta"] == spec.modules["decay"]:
        names |= {"beta": "ssm_ba"}
        del names["decay"]
    return names


def shaped(shapes: Mapping[str, tuple[int, ...]], parameter: str, tensor: GgufTensor) -> GgufTensor:
    """Return the tensor of a parameter with Transformers' shape, where its size is that of such a shape."""
    shape, size = shapes.get(parameter, tensor.shape), prod(tensor.shape)
    shape = tuple(size if width == -1 else width for width in shape)
    if shape == tensor.shape or prod(shape) != size:
        return tensor
    rows = tensor.blocks.reshape(-1) if len(shape) == 1 else tensor.blocks.reshape(*shape[:-1], -1)
    return replace(tensor, shape=shape, blocks=rows)


_HEADS = ("rate", "step_bias", "skip")
"""Numbers of each head."""


def _grouped(shape: Recurrence) -> dict[str, Tensor]:
    """Return where tiled heads stand by role or number, those of a key head one after another."""
    heads = torch.arange(shape.heads).view(-1, shape.key_heads).T.reshape(-1)
    values = (heads[:, None] * shape.value_width + torch.arange(shape.value_width)).reshape(-1)
    channels, first = torch.arange(shape.channels), shape.starts["value"]
    channels[first : first + len(values)] = first + values
    return {
        **dict.fromkeys(("mixed", "taps"), channels),
        **dict.fromkeys(("mixed_gate", "mixed_out"), values),
        **dict.fromkeys(("beta", "decay", "rate", "step_bias"), heads),
    }
