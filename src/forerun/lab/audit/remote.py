"""An audit of a server, from outside: plain against plain first, and only what speculation adds to that counts.

Requests are sent with speculation and without it: by a switch in the body (`"speculative": false`), or at two
addresses. Nothing is concluded unless the server's counters show drafts in one and none in the other.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.errors import AuditError, ConfigError
from forerun.lab.audit.certificate import Certificate, Check, Layer, Verdict
from forerun.lab.audit.pace import Pace, in_time
from forerun.lab.audit.settings import FAMILY_ERROR, AuditOptions
from forerun.lab.audit.statistics import NOTHING, GTest, homogeneity, more_often, share_found

Body = dict[str, Any]
Texts = tuple[str, ...]
"""Of an answer, one for each choice."""
TIMEOUT = 120.0
"""Seconds for one answer."""
_COUNTER = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?=\s|$)", re.MULTILINE)

SWITCH = {"speculative": False}
"""What the plain requests' bodies have beside the others', where there is one address."""
_NOT_CONFIRMED = "switch not confirmed"
_AT_ONCE = 8
_LENGTH, _TEMPERATURE = 3, 0.7
"""Tokens of a sampled answer, and their temperature: cells must fill."""
_CHOICES = 4
_PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.3}
GREEDY: Mapping[str, Body] = {"no options": {}, "penalties": dict(_PENALTIES), "stops": {"stop": ["\n\n", "e "]}}
SAMPLED: Mapping[str, Body] = {"no options": {}, "top_p, penalties": {"top_p": 0.9, **_PENALTIES}}
_NUM_TESTS = 1 + 2 * len(SAMPLED)


class AuditedServer:
    """A server, with or without the switch in every request.

    Args:
        url: with or without /v1.
        api_key: sent as a bearer token; None sends none.
        model: its name in requests; None takes the first that the server lists.
        extra: fields of every body, such as the switch.

    Attributes:
        reported: draft tokens verified for its answers, by these; None where none reports them.
        counted: the same by its /metrics, other clients' requests included; None where it reports none.
    """

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError(
                "An audit of a server needs httpx, which is not installed: pip install 'forerun[audit]'"
            ) from None
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {url!r}, but must begin with http:// or https://.")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._error = httpx.HTTPError
        self._http = httpx.Client(timeout=TIMEOUT, headers=headers, limits=httpx.Limits(max_connections=32))
        self.extra = dict(extra or {})
        self.reported: int | None = None
        self.counted: float | None = None
        self.model = model or self._first_model()

    def complete(self, bodies: Seq[Body], at_once: int, pace: Pace) -> list[Texts]:
        """Send bodies to /v1/completions, so many at a time, count their draft tokens and return the texts; only of the
        first bodies where the time is up.

        Raises:
            AuditError: the server does not answer, or refuses a body.
        """
        before = self.counter()
        with ThreadPoolExecutor(at_once) as pool:
            answers = []
            for answer in pool.map(lambda body: None if pace.is_over else self._complete(body), bodies):
                if answer is None:
                    break  # as are all after it
                answers.append(answer)
                pace.advance(len(answers))
        after = self.counter()
        if numbers := [drafted for _, drafted in answers if drafted is not None]:
            self.reported = (self.reported or 0) + sum(numbers)
        if before is not None and after is not None:
            self.counted = (self.counted or 0.0) + after - before
        return [texts for texts, _ in answers]

    def counter(self) -> float | None:
        """Return the draft tokens verified since the server started, by its /metrics; None where it reports none."""
        try:
            response = self._http.get(f"{self.url}/metrics")
        except self._error:
            return None
        return draft_counter(response.text) if response.status_code == 200 else None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _complete(self, body: Body) -> tuple[Texts, int | None]:
        """Return the texts of an answer's choices, and the draft tokens verified for it if the server reports them."""
        found = self._json("POST", "/v1/completions", {"model": self.model, **body, **self.extra})
        choices = found.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise AuditError(f"{self.url} answered without choices. Is it an OpenAI-compatible server?")
        texts = tuple(str(one.get("text", "")) for one in sorted(choices, key=lambda one: one.get("index", 0)))
        metrics = found.get("metrics")
        decoding = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        drafted = decoding.get("num_draft_tokens") if isinstance(decoding, dict) else None
        return texts, drafted if isinstance(drafted, int) else None

    def _first_model(self) -> str:
        try:
            return str(self._json("GET", "/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise AuditError(f"{self.url} lists no model. Name the one to audit as MODEL.") from None

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, self.url + path, json=body)
            value = response.json()
        except (self._error, ValueError) as error:
            raise AuditError(
                f"{self.url}{path} gave no JSON answer ({type(error).__name__}). Check the address, and that the "
                "server runs."
            ) from None
        if response.status_code != 200:
            reason = value.get("error") if isinstance(value, dict) else None
            field = reason.get("param") if isinstance(reason, dict) else None
            about = f" and names the field {field!r}" if field else ""
            raise AuditError(
                f"{self.url}{path} refuses a request with status {response.status_code}{about}. If it does not support "
                "the switch `speculative`, give two servers: --url SPECULATIVE --url PLAIN."
            )
        if not isinstance(value, dict):
            raise AuditError(f"{self.url}{path} answered with something else than an object.")
        return value


def draft_counter(metrics: str) -> float | None:
    """Sum the counters of draft tokens in Prometheus' text format; None where there is none."""
    numbers = [
        float(value)
        for name, value in _COUNTER.findall(metrics)
        if "spec" in name and name.removesuffix("_total").endswith("num_draft_tokens")
    ]
    finite = [number for number in numbers if math.isfinite(number)]
    return sum(finite) if finite else None


def remote_audit(
    speculative: AuditedServer,
    plain: AuditedServer,
    prompts: Seq[str],
    settings: AuditOptions | None = None,
    *,
    subject: Mapping[str, Any] | None = None,
    pace: Pace | None = None,
) -> Certificate:
    """Audit a server from outside.

    Args:
        speculative, plain: the same model, with speculation and without.
        prompts: raw text.
        pace: as of `run_audit`.

    Raises:
        AuditError: a server does not answer, or refuses a request.
        ConfigError: there is no prompt.
    """
    settings = settings or AuditOptions()
    if not prompts:
        raise ConfigError("There are no prompts. Give a file with some.")
    started = time.perf_counter()
    level = FAMILY_ERROR / _NUM_TESTS
    pace = pace or Pace(60 * settings.minutes or math.inf)
    pace.weight = 3 * (1 + len(SAMPLED) * bool(settings.requests))
    bits = _bits(speculative, plain, prompts, settings, level, pace)
    engine = Layer("Engine", "Sampled answers with and without speculation against each other.")
    if settings.requests:
        _sampled(engine, speculative, plain, prompts, settings, level, pace)
    else:
        engine.reason = "requests is 0"
    switch = _switch(speculative, plain)
    rules = Layer(
        "Rule", "Acceptance rules on cached distributions of the model.", reason="a server's rules cannot be called"
    )
    if switch.verdict != "pass":
        for layer in (bits, engine):
            layer.tests = [replace(test, verdict="inconclusive", note=_NOT_CONFIRMED) for test in layer.tests]
    return Certificate(dict(subject or {}), [switch, bits, rules, engine], FAMILY_ERROR, time.perf_counter() - started)


def _switch(drafting: AuditedServer, plainly: AuditedServer) -> Layer:
    layer = Layer("Switch", "Whether the server drafts for one kind of request, and for the other not.")
    # the answers' own counts exclude other clients' requests, so they are preferred
    ours, theirs = (each.counted if each.reported is None else each.reported for each in (drafting, plainly))
    count = int(ours or 0)
    if ours and theirs == 0:
        layer.tests.append(Check("drafts", "pass", what="draft tokens", num_samples=count, note="without it none"))
        return layer
    if ours is None or theirs is None:
        why = "neither its responses nor /metrics report drafts"
    else:
        why = (
            f"{theirs:.0f} tokens were drafted without speculation" if ours else "nothing was drafted with speculation"
        )
    note = f"{_NOT_CONFIRMED}: {why}"
    layer.findings.append(f"{note}.")
    layer.tests.append(Check("drafts", "inconclusive", what="draft tokens", num_samples=count, note=note))
    return layer


def _bits(
    drafting: AuditedServer,
    plainly: AuditedServer,
    prompts: Seq[str],
    settings: AuditOptions,
    level: float,
    pace: Pace,
) -> Layer:
    """Compare greedy texts: plain decoding one at a time against itself under load, and against speculation."""
    layer = Layer("Bits", "Greedy texts with and without speculation; how often plain decoding differs from itself.")
    bodies = [
        {"prompt": prompts[number % len(prompts)], "max_tokens": settings.max_tokens, "temperature": 0, **options}
        for number in range(2 * settings.num_prompts)
        for options in GREEDY.values()
    ]
    pace.begin("Bits: plain requests, one at a time", len(bodies))
    alone = plainly.complete(bodies, 1, pace)
    pace.begin("Bits: the same under load", len(alone))
    itself = plainly.complete(bodies[: len(alone)], _AT_ONCE, pace)
    pace.begin("Bits: the same with speculation", len(itself))
    found = drafting.complete(bodies[: len(itself)], _AT_ONCE, pace)
    count = len(found)
    noise, differing = (
        sum(one != two for one, two in zip(alone, each[:count], strict=False)) for each in (itself, found)
    )
    p_value = more_often((noise, count), (differing, count))
    note = f"{differing} differ; of plain decoding against itself, {noise}"
    if left_out := in_time(count, len(bodies)):
        note += f"; {left_out}"
    verdict: Verdict = "pass" if count else "inconclusive"
    if p_value < level:
        verdict = "fail"
        layer.findings.append(f"Greedy texts: {note}, of {count}.")
    elif differing > noise or 2 * noise > count:
        verdict = "inconclusive"
        layer.notes.append("More prompts (key num_prompts) would tell whether speculation adds to the difference.")
    layer.tests.append(
        Check("greedy, batches of 8", verdict, "answers", count, None, p_value, level, share_found(count), note=note)
    )
    return layer


def _sampled(
    layer: Layer,
    drafting: AuditedServer,
    plainly: AuditedServer,
    prompts: Seq[str],
    settings: AuditOptions,
    level: float,
    pace: Pace,
) -> None:
    """Compare two plain samples with each other, and both with one with speculation."""
    each = max(settings.requests // (3 * len(SAMPLED)), 2 * _CHOICES)
    for name, options in SAMPLED.items():
        bodies = [
            {"prompt": prompt, "max_tokens": _LENGTH, "temperature": _TEMPERATURE, "n": _CHOICES, **options}
            for _ in range(-(-each // (2 * _CHOICES)))
            for prompt in prompts[:2]
        ]
        samples = []
        for server, what in ((plainly, "plain"), (plainly, "plain again"), (drafting, "with speculation")):
            pace.begin(f"Engine: {name}, {what}", len(bodies))
            samples.append(server.complete(bodies, _AT_ONCE, pace))
        first, second, found = samples
        itself = _compared(bodies, (first,), (second,)).p_value
        note = in_time(min(map(len, samples)), len(bodies))
        test = Check.of(name, _compared(bodies, (first, second), (found,)), level, **({"note": note} if note else {}))
        if itself < level:
            test = replace(test, verdict="inconclusive", note="plain decoding does not follow itself")
        elif test.verdict == "fail":
            layer.findings.append(f"{name}: sampled answers differ, and plain ones do not (p = {itself:.2g}).")
        layer.tests.append(test)


def _compared(bodies: Seq[Body], first: Seq[Seq[Texts]], second: Seq[Seq[Texts]]) -> GTest:
    """Test two groups of samples, prompt by prompt. Each text is a cell; rare cells are merged in sorted order, so that
    texts that begin alike are merged."""
    outcome = NOTHING
    for prompt in dict.fromkeys(body["prompt"] for body in bodies):
        sides = [
            [
                text
                for answers in samples
                for body, answer in zip(bodies, answers, strict=False)  # of the first ones
                if body["prompt"] == prompt
                for text in answer
            ]
            for samples in (first, second)
        ]
        cells = {text: number for number, text in enumerate(sorted({*sides[0], *sides[1]}))}
        ours, theirs = (
            np.bincount([cells[text] for text in side], minlength=len(cells)).astype(np.float64) for side in sides
        )
        outcome += homogeneity(ours, theirs)
    return outcome
