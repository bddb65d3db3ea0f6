"""FORERUN_KERNELS=triton without Triton kernels: an error with reason and remedy, never other kernels."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from families import make_family
from forerun.config import KERNELS_VARIABLE
from forerun.errors import ConfigError, UnsupportedModelError
from forerun.kernels.cpu import is_triton_selected, kernels_in_use, native, references
from forerun.models import load_model
from forerun.models.decoders import make_decoder
from forerun.models.fused import triton_backend
from forerun.models.fused.triton_backend import check_device, check_heads
from forerun.models.weight_plan import WeightPlan, library_for

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: object())


def test_nothing_else_is_taken_and_nothing_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_triton_selected() and native() is None and kernels_in_use() == "triton"
    assert library_for(CPU, torch.bfloat16) is None
    with references():
        assert not is_triton_selected()
    for other in ("auto", "native", "reference", ""):
        monkeypatch.setenv(KERNELS_VARIABLE, other)
        assert not is_triton_selected()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton_backend, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"finds no package triton.*pip install triton.*unset FORERUN_KERNELS"):
        load_model(make_family("llama", tmp_path), "float32")


@pytest.mark.usefixtures("triton_is_there")
def test_on_the_cpu_without_the_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"computed on cpu.*device='cuda'"):
        check_device(CPU, torch.float32)


@pytest.mark.usefixtures("triton_is_there")
def test_number_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"float64, but these kernels multiply float32 and bfloat16"):
        check_device(CPU, torch.float64)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_device(CPU, torch.float32)
    with pytest.raises(ConfigError, match="Unset TRITON_INTERPRET"):
        check_device(torch.device("cuda", 0), torch.float32)
    with pytest.raises(ConfigError, match=r"bfloat16, but Triton's interpreter multiplies float32"):
        check_device(CPU, torch.bfloat16)


@pytest.mark.usefixtures("triton_is_there")
def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the error of the smallest kernel is reported unchanged."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA driver version is insufficient")

    class Ones:
        def __getitem__(self, _: int) -> None: ...

    monkeypatch.setattr(triton_backend.torch, "ones", lambda *_, **__: Ones())
    monkeypatch.setattr(triton_backend.torch, "empty_like", lambda x: x)
    entered: list[torch.device] = []
    monkeypatch.setattr(triton_backend.torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    monkeypatch.setattr(triton_backend.torch.cuda, "get_device_name", lambda _: "a device")
    monkeypatch.setattr(triton_backend.torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "forerun.kernels.triton.elementwise", SimpleNamespace(add_and_norm=fails))
    with pytest.raises(ConfigError, match=r"cannot compile or run.*insufficient.*Update the driver"):
        check_device(torch.device("cuda", 1), torch.bfloat16)
    assert entered == [torch.device("cuda", 1)], "Triton launches on the current device"
    monkeypatch.setattr(triton_backend.torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match="Take a newer device"):
        check_device(torch.device("cuda"), torch.bfloat16)


def test_heads() -> None:
    check_heads("a model", 32, 8, 128)
    with pytest.raises(UnsupportedModelError, match="width 512"):
        check_heads("a model", 8, 8, 512)
    with pytest.raises(UnsupportedModelError, match="32 query heads for each key head"):
        check_heads("a model", 32, 1, 64)


@pytest.mark.usefixtures("triton_is_there")
def test_other_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    hf = SimpleNamespace(device=CPU, config=SimpleNamespace(model_type="gpt2"))
    with pytest.raises(UnsupportedModelError, match="not gpt2"):
        make_decoder(hf, WeightPlan(torch.float32, CPU, is_fused=False, library=None), None)
