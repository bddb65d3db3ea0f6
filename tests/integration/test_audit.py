"""Audits of the bundled pair: it passes, and each planted fault fails in the layer that it belongs to."""

from __future__ import annotations

import pytest

from faults import FAULTS
from forerun import LLM
from forerun.audit.local import audit
from forerun.audit.running import Audited
from forerun.audit.settings import AuditOptions, quick
from forerun.workloads import load

SETTINGS = quick(AuditOptions())


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_bundled_pair(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("bundled", "draft-model", seed=0)
    prompts = [llm.encode(case.prompt) for case in load("code", 4)]
    if fault is not None:
        FAULTS[fault][0](monkeypatch, llm.target)
    certificate = audit(Audited(llm.target, llm.drafter, llm.tokenizer), prompts, SETTINGS)
    told = [(layer.name, layer.findings) for layer in certificate.layers]
    if fault is None:
        assert certificate.verdict == "pass", told
    else:
        assert FAULTS[fault][1] in certificate.failed, told
