"""The layer *Bits*: plain and speculative answers are equal, to the last bit of every log-probability.

Greedy requests and those with a seed promise it. Tokens, texts, finish reasons and log-probabilities are compared over
prompts and options (`settings.bit_options`), K, batches, and load: requests that come while others are computed.

Where a model is not exact, the last bits of rows depend on what is computed beside them. A teacher-forced replay of the
tokens that both runs agree on then tells near-ties from bugs: it measures how far rows differ, each alone and all
together. A difference between two runs is a near-tie if logits within that distance of the replay's could have made the
other token the chosen one, and every log-probability reported before lies within the distance too. Everything else is a
bug.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from forerun.config import SamplingParams
from forerun.engine import Choice
from forerun.lab.audit.certificate import Check, Layer
from forerun.lab.audit.engine_layer import Audited, AuditRequest, AuditRun, broken, note_first_error, num_drafted
from forerun.lab.audit.pace import Pace, in_time
from forerun.lab.audit.settings import AuditOptions, bit_options
from forerun.lab.audit.statistics import share_found
from forerun.models import LanguageModel, Rows
from forerun.sampling import LogitsPipeline, LogitsRow, NoiseKey, keyed_gumbel, row_argmax
from forerun.types import Sequence

Answers = Seq[list[Choice] | Exception]

_PLAIN = AuditRun("plain decoding, one at a time")
_MOST_REPLAYED = 40
"""Differences of one run that are replayed; further ones are only counted."""
_MOST_SHOWN = 6
"""Differences that a report describes."""


MARGIN = 4.0
"""Times the measured distance that is still explained by rounding: few rows are replayed, and others differ more."""
_ULPS = 16
"""Units in the last place of float32 at the largest logit: the least that is explained."""


def runs(most: int) -> list[AuditRun]:
    """Return the speculative runs. most: the largest K."""
    found = [
        AuditRun("K=1, one at a time", 1),
        AuditRun(f"K={min(3, most)}, batches of 4", min(3, most), 4),
        AuditRun(f"K={most}, batches of 16, under load", most, 16, arrivals=2, prefill_chunk=24),
        AuditRun(f"K varying up to {most}, batches of 8, under load", most, 8, arrivals=3, varying=True),
    ]
    return found if most > 1 else found[:1] + found[2:]


def bits_layer(audited: Audited, prompts: Seq[Seq[int]], settings: AuditOptions, pace: Pace | None = None) -> Layer:
    """Compare plain and speculative answers. prompts: token ids."""
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
    names, requests = request_grid(audited, prompts, settings)
    pace = pace or Pace()
    pace.begin("Bits: plain decoding, one at a time", len(requests))
    expected = audited.answers(requests, _PLAIN, settings.seed, pace=pace)
    if note := in_time(len(expected), len(requests)):
        layer.notes.append(f"Plain decoding: {note}; only these are compared.")
    if errors := broken(expected):
        layer.notes.append(f"Plain decoding itself: {'; '.join(errors)}. These requests are not compared.")
    for run in runs(settings.num_draft_tokens):
        pace.begin(f"Bits: {run.name}", len(expected))
        answers = audited.answers(requests[: len(expected)], run, settings.seed, pace=pace)
        layer.tests.append(_compared(audited, layer, run.name, names, requests, expected, answers))
        note_first_error(layer, answers)
    return layer


def request_grid(
    audited: Audited, prompts: Seq[Seq[int]], settings: AuditOptions
) -> tuple[list[str], list[AuditRequest]]:
    """Return the requests, with the name of each one's options; they depend on plain decoding's answers.

    Raises:
        Exception: what plain decoding of a prompt ended with.
    """
    first = SamplingParams(temperature=0, max_tokens=settings.max_tokens, ignore_eos=True)
    found = audited.answers([AuditRequest(prompt, first) for prompt in prompts], _PLAIN, settings.seed)
    names: list[str] = []
    requests: list[AuditRequest] = []
    for prompt, answer in zip(prompts, found, strict=True):
        if isinstance(answer, Exception):
            raise answer
        for name, options in bit_options(answer[0].token_ids, answer[0].text).items():
            names.append(name)
            params = SamplingParams(max_tokens=settings.max_tokens, ignore_eos=name != "seeded", **options)
            requests.append(AuditRequest(prompt, params))
    return names, requests


def _compared(
    audited: Audited,
    layer: Layer,
    run: str,
    names: Seq[str],
    requests: Seq[AuditRequest],
    expected: Answers,
    answers: Answers,
) -> Check:
    """Check one run; findings about wrong answers are added to the layer."""
    wrong: dict[str, int] = {}
    differences = list[str]()
    errors = list[Exception]()
    near_ties = compared = left_open = 0
    for name, one, plain, other in zip(names, requests, expected, answers, strict=False):
        if isinstance(plain, Exception):
            continue
        if isinstance(other, Exception):
            compared = compared + 1
            wrong[name] = wrong.get(name, 0) + 1
            errors.append(other)
            continue
        for ours, theirs in zip(plain, other, strict=True):
            compared += 1
            if (differs := difference(ours, theirs)) is None:
                continue
            if not audited.target.exactness.exact:
                if near_ties == _MOST_REPLAYED:
                    left_open += 1
                    continue
                reason = unexplained(audited.target, one.prompt, one.params, ours, theirs)
                if reason is None:
                    near_ties += 1
                    continue
                differs = f"{differs}; {reason}"
            wrong[name] = wrong.get(name, 0) + 1
            differences.append(f"{name}: {differs}")
    if wrong:
        by_options = ", ".join(f"{name}: {count}" for name, count in wrong.items())
        layer.findings.append(f"{run}: {sum(wrong.values())} of {compared} answers differ ({by_options}).")
        layer.findings += [f"{run}, {line}." for line in dict.fromkeys([*broken(errors), *differences][:_MOST_SHOWN])]
    drafted, accepted = num_drafted(answers)
    note = f"{near_ties} near-ties" if near_ties else ""
    note += f", {left_open} differences that were not replayed" if left_open else ""
    if left_out := in_time(len(answers), len(requests)):
        note = f"{note}, {left_out}" if note else left_out
    found = share_found(compared)
    test = Check(run, "pass", "answers", compared, found=found, note=note, num_drafted=drafted, num_accepted=accepted)
    if wrong:
        return replace(test, verdict="fail")
    if compared and not accepted:
        note = "nothing drafted was accepted, so nothing was tested" if drafted else "nothing was drafted"
        return replace(test, verdict="inconclusive", note=note)
    return test if compared else replace(test, verdict="inconclusive")


def difference(plain: Choice, other: Choice) -> str | None:
    """Describe how two answers differ, without quoting any of their tokens; None if they do not."""
    logprobs = zip(plain.logprobs or [], other.logprobs or [], strict=False)
    for position, (ours, theirs) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)):
        if ours != theirs:
            return f"token {position} is another"
        one, two = next(logprobs, (None, None))
        if one is not None and two is not None and one != two:
            gap = abs(one.logprob - two.logprob)
            return (
                f"the log-probability of token {position} differs by {gap:.2g}"
                if gap
                else f"the most probable tokens reported at token {position} differ"
            )
    if len(plain.token_ids) != len(other.token_ids):
        return f"it has {len(other.token_ids)} tokens, not {len(plain.token_ids)}"
    if plain.text != other.text:
        return f"the text has {len(other.text)} characters, not {len(plain.text)}, or others"
    if plain.finish_reason != other.finish_reason:
        return f"it ended by {other.finish_reason}, not {plain.finish_reason}"
    return None


def unexplained(
    target: LanguageModel, prompt: Seq[int], params: SamplingParams, plain: Choice, other: Choice
) -> str | None:
    """Return why rounding does not explain the difference of two answers to one request; None where it does."""
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=False))
    shortest = min(len(plain.token_ids), len(other.token_ids))
    common = next((index for index, (one, two) in pairs if one != two), shortest)
    tokens = [*prompt, *plain.token_ids[:common]]
    alone, together = _replayed(target, tokens, len(prompt))
    spread = float((alone - together).abs().max())
    tolerance = max(MARGIN * spread, _ULPS * torch.finfo(torch.float32).eps * float(alone.abs().max()))
    logprobs = alone.double().log_softmax(-1)
    for choice in (plain, other):
        for position, entry in enumerate((choice.logprobs or [])[:common]):
            error = abs(entry.logprob - float(logprobs[position, entry.token_id]))
            if not error <= 2 * tolerance:
                return (
                    f"the log-probability of token {position} is off by {error:.2g}, where rounding explains "
                    f"{2 * tolerance:.2g}"
                )
    if common == shortest:
        is_same = len(plain.token_ids) == len(other.token_ids) and plain.text == other.text
        return None if is_same else "the tokens agree, but the answers end differently"
    sequence = Sequence(0, tokens, len(prompt), params, choice=plain.index)
    chosen = other.token_ids[common]
    for row in (alone[common], together[common]):
        moved = row - tolerance
        moved[chosen] += 2 * tolerance
        if _chosen(target, moved, sequence) == chosen:
            return None
    return f"at token {common} no logits within rounding ({tolerance:.2g}) choose the other token"


@torch.inference_mode()
def _replayed(target: LanguageModel, tokens: Seq[int], num_prompt: int) -> tuple[Tensor, Tensor]:
    """Return the logits [n + 1, V] after the prompt and after each token: computed one by one, and all together."""
    cache = target.new_cache()
    try:
        start = num_prompt - 1
        if start:
            target.forward([Rows(cache, tokens[:start], num_logits=0)])
            cache.commit(range(start))
        together = target.forward([Rows(cache, tokens[start:])]).logits.clone()
        cache.drop()
        rows = []
        for token in tokens[start:]:
            rows.append(target.forward([Rows(cache, [token])]).logits[0].clone())
            cache.commit([0])
        return torch.stack(rows), together
    finally:
        cache.free()


def _chosen(target: LanguageModel, logits: Tensor, sequence: Sequence) -> int:
    """Return the token that a greedy or seeded request takes from these logits [V]."""
    pipeline = LogitsPipeline(target.vocab_size, target.eos_token_ids)
    logprobs = pipeline.process(logits[None], [LogitsRow(sequence)])
    seed = sequence.params.seed
    if not sequence.params.greedy and seed is not None:
        key = NoiseKey(seed, sequence.choice, len(sequence.token_ids))
        logprobs = keyed_gumbel([key], logprobs.shape[-1]).to(logprobs.device) + logprobs
    return int(row_argmax(logprobs)[0])
