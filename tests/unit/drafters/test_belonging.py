"""What is found on a machine for a target: heads by their weights, models by family, size and tokens."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from forerun import LLM, Hybrid
from forerun.config import BUNDLED_MODELS, MEMORY_LOG, SHIPPED_HEADS, EngineConfig
from forerun.drafters import belonging as module
from forerun.drafters.belonging import belonging
from forerun.drafters.build import automatic_drafter, chosen_drafter, with_auto
from forerun.drafters.hybrid.by_request import ByRequest
from forerun.drafters.parse_text import hybrid_of
from forerun.engine import memory_division
from forerun.engine.memory_division import MemoryPlan
from forerun.errors import DrafterError, ForerunError, ModelLoadError, NotEnoughMemoryError
from forerun.models import load_model
from forerun.utils.machine import GIB
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


@pytest.mark.parametrize("name", ["draft", "c++, 草稿"])
def test_auto_is_the_hybrid_with_what_is_found(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model(64).save_pretrained(tmp_path / "target")
    model(8).save_pretrained(tmp_path / name)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_bytes((tmp_path / name / "config.json").read_bytes())
    (tmp_path / "damaged" / "model.safetensors").write_bytes((tmp_path / name / "model.safetensors").read_bytes()[:-8])
    assert automatic_drafter("bundled") == "draft-model"
    assert automatic_drafter("owner/nothing") == automatic_drafter("no-such") == "suffix"
    text = automatic_drafter(str(tmp_path / "target"))
    assert text == hybrid_of("suffix", str(tmp_path / name))
    with caplog.at_level(logging.INFO, MEMORY_LOG):
        llm = LLM(tmp_path / "target", dtype="float32")
    assert llm.drafter_name == text and isinstance(llm.drafter, Hybrid)
    found, plan = (record.getMessage() for record in caplog.records[:2])
    assert f"auto is {text}" in found and "suffix" in found
    assert f"of {tmp_path / name}" in plan
    plain = LLM(tmp_path / "target", "none", dtype="float32").generate([1, 2, 3], max_tokens=12, temperature=0)
    assert llm.generate([1, 2, 3], max_tokens=12, temperature=0).token_ids == plain.token_ids
    assert LLM(llm.target).drafter_name == text, "of a loaded target, too"
    assert LLM(llm.target, "suffix").drafter_name == "suffix"


@pytest.mark.parametrize(("pages", "said"), [(3, "holds 64 tokens instead of 128"), (2, "one sequence of 128 tokens")])
@pytest.mark.parametrize("given", ["auto", ["auto", "prediction"]], ids=str)
def test_auto_leaves_out_what_does_not_fit(
    given: str | list[str],
    pages: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model(64).save_pretrained(tmp_path / "target")
    model(24, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    target = tmp_path / "target"
    monkeypatch.setattr(memory_division, "total_memory", lambda: 64 * GIB)
    least = MemoryPlan.of(target, "suffix", EngineConfig(), dtype="float32")
    assert isinstance(MemoryPlan.of(target, given, EngineConfig(), dtype="float32").drafter, (str, ByRequest))
    room = least.target.weights + least.scratch + pages * least.target.page_nbytes
    monkeypatch.setattr(memory_division, "available_memory", lambda: room)
    with caplog.at_level(logging.INFO, MEMORY_LOG):
        llm = LLM(target, given, dtype="float32")
    assert llm.drafter is not None and not llm.drafter.models_to_load(str(target))
    (warning,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert warning.startswith(f"auto leaves out {hybrid_of('suffix', str(tmp_path / 'draft'))}") and said in warning


@pytest.mark.parametrize(
    "error", [ModelLoadError("it is damaged"), NotEnoughMemoryError("it is damaged", 2, 1)], ids=str
)
def test_auto_leaves_out_what_cannot_be_loaded(
    error: ForerunError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model(64).save_pretrained(tmp_path / "target")
    model(8).save_pretrained(tmp_path / "draft")

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("forerun.drafters.models.draft_model.load_draft_model", fails)
    assert LLM(tmp_path / "target", dtype="float32").drafter_name == "suffix"
    assert "auto leaves out" in caplog.text and "it is damaged" in caplog.text
    with pytest.raises(type(error), match="it is damaged"):
        LLM(tmp_path / "target", str(tmp_path / "draft"), dtype="float32")


def test_auto_loads_no_draft_model_for_a_target_without_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "SHIPPED_HEADS", tmp_path / "nothing")
    for name, source in (("target", "bundled"), ("draft", "bundled-draft")):
        shutil.copytree(BUNDLED_MODELS[source], tmp_path / name)
    target = load_model(tmp_path / "target")
    assert automatic_drafter(target.name) == hybrid_of("suffix", str(tmp_path / "draft"))
    monkeypatch.setattr("forerun.drafters.models.draft_model.load_draft_model", None)
    assert LLM(target).drafter_name == "suffix"
    assert "was loaded without its tokenizer" in caplog.text


def test_what_was_found_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_COST_CACHE", "1")
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path / "home"))
    model(64).save_pretrained(tmp_path / "target")
    model(8).save_pretrained(tmp_path / "draft")
    first = belonging(tmp_path / "target")
    monkeypatch.setattr(module, "_known", {})  # another process
    with monkeypatch.context() as patch:
        patch.setattr(module, "_Target", None)
        assert belonging(tmp_path / "target") == belonging(tmp_path / "target") == first != []
    model(8, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    assert belonging(tmp_path / "target") != first
    (tmp_path / "draft" / "config.json").unlink()
    assert belonging(tmp_path / "target") == []


def test_a_file_larger_than_its_target_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "target.gguf", model(64))
    write_gguf(tmp_path / "larger.gguf", model(96))
    read: list[Path] = []
    own = module._Target.__init__
    monkeypatch.setattr(module._Target, "__init__", lambda self, path: (read.append(path), own(self, path))[0])
    assert belonging(tmp_path / "target.gguf") == []
    assert read == [tmp_path / "target.gguf"]


def test_what_cannot_be_read_hides_nothing_else(tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(64).save_pretrained(tmp_path / "target")
    model(8).save_pretrained(tmp_path / "draft")
    (tmp_path / "locked").mkdir()
    snapshot = cached(hub, "owner/tiny", 12)
    cached(hub, "owner/damaged", 12)
    (hub / "models--owner--damaged" / "refs" / "main").write_bytes(b"\xff\xfe")
    is_file = Path.is_file

    def refuses(path: Path) -> bool:
        if path.parent.name == "locked":
            raise PermissionError(path)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuses)
    assert [each.text for each in belonging(tmp_path / "target")] == [str(tmp_path / "draft"), str(snapshot)]


def test_nothing_found_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(64).save_pretrained(tmp_path / "target")
    assert belonging(tmp_path / "target") == []
    monkeypatch.setattr(module, "_Target", None)
    assert belonging(tmp_path / "target") == []


def test_requests_may_name_suffix_beside_auto(tmp_path: Path) -> None:
    model(64).save_pretrained(tmp_path / "target")
    model(8).save_pretrained(tmp_path / "draft")
    target = load_model(tmp_path / "target", "float32")

    def names(*drafters: str) -> list[str]:
        drafter = LLM(target, drafters).drafter
        assert drafter is not None
        return list(drafter.offers)

    assert names("auto", "prediction") == ["hybrid", "prediction", "suffix"]
    assert names("auto", "suffix:min_match=3") == ["hybrid", "suffix"]
    assert names("auto", "hybrid:sources=suffix+prompt-lookup") == ["suffix", "hybrid"]
    assert with_auto(["auto", "prediction", "suffix:min_match=3"], "suffix") == ["suffix:min_match=3", "prediction"]
    bundled = chosen_drafter(["auto", "suffix", "hybrid:sources=suffix+recycling"], "bundled")
    assert isinstance(bundled, ByRequest) and list(bundled.offers) == ["draft-model", "suffix", "hybrid"]
    (tmp_path / "draft" / "config.json").unlink()
    with pytest.raises(DrafterError, match="Two drafters are called 'suffix'"):
        names("auto", "suffix")
