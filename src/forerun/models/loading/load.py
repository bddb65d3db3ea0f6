"""From a name to a Model, whatever kind of files it lies in. No code of theirs is run, and no pickle is opened."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch

from forerun.config import DEFAULT_DTYPE, NATIVE, REFERENCE, TRITON
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.kernels.triton.availability import wants_triton
from forerun.models.families import library_for, make_decoder
from forerun.models.general import ATTENTION_NAME, register_attention
from forerun.models.llama.decoder import llama_refusal
from forerun.models.loading.configuration import OUTPUT_TOKENS, context_length, refuse_unservable
from forerun.models.loading.find_source import find_source
from forerun.models.loading.lora import adapter_tokenizer
from forerun.models.loading.quantise import QuantisedMaker, check_quantisation
from forerun.models.loading.reading import check_dtype, read, read_to_quantise
from forerun.models.loading.source import ModelSource
from forerun.models.loading.transformers_modules import foreign_attention, on_device
from forerun.models.model import Model
from forerun.models.non_finite import first_non_finite_tensor
from forerun.models.self_test import probe, self_test
from forerun.utils.device import raise_own, resolve_device
from forerun.utils.foreign_errors import reason

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
    quantize: str | None = None,
) -> Model:
    """Load a causal language model and try whether it is exact.

    One line is logged where the weights are rounded, and one where the files recommend sampling options: those of a
    request are its own. The numbers that quantised weights stand for are rounded without a line.

    Args:
        name: "bundled", "bundled-draft", "smollm2" (once fetched), a local folder, a .gguf file, a hub id, or one of
            its GGUF files ("owner/name:file.gguf").
        dtype: "float32", "bfloat16", "float64", or "auto": that of the weights, float32 for float16 and for quantised
            ones.
        kind: of decoder: "llama" for the Llama family's fast one, "general" for Transformers' own modules,
            "auto" for the first where it serves the model.
        device: where the model computes: "cpu", "cuda", "cuda:1", "mps".
        adapter: the folder of a PEFT LoRA adapter to merge.
        quantize: "int8" or "int4": the weights are kept in codes of so many bits, and `dtype` is the number format of
            everything else. None: as the files say, which is "not at all" for those that `forerun quantize` has not
            written.

    Raises:
        ConfigError: unknown dtype, kind or quantisation, the Llama decoder asked for a model it does not serve, a
            device that is not there, or an adapter without PEFT.
        ModelLoadError: the files are missing, broken, or hold only pickled weights; an adapter does not fit them.
        UnsupportedModelError: the architecture cannot be served exactly (named, with the reason).
        DeviceMemoryError, DeviceError: the device has no memory left for it, or fails.
    """
    source, model = _load(name, dtype, kind, device, adapter, quantize)
    tell_of_source(source, model, name)
    model.exactness = self_test(model)
    return model


def tell_of_source(source: ModelSource, model: Model, name: str | Path) -> None:
    """Log the sampling options that the files recommend, and that the weights are rounded, where that is so."""
    options = ", ".join(f"{key} {value:g}" for key, value in source.recommended_sampling().items())
    if options:
        _log.warning("%s: %s recommends %s; requests that want this say so.", name, source.place_of_sampling, options)
    stored = source.stored_dtype()
    served = str(model.dtype).removeprefix("torch.")
    if stored is not None and model.quantize is None and _BITS[stored] > _BITS[served]:
        _log.warning("%s: the weights are %s and are rounded to %s; dtype='auto' keeps them.", name, stored, served)


def load_draft_model(
    name: str | Path,
    dtype: str = DEFAULT_DTYPE,
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> Model:
    """Load a model that drafts: as `load_model`, but what is rounded or recommended does not matter to a draft.

    Raises:
        ModelLoadError: in addition, the weights hold NaN or infinity, or the model computes such numbers from them.
    """
    _, model = _load(name, dtype, "auto", device, adapter, quantize)
    tensor = first_non_finite_tensor(model)
    if tensor is not None:
        raise ModelLoadError(
            f"draft model {name}: {tensor} holds NaN or infinity. Save the model anew, or draft with another."
        )
    if not probe(model):
        raise ModelLoadError(f"draft model {name} computes NaN or infinity from finite weights. Draft with another.")
    model.exactness = self_test(model)
    return model


def inherited_dtype(name: str | Path, target: torch.dtype, quantize: str | None = None) -> str:
    """The number format of a draft model that was told none: its target's. A quantised one computes in float32 beside a
    target in float64, in which no codes are multiplied: a draft may be inexact, the target checks it.

    Raises:
        ModelLoadError: there is no such model.
    """
    if target == torch.float64 and (quantize or find_source(name).quantisation()):
        return "float32"
    return str(target).removeprefix("torch.")


def load_tokenizer(name: str | Path) -> Any:
    """The Transformers tokenizer that lies beside a model.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    return find_source(name).tokenizer()


def find_tokenizer(name: str | Path, adapter: str | Path | None = None) -> Any:
    """The same, or None where there is none: such a model is served by token ids.

    adapter: the folder of an adapter, whose tokenizer, if it has one, is taken in place of the model's.

    Raises:
        ModelLoadError: there is one that cannot be read, or the adapter's has other tokens than the model's.
    """
    source = find_source(name)
    tokenizer = source.tokenizer() if source.has_tokenizer() else None
    return tokenizer if adapter is None else adapter_tokenizer(adapter, tokenizer, str(name))


def load_transformers_model(name: str | Path, dtype: str, adapter: str | Path | None = None) -> Any:
    """A causal language model as Transformers computes it, with its default attention, in evaluation mode.

    adapter: the folder of a PEFT LoRA adapter to merge.

    Raises:
        ConfigError, ModelLoadError: as `load_model`.
    """
    check_dtype(dtype)
    source = find_source(name)
    config = source.config()
    model = read(source, config, dtype, adapter)
    model.generation_config.eos_token_id = sorted(source.eos_token_ids(config)) or None
    return model.requires_grad_(True)


def _load(
    name: str | Path,
    dtype: str,
    kind: Kind,
    device: str | torch.device,
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> tuple[ModelSource, Model]:
    """A model that has computed one step."""
    check_dtype(dtype)
    asked = check_quantisation(quantize, dtype)
    _check_kind(kind)
    place = resolve_device(device)
    source = find_source(name)
    config = source.config()
    kind = served_kind(kind, source, config)
    quantisation = asked or check_quantisation(source.quantisation(), dtype)
    register_attention()
    maker = None
    if quantisation is None:
        hf = read(source, config, dtype, adapter, ATTENTION_NAME)
    else:
        hf, maker = read_to_quantise(
            source, config, dtype, adapter, quantisation, is_llama=kind == "llama", attention=ATTENTION_NAME
        )
    try:
        hf = on_device(hf, place)
        ends, tokens = source.eos_token_ids(config), source.output_tokens(config)
        model = _assemble(hf, source.name, ends, kind, maker, tokens)
        model.adapter, model.quantize = None if adapter is None else str(adapter), quantisation
        if adapter is None:
            model.packed_weights = source.packed_weights(config)
        probe(model)
    except _COMPUTING as error:
        raise_own(error, place)
        if kind == "general" and not type(hf)._supports_attention_backend:
            raise foreign_attention(f"{name} ({config.model_type})") from error
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) could not compute one step in forerun: {reason(error)}. "
            "Serve it with Transformers, or report the architecture."
        ) from error
    return source, model


def _check_kind(kind: str) -> None:
    if kind not in ("auto", "llama", "general"):
        raise ConfigError(f"kind is {kind!r}, but must be auto, llama or general.")


def served_kind(kind: Kind, source: ModelSource, config: Any) -> Kind:
    """ "llama" or "general".

    Raises:
        ConfigError: the Llama decoder is asked for a model that it does not serve.
        UnsupportedModelError: no decoder serves it, or not with its reduced output vocabulary.
    """
    refuse_unservable(config, source.name)
    refusal = llama_refusal(config)
    if kind == "llama" and refusal:
        raise ConfigError(f"the Llama decoder cannot serve {source.name}: {refusal}. Use kind='general'.")
    if (kind == "general" or refusal) and source.output_tokens(config) is not None:
        raise UnsupportedModelError(
            f"{source.name} proposes a part of its vocabulary ({OUTPUT_TOKENS} in its configuration), which only the "
            f"Llama decoder serves{': ' + refusal if refusal else ''}. Remove that key to compute all tokens."
        )
    return ("general" if refusal else "llama") if kind == "auto" else kind


def adopt(hf: Any, name: str, quantize: str | None = None) -> Model:
    """A Model of a Transformers model in memory, which is taken apart for it. No token of its own ends an answer.

    quantize: "int8" or "int4", what its weights are brought to; None: they are as they are.

    Raises:
        ConfigError: unknown quantisation.
        UnsupportedModelError: it cannot be served exactly.
    """
    config = hf.config
    refuse_unservable(config, name)
    kind: Kind = "general" if llama_refusal(config) else "llama"
    quantisation = check_quantisation(quantize, str(hf.dtype).removeprefix("torch."))
    maker = None if quantisation is None else QuantisedMaker(quantisation, None, {}, hf.dtype)
    register_attention()
    try:
        hf.set_attn_implementation(ATTENTION_NAME)
        hf.set_experts_implementation("eager")
        model = _assemble(hf, name, frozenset(), kind, maker)
        model.quantize = quantisation
        probe(model)
    except _COMPUTING as error:
        raise_own(error, hf.device)
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) could not compute one step in forerun: {reason(error)}. Generate without it."
        ) from error
    model.exactness = self_test(model)
    return model


def _assemble(
    hf: Any,
    name: str,
    eos_token_ids: frozenset[int],
    kind: Kind,
    maker: QuantisedMaker | None = None,
    tokens: tuple[int, ...] | None = None,
) -> Model:
    """tokens: the part of the vocabulary that it proposes; None: all of it."""
    config = hf.config
    num_parameters = sum(p.numel() for p in hf.parameters())
    dtype, device = hf.dtype if maker is None else maker.dtype, hf.device
    library = library_for(device, dtype, is_quantised=maker is not None)
    output_tokens = None if tokens is None else torch.tensor(tokens, device=device)
    model = Model(
        make_decoder(hf, dtype, kind, maker, output_tokens),
        name=name,
        vocab_size=config.vocab_size,
        context_length=context_length(config),
        eos_token_ids=eos_token_ids,
        dtype=dtype,
        device=device,
        num_parameters=num_parameters,
        kind=kind,
        output_tokens=output_tokens,
    )
    model.kernels = REFERENCE if library is None else f"{NATIVE} {library.instructions}"
    if wants_triton():
        model.kernels = TRITON
    return model
