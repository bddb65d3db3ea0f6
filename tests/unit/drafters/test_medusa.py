"""What Medusa heads are fed: the target's state of the token before the last committed one, and in Hydra's order the
tokens from the last committed one on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, make_family
from forerun import LLM, Eagle, Hybrid, Medusa, MedusaTree, SamplingParams, Staged, Suffix
from forerun.drafters import Binding
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.drafters.models.medusa.config import RANKS
from forerun.drafters.models.medusa.drafting import MedusaState
from forerun.errors import DrafterError, IncompatibleDrafterError, UnsupportedModelError
from forerun.models import Model, load_model
from forerun.types import Sequence, Step
from gtest import TARGET
from heads import AdditiveModel, MarkovTarget, random_head
from medusa_heads import aligned_hydra, aligned_medusa, last_states, random_medusa, reference_logits

K, NUM_NEW = 4, 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PICKED: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.5),
    "seeded": replace(GREEDY, temperature=1.0, seed=5),
    "drawn": replace(GREEDY, temperature=1.0),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [5, 5], [2] * 33]


def accepted_of_drafted(drafter: Any, params: SamplingParams, target: Any = None, **options: Any) -> float:
    llm = LLM(target or AdditiveModel(), drafter, num_draft_tokens=K, seed=3, **options)
    prompts = PROMPTS if target is None else [[token % target.vocab_size for token in prompt] for prompt in PROMPTS]
    results: Any = llm.generate(prompts, params)
    stats = [choice.stats for result in results for choice in result.choices]
    drafted = sum(each.num_draft_tokens for each in stats)
    assert drafted >= len(stats) * NUM_NEW * K // (K + 1) // 2
    return sum(each.num_accepted_tokens for each in stats) / drafted


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 2, "max_batch": 3}])
@pytest.mark.parametrize("picked", PICKED)
def test_heads_that_are_fed_rightly_are_never_wrong(picked: str, options: dict[str, Any]) -> None:
    """Check that all of the chain is accepted except what lies beyond the last token: 40 = 8 * 5."""
    assert accepted_of_drafted(Medusa(aligned_hydra(AdditiveModel())), PICKED[picked], **options) == 1.0


def test_heads_that_know_no_tokens_are_never_wrong_about_what_follows_from_one() -> None:
    target: Any = MarkovTarget(TARGET.double())
    assert accepted_of_drafted(Medusa(aligned_medusa(target)), GREEDY, target) == 1.0
    llm = LLM(target, MedusaTree(aligned_medusa(target), width=2), num_draft_tokens=8, seed=3)
    results: Any = llm.generate([[1, 2, 3], [3]], GREEDY)
    assert all(result.stats.num_tokens / result.stats.num_forwards > 3 for result in results)


def test_choices_of_one_request_are_fed_rightly() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True, n=3)
    assert accepted_of_drafted(Medusa(aligned_hydra(AdditiveModel())), params) == 1.0


def test_behind_other_drafts_they_are_fed_rightly_too() -> None:
    for mode in ("first", "merge"):
        medusa = Medusa(aligned_hydra(AdditiveModel()))
        wrong = []
        inner = medusa.draft

        def draft(
            sequences: Any,
            num_draft_tokens: Any,
            min_acceptance_prob: float = 0.0,
            inner: Any = inner,
            wrong: Any = wrong,
        ) -> Any:
            drafts = inner(sequences, num_draft_tokens, min_acceptance_prob)
            for sequence, each in zip(sequences, drafts, strict=True):
                wrong += [each.ids] if each.ids != AdditiveModel().greedy(sequence.token_ids, len(each)) else []
            return drafts

        medusa.draft = draft  # type: ignore[method-assign]
        target: Any = AdditiveModel()
        LLM(target, Hybrid([Suffix(), medusa], mode), num_draft_tokens=K, seed=3).generate(PROMPTS, GREEDY)
        assert wrong == []


def test_a_state_one_position_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add_states = MedusaState.add_states

    def changed(self: MedusaState, end: int, states: torch.Tensor) -> None:
        add_states(self, end, states[:-1] if len(states) > 1 else states)

    monkeypatch.setattr(MedusaState, "add_states", changed)
    assert accepted_of_drafted(Medusa(aligned_hydra(AdditiveModel())), GREEDY) < 0.9


def test_a_tree_holds_the_right_chain() -> None:
    target: Any = AdditiveModel()
    for shape in ("static", "dynamic"):
        llm = LLM(target, MedusaTree(aligned_hydra(target), shape, width=2), num_draft_tokens=12, seed=3)
        for params in (GREEDY, PICKED["seeded"], PICKED["penalised"]):
            results: Any = llm.generate(PROMPTS, params)
            assert all(result.stats.num_tokens / result.stats.num_forwards > 2.5 for result in results)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


@pytest.mark.parametrize("sequential", [False, True])
def test_drafts_are_those_of_the_reference(sequential: bool, family: Model) -> None:
    """Check drafts after rejections, in batches and in chunks."""
    head = random_medusa(family, draft_vocab_size=50, sequential=sequential)
    medusa, made = Medusa(head), []
    inner = medusa.draft

    def draft(sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> Any:
        drafts = inner(sequences, num_draft_tokens, min_acceptance_prob)
        made.extend((list(each.token_ids), draft.ids) for each, draft in zip(sequences, drafts, strict=True))
        return drafts

    medusa.draft = draft  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (40, 3)]
    LLM(family, medusa, num_draft_tokens=3, prefill_chunk=7).generate(prompts, replace(GREEDY, max_tokens=9))
    assert len(made) > 8
    for tokens, drafted in made[::3]:
        state = last_states(family, head.config, tokens[:-1])[-1]
        for count, token in enumerate(drafted):
            read = [tokens[-1], *drafted[:count]]
            assert int(reference_logits(head, family, state, read).argmax()) == token


def test_a_static_tree_begins_with_the_shape_of_the_stored_accuracies(family: Model) -> None:
    head = random_medusa(family)
    wide, narrow = [0.25] * 4 + [0.0] * (RANKS - 4), [0.9] + [0.0] * (RANKS - 1)
    for accuracies, parents in ((wide * 3, [-1] * 4), (narrow * 3, [-1, 0, 1])):
        drafter: Any = MedusaTree(replace(head, config=replace(head.config, accuracies=tuple(accuracies))))
        bind(drafter, family)
        sequence = Sequence(0, [1, 2, 3], 3, GREEDY)
        drafter.start(sequence)
        drafter.commit([Step(sequence, None, None, 2, states=last_states(family, head.config, [1, 2])[:, None])])
        (draft,) = drafter.draft([sequence], [len(parents)])
        assert draft.parents == parents
        state = last_states(family, head.config, [1, 2])[-1]
        best = reference_logits(head, family, state, [3]).topk(4).indices.tolist()
        assert draft.ids[: parents.count(-1)] == best[: parents.count(-1)]


def bind(drafter: Any, target: Any) -> None:
    drafter.bind(Binding(target, seed=1))


def test_no_more_tokens_than_heads_which_is_said(family: Model, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="forerun"):
        results: Any = LLM(family, Medusa(random_medusa(family)), num_draft_tokens=9).generate([[1, 2, 3]], GREEDY)
    assert len(results[0].stats.reached_per_position) <= 3
    assert caplog.text.count("has 3 heads, and drafts no more tokens") == 1


def test_heads_of_another_kind_or_target_are_refused(family: Model, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="drafter='medusa:model="):
        bind(MedusaTree(), family)
    with pytest.raises(UnsupportedModelError, match="of the kind EAGLE-3, which is not what medusa is for"):
        bind(Medusa(random_head(family)), family)
    with pytest.raises(UnsupportedModelError, match="of the kind Medusa, which is not what eagle is for"):
        bind(Eagle(random_medusa(family)), family)
    head = random_medusa(family)
    other = load_model(make_family("llama", tmp_path, seed=5), dtype="float64")
    save_head(tmp_path / "head", head.config, head.tensors, fingerprint=target_fingerprint(other))
    with pytest.raises(IncompatibleDrafterError, match="was trained for another target"):
        bind(Medusa(tmp_path / "head"), family)
    with pytest.raises(DrafterError, match="the draft model is its target"):
        Staged(drafter=Medusa())


def test_a_text_that_is_rewritten_is_drafted_for_when_its_state_is_told() -> None:
    target = AdditiveModel()
    head = aligned_hydra(target)
    drafter: Any = Medusa(head)
    bind(drafter, target)
    text = target.greedy([1, 2], 10)
    sequence = Sequence(0, text[:9], 2, GREEDY)
    drafter.start(sequence)
    known = last_states(target, head.config, text[:8])[:, None]  # type: ignore[arg-type]
    drafter.commit([Step(sequence, None, None, 8, states=known)])
    (draft,) = drafter.draft([sequence], [3])
    assert draft.ids == target.greedy(text[:9], 3)
    sequence.token_ids = [*text[:5], 9, 8, 7]
    drafter.rewind(sequence, 5)
    (draft,) = drafter.draft([sequence], [3])
    assert draft.ids == []
    known = last_states(target, head.config, sequence.token_ids[:7])[5:, None]  # type: ignore[arg-type]
    drafter.commit([Step(sequence, None, None, 7, states=known)])
    for _ in range(2):  # asked twice for the same text
        (draft,) = drafter.draft([sequence], [3])
        assert draft.ids == target.greedy(sequence.token_ids, 3)
    drafter.stop(sequence)
    assert drafter.nbytes == 0
