"""The first minute with forerun: a few prompts, each answered by Transformers, by plain decoding, and with a drafter.

Only the time inside the engines counts, so that what is drawn meanwhile slows nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun.config import SamplingParams
from forerun.engine import LLM, SequenceStats, step_times
from forerun.engine.text import split_accepted
from forerun.lab.bench.methods import Reference, with_prediction
from forerun.lab.bench.peers.worker import generate_greedily
from forerun.lab.bench.tables import Columns
from forerun.utils.workloads import Case

TRANSFORMERS = "Transformers"
PLAIN = "plain"
FORERUN = "forerun"
MOST_SECONDS = 6.0
"""For Transformers on one prompt."""
LEAST_TOKENS = 8
"""Of a run that was cut: fewer give no speed to compare with."""
ROUNDS = 2
"""Of forerun's methods: in the first the text is shown, the second has the methods in the opposite order."""
ROWS = (1, 3, 5)
WARM_UP = "one two three four five six seven eight nine ten; " * 3


@dataclass(slots=True)
class Run:
    """One method on one prompt, as far as it has come.

    Attributes:
        tokens: generated in the round that runs.
        seconds: of the same; when all rounds are done, of a round in the mean.
        first: seconds until the first of the tokens.
        is_cut: it was stopped because its time was over.
        is_disturbed: other programs kept processors busy.
    """

    tokens: int = 0
    seconds: float = 0.0
    first: float = 0.0
    is_cut: bool = False
    is_disturbed: bool = False

    @property
    def rate(self) -> float:
        """Return the tokens per second, the prompt's time included; where it was cut, only those after the first token,
        which flatters it. 0 if they are too few, or it was disturbed."""
        if (self.is_cut and self.tokens < LEAST_TOKENS) or self.is_disturbed:
            return 0.0
        tokens, seconds = (self.tokens - 1, self.seconds - self.first) if self.is_cut else (self.tokens, self.seconds)
        return tokens / seconds if seconds > 0 else 0.0


@dataclass(slots=True)
class Performance:
    """One prompt and its answers.

    Attributes:
        name: of the prompt.
        question: its text, or the last message of a chat.
        max_tokens: of the answer.
        text: the answer of the method that runs or ran last: pieces, and whether a draft gave them.
        runs: by method, in the order in which they run.
        identical: whether all of forerun's tokens are those of its plain decoding.
        why: how much was drafted, or why not, in words.
    """

    name: str
    question: str
    max_tokens: int
    text: list[tuple[str, bool]] = field(default_factory=list)
    runs: dict[str, Run] = field(default_factory=dict)
    identical: bool = True
    why: str = ""

    def times(self, other: str) -> str:
        """Return how many times as fast as another method forerun is; a dash without it."""
        base = self.runs[other].rate if other in self.runs else 0.0
        return f"{self.runs[FORERUN].rate / base:.2f}×" if base else "–"

    def speed(self, method: str) -> str:
        """Return a method's tokens per second; a dash without it."""
        rate = self.runs[method].rate if method in self.runs else 0.0
        return f"{rate:.1f}" if rate else "–"


COLUMNS: Columns[Performance] = {
    "tokens/s": lambda each: each.name,
    TRANSFORMERS: lambda each: each.speed(TRANSFORMERS),
    PLAIN: lambda each: each.speed(PLAIN),
    FORERUN: lambda each: each.speed(FORERUN),
    "times Transformers": lambda each: each.times(TRANSFORMERS),
    "times plain": lambda each: each.times(PLAIN),
    "identical": lambda each: "yes" if each.identical else "no",
}


def calibrate_engines(plain: LLM, drafting: LLM) -> dict[int, float]:
    """Warm the engines up, and return what they know of costs: for ROWS the time of a forward over that of one row."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for llm in (plain, drafting):
        llm.generate(llm.tokenizer.encode(WARM_UP), params)
    seconds = step_times.calibrate(plain.target)
    return {rows: float(seconds[rows] / seconds[1]) for rows in ROWS}


def disturbed(performances: Sequence[Performance]) -> str:
    """Mark Transformers' runs as disturbed, and return why: its threads wait for each other at every product."""
    for each in performances:
        if TRANSFORMERS in each.runs:
            each.runs[TRANSFORMERS].is_disturbed = True
    return "Transformers is not compared: other programs kept processors busy, which slows it many times over."


def perform(
    engines: Mapping[str, LLM],
    reference: Reference | None,
    case: Case,
    shown: Performance,
    growth: Mapping[int, float],
    redraw: Callable[[], None],
) -> None:
    """Answer one prompt by every method in turn.

    Args:
        engines: PLAIN and FORERUN.
        reference: Transformers; None leaves it out.
        shown: is filled.
        growth: as `calibrate_engines` returned it.
        redraw: called whenever tokens came.
    """
    plain = engines[PLAIN]
    params = SamplingParams(temperature=0, max_tokens=shown.max_tokens, ignore_eos=not case.is_chat)
    if reference is not None:
        ends = [] if params.ignore_eos else sorted(plain.target.eos_token_ids)
        _run_reference(reference, plain, plain.encode(case.opening), ends, shown, redraw)
    answers = []
    for name in (PLAIN, FORERUN):
        shown.text = []
        shown.runs[name] = Run()
        tokens, stats = _stream(engines[name], case, params, shown.runs[name], shown.text, redraw)
        answers.append(tokens)
    shown.why = explain(stats, growth)
    for _ in range(1, ROUNDS):
        answers += [_stream(engines[name], case, params, shown.runs[name])[0] for name in (FORERUN, PLAIN)]
    for name in (PLAIN, FORERUN):
        shown.runs[name].seconds /= ROUNDS
    shown.identical = all(answer == answers[0] for answer in answers)
    redraw()


def _stream(
    llm: LLM,
    case: Case,
    params: SamplingParams,
    run: Run,
    text: list[tuple[str, bool]] | None = None,
    redraw: Callable[[], None] = lambda: None,
) -> tuple[list[int], SequenceStats]:
    """Answer a prompt and add the time to `run`. Return the tokens and their statistics. text: takes the pieces."""
    tokens: list[int] = []
    stats: SequenceStats | None = None
    watch = time.perf_counter()
    for chunk in llm.stream(case.opening, with_prediction(params, llm.drafter, case)):
        run.seconds += time.perf_counter() - watch
        tokens += chunk.token_ids
        run.tokens = len(tokens)
        stats = chunk.stats or stats
        if text is not None:
            text += zip(split_accepted(llm.tokenizer, chunk), (True, False), strict=True)
            redraw()
        watch = time.perf_counter()
    return tokens, stats or SequenceStats()


def _run_reference(
    reference: Reference, llm: LLM, prompt: list[int], ends: list[int], shown: Performance, redraw: Callable[[], None]
) -> None:
    """Generate with Transformers, for MOST_SECONDS at most."""
    run = shown.runs[TRANSFORMERS] = Run()
    watch = time.perf_counter()

    def after(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        nonlocal watch
        run.seconds += time.perf_counter() - watch
        run.tokens = input_ids.shape[1] - len(prompt)
        run.first = run.first or run.seconds
        is_done = run.tokens >= shown.max_tokens or int(input_ids[0, -1]) in ends
        run.is_cut = run.seconds > MOST_SECONDS and run.tokens > 1 and not is_done
        shown.text[:] = [(llm.tokenizer.decode(input_ids[0, len(prompt) :].tolist()), False)]
        redraw()
        watch = time.perf_counter()
        return torch.full((1,), run.is_cut, device=input_ids.device)

    generate_greedily(reference.model, prompt, shown.max_tokens, ends or None, stopping_criteria=[after])


_OFF: Mapping[str, str] = {
    "no gain": "a step of three rows costs {growth:.1f} steps, and drafts were too seldom right",
    "nothing found": "nothing in the text so far went on as the answer did",
    "measuring": "what drafts cost here was still being measured",
    "no room": "the answer ended too soon",
}
"""Why nothing was drafted: a policy's reason -> words."""


def explain(stats: SequenceStats, growth: Mapping[int, float]) -> str:
    """Return how much one answer owes to drafts, or why nothing was drafted."""
    off = {key.removeprefix("off: "): count for key, count in stats.decisions.items() if key.startswith("off: ")}
    why = max(off, key=off.__getitem__, default="")
    reason = _OFF.get(why, why).format(growth=growth.get(3, 1.0))
    if not stats.num_draft_tokens:
        return f"off: {reason or 'nothing in the text was alike, so nothing was drafted'}"
    steps = stats.num_forwards
    told = (
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens were right, "
        f"{stats.mean_acceptance_length:.1f} tokens a step"
    )
    if 2 * sum(off.values()) > steps:
        return f"{told}; off in {sum(off.values())} of {steps} steps: {reason}"
    empty = steps - sum(off.values()) - stats.reached_per_position[0]
    return told + (f"; in {empty} of {steps} steps nothing was found to draft" if 2 * empty > steps else "")


def recorded(shown: Sequence[Mapping[str, Any]]) -> list[Performance]:
    """Read performances from a result's details."""
    return [Performance(**{**each, "runs": {name: Run(**run) for name, run in each["runs"].items()}}) for each in shown]
