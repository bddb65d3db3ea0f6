"""The layer *Bits*: plain and speculative answers are equal, to the last bit of every log-probability.

Greedy requests and those with a seed promise it. Compared are tokens, texts, reasons of ending and log-probabilities,
over prompts and options (`grid.bit_options`), K, batches, and load: requests that come while others are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace

from forerun.audit.certificate import Check, Layer
from forerun.audit.grid import Plain, bit_options
from forerun.audit.replay import explain
from forerun.audit.running import Asked, Audited, Run, broken, num_drafted
from forerun.audit.settings import AuditOptions
from forerun.audit.statistics import share_found
from forerun.config import SamplingParams
from forerun.engine import Choice

Answers = Seq[list[Choice] | Exception]

_PLAIN = Run("plain decoding, one at a time")
_MOST_REPLAYED = 40
"""Differences of one run that are replayed; the others are counted apart, and prove nothing."""
_MOST_TOLD = 6
"""Differences that a report describes."""


def runs(most: int) -> list[Run]:
    """The speculative runs. most: the largest K."""
    found = [
        Run("K=1, one at a time", 1),
        Run(f"K={min(3, most)}, batches of 4", min(3, most), 4),
        Run(f"K={most}, batches of 16, under load", most, 16, arrivals=2, prefill_chunk=24),
        Run(f"K varying up to {most}, batches of 8, under load", most, 8, arrivals=3, varying=True),
    ]
    return found if most > 1 else found[:1] + found[2:]


def bits_layer(
    audited: Audited, prompts: Seq[Seq[int]], settings: AuditOptions, say: Callable[[str], None] = lambda _: None
) -> Layer:
    """Compare. prompts: token ids."""
    layer = Layer(
        "Bits",
        "Plain and speculative answers to the same greedy and seeded requests: tokens, text, log-probabilities.",
    )
    exactness = audited.target.exactness
    if not exactness.exact:
        layer.notes.append(
            f"The model is not exact on this machine ({exactness.reason}): differences are replayed by teacher "
            "forcing, and near-ties, which rounding explains, do not fail."
        )
    names, asked = requests(audited, prompts, settings)
    say(f"Bits: {len(asked)} requests plainly")
    expected = audited.answers(asked, _PLAIN, settings.seed)
    if errors := broken(expected):
        layer.notes.append(f"Plain decoding itself: {'; '.join(errors)}. These requests are not compared.")
    for run in runs(settings.num_draft_tokens):
        say(f"Bits: {run.name}")
        answers = audited.answers(asked, run, settings.seed)
        layer.tests.append(_compared(audited, layer, run.name, names, asked, expected, answers))
    return layer


def requests(audited: Audited, prompts: Seq[Seq[int]], settings: AuditOptions) -> tuple[list[str], list[Asked]]:
    """The grid, with the name of each request's options; made of what plain decoding says to each prompt."""
    first = SamplingParams(temperature=0, max_tokens=settings.max_tokens, ignore_eos=True)
    found = audited.answers([Asked(prompt, first) for prompt in prompts], _PLAIN, settings.seed)
    names: list[str] = []
    asked: list[Asked] = []
    for prompt, answer in zip(prompts, found, strict=True):
        if isinstance(answer, Exception):
            raise answer
        plain = Plain(answer[0].token_ids, answer[0].text)
        for name, options in bit_options(plain).items():
            names.append(name)
            goes_on = name != "seeded"
            params = SamplingParams(max_tokens=settings.max_tokens, ignore_eos=goes_on, **options)
            asked.append(Asked(prompt, params))
    return names, asked


def _compared(
    audited: Audited,
    layer: Layer,
    run: str,
    names: Seq[str],
    asked: Seq[Asked],
    expected: Answers,
    answers: Answers,
) -> Check:
    """One run's test; what is wrong goes into the layer's findings."""
    wrong: dict[str, int] = {}
    told: list[str] = []
    near_ties = compared = left_open = 0
    for name, one, plain, other in zip(names, asked, expected, answers, strict=True):
        if isinstance(plain, Exception):
            continue
        if isinstance(other, Exception):
            compared, wrong[name] = compared + 1, wrong.get(name, 0) + 1
            told.append(f"{name}: the request ended with {type(other).__name__}, and plainly it did not")
            continue
        for ours, theirs in zip(plain, other, strict=True):
            compared += 1
            differs = difference(ours, theirs)
            if differs is None:
                continue
            if not audited.target.exactness.exact:
                if near_ties == _MOST_REPLAYED:
                    left_open += 1
                    continue
                explained = explain(audited.target, one.prompt, one.params, ours, theirs)
                if explained.near_tie:
                    near_ties += 1
                    continue
                differs = f"{differs}; {explained.reason}"
            wrong[name] = wrong.get(name, 0) + 1
            told.append(f"{name}: {differs}")
    if wrong:
        layer.findings.append(f"{run}: {sum(wrong.values())} of {compared} answers differ ({_counted(wrong)}).")
        layer.findings += [f"{run}, {line}." for line in dict.fromkeys(told[:_MOST_TOLD])]
    drafted, accepted = num_drafted(answers)
    note = f"{near_ties} near-ties" if near_ties else ""
    note += f", {left_open} differences that were not replayed" if left_open else ""
    found = share_found(compared)
    test = Check(run, "pass", "answers", compared, found=found, note=note, num_drafted=drafted, num_accepted=accepted)
    if wrong:
        return replace(test, verdict="fail")
    if not accepted:
        note = "nothing drafted was accepted, so nothing was tested" if drafted else "nothing was drafted"
        return replace(test, verdict="inconclusive", note=note)
    return test


def difference(plain: Choice, other: Choice) -> str | None:
    """How two answers differ, without any of their tokens; None if they do not."""
    for place, (ours, theirs) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)):
        if ours != theirs:
            return f"token {place} is another"
        if plain.logprobs is not None and other.logprobs is not None and plain.logprobs[place] != other.logprobs[place]:
            gap = abs(plain.logprobs[place].logprob - other.logprobs[place].logprob)
            return (
                f"the log-probability of token {place} differs by {gap:.2g}"
                if gap
                else (f"the most probable tokens reported at token {place} differ")
            )
    if len(plain.token_ids) != len(other.token_ids):
        return f"it has {len(other.token_ids)} tokens, not {len(plain.token_ids)}"
    if plain.text != other.text:
        return f"the text has {len(other.text)} characters, not {len(plain.text)}, or others"
    if plain.finish_reason != other.finish_reason:
        return f"it ended by {other.finish_reason}, not {plain.finish_reason}"
    return None


def _counted(wrong: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in wrong.items())
