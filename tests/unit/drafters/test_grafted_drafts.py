"""A hybrid whose copies begin surely: the draft model's chain goes on below them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch

from doubles import MarkovModel
from forerun import SamplingParams
from forerun.drafters import Binding, Drafter, DraftModel, Hybrid, Traits
from forerun.drafters.validation import checked_drafts
from forerun.speculation import CostModel
from forerun.types import Draft, Sequence, Step, Verdict

V = 8
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(1))
NEXT: list[int] = TABLE.argmax(-1).tolist()
PRICES = [1.0 + 0.01 * rows for rows in range(49)]


class Copies(Drafter):
    """Copies `count` tokens, each with this probability after the one before it."""

    def __init__(self, count: int, prob: float) -> None:
        self.count = count
        self.prob = prob

    @property
    def traits(self) -> Traits:
        return Traits(("copies",), estimates=True)

    def start(self, sequence: Sequence) -> None: ...

    def stop(self, sequence: Sequence) -> None: ...

    def commit(self, steps: Seq[Step]) -> None: ...

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = []
        for sequence, most in zip(sequences, num_draft_tokens, strict=True):
            tokens = [sequence.token_ids[-1]]
            for _ in range(min(self.count, most)):
                tokens.append(NEXT[tokens[-1]])
            draft = Draft.chain(tokens[1:])
            draft.accept_probs = [self.prob ** (place + 1) for place in range(len(draft))]
            drafts.append(draft)
        return drafts


class Costs(CostModel):
    """Costs of a token, and of a token to be followed."""

    def __init__(self, token: float, lag: float) -> None:
        super().__init__()
        self.token = token
        self.lag = lag

    def draft(self, batch: int, places: int) -> Any:
        return np.arange(places + 1) * self.token

    def follow(self, lag: int) -> float:
        return lag * self.lag


def hybrid(
    copies: Copies,
    token: float = 0.05,
    lag: float = 0.0,
    acceptance: float = 0.8,
    mode: str = "first",
    context: int = 4096,
) -> Hybrid:
    model = MarkovModel(TABLE)
    model.context_length = context
    both = Hybrid([copies, DraftModel(model)], mode, names=["copies", "model"])
    both.bind(Binding(MarkovModel(TABLE), None, 3))
    both.use_costs({"model": Costs(token, lag)})
    for stats in both._choosers[1].acceptance.values():
        stats._prior = [acceptance]
    return both


def answer(both: Hybrid, steps: int, prompt: int = 30, most: int = 48, **options: Any) -> list[tuple[str, ...]]:
    """Return the sources of each draft of a greedy answer, all of whose tokens follow the table."""
    params = SamplingParams(temperature=0, **options)
    each = Sequence(0, [i % V for i in range(prompt)], prompt, params, max_length=prompt + 600)
    both.start(each)
    sources = []
    for _ in range(steps):
        both.see_prices(PRICES)
        (draft,) = checked_drafts(both, [each], [most], 0.0, V)
        sources.append(draft.sources)
        path: list[int] = []
        last = each.token_ids[-1]
        while len(path) < len(draft) and draft.ids[len(path)] == NEXT[last]:
            last = NEXT[last]
            path.append(len(path))
        new = [*(draft.ids[node] for node in path), NEXT[last]]
        each.token_ids = each.token_ids + new
        both.commit([Step(each, draft, Verdict(path, new[-1]), len(each.token_ids) - 1)])
    both.stop(each)
    return sources


def test_the_chain_goes_on_below_the_copy_and_is_judged_apart() -> None:
    both = hybrid(Copies(2, 0.95))
    sources = answer(both, 30)
    grafted = [each for each in sources if each[:2] == ("copies", "copies") and "model" in each]
    assert len(grafted) > 5
    tried, accepted, *_ = both._choosers[1].acceptance["greedy"]._now
    assert tried[0] == accepted[0] > 0  # of its own tokens, the first


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        ({"acceptance": 0.6, "token": 0.1, "lag": 0.0005}, Copies(2, 0.7)),  # trials
        ({"acceptance": 0.95, "token": 0.03}, Copies(6, 0.97)),  # more tokens than drafts alone have
        ({"acceptance": 0.9, "token": 0.08, "context": 60}, Copies(3, 0.97)),  # the model's context ends
    ],
)
def test_drafts_stay_whole_where_a_graft_is_refused_long_or_cut(options: dict[str, Any], copies: Copies) -> None:
    for prompt in (30, 300):
        answer(hybrid(copies, **options), 60, prompt)


def test_a_draft_that_has_room_for_the_copy_alone_is_the_copy() -> None:
    both = hybrid(Copies(3, 0.95))
    assert set(answer(both, 10, most=2)) <= {("copies", "copies"), ("copies", "model")}


def test_merged_drafts_are_no_grafts() -> None:
    both = hybrid(Copies(2, 0.95), mode="merge")
    answer(both, 20)
    tried = both._choosers[1].acceptance["greedy"]._now[0]
    assert all(each.num_given == 0 for each in both._given.values()) and tried[0] > 0


def test_two_models_without_copies_draft_from_the_first_step() -> None:
    both = Hybrid([DraftModel(MarkovModel(TABLE)), DraftModel(MarkovModel(TABLE))], names=["one", "two"])
    both.bind(Binding(MarkovModel(TABLE), None, 3))
    both.use_costs({"one": Costs(0.05, 0.001), "two": Costs(0.1, 0.001)})
    assert answer(both, 3)[0][0] == "one"
