"""The tensors of mixtures of experts in GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any

import torch

from forerun.errors import ModelLoadError
from forerun.models.fused.experts import joined
from forerun.models.loading.gguf.file import PLAIN_TYPES, REMEDY, GgufTensor, brief
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.spec.feed_forward import EXPERT, Experts

_SHARED = {"shared_gate": "ffn_gate_shexp", "shared_up": "ffn_up_shexp", "shared_down": "ffn_down_shexp"}
_STACKS = {
    "ffn_gate_exps": EXPERT[:1],
    "ffn_up_exps": EXPERT[1:2],
    "ffn_gate_up_exps": EXPERT[:2],
    "ffn_down_exps": EXPERT[2:],
}
"""llama.cpp's names of the tensors of all experts, [count, out, in] or [count, out], and the roles that each has."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The tensors of layers with experts, by the names of the parameters of layer 0 that they are.

    Attributes:
        names: the file's name of a tensor -> the parameter, and its place among the tensors that are one parameter.
        shapes: Transformers'; of parameters that the file has with others.
        layer: the path of layer 0, with a dot behind it.
    """

    names: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layer: str = ""

    @classmethod
    def of(cls, spec: DecoderSpec, layer: str) -> ExpertTensors:
        """Return those of a decoder. layer: as of the class."""
        experts = spec.experts
        if experts is None:
            return cls()
        names = dict[str, tuple[str, int]]()
        shapes = dict[str, tuple[int, ...]]()
        kinds = ("weight", "bias")
        for role, name in _SHARED.items():
            if role in experts.modules:
                place = experts.sharing(role).index(role)
                names |= {f"blk.0.{name}.{kind}": (f"{layer}{experts.modules[role]}.{kind}", place) for kind in kinds}
        names |= {f"blk.0.ffn_gate_inp.{kind}": (f"{layer}{experts.router}.{kind}", 0) for kind in kinds}
        if experts.shared_expert_gate is not None:
            switch = f"{layer}{experts.shared_expert_gate}.weight"
            names["blk.0.ffn_gate_inp_shexp.weight"] = (switch, 0)
            shapes[switch] = (1, spec.hidden)
        if experts.router_norm is not None:
            names["blk.0.ffn_gate_inp.scale"] = layer + experts.router_norm, 0
        if experts.per_expert_scale is not None:
            names["blk.0.ffn_down_exps.scale"] = layer + experts.per_expert_scale, 0
        if experts.e_score_correction_bias is not None:
            bias = layer + experts.e_score_correction_bias
            names["blk.0.exp_probs_b.bias"] = (bias, 0)
            shapes[bias] = experts.bias_shape or (experts.num_experts,)
        return cls(names, shapes, layer)

    def apart(self, spec: DecoderSpec, name: str, tensor: GgufTensor, place: str) -> Iterator[tuple[str, GgufTensor]]:
        """Give the parameters of each expert of a tensor of all of them; none of another tensor. Nothing is copied.

        Args:
            name: the tensor's in layer 0. place: the file, for messages.

        Raises:
            ModelLoadError: its shape is not that of the metadata.
        """
        path, _, kind = name.removeprefix("blk.0.").rpartition(".")
        experts = spec.experts
        roles = _STACKS.get(path, ())
        if experts is None or not roles or kind not in ("weight", "bias"):
            return
        size = experts.out_features(roles[0]) or spec.hidden
        inner = (experts.in_features(roles[0]) or spec.hidden,) if kind == "weight" else ()
        expected = (experts.num_experts, size * len(roles), *inner)
        if tensor.shape != expected:
            raise ModelLoadError(
                f"{place}: the tensor {brief(tensor.name)} has the shape {list(tensor.shape)}, and {list(expected)} by "
                f"the metadata, whose expert_count is {experts.num_experts}. {REMEDY}"
            )
        rows = tensor.blocks.reshape(experts.num_experts, size * len(roles), -1)
        for part, role in enumerate(roles):
            for expert in range(experts.num_experts):
                blocks = rows[expert, part * size :][:size]
                own = replace(
                    tensor,
                    name=f"{tensor.name}[{expert}]",
                    shape=(size, *inner),
                    blocks=blocks if inner else blocks.reshape(-1),
                )
                yield f"{self.layer}{experts.module(role, expert)}.{kind}", own


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors of experts as Transformers' parameter of all of them, in the form of a safetensors slice.

    Attributes:
        weights: by parameter. parts: the names of each expert's.
    """

    weights: Any
    experts: Experts
    parts: list[list[str]]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        shapes = [self.weights.shape(name) for name in self.parts[0]]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return [len(self.parts), *(reversed(whole) if self.experts.is_transposed else whole)]

    def get_dtype(self) -> str:
        """Return the dtype that its numbers are read as: "F32" for packed ones."""
        kinds = {self.weights.type_name(name) for name in self.parts[0]}
        return kinds.pop() if len(kinds) == 1 and kinds <= {*PLAIN_TYPES} else "F32"

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return sum(self.weights.nbytes(name) for names in self.parts for name in names)

    @property
    def names(self) -> list[str]:
        """Return the names of all parts."""
        return [name for names in self.parts for name in names]

    def part(self, expert: int, role: str) -> torch.Tensor:
        """Return what an expert's role has, [out, in] or [out], without reading what other roles have."""
        place = int(role == "expert_up")
        found: torch.Tensor = self.weights[self.parts[expert][place]].dequantize(self.dtype)
        return found

    def __getitem__(self, index: EllipsisType | int) -> torch.Tensor:
        if isinstance(index, int):
            return joined(self.experts, [self.weights[name].dequantize(self.dtype) for name in self.parts[index]])
        return torch.stack([self[expert] for expert in range(len(self.parts))])
