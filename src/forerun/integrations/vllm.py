"""forerun's drafters without a model inside vLLM's worker, by its method `custom_class`.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "forerun.integrations.vllm.Proposer",
    "num_speculative_tokens": 8}' --additional-config '{"forerun": {"drafter": "suffix"}}'

vLLM 0.32 calls `propose` after each step, with rows of tokens and no names of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.config import MAX_NUM_DRAFT_TOKENS
from forerun.drafters import Drafter
from forerun.drafters.ask import ask
from forerun.errors import ConfigError, ForerunError
from forerun.integrations.lookup import LookupOptions, UnseenTarget, lookup_drafter
from forerun.integrations.tracking import Tokens, Tracked, Tracker
from forerun.integrations.tried import untried
from forerun.models import find_tokenizer
from forerun.tree import ROOT
from forerun.types import Draft, Step

_log = logging.getLogger(__name__)
OPTIONS = "forerun"
"""Key of vLLM's additional configuration."""
PIECE = 128
"""Tokens of a row that are read in one step, beside those that the step has added."""
STEP_TOKENS = 1024
"""The same of all rows together."""
NODES_PER_TOKEN = 4
"""Nodes that a drafter of trees is asked for, for each token of the path that is taken of them."""


class Proposer:
    """What vLLM makes of `"model": "forerun.integrations.vllm.Proposer"`.

    Args:
        vllm_config: vLLM's configuration. Its `additional_config` may hold an object "forerun" with the fields of
            `LookupOptions`.

    Raises:
        ConfigError: an option is wrong, or this vLLM has another configuration than those that were tried.
        DrafterError: the drafter needs more than tokens.
    """

    def __init__(self, vllm_config: Any) -> None:
        other_version = untried("vLLM")
        if other_version is not None:
            _log.warning("forerun: %s", other_version)
        try:
            model, self._k = vllm_config.model_config, int(vllm_config.speculative_config.num_speculative_tokens)
            max_sequences = int(vllm_config.scheduler_config.max_num_seqs)
            context, name, tokenizer = int(model.max_model_len), str(model.model), str(model.tokenizer)
            vocab_size, given = int(model.get_vocab_size()), vllm_config.additional_config
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"vLLM's configuration is not as expected: {error}. {other_version or ''}") from error
        self._options = LookupOptions.of(_given(given))
        self._target = UnseenTarget(name, vocab_size, context)
        self._tokenizer = _tokenizer(tokenizer)
        self._tracker = Tracker(max_sequences, context)
        self._drafter: Drafter | None = self._make()
        self._draws_trees = self._has_failed = False

    def load_model(self, *_: object, **__: object) -> None:
        """There is none: vLLM calls this when its own is there."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: npt.NDArray[np.int32],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The drafts of one step.

        Args:
            sampled_token_ids: of each row, what the step has added; nothing where its prompt is not computed yet.
            num_tokens_no_spec: at least [rows], tokens of each row, those included.
            token_ids_cpu: at least [rows, longest], the rows.
            slot_mappings: not read.

        Returns:
            A list a row, of at most K tokens and within the model's length; empty where nothing was sampled. Whatever
            goes wrong gives empty lists: it costs speed, and no request.
        """
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception as error:
            self._drafter = None  # it may be half told of this step
            self._tracker.clear()
            if not self._has_failed:  # said once: it may come again at every step
                self._has_failed = True
                reason = str(error) if isinstance(error, ForerunError) else type(error).__name__
                _log.warning("forerun could not draft in this step (%s); this is said once.", reason, exc_info=True)
            return [[] for _ in sampled_token_ids]

    def _make(self) -> Drafter:
        return lookup_drafter(self._options.drafter, self._target, self._tokenizer)

    def _propose(self, sampled: list[list[int]], lengths: npt.NDArray[np.int32], rows: Tokens) -> list[list[int]]:
        drafter = self._drafter = self._drafter or self._make()
        tracked = [
            self._track(drafter, row, int(length), len(new))
            for new, row, length in zip(sampled, rows, lengths, strict=False)  # these have room for more rows
        ]
        self._read(drafter, tracked, sampled)
        asked = [each for each, new in zip(tracked, sampled, strict=True) if new and each.is_read]
        nodes = min(self._k * NODES_PER_TOKEN, MAX_NUM_DRAFT_TOKENS) if self._draws_trees else self._k
        sequences = [each.sequence for each in asked]
        drafts = ask(drafter, sequences, [nodes] * len(asked), self._options.price, self._target.vocab_size)
        for each, draft in zip(asked, drafts, strict=True):
            self._draws_trees = self._draws_trees or not draft.is_chain
            each.draft, each.path = draft, first_path(draft)[: self._k]
        for each in tracked:
            for left in self._tracker.keep(each):
                drafter.stop(left.sequence)
        return [each.proposed for each in tracked]

    def _track(self, drafter: Drafter, row: Tokens, length: int, num_new: int) -> Tracked:
        """The row's sequence; one that is not known yet starts."""
        found = self._tracker.take(row, length, num_new)
        if found is None:
            found = self._tracker.new(row, length)
            drafter.start(found.sequence)
        found.see(row, length)
        return found

    def _read(self, drafter: Drafter, tracked: list[Tracked], sampled: list[list[int]]) -> None:
        """Tell the drafter what is new in the rows, of long ones a piece."""
        steps, left = list[Step](), STEP_TOKENS
        for each, new in zip(tracked, sampled, strict=True):
            step = each.judged(len(new))
            if step is None and not each.is_read:
                count = each.num_unread
                if count > PIECE:
                    count = min(PIECE, left)
                    left -= count
                step = each.read(count)
            each.draft, each.path = None, []
            if step is not None:
                steps.append(step)
        drafter.commit(steps)


def first_path(draft: Draft) -> list[int]:
    """The candidates from the root on, of siblings the first: the path that the drafter thinks most of."""
    path, at = list[int](), ROOT
    for node, parent in enumerate(draft.parents[: draft.num_candidates]):
        if parent == at:
            path.append(node)
            at = node
    return path


def _given(additional: object) -> Mapping[str, Any]:
    """The options in vLLM's additional configuration."""
    given = additional.get(OPTIONS, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{OPTIONS!r} in vLLM's additional configuration is {given!r:.60}, but must be an object.")
    return given


def _tokenizer(name: str) -> Any:
    """The target's, for drafters that compare it; None where it cannot be read, which most of them do not mind."""
    try:
        return find_tokenizer(name)
    except ForerunError as error:
        _log.info("forerun: no tokenizer, so no index can be compared with it: %s", error)
        return None
