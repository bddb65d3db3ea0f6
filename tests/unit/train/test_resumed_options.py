from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from forerun.errors import ConfigError
from forerun.train import accelerator
from forerun.train.accelerator import product_type
from forerun.train.checkpoint import pin, run_type


def test_a_run_is_only_continued_with_its_own_options(tmp_path: Path) -> None:
    pin(tmp_path, {"seed": 1, "lengths": (1, 2)})
    pin(tmp_path, {"seed": 1, "lengths": (1, 2)})
    with pytest.raises(ConfigError, match="seed was 1 and is 2"):
        pin(tmp_path, {"seed": 2, "lengths": (1, 2)})


def test_products_are_of_what_the_device_is_quick_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    console = Console(file=io.StringIO())
    monkeypatch.setattr(accelerator, "bfloat16_features", lambda: ("amx_bf16",))
    for is_quick, chosen, other in ((True, torch.bfloat16, "float32"), (False, torch.float32, "bfloat16")):
        monkeypatch.setattr(accelerator, "is_quick_at_bfloat16", lambda found=is_quick: found)
        assert run_type(tmp_path, "auto", cpu, console) == chosen
        assert run_type(tmp_path, other, cpu, console) == getattr(torch, other)
        (tmp_path / other).mkdir()
        pin(tmp_path / other, {"dtype": other})  # what the run began with
        assert run_type(tmp_path / other, "auto", cpu, console) == getattr(torch, other)
    quick, slow = "the processor has amx_bf16", "the processor has no instructions for bfloat16"
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        f"products in bfloat16: {quick}",
        "products in float32: as asked for",
        f"products in float32: as the run began; here it would be bfloat16 ({quick}), by --force from the beginning",
        f"products in float32: {slow}",
        "products in bfloat16: as asked for",
        f"products in bfloat16: as the run began; here it would be float32 ({slow}), by --force from the beginning",
    ]
    assert product_type("auto", torch.device("cuda")) == torch.bfloat16
    assert product_type("auto", torch.device("mps")) == torch.float32
