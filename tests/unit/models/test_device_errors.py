"""A device that fails or runs out of memory while a model is loaded is reported as a device error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import make_family
from forerun.errors import DeviceError, DeviceMemoryError
from forerun.models import load_draft_model, load_model
from forerun.models.loading.load import adopt, load_transformers_model

OURS = {
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"): DeviceError,
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."): DeviceMemoryError,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("device"))


@pytest.mark.parametrize("where", ["loading.load.move_to_device", "loading.load.probe", "self_test._prefilled"])
@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
def test_it_is_said_of_the_device(where: str, error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    hf = load_transformers_model(folder, "float32")
    monkeypatch.setattr(f"forerun.models.{where}", fail)
    for load in (load_model, load_draft_model):
        with pytest.raises(OURS[error], match=r"CUDA .*\. "):
            load(folder, "float32")
    if where != "loading.load.move_to_device":
        with pytest.raises(OURS[error]):
            adopt(hf, "it")
