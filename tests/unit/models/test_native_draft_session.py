"""Chains that grow row by row have the bits of forwards, in any batch composition, with many threads beside one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import VOCAB, make_family
from forerun.drafters.models.eagle.model import EagleModel
from forerun.kernels.cpu import native
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import LanguageModel, Model, Rows, load_model
from forerun.models.draft_session import DraftSession, Pick
from heads import random_head
from kernel_cases import threads

PROMPTS = (list(range(5, 5 + PAGE - 3)), [3, 1, 4], [2] * (2 * PAGE - 1))
FIRST = ([7, 8], [9], [1, 2, 3])
LATER = ([4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4])


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if native() is None:
        pytest.skip("there are no native kernels here")


def prepared(model: LanguageModel, states: Sequence[Tensor] | None = None) -> list[Any]:
    """Return a cache that holds each prompt. states: that heads read, at least one for each token."""
    caches = [model.new_cache() for _ in PROMPTS]
    for index, (cache, prompt) in enumerate(zip(caches, PROMPTS, strict=True)):
        model.forward([Rows(cache, prompt, states=None if states is None else states[index][: len(prompt)])])
        cache.commit(range(len(prompt)))
    return caches


def begun(model: LanguageModel, caches: Sequence[Any], with_probability: bool = True) -> DraftSession:
    chains = model.draft_session(caches, Pick(model.vocab_size, with_probability))
    assert chains is not None
    return chains


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("qwen3", each) for each in ({}, {"quantize": "int8"}, {"dtype": "float32", "quantize": "int4"})),
        *((family, {}) for family in ("gpt2", "ministral3", "apertus", "nanochat")),
    ],
    ids=str,
)
def test_bits_are_those_of_forwards(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Feed several tokens at first, then one by one over the border of a page; one chain ends on the way."""
    model = load_model(make_family(family, tmp_path), **{"dtype": "bfloat16", **options})
    caches, alone = prepared(model), prepared(model)
    with threads(16):
        chains = begun(model, caches)
    members = [0, 1, 2]
    for step in range(7):
        tokens = [FIRST[i] if step == 0 else [LATER[i][step - 1]] for i in members]
        found = chains.advance(tokens)
        expected = torch.cat(
            [model.forward([Rows(alone[i], each, None, 1)]).logits for i, each in zip(members, tokens, strict=True)]
        )
        assert torch.equal(found.logits, expected)
        assert found.columns == expected.argmax(-1).tolist()
        assert found.probabilities == pytest.approx(expected.softmax(-1).amax(-1).tolist(), rel=1e-5)
        assert all(caches[i].scratch_parents == alone[i].scratch_parents for i in members)
        if step == 2:
            chains.keep([2, 0])
            members = [2, 0]
    for i in (0, 2):  # what was written is what a forward writes
        rows = [Rows(each[i], [1], None, 1) for each in (caches, alone)]
        assert torch.equal(*(model.forward([each]).logits for each in rows))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"version": 1},
        {"version": 1, "is_mtp": True, "norm_output": True, "own_output_rows": True},
        {"draft_vocab_size": 40, "norm_before_residual": True, "norm_output": True, "embedding_residual": True},
    ],
    ids=["third version", "first version", "mtp", "reduced vocabulary"],
)
def test_bits_of_heads_are_those_of_forwards(options: dict[str, Any], tmp_path: Path) -> None:
    target = load_model(make_family("llama", tmp_path))
    head = random_head(target, **options)
    model = EagleModel(head, target)
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(len(prompt) + 3, head.config.hidden_size, generator=generator) for prompt in PROMPTS]
    caches, alone = prepared(model, states), prepared(model, states)
    with threads(5):
        chains = model.draft_session(caches, Pick(head.config.draft_vocab_size, True))
    assert chains is not None
    read: list[Tensor | None] = [None] * 3
    members = [0, 1, 2]
    for step in range(6):
        tokens = [FIRST[i] if step == 0 else [LATER[i][step - 1]] for i in members]
        first = [states[i][len(PROMPTS[i]) :][: len(each)] for i, each in zip(members, tokens, strict=True)]
        found = chains.advance(tokens, torch.cat(first) if step == 0 else None)
        expected = []
        for i, each, own in zip(members, tokens, first, strict=True):
            result = model.forward([Rows(alone[i], each, None, 1, states=own if step == 0 else read[i])])
            assert result.hidden_outputs is not None
            read[i] = result.hidden_outputs[:, 0]
            expected.append(result.logits)
            if step == 0:
                alone[i].commit(range(len(each)))
                caches[i].commit(range(len(each)))
        assert torch.equal(found.logits, torch.cat(expected))
        assert found.columns == torch.cat(expected).argmax(-1).tolist()
        if step == 1:
            chains.keep([2, 0])
            members = [2, 0]


def test_tokens_are_picked_among_the_first_columns(tmp_path: Path) -> None:
    model = load_model(make_family("llama", tmp_path))
    cache = model.new_cache()
    chains = model.draft_session([cache], Pick(19, True))
    assert chains is not None
    found = chains.advance([[1, 2, 3]])
    first = found.logits[:, :19]
    assert found.columns == first.argmax(-1).tolist()
    assert found.probabilities == pytest.approx(first.softmax(-1).amax(-1).tolist(), rel=1e-5)


def test_what_is_no_number_is_said(tmp_path: Path) -> None:
    model = load_model(make_family("llama", tmp_path))
    chains = begun(model, [model.new_cache()])
    chains._decoder.struct.eps = float("nan")  # type: ignore[attr-defined]
    found = chains.advance([[1]])
    assert found.columns == [-1] and found.probabilities == [0.0]


def test_what_would_be_read_or_written_elsewhere_is_refused(tmp_path: Path) -> None:
    model = load_model(make_family("llama", tmp_path))
    cache = model.new_cache()
    for token in (-1, VOCAB):
        with pytest.raises(IndexError, match=str(token)):
            begun(model, [cache]).advance([[0, token]])
        cache.drop()
    model.forward([Rows(cache, [1])])
    with pytest.raises(ValueError, match="behind what is committed"):
        begun(model, [cache])


def test_other_models_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def session(model: Model) -> DraftSession | None:
        return model.draft_session([model.new_cache()], Pick(model.vocab_size, False))

    assert session(load_model(make_family("codegen", tmp_path / "codegen"))) is None
    folder = make_family("llama", tmp_path / "llama")
    assert session(load_model(folder, "float64")) is None
    monkeypatch.setenv("FORERUN_KERNELS", "reference")
    assert session(load_model(folder)) is None


def test_a_session_serves_the_next_draft_of_its_chains(tmp_path: Path) -> None:
    model = load_model(make_family("qwen3", tmp_path), dtype="bfloat16")
    caches = prepared(model)
    chains = begun(model, caches)
    first = chains.advance(FIRST).logits.clone()
    for cache in caches:
        cache.drop()
    assert begun(model, caches) is chains
    assert torch.equal(chains.advance(FIRST).logits, first)
    with pytest.raises(ValueError, match="behind what is committed"):
        begun(model, caches)
    for cache in caches:
        cache.drop()
    assert begun(model, caches, with_probability=False) is not chains
    assert begun(model, caches[:2]) is not chains
