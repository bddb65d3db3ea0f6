"""From a folder or hub id to a Model. Weights come from safetensors only; no remote code is run."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from forerun.config import DEFAULT_DTYPE, DTYPES
from forerun.device import resolve_device
from forerun.errors import ConfigError, ForerunError, ModelLoadError, UnsupportedModelError
from forerun.models.adapter import check_adapter_tokens, with_adapter
from forerun.models.configuration import (
    context_length,
    eos_token_ids,
    read_config,
    recommended_sampling,
    refuse_unservable,
)
from forerun.models.exactness import probe, self_test
from forerun.models.folder import GENERATION_CONFIG, ModelFolder
from forerun.models.foreign_errors import reason
from forerun.models.general import ATTENTION_NAME, GeneralDecoder, register_attention
from forerun.models.llama import LlamaDecoder, llama_refusal
from forerun.models.model import Decoder, Model
from forerun.models.non_finite import first_non_finite_tensor
from forerun.models.transformers_model import foreign_attention, read_model, read_tokenizer, stored_dtype

_log = logging.getLogger(__name__)
Kind = Literal["auto", "llama", "general"]
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Of the significand."""
# what modules that are not made for this attention, or values that fit no model, raise when they compute
_COMPUTING = (AttributeError, TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AssertionError)


def load_model(
    name: str | Path,
    dtype: str = DEFAULT_DTYPE,
    kind: Kind = "auto",
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
) -> Model:
    """Load a causal language model and try whether it is exact.

    One line is logged where the weights are rounded, and one where generation_config.json recommends sampling options:
    those of a request are its own.

    Args:
        name: "bundled", "bundled-draft", a local folder, or a hub id.
        dtype: "float32", "bfloat16", "float64", or "auto": that of the weights, float32 for float16.
        kind: of decoder: "llama" for the Llama family's fast one, "general" for Transformers' own modules,
            "auto" for the first where it serves the model.
        device: where the model computes: "cpu", "cuda", "cuda:1", "mps".
        adapter: the folder of a PEFT LoRA adapter to merge.

    Raises:
        ConfigError: unknown dtype or kind, the Llama decoder asked for a model it does not serve, a device that is
            not there, or an adapter without PEFT.
        ModelLoadError: the folder is missing, broken, or has only pickled weights; an adapter does not fit it.
        UnsupportedModelError: the architecture cannot be served exactly (named, with the reason).
    """
    folder, model = _load(name, dtype, kind, device, adapter)
    options = ", ".join(f"{key} {value:g}" for key, value in recommended_sampling(folder).items())
    if options:
        _log.warning("%s: %s recommends %s; requests that want this say so.", name, GENERATION_CONFIG, options)
    stored = stored_dtype(folder)
    served = str(model.dtype).removeprefix("torch.")
    if _BITS[stored] > _BITS[served]:
        _log.warning("%s: the weights are %s and are rounded to %s; dtype='auto' keeps them.", name, stored, served)
    model.exactness = self_test(model)
    return model


def load_draft_model(name: str | Path, dtype: str = DEFAULT_DTYPE, device: str | torch.device = "cpu") -> Model:
    """Load a model that drafts: as `load_model`, but what is rounded or recommended does not matter to a draft.

    Raises:
        ModelLoadError: in addition, the weights hold NaN or infinity, or the model computes such numbers from them.
    """
    _, model = _load(name, dtype, "auto", device)
    tensor = first_non_finite_tensor(model)
    if tensor is not None:
        raise ModelLoadError(
            f"draft model {name}: {tensor} holds NaN or infinity. Save the model anew, or draft with another."
        )
    if not probe(model):
        raise ModelLoadError(f"draft model {name} computes NaN or infinity from finite weights. Draft with another.")
    model.exactness = self_test(model)
    return model


def load_tokenizer(name: str | Path) -> Any:
    """The Transformers tokenizer that lies beside a model.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    return read_tokenizer(ModelFolder.find(name))


def find_tokenizer(name: str | Path, adapter: str | Path | None = None) -> Any:
    """The same, or None where there is none: such a model is served by token ids.

    adapter: the folder of an adapter, whose tokenizer, if it has one, is taken in place of the model's.

    Raises:
        ModelLoadError: there is one that cannot be read, or the adapter's has other tokens than the model's.
    """
    folder = ModelFolder.find(name)
    tokenizer = read_tokenizer(folder) if folder.has_tokenizer() else None
    beside = None if adapter is None else ModelFolder(str(adapter), Path(adapter).expanduser())
    if beside is None or not beside.has_tokenizer():
        return tokenizer
    ours = read_tokenizer(beside)
    check_adapter_tokens(tokenizer, ours, str(name), str(adapter))
    return ours


def load_transformers_model(name: str | Path, dtype: str, adapter: str | Path | None = None) -> Any:
    """A causal language model as Transformers computes it, with its default attention, in evaluation mode.

    adapter: the folder of a PEFT LoRA adapter to merge.

    Raises:
        ConfigError, ModelLoadError: as `load_model`.
    """
    _check_dtype(dtype)
    folder = ModelFolder.find(name)
    config = read_config(folder)
    model = with_adapter(partial(read_model, folder, config), _torch_dtype(folder, dtype), adapter, name)
    model.generation_config.eos_token_id = sorted(eos_token_ids(folder, config)) or None
    return model.requires_grad_(True)


def _load(
    name: str | Path, dtype: str, kind: Kind, device: str | torch.device, adapter: str | Path | None = None
) -> tuple[ModelFolder, Model]:
    """A model that has computed one step."""
    _check_dtype(dtype)
    if kind not in ("auto", "llama", "general"):
        raise ConfigError(f"kind is {kind!r}, but must be auto, llama or general.")
    place = resolve_device(device)
    folder = ModelFolder.find(name)
    config = read_config(folder)
    refuse_unservable(config, folder.name)
    refusal = llama_refusal(config)
    if kind == "llama" and refusal:
        raise ConfigError(f"the Llama decoder cannot serve {name}: {refusal}. Use kind='general'.")
    if kind == "auto":
        kind = "general" if refusal else "llama"
    eos = eos_token_ids(folder, config)
    register_attention()
    read = partial(read_model, folder, config, attention=ATTENTION_NAME)
    hf = with_adapter(read, _torch_dtype(folder, dtype), adapter, name).to(place)
    try:
        model = _assemble(hf, folder.name, config, eos, kind)
        model.adapter = None if adapter is None else str(adapter)
        probe(model)
    except _COMPUTING as error:
        if isinstance(error, ForerunError):
            raise
        if kind == "general" and not type(hf)._supports_attention_backend:
            raise foreign_attention(f"{name} ({config.model_type})") from error
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) could not compute one step in forerun: {reason(error)}. "
            "Serve it with Transformers, or report the architecture."
        ) from error
    return folder, model


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}.")


def _torch_dtype(folder: ModelFolder, dtype: str) -> torch.dtype:
    """That of a name. "auto" is the weights' own, and float32, which holds all of it, for float16."""
    if dtype == "auto":
        dtype = stored_dtype(folder)
    found: torch.dtype = getattr(torch, "float32" if dtype == "float16" else dtype)
    return found


def _assemble(hf: Any, name: str, config: Any, eos: frozenset[int], kind: Kind) -> Model:
    num_parameters = sum(p.numel() for p in hf.parameters())
    dtype, device = hf.dtype, hf.device
    decoder: Decoder = LlamaDecoder(hf) if kind == "llama" else GeneralDecoder(hf)
    return Model(
        decoder,
        name=name,
        vocab_size=config.vocab_size,
        context_length=context_length(config),
        eos_token_ids=eos,
        dtype=dtype,
        device=device,
        num_parameters=num_parameters,
        kind=kind,
    )
