"""Models in memory: `python -m tools.toys in-memory`, and the sections of `forerun bench gpu`, here on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from forerun.cli.bench import gpu
from forerun.lab.bench import padded_model as widened
from tools import toys

Invoke = Callable[..., Result]
TINY = ("--device", "cpu", "--parameters", "20M")


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "_LAYERS", ((float("inf"), 2),))
    monkeypatch.setattr(gpu, "DRAFT_PARAMETERS", "3M")


def test_a_model_in_memory_gives_the_text_of_its_source() -> None:
    done = CliRunner().invoke(toys.app, ["in-memory", "24M", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "64 of 64 greedy tokens are the source's" in done.output and "cost-padded" in done.output


def test_a_model_that_cannot_be_made_fails_its_sections_alone(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(widened, "make_wide", refuse)
    monkeypatch.setattr("forerun.lab.bench.gpu._COPIED_HERE", 1 << 10)
    done = invoke("bench", "gpu", *TINY, "--sections", "copies,the models,steps of the target")
    assert done.exit_code == 1 and "| copy |" in done.output
    assert done.output.count("failed: ValueError: no room") == 2
    done = invoke("bench", "gpu", *TINY, "--sections", "copies, two rows")
    assert done.exit_code != 0 and "'two rows', but they are: copies, the models" in f"{done.output}{done.exception}"


@pytest.mark.slow
def test_a_section_that_fails_does_not_stop_the_others(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no copy")

    monkeypatch.setattr(gpu._DeviceModels, "copies", refuse)
    monkeypatch.setattr(gpu, "NUM_PROMPTS", 1)
    monkeypatch.setattr(gpu, "PROMPT_TOKENS", 12)
    monkeypatch.setattr(gpu, "CONTEXT", 20)
    monkeypatch.setattr(gpu, "MAX_TOKENS", 3)
    monkeypatch.setattr(gpu, "DEFAULT_DTYPE", "float32")
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    monkeypatch.setattr("forerun.lab.bench.gpu.ROWS", (1, 16))
    monkeypatch.setattr("forerun.lab.bench.gpu.ROUNDS", 1)
    done = invoke("bench", "gpu", *TINY)
    assert done.exit_code == 1
    titles = [line for line in done.output.splitlines() if line.startswith("### ")]
    assert len(titles) == len(list(gpu._sections(gpu._DeviceModels(gpu.GpuOptions()))))
    assert next(part for part in done.output.split("### ") if "failed: ValueError" in part).startswith("copies")
    assert done.output.count("failed: ") == 2  # that, and the last line
    assert "| draft-tree |" in done.output and "NO" not in done.output
    assert "in int8" not in titles[-1] and "(int4, kernels reference)" in done.output
    assert "| assisted generation |" in done.output
