"""What a head is fed: token i + 1 beside the target's state of token i, and below the first drafted token its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB, make_family
from forerun import LLM, CrossVocab, Eagle, EagleTree, Hybrid, SamplingParams, Staged, Suffix
from forerun.drafters import Binding
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.heads.drafting import MAX_HELD_STATES, HeadState
from forerun.drafters.models.heads.fingerprint import target_fingerprint
from forerun.drafters.models.prefill_policy import PrefillPolicy
from forerun.errors import DrafterError, IncompatibleDrafterError
from forerun.models import Model, load_model
from forerun.types import Draft, Sequence, Step
from heads import AdditiveModel, aligned_head, random_head, reference_logits, states_of

K, NUM_NEW = 4, 40
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
PICKED: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "penalised": replace(GREEDY, repetition_penalty=1.2),
    "seeded": replace(GREEDY, temperature=1.0, seed=5),
    "drawn": replace(GREEDY, temperature=1.0),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [5, 5], [2] * 33]


def accepted_of_drafted(drafter: Any, params: SamplingParams, **options: Any) -> float:
    target: Any = AdditiveModel()
    llm = LLM(target, drafter, num_draft_tokens=K, seed=3, **options)
    results: Any = llm.generate(PROMPTS, params)
    stats = [choice.stats for result in results for choice in result.choices]
    drafted = sum(each.num_draft_tokens for each in stats)
    assert drafted >= len(stats) * NUM_NEW * K // (K + 1) // 2
    return sum(each.num_accepted_tokens for each in stats) / drafted


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 2, "max_batch": 3}])
@pytest.mark.parametrize("picked", PICKED)
def test_a_head_that_is_fed_rightly_is_never_wrong(picked: str, options: dict[str, Any]) -> None:
    """Check that all of its chain is accepted except what lies beyond the last token: 40 = 8 * 5."""
    head = aligned_head(AdditiveModel())
    assert accepted_of_drafted(Eagle(head), PICKED[picked], **options) == 1.0


def test_behind_other_drafts_it_is_fed_rightly_too() -> None:
    """Check it where another source's draft was accepted, or one merged of both."""
    head = aligned_head(AdditiveModel())
    for mode in ("first", "merge"):
        eagle = Eagle(head)
        wrong = []
        inner = eagle.draft

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

        eagle.draft = draft  # type: ignore[method-assign]
        target: Any = AdditiveModel()
        LLM(target, Hybrid([Suffix(), eagle], mode), num_draft_tokens=K, seed=3).generate(PROMPTS, GREEDY)
        assert wrong == []


def test_choices_of_one_request_are_fed_rightly() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=NUM_NEW, ignore_eos=True, n=3)
    assert accepted_of_drafted(Eagle(aligned_head(AdditiveModel())), params) == 1.0


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_one_position_off_are_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    add_states = HeadState.add_states

    def changed(self: HeadState, end: int, states: torch.Tensor) -> None:
        add_states(self, end, states.roll(shift, 0) if len(states) > 1 else states)

    monkeypatch.setattr(HeadState, "add_states", changed)
    assert accepted_of_drafted(Eagle(aligned_head(AdditiveModel())), GREEDY) < 0.9


def test_tokens_one_position_off_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadState, "next_token", property(lambda self: self.cache.length + self.shift))
    unfed = HeadState.unfed
    monkeypatch.setattr(HeadState, "unfed", lambda self: [0, *unfed(self)[:-1]])
    assert accepted_of_drafted(Eagle(aligned_head(AdditiveModel())), GREEDY) < 0.9


def test_a_tree_holds_the_right_chain() -> None:
    """Check that as many tokens are accepted a step as the tree is deep."""
    target: Any = AdditiveModel()
    head = aligned_head(target)
    llm = LLM(target, EagleTree(head, width=2), num_draft_tokens=12, seed=3)
    for params in (GREEDY, PICKED["seeded"]):
        results: Any = llm.generate(PROMPTS, params)
        assert all(result.stats.num_tokens / result.stats.num_forwards > 3 for result in results)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


class Recording(Eagle):
    """Keeps what it drafted after which tokens."""

    def __init__(self, head: StoredHead) -> None:
        super().__init__(head)
        self.made: list[tuple[list[int], list[int]]] = []

    def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
        drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
        self.made += [(list(sequence.token_ids), draft.ids) for sequence, draft in zip(sequences, drafts, strict=True)]
        return drafts


def test_drafts_are_those_of_the_reference(family: Model) -> None:
    """Check drafts after rejections, in batches and in chunks, against rows computed anew from the target's states."""
    head = random_head(family, draft_vocab_size=50, sliding_window=9)
    eagle = Recording(head)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (40, 3)]
    LLM(family, eagle, num_draft_tokens=3, prefill_chunk=7).generate(prompts, replace(GREEDY, max_tokens=9))
    assert len(eagle.made) > 12
    for tokens, drafted in eagle.made[::4]:
        hidden_outputs = states_of(family, head, tokens[:-1])
        for count, token in enumerate(drafted):
            rows = [*tokens[1:], *drafted[:count]]
            assert int(reference_logits(head, family, rows, hidden_outputs, count)[-1].argmax()) == token


@pytest.mark.parametrize("make", [Eagle, EagleTree])
@pytest.mark.parametrize("picked", PICKED)
def test_a_reduced_vocabulary_is_named_by_the_targets_tokens(picked: str, make: Any, family: Model) -> None:
    """Check that all drafted tokens can be proposed, and that a greedy draft begins with the head's best token."""
    head = random_head(family, draft_vocab_size=20)
    drafter = make(head)
    bind(drafter, family)
    own = set(drafter.model.token_ids.tolist())
    text = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    sequence = Sequence(0, text, len(text), PICKED[picked])
    drafter.start(sequence)
    hidden_outputs = states_of(family, head, text[:-1])
    drafter.commit([Step(sequence, None, None, len(text) - 1, states=hidden_outputs)])
    (draft,) = drafter.draft([sequence], [8])
    assert len(draft) == 8 and set(draft.ids) <= own
    best = int(reference_logits(head, family, text[1:], hidden_outputs, 0)[-1].argmax())
    assert picked != "greedy" or draft.ids[0] == best


def bind(drafter: Any, target: Any) -> None:
    drafter.bind(Binding(target, seed=1))


@pytest.mark.parametrize("make", [Eagle, EagleTree])
def test_without_a_head_it_says_what_is_missing(make: Any, family: Model) -> None:
    with pytest.raises(DrafterError, match="ships no head for"):
        bind(make(), family)


def test_heads_of_other_targets_are_refused(family: Model, tmp_path: Path) -> None:
    head = random_head(family)
    other = load_model(make_family("llama", tmp_path, seed=5), dtype="float64")
    save_head(tmp_path / "head", head.config, head.tensors, fingerprint=target_fingerprint(other))
    with pytest.raises(IncompatibleDrafterError, match="was trained for another target"):
        bind(Eagle(tmp_path / "head"), family)
    deep = replace(head, config=replace(head.config, layers=(0, 3)))
    with pytest.raises(IncompatibleDrafterError, match=r"does not fit .* must rise and lie in 0\.\.2"):
        bind(Eagle(deep), family)


def test_the_targets_other_number_format_is_said(family: Model, tmp_path: Path, caplog: Any) -> None:
    head = random_head(family)
    place = tmp_path / "head"
    save_head(place, head.config, head.tensors, fingerprint=target_fingerprint(family), number_format="int8")
    with caplog.at_level("INFO", logger="forerun"):
        bind(Eagle(place), family)
    assert "trained on states of" in caplog.text and "in int8, which is served in float64" in caplog.text


@pytest.mark.parametrize("inner", ["eagle", Eagle()])
def test_it_cannot_draft_for_a_draft_model(inner: Any) -> None:
    with pytest.raises(DrafterError, match="the draft model is its target"):
        Staged(drafter=inner)
    with pytest.raises(DrafterError, match="wraps a drafter that runs a model"):
        CrossVocab(drafter="eagle")


def test_a_text_that_is_rewritten_is_drafted_for_when_its_states_are_told() -> None:
    target = AdditiveModel()
    drafter: Any = Eagle(aligned_head(target))
    bind(drafter, target)
    text = target.greedy([1, 2], 10)
    sequence = Sequence(0, text[:9], 2, GREEDY)
    drafter.start(sequence)
    head = drafter.drafting_model.source.head
    drafter.commit([Step(sequence, None, None, 8, states=states_of(target, head, text[:8]))])
    (draft,) = drafter.draft([sequence], [3])
    assert draft.ids == target.greedy(text[:9], 3)[:3]
    sequence.token_ids = [*text[:5], 9, 8, 7]
    drafter.rewind(sequence, 5)
    (draft,) = drafter.draft([sequence], [3])
    assert draft.ids == []
    drafter.commit([Step(sequence, None, None, 7, states=states_of(target, head, sequence.token_ids[:7])[5:])])
    (draft,) = drafter.draft([sequence], [3])
    assert draft.ids == target.greedy(sequence.token_ids, 3)
    (again,) = drafter.draft([sequence], [3])  # asked twice for the same text
    assert again.ids == draft.ids
    drafter.stop(sequence)
    assert drafter.nbytes == 0


def test_where_nobody_drafts_few_states_are_held_and_a_draft_begins_behind_a_gap(
    family: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefillPolicy, "prefills", lambda *_: False)
    head = random_head(family, draft_vocab_size=50)
    drafter = Eagle(head)
    bind(drafter, family)
    text = torch.randint(0, VOCAB, (7 * MAX_HELD_STATES,), generator=torch.Generator().manual_seed(5)).tolist()
    sequence = Sequence(0, text[:2], 2, GREEDY)
    drafter.start(sequence)
    state = drafter.drafting_model.states[sequence]
    hidden_outputs = states_of(family, head, text[:-1])
    done = 0
    for count in (3, 1, MAX_HELD_STATES, 3 * MAX_HELD_STATES, *[1] * (len(text) - 5 - 4 * MAX_HELD_STATES)):
        sequence.token_ids[:] = text[: done + count + 1]
        drafter.commit([Step(sequence, None, None, done + count, states=hidden_outputs[done : done + count])])
        done += count
        assert (
            state.cache.length == 0
            and state.target_states is not None
            and len(state.target_states) <= 2 * MAX_HELD_STATES
        )
    assert done == len(text) - 1
    held = len(state.target_states)
    (draft,) = drafter.draft([sequence], [3])
    assert state.cache.length == held >= MAX_HELD_STATES
    first = len(text) - 1 - held
    for count, token in enumerate(draft.ids):
        rows = [*text[first + 1 :], *draft.ids[:count]]
        assert int(reference_logits(head, family, rows, hidden_outputs[first:], count)[-1].argmax()) == token
