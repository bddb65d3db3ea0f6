"""Each planted fault is found, by the layer that it belongs to; the clean engine passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from faults import FAULTS, sizes_for
from forerun.lab.audit.bits_layer import bits_layer
from forerun.lab.audit.certificate import Layer
from forerun.lab.audit.engine_layer import engine_layer
from forerun.lab.audit.local import run_audit
from forerun.lab.audit.rule_layer import TRIED, rule_layer
from forerun.lab.audit.settings import SAMPLED, AuditOptions, quick

from .conftest import PROMPTS, World

LEVEL = 1e-5
SMALL = AuditOptions(max_tokens=14)


def bits(world: World) -> Layer:
    return bits_layer(world.audited, PROMPTS[:1], SMALL)


def few_rules(world: World) -> Layer:
    return rule(world, num_samples=400)


def rule(world: World, *names: str, num_samples: int = 800) -> Layer:
    grid = [tried for tried in TRIED if tried.rule in names or not names]
    return rule_layer(world.target, PROMPTS, num_samples, 0, LEVEL, grid=grid)


def engine(world: World, *names: str, num_requests: int = 500) -> Layer:
    grid = [sampled for sampled in SAMPLED if sampled.name in names or not names]
    return engine_layer(world.audited, PROMPTS, num_requests, 0, LEVEL, grid=grid)


FINDERS: dict[str, Callable[[World], Layer]] = {
    "u <= p instead of p/q": lambda world: rule(world, "block", "token"),
    "residual from the wrong row": lambda world: rule(world, "block", "token", num_samples=4000),
    "bonus from unprocessed logits": lambda world: engine(world, "filters"),
    "penalties without the drafted path": bits,
    "a row that is not rolled back": bits,
    "a product order that depends on K": bits,
    "noise shared by two positions": lambda world: engine(world, "seeded", num_requests=800),
    "a stop string cut at the block": lambda world: bits_layer(world.audited, PROMPTS, AuditOptions(max_tokens=20)),
    "a token of no chance at u = 0": lambda world: rule(world, "block", "token", num_samples=100),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_layer_finds_it(fault: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, layer = FAULTS[fault]
    plant(monkeypatch, world.target)
    found = FINDERS[fault](world)
    assert found.name == layer and found.verdict == "fail", found.tests
    assert found.findings


@pytest.mark.parametrize("layer", [bits, few_rules, engine])
def test_without_a_fault_it_passes(layer: Callable[[World], Layer], world: World) -> None:
    found = layer(world)
    assert found.verdict == "pass", (found.tests, found.findings)
    assert not found.findings and "would have been found" in found.power


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_whole_audits(fault: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default grid: the certificate names the layer."""
    plant, layer = FAULTS[fault]
    plant(monkeypatch, world.target)
    certificate = run_audit(world.audited, PROMPTS, sizes_for(layer))
    assert certificate.verdict == "fail"
    assert layer in certificate.failed
    assert layer in certificate.headline


@pytest.mark.slow
def test_a_whole_audit_without_a_fault(world: World) -> None:
    """At quick sizes, as `make check` runs it."""
    certificate = run_audit(world.audited, PROMPTS, quick(AuditOptions()))
    assert certificate.verdict == "pass", certificate.layers
