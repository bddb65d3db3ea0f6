"""A model's tensors with its matrices in codes, as they are saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.errors import UnsupportedModelError
from forerun.models.code_tensors import tensors_of
from forerun.models.configuration import refuse_unservable
from forerun.models.linear import Part
from forerun.models.llama import llama_refusal
from forerun.models.quantising import Quantisation, QuantisedMaker, matrices
from forerun.models.reading import read_to_quantise
from forerun.models.sources import find_source

_BYTES = {"int8": 1.1, "int4": 0.7}
"""For a number in codes."""


@dataclass(frozen=True, slots=True)
class ToSave:
    """A model that is to be saved in codes.

    Attributes:
        config: its Transformers configuration.
        eos_token_ids: that end its output.
        sampling: the options that its files recommend.
        dtype: of what stays as numbers.
        num_parameters: of its weights, tied ones counted once.
        nbytes: of its tensors, about.
        parts: tensors by name, those of one parameter at a time; they are quantised when they are asked for.
    """

    config: Any
    eos_token_ids: frozenset[int]
    sampling: dict[str, float]
    dtype: str
    num_parameters: int
    nbytes: int
    parts: Iterator[dict[str, Tensor]]


def to_save(name: str | Path, quantize: Quantisation, adapter: str | Path | None = None) -> ToSave:
    """What `load_model(name, quantize=..., adapter=...)` computes with.

    Raises:
        ConfigError, ModelLoadError: as `load_model`.
    """
    source = find_source(name)
    config = source.config()
    refuse_unservable(config, source.name)
    is_llama = llama_refusal(config) is None
    model, maker = read_to_quantise(source, config, "auto", adapter, quantize, is_llama=is_llama)
    model.config.architectures = [type(model).__name__]
    return ToSave(
        model.config,
        source.eos_token_ids(config),
        source.recommended_sampling(),
        str(maker.dtype).removeprefix("torch."),
        sum(parameter.numel() for parameter in model.parameters()),
        _nbytes(model, quantize, is_llama),
        _parts(model, maker, is_llama, source.name),
    )


def _nbytes(model: Any, quantize: Quantisation, is_llama: bool) -> int:
    """About the bytes of the saved tensors: codes, scales, and what stays as numbers."""
    outer = (model.get_output_embeddings(), model.get_input_embeddings())
    in_codes = {
        f"{path}.weight": _BYTES["int8" if module in outer else quantize]
        for path, module in matrices(model, is_llama).items()
    }
    parameters = model.named_parameters()
    return int(sum(each.numel() * in_codes.get(name, each.element_size()) for name, each in parameters))


def _parts(model: Any, maker: QuantisedMaker, is_llama: bool, name: str) -> Iterator[dict[str, Tensor]]:
    from transformers.pytorch_utils import Conv1D

    found = matrices(model, is_llama)
    if not found:
        raise UnsupportedModelError(f"{name} has no linear layers that could be quantised. Serve it as it is.")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in found.items():
        is_transposed, key = type(module) is Conv1D, f"{path}.weight"
        stored = module.get_parameter("weight")
        part = Part(key, stored.T if is_transposed else stored)
        weight = maker.weight(part, is_outer=module is head or module is embedding)
        yield tensors_of(key, weight, is_transposed=is_transposed)
    is_tied = head is not None and head.weight is embedding.weight
    done = {f"{path}.weight" for path, module in model.named_modules() if path in found or (is_tied and module is head)}
    for key, tensor in model.state_dict().items():
        if key not in done:
            yield {key: tensor.detach().clone()}
