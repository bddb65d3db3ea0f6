from __future__ import annotations

from pathlib import Path

import pytest
import torch

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
    for is_quick, chosen, other in ((True, torch.bfloat16, "float32"), (False, torch.float32, "bfloat16")):
        monkeypatch.setattr(accelerator, "is_quick_at_bfloat16", lambda found=is_quick: found)
        assert run_type(tmp_path, "auto", cpu) == chosen
        assert run_type(tmp_path, other, cpu) == getattr(torch, other)
        (tmp_path / other).mkdir()
        pin(tmp_path / other, {"dtype": other})  # what the run began with
        assert run_type(tmp_path / other, "auto", cpu) == getattr(torch, other)
    assert product_type("auto", torch.device("cuda")) == torch.bfloat16
    assert product_type("auto", torch.device("mps")) == torch.float32
