"""Models in memory: `python -m tools.toys in-memory`, and the sections of `forerun bench gpu`, here on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from forerun.cli.bench import gpu
from forerun.train import widened
from tools import toys

Invoke = Callable[..., Result]
TINY = (
    *("--device", "cpu", "--dtype", "float32", "--parameters", "20M", "--draft-parameters", "3M", "--num-prompts", "1"),
    *("--max-tokens", "3", "--prompt-tokens", "12", "--context", "20"),
)


@pytest.fixture(autouse=True)
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "_LAYERS", ((float("inf"), 2),))


def test_a_model_in_memory_gives_the_text_of_its_source() -> None:
    done = CliRunner().invoke(toys.app, ["in-memory", "24M", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "64 of 64 greedy tokens are the source's" in done.output and "cost-padded" in done.output


def test_after_the_device_has_failed_a_new_process_goes_on(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes first fails by itself, and the next section by the device; the rest is measured elsewhere."""
    started: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        assert not check
        started.append(command)
        return SimpleNamespace(returncode=0)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def refuse(*_: object) -> None:
        raise ValueError("no copy")

    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setattr(gpu._Made, "copies", refuse)
    monkeypatch.setattr(gpu._Made, "models", fail)
    done = invoke("bench", "gpu", *TINY)
    assert done.exit_code == 1
    assert "failed: ValueError: no copy" in done.output and "failed: AcceleratorError: CUDA error" in done.output
    ((python, *command),) = started
    assert python == sys.executable and command[:4] == ["-m", "forerun", "bench", "gpu"]
    given = dict(zip(command[4::2], command[5::2], strict=True))
    assert given["--sections"].split(",") == [name for name, _ in gpu._sections(gpu.GpuOptions())][2:]
    assert given["--draft-parameters"] == "3M" and given["--device"] == "cpu"


def test_a_model_that_cannot_be_made_is_tried_once(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(source: str, *_: object) -> None:
        tried.append(source)
        raise ValueError("no room")

    monkeypatch.setattr(widened, "make_wide", refuse)
    done = invoke("bench", "gpu", *TINY, "--sections", "the models,one row,steps of the target")
    assert done.exit_code == 1 and len(tried) == 1
    assert done.output.count("failed: ModelLoadError: bundled at 20M could not be made") == 2
    done = invoke("bench", "gpu", *TINY, "--sections", "one row, two rows")
    assert done.exit_code != 0 and "'two rows', but they are: copies, the models" in f"{done.output}{done.exception}"


@pytest.mark.slow
def test_a_section_that_fails_does_not_stop_the_others(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder in PyTorch does not name its weights, so that one section cannot be measured."""
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    monkeypatch.setattr("forerun.bench.gpu.steps.ROWS", (1, 16))
    monkeypatch.setattr("forerun.bench.gpu.steps.ROUNDS", 1)
    done = invoke("bench", "gpu", *TINY)
    assert done.exit_code == 1
    titles = [line for line in done.output.splitlines() if line.startswith("### ")]
    assert len(titles) == len(list(gpu._sections(gpu.GpuOptions())))
    assert next(part for part in done.output.split("### ") if "failed: TypeError" in part).startswith("one row")
    assert done.output.count("failed: ") == 2  # that, and the last line
    assert "| draft-tree |" in done.output and "NO" not in done.output
    assert "in int8" not in titles[-1] and "(int4, kernels reference)" in done.output
    assert "| assisted generation |" in done.output
