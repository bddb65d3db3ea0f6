"""An audit of a server, from outside: plain against plain first, and only what speculation adds to that counts.

The server is asked with speculation and without it: by a switch in the body (`"speculative": false`), or at two
addresses. Nothing is concluded unless its counters show drafts in one and none in the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from forerun.audit.certificate import Certificate, Check, Layer
from forerun.audit.client import Answer, Server
from forerun.audit.settings import FAMILY_ERROR, AuditOptions
from forerun.audit.statistics import NOTHING, GTest, homogeneity, more_often, share_found
from forerun.errors import ConfigError

Body = dict[str, Any]

SWITCH = {"speculative": False}
"""What the plain requests' bodies have beside the others', where there is one address."""
_NOT_CONFIRMED = "switch not confirmed"
_AT_ONCE = 8
_LENGTH, _TEMPERATURE = 3, 0.7
"""Tokens of a sampled answer, and their temperature: cells must fill."""
_CHOICES = 4
_PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
GREEDY: Mapping[str, Body] = {
    "no options": {},
    "penalties": dict(_PENALTIES),
    "stops": {"stop": ["\n\n", "e "]},
}
SAMPLED: Mapping[str, Body] = {"no options": {}, "top_p, penalties": {"top_p": 0.9, **_PENALTIES}}
_NUM_TESTS = 1 + 2 * len(SAMPLED)


@dataclass(slots=True)
class Tally:
    """Draft tokens that a way of asking has brought, by responses and by /metrics; None where neither tells.

    Attributes:
        told: by the responses.
        counted: by the counter.
    """

    told: int | None = None
    counted: float | None = None

    @property
    def num_drafted(self) -> float | None:
        """Of the responses, which know nothing of other clients' requests; else of the counter."""
        return self.told if self.told is not None else self.counted


@dataclass(slots=True)
class Asking:
    """A server with what it has drafted for these requests."""

    server: Server
    tally: Tally = field(default_factory=Tally)

    def complete(self, bodies: Seq[Body], at_once: int) -> list[Answer]:
        """As `Server.complete`, tallied."""
        before = self.server.counter()
        answers = self.server.complete(bodies, at_once)
        after = self.server.counter()
        told = [answer.num_drafted for answer in answers if answer.num_drafted is not None]
        if told:
            self.tally.told = (self.tally.told or 0) + sum(told)
        if before is not None and after is not None:
            self.tally.counted = (self.tally.counted or 0.0) + after - before
        return answers


def remote_audit(
    speculative: Server,
    plain: Server,
    prompts: Seq[str],
    settings: AuditOptions | None = None,
    *,
    subject: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Certificate:
    """Audit a server.

    Args:
        speculative, plain: the same model, with speculation and without.
        prompts: raw text.

    Raises:
        AuditError: a server does not answer, or refuses a request.
        ConfigError: there is no prompt.
    """
    settings = settings or AuditOptions()
    if not prompts:
        raise ConfigError("There are no prompts. Give a file with some.")
    started = time.perf_counter()
    level = FAMILY_ERROR / _NUM_TESTS
    drafting, plainly = Asking(speculative), Asking(plain)
    bits = _bits(drafting, plainly, prompts, settings, level, say)
    engine = Layer("Engine", "Sampled answers with and without speculation against each other.")
    if settings.requests:
        _sampled(engine, drafting, plainly, prompts, settings, level, say)
    else:
        engine.reason = "--requests is 0"
    switch = _switch(drafting.tally, plainly.tally)
    rules = Layer("Rule", "Acceptance rules on cached laws of the model.", reason="a server's rules cannot be called")
    layers = [switch, bits, rules, engine]
    if switch.verdict != "pass":
        for layer in (bits, engine):
            layer.tests = [replace(test, verdict="inconclusive", note=_NOT_CONFIRMED) for test in layer.tests]
    return Certificate(dict(subject or {}), layers, FAMILY_ERROR, time.perf_counter() - started)


def _switch(drafting: Tally, plainly: Tally) -> Layer:
    layer = Layer("Switch", "Whether the server drafts for one kind of request, and for the other not.")
    ours, theirs = drafting.num_drafted, plainly.num_drafted
    if ours is None or theirs is None:
        note = f"{_NOT_CONFIRMED}: neither its responses nor /metrics tell of drafts"
    elif ours == 0:
        note = f"{_NOT_CONFIRMED}: nothing was drafted with speculation"
    elif theirs > 0:
        note = f"{_NOT_CONFIRMED}: {theirs:.0f} tokens were drafted without speculation"
    else:
        layer.tests.append(Check("drafts", "pass", what="draft tokens", num_samples=int(ours), note="without it none"))
        return layer
    layer.findings.append(f"{note}.")
    layer.tests.append(Check("drafts", "inconclusive", what="draft tokens", num_samples=int(ours or 0), note=note))
    return layer


def _bits(
    drafting: Asking,
    plainly: Asking,
    prompts: Seq[str],
    settings: AuditOptions,
    level: float,
    say: Callable[[str], None],
) -> Layer:
    """Greedy texts. Plain decoding one at a time is compared with itself under load, and with speculation."""
    layer = Layer("Bits", "Greedy texts with and without speculation; how often plain decoding differs from itself.")
    bodies = [
        {"prompt": prompts[number % len(prompts)], "max_tokens": settings.max_tokens, "temperature": 0, **options}
        for number in range(2 * settings.num_prompts)
        for options in GREEDY.values()
    ]
    say(f"Bits: {len(bodies)} plain requests, one at a time")
    alone = plainly.complete(bodies, 1)
    say("Bits: the same plainly, under load")
    again = plainly.complete(bodies, _AT_ONCE)
    say("Bits: the same with speculation")
    found = drafting.complete(bodies, _AT_ONCE)
    count = len(bodies)
    noise = sum(one.texts != two.texts for one, two in zip(alone, again, strict=True))
    differing = sum(one.texts != two.texts for one, two in zip(alone, found, strict=True))
    p_value = more_often((noise, count), (differing, count))
    note = f"{differing} differ; of plain decoding against itself, {noise}"
    test = Check(
        "greedy, batches of 8",
        "pass",
        "answers",
        count,
        p_value=p_value,
        level=level,
        found=share_found(count),
        note=note,
    )
    if p_value < level:
        test = replace(test, verdict="fail")
        layer.findings.append(f"Greedy texts: {note}, of {count}.")
    elif differing > noise or 2 * noise > count:
        test = replace(test, verdict="inconclusive")
        layer.notes.append("More --num-prompts would tell whether speculation adds to the difference.")
    layer.tests.append(test)
    return layer


def _sampled(
    layer: Layer,
    drafting: Asking,
    plainly: Asking,
    prompts: Seq[str],
    settings: AuditOptions,
    level: float,
    say: Callable[[str], None],
) -> None:
    """Two plain samples against each other, and both against one with speculation."""
    each = max(settings.requests // (3 * len(SAMPLED)), 2 * _CHOICES)
    for name, options in SAMPLED.items():
        say(f"Engine: {name}")
        bodies = [
            {"prompt": prompt, "max_tokens": _LENGTH, "temperature": _TEMPERATURE, "n": _CHOICES, **options}
            for _ in range(-(-each // (2 * _CHOICES)))
            for prompt in prompts[:2]
        ]
        first, second = plainly.complete(bodies, _AT_ONCE), plainly.complete(bodies, _AT_ONCE)
        found = drafting.complete(bodies, _AT_ONCE)
        itself = _compared(bodies, (first,), (second,))
        outcome = _compared(bodies, (first, second), (found,))
        test = Check.of(name, outcome, level)
        if itself.p_value < level:
            test = replace(test, verdict="inconclusive", note="plain decoding does not follow itself")
        elif test.verdict == "fail":
            layer.findings.append(f"{name}: sampled answers differ, and plain ones do not (p = {itself.p_value:.2g}).")
        layer.tests.append(test)


def _compared(bodies: Seq[Body], first: Seq[Seq[Answer]], second: Seq[Seq[Answer]]) -> GTest:
    """The test of two groups of samples, prompt by prompt. A text is a cell; rare ones are merged in order, so
    that texts that begin alike are."""
    outcome = NOTHING
    for prompt in dict.fromkeys(body["prompt"] for body in bodies):
        sides = [
            [
                text
                for answers in samples
                for body, answer in zip(bodies, answers, strict=True)
                if body["prompt"] == prompt
                for text in answer.texts
            ]
            for samples in (first, second)
        ]
        cells = {text: number for number, text in enumerate(sorted({*sides[0], *sides[1]}))}
        ours, theirs = (
            np.bincount([cells[text] for text in side], minlength=len(cells)).astype(np.float64) for side in sides
        )
        outcome += homogeneity(ours, theirs)
    return outcome
