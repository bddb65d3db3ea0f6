"""The tensors of a GGUF file under Transformers' names, with rows in Transformers' order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.loading.gguf.header import REMEDY, brief
from forerun.models.loading.gguf.tensors import GgufTensor
from forerun.utils.json_file import REQUIRED, Fields

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
OUTER = {
    EMBEDDING: "model.embed_tokens.weight",
    HEAD: "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(?P<index>\d{1,6})\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_COMPUTED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Tensors that are no weights: they belong to the rotary embedding, and older converters wrote its tables too."""
PERMUTED = {"llama"}
"""Architectures whose rows of queries and keys llama.cpp's converter has permuted: there, one rotation turns rows that
lie side by side, and in Transformers rows that lie half a head apart."""


def is_tied(file: GgufFile) -> bool:
    """Return whether the embedding is the output layer as well: the file stores it once."""
    return HEAD not in file.tensors


class PackedWeights(Mapping[str, GgufTensor]):
    """The packed tensors by the names of Transformers' parameters. A tied output layer has its name too.

    Rows of queries and keys that the converter has permuted are brought back into Transformers' order: their packed
    rows are copied for that, all others lie in the file.

    Raises:
        UnsupportedModelError: a tensor has no place in such a model.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        permuted = file.metadata["general.architecture"] in PERMUTED
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        self._tensors: dict[str, GgufTensor] = {}
        self._heads: dict[str, int] = {}
        for tensor in file.tensors.values():
            if _COMPUTED.fullmatch(tensor.name):
                continue
            name, part = _transformers_name(tensor.name, file)
            self._tensors[name] = tensor
            if permuted and part in heads:
                self._heads[name] = heads[part]
        if is_tied(file):
            self._tensors[OUTER[HEAD]] = self._tensors[OUTER[EMBEDDING]]

    def __getitem__(self, name: str) -> GgufTensor:
        tensor, order = self._tensors[name], self.order(name)
        if order is None:
            return tensor
        blocks = tensor.blocks.reshape(len(order), -1)[order.numpy()].reshape(tensor.blocks.shape)
        blocks.flags.writeable = False
        return replace(tensor, blocks=blocks)

    def order(self, name: str) -> torch.Tensor | None:
        """Return the rows of the file's tensor in Transformers' order, [out] int64; None: as they lie."""
        rows, heads = self._tensors[name].shape[0], self._heads.get(name)
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
    tied = {OUTER[HEAD]} if config.tie_word_embeddings else set()
    return {name: _Slice(weights, name, dtype) for name in weights if name not in tied}


def _transformers_name(name: str, file: GgufFile) -> tuple[str, str]:
    """Return Transformers' name of a tensor, and the part of a layer that it belongs to, if any."""
    if name in OUTER:
        return OUTER[name], ""
    found = _LAYER.fullmatch(name)
    if found is None or found["part"] not in OF_LAYER:
        raise UnsupportedModelError(
            f"{file.path}: the tensor {brief(name)} has no place in a model of the architecture "
            f"{file.metadata['general.architecture']} as forerun supports it. Serve it with llama.cpp."
        )
    part = found["part"]
    return f"model.layers.{int(found['index'])}.{OF_LAYER[part]}.{found['kind']}", part


# The keys of a GGUF file's metadata that describe the model; their names begin with its architecture's.

D = TypeVar("D")


def metadata_of(file: GgufFile) -> Fields:
    """Return all keys of the metadata as checked fields."""
    return Fields(str(file.path), file.metadata, ModelLoadError, REMEDY)


class ModelFields:
    """The keys "ARCHITECTURE.KEY": each method gives the value of KEY, or raises as the method of `Fields` does."""

    def __init__(self, fields: Fields, architecture: str) -> None:
        self.fields, self.architecture = fields, architecture

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self.fields

    def integer(self, key: str, default: D = REQUIRED, low: float = 0) -> int | D:
        """Return a whole number of `low` or more."""
        return self.fields.integer(self.name(key), default, low)

    def number(self, key: str, default: D = REQUIRED, low: float = 0) -> float | D:
        """Return a number of `low` or more: the shortest decimal that float32 rounds to the stored one, as the model's
        configuration had it."""
        value = self.fields.number(self.name(key), default, low)
        if isinstance(value, float) and float(np.float32(value)) == value:
            return float(str(np.float32(value)))
        return value

    def string(self, key: str, default: D = REQUIRED) -> str | D:
        return self.fields.string(self.name(key), default)

    def of_all_layers(self, key: str, default: D = REQUIRED) -> int | D:
        """Return a count of 1 or more that files may give once or for every layer.

        Raises:
            UnsupportedModelError: it differs from layer to layer.
        """
        if not isinstance(self.fields.values.get(self.name(key)), list):
            return self.integer(key, default, low=1)
        each = set(self.fields.list_of(self.name(key), int))
        if len(each) != 1:
            self.refuse(f"{self.name(key)} differs from layer to layer")
        value = Fields(self.fields.place, {self.name(key): each.pop()}, self.fields.error, self.fields.remedy)
        return value.integer(self.name(key), low=1)

    def refuse_other(self, neutral: Mapping[str, tuple[object, ...]]) -> None:
        """Raise UnsupportedModelError if a key has a value that is not one of those given for it."""
        for key, values in neutral.items():
            value: Any = self.fields.values.get(self.name(key))
            if value is not None and value not in values:
                self.refuse(f"{self.name(key)} is {value!r:.60}")

    def refuse(self, what: str) -> NoReturn:
        """Raise UnsupportedModelError for a valid value that no Transformers model of the architecture computes."""
        raise UnsupportedModelError(
            f"{self.fields.place}: {what}, which Transformers' {self.architecture} does not compute. Serve it with "
            "llama.cpp, or give the model's Transformers folder or hub id."
        )
