"""Which tokens a model that drafts can propose, and what is computed of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from changed_folder import changed
from doubles import MarkovModel
from families import VOCAB, make_family
from forerun import LLM, ConfigError, DraftModel, SamplingParams
from forerun.config import BUNDLED_MODELS, MEMORY_LOG
from forerun.drafters import Binding, DraftTree, EarlyExit
from forerun.drafters.models import draft_vocabulary
from forerun.drafters.models.draft_model import SharedVocabulary
from forerun.drafters.models.draft_vocabulary import Columns, DraftVocabulary, SomeTokens, chosen_vocabulary
from forerun.kernels.cpu import native
from forerun.models import Forward, Model, Rows, StandIn, load_model
from forerun.models.draft_session import Pick
from forerun.models.fused.native import NativeDecoder
from forerun.models.loading.configuration import OUTPUT_TOKENS

native_only = pytest.mark.skipif(native() is None, reason="only the native kernels compute a part of the outputs")
PROMPT = [7, 30, 2]


class Blocks:
    """A model that can compute a part of 100 tokens."""

    name = "a model"
    vocab_size = 100

    def __init__(self, blocks: Any = None, output_tokens: list[int] | None = None) -> None:
        self.blocks = None if blocks is None else blocks.tolist()
        self.output_tokens = None if output_tokens is None else torch.tensor(output_tokens)

    def of_outputs(self, blocks: Any) -> Blocks:
        return Blocks(blocks)


def vocabulary(size: int, always: list[int]) -> Any:
    return DraftVocabulary(size, Blocks(), SharedVocabulary(100, 100), always)  # type: ignore[arg-type]


TRAINED = list(range(60, 80))
"""In blocks of these and then the others: 60 to 75; 76 to 79 and 0 to 11; 12 to 27; 28 to 43; 44 to 59; 80 to 95; the
rest."""


def vocabulary_of_trained(size: int | None, always: list[int], target_size: int = 100) -> Any:
    columns = SharedVocabulary(100, target_size)
    return chosen_vocabulary(size, Blocks(output_tokens=TRAINED), columns, always)  # type: ignore[arg-type]


def proposed(columns: Columns) -> list[int]:
    return columns.names(list(range(columns.num_columns)))


def test_columns_are_tokens() -> None:
    columns = SomeTokens(SharedVocabulary(60, 70), np.array([0, 2, 3], np.int32))  # the last block has 12 tokens
    assert columns.num_columns == 44
    assert columns.names([0, 15, 16, 43]) == [0, 15, 32, 59] == columns.named(torch.tensor([0, 15, 16, 43])).tolist()
    assert columns.readable([3, 65]) == [3, 0]
    wide = columns.widened(torch.arange(88.0).view(2, 44))
    assert wide.shape == (2, 70) and wide[1, 32] == 44 + 16 and wide[0, 59] == 43
    assert wide.isfinite().sum() == 88 and not wide[:, 16:32].isfinite().any() and not wide[:, 60:].isfinite().any()


def test_padding_of_the_draft_model_is_not_proposed() -> None:
    assert SomeTokens(SharedVocabulary(80, 70), np.array([1, 4], np.int32)).num_columns == 16 + 6


def test_the_upper_half_gives_way_to_tokens_of_requests() -> None:
    found = vocabulary(64, [97])
    assert found.model.blocks == [0, 1, 2, 3, 6]
    found.include([1, 40, 96, 2])
    assert found.model.blocks == [0, 1, 2, 3, 6]
    found.include([64])  # block 2 has just been used, block 3 has not
    assert found.model.blocks == [0, 1, 2, 4, 6]
    found.include([50, 70, 85, 200])
    assert len(found.model.blocks) == 5 and {0, 1, 6} < {*found.model.blocks} and 2 not in found.model.blocks
    assert found.columns.num_columns == 4 * 16 + 4


def test_the_model_is_made_anew_only_for_other_tokens() -> None:
    found = vocabulary(64, [])
    before = found.model
    found.include([33, 3])
    assert found.model is before


def test_tokens_that_it_was_trained_to_propose_stay_and_the_oldest_of_requests_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_vocabulary, "_MIN_HELD", 32)
    found = vocabulary_of_trained(None, [99])
    first = [*TRAINED, *range(12)]
    assert proposed(found.columns) == [*first, *range(96, 100)]
    found.include([30, 61, 3, 200])
    assert proposed(found.columns) == [*first, *range(28, 44), *range(96, 100)]
    found.include([13])
    found.include([30])  # held again: later than 13
    assert found.model.blocks == [0, 1, 2, 3, 6]
    found.include([50])
    assert found.model.blocks == [0, 1, 3, 4, 6]
    found.include([85, 12, 31])  # of one request, too, the later ones
    assert found.model.blocks == [0, 1, 2, 3, 6]


def test_more_is_held_beside_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocabulary, "_MIN_HELD", 16)
    monkeypatch.setattr(draft_vocabulary, "_HELD_PART", 1)
    found = vocabulary_of_trained(None, [])
    found.include([12, 28, 44])  # 20 tokens are two blocks
    assert found.model.blocks == [0, 1, 3, 4]


def test_numbers_count_in_the_order_of_the_outputs() -> None:
    assert sorted(proposed(vocabulary_of_trained(0, []).columns)) == list(range(100))
    assert proposed(vocabulary_of_trained(48, []).columns) == [*TRAINED, *range(28)]
    assert proposed(vocabulary_of_trained(16, []).columns) == TRAINED[:16]
    smaller = vocabulary_of_trained(0, [], target_size=90).columns
    assert sorted(proposed(smaller)) == list(range(90))
    wide = smaller.widened(torch.arange(100.0)[None])
    assert wide.shape == (1, 90) and wide[0, [60, 0, 80]].tolist() == [0, 20, 80]


def test_tokens_that_the_target_lacks_are_not_brought_first() -> None:
    assert vocabulary_of_trained(None, [], target_size=79) is None
    with pytest.raises(ConfigError, match="computes all outputs at once"):
        vocabulary_of_trained(32, [], target_size=79)


@native_only
def test_logits_of_some_tokens_have_the_bits_of_all(tmp_path: Path) -> None:
    model = load_model(make_family("qwen2", tmp_path))
    blocks = np.array([0, 2, (VOCAB - 1) // 16], np.int32)
    tokens = [token for block in blocks.tolist() for token in range(16 * block, min(VOCAB, 16 * block + 16))]
    part = model.of_outputs(blocks)
    assert part is not None and isinstance(part.decoder, NativeDecoder) and isinstance(model.decoder, NativeDecoder)
    assert part.decoder.struct.head.packed == model.decoder.struct.head.packed  # no second copy
    cache = model.new_cache()
    whole = model.forward([Rows(cache, PROMPT)]).logits
    cache.drop()
    assert torch.equal(part.forward([Rows(cache, PROMPT)]).logits, whole[:, tokens])
    cache.drop()
    session = part.draft_session([cache], Pick(len(tokens), with_probability=True))
    assert session is not None
    found = session.advance([PROMPT])
    assert torch.equal(found.logits, whole[-1:, tokens]) and found.columns == [int(whole[-1, tokens].argmax())]
    cache.drop()
    early = part.forward_first([Rows(cache, PROMPT)], 1)[1]
    cache.drop()
    assert torch.equal(early, model.forward_first([Rows(cache, PROMPT)], 1)[1][:, tokens])


@native_only
@pytest.mark.parametrize("size", [1, 999, -1])
@pytest.mark.parametrize("make", [DraftModel, EarlyExit])
def test_too_few_tokens_are_refused(make: Any, size: int) -> None:
    with pytest.raises(ConfigError, match=f"draft_vocab is {size:,}.*0 for all"):
        make(draft_vocab=size)


def test_more_tokens_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab is 5,000, but bundled-draft has 4,096 .*0 for all"):
        LLM("bundled", DraftModel(draft_vocab=5000))


class Other(StandIn):
    """A model that is computed otherwise."""

    def forward(self, batch: Any, layers: Any = ()) -> Forward:
        return self.model.forward(batch, layers)


def test_a_model_of_other_kernels_computes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocabulary, "MIN_DRAFT_VOCAB", 2)
    monkeypatch.setattr(draft_vocabulary, "DRAFT_VOCAB", 16)
    model = Other(load_model(make_family("qwen2", tmp_path)))
    with pytest.raises(ConfigError, match=r"computes all outputs at once.*Leave draft_vocab out"):
        DraftModel(model, draft_vocab=16).bind(Binding(model))
    DraftModel(model).bind(Binding(model))
    DraftModel(model, draft_vocab=0).bind(Binding(model))
    model.output_tokens = torch.arange(16)
    with pytest.raises(
        ConfigError, match=r"draft_vocab is 0, but .* only the 16 tokens that it was trained to propose"
    ):
        DraftModel(model, draft_vocab=0).bind(Binding(model))
    DraftModel(model).bind(Binding(model))


@native_only
@pytest.mark.parametrize(
    ("size", "default", "expected"), [(0, 2, VOCAB), (VOCAB, 2, VOCAB), (None, VOCAB, VOCAB), (None, 16, 16)]
)
def test_all_tokens_are_proposed_by_request_or_of_small_vocabularies(
    size: int | None,
    default: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, MEMORY_LOG)  # which commands show
    monkeypatch.setattr(draft_vocabulary, "MIN_DRAFT_VOCAB", 2)
    monkeypatch.setattr(draft_vocabulary, "DRAFT_VOCAB", default)
    target = load_model(make_family("qwen2", tmp_path))
    drafter = DraftModel(target, draft_vocab=size)
    llm = LLM(target, drafter, num_draft_tokens=3)
    assert ("proposes 16 of its" in caplog.text) == (expected == 16)
    text = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))[0]
    assert (
        text.token_ids == LLM(target, None).generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))[0].token_ids
    )
    more = {token // 16 for token in (*PROMPT, *target.eos_token_ids)} - {0}
    assert expected <= drafter.drafting_model.columns.num_columns <= expected + 16 * len(more)


@native_only
@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {3900: -1.0}}, {"stop_token_ids": [3900]}, {"allowed_token_ids": [3900, 97, 98]}],
    ids=str,
)
def test_tokens_that_options_name_are_proposed(options: dict[str, Any]) -> None:
    drafter = DraftModel(draft_vocab=1000)
    llm = LLM("bundled", drafter, num_draft_tokens=3)
    llm.generate(["a"], SamplingParams(max_tokens=4, temperature=0, logit_bias={98: 50.0}))
    model = drafter.drafting_model
    assert 3900 not in model.columns.names(list(range(model.columns.num_columns)))
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0, "logit_bias": {98: 50.0}} | options)
    assert 3900 not in llm.generate(["a"], params)[0].token_ids
    assert 3900 in model.columns.names(list(range(model.columns.num_columns)))


@pytest.mark.parametrize("drafter", [DraftModel, DraftTree])
@pytest.mark.parametrize("options", [{"temperature": 0, "repetition_penalty": 1.1}, {"seed": 2}, {}], ids=str)
def test_nothing_is_drafted_where_no_token_is_allowed(drafter: Any, options: dict[str, Any]) -> None:
    """The draft model cannot propose what the request allows: the chain ends before anything is picked."""
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    cut = table.clone()
    cut[:, 4] = -torch.inf
    target: Any = MarkovModel(table)
    llm = LLM(target, drafter(MarkovModel(cut)), num_draft_tokens=3)
    params = SamplingParams(max_tokens=9, ignore_eos=True, allowed_token_ids=[4], **options)
    result = llm.generate([[1]], params)[0]
    assert result.token_ids == [4] * 9 and result.stats.num_draft_tokens == 0


def test_a_drafter_is_bound_with_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocabulary, "MIN_DRAFT_VOCAB", 2)
    model = load_model(make_family("qwen2", tmp_path))
    drafter = DraftModel(model, draft_vocab=16 if native() else 0)
    drafter.bind(Binding(model))
    assert isinstance(drafter.model, Model) and drafter.model is model


@native_only
def test_tokens_of_prompts_are_drafted_beside_those_that_a_model_was_trained_to_propose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(BUNDLED_MODELS["bundled-draft"], tmp_path / "draft", **{OUTPUT_TOKENS: list(range(500))})
    drafter = DraftModel(folder, quantize="int8")
    llm = LLM("bundled", drafter, num_draft_tokens=4)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompt = llm.encode("def quadratic_formula(a, b, c):\n    return quadratic") * 4
    outside = {token for token in prompt if token >= 512}
    llm.generate([[40]], SamplingParams(max_tokens=4, temperature=0, allowed_token_ids=[40]))
    before = proposed(drafter.drafting_model.columns)
    drafted: set[int] = set()
    draft = drafter.draft

    def recorded(*args: Any, **options: Any) -> Any:
        found = draft(*args, **options)
        drafted.update(token for each in found for token in each.ids)
        return found

    monkeypatch.setattr(drafter, "draft", recorded)
    answer = llm.generate([prompt], params)[0]
    assert answer.token_ids == LLM(llm.target, None).generate([prompt], params)[0].token_ids
    after = proposed(drafter.drafting_model.columns)
    assert set(range(500)) <= {*before} and {*before} | outside <= {*after}
    assert not outside & {*before} and drafted & outside and answer.stats.num_accepted_tokens > 0
