"""Hugging Face Transformers as the thing to compare with: same weights, same process, same threads, its code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from forerun.bench.compare import Run
from forerun.bench.peers.worker import TokenTimes
from forerun.models import load_transformers_model


def quieten() -> None:
    """Keep Transformers' progress bars and advice out of the figures. For a process that only measures."""
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
    def forward_step(self, prefix: Sequence[int], tokens: Sequence[int]) -> Callable[[], Tensor]:
        """A function that computes all logits, [K, V], of K tokens after a cached prefix, as often as it is called.

        It takes the new positions out of the cache again, as whoever verifies a draft must (0.1 ms).
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        self.model(torch.tensor([list(prefix)]), past_key_values=cache, use_cache=True)
        new = torch.tensor([list(tokens)])

        @torch.inference_mode()
        def step() -> Tensor:
            logits: Tensor = self.model(new, past_key_values=cache, use_cache=True).logits[0]
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
    ) -> Run:
        """`max_tokens` greedy tokens, or up to one of `ends`; with a draft, by Transformers' assisted generation.

        The draft proposes num_draft_tokens at every step: a constant schedule without a confidence threshold.
        """
        settings: dict[str, Any] = {}
        if draft is not None:
            settings_of_draft = draft.model.generation_config
            settings_of_draft.num_assistant_tokens = num_draft_tokens
            settings_of_draft.num_assistant_tokens_schedule = "constant"
            settings_of_draft.assistant_confidence_threshold = 0.0
            settings["assistant_model"] = draft.model
        ids = torch.tensor([list(prompt)])
        watch = TokenTimes()
        start = perf_counter()
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=sorted(ends) or None,
                pad_token_id=0,
                streamer=watch,
                **settings,
            )
        times = watch.times[1:]  # the prompt comes first
        gaps = [now - before for before, now in pairwise(times)] if draft is None else []
        return Run(output[0, len(prompt) :].tolist(), first_seconds=times[0] - start, gaps=gaps)
