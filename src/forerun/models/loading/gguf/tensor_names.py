"""Gives the tensors of a GGUF file Transformers' names, with rows in Transformers' order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import torch

from forerun.errors import UnsupportedModelError
from forerun.models.loading.gguf.configuration import ARCHITECTURES, HEAD, architecture_of
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.header import brief
from forerun.models.loading.gguf.tensors import GgufTensor

_EMBEDDING, _HEAD, _LAYER = "model.embed_tokens", "lm_head", "model.layers.0."
_OF_LAYER = (
    *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
)
_MODULES = (_EMBEDDING, "model.norm", _HEAD, *(_LAYER + part for part in _OF_LAYER))
_NAME = re.compile(r"(?:blk\.(?P<index>0|[1-9]\d{0,5})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_COMPUTED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are no weights: they belong to the rotary embedding, and older converters wrote its tables too."""


def name_map(architecture: str, num_layers: int) -> Any:
    """Return the gguf package's map from Transformers' names of modules to those of an architecture."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    return get_tensor_name_map(
        next(kind for kind in MODEL_ARCH_NAMES if MODEL_ARCH_NAMES[kind] == architecture), num_layers
    )


class PackedWeights(Mapping[str, GgufTensor]):
    """The packed tensors by the names of Transformers' parameters. A tied output layer has its name too.

    Rows of queries and keys that the converter has permuted are brought back into Transformers' order: their packed
    rows are copied for that, all others lie in the file.

    Raises:
        UnsupportedModelError: a tensor has no place in such a model.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        architecture = architecture_of(file)
        is_permuted = ARCHITECTURES[architecture].is_permuted
        self._heads = (
            {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if is_permuted else {}
        )
        names = name_map(architecture, 1)  # what a file says of its number of layers decides nothing here
        modules = {names.get_name(module): module for module in _MODULES}
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in (each for each in file.tensors.values() if not _COMPUTED.fullmatch(each.name)):
            found = _NAME.fullmatch(tensor.name)
            layer = "" if found is None or found["index"] is None else "blk.0."
            module = None if found is None else modules.get(layer + found["part"])
            if found is None or module is None:
                raise UnsupportedModelError(
                    f"{file.path}: the tensor {brief(tensor.name)} has no place in a model of the architecture "
                    f"{architecture} as forerun supports it. Serve it with llama.cpp."
                )
            self._tensors[module.replace("0", found["index"] or "", 1) + f".{found['kind']}"] = tensor
        if HEAD not in file.tensors:
            self._tensors[f"{_HEAD}.weight"] = self._tensors[f"{_EMBEDDING}.weight"]

    def __getitem__(self, name: str) -> GgufTensor:
        tensor, order = self._tensors[name], self.order(name)
        if order is None:
            return tensor
        blocks = tensor.blocks.reshape(len(order), -1)[order.numpy()].reshape(tensor.blocks.shape)
        blocks.flags.writeable = False
        return replace(tensor, blocks=blocks)

    def order(self, name: str) -> torch.Tensor | None:
        """Return the rows of the file's tensor in Transformers' order, [out] int64; None: as they lie."""
        rows, heads = self._tensors[name].shape[0], self._heads.get(name.split(".")[-2])
        return None if heads is None else torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def stored(self, name: str) -> GgufTensor:
        """Return the tensor as it lies in the file, with rows in the file's order."""
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class _Slice:
    """A GGUF tensor in the form of a safetensors slice: it is dequantized when it is read, and not kept."""

    weights: PackedWeights
    name: str
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.weights.stored(self.name).shape)

    def get_dtype(self) -> str:
        """Return the dtype that its numbers are read as: "F32" for packed ones."""
        tensor = self.weights.stored(self.name)
        return "F32" if tensor.is_quantized else tensor.type_name

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the file."""
        return self.weights.stored(self.name).blocks.nbytes

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        return self.weights[self.name].dequantize(self.dtype)


def open_slices(weights: PackedWeights, config: Any, dtype: torch.dtype) -> dict[str, _Slice]:
    """Return the tensors by Transformers' names, for it to read; a tied output layer is left to it."""
    tied = {f"{_HEAD}.weight"} if config.tie_word_embeddings else set()
    return {name: _Slice(weights, name, dtype) for name in weights if name not in tied}
