"""Gives the tensors of a GGUF file Transformers' names, with rows in Transformers' order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np
import torch

from forerun.errors import UnsupportedModelError
from forerun.models.fused.families import spec_of
from forerun.models.fused.spec import NORMS
from forerun.models.loading.gguf.architectures import ARCHITECTURES
from forerun.models.loading.gguf.configuration import HEAD, architecture_of
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.header import brief
from forerun.models.loading.gguf.tensors import GgufTensor

_NAME = re.compile(r"(?:blk\.(?P<index>0|[1-9]\d{0,5})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_COMPUTED = re.compile(r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd\.weight")
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

    Rows that the converter has permuted are brought back into Transformers' order: their packed rows are copied for
    that, all others lie in the file. Norms to whose weights Transformers adds a number have it in the file, and it is
    taken out.

    Raises:
        UnsupportedModelError: a tensor has no place in such a model.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        architecture, self._decoder = architecture_of(file), spec_of(config)
        spec = self._decoder
        self.head = spec.head_weight
        is_permuted = ARCHITECTURES[architecture].is_permuted
        self._heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads} if is_permuted else {}
        names = name_map(architecture, 1)  # what a file says of its number of layers decides nothing here
        layer = f"{spec.base}.{spec.layer_list}.0."
        own = (f"{spec.base}.{spec.embedding}", f"{spec.base}.{spec.norm}", spec.head)
        modules = {names.get_name(each): each for each in (*own, *(layer + each for each in spec.modules.values()))}
        self._norms = {layer + spec.modules[role] for role in NORMS if role in spec.modules} | {own[1]}
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in (each for each in file.tensors.values() if not _COMPUTED.fullmatch(each.name)):
            found = _NAME.fullmatch(tensor.name)
            index = "" if found is None or found["index"] is None else found["index"]
            theirs = "" if found is None else ("blk.0." if index else "") + found["part"]
            placed = {modules[theirs]: tensor} if theirs in modules else self._taken_apart(theirs, layer, tensor)
            if found is None or not placed:
                raise UnsupportedModelError(
                    f"{file.path}: the tensor {brief(tensor.name)} has no place in a model of the architecture "
                    f"{architecture} as forerun supports it. Serve it with llama.cpp."
                )
            for module, part in placed.items():
                self._tensors[module.replace("0", index, 1) + f".{found['kind']}"] = part
        if HEAD not in file.tensors:
            self._tensors[self.head] = self._tensors[spec.embedding_weight]

    def _taken_apart(self, name: str, layer: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
        """Return the modules of queries, keys and values, of a tensor that holds all three; empty if it does not."""
        spec = self._decoder
        sizes = {layer + spec.modules[role]: spec.out_features(role) for role in ("query", "key", "value")}
        if name != "blk.0.attn_qkv" or len(sizes) != 3 or tensor.shape[:1] != (sum(sizes.values()),):
            return {}
        parts, first, rows = {}, 0, tensor.blocks.reshape(tensor.shape[0], -1)
        for module, size in sizes.items():
            blocks = rows[first : first + size]
            blocks = blocks if tensor.blocks.ndim > 1 else blocks.reshape(-1)
            parts[module] = replace(tensor, shape=(size, *tensor.shape[1:]), blocks=blocks)
            first += size
        return parts

    def __getitem__(self, name: str) -> GgufTensor:
        tensor, order = self._tensors[name], self.order(name)
        if self._decoder.norm_offset and re.sub(r"\d+", "0", name, count=1).removesuffix(".weight") in self._norms:
            numbers = tensor.dequantize(torch.float32) - self._decoder.norm_offset
            return replace(tensor, type_name="F32", blocks=numbers.numpy().view(np.uint8), content=None)
        if order is None:
            return tensor
        blocks = tensor.blocks.reshape(len(order), -1)[order.numpy()].reshape(tensor.blocks.shape)
        blocks.flags.writeable = False
        return replace(tensor, blocks=blocks)

    def order(self, name: str) -> torch.Tensor | None:
        """Return the rows of the file's tensor in Transformers' order, [out] int64; None: as they lie."""
        rows, spec = torch.arange(self._tensors[name].shape[0]), self._decoder
        module = name.rpartition(".")[0]
        if spec.qkv_groups > 1 and module.endswith(spec.modules["query"]):  # the converter puts all queries first
            return rows.view(3, spec.qkv_groups, -1).transpose(0, 1).reshape(-1)
        heads = self._heads.get(module.rpartition(".")[2])
        return None if heads is None else rows.view(heads, -1, 2).transpose(1, 2).reshape(-1)

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
    tied = weights.head if config.tie_word_embeddings else None
    return {name: _Slice(weights, name, dtype) for name in weights if name != tied}
