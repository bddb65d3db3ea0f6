"""Corpora and models small enough that training takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forerun.train.corpus import SourceFile, read_python_files, split
from forerun.train.heads import commands
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


@pytest.fixture
def few_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time few steps of the engine."""
    monkeypatch.setattr(commands, "TOKENS", 4)


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
