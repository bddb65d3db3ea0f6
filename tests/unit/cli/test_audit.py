"""`forerun audit`: its certificate and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import audit as command, output
from forerun.lab.audit.certificate import Certificate, Check, Layer
from forerun.lab.audit.settings import AuditOptions, quick
from forerun.lab.audit.statistics import Deviation
from forerun.lab.bench.report.headline import sections
from forerun.lab.results.files import load_results

from .conftest import Invoke

SUBJECT = {"model": "it <b>", "drafter": "suffix", "adapter": None}


def certificate(verdict: Any = "pass") -> Certificate:
    bits = Layer("Bits", "Equal.", [Check("K=1", "pass", "answers", 30, found=0.07, num_drafted=9, num_accepted=4)])
    rule = Layer(
        "Rule", "Laws.", [Check("block", verdict, num_samples=900, freedom=64, p_value=0.4, level=1e-5, found=0.1)]
    )
    if verdict == "fail":
        rule.findings.append("block: it <i>does</i> not follow.")
    if verdict == "measured":
        rule.tests = [Check("typical", "measured", num_samples=9, freedom=4, deviation=Deviation(0.1, 0.05, 0.2))]
    return Certificate(SUBJECT, [bits, rule, Layer("Engine", "Requests.", reason="requests is 0")], 1e-4, 3.0)


@pytest.mark.parametrize(
    ("verdict", "code"), [("pass", 0), ("fail", 1), ("inconclusive", 3), ("measured", 0), ("not run", 0)]
)
def test_exit_codes(verdict: str, code: int, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_of_model", lambda *_: certificate(verdict))
    result = invoke("audit", "bundled")
    assert result.exit_code == code, result.output
    assert result.stdout.startswith("# ") and "## Rule: " in result.stdout
    assert ("Not lossless: Rule failed" in result.stdout) == (verdict == "fail")


def test_json(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_of_model", lambda *_: certificate("fail"))
    found = json.loads(invoke("audit", "bundled", "--json").stdout)
    assert found["verdict"] == "fail" and found["failed"] == ["Rule"] and found["format"] == 1
    assert [layer["name"] for layer in found["layers"]] == ["Bits", "Rule", "Engine"]
    assert found["layers"][0]["tests"][0]["num_samples"] == 30


def test_results_for_a_report(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_of_model", lambda *_: certificate())
    place = tmp_path / "audit.json"
    assert invoke("audit", "bundled", "--results", str(place)).exit_code == 0
    found = load_results(place)
    assert found.kind == "audit" and found.details["verdict"] == "pass" and not found.details["findings"]
    assert {each.name for each in found.figures} == {"compared", "found", "p_value"} and len(found.tables) == 3
    told = sections([found])["audit"]
    assert "**No loss was found with suffix.** 30 answers" in told and "900 samples" in told and "10 %" in told
    refused = invoke("audit", "--url", "http://localhost:9", "--results", str(tmp_path / "b.json"))
    assert refused.exit_code == 2 and "--results" in refused.stderr


def test_quick_and_the_sizes_that_are_asked_for(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def record(*given: Any) -> Certificate:
        seen.append(given)
        return certificate()

    monkeypatch.setattr(command, "_of_model", record)
    invoke("audit", "it", "--quick", "--drafter", "suffix", "--requests", "100", "--acceptance", "token")
    model, drafter, prompts, settings, llm, pace = seen[0]
    assert (model, drafter, prompts) == ("it", "suffix", None)
    assert settings == quick(AuditOptions(requests=100)) and settings.samples < AuditOptions().samples
    assert llm.acceptance == "token"
    assert settings.minutes < 3 and pace.is_limited and not pace.is_over


def test_the_count_and_the_time_left_are_shown(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*given: Any) -> Certificate:
        given[-1].begin("Bits: K=1", 16)
        given[-1].advance(7)
        return certificate()

    monkeypatch.setattr(command, "_of_model", work)
    lines = invoke("audit", "it", "--quick").stderr
    assert re.search(r"Bits: K=1, 16; 1[45]\d s left", lines)
    assert "Bits: K=1, 16\n" in invoke("audit", "it").stderr
    monkeypatch.setattr(output.sys.stderr.__class__, "isatty", lambda _: True)
    with output.TimedProgress("audit", 150.0) as progress:
        progress.say("Bits: K=1", ", 16; 150 s left")
        progress.tick(30.0, "7/16")
    drawn = capsys.readouterr().err
    assert "Bits: K=1" in drawn and "7/16" in drawn and "120 s left" in drawn


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "localhost"], "http://"),
        (["--url", "http://a", "--url", "http://b", "--url", "http://c"], "at most 2"),
        (["--samples", "-1"], "is not a whole number"),
        (["bundled", "--drafter", "none", "--quick"], "drafter"),
        (["bundled", "--quick", "--prompts", "nothing-there"], "no workload"),
        (["bundled", "--quick", "--acceptance", "nothing"], "acceptance"),
    ],
)
def test_bad_input(arguments: list[str], words: str, invoke: Invoke) -> None:
    result = invoke("audit", *arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_the_certificate_in_markdown() -> None:
    text = certificate("fail").markdown()
    assert text.startswith("# Not lossless: Rule failed.\n\n## Bits: pass\n\nEqual.\n\n| test | verdict | compared |")
    assert "| K=1 | pass | 30 answers | 7 % | 4/9 |" in text and "- block: it <i>does</i> not follow." in text
    assert "Not run: requests is 0." in text and "model: it <b>; drafter: suffix." in text
    assert "deviation 10 %, between 5 and 20 %" in certificate("measured").markdown()
