"""`forerun bench overhead`: what drafters that run no model cost a step, beside a forward of the model they serve.

The drafters are driven without a target: a long text is committed as its tokens stand, and after every draft the
text itself says what would have been accepted. Times are of `draft` and `commit` together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.config import PREFILL_CHUNK, SamplingParams
from forerun.drafters import Drafter
from forerun.types import Draft, Needs, Step, Verdict
from forerun.types import Sequence as Tokens


@dataclass(frozen=True, slots=True)
class UpkeepRow:
    """One drafter. Times in milliseconds.

    Attributes:
        drafter: its name.
        context: tokens in the sequence.
        step: median of drafting and learning.
        slowest: the 99th percentile.
        prompt: learning the whole prompt, once.
        nodes: nodes proposed on average.
        nbytes: memory that the drafter says it holds.
        share: median over the target's forward of one row at that context.
    """

    drafter: str
    context: int
    step: float
    slowest: float
    prompt: float
    nodes: float
    nbytes: int
    share: float


def measure_upkeep(
    name: str, drafter: Drafter, text: Sequence[int], context: int, budget: int, steps: int, forward: float
) -> UpkeepRow:
    """Drive one drafter over a text.

    Args:
        drafter: bound to a target with the text's vocabulary.
        text: more than context tokens; what lies beyond is what the target will say.
        budget: nodes of a draft.
        steps: drafts to time.
        forward: seconds of the target's forward of one row.
    """
    params = SamplingParams(temperature=0)
    sequence = Tokens(0, list(text[:context]), context, params, prediction=list(text[context:]))
    needs: Needs = getattr(drafter, "needs", Needs())
    drafter.start(sequence)
    start = perf_counter()
    for done in range(PREFILL_CHUNK, context, PREFILL_CHUNK):
        rows = text[done - PREFILL_CHUNK + 1 : done + 1]
        drafter.commit([Step(sequence, None, None, done, _successors(needs, rows, needs.prompt_rows))])
    prompt = perf_counter() - start
    times, nodes = [], []
    for _ in range(steps):
        if len(sequence.token_ids) + budget + 1 >= len(text):
            break
        start = perf_counter()
        (draft,) = drafter.draft([sequence], [budget])
        drafted = perf_counter() - start
        path, said = _follow(draft, text, len(sequence.token_ids))
        sequence.token_ids.extend(text[len(sequence.token_ids) : len(sequence.token_ids) + len(path) + 1])
        verdict = Verdict(path, sequence.token_ids[-1])
        step = Step(sequence, draft, verdict, len(sequence.token_ids) - 1, _successors(needs, said, True))
        start = perf_counter()
        drafter.commit([step])
        times.append(drafted + perf_counter() - start)
        nodes.append(len(draft))
    nbytes = int(getattr(drafter, "nbytes", 0))
    drafter.stop(sequence)
    median, slowest = (float(np.quantile(times, q)) for q in (0.5, 0.99))
    return UpkeepRow(
        name, context, 1e3 * median, 1e3 * slowest, 1e3 * prompt, float(np.mean(nodes)), nbytes, median / forward
    )


def _follow(draft: Draft, text: Sequence[int], at: int) -> tuple[list[int], list[int]]:
    """The nodes that the text accepts, and the token that it holds after every row (of a row off its path: any)."""
    tokens, parents = draft.ids, draft.parents
    path: list[int] = []
    said = [text[at]]
    node = -1
    for index, (token_id, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == node and index < draft.num_candidates and token_id == text[at + len(path)]:
            path.append(index)
            node = index
            said.append(text[at + len(path)])
        else:
            said.append(text[(at * 31 + index * 17) % len(text)])
    return path, said


def _successors(needs: Needs, said: Sequence[int], wanted: bool) -> Tensor | None:
    """What a target might have told: the text's token first, others after it."""
    if not needs.top_tokens or not wanted:
        return None
    first = torch.tensor(list(said))[:, None]
    return (first + 37 * torch.arange(needs.top_tokens)) % (int(first.max()) + 1)


def long_text(encode: Callable[[str], list[int]], pieces: Sequence[str], length: int) -> list[int]:
    """Token ids of the pieces one after the other, from the first again until there are enough."""
    own: list[Any] = [token_id for piece in pieces for token_id in encode(piece)]
    return (own * (length // max(1, len(own)) + 1))[:length]
