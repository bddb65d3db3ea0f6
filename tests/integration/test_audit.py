"""Audits of the bundled pair: it passes with any seed, and each planted fault fails in the layer that it belongs to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from faults import FAULTS, sizes_for
from forerun import LLM
from forerun.lab.audit.certificate import Certificate
from forerun.lab.audit.engine_layer import Audited
from forerun.lab.audit.local import run_audit
from forerun.lab.audit.settings import AuditOptions, quick
from forerun.utils.workloads import load_workload

QUICK = quick(AuditOptions())


@pytest.fixture
def pair() -> LLM:
    return LLM("bundled", "draft-model", seed=0)


def certificate(llm: LLM, settings: AuditOptions) -> Certificate:
    prompts = [llm.encode(case.prompt) for case in load_workload("code", 4)]
    return run_audit(Audited(llm.target, llm.drafter, llm.tokenizer), prompts, settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_the_bundled_pair_passes(seed: int, pair: LLM) -> None:
    found = certificate(pair, replace(QUICK, seed=seed))
    assert found.verdict == "pass", [(layer.name, layer.findings) for layer in found.layers]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_layer(fault: str, pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, layer = FAULTS[fault]
    plant(monkeypatch, pair.target)
    sizes = sizes_for(layer)
    if layer == "Bits":
        sizes = replace(AuditOptions(), samples=0, requests=0)  # a quick audit's answers see too little of penalties
    found = certificate(pair, sizes)
    assert layer in found.failed, [(each.name, each.findings) for each in found.layers]
    assert layer in found.headline
