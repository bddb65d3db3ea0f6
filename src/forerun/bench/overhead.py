"""Time that a drafter without a model adds to a step in a long context, beside one forward of a target.

The drafters are driven without a target: a long text is committed as it stands, and after every draft the text says
what a target would have accepted. Times are of `draft` and `commit` together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from forerun.bench.random_llama import random_llama
from forerun.bench.report import Columns
from forerun.config import BUNDLED_TARGET, PREFILL_CHUNK, SamplingParams
from forerun.drafters import DRAFTERS, Binding, Drafter, make_drafter
from forerun.errors import ConfigError
from forerun.models import load_model, load_tokenizer
from forerun.plan.step_times import target_costs
from forerun.types import Draft, Needs, Sequence as Tokens, Step, Verdict
from forerun.workloads import load, names

FORWARD_ROUNDS = 10
"""Forwards of the target whose median the drafters are compared with."""
ROOM = 256
"""Positions of the target beyond the context."""
TOKENS_PER_STEP = 20
"""Tokens of text for each timed draft: enough if every draft is accepted."""


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """One drafter. Times in milliseconds.

    Attributes:
        drafter: its name.
        context: tokens in the sequence.
        step: median of drafting and learning.
        slowest: the 99th percentile.
        prompt: learning the whole prompt, once.
        nodes: mean number of nodes proposed.
        nbytes: bytes of memory that the drafter says it holds.
        share: `step` over the target's forward of one row at that context.
    """

    drafter: str
    context: int
    step: float
    slowest: float
    prompt: float
    nodes: float
    nbytes: int
    share: float


COLUMNS: Columns[OverheadRow] = {
    "drafter": lambda row: row.drafter,
    "step in ms": lambda row: f"{row.step:.3f}",
    "99 %": lambda row: f"{row.slowest:.3f}",
    "prompt in ms": lambda row: f"{row.prompt:.1f}",
    "nodes": lambda row: f"{row.nodes:.1f}",
    "memory in MB": lambda row: f"{row.nbytes / 1e6:.1f}",
    "share of a forward": lambda row: f"{100 * row.share:.2f} %",
}


def measure(
    drafters: Mapping[str, Drafter],
    text: Sequence[int],
    context: int,
    budget: int,
    steps: int,
    forward: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[OverheadRow]:
    """One row per drafter.

    Args:
        drafters: by name, each bound to a target with the text's vocabulary.
        text: more than `context` token ids; those beyond it are the target's answer.
        budget: nodes of a draft.
        steps: drafts to time.
        forward: seconds of the target's forward of one row.

    Raises:
        ConfigError: a drafter computes in the target's cache, or reads its states, which do not exist here.
    """
    rows = []
    for name, drafter in drafters.items():
        if drafter.traits.writes_cache or drafter.needs.states:
            raise ConfigError(
                f"{name} drafts with the target's layers or states, but this measurement runs no target. "
                "Leave it out; `forerun bench generate` measures it."
            )
        say(f"timing {name}")
        params = SamplingParams(temperature=0)
        sequence = Tokens(0, list(text[:context]), context, params, prediction=list(text[context:]))
        drafter.start(sequence)
        prompt = _prompt_seconds(drafter, sequence)
        times, nodes = _step_seconds(drafter, sequence, text, budget, steps)
        nbytes = drafter.nbytes
        drafter.stop(sequence)
        median, slowest = (float(np.quantile(times, q)) for q in (0.5, 0.99))
        timings = (1e3 * median, 1e3 * slowest, 1e3 * prompt)
        rows.append(OverheadRow(name, context, *timings, float(np.mean(nodes)), nbytes, median / forward))
    return rows


def forward_seconds(context: int, dtype: str, quantize: str | None = None) -> float:
    """Seconds of one row's forward of a random Llama of 197 M parameters after `context` positions."""
    with random_llama(context + ROOM) as folder:
        return target_costs(load_model(folder, dtype, quantize=quantize), context, FORWARD_ROUNDS, rows=(1,))(1)


def bundled_drafters(
    wanted: Sequence[str], index: str | None, dtype: str, length: int
) -> tuple[dict[str, Drafter], list[int]]:
    """Drafters for the bundled target by name, and `length` tokens of the bundled workloads for them.

    Args:
        wanted: texts of drafters; none stands for all that can be measured.
        index: for `rest`; None takes the bundled one.
    """
    target, tokenizer = load_model(BUNDLED_TARGET, dtype), load_tokenizer(BUNDLED_TARGET)
    binding = Binding(target, tokenizer, 0)
    drafters: dict[str, Drafter] = {}
    for name in wanted or [name for name, row in DRAFTERS.items() if row.kind in ("target", "lookup")]:
        drafter, _ = make_drafter(f"{name}:index={index}" if index and name == "rest" else name, binding)
        if wanted or not drafter.traits.writes_cache:
            drafters[name] = drafter
    return drafters, long_text(tokenizer.encode, [c.prompt + c.reference for n in names() for c in load(n)], length)


def long_text(encode: Callable[[str], list[int]], pieces: Sequence[str], length: int) -> list[int]:
    """Token ids of the pieces one after the other, from the first again until there are enough."""
    once = [token_id for piece in pieces for token_id in encode(piece)]
    return (once * (length // max(1, len(once)) + 1))[:length]


def follow(draft: Draft, text: Sequence[int], at: int) -> tuple[list[int], list[int]]:
    """(path, answers): the candidates that the text from `at` on accepts, and the token that follows each row.

    A row off the path is followed by any token of the text.
    """
    path = [node for node in draft.follow(text[at : at + len(draft)]) if node < draft.num_candidates]
    after = {node: text[at + depth] for depth, node in enumerate(path, 1)}
    others = (text[(at * 31 + node * 17) % len(text)] for node in range(len(draft)))
    return path, [text[at], *(after.get(node, other) for node, other in enumerate(others))]


def _prompt_seconds(drafter: Drafter, sequence: Tokens) -> float:
    """Commit the prompt in chunks."""
    needs = drafter.needs
    start = perf_counter()
    for done in range(PREFILL_CHUNK, sequence.num_prompt, PREFILL_CHUNK):
        rows = sequence.token_ids[done - PREFILL_CHUNK + 1 : done + 1]
        drafter.commit([Step(sequence, None, None, done, _successors(needs, rows, needs.prompt_rows))])
    return perf_counter() - start


def _step_seconds(
    drafter: Drafter, sequence: Tokens, text: Sequence[int], budget: int, steps: int
) -> tuple[list[float], list[int]]:
    """(seconds, nodes) of each draft; the sequence grows along the text, which ends early if it is short."""
    needs = drafter.needs
    times, nodes = [], []
    for _ in range(steps):
        length = len(sequence.token_ids)
        if length + budget + 1 >= len(text):
            break
        start = perf_counter()
        (draft,) = drafter.draft([sequence], [budget])
        drafted = perf_counter() - start
        path, answers = follow(draft, text, length)
        sequence.token_ids.extend(text[length : length + len(path) + 1])
        verdict = Verdict(path, sequence.token_ids[-1])
        step = Step(sequence, draft, verdict, len(sequence.token_ids) - 1, _successors(needs, answers, True))
        start = perf_counter()
        drafter.commit([step])
        times.append(drafted + perf_counter() - start)
        nodes.append(len(draft))
    return times, nodes


def _successors(needs: Needs, answers: Sequence[int], wanted: bool) -> Tensor | None:
    """The top tokens that a target might have had: the text's token first, others after it."""
    if not needs.top_tokens or not wanted:
        return None
    first = torch.tensor(list(answers))[:, None]
    return (first + 37 * torch.arange(needs.top_tokens)) % (int(first.max()) + 1)
