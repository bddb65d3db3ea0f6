"""The division of memory between weights, keys and values, and a step's activations.

Before weights are read it is planned by formula, and refused where it does not fit; when they have been read, the
pools are bounded by the same rule (`num_pages`), with what is left then. A pool takes memory only as pages are needed.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from forerun.config import (
    AUTO,
    DEFAULT_DRAFTER,
    DEFAULT_DTYPE,
    MAX_NUM_DRAFT_TOKENS,
    MEMORY_LOG,
    REMEMBER_SIZE,
    EngineConfig,
    MaxModelLen,
)
from forerun.drafters import Drafter, build_drafter, chosen_drafter
from forerun.drafters.build import Drafters, found_for, with_auto
from forerun.errors import ConfigError, DrafterError, ModelLoadError, NotEnoughMemoryError
from forerun.models.loading.load import inherited_dtype
from forerun.models.memory_plan import ModelMemory, model_memory
from forerun.utils.deferred import DeferredModule
from forerun.utils.machine import GIB, MIB, available_memory, total_memory

if TYPE_CHECKING:
    from forerun.drafters.lookup.remembered import remembered_text
    from forerun.drafters.models.head_files import memory as heads
else:
    remembered_text = DeferredModule("forerun.drafters.lookup.remembered.remembered_text")
    heads = DeferredModule("forerun.drafters.models.head_files.memory")

DraftMemory: TypeAlias = "ModelMemory | heads.HeadMemory"
DRAFT_PAGES = 2
"""Pages of a draft model for one of the target: it holds the same tokens, in a cache that may double its size."""
DRAFT_PAGES_EACH = 4
"""And for each sequence, for drafts that are rejected."""
_AUTO_SHARE = 0.5
"""Share of the machine's memory that keys and values may take where the user does not say."""
_LEAST_POSITIONS = 2048
"""Positions of one sequence that must fit beside the weights. Of a model with a longer context, requests have as much
as fits."""
_LEAST_CONTEXT = 2
"""Positions of a context at least: a token of the prompt and one of the answer."""
_LOGITS_HELD = 3
"""Arrays of [rows, V] float32 that verifying takes: logits, processed ones, probabilities."""
_FLOAT32 = 4
_log = logging.getLogger(MEMORY_LOG)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """The memory that one engine may use.

    Attributes:
        total: bytes of the machine or device; None: unknown.
        available: bytes that are free now; None: unknown.
    """

    total: int | None
    available: int | None

    @classmethod
    def on(cls, device: torch.device) -> AvailableMemory:
        """Measure the memory of the device that computes."""
        if device.type == "cuda":
            available, total = torch.cuda.mem_get_info(device)
            return cls(total, available)
        return cls(total_memory(), available_memory())

    def less(self, nbytes: int) -> AvailableMemory:
        """Return the memory that is left when `nbytes` of it are taken."""
        return AvailableMemory(self.total, None if self.available is None else max(0, self.available - nbytes))


def bounded(context_length: int, max_model_len: MaxModelLen, name: str | Path) -> int:
    """Return the context that requests have of a model's, if memory suffices. Raises ConfigError if more is asked for
    than there is."""
    if max_model_len == AUTO:
        return context_length
    if max_model_len > context_length:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the context of {name} holds {context_length}. Lower it, or leave "
            "it out."
        )
    return max_model_len


def held_context(
    name: str, most: int, max_model_len: MaxModelLen, pages_for: Callable[[int], int], num_pages: int, page: int
) -> int:
    """Return the positions that one sequence may have where so many pages are all there are.

    Args:
        most: positions of the model.
        pages_for: pages of a sequence of so many positions; they never fall.
        page: bytes of a page.

    Raises:
        NotEnoughMemoryError: they are fewer than `max_model_len`, or none for an answer.
    """
    held = bisect_right(range(1, most + 1), num_pages, key=pages_for)
    least = _LEAST_CONTEXT if max_model_len == AUTO else max_model_len
    if held < least:
        needed = pages_for(least) * page
        available = num_pages * page
        raise NotEnoughMemoryError(
            f"max_model_len is {max_model_len}, but keys and values of {name} take {_size(needed)} for {least} tokens, "
            f"and {_size(available)} are there, for {held}. Lower max_model_len, raise cache_memory, or keep them in "
            "fewer bits (kv_cache_dtype='int8').",
            needed,
            available,
        )
    return held


def num_pages(config: EngineConfig, wanted: int, page: int, draft_pages: Sequence[int], memory: AvailableMemory) -> int:
    """Return the number of pages of the target's pool: as many as fit into `cache_memory`, else `wanted`, limited to
    half of the memory and to what is available beside the draft models' pages.

    Args:
        wanted: by max_batch sequences of the whole context.
        page: bytes of a page of the target. draft_pages: of each draft model's.
        memory: beside weights and scratch.

    Raises:
        NotEnoughMemoryError: `cache_memory` is more than is available.
    """
    if config.cache_memory is not None:
        requested = int(config.cache_memory * GIB)
        if memory.available is not None and requested > memory.available:
            raise NotEnoughMemoryError(
                f"cache_memory is {config.cache_memory:g} GiB, but beside weights and scratch "
                f"{_size(memory.available)} of memory are available. Lower cache_memory, or end other programs.",
                requested,
                memory.available,
            )
        return max(1, requested // page)
    most = wanted
    if memory.total is not None:
        most = min(most, int(memory.total * _AUTO_SHARE / page))
    if memory.available is not None:
        drafts = sum(draft_pages)
        left = memory.available - DRAFT_PAGES_EACH * config.max_batch * drafts
        most = min(most, left // (page + DRAFT_PAGES * drafts))
    return max(1, most)


def beside_remembered(
    memory: AvailableMemory, config: EngineConfig, vocab_size: int, device: torch.device
) -> AvailableMemory:
    """Return the memory that is left beside the answers of `remember`, as many as its file holds, being sorted.

    Raises:
        NotEnoughMemoryError: they take more.
    """
    if config.remember is None or device.type == "cuda":
        return memory
    size = int((config.remember_size or REMEMBER_SIZE) * MIB)
    if config.remember_size is None:
        with suppress(OSError, ValueError):  # the file is made, or refused when it is opened
            size = Path(config.remember).stat().st_size
    needed = remembered_text.sorting_nbytes(size, vocab_size)
    if memory.available is not None and needed > memory.available:
        raise NotEnoughMemoryError(
            f"remember holds up to {size / MIB:g} MiB of answers, which take {_size(needed)} of memory while they are "
            f"sorted, but beside weights and scratch {_size(memory.available)} are available. Lower remember_size, or "
            "end other programs.",
            needed,
            memory.available,
        )
    return memory.less(needed)


def num_draft_pages(num_target_pages: int, config: EngineConfig) -> int:
    """Return the number of pages of a draft model's pool."""
    return DRAFT_PAGES * num_target_pages + DRAFT_PAGES_EACH * config.max_batch


def scratch_nbytes(config: EngineConfig, vocab_size: int, width: int = 0) -> int:
    """Return the bytes of a step's activations: logits of all sampled rows, and the states of a chunk of a prompt.
    Drafts of automatic length are long for few sequences only.

    width: numbers of a row that are held together in the widest layer.
    """
    drafted = config.num_draft_tokens
    nodes = MAX_NUM_DRAFT_TOKENS if drafted == AUTO else drafted * config.max_batch
    logits = _LOGITS_HELD * (config.max_batch + nodes) * vocab_size
    return _FLOAT32 * (logits + (config.prefill_chunk + config.max_batch) * width)


def most_saved_states(config: EngineConfig) -> int:
    """Return how many prefixes keep the states of recurrent layers after them."""
    return max(4, config.max_batch // 2)


def states_nbytes(config: EngineConfig, each: int) -> int:
    """Return the bytes of the states of recurrent layers, of running sequences and of prefixes that are kept. each: of
    a sequence, which may hold two states."""
    return config.max_batch * each + most_saved_states(config) * each // 2


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a target and its draft models will take.

    Attributes:
        target: the target. drafts: the draft models and heads.
        num_pages: of the target's pool.
        context_length: positions of the longest sequence.
        scratch: bytes of a step.
        memory: before anything is loaded.
        config: of the engine.
        experts: bytes of the target's experts that do not fit into memory, and are to lie on a disk.
        drafter: what `chosen_drafter` returns; AUTO is what it is where nothing was found for the target, if that does
            not fit, or not beside as long a context.
    """

    target: ModelMemory
    drafts: tuple[DraftMemory, ...]
    num_pages: int
    context_length: int
    scratch: int
    memory: AvailableMemory
    config: EngineConfig
    experts: int = 0
    drafter: str | Path | Drafter | None = None

    @classmethod
    def of(
        cls,
        target: str | Path,
        drafter: Drafters,
        config: EngineConfig,
        *,
        dtype: str = DEFAULT_DTYPE,
        device: str = "cpu",
        adapter: str | Path | None = None,
        quantize: str | None = None,
        kv_cache_dtype: str = AUTO,
        max_model_len: MaxModelLen = AUTO,
    ) -> MemoryPlan:
        """Plan the memory of `LLM` with these arguments. Only the headers of the models' files are read.

        Raises:
            ConfigError, ModelLoadError, DrafterError: as `LLM`, as far as the error shows in the headers.
            NotEnoughMemoryError: as `make`.
        """
        planned = model_memory(target, dtype, device, adapter, quantize, kv_cache_dtype)
        planned = replace(planned, context_length=bounded(planned.context_length, max_model_len, target))

        def plan(given: Drafters) -> MemoryPlan:
            chosen = chosen_drafter(given, target)
            made = cls.make(planned, _drafts_of(chosen, target, planned, adapter), config, max_model_len)
            return replace(made, drafter=chosen)

        found = found_for(drafter, target)
        if found is None:
            return plan(drafter)
        without = plan(with_auto(drafter, DEFAULT_DRAFTER))
        try:
            best = plan(with_auto(drafter, found))
            reason = f"beside it, memory holds {best.context_length:,} tokens instead of {without.context_length:,}."
        except (DrafterError, ModelLoadError, NotEnoughMemoryError) as error:
            best = without
            reason = str(error)
        if best is without or best.context_length < without.context_length:
            _log.warning("auto leaves out %s, which was found for the target: %s", found, reason)
            return without
        _log.info("auto is %s: this was found for the target; drafter suffix leaves it out", found)
        return best

    @classmethod
    def make(
        cls,
        target: ModelMemory,
        drafts: Sequence[DraftMemory],
        config: EngineConfig,
        max_model_len: MaxModelLen = AUTO,
    ) -> MemoryPlan:
        """Plan the memory of models that are to be loaded.

        Raises:
            NotEnoughMemoryError: weights and the pages of one sequence do not fit into the memory that is available, or
                `cache_memory` does not fit beside the weights; or a sequence of `max_model_len` does not fit.
        """
        memory = AvailableMemory.on(target.device)
        experts = 0
        scratch = scratch_nbytes(config, target.vocab_size, target.width)
        try:
            weights = _checked_weights(target, drafts, scratch, memory)
        except NotEnoughMemoryError:
            if not target.experts:
                raise
            target, experts = target.with_experts_on_disk(), target.experts
            weights = _checked_weights(target, drafts, scratch, memory)
        count = num_pages(
            config,
            config.max_batch * target.pages_for(target.context_length),
            target.page_nbytes,
            [draft.page_nbytes for draft in drafts],
            beside_remembered(
                memory.less(weights + scratch + states_nbytes(config, target.state_nbytes)),
                config,
                target.vocab_size,
                target.device,
            ),
        )
        each = target.pages_for
        page = target.page_nbytes
        held = held_context(target.name, target.context_length, max_model_len, each, count, page)
        return cls(target, tuple(drafts), count, held, scratch, memory, config, experts)

    def __str__(self) -> str:
        """Return the plan in one line of text."""
        parts = [f"weights {_size(self.target.weights)} ({self.target.number_format})"]
        if self.experts:
            read = _size(self.target.experts_read)
            parts.append(f"experts {_size(self.experts)} on the disk, of which a token reads {read}")
        parts += [f"of {draft.name} {_size(draft.weights)} ({draft.number_format})" for draft in self.drafts]
        pages = _size(self.num_pages * self.target.page_nbytes)
        parts.append(f"keys and values up to {pages} ({self.num_pages:,} pages)")
        if self.target.state_nbytes:
            states = _size(states_nbytes(self.config, self.target.state_nbytes))
            parts.append(f"states up to {states} ({_size(self.target.state_nbytes)} a sequence)")
        if self.drafts:
            draft_pages = num_draft_pages(self.num_pages, self.config) * sum(draft.page_nbytes for draft in self.drafts)
            parts.append(f"of drafts up to {_size(draft_pages)}")
        parts.append(f"scratch {_size(self.scratch)}")
        if self.memory.available is not None:
            parts.append(f"available {_size(self.memory.available)}")
        return ", ".join(parts)

    @property
    def larger_drafts(self) -> list[str]:
        """Return the names of the draft models whose weights take more memory than the target's."""
        return [draft.name for draft in self.drafts if draft.weights > self.target.weights + self.experts]

    def as_object(self) -> dict[str, Any]:
        """Return the plan as bytes and counts, for JSON."""
        draft_pages = num_draft_pages(self.num_pages, self.config)
        pages = [self.num_pages, *(draft_pages if draft.page_nbytes else 0 for draft in self.drafts)]
        return {
            "models": [
                {
                    "name": model.name,
                    "number_format": model.number_format,
                    "weight_bytes": model.weights,
                    "loading_bytes": model.loading,
                    "page_bytes": model.page_nbytes,
                    "pages": num_pages,
                }
                for model, num_pages in zip((self.target, *self.drafts), pages, strict=True)
            ],
            "context_length": self.context_length,
            "full_context_length": self.target.context_length,
            "state_bytes": states_nbytes(self.config, self.target.state_nbytes),
            "scratch_bytes": self.scratch,
            "disk_bytes": self.experts,
            "total_bytes": self.memory.total,
            "available_bytes": self.memory.available,
        }


def _drafts_of(
    drafter: str | Path | Drafter | None, target: str | Path, planned: ModelMemory, adapter: str | Path | None
) -> list[DraftMemory]:
    """Return the memory of the models that a drafter loads for a target."""
    drafts: list[DraftMemory] = []
    for each in () if drafter is None else build_drafter(drafter)[0].models_to_load(str(target)):
        if each.is_head:
            drafts.append(heads.head_memory(Path(each.name), planned, target))
            continue
        dtype = each.dtype or inherited_dtype(each.name, planned.dtype, each.quantize)
        own_adapter = adapter if each.name == str(target) else None
        drafts.append(model_memory(each.name, dtype, str(planned.device), own_adapter, each.quantize))
    return drafts


def _checked_weights(target: ModelMemory, drafts: Sequence[DraftMemory], scratch: int, memory: AvailableMemory) -> int:
    """Return the bytes of all weights. Raises NotEnoughMemoryError if models cannot be loaded, or not with one sequence
    beside them."""
    _check_loading(target, drafts)
    weights = sum(model.weights for model in (target, *drafts))
    _check_least(target, weights, scratch + target.state_nbytes, memory)
    return weights


def _check_loading(target: ModelMemory, drafts: Sequence[DraftMemory]) -> None:
    """Raise NotEnoughMemoryError if loading takes more than the machine's memory, which all weights pass through."""
    available = available_memory()
    before = needed = 0
    for model in (target, *drafts):
        needed = max(needed, before + model.loading)
        before += model.weights if model.device.type != "cuda" else 0
    if available is not None and needed > available:
        raise NotEnoughMemoryError(
            f"{target.name} takes {_size(needed)} of memory while it is loaded, but {_size(available)} are available. "
            f"{_REMEDY}",
            needed,
            available,
        )


def _check_least(target: ModelMemory, weights: int, scratch: int, memory: AvailableMemory) -> None:
    positions = min(target.context_length, _LEAST_POSITIONS)
    pages = target.pages_for(positions) * target.page_nbytes
    needed = weights + pages + scratch
    if memory.available is not None and needed > memory.available:
        raise NotEnoughMemoryError(
            f"{target.name} does not fit: its weights and those of drafts take {_size(weights)}, keys and values of "
            f"one sequence of {positions} tokens {_size(pages)}, a step {_size(scratch)}, together {_size(needed)}, "
            f"but {_size(memory.available)} of memory are available. {_REMEDY}",
            needed,
            memory.available,
        )


_REMEDY = (
    "Keep the weights in fewer bits (quantize='int4', --quantize int4), take a smaller model or none to draft with, or "
    "end other programs."
)


def _size(nbytes: int) -> str:
    if nbytes < GIB // 10:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / GIB:.2f} GiB" if nbytes < 10 * GIB else f"{nbytes / GIB:,.1f} GiB"
