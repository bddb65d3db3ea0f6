"""The native library is loaded only for models that it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from families import make_family
from forerun.errors import NativeUnavailableError
from forerun.kernels import cpu as module
from forerun.kernels.cpu import kernels_in_use
from forerun.models import load_model


def test_one_line_for_the_models_that_lose_by_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FORERUN_KERNELS", raising=False)
    monkeypatch.setattr(module, "_loaded", NativeUnavailableError("Why.", "What to do."))
    monkeypatch.setattr(module, "_warned", False)
    folder = make_family("llama", tmp_path)
    load_model(folder, "float64")
    assert "native kernels" not in caplog.text
    for dtype in ("float32", "bfloat16"):
        assert load_model(folder, dtype).kernels == kernels_in_use() == "reference"
    assert caplog.text.count("There are no native kernels. Why.") == 1


def test_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_KERNELS", raising=False)
    monkeypatch.setattr(module, "_loaded", None)
    assert kernels_in_use() is None
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    assert kernels_in_use() == "reference"
