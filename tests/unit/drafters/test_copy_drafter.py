"""What copies teach about copies."""

from __future__ import annotations

import pytest

from forerun.config import SamplingParams
from forerun.drafters.lookup.copy_drafter import CopyDrafter, level_of
from forerun.types import Draft, Sequence, Step, Verdict

PRIOR = (0.5, 0.5, 0.5, 0.5)


class Copier(CopyDrafter):
    """Copies what it is given, whatever the sequence holds."""

    def start(self, sequence: Sequence) -> None:
        pass

    def _copy(self, sequence: Sequence, count: int) -> tuple[list[int], list[int]]:
        return self.copy

    def drafted(
        self, sequence: Sequence, token_ids: list[int], lengths: list[int], min_acceptance_prob: float
    ) -> Draft:
        self.copy = token_ids, [*map(level_of, lengths)]
        return self.draft([sequence], [len(token_ids)], min_acceptance_prob)[0]

    def observe(self, sequence: Sequence) -> None:
        self.commit([Step(sequence, Draft(), Verdict([], 0), 0)])

    def rate(self, length: int) -> float:
        return self._rates.rate(level_of(length))


def sequence() -> Sequence:
    return Sequence(0, [1, 2], 2, SamplingParams())


@pytest.mark.parametrize(
    ("said", "better", "worse"),
    [
        ([5, 6, 7], {1, 2, 4}, set()),
        ([5, 6], {1, 2}, set()),
        ([5, 9, 7], {1}, {2}),  # what stands after the wrong one was never tried, whoever drafted it
        ([9], set(), {1}),
        ([], set(), set()),
    ],
)
@pytest.mark.parametrize("min_acceptance_prob", [0.0, 0.9])
def test_each_token_is_a_trial_up_to_the_first_wrong_one(
    said: list[int], better: set[int], worse: set[int], min_acceptance_prob: float
) -> None:
    rates, own = Copier(PRIOR), sequence()
    assert len(rates.drafted(own, [5, 6, 7], [1, 2, 4], min_acceptance_prob)) == (0 if min_acceptance_prob else 3)
    own.token_ids += said
    for _ in range(2):  # the second time there is nothing new to learn
        rates.observe(own)
        assert {length for length in (1, 2, 4) if rates.rate(length) > 0.5} == better
        assert {length for length in (1, 2, 4) if rates.rate(length) < 0.5} == worse


def test_lengths_of_as_many_binary_digits_are_one_level() -> None:
    rates, own = Copier(PRIOR), sequence()
    rates.drafted(own, [5], [2], 0.0)
    own.token_ids.append(5)
    rates.observe(own)
    assert rates.rate(3) == rates.rate(2) > rates.rate(1) == rates.rate(4) == rates.rate(10**6) == 0.5


def test_nodes_name_their_source_where_one_is_given() -> None:
    own = sequence()
    assert Copier(source="here").drafted(own, [5, 6], [9, 10], 0.0).sources == ("here", "here")
    assert Copier().drafted(own, [5, 6], [9, 10], 0.0).sources == ()
    assert Copier(source="here").drafted(own, [5, 6], [9, 10], 1.0).sources == ()


def test_a_sequence_differs_from_the_others_by_its_own_copies() -> None:
    rates, wrong, right = Copier((0.6,) * 8), sequence(), sequence()
    for _ in range(12):
        for own, said in ((wrong, 9), (right, 5)):
            rates.drafted(own, [5], [1], 0.0)
            own.token_ids.append(said)
            rates.observe(own)
    probs = [rates.drafted(own, [5, 5], [1, 4], 0.0).accept_probs for own in (wrong, right)]
    assert probs[0][0] < 0.4 < 0.6 < probs[1][0] and probs[0][1] < probs[1][1]
    rates.stop(wrong)
    fresh = rates.drafted(wrong, [5], [1], 0.0).accept_probs[0]
    assert probs[0][0] < fresh < probs[1][0]
