"""What a block head is fed, what it proposes, and where it stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blocks import FULL, hidden_outputs_of, markov_block, proposed, random_block, reference_block
from families import VOCAB, make_family
from forerun import LLM, Block, Eagle, Hybrid, SamplingParams, Staged, Suffix
from forerun.drafters import Binding
from forerun.drafters.growth.block import block_rows
from forerun.drafters.growth.parallel import ParallelGrowth
from forerun.drafters.models.block.layers import PairLayers
from forerun.drafters.models.block.model import BlockModel
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.heads.drafting import HeadState
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.errors import DrafterError, IncompatibleDrafterError, UnsupportedModelError
from forerun.models import Model, load_model
from forerun.types import Draft, Sequence, Step
from gtest import TARGET
from heads import MarkovTarget

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PICKED: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, repetition_penalty=1.2),
    "seeded": replace(GREEDY, temperature=1.0, seed=5),
    "drawn": replace(GREEDY, temperature=1.0),
}
PROMPTS = [[1, 2, 3, 1, 0, 1], [3], [2, 2], [2] * 33]


@pytest.mark.parametrize("picked", PICKED)
def test_the_token_before_decides_the_next(picked: str) -> None:
    """Check that a Markov bias with the target's transitions is never wrong if each token is drawn after the one before
    it and its distribution changed: all is accepted, except what lies beyond the last token, 40 = 8 * 5."""
    target: Any = MarkovTarget(TARGET)
    llm = LLM(target, Block(markov_block(target)), num_draft_tokens=4, seed=3)
    results: Any = llm.generate(PROMPTS, PICKED[picked])
    stats = [choice.stats for result in results for choice in result.choices]
    assert sum(each.num_draft_tokens for each in stats) > 100
    assert all(each.num_draft_tokens == each.num_accepted_tokens for each in stats)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


class Recording(Block):
    """Keeps what it drafted after which tokens."""

    def __init__(self, head: StoredHead) -> None:
        super().__init__(head)
        self.made: list[tuple[list[int], list[int]]] = []

    def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
        drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
        self.made += [(list(sequence.token_ids), draft.ids) for sequence, draft in zip(sequences, drafts, strict=True)]
        return drafts


def wrong_drafts(family: Model, block: Any, minimum: int = 12, **options: Any) -> int:
    """Return the drafts, after rejections, in batches and in chunks, that differ from those computed anew from the
    target's states."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (40, 3)]
    params = replace(GREEDY, max_tokens=9)
    LLM(family, options.pop("around", block), num_draft_tokens=3, prefill_chunk=7, **options).generate(prompts, params)
    assert len(block.made) >= minimum
    wrong = 0
    for tokens, drafted in block.made[::4]:
        if not drafted:
            continue
        before = [tokens[-1], *drafted[:-1]]
        logits, _ = reference_block(block.drafting_model.source.head, family, tokens, before)
        wrong += proposed(block.drafting_model.source.head)[logits.argmax(-1)].tolist() != drafted
    return wrong


TOKENS: dict[str, Any] = {"context_tokens": True, "num_layers": 1}


@pytest.mark.parametrize(
    "options",
    [{}, {"sample_from_anchor": True, "sliding_window": 9}, FULL, TOKENS, {**FULL, **TOKENS}],
    ids=range(5),
)
def test_drafts_are_those_of_the_reference(family: Model, options: dict[str, Any]) -> None:
    assert wrong_drafts(family, Recording(random_block(family, **options))) == 0


def test_behind_other_drafts_they_are_too(family: Model) -> None:
    for mode in ("first", "merge"):
        block = Recording(random_block(family))
        assert wrong_drafts(family, block, minimum=6, around=Hybrid([Suffix(), block], mode)) == 0


@pytest.mark.parametrize("options", [{}, TOKENS], ids=range(2))
@pytest.mark.parametrize("shift", [-1, 1])
def test_states_one_position_off_are_noticed(
    family: Model, shift: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_states = HeadState.add_states
    monkeypatch.setattr(
        HeadState,
        "add_states",
        lambda self, end, states: add_states(self, end, states.roll(shift, 0) if len(states) > 1 else states),
    )
    assert wrong_drafts(family, Recording(random_block(family, **options))) > 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_tokens_one_position_off_are_noticed(family: Model, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a head whose rows read the token that follows."""
    embedded = PairLayers._embedded
    monkeypatch.setattr(PairLayers, "_embedded", lambda self, tokens: embedded(self, tokens.roll(shift)))
    assert wrong_drafts(family, Recording(random_block(family, **TOKENS))) > 0


def test_a_block_that_sees_its_last_token_too_early_is_noticed(family: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a context row of the last committed token, whose state is that of the token before."""
    states_end = HeadState.states_end.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(HeadState, "next_token", property(lambda self: self.cache.length + self.shift - 1))
    monkeypatch.setattr(HeadState, "states_end", property(lambda self: states_end(self)))
    assert wrong_drafts(family, Recording(random_block(family))) > 0


def bind(drafter: Any, target: Any) -> None:
    drafter.bind(Binding(target, seed=1))


def drafted(drafter: Any, sequence: Sequence, budget: int, min_acceptance_prob: float = 0.0) -> list[int]:
    (draft,) = drafter.draft([sequence], [budget], min_acceptance_prob)
    ids: list[int] = draft.ids
    return ids


def begun(drafter: Any, target: Any, text: list[int], params: SamplingParams = GREEDY) -> Sequence:
    """Return a sequence whose states are known."""
    bind(drafter, target)
    sequence = Sequence(0, text, len(text), params)
    drafter.start(sequence)
    states = hidden_outputs_of(target, drafter.drafting_model.source.head, text[:-1])
    drafter.commit([Step(sequence, None, None, len(text) - 1, states=states)])
    return sequence


def test_no_draft_is_longer_than_its_budget_or_a_block(family: Model, caplog: Any) -> None:
    block = Block(random_block(family))
    sequence = begun(block, family, list(range(9)))
    with caplog.at_level("INFO", logger="forerun"):
        assert [len(drafted(block, sequence, budget)) for budget in (0, 1, 3, 4)] == [0, 1, 3, 4]
        assert "blocks" not in caplog.text
        assert len(drafted(block, sequence, 9)) == len(drafted(block, sequence, 7)) == 4
    assert caplog.text.count("was trained on blocks of 4 tokens: of the 9 that are requested") == 1
    block.stop(sequence)
    assert block.nbytes == 0


def test_the_confidence_ends_a_draft_at_its_price(family: Model) -> None:
    head = random_block(family, confidence=True)
    head.tensors["confidence_head.proj.weight"].zero_()
    for logit, min_acceptance_prob, length in ((0.0, 0.3, 2), (0.0, 0.6, 1), (3.0, 0.5, 4), (-3.0, 0.2, 0)):
        head.tensors["confidence_head.proj.bias"].fill_(logit)
        block = Block(head)
        sequence = begun(block, family, list(range(9)))
        assert len(drafted(block, sequence, 4, min_acceptance_prob)) == length, (logit, min_acceptance_prob)
    drawn = begun(block, family, list(range(9)), replace(GREEDY, temperature=1.0))
    assert len(drafted(block, drawn, 4, 0.2)) == 1  # a drawn token that was looked at stays


def test_logits_that_are_no_numbers_end_the_draft(family: Model, caplog: Any) -> None:
    head = random_block(family, markov_rank=4)
    head.tensors["markov_head.markov_w1.weight"][:] = float("nan")
    block = Block(head)
    assert drafted(block, begun(block, family, list(range(9))), 4) == []
    assert "NaN or infinite" in caplog.text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the model computed by the native kernels, where there are any."""
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")))


@pytest.mark.parametrize("options", [{}, {"markov_rank": 4}], ids=range(2))
def test_a_row_of_no_numbers_leaves_the_tokens_before_it(
    options: dict[str, Any], family: Model, served: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = BlockModel.draft

    def spoilt(model: BlockModel, blocks: Any) -> Any:
        outputs, logits = draft(model, blocks)
        return outputs, torch.cat([logits[:2], logits[2:] * torch.nan])

    for target in (family, served):
        block = Block(random_block(target, **options))
        sequence = begun(block, target, list(range(9)))
        whole = drafted(block, sequence, 4)
        with monkeypatch.context() as patch:
            patch.setattr(BlockModel, "draft", spoilt)
            assert drafted(block, sequence, 4) == whole[:2] != []


class Looking(ParallelGrowth):
    """Counts how often it looks at logits."""

    looks = 0

    def _extend(self, chains: Any, logits: Any, with_probabilities: bool) -> None:
        self.looks += 1
        super()._extend(chains, logits, with_probabilities)


@pytest.mark.parametrize("options", [{}, {"markov_rank": 4}, {"markov_rank": 4, "confidence": True}], ids=range(3))
@pytest.mark.parametrize("picked", PICKED)
def test_tokens_that_are_looked_at_together_are_those_one_by_one(
    picked: str, options: dict[str, Any], served: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_block(served, **options)
    found, looks = [], []
    for proposes in (True, False):
        if not proposes:
            monkeypatch.setattr(BlockModel, "likely", lambda self, logits, blocks: [[] for _ in blocks])
        block = Block(head)
        growth = block.growth = Looking(block.drafting_model, block_rows)
        bind(block, served)
        sequences = [Sequence(0, list(range(9)), 9, PICKED[picked]), Sequence(1, [5, 2, 5, 2, 5], 5, PICKED[picked])]
        for sequence in sequences:
            block.start(sequence)
            states = hidden_outputs_of(served, head, sequence.token_ids[:-1])
            block.commit([Step(sequence, None, None, len(sequence.token_ids) - 1, states=states)])
        drafts = [block.draft(sequences, [4, 3], min_acceptance_prob) for min_acceptance_prob in (0.0, 1e-9, 1e-3, 0.1)]
        found.append([[draft.ids for draft in each] for each in drafts])
        looks.append(growth.looks)
    assert found[0] == found[1] and [len(ids) for ids in found[0][0]] == [4, 3]
    if picked == "greedy" and served.kernels != "reference":
        assert looks[0] == 3 and looks[1] > 8  # without a price it needs none


def test_a_text_that_is_rewritten_is_drafted_for_when_its_states_are_told(family: Model) -> None:
    block = Block(random_block(family))
    sequence = begun(block, family, list(range(9)))
    first = drafted(block, sequence, 4)
    assert first == drafted(block, sequence, 4) != []  # asked twice for the same text
    sequence.token_ids = [0, 1, 2, 3, 4, 9, 8, 7]
    block.rewind(sequence, 5)
    assert drafted(block, sequence, 4) == []
    states = hidden_outputs_of(family, block.drafting_model.source.head, sequence.token_ids[:7])  # type: ignore[arg-type]
    block.commit([Step(sequence, None, None, 7, states=states[5:])])
    again = drafted(block, sequence, 4)
    fresh = Block(block.drafting_model.source.head)
    assert again == drafted(fresh, begun(fresh, family, list(sequence.token_ids)), 4) != []


def test_what_it_cannot_draft_for_is_said(family: Model, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"forerun ships no head for.*block:model="):
        bind(Block(), family)
    with pytest.raises(DrafterError, match="the draft model is its target"):
        Staged(drafter="block")
    head = random_block(family)
    with pytest.raises(UnsupportedModelError, match="of the kind block-4"):
        bind(Eagle(head), family)
    other = load_model(make_family("llama", tmp_path, seed=5), dtype="float64")
    save_head(tmp_path / "head", head.config, head.tensors, fingerprint=target_fingerprint(other))
    with pytest.raises(IncompatibleDrafterError, match="was trained for another target"):
        bind(Block(tmp_path / "head"), family)
