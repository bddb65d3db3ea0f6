"""Drafting in another vocabulary: what tokens stand for, texts that grow, and drafts that are translated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import BUNDLED_DRAFT, BUNDLED_TARGET
from forerun.drafters import Binding, DraftModel, build_drafter
from forerun.drafters.cross_vocab import CrossVocab, Retokeniser, whole_characters
from forerun.drafters.models.base import MAX_LAG
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.models import Model, load_model, load_tokenizer
from forerun.types import Draft, Sequence, Step, Verdict
from forerun.utils.vocabulary import shared_tokens, token_bytes
from tools.lm import train_tokenizer

TEXT = "def größe(items):\n    for item in items:\n        yield item ** 2  # 平方 \U0001f600\n\n\nclass Stack:\n"


@pytest.fixture(scope="module")
def target() -> Model:
    return load_model(BUNDLED_TARGET, "float32")


@pytest.fixture(scope="module")
def ours() -> Any:
    return load_tokenizer(BUNDLED_TARGET)


@pytest.fixture(scope="module")
def other() -> Any:
    """Return a byte-level vocabulary of 300 tokens: other borders almost everywhere."""
    return train_tokenizer([TEXT * 5], 300)


class SentencePiece:
    """Just enough of a SentencePiece tokenizer: space marks, byte tokens, a token that stands for nothing."""

    all_special_ids = (0,)
    added_tokens_decoder: dict[int, str] = {5: "<tool>"}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {"<s>": 0, "▁the": 1, "<0x0A>": 2, "a▁b": 3, "<0xE5>": 4, "<tool>": 5}


def test_tokens_stand_for_bytes(ours: Any) -> None:
    table = token_bytes(ours)
    ids = ours(TEXT)["input_ids"]
    assert b"".join(table[i] for i in ids).decode() == TEXT
    assert not set(ours.all_special_ids) & set(table)
    assert token_bytes(SentencePiece()) == {1: b" the", 2: b"\n", 3: b"a b", 4: b"\xe5", 5: b"<tool>"}


def test_shared_tokens_are_one_to_one() -> None:
    assert shared_tokens({3: b"a", 1: b"b", 2: b"a", 9: b""}, {7: b"a", 8: b"a", 4: b"c", 5: b"b", 6: b""}) == {
        5: 1,
        7: 2,
    }


def test_incomplete_characters_wait() -> None:
    data = "größe\U0001f600".encode()
    assert [whole_characters(data[:i]).decode() for i in range(len(data) - 4, len(data) + 1)] == [
        "größe", "größe", "größe", "größe", "größe\U0001f600"
    ]  # fmt: skip


@pytest.mark.parametrize("which", ["ours", "other"])
def test_a_growing_text_keeps_its_bytes_and_finds_the_usual_tokens(which: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(which)
    text = Retokeniser(tokenizer, token_bytes(tokenizer))
    rng = random.Random(0)
    whole = TEXT * 6
    ids, done = text.encode(whole[:20]), 20
    while done < len(whole):
        step = rng.randint(1, 9)
        ids = text.extend(ids, whole[done : done + step])
        done += step
        assert text.bytes_of(ids).decode() == whole[:done]
    assert ids == text.encode(whole)


def test_a_continuation_leaves_what_stands(ours: Any) -> None:
    text = Retokeniser(ours, token_bytes(ours))
    ids = text.encode("class Stack:\n    def ")
    for added in ("push(self, item):\n", "__init__", " x", "\n"):
        assert text.bytes_of(text.continuation(ids, added)).decode() == added


def chains(
    drafter: Any, target: Model, tokenizer: Any, params: SamplingParams, min_acceptance_prob: float = 0.0
) -> list[Any]:
    drafter.bind(Binding(target, tokenizer, seed=5))
    sequence = Sequence(0, tokenizer(TEXT)["input_ids"], 10, params)
    drafter.start(sequence)
    drafts = []
    for added in ([], [5, 9], [30]):
        sequence.token_ids.extend(added)
        drafts += drafter.draft([sequence], [5], min_acceptance_prob)
    drafter.stop(sequence)
    return drafts


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=40)])
def test_the_same_vocabulary_gives_the_same_drafts(target: Model, ours: Any, mode: str, params: SamplingParams) -> None:
    """Check that translation changes nothing for a draft with the target's vocabulary."""
    plain = chains(DraftModel(BUNDLED_DRAFT), target, ours, params)
    crossed = chains(CrossVocab(BUNDLED_DRAFT, mode=mode), target, ours, params)
    for own, other in zip(plain, crossed):
        if params.greedy:
            n = min(len(own), len(other))
            assert n >= 3
            assert other.ids[: n - 1] == own.ids[: n - 1]
        elif mode == "tokens":
            assert other.ids == own.ids
            assert torch.allclose(other.probs, own.probs, atol=1e-6)
        else:
            assert other.probs is None


def small_draft(vocab_size: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def draft_folder(other: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a random model with a padded vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    small_draft(320).save_pretrained(folder)
    other.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("inner", ["draft-model", "draft-tree", "staged"])
@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_whatever_it_drafts_the_output_is_plain(
    target: Model, ours: Any, draft_folder: str, inner: str, mode: str
) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=12),
        SamplingParams(temperature=1.1, seed=3, top_p=0.9, max_tokens=12),
        SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True),
    ]
    prompts = [TEXT, "import os\n", TEXT[:30], "größ"]
    drafter, _ = build_drafter(f"cross-vocab:model={draft_folder},drafter={inner},mode={mode}")
    crossed: Any = LLM(target, drafter, tokenizer=ours, num_draft_tokens=4).generate(prompts, params)
    plain: Any = LLM(target, None, tokenizer=ours).generate(prompts, params)
    for own, other in zip(plain[:3], crossed[:3]):
        assert own.token_ids == other.token_ids
    assert len(crossed[3].token_ids) == 12
    assert sum(each.stats.num_draft_tokens for each in crossed) > 20
    assert not drafter._shadows  # type: ignore[attr-defined]


def test_drawn_drafts_stay_inside_what_both_vocabularies_have(target: Model, ours: Any, draft_folder: str) -> None:
    drafter = CrossVocab(draft_folder, mode="tokens")
    drafts = chains(drafter, target, ours, SamplingParams(temperature=1.2))
    allowed = set(drafter._to_target.values())
    assert 100 < len(allowed) <= 300
    for draft in drafts:
        assert set(draft.ids) <= allowed
        assert draft.probs.shape == (len(draft) + 1, target.vocab_size)
        for row in range(len(draft)):
            assert draft.probs[row].sum() == pytest.approx(1, abs=1e-5)
            assert draft.probs[row, draft.token_ids[row]] > 0
            assert set(draft.probs[row].nonzero()[:, 0].tolist()) <= allowed


@pytest.mark.parametrize("target_ends", [{0}, {0, 7}])
def test_several_ends_of_text_are_translated_one_to_one(
    target: Model, ours: Any, draft_folder: str, monkeypatch: pytest.MonkeyPatch, target_ends: set[int]
) -> None:
    """Check that no two draft tokens become one, which would lose the probability of one of them."""
    draft = load_model(draft_folder, "float32")
    draft.eos_token_ids = frozenset({310, 311, 312})
    monkeypatch.setattr(target, "eos_token_ids", frozenset(target_ends))
    drafter = CrossVocab(draft, mode="tokens", tokenizer=load_tokenizer(draft_folder))
    drafter.bind(Binding(target, ours, 0))
    assert len(set(drafter._to_target.values())) == len(drafter._to_target)
    free = target_ends - set(drafter._target_bytes)
    assert free <= set(drafter._to_target.values())
    assert drafter._retokenised(Sequence(0, [1], 1, SamplingParams()), [312]) == [0]


def test_what_cannot_be_is_refused(target: Model, ours: Any) -> None:
    with pytest.raises(ConfigError, match="mode is 'words'"):
        CrossVocab(mode="words")
    with pytest.raises(DrafterError, match="no tokenizer"):
        CrossVocab(BUNDLED_DRAFT).bind(Binding(target, None))
    with pytest.raises(DrafterError, match="give its tokenizer"):
        CrossVocab(target).bind(Binding(target, ours))
    with pytest.raises(DrafterError, match="wraps a drafter that runs a model"):
        build_drafter("cross-vocab:drafter=suffix")
    for inner in ("hybrid", "cross-vocab", "nothing"):
        with pytest.raises(DrafterError, match=r"\(draft-model, draft-tree, staged\), not '" + inner):
            build_drafter(f"cross-vocab:drafter={inner}")

    class Foreign(SentencePiece):
        def get_vocab(self) -> dict[str, int]:
            return {"<s>": 0, "\u4e00\u4e01": 1}

    with pytest.raises(IncompatibleDrafterError, match="no token in common"):
        CrossVocab(target, tokenizer=Foreign()).bind(Binding(target, ours))


def test_a_text_nobody_drafts_for_is_translated_by_and_by(
    target: Model, ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a step without draft tokens costs next to nothing, and that the draft model is never far behind."""
    drafter = CrossVocab(BUNDLED_DRAFT, mode="text")
    drafter.bind(Binding(target, ours, seed=5))
    ids = ours(TEXT * 8)["input_ids"]
    sequence = Sequence(0, ids[:20], 20, SamplingParams(temperature=0))
    drafter.start(sequence)
    followed = []
    inner = drafter._follow
    monkeypatch.setattr(
        drafter, "_follow", lambda own, shadow: (followed.append(len(own.token_ids)), inner(own, shadow))
    )
    for token_id in ids[20:120]:
        sequence.token_ids.append(token_id)
        drafter.commit([Step(sequence, Draft.empty(), Verdict([], token_id), len(sequence.token_ids) - 1)])
    assert followed == [20 + MAX_LAG * i for i in range(1, 100 // MAX_LAG + 1)]
    drafter.draft([sequence], [4])
    assert drafter._shadows[sequence].seen == 120
    drafter.stop(sequence)
