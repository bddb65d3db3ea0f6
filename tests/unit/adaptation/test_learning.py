"""A drafter learns from what is served: its copy drafts once it is better, each tenant's apart, and the text stays."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forerun.engine.llm
from forerun import LLM, Eagle, SamplingParams, Sequence, Suffix
from forerun.adaptation.adaptation import _MOST_KEPT, _forget_oldest
from forerun.config import AdaptOptions
from forerun.errors import ConfigError, DrafterError
from learning_drafters import accepted, learn, noisy

Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def plain(texts: list[str]) -> list[list[int]]:
    return accepted(LLM("bundled", None, dtype="float32"), texts[:18])[1]


@pytest.mark.slow
def test_a_damaged_head_learns_and_is_swapped_in_and_kept(
    learning: Make, damaged: Any, texts: list[str], plain: list[list[int]], tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "forerun.adaptation.pupil")
    llm = learning(Eagle(damaged), adapt_folder=str(tmp_path / "kept"))
    _, answers = accepted(llm, texts[:14])
    assert answers == plain[:14]
    with pytest.raises(ConfigError, match="none was better"):
        llm.adapting.save(tmp_path / "copy")  # type: ignore[union-attr]
    pupil = learn(llm)
    progress = pupil.progress
    assert progress.swaps == 1
    assert progress.is_adapted
    assert progress.judged["copy"] > progress.judged["original"]
    assert progress.after > progress.before
    assert [record.getMessage() for record in caplog.records][-1].startswith("a head was swapped for its copy")
    after, answers = accepted(llm, texts[14:18])
    assert answers == plain[14:18]
    unadapted, _ = accepted(learning(Eagle(damaged)), texts[14:18])
    assert after > unadapted + 0.15

    assert llm.adapting is not None
    llm.adapting.save(tmp_path / "copy")
    assert "learnt" in (tmp_path / "copy" / "README.md").read_text()
    saved = LLM("bundled", Eagle(tmp_path / "copy"), num_draft_tokens=3, dtype="float32")
    assert accepted(saved, texts[14:18])[0] == pytest.approx(after, abs=0.02)

    llm.close()
    again = learning(Eagle(damaged), adapt_folder=str(tmp_path / "kept"))
    assert again.adapting is not None
    assert again.adapting.progress().is_adapted
    assert again.adapting.rings.tenants()[None] == llm.adapting.rings.tenants()[None]  # type: ignore[attr-defined]
    assert accepted(again, texts[14:18])[0] == pytest.approx(after, abs=0.02)
    again.close()
    weights = tmp_path / "kept" / "all" / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    third = learning(Eagle(damaged), adapt_folder=str(tmp_path / "kept"))
    assert not third.adapting.progress().is_adapted  # type: ignore[union-attr]
    assert "not taken up" in caplog.text


def test_a_copy_that_was_made_worse_never_drafts_and_leaves_if_it_does(
    learning: Make, damaged: Any, texts: list[str], plain: list[list[int]]
) -> None:
    llm = learning("eagle")
    accepted(llm, texts[:14])
    adapting: Any = llm.adapting
    adapting._restore(None)
    pupil = adapting._pupils[None]
    worse = noisy(pupil.tensors(), 1.5)
    _, newest = adapting.rings.split(None)
    pupil._begin(worse)
    list(pupil._judge(newest))
    assert pupil.progress.swaps == 0
    assert pupil.progress.judged["copy"] < pupil.progress.judged["original"]
    assert torch.equal(pupil.tensors()["fc.weight"], adapting._original["fc.weight"])  # it begins anew
    list(pupil._judge(newest))
    assert pupil.progress.swaps == 0  # equal ones are not beyond chance

    good, _ = accepted(llm, texts[14:18])
    pupil._swap(worse, torch.zeros(1), torch.zeros(1))
    bad, answers = accepted(llm, texts[14:18])
    assert bad < good - 0.2
    assert answers == plain[14:18]
    list(pupil._judge(newest))
    assert pupil.progress.swaps_back == 1
    assert accepted(llm, texts[14:18])[0] == pytest.approx(good, abs=0.02)


@pytest.mark.slow
def test_a_poisoned_tenant_teaches_its_own_copy_alone(learning: Make, texts: list[str], plain: list[list[int]]) -> None:
    llm = learning("eagle")
    clean, _ = accepted(llm, texts[14:18], "clean")
    accepted(llm, texts[:4], "poisoned")
    adapting: Any = llm.adapting
    rings = adapting.rings
    with torch.inference_mode():
        for segment in rings._rings["poisoned"]._segments:
            segment.token_ids.random_(0, 4096)
            segment.states.normal_()
    adapting._restore("poisoned")
    pupil = adapting._pupils["poisoned"]
    older, _ = rings.split("poisoned")
    for tokens in (384, 768):
        list(pupil.round(older, [], tokens))
    pupil._swap(pupil.tensors(), torch.zeros(1), torch.zeros(1))  # whatever its judge says
    poisoned, answers = accepted(llm, texts[14:18], "poisoned")
    assert answers == plain[14:18]
    assert poisoned < clean
    assert accepted(llm, texts[14:18], "clean") == (clean, plain[14:18])
    assert "clean" not in adapting._pupils
    mixed = [accepted(llm, texts[14:16], tenant)[1] for tenant in ("clean", "poisoned", None)]
    assert mixed == [plain[14:16]] * 3


@pytest.mark.slow
def test_a_draft_model_learns_in_its_last_layers(
    learning: Make, texts: list[str], plain: list[list[int]], tmp_path: Path
) -> None:
    llm = learning("draft-model")
    before, answers = accepted(llm, texts[:6])
    assert answers == plain[:6]
    adapting: Any = llm.adapting
    names = {name.split(".")[2] for name in adapting._original if ".layers." in name}
    assert len(names) == 2
    adapting._adaptable.swap(None, adapting._original)
    assert accepted(llm, texts[:6])[0] == pytest.approx(before, abs=0.02)
    drafter = adapting._adaptable._drafter
    first = drafter._copies[None].drafting_model
    worse = noisy(adapting._original, 1.0)
    adapting._adaptable.swap(None, worse)
    models = [drafter.drafting_model, first, drafter._copies[None].drafting_model]
    sequences = [Sequence(0, [1], 1, SamplingParams(tenant=tenant)) for tenant in (None, "1", "key")]
    owners = [model._owner(sequence) for model in models for sequence in sequences]
    assert len({*owners}) == len(owners)
    rate, answers = accepted(llm, texts[:6])
    assert rate < before - 0.2
    assert answers == plain[:6]
    adapting._restore(None)
    pupil = adapting._pupils[None]
    older, _ = adapting.rings.split(None)
    pupil._original = worse
    pupil._begin(worse)
    segments = older[:4]
    losses = [sum(float(adapting._learner.loss(pupil.module, each).detach()) for each in segments)]
    for _ in range(4):
        list(pupil._step(segments))
        losses.append(sum(float(adapting._learner.loss(pupil.module, each).detach()) for each in segments))
    assert losses[-1] < 0.9 * losses[0]
    pupil._swap(pupil.tensors(), torch.zeros(1), torch.zeros(1))
    learnt, answers = accepted(llm, texts[:6])
    assert learnt > rate + 0.1
    assert answers == plain[:6]
    adapting.save(tmp_path / "draft")
    read = adapting._learner.read(tmp_path / "draft")
    assert all(torch.allclose(read[name], each, rtol=1e-2) for name, each in pupil.serving.items())
    saved = LLM("bundled", str(tmp_path / "draft"), num_draft_tokens=3, dtype="float32")
    assert accepted(saved, texts[:6])[0] == pytest.approx(learnt, abs=0.1)


def test_a_draft_model_is_saved_in_the_middle_of_its_learning(learning: Make, texts: list[str], tmp_path: Path) -> None:
    llm = learning("draft-model")
    accepted(llm, texts[:4])
    adapting: Any = llm.adapting
    learner = adapting._learner
    drafts = noisy(adapting._original, 1.0)
    module = learner.module(adapting._original)
    saved: list[Path] = []

    def save(*_: object) -> None:
        if not saved:
            saved.append(tmp_path / "draft")
            learner.save(saved[0], drafts, {})

    with learner._model.get_output_embeddings().register_forward_pre_hook(save):
        older, newest = adapting.rings.split(None)
        learner.loss(module, [*older, *newest][0]).backward()
    assert all(torch.equal(each, adapting._original[name]) for name, each in learner.parameters(module).items())
    read = learner.read(saved[0])
    assert all(torch.allclose(read[name], each, rtol=1e-2) for name, each in drafts.items())


@pytest.mark.parametrize(
    ("drafter", "said"), [(None, "no drafter"), (Suffix(), "Suffix"), ("medusa", "Medusa"), ("staged", "Staged")]
)
def test_what_cannot_learn_is_told_with_what_can(drafter: Any, said: str) -> None:
    with pytest.raises(DrafterError, match=rf"nothing of {said} can go on learning. Give an EAGLE head .* draft model"):
        LLM("bundled", drafter, adapt=True)


def test_nothing_begins_before_there_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        assert "forerun-adapt" not in {each.name for each in threading.enumerate()}
        raise ConfigError("no engine")

    monkeypatch.setattr(forerun.engine.llm, "Engine", fails)
    with pytest.raises(ConfigError, match="no engine"):
        LLM("bundled", "eagle", dtype="float32", num_draft_tokens=3, adapt=True)


def test_the_folders_of_few_tenants_stay(tmp_path: Path) -> None:
    for number in range(_MOST_KEPT + 2):
        ring = tmp_path / f"tenant-{number}" / "ring.safetensors"
        ring.parent.mkdir()
        ring.touch()
        os.utime(ring, (number, number))
    _forget_oldest(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {f"tenant-{number}" for number in range(2, _MOST_KEPT + 2)}


def test_requests_while_it_learns_in_its_thread(damaged: Any, texts: list[str], plain: list[list[int]]) -> None:
    with LLM("bundled", Eagle(damaged), num_draft_tokens=3, dtype="float32", adapt=AdaptOptions(adapt=True)) as llm:
        adapting: Any = llm.adapting
        adapting._round_tokens = 64
        threads = torch.get_num_threads()
        for start in range(0, 12, 4):
            assert accepted(llm, texts[start : start + 4])[1] == plain[start : start + 4]
            for _ in range(200):
                if adapting.total()["steps"]:
                    break
                adapting._closing.wait(0.05)
        assert adapting.total()["steps"] > 0
        assert torch.get_num_threads() == threads
    assert not adapting._thread.is_alive()


@pytest.mark.parametrize("comes", ["before", "after"])
def test_a_request_is_made_way_for_within_a_piece_of_work(
    learning: Make, damaged: Any, texts: list[str], comes: str
) -> None:
    """One that comes before the forward pass of a segment, and one that comes after it, before the backward pass."""
    llm = learning(Eagle(damaged))
    accepted(llm, texts[:8])
    adapting: Any = llm.adapting
    busy, came, went = threading.Event(), threading.Event(), threading.Event()
    adapting._is_busy = busy.is_set
    original = adapting._learner.loss

    def loss(*given: Any) -> torch.Tensor:
        if comes == "before" and not came.is_set():
            busy.set()
            came.set()
        found: torch.Tensor = original(*given)
        if comes == "before":
            went.set()
        elif not came.is_set():
            found.register_hook(lambda _: went.set())  # type: ignore[no-untyped-call]
            busy.set()
            came.set()
        return found

    adapting._learner.loss = loss
    learns = threading.Thread(target=learn, args=(llm,))
    learns.start()
    assert came.wait(60)
    assert not went.wait(0.3)
    busy.clear()
    assert went.wait(60)
    adapting._closing.set()
    learns.join()
