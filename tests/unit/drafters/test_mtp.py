"""MTP layers of checkpoints: found under both names, run as their formulas say, and refused by name where unknown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import VOCAB, make_family
from forerun import LLM, Mtp, SamplingParams
from forerun.drafters import Binding
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.mtp.checkpoint_format import read_mtp
from forerun.errors import DrafterError, IncompatibleDrafterError, ModelLoadError
from forerun.models import Model, load_model
from heads import random_head, reference_logits, states_of

LAYERS = 2
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DEEPSEEK = {
    "enorm": f"model.layers.{LAYERS}.enorm",
    "hnorm": f"model.layers.{LAYERS}.hnorm",
    "fc": f"model.layers.{LAYERS}.eh_proj",
    "norm": f"model.layers.{LAYERS}.shared_head.norm",
    "layers.0": f"model.layers.{LAYERS}",
}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "fc": "mtp.fc",
    "norm": "mtp.norm",
    "layers.0": "mtp.layers.0",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def head(plain: Path) -> StoredHead[EagleConfig]:
    return random_head(load_model(plain, "float64"), version=1, is_mtp=True, intermediate_size=48)


def with_layer(
    plain: Path,
    folder: Path,
    head: StoredHead[EagleConfig] | None,
    names: dict[str, str] = DEEPSEEK,
    change: Callable[[dict[str, Tensor]], Any] = lambda _: None,
) -> Path:
    """Copy a folder so that its weights hold a layer under these names, and its config.json names it."""
    shutil.copytree(plain, folder)
    said = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(said))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in head.tensors.items() if head is not None else ():
        start = next(each for each in names if name.startswith(f"{each}."))
        tensors[names[start] + name.removeprefix(start)] = tensor
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("names", [DEEPSEEK, QWEN], ids=["deepseek", "qwen"])
def test_a_layer_of_the_checkpoint_drafts_what_its_formulas_say(
    names: dict[str, str], plain: Path, head: StoredHead[EagleConfig], tmp_path: Path
) -> None:
    expected = LLM(load_model(plain, "float64"), None).generate([[1, 2, 3, 4], [5]], GREEDY)
    target = load_model(with_layer(plain, tmp_path / "target", head, names), "float64")
    drafter, made = Mtp(), []
    inner = drafter.draft

    def draft(sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> Any:
        drafts = inner(sequences, num_draft_tokens, min_acceptance_prob)
        made.extend((list(each.token_ids), draft.ids) for each, draft in zip(sequences, drafts, strict=True))
        return drafts

    drafter.draft = draft  # type: ignore[method-assign]
    results: Any = LLM(target, drafter, num_draft_tokens=3).generate([[1, 2, 3, 4], [5]], GREEDY)
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    passed_on = replace(head, config=replace(head.config, norm_output=names is QWEN))
    assert len(made) > 8
    for tokens, drafted in [each for each in made if each[1]][::3]:
        hidden_outputs = states_of(target, head, tokens[:-1])
        for count, token in enumerate(drafted):
            rows = [*tokens[1:], *drafted[:count]]
            assert int(reference_logits(passed_on, target, rows, hidden_outputs, count)[-1].argmax()) == token


def test_copies_of_the_targets_tables(plain: Path, head: StoredHead[EagleConfig], tmp_path: Path) -> None:
    after = f"model.layers.{LAYERS}."
    other = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(1))

    def copy(tensors: dict[str, Tensor]) -> None:
        tensors[f"{after}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{after}shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    def own_output(tensors: dict[str, Tensor]) -> None:
        tensors[f"{after}shared_head.head.weight"] = other

    for number, (change, own) in enumerate(((copy, False), (own_output, True))):
        folder = with_layer(plain, tmp_path / f"{number}", head, DEEPSEEK, change)
        read = read_mtp(load_model(folder, "float32"), str(folder))
        assert read.config.own_output_rows is own and ("lm_head.weight" in read.tensors) is own


def bind(target: Model, drafter: Mtp | None = None) -> Mtp:
    drafter = drafter or Mtp()
    drafter.bind(Binding(target, seed=1))
    return drafter


def renamed(tensors: dict[str, Tensor]) -> None:
    tensors["model.mtp_block.0.self_attn.q_proj.weight"] = torch.ones(2, 2)


def with_bias(tensors: dict[str, Tensor]) -> None:
    tensors[f"model.layers.{LAYERS}.self_attn.q_proj.bias"] = torch.ones(64)


@pytest.mark.parametrize(
    ("has_head", "change", "said"),
    [(False, renamed, "mtp_block.0.self_attn.q_proj.weight"), (True, with_bias, "self_attn.q_proj.bias")],
)
def test_an_unknown_form_is_said_and_the_target_serves_without(
    has_head: bool, change: Any, said: str, plain: Path, head: StoredHead[EagleConfig], tmp_path: Path, caplog: Any
) -> None:
    expected: Any = LLM(load_model(plain, "float64"), None).generate([[1, 2, 3]], GREEDY)
    folder = with_layer(plain, tmp_path / "target", head if has_head else None, DEEPSEEK, change)
    target = load_model(folder, "float64")
    with caplog.at_level("WARNING", logger="forerun"):
        results: Any = LLM(target, "mtp", num_draft_tokens=3).generate([[1, 2, 3]], GREEDY)
    assert said in caplog.text and "Nothing is drafted" in caplog.text
    assert results[0].token_ids == expected[0].token_ids and results[0].stats.num_draft_tokens == 0


def test_what_is_claimed_and_not_held(plain: Path, head: StoredHead[EagleConfig], tmp_path: Path) -> None:
    claimed = load_model(with_layer(plain, tmp_path / "claimed", None), "float32")
    with pytest.raises(DrafterError, match=r"speaks of 1 MTP layers .* the weights hold none"):
        bind(claimed)
    with pytest.raises(DrafterError, match="carries no MTP layers"):
        bind(load_model(plain, "float32"))

    def lacking(tensors: dict[str, Tensor]) -> None:
        del tensors[f"model.layers.{LAYERS}.eh_proj.weight"]

    folder = with_layer(plain, tmp_path / "lacking", head, DEEPSEEK, lacking)
    with pytest.raises(ModelLoadError, match=r"fc\.weight \[64, 128\] is missing"):
        read_mtp(load_model(folder, "float32"), str(folder))


def test_a_layer_of_its_own_folder(plain: Path, head: StoredHead[EagleConfig], tmp_path: Path) -> None:
    target = load_model(plain, "float32")
    save_head(tmp_path / "head", head.config, head.tensors)
    assert bind(target, Mtp(tmp_path / "head")).needs.layers == (LAYERS,)
    other = random_head(target, version=1)
    with pytest.raises(IncompatibleDrafterError, match="is no MTP layer but a head of the kind EAGLE-1"):
        bind(target, Mtp(other))
