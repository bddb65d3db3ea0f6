"""Devices are checked before anything is loaded onto them."""

from __future__ import annotations

import pytest
import torch

from forerun.errors import ConfigError
from forerun.utils import device, machine
from forerun.utils.device import bfloat16_features, is_quick_at_bfloat16, resolve_device


@pytest.mark.parametrize("name", ["cpu", torch.device("cpu"), "cpu:0"])
def test_the_cpu_is_always_there(name: str | torch.device) -> None:
    assert resolve_device(name) == torch.zeros(1).device


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:-1", None, 3.5])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not know\. Give cpu, cuda"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["meta", "xpu"])
def test_devices_that_forerun_does_not_run_on_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"device is '{name}', but forerun runs on"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps"])
def test_a_device_that_is_not_there_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=rf"device is '{name}', but PyTorch .* finds no such device.*Give cpu"):
        resolve_device(name)


def test_a_device_is_known_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda:1")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"device is 'cuda:2', but the last of its kind here is cuda:1"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(
    ("features", "by_library", "found"),
    [
        (("amx_bf16", "amx_tile", "avx512_bf16", "avx512f"), True, ("amx_bf16", "avx512_bf16")),
        (("asimd", "bf16"), True, ("bf16",)),
        (("amx_bf16",), False, ()),
        (("avx2", "avx512f", "amx_int8"), True, ()),
        ((), True, ()),
    ],
)
def test_the_processor_tells_whether_it_multiplies_bfloat16(
    features: tuple[str, ...], by_library: bool, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "features", lambda: features)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: by_library)
    assert bfloat16_features() == found and is_quick_at_bfloat16() == bool(found)
    assert not hasattr(device, "time")  # nothing is timed: every process finds the same
