"""Several drafters as one: who is asked, whose draft is taken, and what each is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import pytest

from doubles import FakeModel, References, Scripted, adversaries
from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import Binding, Hybrid, Traits, build_drafter, make_drafter
from forerun.drafters.early_exit import EarlyExit
from forerun.drafters.hybrid.members import agreement, merge, remaining_draft
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, DrafterError
from forerun.speculation import CostModel
from forerun.types import Draft, Needs, Sequence, Step

GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


def tree(*nodes: tuple[int, int]) -> Draft:
    """Return (token, parent) of each node."""
    return Draft([token for token, _ in nodes], [parent for _, parent in nodes])


def references(fake: FakeModel) -> References:
    return {tuple(prompt): fake.greedy(prompt, 60) for prompt in PROMPTS}


def run(hybrid: Hybrid, k: int | str = 4, chunk: int = 256) -> tuple[FakeModel, list[Any]]:
    """Generate from all prompts."""
    fake = FakeModel()
    llm = LLM(fake, hybrid, num_draft_tokens=k, prefill_chunk=chunk)
    results: Any = llm.generate(PROMPTS, GREEDY)
    for prompt, result in zip(PROMPTS, results):
        assert result.token_ids == fake.greedy(prompt, 40)
    return fake, results


def sources(results: list[Any]) -> dict[str, tuple[int, int]]:
    """Name -> drafted and accepted."""
    total: dict[str, tuple[int, int]] = {}
    for result in results:
        for name, own in result.stats.sources.items():
            drafted, accepted = total.get(name, (0, 0))
            total[name] = drafted + own.num_draft_tokens, accepted + own.num_accepted_tokens
    return total


@pytest.mark.parametrize("mode", ["first", "merge"])
@pytest.mark.parametrize(
    "kinds", [("right", "wrong"), ("wrong", "right"), ("random", "tree", "empty"), ("duplicated",)]
)
def test_the_text_is_the_targets_whatever_the_sources(mode: str, kinds: tuple[str, ...]) -> None:
    bad = adversaries(references(FakeModel()), 11)
    drafters = [bad[kind] for kind in kinds]
    _, results = run(Hybrid(drafters, mode, kinds), 6)
    assert all(not drafter.active for drafter in drafters)
    if "right" in kinds:
        drafted, accepted = sources(results)["right"]
        assert 0 < accepted <= drafted


def test_a_source_that_is_always_wrong_is_left() -> None:
    bad = adversaries(references(FakeModel()), 11)
    _, results = run(Hybrid([bad["wrong"], bad["right"]], names=["wrong", "right"]))
    total = sources(results)
    assert total["right"][1] > 60
    assert total["wrong"][0] < total["right"][0] / 3


@pytest.mark.parametrize("mode", ["first", "merge"])
def test_a_source_that_takes_longer_than_it_saves_is_not_asked(mode: str) -> None:
    counts = {}
    for name, seconds in (("quick", 1e-9), ("slow", 50.0)):
        hybrid = Hybrid([adversaries(references(FakeModel()), 11)["right"]], mode, [name])
        llm = LLM(FakeModel(), None)
        costs = CostModel()
        for batch in (1, 4):
            costs.add_draft(batch, 1, seconds)
        engine = Engine(llm.target, hybrid, config=EngineConfig(num_draft_tokens="auto"))
        hybrid.use_costs({name: costs})
        for prompt in PROMPTS:
            engine.add(prompt, GREEDY)
        results = []
        while engine.has_work:
            results += [output.choice for output in engine.step() if output.choice is not None]
        counts[name] = sum(choice.stats.num_draft_tokens for choice in results)
    assert counts["slow"] == 0 < counts["quick"]


def test_an_empty_draft_leaves_the_place_to_the_next() -> None:
    bad = adversaries(references(FakeModel()), 11)
    _, results = run(Hybrid([bad["empty"], bad["right"]], names=["empty", "right"]))
    assert sources(results).keys() == {"right"}
    assert all(result.stats.acceptance_rate == 1 for result in results)


def test_merging_by_prefix() -> None:
    left, right = tree((1, -1), (2, 0), (3, 1)), tree((1, -1), (4, 0), (5, -1))
    merged = merge([("a", left), ("b", right)], [[0.9, 0.8, 0.1], [0.7, 0.6, 0.5]], 4)
    assert merged.draft.ids == [1, 2, 4, 5]
    assert merged.draft.parents == [-1, 0, 0, -1]
    assert merged.draft.sources == ("a", "a", "b", "b")
    assert merged.kept_nodes == [[(0, 0), (1, 1)], [(0, 0), (1, 2), (2, 3)]]
    assert remaining_draft(left, [0, 1]).ids == [1, 2] and remaining_draft(left, [0, 1, 2]) is left


def test_a_node_whose_parent_did_not_stay_goes_too() -> None:
    merged = merge([("a", tree((1, -1))), ("b", tree((2, -1), (3, 0)))], [[0.9], [0.2, 0.1]], 1)
    assert merged.draft.ids == [1]
    assert merged.kept_nodes == [[(0, 0)], []]


def test_agreement_judges_as_far_as_the_new_tokens_reach() -> None:
    chain = Draft.chain([7, 8, 9, 1])
    assert agreement(chain, [7, 8]) == ([0, 1], 2)
    assert agreement(chain, [7, 5]) == ([0], 4)
    assert agreement(chain, [6]) == ([], 4)
    assert agreement(tree((1, -1), (2, -1), (3, 1)), [2, 3, 4]) == ([1, 2], 3)


class Watching(Scripted):
    """Insists on what a step promises of its rows."""

    needs = Needs(top_tokens=2)

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            if step.draft is None or step.verdict is None:
                continue
            assert step.top_tokens is not None and step.top_tokens.shape[1] == 2
            n, ids = len(step.draft), step.sequence.token_ids
            before = len(ids) - len(step.verdict.path) - 1
            top = step.top_tokens[-(n + 1) :]
            row, at = 0, before
            for node in [*step.verdict.path, None]:
                assert int(top[row, 0]) == ids[at]  # greedy: the most probable token is the committed one
                row, at = (0 if node is None else node + 1), at + 1
        super().commit(steps)


@pytest.mark.parametrize("mode", ["first", "merge"])
def test_every_source_sees_its_own_part_and_its_own_rows(mode: str) -> None:
    known = references(FakeModel())

    def half(sequence: Sequence, budget: int) -> list[int]:
        """Draft right on every other step, and wrong from the second token on in the others."""
        right = adversaries(known, 11)["right"].propose(sequence, budget)
        assert not isinstance(right, Draft)
        return list(right) if len(sequence.token_ids) % 2 else [*right[:1], *[(t + 1) % 11 for t in right[1:]]]

    watching = [Watching(half), Watching(adversaries(known, 11)["tree"].propose)]
    run(Hybrid(watching, mode), 5)
    told = [step for own in watching for step in own.steps if step.verdict is not None]
    assert any(step.verdict and len(step.verdict.path) > 1 for step in told)
    assert any(step.draft is not None and len(step.draft) == 0 for step in told) or mode == "merge"


def test_needs_and_prediction_are_the_union() -> None:
    one, two = Watching(lambda *_: []), Scripted(lambda *_: [])
    hybrid = Hybrid([two, one])
    assert hybrid.needs == Needs(2, False) and not hybrid.traits.reads_prediction
    two.needs, two.traits, two.nbytes = Needs(1, True), Traits(("two",), reads_prediction=True), 5
    assert hybrid.needs == Needs(2, True) and hybrid.traits.reads_prediction and hybrid.nbytes == 5


class Asked(Scripted):
    """Remembers the budgets it was given."""

    def __init__(self, propose: Callable[[Sequence, int], Draft | Seq[int]], traits: Traits) -> None:
        super().__init__(propose)
        self._traits = traits
        self.budgets: set[int] = set()

    @property
    def traits(self) -> Traits:
        return self._traits

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        self.budgets.update(num_draft_tokens)
        return super().draft(sequences, num_draft_tokens, min_acceptance_prob)


@pytest.mark.parametrize("mode", ["first", "merge"])
@pytest.mark.parametrize(("k", "asked"), [(5, set()), (6, {6}), (20, {6})])
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_a_source_whose_drafts_come_whole_is_asked_for_all_or_nothing(
    mode: str, k: int, asked: set[int], kind: str
) -> None:
    bad = adversaries(references(FakeModel()), 11)
    whole = Asked(bad[kind].propose, Traits(("whole",), fixed_length_draft=6))
    hybrid = Hybrid([whole, bad["right"]], mode, ["whole", "right"])
    run(hybrid, k)
    assert whole.budgets == (set() if (mode, k) == ("first", 20) else asked)  # 20 tokens of the other are worth more
    assert hybrid.traits.fixed_length_draft is None


class Tapped(Scripted):
    """Needs states of its own layers and most probable tokens of its own number, and keeps what it is told of them."""

    def __init__(self, propose: Callable[[Sequence, int], Draft | Seq[int]], needs: Needs) -> None:
        super().__init__(propose)
        self._needs = needs
        self.told: list[Step] = []

    @property
    def needs(self) -> Needs:
        return self._needs

    def commit(self, steps: Seq[Step]) -> None:
        self.told += steps
        super().commit(steps)


@pytest.mark.parametrize("mode", ["first", "merge"])
def test_every_source_is_told_of_its_own_layers_and_as_many_tokens_as_it_needs(mode: str) -> None:
    bad = adversaries(references(FakeModel()), 11)
    needs = [Needs(1, True, (2, 5)), Needs(3, False, (0, 5)), Needs(2), Needs()]
    sources = [Tapped(bad[kind].propose, each) for kind, each in zip(("right", "tree", "wrong", "right"), needs)]
    hybrid = Hybrid(sources, mode)
    assert hybrid.needs == Needs(3, True, (0, 2, 5))
    run(hybrid, 5, chunk=2)
    for source, each in zip(sources, needs):
        for step in source.told:
            if step.draft is None and not each.prompt_rows:
                assert step.top_tokens is None and step.hidden_outputs is None
                continue
            if not each.top_tokens:
                assert step.top_tokens is None
            else:
                assert step.top_tokens is not None and step.top_tokens.shape[1] == each.top_tokens
            if not each.layers:
                assert step.hidden_outputs is None
                continue
            assert step.hidden_outputs is not None and step.top_tokens is not None
            assert step.hidden_outputs.shape[:2] == (len(step.top_tokens), len(each.layers))
            assert step.hidden_outputs[:, :, 1].unique(dim=0).tolist() == [
                list(each.layers)
            ]  # the fake's states tell the layer
            slots = step.hidden_outputs[:, 0, 0].long()  # and the row
            assert FakeModel().table[slots].topk(each.top_tokens).indices.tolist() == step.top_tokens.tolist()
        assert {step.draft is None for step in source.told} == {True, False}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hybrid([]), "at least one source"),
        (lambda: Hybrid([Scripted(lambda *_: [])], "best"), "mode is 'best'"),
        (lambda: build_drafter("hybrid:sources=suffix+nothing"), "'nothing'"),
        (lambda: build_drafter("hybrid:sources=suffix+suffix"), "different names"),
        (lambda: build_drafter("hybrid:mode=third"), "mode is 'third'"),
        (lambda: make_drafter("hybrid", Binding(FakeModel())), "'staged' of the hybrid"),
    ],
)
def test_what_cannot_be(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, DrafterError), match=words):
        make()


def test_a_source_that_fails_to_start_leaves_the_others_clean() -> None:
    class Failing(Scripted):
        def start(self, sequence: Sequence) -> None:
            raise RuntimeError("no")

    first = Scripted(lambda *_: [])
    engine = Engine(FakeModel(), Hybrid([first, Failing(lambda *_: [])]), config=EngineConfig(num_draft_tokens=2))
    engine.add([1, 2], GREEDY)
    (output,) = engine.step()
    assert str(output.error) == "no" and not first.active


def test_only_one_source_may_write_into_the_targets_cache() -> None:
    suffix = build_drafter("suffix")[0]
    assert Hybrid([EarlyExit(1), suffix]).traits.writes_cache
    assert not Hybrid([suffix]).traits.writes_cache
    with pytest.raises(ConfigError, match="early-exit and hybrid of the hybrid both compute"):
        Hybrid([EarlyExit(1), Hybrid([EarlyExit(2)])])
    with pytest.raises(ConfigError, match="Take one of them"):
        build_drafter("hybrid:sources=early-exit:exit_layer=4+early-exit:exit_layer=8")
