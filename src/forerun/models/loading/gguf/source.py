"""A GGUF file as a model's source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ModelLoadError
from forerun.kernels.block_weight import BLOCK_TYPES, BlockType, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.families.table import spec_of
from forerun.models.loading.configuration import PlainConfig, read_eos_token_ids, token_ids_of
from forerun.models.loading.folder import GENERATION_CONFIG, ModelFolder, part_paths
from forerun.models.loading.gguf.configuration import read_gguf_config, transformers_config
from forerun.models.loading.gguf.file import REMEDY, GgufFile, block_weight, form_to_keep, weight_to_keep
from forerun.models.loading.gguf.packed_weights import PackedWeights, open_slices
from forerun.models.loading.gguf.token_list import TOKENS, TokenList
from forerun.models.loading.gguf.tokenizer import eos_token_ids, read_tokenizer, read_tokens
from forerun.models.loading.source import ModelSource
from forerun.models.loading.weights import Checkpoint
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.json_file import Fields, read_template

_FORMATS: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Type of tensor -> number format, of those that are not quantized."""
_SAMPLING = {
    "temperature": ("general.sampling.temp", 1.0),
    "top_k": ("general.sampling.top_k", 0.0),
    "top_p": ("general.sampling.top_p", 1.0),
    "min_p": ("general.sampling.min_p", 0.0),
    "repetition_penalty": ("general.sampling.penalty_repeat", 1.0),
}
"""Option of a request -> the key that recommends it, and the value that changes nothing."""


class GgufSource(ModelSource):
    """One GGUF file. It stays open, mapped into memory, as long as the source or its packed weights are in use."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.folder = ModelFolder(name, path.parent)
        self.place_of_sampling = GENERATION_CONFIG if self._has_generation_config else "the file"
        self._packed: tuple[DecoderSpec | None, PackedWeights] | None = None  # of the last spec

    @cached_property
    def file(self) -> GgufFile:
        """Return the open file."""
        self._opened = _states(self.path)
        return GgufFile.open(self.path)

    def finish(self) -> None:
        """Give back the pages that were read, and check that the files are as they were opened (`ModelSource.finish`).
        Files that others have replaced are read to their end, as they were."""
        self.file.release()
        before = self._opened
        now = _states(self.path)
        if any(before[key] != now[key] for key in before.keys() & now.keys()):
            raise ModelLoadError(f"{self.path}: the file was changed while it was read. Load it when it is whole.")

    def config(self) -> Any:
        """Return the Transformers configuration of its language model (`ModelSource.config`)."""
        return transformers_config(self.plain_config(), str(self.path))

    def plain_config(self) -> PlainConfig:
        """Return the configuration without Transformers (`ModelSource.plain_config`)."""
        return PlainConfig(**self._values)

    @cached_property
    def _values(self) -> dict[str, Any]:
        return read_gguf_config(self.file, self.eos_ids)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end an output, as the file says, or a generation configuration beside it; none if it
        has no tokenizer."""
        if not self.has_tokenizer():
            return frozenset()
        ends = eos_token_ids(self.file.metadata, str(self.path), self._tokens)
        beside = self.path.with_name(GENERATION_CONFIG)
        more = read_eos_token_ids(Fields.read(beside, ModelLoadError)) if beside.is_file() else None
        return ends | {index for index in more or () if index in range(len(self._tokens[0].texts))}

    @cached_property
    def _tokens(self) -> tuple[TokenList, str]:
        return read_tokens(self.file.metadata, str(self.path))

    def eos_token_ids(self, config: Any) -> frozenset[int]:
        """Return the tokens that end an output; ids that are no token are left out (`ModelSource.eos_token_ids`)."""
        return token_ids_of(self.eos_ids, config)

    def checkpoint(self, config: Any, dtype: torch.dtype, spec: DecoderSpec | None = None) -> Checkpoint:
        """Return the tensors by the names that Transformers gives them, not read yet (`ModelSource.checkpoint`): one
        tensor is dequantized at a time."""
        spec = spec or spec_of(config)  # names depend on it, whatever computes the model
        is_tied: bool = config.tie_word_embeddings
        slices = open_slices(self.packed_weights(spec), spec, dtype, is_tied=is_tied)
        return Checkpoint(slices, f"the metadata of {self.path}", REMEDY)

    def packed_weights(self, spec: DecoderSpec | None) -> PackedWeights:
        """Return the packed tensors of the file, by Transformers' names and with rows in Transformers' order; empty if
        weights are not packed (`ModelSource.packed_weights`)."""
        if self._packed is None or self._packed[0] is not spec:
            self._packed = spec, PackedWeights(self.file, spec or spec_of(self.config()))
        return self._packed[1]

    def quantized_weight(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedWeight | None]:
        """Return a function that returns a quantized weight of the files by Transformers' name, with rows in
        Transformers' order, or None if none can be served as stored (`ModelSource.quantized_weight`)."""
        packed = self.packed_weights(spec)
        return lambda name: weight_to_keep(packed[name]) if name in packed else None

    def quantized_format(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedFormat | None]:
        """Return a function that returns the format of a weight of `quantized_weight` by name; no numbers are read
        (`ModelSource.quantized_format`)."""
        packed = self.packed_weights(spec)
        return lambda name: form_to_keep(packed.type_name(name), packed.shape(name)) if packed.in_blocks(name) else None

    def blocks(self, spec: DecoderSpec) -> Callable[[str], BlockWeight | None]:
        """Return a function that returns a matrix of the file in blocks by Transformers' name, with rows in
        Transformers' order, or None for other tensors (`ModelSource.blocks`)."""
        packed = self.packed_weights(spec)

        def block(name: str) -> BlockWeight | None:
            self.file.release()  # what was read before
            return block_weight(packed.stored(name), packed.order(name)) if packed.in_blocks(name) else None

        return block

    def block_form(self, spec: DecoderSpec) -> Callable[[str], BlockType | None]:
        """Return a function that returns the types of `blocks`; no tensor is read (`ModelSource.block_form`)."""
        packed = self.packed_weights(spec)

        def form(name: str) -> BlockType | None:
            is_matrix = packed.in_blocks(name) and len(packed.shape(name)) == 2
            return BLOCK_TYPES.get(packed.type_name(name)) if is_matrix else None

        return form

    def block_types(self) -> Mapping[str, int]:
        """Return how many tensors of the file there are of each quantized type (`ModelSource.block_types`)."""
        return Counter(tensor.type_name for tensor in self.file.tensors.values() if tensor.is_quantized)

    def file_type(self) -> str | None:
        """Return the name of the file's type, such as "Q4_K_M" (`ModelSource.file_type`)."""
        from gguf.constants import LlamaFileType

        types = self.block_types()
        if not types.keys() & BLOCK_TYPES.keys():
            return None
        known = {kind.value: kind.name.removeprefix("MOSTLY_") for kind in LlamaFileType}
        number = self.file.metadata.get("general.file_type")
        name = known.get(number, "") if isinstance(number, int) else ""
        # a file may say nothing, or the type of what it was made from
        return name if any(map(name.startswith, types)) else max(types, key=lambda each: types[each])

    def stored_nbytes(self) -> int:
        """Return the bytes of all tensors of the file (`ModelSource.stored_nbytes`)."""
        return sum(tensor.blocks.nbytes for tensor in self.file.tensors.values())

    def stored_dtype(self) -> str | None:
        """Return the dtype of most of the weights, such as "bfloat16"; None if they are quantized
        (`ModelSource.stored_dtype`)."""
        entries: Counter[str | None] = Counter()
        for tensor in self.file.tensors.values():
            entries[_FORMATS.get(tensor.type_name)] += math.prod(tensor.shape)
        return entries.most_common(1)[0][0]

    def recommended_sampling(self) -> dict[str, float]:
        """Return the sampling options that the files recommend, if they would change the result of a request without
        options (`ModelSource.recommended_sampling`)."""
        if self._has_generation_config:
            return self.folder.recommended_sampling()
        fields = self.file.fields
        found = {option: fields.number(key, neutral) for option, (key, neutral) in _SAMPLING.items()}
        return {option: value for option, value in found.items() if value != _SAMPLING[option][1]}

    @property
    def _has_generation_config(self) -> bool:
        return (self.path.parent / GENERATION_CONFIG).is_file()

    def published_name(self) -> str:
        """Return what the file says of the model's name (`ModelSource.published_name`)."""
        metadata = self.file.metadata
        if self._has_generation_config or any(key in metadata for key, _ in _SAMPLING.values()):
            return ""
        keys = ("general.basename", "general.name", "general.finetune", "general.architecture")
        return " ".join([*(str(metadata.get(key, "")) for key in keys), self.path.name])

    def has_tokenizer(self) -> bool:
        """Return whether there are any files of a tokenizer (`ModelSource.has_tokenizer`)."""
        return TOKENS in self.file.metadata

    def token_texts(self) -> list[str] | None:
        """Return the tokens by id as the file lists them (`ModelSource.token_texts`)."""
        found: list[str] | None = self.file.metadata.get(TOKENS)
        return found

    def tokenizer(self) -> Any:
        """Return the Transformers tokenizer (`ModelSource.tokenizer`); a chat template beside the file replaces its
        own."""
        found = read_tokenizer(self.file.metadata, str(self.path), self._tokens)
        beside = self.path.with_name("chat_template.jinja")
        if beside.exists():
            found.chat_template = read_template(beside, ModelLoadError)
        return found


def _states(path: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the sizes and times of a model's files, by what the file system knows each by."""
    found = (each.stat() for each in part_paths(path) if each.exists())
    return {(each.st_dev, each.st_ino): (each.st_size, each.st_mtime_ns) for each in found}
