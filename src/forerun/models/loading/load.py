"""Load a model by name, from a folder, a GGUF file or the hub. No code of the files is run, and no pickle is opened."""

from __future__ import annotations

import logging
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from forerun.config import AUTO, DEFAULT_DTYPE, DTYPES, NATIVE, QUANTISATIONS, REFERENCE, TRITON, UNQUANTIZED
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.kernels.cpu.linear import experts_in
from forerun.kernels.triton.availability import is_triton_selected
from forerun.models.decoders import Kind, library_for, make_decoder, mixture_as_stored, served_kind
from forerun.models.fused.families import description_of
from forerun.models.fused.recurrent_families import TILED
from forerun.models.general import ATTENTION_NAME, register_attention
from forerun.models.loading.configuration import context_length, refuse_unservable
from forerun.models.loading.find_source import find_source
from forerun.models.loading.fused_modules import read_fused
from forerun.models.loading.lora import adapter_tokenizer, with_adapter
from forerun.models.loading.progress import counted
from forerun.models.loading.quantized_layers import (
    Quantization,
    QuantizedMaker,
    StoredMaker,
    check_quantization,
    matrices,
    stored_numbers,
    streamed,
)
from forerun.models.loading.source import ModelSource
from forerun.models.loading.transformers_modules import foreign_attention, read_model, rounded, to_device
from forerun.models.loading.weights import Checkpoint
from forerun.models.model import Model
from forerun.models.non_finite import first_non_finite_tensor
from forerun.models.self_test import probe, self_test
from forerun.models.spec.decoder import DecoderSpec
from forerun.utils.device import raise_own, resolve_device
from forerun.utils.foreign_errors import as_memory_errors, reason
from forerun.utils.glibc import return_freed_memory
from forerun.utils.home import home

_log = logging.getLogger(__name__)
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Of the significand."""
# raised by modules that do not fit this attention, or by configurations that fit no model, when they compute
_COMPUTING = (AttributeError, TypeError, ValueError, RuntimeError, LookupError, ArithmeticError, AssertionError)


def load_model(
    name: str | Path,
    dtype: str = DEFAULT_DTYPE,
    kind: Kind = "auto",
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
    quantize: str | None = None,
    kv_cache_dtype: str = AUTO,
    *,
    experts_on_disk: bool = False,
) -> Model:
    """Load a causal language model and test whether it is exact.

    One line is logged where the weights are rounded, one where quantized weights are not computed with as they are
    stored, and one (of the level INFO) where the files recommend sampling options: those of a request are its own.

    Args:
        name: "bundled", "bundled-draft", "smollm2" (once fetched), a local folder, a .gguf file, a hub id, or one of
            its GGUF files ("owner/name:file.gguf").
        dtype: "float32", "bfloat16", "float64", or "auto": that of the weights, float32 for float16 and for quantized
            ones. "float16" is taken for bfloat16, with a warning.
        kind: of decoder: "fused" for the families of `fused/families.py`, "general" for Transformers' own modules,
            "auto" for the first where it serves the model.
        device: where the model computes: "cpu", "cuda", "cuda:1", "mps".
        adapter: the folder of a PEFT LoRA adapter to merge.
        quantize: "int8" or "int4": the weights are quantized, and `dtype` is the number format of everything else.
            None: as stored, which is quantized in folders that `forerun quantize` has written, and in GGUF files and
            the integers of other programs where the native kernels compute the fused decoder. "none": numbers of
            `dtype`, whatever is stored.
        kv_cache_dtype: "bfloat16", "float32" or "int8", what keys and values are stored in by the native kernels;
            "auto": `dtype`.
        experts_on_disk: the weights of experts lie in a file, for models that memory does not hold.

    Raises:
        ConfigError: unknown dtype, kind or quantization, the fused decoder requested for a model it does not serve, a
            device that is not there, an adapter without PEFT, or a format of keys and values that is unknown or that
            the model's kernels do not store.
        ModelLoadError: the files are missing, broken, or hold only pickled weights; an adapter does not fit them.
        UnsupportedModelError: the architecture cannot be served exactly (named, with the reason).
        DeviceMemoryError, DeviceError: the device has no memory left for it, or fails.
    """
    with as_memory_errors(f"{name} cannot be loaded"), experts_in(_disk() if experts_on_disk else None):
        source, model, is_finite = _load(name, dtype, kind, device, adapter, quantize, kv_cache_dtype)
    log_source_notes(source, model, name, is_asked_for=quantize == UNQUANTIZED)
    model.exactness = self_test(model, is_finite=is_finite)
    return_freed_memory()
    return model


def _disk() -> Path:
    """Return a folder for large files: forerun's own, since that of temporary files often lies in memory."""
    base = home() or Path(tempfile.gettempdir())
    with suppress(OSError):  # a file in it cannot be made then, and the error of that is reported
        base.mkdir(parents=True, exist_ok=True)
    return base


def log_source_notes(source: ModelSource, model: Model, name: str | Path, *, is_asked_for: bool = False) -> None:
    """Log the sampling options that the files recommend, and a warning if the weights are rounded, or computed in
    another form than they are stored in. is_asked_for: as numbers (UNQUANTIZED)."""
    options = ", ".join(f"{key} {value:g}" for key, value in model.recommended_sampling.items())
    if options:
        _log.info("%s: %s recommends %s; requests that want this say so.", name, source.place_of_sampling, options)
    stored = source.stored_dtype()
    served = str(model.dtype).removeprefix("torch.")
    if stored is not None and model.quantize is None and _BITS[stored] > _BITS[served]:
        _log.warning("%s: the weights are %s and are rounded to %s; dtype='auto' keeps them.", name, stored, served)
    types = {
        each: count
        for each, count in source.block_types().items()
        if model.quantize is None or each not in source.computed_types
    }
    if types and not is_asked_for:
        form = model.quantize if model.quantize in QUANTISATIONS else served
        listed = ", ".join(f"{count} of {each}" for each, count in sorted(types.items()))
        _log.warning(
            "%s: tensors are computed as %s and not as they are stored: %s. The native fused decoder, without an "
            "adapter, computes with %s as they are; quantize='int4' saves memory.",
            *(name, form, listed, ", ".join(source.computed_types)),
        )


def load_draft_model(
    name: str | Path,
    dtype: str = DEFAULT_DTYPE,
    device: str | torch.device = "cpu",
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> Model:
    """Load a model that drafts, like `load_model`; rounding and recommended options are not logged for a draft model.

    Raises:
        ModelLoadError: in addition, the weights hold NaN or infinity, or the model computes such numbers from them.
    """
    with as_memory_errors(f"{name} cannot be loaded"):
        _, model, is_finite = _load(name, dtype, "auto", device, adapter, quantize)
    tensor = first_non_finite_tensor(model)
    if tensor is not None:
        raise ModelLoadError(
            f"draft model {name}: {tensor} holds NaN or infinity. Save the model anew, or draft with another."
        )
    if not is_finite:
        raise ModelLoadError(f"draft model {name} computes NaN or infinity from finite weights. Draft with another.")
    model.exactness = self_test(model)
    return_freed_memory()
    return model


def inherited_dtype(name: str | Path, target: torch.dtype, quantize: str | None = None) -> str:
    """Return the number format of a draft model without one of its own: its target's. A quantized one computes in
    float32 beside a target in float64, since quantized values are not multiplied in float64: a draft may be inexact,
    the target verifies it.

    Raises:
        ModelLoadError: there is no such model.
    """
    if target == torch.float64 and (quantize or find_source(name).quantization()):
        return "float32"
    return str(target).removeprefix("torch.")


def load_tokenizer(name: str | Path) -> Any:
    """Return the Transformers tokenizer of a model.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    return find_source(name).tokenizer()


def find_tokenizer(name: str | Path, adapter: str | Path | None = None) -> Any:
    """Return the Transformers tokenizer of a model, or None without one: such a model is served by token ids.

    adapter: the folder of an adapter, whose tokenizer, if it has one, is taken in place of the model's.

    Raises:
        ModelLoadError: there is one that cannot be read, or the adapter's has other tokens than the model's.
    """
    return tokenizer_of(find_source(name), adapter)


def tokenizer_of(source: ModelSource, adapter: str | Path | None) -> Any:
    """Return `find_tokenizer` of a source."""
    tokenizer = source.tokenizer() if source.has_tokenizer() else None
    return tokenizer if adapter is None else adapter_tokenizer(adapter, tokenizer, source.name)


def load_transformers_model(name: str | Path, dtype: str, adapter: str | Path | None = None) -> Any:
    """Load a causal language model as Transformers computes it, with its default attention, in evaluation mode.

    adapter: the folder of a PEFT LoRA adapter to merge.

    Raises:
        ConfigError, ModelLoadError: as `load_model`.
    """
    check_dtype(dtype)
    if dtype == "float16":
        raise ConfigError("dtype is 'float16', in which nothing is computed. Give 'bfloat16' or 'float32'.")
    source = find_source(name)
    config = source.config()
    spec = description_of(config).served
    model = _read(source, config, spec, served_dtype(source, dtype, is_quantized=False), adapter)
    model.generation_config.eos_token_id = sorted(source.eos_token_ids(config)) or None
    return model.requires_grad_(True)


def _load(
    name: str | Path,
    dtype: str,
    kind: Kind,
    device: str | torch.device,
    adapter: str | Path | None = None,
    quantize: str | None = None,
    kv_cache_dtype: str = AUTO,
) -> tuple[ModelSource, Model, bool]:
    """Load a model, and compute one step with it. Also returns whether that is finite."""
    check_dtype(dtype)
    if dtype == "float16":
        _log.warning("%s: dtype is float16, in which nothing is computed; bfloat16 is taken.", name)
    requested = check_quantization(quantize, dtype)
    if kind not in ("auto", "fused", "general"):
        raise ConfigError(f"kind is {kind!r}, but must be auto, fused or general.")
    target_device = resolve_device(device)
    source = find_source(name)
    config = source.plain_config() if adapter is None else source.config()
    kind, spec = served_kind(kind, source, config)
    is_fused = kind == "fused"
    if not is_fused:
        config = source.config()
    hf, maker, form = _read_weights(source, config, spec, dtype, target_device, adapter, requested, is_fused=is_fused)
    try:
        hf = to_device(hf, target_device)
        ends, tokens = source.eos_token_ids(config), source.output_tokens(config)
        model = _assemble(hf, source.name, ends, kind, maker, tokens, kv_cache_dtype, spec=spec)
        model.adapter, model.quantize = None if adapter is None else str(adapter), form
        model.recommended_sampling = MappingProxyType(_recommended(source))
        if adapter is None:
            model.packed_weights = source.packed_weights(spec)
        source.finish()
        is_finite = probe(model)
    except _COMPUTING as error:
        raise_own(error, target_device)
        if kind == "general" and not type(hf)._supports_attention_backend:
            raise foreign_attention(f"{name} ({config.model_type})") from error
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) could not compute one step in forerun: {reason(error)}. "
            "Serve it with Transformers, or report the architecture."
        ) from error
    return source, model, is_finite


def _read_weights(
    source: ModelSource,
    config: Any,
    spec: DecoderSpec | None,
    dtype: str,
    device: torch.device,
    adapter: str | Path | None,
    quantize: Quantization | None,
    *,
    is_fused: bool,
) -> tuple[Any, QuantizedMaker | StoredMaker | None, str | None]:
    """Return the Transformers model of a source, the maker of its layers, and the form of its weights
    (`LanguageModel.quantize`); no maker and no form where they are numbers."""
    quantize = quantize or check_quantization(source.quantization(), dtype)
    served = served_dtype(source, dtype, is_quantized=False)
    mixture = mixture_as_stored(source, quantize, device, served, is_fused=is_fused, adapted=adapter is not None)
    if mixture is not None:
        assert spec is not None  # `mixture_as_stored`
        return *_read_stored(source, config, spec, served), mixture
    if quantize is None or quantize == UNQUANTIZED:
        is_native = is_fused and adapter is None and library_for(device, served) is not None
        if spec is not None and is_native and source.block_types():
            return *_read_stored(source, config, spec, served, as_numbers=True), None  # one matrix at a time
        return _read(source, config, spec, served, adapter, ATTENTION_NAME, is_fused=is_fused), None, None
    read = read_to_quantize(source, config, spec, dtype, adapter, quantize, is_fused=is_fused, attention=ATTENTION_NAME)
    return *read, quantize


def _recommended(source: ModelSource) -> dict[str, float]:
    """Return the sampling options of the files. Filters are made for the files' temperature, which is 1 if unsaid."""
    found = source.recommended_sampling()
    if found.keys() & {"top_k", "top_p", "min_p"}:
        found = {"temperature": 1.0, **found}
    return {name: int(value) if name == "top_k" else value for name, value in found.items()}


def adopt(hf: Any, name: str, quantize: str | None = None) -> Model:
    """Turn a Transformers model in memory into a Model, which takes it apart. No token of its own ends an answer.

    quantize: "int8" or "int4", what its weights are brought to; None: they are as they are.

    Raises:
        ConfigError: unknown quantization.
        UnsupportedModelError: it cannot be served exactly.
    """
    config, device = hf.config, hf.device  # a native decoder leaves parameters on "meta"
    found = refuse_unservable(config, name)
    kind: Kind = "general" if found.refusal else "fused"
    quantization = check_quantization(quantize, str(hf.dtype).removeprefix("torch."))
    quantization = None if quantization == UNQUANTIZED else quantization
    maker = None if quantization is None else QuantizedMaker(quantization, None, {}, hf.dtype)
    register_attention()
    try:
        if kind == "general":
            hf.set_attn_implementation(ATTENTION_NAME)
        hf.set_experts_implementation("eager")
        model = _assemble(hf, name, frozenset(), kind, maker, spec=found.served)
        model.quantize = quantization
        is_finite = probe(model)
    except _COMPUTING as error:
        raise_own(error, device)
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) could not compute one step in forerun: {reason(error)}. Generate without it."
        ) from error
    model.exactness = self_test(model, is_finite=is_finite)
    return model


def _assemble(
    hf: Any,
    name: str,
    eos_token_ids: frozenset[int],
    kind: Kind,
    maker: QuantizedMaker | StoredMaker | None = None,
    tokens: tuple[int, ...] | None = None,
    kv_cache_dtype: str = AUTO,
    *,
    spec: DecoderSpec | None,
) -> Model:
    """Make the Model of a loaded Transformers model. tokens: the part of the vocabulary that it proposes; None: all of
    it. spec: of the fused decoder's."""
    config = hf.config
    num_parameters = sum(p.numel() for p in hf.parameters())
    dtype, device = hf.dtype if maker is None else maker.dtype, hf.device
    library = library_for(device, dtype)
    output_tokens = None if tokens is None else torch.tensor(tokens, device=device)
    model = Model(
        make_decoder(hf, dtype, kind, maker, output_tokens, kv_cache_dtype, spec=spec),
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
    model.kv_cache_dtype = None if kv_cache_dtype == AUTO else kv_cache_dtype
    native = REFERENCE if library is None else f"{NATIVE} {library.instructions}"
    model.kernels = TRITON if is_triton_selected() else native
    return model


def check_dtype(dtype: str) -> None:
    """Raise ConfigError if there is no such number format. float16 is taken for bfloat16 (`served_dtype`)."""
    if dtype not in (*DTYPES, "float16"):
        remedy = "auto is that of the weights, float32 for float16."
        raise ConfigError(f"dtype is {dtype!r}, but must be one of {', '.join(DTYPES)}: {remedy}")


def served_dtype(source: ModelSource, dtype: str, *, is_quantized: bool) -> torch.dtype:
    """Return the dtype of a name: bfloat16 for float16, which nothing is computed in. "auto" is the weights' own, and
    float32, which holds all of it, for float16 and for dequantized weights.

    is_quantized: weights are quantized, and the result is for everything else: float32 if "auto" finds float64, in
        which quantized values are not multiplied.
    """
    if dtype == "float16":
        dtype = "bfloat16"
    elif dtype == "auto":
        stored = source.stored_dtype() or "float32"
        dtype = "float32" if stored == "float16" else stored
    found: torch.dtype = getattr(torch, dtype)
    return torch.float32 if is_quantized and found == torch.float64 else found


def read_to_quantize(
    source: ModelSource,
    config: Any,
    spec: DecoderSpec | None,
    dtype: str,
    adapter: str | Path | None,
    quantization: Quantization,
    *,
    is_fused: bool,
    attention: str | None = None,
) -> tuple[Any, QuantizedMaker]:
    """Return the Transformers model of a source, and the maker of its quantized layers.

    spec: of the configuration. dtype: of all that is not quantized (`served_dtype`).
    is_fused: it is for the fused decoder. Its matrices are placeholders then, and read one by one by the maker. Those
        of other models, and of models with an adapter, are there as float32; all other parameters are of `dtype`.
    """
    number_format = served_dtype(source, dtype, is_quantized=True)
    stored = None if adapter is not None else source.quantized_weight(spec)  # with an adapter, they are others
    if is_fused and spec is not None and adapter is None:
        checkpoint, _ = counted(source.checkpoint(config, torch.float32, spec), source.name)
        checkpoint = replace(checkpoint, unread=streamed(checkpoint.slices, config, spec))
        model = _modules(source, config, spec, checkpoint, number_format, attention, is_fused=True)
        numbers = stored_numbers(checkpoint.slices, config, spec)
        return model, QuantizedMaker(quantization, stored, numbers, number_format)
    wide = torch.promote_types(number_format, torch.float32)
    model = _read(source, config, spec, wide, adapter, None if is_fused else attention)
    leave = {f"{path}.weight" for path in matrices(model, spec if is_fused else None)}
    return rounded(model, number_format, spec, leave), QuantizedMaker(quantization, stored, {}, number_format)


def _read_stored(
    source: ModelSource,
    config: Any,
    spec: DecoderSpec,
    number_format: torch.dtype,
    *,
    as_numbers: bool = False,
) -> tuple[Any, StoredMaker]:
    """Return the modules of a model whose matrices are placeholders, and the maker of its layers, which reads these one
    by one as the files have them, or `as_numbers`. number_format: of everything else."""
    checkpoint, reading = counted(source.checkpoint(config, number_format, spec), source.name)
    unread = replace(checkpoint, unread=streamed(checkpoint.slices, config, spec))
    model = _modules(source, config, spec, unread, number_format, ATTENTION_NAME, is_fused=True)
    library = library_for(model.device, number_format)
    assert library is not None  # `mixture_as_stored`
    numbers = stored_numbers(checkpoint.slices, config, spec)
    blocks = (lambda name: None) if as_numbers else source.blocks(spec)
    return model, StoredMaker(source.name, library, blocks, numbers, number_format, reading.count)


def _read(
    source: ModelSource,
    config: Any,
    spec: DecoderSpec | None,
    number_format: torch.dtype,
    adapter: str | Path | None,
    attention: str | None = None,
    *,
    is_fused: bool = False,
) -> Any:
    """Return the Transformers model of a source in a dtype, with an adapter if there is one; for the fused decoder
    without one, its parameters alone."""

    def in_format(dtype: torch.dtype) -> Any:
        checkpoint, _ = counted(source.checkpoint(config, dtype, spec), source.name)
        if is_fused and adapter is not None:
            return _modules(source, config, spec, checkpoint, dtype, None, is_fused=False)
        return _modules(source, config, spec, checkpoint, dtype, attention, is_fused=is_fused)

    return with_adapter(in_format, number_format, adapter, source.name, spec)


def _modules(
    source: ModelSource,
    config: Any,
    spec: DecoderSpec | None,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    attention: str | None,
    *,
    is_fused: bool,
) -> Any:
    """Return `FusedModules` where forerun's fused decoder computes and they hold what it needs, else the Transformers
    model. attention: the name of forerun's; None: Transformers computes."""
    if is_fused and spec is not None and attention is not None:
        found = read_fused(source.name, config, spec, checkpoint, dtype)
        if found is not None:
            return found
        theirs = source.config()
        if getattr(config, TILED, False):  # the checkpoint is in the order of this configuration
            setattr(theirs, TILED, True)
        config, attention = theirs, None
    return read_model(source.name, config, checkpoint, dtype, attention)
