"""Heads as folders: what is written is what is read, and what is damaged or does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import HeadHeader, head_header, load_head, save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.errors import ConfigError, ModelLoadError
from head_cases import EAGLE_1, EAGLE_3, EXTENDED, random_d2t, random_tensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save(folder: Path, config: EagleConfig, **options: Any) -> tuple[dict[str, Tensor], Tensor | None]:
    tensors, d2t = random_tensors(config), random_d2t(config)
    save_head(folder, config, tensors, d2t, {"steps": 3, "notes": ["a"]}, fingerprint="1-2-3--", **options)
    return tensors, d2t


def same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)


PUBLISHED = replace(
    EAGLE_3,
    num_layers=2,
    biases=("fc", "layers.1.mlp.down_proj"),
    rope_scaling={"rope_type": "linear", "factor": 2.0},
    head_norms=True,
    norm_all_before_fc=True,
)


@pytest.mark.parametrize("config", [EAGLE_1, EAGLE_3, EXTENDED, PUBLISHED], ids=["1", "3", "extended", "published"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_written_is_read(config: EagleConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config).items()}
    d2t = random_d2t(config)
    save_head(tmp_path / "head", config, tensors, d2t, {"steps": 3}, fingerprint="f", number_format="int8")
    head = load_head(tmp_path / "head")
    assert head.config == config
    assert head.tensors.keys() == config.tensors().keys()
    assert all(torch.equal(head.tensors[name], tensor) for name, tensor in tensors.items())
    assert same(head.d2t, d2t)
    assert head_header(tmp_path / "head") == HeadHeader(config, dtype, is_quantized=False)
    assert (head.fingerprint, head.number_format, head.record, head.form) == ("f", "int8", {"steps": 3}, "forerun")


def test_codes_of_8_bits(tmp_path: Path) -> None:
    tensors, d2t = save(tmp_path / "head", EXTENDED, quantize="int8")
    head = load_head(tmp_path / "head")
    matrices = {name for name, tensor in tensors.items() if tensor.dim() == 2}
    assert head.quantized.keys() == matrices
    for name, tensor in tensors.items():
        step = tensor.abs().amax(-1, keepdim=True) / 127
        assert ((head.tensors[name] - tensor).abs() <= step * (0.5001 if name in matrices else 0)).all()
    assert same(head.d2t, d2t)
    header = head_header(tmp_path / "head")
    assert header == HeadHeader(EXTENDED, torch.float32, is_quantized=True)
    quantized = sum(code.quantized.nbytes + code.scale.nbytes for code in head.quantized.values())
    assert header.nbytes == quantized + sum(tensor.nbytes for tensor in head.tensors.values())
    assert head.nbytes < sum(tensor.nbytes for tensor in tensors.values()) / 3


def test_a_folder_that_is_there_is_written_anew(tmp_path: Path) -> None:
    save(tmp_path, EAGLE_3)
    (tmp_path / "README.md").write_text("card")
    save(tmp_path, EAGLE_1)
    assert load_head(tmp_path).config == EAGLE_1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", CONFIG, WEIGHTS]


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG])
@pytest.mark.parametrize("place", [0.0, 0.02, 0.5, 0.999])
def test_a_flipped_byte_is_found(file: str, place: float, tmp_path: Path) -> None:
    save(tmp_path, EAGLE_3)
    content = bytearray((tmp_path / file).read_bytes())
    content[int(place * len(content))] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"Download|\.json"):
        load_head(tmp_path)


def test_weights_cut_short_or_gone(tmp_path: Path) -> None:
    save(tmp_path, EAGLE_3)
    content = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content[:-1])
    with pytest.raises(ModelLoadError, match="damaged"):
        load_head(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load_head(tmp_path)
    (tmp_path / CONFIG).unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_head(tmp_path)


def resealed(folder: Path, **changes: Any) -> None:
    """Change config.json as somebody who knows the checksum would."""
    from forerun.drafters.models.head_files.folder import _checksum

    said = json.loads((folder / CONFIG).read_text())
    for key, value in changes.items():
        said[key] = {**said[key], **value} if isinstance(value, dict) else value
    said["checksum"] = _checksum(said, (folder / WEIGHTS).read_bytes())
    (folder / CONFIG).write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head": {"hidden_size": 48}}, "must have"),
        ({"head": {"num_heads": 3}}, "the first must be a multiple"),
        ({"head": {"layers": [1, 4, 9, 12]}}, r"fc\.weight has shape"),
        ({"head": {"layers": "all"}}, "layers is 'all'"),
        ({"head": {"norm_output": 1}}, "norm_output is 1"),
        ({"head": {"colour": 1}}, "colour is unknown"),
        ({"head": {"draft_vocab_size": 64}}, r"d2t is \[40\]"),
        ({"head": {"own_output_rows": True}}, r"lm_head\.weight \[40, 32\] is missing"),
        ({"head": {"norm_before_fc": False}}, r"the tensor fc_norm\.0\.weight is none"),
        ({"format_version": 2}, "format_version is 2"),
        ({"format": "other"}, "format is 'other'"),
    ],
)
def test_a_configuration_that_the_tensors_contradict(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    save(tmp_path, EXTENDED)
    resealed(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=said):
        load_head(tmp_path)


def test_fields_of_earlier_versions_are_read(tmp_path: Path) -> None:
    save(tmp_path, EAGLE_1)
    resealed(tmp_path, head={"attention_gate": False, "rotated": None})
    assert load_head(tmp_path).config == EAGLE_1
    resealed(tmp_path, head={"attention_gate": True})
    with pytest.raises(ModelLoadError, match="attention_gate is unknown"):
        load_head(tmp_path)


def test_what_was_never_set_is_neither_written_nor_read(tmp_path: Path) -> None:
    tensors = random_tensors(EAGLE_3)
    tensors["norm.weight"][3] = torch.nan
    with pytest.raises(ConfigError, match=r"norm\.weight holds 1 numbers that are NaN"):
        save_head(tmp_path / "head", EAGLE_3, tensors, random_d2t(EAGLE_3))
    assert not (tmp_path / "head").exists()


def test_nan_in_a_file_is_found(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save(tmp_path, EAGLE_3)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["fc.weight"][1, 2] = torch.nan
    save_file(tensors, tmp_path / WEIGHTS)
    resealed(tmp_path)
    with pytest.raises(ModelLoadError, match=r"fc\.weight holds 1 numbers"):
        load_head(tmp_path)


def refused(tensors: dict[str, Tensor], d2t: Tensor | None, said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        save_head(folder, EAGLE_3, tensors, d2t)
    assert not folder.exists()


def test_tensors_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    folder, tensors, d2t = tmp_path / "head", random_tensors(EAGLE_3), random_d2t(EAGLE_3)
    assert d2t is not None
    fc = tensors["fc.weight"]
    refused({**tensors, "fc.weight": fc[:, 1:]}, d2t, r"fc\.weight has shape", folder)
    refused({**tensors, "fc.weight": fc.to(torch.int8)}, d2t, r"stored as int8", folder)
    refused({**tensors, "fc.bias": fc[0]}, d2t, r"fc\.bias is none of such", folder)
    refused({**tensors, "midlayer.scale": fc[0]}, d2t, r"midlayer\.scale is none", folder)
    refused({name: each for name, each in tensors.items() if name != "norm.weight"}, d2t, r"norm\.weight", folder)
    refused(tensors, None, "d2t is missing", folder)
    refused(tensors, d2t[1:], r"d2t is \[39\]", folder)
    refused(tensors, d2t.float(), "of float32", folder)
    for index, offset in [(0, -1), (39, 64), (0, 1 << 62), (39, (1 << 63) - 1)]:
        refused(tensors, d2t.index_fill(0, torch.tensor([index]), offset), "outside of the target's 96", folder)
    twice = d2t.clone()
    twice[1] = d2t[0] - 1
    refused(tensors, twice, "the same token", folder)


def test_offsets_of_zero_for_all_tokens_say_nothing(tmp_path: Path) -> None:
    whole = replace(EAGLE_3, draft_vocab_size=EAGLE_3.vocab_size)
    save_head(tmp_path, whole, random_tensors(whole), torch.zeros(whole.vocab_size, dtype=torch.int64))
    head: StoredHead = load_head(tmp_path)
    assert head.d2t is None
