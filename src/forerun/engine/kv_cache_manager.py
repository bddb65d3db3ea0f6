"""The keys and values of an engine's sequences in bounded memory: the bounds, and prefix reuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.config import AUTO, ON, PROMPT_CACHE_SIZE, EngineConfig, MaxModelLen
from forerun.drafters import Drafter
from forerun.engine.memory_division import (
    AvailableMemory,
    beside_remembered,
    held_context,
    most_saved_states,
    num_draft_pages,
    num_pages,
    scratch_nbytes,
    states_nbytes,
)
from forerun.engine.sequence import SequenceState
from forerun.errors import ConfigError, OutOfPagesError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache import PagePool, SequenceCache
from forerun.models import LanguageModel
from forerun.utils.machine import GIB

if TYPE_CHECKING:
    from forerun.kv_cache.prompt_cache import PromptCache


def bound_memory(
    target: LanguageModel, drafter: Drafter | None, config: EngineConfig, max_model_len: MaxModelLen = AUTO
) -> None:
    """Bound the pool of the target, unless it is already and `config` does not say how, and those of the drafter's
    models; and set the target's context to what one sequence may have in its pool.

    Raises:
        NotEnoughMemoryError: `cache_memory` is more than what is available, or less than `max_model_len` tokens take.
    """
    pool = target.pool
    if pool is None:
        return
    drafts = () if drafter is None else drafter.pools
    pages_for = target.new_cache().pages_wanted
    if pool.num_pages is None or config.cache_memory is not None:
        held = scratch_nbytes(config, target.vocab_size) + states_nbytes(config, target.state_nbytes)
        wanted = config.max_batch * pages_for(target.full_context_length)
        draft_pages = [draft_pool.page_nbytes for draft_pool in drafts]
        memory = AvailableMemory.on(target.device).less(held)
        memory = beside_remembered(memory, config, target.vocab_size, target.device)
        pool.limit(num_pages(config, wanted, pool.page_nbytes, draft_pages, memory))
    assert pool.num_pages is not None
    for draft_pool in drafts:
        draft_pool.limit(num_draft_pages(pool.num_pages, config))
    target.context_length = held_context(
        *(target.name, target.full_context_length, max_model_len, pages_for, pool.num_pages, pool.page_nbytes)
    )


class KVCacheManager:
    """Gives the sequences of one engine caches with pages of the target's pool, and shares prefixes among them.

    Attributes:
        reuses: whether sequences that begin alike share pages.
        pages_for: the pages that a sequence of so many positions takes, if it shares none.
    """

    def __init__(self, target: LanguageModel, config: EngineConfig) -> None:
        self._target = target
        self._pool = pool = target.pool
        self.reuses = target.exactness.exact if config.prefix_reuse == AUTO else config.prefix_reuse == ON
        self.pages_for: Callable[[int], int] = (lambda _: 0) if pool is None else target.new_cache().pages_wanted
        if isinstance(pool, PagePool):
            pool.most_states = most_saved_states(config)
        self.prompt_cache = None if config.prompt_cache is None else self._opened(config.prompt_cache, config)

    def _opened(self, folder: str, config: EngineConfig) -> PromptCache:
        """Open the prompt cache. Raises ConfigError as `PromptCache`, and where it cannot be of use."""
        from forerun.kv_cache.prompt_cache import PromptCache

        target = self._target
        pool = self._pool
        if not self.reuses:
            raise ConfigError(
                f"prompt_cache is {folder!r}, but no prefix is reused: prefix_reuse is {config.prefix_reuse!r}, and "
                f"{target.name} is {target.exactness}. Leave prompt_cache out, or give prefix_reuse='on'."
            )
        fingerprint = target.fingerprint()
        if fingerprint is None or not isinstance(pool, PagePool):
            raise ConfigError(
                f"prompt_cache is {folder!r}, but {target.name} ({target.kernels} kernels, {target.device}) is not "
                "computed by the native decoder, whose keys and values alone are kept on disk. Leave prompt_cache out."
            )
        size = int((config.prompt_cache_size or PROMPT_CACHE_SIZE) * GIB)
        return PromptCache(Path(folder), size, pool, fingerprint, has_states=target.state_nbytes > 0)

    def begin(self, state: SequenceState) -> None:
        """Give the sequence a cache that holds the longest prefix of its tokens that is in memory or on disk."""
        cache = state.cache = state.sequence.cache = self._target.new_cache()
        if not self.reuses or state.wants_prompt_logprobs:
            return
        sequence = state.sequence
        shared = sequence.num_prompt - 1
        leader = state.leader
        source = None if leader is None else leader.cache
        state.leader = None
        if source is not None and source.length >= shared and not self._target.state_nbytes:
            cache.fork(source, shared)
        else:
            if leader is not None and self._target.state_nbytes:  # states are shared at the borders of pages only
                self.publish(leader)
            self.read(state)
            cache.adopt(sequence.token_ids, sequence.params.tenant)
        if not sequence.num_output and not state.stats.num_preemptions:  # else they may be what it has computed itself
            state.stats.num_cached_tokens = cache.length
            state.stats.num_read_tokens = min(state.stats.num_read_tokens, cache.length)

    def read(self, state: SequenceState, most: float = math.inf) -> tuple[int, bool]:
        """Read what the disk has of the tokens of a sequence without a cache, `most` pages of it. Returns how many, and
        whether there are more."""
        if self.prompt_cache is None or not self.reuses or state.wants_prompt_logprobs:
            return 0, False
        num_pages, more = self.prompt_cache.read(state.sequence.token_ids, state.sequence.params.tenant, most)
        if not state.stats.num_preemptions:
            state.stats.num_read_tokens += num_pages * PAGE
        return num_pages, more

    def chunk(self, state: SequenceState, most: int) -> int:
        """Return how many of the next `most` tokens to compute at once. With recurrent layers, whose states can only be
        shared where a page ends, that is to the last such border but for a prompt's last token."""
        if not self._target.state_nbytes or not self.reuses or state.cache is None:
            return most
        end = state.cache.length + most
        border = (end - (most == state.num_uncomputed_tokens)) // PAGE * PAGE
        return border - state.cache.length if border > state.cache.length else most

    def mark(self, state: SequenceState) -> None:
        """Keep the states of recurrent layers, once tokens are committed up to the end of a page."""
        cache = state.cache
        if self._target.state_nbytes and self.reuses and isinstance(cache, SequenceCache) and not cache.length % PAGE:
            cache.mark()

    def publish(self, state: SequenceState) -> None:
        """Let other sequences adopt the keys and values of this one, also of a prompt that is computed in part.

        Those of an error may hold NaN, and are not published; nor are those of a prompt, from which no token has shown
        that they do not, unless they are looked through.
        """
        cache = state.cache
        sequence = state.sequence
        if not self.reuses or cache is None or not cache.length or state.error is not None:
            return
        if sequence.num_output or cache.is_finite():
            computed = sequence.token_ids[: cache.length]
            cache.publish(computed, sequence.params.tenant)
            if self.prompt_cache is not None:
                self.prompt_cache.write(computed, sequence.params.tenant)

    def close(self) -> None:
        """Wait until the prompts to be kept on disk are."""
        if self.prompt_cache is not None:
            self.prompt_cache.flush()

    def shortage(self) -> OutOfPagesError:
        """Make the error of a sequence that finds no page though no other sequence runs."""
        pool = self._pool
        assert pool is not None
        return OutOfPagesError(1, pool.num_available, pool.num_pages or 0)

    def recount(self) -> None:
        """Count the pages again after an interrupted step, which may have stopped between a page and its count."""
        if self._pool is not None:
            self._pool.recount()
