"""GGUF tensors have the numbers of the gguf package's own dequantization."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from forerun.models.loading.gguf import file as tensor_module
from forerun.models.loading.gguf.file import GgufFile, read_types
from gguf_files import pack


def written(folder: Path, type_name: str, shape: tuple[int, ...]) -> tuple[GgufFile, torch.Tensor]:
    packed, meaning = pack(np.random.default_rng(0).normal(size=shape).astype(np.float32), type_name)
    writer = gguf.GGUFWriter(folder / "one.gguf", "llama")
    writer.add_tensor("first", np.ones(3, np.float32))
    writer.add_tensor("it", packed, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile.open(folder / "one.gguf"), meaning


@pytest.mark.parametrize("type_name", read_types())
def test_the_numbers_are_those_of_the_gguf_package(
    type_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, meaning = written(tmp_path, type_name, (3, 512))
    tensor = file.tensors["it"]
    assert tensor.shape == (3, 512) and tensor.type_name == type_name
    assert tensor.is_quantized == (type_name not in ("F32", "F16", "BF16"))
    for part in (tensor_module._PART, 256):  # in one part, and in several that end within rows
        monkeypatch.setattr(tensor_module, "_PART", part)
        assert torch.equal(tensor.dequantize(torch.float32), meaning)
        assert torch.equal(tensor.dequantize(torch.float64), meaning.double())
        assert torch.equal(tensor.dequantize(torch.bfloat16), meaning.bfloat16())


def test_what_is_dequantized_is_a_copy(tmp_path: Path) -> None:
    file, meaning = written(tmp_path, "F32", (2, 1 << 14))
    file.tensors["it"].dequantize(torch.float32).zero_()
    assert torch.equal(file.tensors["it"].dequantize(torch.float32), meaning)
