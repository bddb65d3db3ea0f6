"""Corpora and models small enough that training takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.models import load_transformers_model
from forerun.train.corpus import SourceFile, read_python_files, split
from forerun.train.heads import commands
from forerun.train.heads.target_states import COMPUTE, frozen_model
from forerun.train.loop import Loop
from tools.lm import Architecture, LmTraining

TINY = Architecture(
    vocab_size=320,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=64,
    context=256,
)

SHORT_RUN = LmTraining(
    architecture=TINY,
    tokens=8 * 128,
    tokens_per_step=128,
    short_window=16,
    long_window=32,
    long_share=0.25,
    checkpoint_seconds=1e9,
    threads=1,
)


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """Commands set it for their process, which goes on with the other tests here."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def float32_products() -> Iterator[None]:
    """Train heads in float32: without instructions for bfloat16, a processor is several times as fast at it."""

    def load(name: str, where: torch.device) -> Any:
        return load_transformers_model(name, "float32").eval().requires_grad_(False).to(where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPUTE, "cpu", torch.float32)
        patch.setattr(commands, "frozen_model", load)
        yield


@pytest.fixture
def bfloat16_products(float32_products: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train heads in bfloat16, as users do."""
    monkeypatch.setitem(COMPUTE, "cpu", torch.bfloat16)
    monkeypatch.setattr(commands, "frozen_model", frozen_model)


@pytest.fixture
def few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time few steps of the engine, and none before a run."""
    monkeypatch.setattr(commands, "TOKENS", 4)
    monkeypatch.setattr(Loop, "announce", lambda self, state, console: None)


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred small Python files."""
    root = tmp_path_factory.mktemp("files") / "source"
    for index in range(100):
        path = root / f"package{index % 4}" / f"module{index + 150}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"def function_{index}_{line}(value):\n    return value + {line}\n" for line in range(6)]
        path.write_text("\n".join(lines))
    return root


@pytest.fixture(scope="module")
def files(source_folder: Path) -> list[SourceFile]:
    """The training side of those files."""
    return split(read_python_files(source_folder))[0]
