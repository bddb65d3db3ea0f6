"""What an LLM is opened from: its options checked, the target loaded, the drafter made and bound."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from forerun.config import AUTO, DEFAULT_DRAFTER, MEMORY_LOG, EngineConfig, MaxModelLen, NumDraftTokens
from forerun.drafters import Binding, Drafter, check_drafter_text, chosen_drafter, make_drafter
from forerun.drafters.build import Drafters, build_drafter, found_for, with_auto
from forerun.drafters.parse_text import drafter_of_vllm, source_texts, split_spec
from forerun.drafters.registry import DRAFTERS
from forerun.engine.memory_division import MemoryPlan, bounded
from forerun.errors import ConfigError, DeviceMemoryError, DrafterError, ModelLoadError, NotEnoughMemoryError
from forerun.models import LanguageModel, find_tokenizer, load_model
from forerun.models.loading.load import source_tokenizer
from forerun.models.loading.source import find_source
from forerun.utils.json_file import Fields

_log = logging.getLogger(MEMORY_LOG)
Chosen: TypeAlias = str | Path | Drafter | None


def _check_loaded(
    target: LanguageModel, adapter: object, quantize: str | None, kv_cache_dtype: str, max_model_len: MaxModelLen
) -> None:
    """Raise ConfigError for what would have to be known before a model that is loaded already was."""
    if isinstance(target, nn.Module):
        raise ConfigError(
            f"the target is a {type(target).__name__} of another library's in memory. Give its name or folder, or "
            "generate with it: custom_generate=forerun.integrations.transformers.Speculative()."
        )
    stored = None if kv_cache_dtype in (AUTO, target.kv_cache_dtype) else kv_cache_dtype
    for name, value in (("adapter", adapter), ("quantize", quantize), ("kv_cache_dtype", stored)):
        if value is not None:
            raise ConfigError(
                f"{name} is {str(value)!r}, but the target is a loaded model, which was loaded without. Give the "
                f"target's name, or load it with {name}."
            )
    if bounded(target.full_context_length, max_model_len, target.name) < target.context_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the target is a loaded model with a context of "
            f"{target.context_length}. Give the target's name."
        )


def drafter_of(
    model: str | Path | LanguageModel,
    drafter: Drafters,
    speculative_config: Mapping[str, Any] | None,
    num_draft_tokens: NumDraftTokens | None,
) -> Drafters:
    """Return the drafter, which vLLM's dictionary may give; its text is checked. Raises ConfigError where both choose
    one."""
    if speculative_config is not None:
        if drafter != AUTO or num_draft_tokens is not None:
            raise ConfigError("speculative_config chooses drafter and num_draft_tokens, too. Give it or them.")
        drafter = drafter_of_vllm(Fields.of(dict(speculative_config), "speculative_config", ConfigError))
    check_drafter_text(drafter, model)
    return drafter


def check_counts(
    threads: int | None, max_model_len: MaxModelLen, quantize: str | None, quantization: str | None
) -> None:
    """Check what `LLM` was given, and set torch's threads."""
    for name, value, free, least in (("threads", threads, None, 1), ("max_model_len", max_model_len, AUTO, 2)):
        if value != free and (type(value) is not int or value < least):
            raise ConfigError(f"{name} is {value!r}, but must be {free!r} or a whole number of {least} or more.")
    if quantization is not None and quantize not in (None, quantization):
        raise ConfigError(f"quantize is {quantize!r} and quantization {quantization!r}. Give one of them.")
    if threads is not None:
        torch.set_num_threads(threads)


_SMALLER = "Give a smaller model, or this one in fewer bits (draft-model:model=...,quantize=int4)."


def open_target(
    target: str | Path | LanguageModel,
    drafter: Drafters,
    config: EngineConfig,
    tokenizer: Any,
    *,
    dtype: str,
    device: str,
    adapter: str | Path | None,
    quantize: str | None,
    kv_cache_dtype: str,
    max_model_len: MaxModelLen,
) -> tuple[LanguageModel, Any, Chosen]:
    """Return the target model, its tokenizer (the given one, or that of the given name, else the one beside it) and its
    drafter (`chosen_drafter`).

    Raises:
        ConfigError, ModelLoadError, NotEnoughMemoryError: as `LLM`.
    """
    if config.remember is not None:
        check_remembers(None if config.num_draft_tokens == 0 else drafter, target, f"remember is {config.remember!r}")
    if not isinstance(target, (str, Path)):
        _check_loaded(target, adapter, quantize, kv_cache_dtype, max_model_len)
        return target, tokenizer, chosen_drafter(drafter, target)
    source = find_source(target)  # to the end: while it is in use, a file's header is read once
    on_disk = False
    chosen: Drafters = drafter
    with suppress(ModelLoadError, DrafterError):  # loading reports everything else that is wrong
        plan = MemoryPlan.of(
            target,
            drafter,
            config,
            dtype=dtype,
            device=device,
            adapter=adapter,
            quantize=quantize,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
        )
        on_disk = plan.experts > 0
        chosen = plan.drafter
        _log.log(logging.WARNING if on_disk else logging.INFO, "%s", plan)
        for each in plan.larger_drafts:
            _log.warning("%s is larger than its target, so that drafting costs more than it gains. %s", each, _SMALLER)
    model = load_model(target, dtype, "auto", device, adapter, quantize, kv_cache_dtype, experts_on_disk=on_disk)
    model.context_length = model.full_context_length = bounded(model.context_length, max_model_len, target)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = find_tokenizer(tokenizer)
    return model, tokenizer or source_tokenizer(source, adapter), chosen_drafter(chosen, target)


def bound_drafter(
    chosen: str | Path | Drafter, given: Drafters, binding: Binding
) -> tuple[str | Path | Drafter, Drafter, NumDraftTokens | None]:
    """Return the drafter as chosen, made and bound, and its K; where what AUTO has found cannot be loaded or does not
    fit, AUTO is suffix matches alone. given: what `chosen` was made of."""
    try:
        _check_tokenizer(given, binding)
        return chosen, *make_drafter(chosen, binding)
    except (DrafterError, ModelLoadError, NotEnoughMemoryError, DeviceMemoryError) as error:
        found = found_for(given, binding.target)
        if found is None:
            raise
        _log.warning("auto leaves out %s, which was found for the target: %s", found, error)
    without = chosen_drafter(with_auto(given, DEFAULT_DRAFTER), binding.target)
    assert without is not None
    return without, *make_drafter(without, binding)


def _check_tokenizer(given: Drafters, binding: Binding) -> None:
    """Raise DrafterError, before it is loaded, for a draft model that AUTO has found by the tokenizer beside a target
    which was loaded without."""
    if binding.tokenizer is not None or (found := found_for(given, binding.target)) is None:
        return
    source = source_texts(split_spec(found)[1]["sources"])[-1]
    if source.partition(":")[0] not in DRAFTERS and find_source(binding.target.name).has_tokenizer():
        raise DrafterError("the target was loaded without its tokenizer. Give LLM its name, or the tokenizer.")


def check_remembers(drafter: Drafters, target: str | Path | LanguageModel, said: str) -> None:
    """Check that a target's drafter copies from answers of the past. said: what asks for it.

    Raises:
        ConfigError: it does not. DrafterError: as `build_drafter`.
    """
    chosen = chosen_drafter(drafter, target)
    if chosen is not None and any(each.traits.remembers for each in build_drafter(chosen)[0].members):
        return
    name = " + ".join(type(each).__name__ for each in chosen.members) if isinstance(chosen, Drafter) else chosen
    raise ConfigError(
        f"{said}, but {name or 'plain decoding'} copies nothing from answers of the past. Give a drafter that does, "
        f"{DEFAULT_DRAFTER} or a hybrid with it, or leave that out."
    )
