"""An audit whose time is up: it begins nothing more, compares what it has, and tells what it left out."""

from __future__ import annotations

from itertools import count

import pytest

from forerun.lab.audit import pace as module
from forerun.lab.audit.local import run_audit
from forerun.lab.audit.pace import Pace
from forerun.lab.audit.settings import AuditOptions

from .conftest import PROMPTS, World

SETTINGS = AuditOptions(samples=800, requests=540, num_prompts=2, max_tokens=10)


class Watched:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.counts: list[str] = []

    def say(self, text: str, more: str) -> None:
        self.stages.append(text + more)

    def tick(self, seconds: float, count: str) -> None:
        self.counts.append(count)


def test_what_the_time_cuts_is_told_and_the_rest_is_judged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(clock)))  # a second for each look
    watched = Watched()
    certificate = run_audit(world.audited, PROMPTS, SETTINGS, pace=Pace(700.0, watched))
    assert next(clock) < 800
    tests = [test for layer in certificate.layers for test in layer.tests]
    cut = [test for test in tests if "the time was up after" in test.note]
    assert cut and not certificate.failed, certificate.layers
    engine = certificate.layers[2]
    assert 50 < sum(test.num_samples for test in engine.tests) < 540
    assert sum(test.num_samples for test in certificate.layers[0].tests) > 8
    assert watched.stages[0].startswith("Bits: plain decoding, one at a time, 16; 69")
    assert len(watched.stages) == len(set(watched.stages)) == 5 + 9 + 9
    assert any(text.endswith("/16") for text in watched.counts)


def test_an_audit_without_any_time_concludes_nothing(world: World) -> None:
    certificate = run_audit(world.audited, PROMPTS, SETTINGS, pace=Pace(0.0))
    assert certificate.verdict == "inconclusive"
    assert not certificate.failed and "the time was up after 0 of" in certificate.markdown()
