"""The methods that a measurement compares: forerun's engines over one target, and Transformers with its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.config import AUTO, OFF, NumDraftTokens, SamplingParams
from forerun.drafters import Drafter
from forerun.engine import LLM, SequenceStats
from forerun.lab.bench.compare import MethodRun
from forerun.lab.bench.peers.worker import generate_greedily
from forerun.lab.bench.prompts import BenchPrompt
from forerun.models import load_transformers_model
from forerun.utils.workloads import Case


def method_name(drafter: str, k: NumDraftTokens) -> str:
    """Return the name of one of forerun's methods."""
    return f"forerun, {drafter}, {k}" if k == AUTO else f"forerun, {drafter}, K={k}"


def beside(plain: LLM, drafter: str, num_draft_tokens: NumDraftTokens) -> LLM:
    """Create an engine with a drafter over the target of another engine, with its draws seeded.

    num_draft_tokens: "auto" keeps a K that is part of the drafter's text.
    """
    k = None if num_draft_tokens == AUTO else num_draft_tokens
    return LLM(
        plain.target,
        drafter=drafter,
        num_draft_tokens=k,
        tokenizer=plain.tokenizer,
        seed=0,
        prefix_reuse=OFF,  # no method is to find a prompt that another has computed
    )


def with_prediction(params: SamplingParams, drafter: Drafter | None, case: Case | BenchPrompt) -> SamplingParams:
    """Set the case's reference as the client's prediction, if the drafter reads predictions."""
    if case.reference and drafter is not None and drafter.traits.reads_prediction:
        return replace(params, prediction=case.reference)
    return params


def generate_once(llm: LLM, prompt: str | list[int], params: SamplingParams) -> MethodRun:
    """Generate once. prompt: text or token ids. params: one choice."""
    generation: Any = llm.generate(prompt, params)
    stats: SequenceStats = generation.stats
    return MethodRun(
        generation.token_ids,
        stats.num_forwards,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.time_first_token,
        stats.reached_per_position,
        stats.accepted_per_position,
        time_target=stats.time_target,
        time_draft=stats.time_draft,
    )


def quieten() -> None:
    """Disable Transformers' progress bars and advice. For a process that only measures."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


class Reference:
    """A causal language model as Transformers loads and runs it, with its default attention.

    Args:
        name: a bundled name, a local folder, or a hub id.
        dtype: "float32", "bfloat16" or "float64".
        adapter: the folder of a LoRA adapter to merge.
    """

    def __init__(self, name: str | Path, dtype: str, adapter: str | Path | None = None) -> None:
        self.model: Any = load_transformers_model(name, dtype, adapter)

    @torch.inference_mode()
    def forward_step(self, prefix: Sequence[int], tokens: Sequence[int], num_logits: int = 0) -> Callable[[], Tensor]:
        """Return a function that computes K tokens after a cached prefix at each call, and the logits of the last
        `num_logits` of them, or of all for 0: [K, V].

        It takes the new positions out of the cache again, as whoever verifies a draft must (0.1 ms).
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        self.model(torch.tensor([list(prefix)]), past_key_values=cache, use_cache=True)
        new = torch.tensor([list(tokens)])

        @torch.inference_mode()
        def step() -> Tensor:
            logits: Tensor = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=num_logits).logits[0]
            cache.crop(-len(tokens))
            return logits

        return step

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        draft: Reference | None = None,
        num_draft_tokens: int = 0,
        ends: Collection[int] = (),
    ) -> MethodRun:
        """Generate `max_tokens` greedy tokens, or up to one of `ends`; with a draft, by Transformers' assisted
        generation.

        The draft proposes num_draft_tokens at every step: a constant schedule without a confidence threshold.
        """
        settings: dict[str, Any] = {}
        if draft is not None:
            draft_config = draft.model.generation_config
            draft_config.num_assistant_tokens = num_draft_tokens
            draft_config.num_assistant_tokens_schedule = "constant"
            draft_config.assistant_confidence_threshold = 0.0
            settings["assistant_model"] = draft.model
        token_ids, times, _ = generate_greedily(self.model, list(prompt), max_tokens, sorted(ends) or None, **settings)
        return MethodRun(token_ids, first_seconds=times[0])
