"""Which drafter a target gets that none was asked for, and where its head comes from."""

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, Eagle, Suffix
from forerun.drafters import DRAFTERS, chosen_drafter
from forerun.drafters.models.head_files.folder import save_head, shipped_head
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.engine import AsyncLLM
from forerun.errors import ConfigError, DrafterError, ModelLoadError
from forerun.models import load_model
from heads import AdditiveModel, aligned_head


@pytest.fixture
def target() -> Any:
    return AdditiveModel()


@pytest.fixture
def shipped(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a head for `target` among the shipped ones."""
    folder = tmp_path / "eagle" / "additive"
    folder.parent.mkdir()
    head = aligned_head(target)
    save_head(folder, head.config, head.tensors, fingerprint=target_fingerprint(target))
    monkeypatch.setattr("forerun.drafters.models.head_files.folder.SHIPPED_HEADS", tmp_path)
    monkeypatch.setattr("forerun.drafters.registry.SHIPPED_HEADS", tmp_path)
    return folder


def test_what_was_asked_for_is_taken(target: Any, shipped: Path) -> None:
    drafter = Suffix()
    assert chosen_drafter(drafter, target) is drafter
    assert chosen_drafter("some/draft", target) == "some/draft"
    assert chosen_drafter(None, target) is None and chosen_drafter("none", target) is None


def test_by_the_target(target: Any, shipped: Path) -> None:
    assert chosen_drafter("auto", target) == "suffix", "whatever head is shipped for it"
    assert chosen_drafter("auto", load_model("bundled")) == chosen_drafter("auto", "bundled") == "draft-model"
    assert chosen_drafter("auto", "some/folder") == "suffix", "what is planned for before the weights are read"


def test_a_shipped_head_is_found_by_the_weights(target: Any, shipped: Path) -> None:
    assert shipped_head(target) == shipped
    assert shipped_head(target, "another-kind") is None
    other = AdditiveModel()
    other.embedding_rows = lambda token_ids: -AdditiveModel.embedding_rows(other, token_ids) + 0.5  # type: ignore[method-assign]
    assert shipped_head(other) is None, "of the same sizes, with other weights"
    llm = LLM(target, "eagle")
    assert isinstance(llm.drafter, Eagle) and llm.drafter_name == "eagle"
    assert llm.generate([[3, 4]])[0].token_ids
    assert DRAFTERS["eagle"].serves("additive") and not DRAFTERS["eagle"].serves("../eagle/additive")


def test_without_one_it_says_what_to_give(target: Any) -> None:
    with pytest.raises(DrafterError, match=r"ships no head for .*eagle:model="):
        LLM(target, "eagle")


def test_a_damaged_one_is_an_error(target: Any, shipped: Path) -> None:
    (shipped / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="damaged"):
        LLM(target, "eagle")


def test_llm_says_what_was_chosen(target: Any, shipped: Path) -> None:
    assert LLM(target).drafter_name == "suffix"
    assert LLM(target, None).drafter_name is None and LLM(target, "none").drafter is None
    assert LLM(target, Suffix()).drafter_name == "Suffix"


def test_async_llm_takes_an_llm_without_a_drafter_beside_it(target: Any) -> None:
    with pytest.raises(ConfigError, match="drafter, which it has already"):
        AsyncLLM(LLM(target), None)
