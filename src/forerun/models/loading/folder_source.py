"""A Transformers folder, or the hub's cache of one, as a model's source.

A container is a model with parts beside its text model, such as one that sees: Transformers' classes of the name
`...ForConditionalGeneration`. Publishers and versions of Transformers put the text model in different places of it.
Transformers' `conversion_mapping.py` knows them by the container's class, which is never made here: its renamings of
text are prefixes, which are taken off without importing it (`tests/unit/models/test_containers.py` compares them).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from forerun.config import QUANTISATIONS
from forerun.errors import ModelLoadError, UnsupportedModelError
from forerun.kernels.block_weight import BlockType, BlockWeight
from forerun.kernels.quantize import QuantizedFormat, QuantizedWeight
from forerun.models.loading.configuration import (
    MASK_TOKEN,
    OUTPUT_TOKENS,
    PlainConfig,
    check_values,
    read_eos_token_ids,
    text_config,
    token_ids_of,
    with_text_config,
)
from forerun.models.loading.folder import CONFIG, GENERATION_CONFIG, INDEX, TOKENIZER, ModelFolder
from forerun.models.loading.published import COMPUTED, PublishedWeights, Settings, check_codes, settings_of
from forerun.models.loading.source import ModelSource, Quantization
from forerun.models.loading.transformers_modules import check_sentence_piece, is_bundled, read_folder_tokenizer
from forerun.models.loading.weight_maker import LAYOUT, METHOD
from forerun.models.loading.weights import Checkpoint, TensorSlice
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.deferred import DeferredModule
from forerun.utils.foreign_errors import REMEDY, as_load_errors
from forerun.utils.json_file import Fields

if TYPE_CHECKING:
    from forerun.models.loading import quantized_tensors
else:
    quantized_tensors = DeferredModule("forerun.models.loading.quantized_tensors")

# keys that would make Transformers import code or open files that were not checked
_DROPPED = {"auto_map", "custom_generate", "transformers_weights", "fusion_config", "distributed_config"}
_DROPPED |= {"output_hidden_states", "output_attentions", "return_dict"}  # what a forward returns
_DROPPED |= {"quantization_config", "compression_config", "quantization"}  # weights are integers or numbers when read
_DROPPED |= {"_name_or_path", "_attn_implementation", "_attn_implementation_internal", "attn_implementation"}
_FLAT = {"qwen2_vl", "qwen2_5_vl"}
"""Containers that are published with the values of their text model beside those of the other parts."""

_ALIASES = {"mimo": "qwen2"}
"""Model types that Transformers does not have, and those whose layers they have."""


class FolderSource(ModelSource):
    """The config.json, safetensors and tokenizer of a folder. None of its code is run."""

    place_of_sampling = GENERATION_CONFIG
    computed_types = COMPUTED

    def __init__(self, folder: ModelFolder) -> None:
        self.name = folder.name
        self.folder = folder

    def config(self) -> Any:
        """Return the Transformers configuration of its language model (`ModelSource.config`).

        The configuration is made of the values that were read here: Transformers does not open the folder for it, and
        nothing in the values makes it import code or look for other files.
        """
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        fields = self.folder.config()
        model_type = _ALIASES.get(fields.string("model_type"), fields.string("model_type"))
        if model_type not in CONFIG_MAPPING:
            raise UnsupportedModelError(_unknown_type(self.folder, fields, model_type))
        settings_of(fields)
        for part in with_text_config(fields):
            check_values(part)
        with as_load_errors(f"{fields.place}: it describes no {model_type} model", REMEDY):
            cls = CONFIG_MAPPING[model_type]
            values = {**_without_code(fields.values), "model_type": model_type}
            whole = cls.from_dict(_of_types(cls, values))
            text = text_config(whole, fields.place)
        # either may say it alone, and the classes of containers have defaults that are not the publishers'
        if len({bool(getattr(each, "tie_word_embeddings", None)) for each in (whole, text)}) > 1:
            text.tie_word_embeddings = not self._has_output_layer()
        return text

    def plain_config(self) -> Any:
        """Return the configuration, of a bundled model without Transformers (`ModelSource.plain_config`): its file says
        all that its family's reads."""
        return (
            PlainConfig(**_without_code(self.folder.config().values)) if is_bundled(self.folder.path) else self.config()
        )

    def eos_token_ids(self, config: Any) -> frozenset[int]:
        """Return the tokens that end an output; ids that are no token are left out (`ModelSource.eos_token_ids`).

        The tokenizer's end token is one of them, as in vLLM: chats that were trained on top of a base model often name
        it in the tokenizer's configuration alone.
        """
        read = (self.folder.read(GENERATION_CONFIG), self.folder.config())  # a container's before its text's
        ids = next((found for fields in read if (found := read_eos_token_ids(fields)) is not None), None)
        if ids is None:
            given = getattr(config, "eos_token_id", None)
            ids = [given] if isinstance(given, int) else given or []
        return token_ids_of([*ids, *self._end_of_tokenizer()], config)

    def _end_of_tokenizer(self) -> list[int]:
        """Return the id of the end token that tokenizer_config.json names; empty if it names none that was added."""
        settings = self.folder.tokenizer_config().values
        end = settings.get("eos_token")
        added = settings.get("added_tokens_decoder")
        end = end.get("content") if isinstance(end, dict) else end
        if not isinstance(end, str):
            return []
        if isinstance(added, dict):
            tokens = [(key, token) for key, token in added.items() if isinstance(token, dict)]
        else:  # files of Transformers 5
            entries = self.folder.read(TOKENIZER).list_of("added_tokens", dict, [])
            tokens = [(str(token.get("id")), token) for token in entries]
        return [int(key) for key, token in tokens if token.get("content") == end and key.isdecimal() and len(key) < 20]

    def checkpoint(self, config: Any, dtype: torch.dtype, spec: DecoderSpec | None = None) -> Checkpoint:
        """Return the tensors by the names that Transformers gives them, not read yet (`ModelSource.checkpoint`);
        tensors come in the format they are stored in."""
        published, slices = self._published
        if self.quantization() is not None:
            quantized, others = self._quantized
            slices = {**others, **dict(quantized.slices(dtype))}
        elif not published.found:
            slices = self._slices()
            check_codes(slices, self.name, f"{CONFIG} does not say how")
        slices = {**slices, **dict(published.slices(dtype))}
        if self.folder.config().string("model_type") == "qwen3_vl_moe":
            slices = turned(slices, config)
        return Checkpoint(slices, CONFIG, f"Give the {CONFIG} that the weights were saved with.")

    def stored_dtype(self) -> str | None:
        """Return the dtype of most of the weights, such as "bfloat16"; None if they are quantized
        (`ModelSource.stored_dtype`)."""
        is_quantized = self.quantization() is not None or settings_of(self.folder.config()) is not None
        return None if is_quantized else Checkpoint(self._slices(), CONFIG, REMEDY).stored_dtype()

    def quantization(self) -> Quantization | None:
        """Return the quantization that the weights were saved in for forerun; None if the user chooses it
        (`ModelSource.quantization`)."""
        return next(filter(None, map(stored_quantization, with_text_config(self.folder.config()))), None)

    def quantized_weight(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedWeight | None]:
        """Return a function that returns a quantized weight of the files by Transformers' name, with rows in
        Transformers' order, or None if none can be served as stored (`ModelSource.quantized_weight`)."""
        return super().quantized_weight(spec) if self.quantization() is None else self._quantized[0].read

    def quantized_format(self, spec: DecoderSpec | None) -> Callable[[str], QuantizedFormat | None]:
        """Return a function that returns the format of a weight of `quantized_weight` by name; no numbers are read
        (`ModelSource.quantized_format`)."""
        return super().quantized_format(spec) if self.quantization() is None else self._quantized[0].form

    @cached_property
    def _quantized(self) -> tuple[quantized_tensors.QuantizedTensors, dict[str, TensorSlice]]:
        """The weights that forerun has quantized, and the other tensors."""
        return quantized_tensors.QuantizedTensors.sort(self._slices(), self.name)

    def _slices(self) -> dict[str, TensorSlice]:
        """Return the tensors of the text model by its own names."""
        fields = self.folder.config()
        is_container = len(with_text_config(fields)) > 1 or fields.values.get("model_type") in _FLAT
        return _open(self.folder.weight_files(), is_container=is_container)

    def _has_output_layer(self) -> bool:
        """Return whether the weights have an output layer. No weights of a hub id are fetched if there is an index."""
        index = self.folder.read(INDEX).fields("weight_map", None)
        return any("lm_head." in name for name in (self._slices() if index is None else index.values))

    @cached_property
    def _published(self) -> tuple[PublishedWeights, dict[str, TensorSlice]]:
        """The weights that another program has quantized, and the other tensors; nothing where no program has."""
        settings = settings_of(self.folder.config())
        if settings is None:  # no file is opened, as a hub's may not be there yet
            return PublishedWeights(Settings("", ""), self.name, {}), {}
        return PublishedWeights.sort(self._slices(), self.name, settings)

    def blocks(self, spec: DecoderSpec) -> Callable[[str], BlockWeight | QuantizedWeight | None]:
        """Return a function that returns the integers of a matrix as another program has published them, or None
        (`ModelSource.blocks`)."""
        return self._published[0].matrices(spec)

    def block_form(self, spec: DecoderSpec) -> Callable[[str], QuantizedFormat | BlockType | None]:
        """Return a function that returns the forms of `blocks`; no codes are read (`ModelSource.block_form`)."""
        return self._published[0].forms(spec)

    def block_types(self) -> Mapping[str, int]:
        """Return how many weights of each published layout there are (`ModelSource.block_types`)."""
        return self._published[0].counts()

    def file_type(self) -> str | None:
        """Return how another program has quantized the weights, such as "awq", if any are integers
        (`ModelSource.file_type`)."""
        published, _ = self._published
        return published.settings.method if any(weight.form for _, weight in published.found.values()) else None

    def stored_nbytes(self) -> int | None:
        """Return the size of the weights' files, which their headers hardly add to; None of a hub id, or where there
        are none (`ModelSource.stored_nbytes`)."""
        if self.folder.is_remote or not any(self.folder.path.glob("*.safetensors")):
            return None
        return sum(file.stat().st_size for file in self.folder.weight_files())

    def recommended_sampling(self) -> dict[str, float]:
        """Return the sampling options that the files recommend, if they would change the result of a request without
        options (`ModelSource.recommended_sampling`)."""
        return self.folder.recommended_sampling()

    def output_tokens(self, config: Any) -> tuple[int, ...] | None:
        """Return the tokens that the output layer was trained to propose, rising; None for all of the vocabulary
        (`ModelSource.output_tokens`)."""
        fields = self.folder.config()
        ids = fields.list_of(OUTPUT_TOKENS, int, None)
        if ids is None:
            return None
        if not ids or ids[0] < 0 or ids[-1] >= config.vocab_size or any(a >= b for a, b in pairwise(ids)):
            raise fields.wrong(OUTPUT_TOKENS, f"a list of rising token ids, from 0 to {config.vocab_size - 1}")
        return tuple(ids)

    def mask_token(self, config: Any) -> int | None:
        """Return the token that stands for one that is not known yet (`ModelSource.mask_token`)."""
        return self.folder.config().integer(MASK_TOKEN, None, 0, config.vocab_size - 1)

    def has_tokenizer(self) -> bool:
        """Return whether there are any files of a tokenizer (`ModelSource.has_tokenizer`)."""
        return self.folder.has_tokenizer()

    def tokenizer(self) -> Any:
        """Return the Transformers tokenizer (`ModelSource.tokenizer`); one that needs code of the folder's is
        refused."""
        remedy = "Put tokenizer.json and tokenizer_config.json beside the weights, or pass token ids."
        if not self.has_tokenizer():
            raise ModelLoadError(f"no tokenizer could be read from {self.name}: there is none. {remedy}")
        settings = self.folder.tokenizer_config()
        if (model := self.folder.sentence_piece()) is not None:
            check_sentence_piece(model)
        try:
            found = read_folder_tokenizer(self.folder.path, self.name, remedy)
            if not getattr(found, "chat_template", None):  # in the file of a container's processor, as formerly
                found.chat_template = self.folder.read("chat_template.json").string("chat_template", None)
            return found
        except ModelLoadError as error:
            code = asks_for_code(settings)
            if code is None or "trust_remote_code" not in str(error.__cause__):
                raise
            raise ModelLoadError(
                f"{settings.place}: the code that auto_map asks for ({code}) is not run: it could do anything. {remedy}"
            ) from None


def stored_quantization(fields: Fields) -> Quantization | None:
    """Return the quantization that `forerun quantize` stored the weights in; None for all others.

    Raises:
        UnsupportedModelError: they are quantized by a later version of forerun.
        ModelLoadError: its description is damaged.
    """
    stored: Fields | None = fields.fields("quantization_config", None)
    if stored is None or stored.string("quant_method", "") != METHOD:
        return None
    layout = stored.integer("format", low=1)
    if layout != LAYOUT:
        raise UnsupportedModelError(
            f"{fields.place}: the weights are kept in forerun's format {layout}, and this version reads {LAYOUT}. "
            "Quantize the model anew, or take the version of forerun that wrote it."
        )
    quantize = stored.string("quantize")
    if quantize not in QUANTISATIONS:
        raise stored.wrong("quantize", f"one of {', '.join(QUANTISATIONS)}")
    return quantize


def _unknown_type(folder: ModelFolder, fields: Fields, model_type: str) -> str:
    from transformers import __version__

    known = f"model type {model_type!r} is not one that Transformers {__version__} has"
    code = asks_for_code(fields)
    if code is None:
        return f"{fields.place}: {known}. Serve {folder.name} with a Transformers that has it."
    return (
        f"{fields.place}: {known}, and the code that auto_map asks for ({code}) is not run: it could do anything. "
        "Give a model of a type that Transformers has."
    )


def asks_for_code(fields: Fields) -> str | None:
    """Return what of a folder's code its `auto_map` names; None if it names nothing."""
    auto_map = fields.values.get("auto_map")
    named = list(auto_map.values()) if isinstance(auto_map, dict) else auto_map
    names = named if isinstance(named, list) else []
    flat = [part for name in names for part in (name if isinstance(name, list) else [name]) if isinstance(part, str)]
    return ", ".join(part[:60] for part in flat[:3]) or (None if not auto_map else "auto_map")


def _without_code(value: Any) -> Any:
    """Return the value without the keys of _DROPPED, at any depth, and with the numbers that JSON lacks, such as
    infinity, which Transformers writes as objects."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key not in _DROPPED}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def _of_types(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Convert numbers to the types of the class: 1 to a float, 4096.0 to an integer."""
    types = {field.name: get_args(field.type) or (field.type,) for field in dataclasses.fields(cls)}
    for key, value in values.items():
        accepted = types.get(key, ())
        if type(value) is int and float in accepted and int not in accepted:
            values[key] = float(value)
        elif type(value) is float and value.is_integer() and int in accepted and float not in accepted:
            values[key] = int(value)
    return values


def _open(files: Sequence[Path], *, is_container: bool) -> dict[str, TensorSlice]:
    """Open the tensors of safetensors files, at least one, by the names of the text model.

    is_container: the text model's alone.

    Raises:
        ModelLoadError: a file is damaged, or a tensor is there twice, in two files or by two names.
    """
    from safetensors import safe_open

    slices: dict[str, TensorSlice] = {}
    for file in files:
        with as_load_errors(f"{file}: the weights are damaged", REMEDY):
            opened: Any = safe_open(file, framework="pt")
            names = text_names(opened.keys(), is_container=is_container)
            for name, own in names.items():
                if own in slices:
                    raise ModelLoadError(
                        f"{file}: tensor {name} is there twice, in another file or by another name of {own}. {REMEDY}"
                    )
                slices[own] = opened.get_slice(name)
    if not slices:
        raise ModelLoadError(f"{files[0]}: it holds no tensors. {REMEDY}")
    return slices


_PLACE = re.compile(
    r"(?:thinker\.)?(?:model\.)?(?:language_model|text_model)\.(?:model\.)*"
    r"|thinker\.model\.(?=(?:layers|embed_tokens|norm)\.)|thinker\.(?=lm_head\b)"
)
"""Where a text model lies in a container, up to its layers or its output layer."""
_OUTER = re.compile(r"(?:lm_head|backbone|transformer)\b")
"""Parts of a text model beside its base."""
_TEXT = re.compile(r"(?:model\.(?:layers|embed_tokens|norm)|lm_head|mtp)\.")
"""Names of a text model's that need no other: those of a container whose parts lie beside the text model's."""
_STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def text_name(name: str) -> str:
    """Return the name in the text model of a tensor, of what belongs to one such as its scale, or of a module; the name
    itself where it is no other."""
    found = _PLACE.match(name)
    if found is None:
        return name
    own = name[found.end() :]
    return own if _OUTER.match(own) else f"model.{own}"


def text_names(names: Iterable[str], *, is_container: bool) -> dict[str, str]:
    """Return how the text model calls tensors or modules of these names; of a container's, those of its other parts
    are left out."""
    named = {name: text_name(name) for name in names}
    return {name: own for name, own in named.items() if not is_container or own != name or _TEXT.match(name)}


@dataclass(frozen=True, slots=True)
class _Turned:
    """A stack of matrices whose last two dimensions the files have in the other order."""

    stack: TensorSlice

    def get_shape(self) -> list[int]:
        count, size_in, size_out = self.stack.get_shape()
        return [count, size_out, size_in]

    def get_dtype(self) -> str:
        return self.stack.get_dtype()

    def __getitem__(self, index: EllipsisType | int) -> Tensor:
        return self.stack[index].transpose(-1, -2).contiguous()


def turned(slices: dict[str, TensorSlice], config: Any) -> dict[str, TensorSlice]:
    """Return the tensors of a container of the type qwen3_vl_moe with experts as its text model has them, [count, out,
    in]: publishers have them as [count, in, out], and Transformers saves them either way.

    config: of the text model.
    """
    hidden = config.hidden_size
    width = config.moe_intermediate_size
    published = {_STACKS[0]: [hidden, 2 * width], _STACKS[1]: [width, hidden]}
    stacks = {name: each for name, each in slices.items() if name.endswith(_STACKS)}
    shapes = {name[name.index("mlp") :]: each.get_shape()[1:] for name, each in stacks.items()}
    if not any(shape == published[leaf] != shape[::-1] for leaf, shape in shapes.items()):  # one of them is no square
        return slices
    return {**slices, **{name: _Turned(each) for name, each in stacks.items()}}
