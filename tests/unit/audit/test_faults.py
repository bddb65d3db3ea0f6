"""Each planted fault is found, by the layer that it belongs to; the clean engine passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from faults import FAULTS
from forerun.audit.bits import bits_layer
from forerun.audit.certificate import Layer
from forerun.audit.local import audit
from forerun.audit.requests import engine_layer
from forerun.audit.rule import rule_layer
from forerun.audit.settings import AuditOptions, quick

from .conftest import PROMPTS, World

LEVEL = 1e-5
SMALL = AuditOptions(samples=3_000, requests=1_600, num_prompts=2, max_tokens=16)

LAYERS: dict[str, Callable[[World], Layer]] = {
    "Bits": lambda world: bits_layer(world.audited, PROMPTS[:2], SMALL),
    "Rule": lambda world: rule_layer(world.target, PROMPTS, SMALL.samples, 0, LEVEL),
    "Engine": lambda world: engine_layer(world.audited, PROMPTS, SMALL.requests, 0, LEVEL),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_layer_finds_it(fault: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, layer = FAULTS[fault]
    plant(monkeypatch, world.target)
    found = LAYERS[layer](world)
    assert found.verdict == "fail", found.tests
    assert found.findings


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_fault_it_passes(layer: str, world: World) -> None:
    found = LAYERS[layer](world)
    assert found.verdict == "pass", (found.tests, found.findings)
    assert not found.findings and "would have been found" in found.power


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, None])
def test_whole_audits(fault: str | None, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default grid at quick sizes, as `make check` runs it: the certificate names the layer."""
    if fault is not None:
        FAULTS[fault][0](monkeypatch, world.target)
    certificate = audit(world.audited, PROMPTS, quick(AuditOptions()))
    if fault is None:
        assert certificate.verdict == "pass", certificate.layers
    else:
        assert certificate.verdict == "fail"
        assert FAULTS[fault][1] in certificate.failed
        assert FAULTS[fault][1] in certificate.headline
