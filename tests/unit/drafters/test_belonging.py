"""What is found on a machine for a target: heads by their weights, models by family, size and tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from forerun.config import BUNDLED_MODELS, SHIPPED_HEADS
from forerun.drafters import build
from forerun.drafters.belonging import belonging
from gguf_files import write_gguf

SIZES = {"vocab_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}


def model(width: int, kind: type = LlamaForCausalLM, **changes: int) -> LlamaForCausalLM:
    config = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config}[kind]
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, **SIZES, **changes}
    made: LlamaForCausalLM = kind(config(**sizes))
    return made


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(hub: Path, name: str, width: int) -> Path:
    """Put a model into the cache as the hub's client does."""
    place = hub / f"models--{name.replace('/', '--')}"
    model(width).save_pretrained(place / "snapshots" / "abc")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    return place / "snapshots" / "abc"


def test_smaller_models_of_the_family_and_vocabulary_are_found_beside_and_in_the_cache(
    tmp_path: Path, hub: Path
) -> None:
    beside = tmp_path / "models"
    for name, made in {
        "target": model(64),
        "small": model(16),
        "smaller": model(8),
        "as-large": model(60),
        "other-tokens": model(16, vocab_size=64),
        "other-family": model(16, Qwen2ForCausalLM),
    }.items():
        made.save_pretrained(beside / name)
    (beside / "damaged").mkdir()
    (beside / "damaged" / "config.json").write_text("{")
    settings = beside / "small" / "config.json"
    settings.write_text(settings.read_text().replace("{", '{"pard_token": 127,', 1))
    snapshot = cached(hub, "owner/tiny", 12)
    cached(hub, "owner/target", 64)
    found = belonging(beside / "target")
    assert [each.text for each in found] == [str(beside / "smaller"), str(snapshot), str(beside / "small")]
    assert [each.place for each in found] == ["beside the target", "owner/tiny in the Hub's cache", "beside the target"]
    assert found[0].what.startswith("llama model, ") and found[0].predicted_speedup is None
    assert found[2].what.startswith("llama parallel draft model, ")
    assert [each.text for each in belonging("owner/target")] == [str(snapshot)]
    assert belonging("owner/nothing") == []


def test_a_gguf_target_may_have_a_gguf_draft_beside_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "target.gguf", model(64))
    write_gguf(tmp_path / "draft.gguf", model(32, num_hidden_layers=1), "Q8_0")
    write_gguf(tmp_path / "other,name.gguf", model(32, num_hidden_layers=1))  # no text can name it
    assert [each.text for each in belonging(tmp_path / "target.gguf")] == [str(tmp_path / "draft.gguf")]


def test_heads_are_found_by_the_weights_of_their_target(tmp_path: Path) -> None:
    named = belonging("bundled")
    assert [each.text for each in named] == ["draft-model", "block", "eagle", "medusa"]
    assert named[2].predicted_speedup == pytest.approx(1.1, abs=0.1)
    shutil.copytree(BUNDLED_MODELS["bundled"], tmp_path / "copy")
    shutil.copytree(SHIPPED_HEADS / "eagle" / "bundled", tmp_path / "head")
    shutil.copytree(BUNDLED_MODELS["bundled-draft"], tmp_path / "draft")  # of another architecture
    shutil.copytree(BUNDLED_MODELS["bundled-other-vocab"], tmp_path / "other")
    found = {each.text: each for each in belonging(tmp_path / "copy")}
    here = {f"eagle:model={tmp_path / 'head'}", str(tmp_path / "draft")}
    assert set(found) == {"eagle", "medusa", "block", *here}
    assert "shipped" in found["eagle"].place and "EAGLE-3 head" in found["eagle"].what
    model(64).save_pretrained(tmp_path / "stranger")
    assert belonging(tmp_path / "stranger") == []


def test_auto_takes_the_hybrid_only_where_the_switch_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(64).save_pretrained(tmp_path / "target")
    model(8).save_pretrained(tmp_path / "draft")
    assert build.automatic_drafter(str(tmp_path / "target")) == "suffix"
    monkeypatch.setattr(build, "AUTO_IS_HYBRID", True)
    assert build.automatic_drafter("bundled") == "draft-model"
    assert build.automatic_drafter("owner/nothing") == "suffix"
    text = build.automatic_drafter(str(tmp_path / "target"))
    assert text == f"hybrid:sources=suffix+{tmp_path / 'draft'}"
    build.build_drafter(text)
