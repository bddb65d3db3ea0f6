"""The numbers of a model that decide its speed and memory: counted from its configuration, or given by the user."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forerun.config import BUNDLED_MODELS, DEFAULT_DTYPE
from forerun.errors import ConfigError
from forerun.models.attention.base import ATTENTION_NAME
from forerun.models.families.table import description_of
from forerun.models.loading.source import find_source
from forerun.models.loading.transformers_modules import empty_model
from forerun.models.memory_plan import attention_widths
from forerun.models.spec.decoder import keeps_keys
from forerun.utils.fields import Checked, option

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT])", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class GivenShape(Checked):
    """Numbers that may follow a number of parameters, as `70B:layers=80,kv_heads=8,head_dim=128`."""

    layers: int | None = option(None, "Layers.", low=1, default_text="unknown")
    kv_heads: int | None = option(None, "Key heads of a layer.", low=1, default_text="unknown")
    head_dim: int | None = option(None, "Width of a head.", low=1, default_text="unknown")
    heads: int | None = option(None, "Query heads of a layer.", low=1, default_text="those of the keys")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model by numbers.

    Attributes:
        parameters: all of them.
        dense: those that every step reads, and a row multiplies with: all but experts and an embedding of its own.
        expert_parameters: of all experts together. experts, experts_used: how many a layer has, and a row takes.
        layers: None: unknown.
        cache_numbers: numbers of keys and values that a position takes in all layers; None: unknown.
        attention_products: multiplications of a row with keys and values, for each position before it.
        one_pass: it drafts all tokens in one pass.
        number_format: in which forerun serves its weights by default. weight_bytes: of a weight in it, in the mean.
    """

    name: str
    parameters: int
    dense: int
    expert_parameters: int = 0
    experts: int = 1
    experts_used: int = 1
    layers: int | None = None
    cache_numbers: int | None = None
    attention_products: int = 0
    one_pass: bool = False
    number_format: str = DEFAULT_DTYPE
    weight_bytes: float = 2.0

    def read(self, rows: float) -> float:
        """Return the weights that a step of so many rows reads: of the experts, those that some row takes, if each row
        takes them at random."""
        missed = math.pow(1 - self.experts_used / self.experts, rows)
        return self.dense + self.expert_parameters * (1 - missed)

    @property
    def multiplied(self) -> float:
        """Return the weights that a row is multiplied with."""
        return self.dense + self.expert_parameters * self.experts_used / self.experts


def model_shape(name: str) -> ModelShape:
    """Return the shape of a model or of a draft head.

    Args:
        name: as LLM takes a target: of it, the configuration is read, and what the files have quantized weights in.
            Or a number of parameters, as 70B or 1.5B, with the fields of GivenShape.

    Raises:
        ConfigError, ModelLoadError: there is no such model, or its configuration cannot be read.
    """
    count, _, more = name.partition(":")
    found = _COUNT.fullmatch(count.strip())
    if found and name not in BUNDLED_MODELS and not Path(name).exists():
        return counted_shape(name, round(float(found[1]) * _UNITS[found[2].lower()]), _given(name, more))
    if (Path(name) / "config.json").is_file() and (head := _head_shape(Path(name))) is not None:
        return head
    source = find_source(name)
    shape = configured(name, source.config())
    nbytes = source.stored_nbytes()
    stored = None if nbytes is None else source.quantization() or source.file_type()
    if nbytes is None or stored is None:
        return shape
    return replace(shape, number_format=stored, weight_bytes=nbytes / shape.parameters)


def counted_shape(name: str, parameters: int, given: GivenShape | None = None) -> ModelShape:
    """Return the shape of a number of parameters, all of them read at each step."""
    given = given or GivenShape()
    numbers = None
    attention_products = 0
    if given.layers and given.kv_heads and given.head_dim:
        numbers = 2 * given.layers * given.kv_heads * given.head_dim
        attention_products = 2 * given.layers * (given.heads or given.kv_heads) * given.head_dim
    return ModelShape(
        name, parameters, parameters, layers=given.layers, cache_numbers=numbers, attention_products=attention_products
    )


def configured(name: str, config: Any) -> ModelShape:
    """Return the shape of a Transformers configuration: its tensors are created without memory, and counted."""
    model = empty_model(name, config, torch.bfloat16, ATTENTION_NAME)
    text = config.get_text_config()
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    own = head is not None and head.weight is not embedding.weight
    layers = int(text.num_hidden_layers)
    spec = description_of(text).served
    heads, kv_heads, *widths = attention_widths(text, spec)
    cached = layers * kv_heads * sum(widths)
    attention_products = layers * heads * sum(widths)
    if spec is not None:
        cached = attention_products = 0
        for layer in spec.layers:
            if (attention := layer.attention) is not None:
                width = sum(attention.cached_widths)
                cached += attention.num_kv_heads * width if keeps_keys(layer) else 0
                attention_products += attention.num_heads * width
    return ModelShape(
        name,
        sum(sizes.values()),
        sum(sizes.values()) - experts - (embedding.weight.numel() if own else 0),
        experts,
        next((int(count) for key in _EXPERT_COUNTS if (count := getattr(text, key, None))), 1) if experts else 1,
        int(getattr(text, "num_experts_per_tok", None) or 1) if experts else 1,
        layers,
        cached,
        attention_products,
    )


def _head_shape(folder: Path) -> ModelShape | None:
    """Return the shape of a draft head's folder; None for any other."""
    from forerun.drafters.models.eagle.config import EagleConfig
    from forerun.drafters.models.head_files.folder import load_head
    from forerun.errors import ModelLoadError

    try:
        head = load_head(folder)
    except ModelLoadError:
        return None
    parameters = sum(tensor.numel() for tensor in head.tensors.values())
    read = parameters
    config = head.config
    if isinstance(config, EagleConfig) and not config.own_output_rows:
        read += config.draft_vocab_size * config.hidden_size  # the target's rows
    return ModelShape(str(folder), parameters, read, layers=1, one_pass=not isinstance(config, EagleConfig))


def _given(name: str, text: str) -> GivenShape:
    values: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in GivenShape.__dataclass_fields__ or not value.strip().isdecimal():
            raise ConfigError(
                f"{name!r} says {part!r}, but after a number of parameters there may be "
                f"{', '.join(GivenShape.__dataclass_fields__)} with whole numbers, "
                f"as 70B:layers=80,kv_heads=8,head_dim=128."
            )
        values[key.strip()] = int(value)
    return GivenShape(**values)
