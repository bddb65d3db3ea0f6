"""Load a model by name, from a folder, a GGUF file or the hub. No code of the files is run, and no pickle is opened."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from forerun.config import AUTO, DEFAULT_DTYPE, NATIVE, QUANTISATIONS, REFERENCE, TRITON, UNQUANTIZED
from forerun.errors import ConfigError, ModelLoadError, UnsupportedModelError
from forerun.kernels.block_weight import BlockWeight
from forerun.kernels.cpu import is_triton_selected
from forerun.kernels.cpu.linear import experts_in
from forerun.kernels.quantize import QuantizedWeight
from forerun.models.attention.base import ATTENTION_NAME
from forerun.models.decoders import Kind, make_decoder, served_kind
from forerun.models.families.recurrent import TILED
from forerun.models.families.table import description_of
from forerun.models.loading.configuration import context_length, refuse_unservable
from forerun.models.loading.fused_modules import read_fused
from forerun.models.loading.source import ModelSource, find_source
from forerun.models.loading.transformers_modules import foreign_attention, move_to_device, read_model, round_parameters
from forerun.models.loading.weight_maker import WeightMaker, matrices, stored_numbers, streamed
from forerun.models.loading.weights import Checkpoint, count_reads
from forerun.models.model import Model, first_non_finite_tensor
from forerun.models.self_test import probe, self_test
from forerun.models.spec.decoder import DecoderSpec
from forerun.models.weight_plan import WeightPlan, check_dtype, check_quantization, library_for, served_dtype
from forerun.utils.deferred import DeferredModule
from forerun.utils.device import raise_own, resolve_device
from forerun.utils.foreign_errors import as_memory_errors, reason
from forerun.utils.home import home
from forerun.utils.machine import return_freed_memory

if TYPE_CHECKING:
    from forerun.models import general
    from forerun.models.loading import lora
else:
    general = DeferredModule("forerun.models.general")
    lora = DeferredModule("forerun.models.loading.lora")

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
        kind: of decoder: "fused" for the families of `families/table.py`, "general" for Transformers' own modules,
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
    return source_tokenizer(find_source(name), adapter)


def source_tokenizer(source: ModelSource, adapter: str | Path | None) -> Any:
    """Return `find_tokenizer` of a source."""
    tokenizer = source.tokenizer() if source.has_tokenizer() else None
    return tokenizer if adapter is None else lora.adapter_tokenizer(adapter, tokenizer, source.name)


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
    number_format = served_dtype(source, dtype, is_quantized=False)
    plan = WeightPlan(number_format, torch.device("cpu"), is_fused=False, library=None, has_adapter=adapter is not None)
    model = WeightReader(source, config, spec, plan, adapter, attention=None).whole(number_format)
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
    plan = WeightPlan.of(
        *(source, spec, dtype, target_device, requested), is_fused=is_fused, has_adapter=adapter is not None
    )
    hf, maker = WeightReader(source, config, spec, plan, adapter).read()
    try:
        hf = move_to_device(hf, target_device)
        ends = source.eos_token_ids(config)
        tokens = source.output_tokens(config)
        model = _assemble(hf, source.name, plan, maker, ends, tokens, kv_cache_dtype, spec=spec)
        model.adapter = None if adapter is None else str(adapter)
        model.recommended_sampling = MappingProxyType(_recommended(source))
        model.published_name = source.published_name()
        model.architecture = config.model_type
        model.mask_token = source.mask_token(config)
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
    # a native decoder leaves parameters on "meta"
    config = hf.config
    device = hf.device
    found = refuse_unservable(config, name)
    kind: Kind = "general" if found.refusal else "fused"
    quantization = check_quantization(quantize, str(hf.dtype).removeprefix("torch."))
    quantization = None if quantization == UNQUANTIZED else quantization
    library = library_for(device, hf.dtype)
    is_fused = kind == "fused"
    plan = WeightPlan(*(hf.dtype, device, is_fused, library, quantization), is_triton=is_fused and is_triton_selected())
    maker = None if quantization is None else WeightMaker(plan)
    general.register_attention()
    try:
        if kind == "general":
            hf.set_attn_implementation(ATTENTION_NAME)
        hf.set_experts_implementation("eager")
        model = _assemble(hf, name, plan, maker, spec=found.served)
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
    plan: WeightPlan,
    maker: WeightMaker | None,
    eos_token_ids: frozenset[int] = frozenset(),
    tokens: tuple[int, ...] | None = None,
    kv_cache_dtype: str = AUTO,
    *,
    spec: DecoderSpec | None,
) -> Model:
    """Make the Model of a loaded Transformers model. tokens: the part of the vocabulary that it proposes; None: all of
    it. spec: of the fused decoder's."""
    config = hf.config
    device = hf.device
    num_parameters = sum(p.numel() for p in hf.parameters())
    output_tokens = None if tokens is None else torch.tensor(tokens, device=device)
    model = Model(
        make_decoder(hf, plan, maker, output_tokens, kv_cache_dtype, spec=spec),
        name=name,
        vocab_size=config.vocab_size,
        context_length=context_length(config),
        eos_token_ids=eos_token_ids,
        dtype=plan.dtype,
        device=device,
        num_parameters=num_parameters,
        kind="fused" if plan.is_fused else "general",
        output_tokens=output_tokens,
    )
    model.quantize = plan.number_format
    model.kv_cache_dtype = None if kv_cache_dtype == AUTO else kv_cache_dtype
    native = REFERENCE if plan.library is None else f"{NATIVE} {plan.library.instructions}"
    model.kernels = TRITON if is_triton_selected() else native
    return model


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Reads the weights of a source as a plan says.

    Attributes:
        config: of the source. spec: of the configuration, if the fused decoder can compute it.
        adapter: the folder of an adapter to merge.
        attention: the name of forerun's, by which modules of Transformers find it; None: Transformers computes.
    """

    source: ModelSource
    config: Any
    spec: DecoderSpec | None
    plan: WeightPlan
    adapter: str | Path | None = None
    attention: str | None = ATTENTION_NAME

    def read(self) -> tuple[Any, WeightMaker | None]:
        """Return the modules of the model, and what makes its layers; None where the modules have their numbers.

        Weights that are streamed are placeholders, which the maker reads. Those that are to be quantized otherwise are
        float32; all else is of the plan's dtype.
        """
        plan = self.plan
        if plan.is_streamed:
            return self._streamed()
        if plan.quantize is None:
            return self.whole(plan.dtype), None
        model = self.whole(torch.promote_types(plan.dtype, torch.float32))
        leave = {f"{path}.weight" for path in matrices(model, self.spec if plan.is_fused else None)}
        stored = None if plan.has_adapter else self.source.quantized_weight(self.spec)
        return round_parameters(model, plan.dtype, self.spec, leave), WeightMaker(plan, self.source.name, stored)

    def whole(self, number_format: torch.dtype) -> Any:
        """Return the modules with all weights as numbers, and the adapter merged."""

        def in_format(dtype: torch.dtype) -> Any:
            checkpoint, _ = count_reads(self.source.checkpoint(self.config, dtype, self.spec), self.source.name)
            return self._modules(checkpoint, dtype)

        if self.adapter is None:
            return in_format(number_format)
        return lora.with_adapter(in_format, number_format, self.adapter, self.source.name, self.spec)

    def _streamed(self) -> tuple[Any, WeightMaker]:
        source = self.source
        config = self.config
        spec = self.spec
        plan = self.plan
        assert spec is not None  # only the fused decoder's are streamed
        stored: Callable[[str], BlockWeight | QuantizedWeight | None] | None = None
        if plan.quantize is not None:
            stored = source.quantized_weight(spec)
        elif plan.file_type is not None:
            stored = source.blocks(spec)
        numbers_in = plan.dtype if plan.quantize is None else torch.float32
        checkpoint, reading = count_reads(source.checkpoint(config, numbers_in, spec), source.name)
        unread = replace(checkpoint, unread=streamed(checkpoint.slices, config, spec))
        model = self._modules(unread, plan.dtype)
        numbers = stored_numbers(checkpoint.slices, config, spec)
        return model, WeightMaker(plan, source.name, stored, numbers, reading.count)

    def _modules(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
        """Return `FusedModules` where forerun's fused decoder computes and they hold what it needs, else the
        Transformers model."""
        plan = self.plan
        config = self.config
        spec = self.spec
        attention = self.attention
        if plan.is_fused and plan.has_adapter:
            attention = None
        elif plan.is_fused and spec is not None and attention is not None:
            found = read_fused(self.source.name, config, spec, checkpoint, dtype)
            if found is not None:
                return found
            theirs = self.source.config()
            if getattr(config, TILED, False):  # the checkpoint is in the order of this configuration
                setattr(theirs, TILED, True)
            config = theirs
            attention = None
        return read_model(self.source.name, config, checkpoint, dtype, attention)
