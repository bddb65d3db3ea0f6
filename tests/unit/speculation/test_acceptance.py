"""What nodes are worth, and what is chosen because of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forerun.speculation import AcceptanceStats, Probes, Prospects
from forerun.speculation.goodput import ProspectsAlone, min_acceptance_prob


def feed(
    acceptance: AcceptanceStats, key: str, accept_prob: float, count: int, num_draft_tokens: int = 6, seed: int = 0
) -> None:
    """Chains whose every token is accepted with this chance, once the one before was."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        path = list(itertools.takewhile(lambda _: rng.random() < accept_prob, range(num_draft_tokens)))
        acceptance.observe(key, num_draft_tokens, num_draft_tokens, path)


def test_a_chain_is_a_product_and_goes_on_as_it_was_beyond_what_was_seen() -> None:
    acceptance = AcceptanceStats()
    feed(acceptance, "a", 0.7, 600)
    gains, accept_probs = acceptance.expect(["new"], 10)
    assert gains[0] == pytest.approx(0.7 ** np.arange(1, 11), rel=0.25)
    assert gains[0, :3] == pytest.approx(0.7 ** np.arange(1, 4), rel=0.12)
    assert (accept_probs > 0.99).all()


def test_trees_are_counted_by_place() -> None:
    acceptance = AcceptanceStats()
    for first in np.random.default_rng(0).random(600) < 0.5:  # one of two siblings, or the second and its child
        acceptance.observe("a", 3, 3, [0] if first else [1, 2])
    gains, _ = acceptance.expect(["new"], 3)
    assert gains[0, 0] == pytest.approx(0.5, abs=0.1)
    assert gains[0].sum() == pytest.approx(1.5, abs=0.2)


def test_sequences_that_are_harder_are_known_and_others_are_not_blamed() -> None:
    acceptance = AcceptanceStats()
    for turn in range(60):
        feed(acceptance, "easy", 0.9, 1, seed=turn)
        feed(acceptance, "hard", 0.2, 1, seed=turn)
    gains, _ = acceptance.expect(["easy", "hard", "new"], 4)
    easy, hard, new = gains.sum(1)
    assert easy > 1.3 * new > 1.3 * 1.3 * hard


def test_drafts_that_are_not_there() -> None:
    acceptance = AcceptanceStats()
    for number in range(400):
        found = number % 4 == 0
        acceptance.observe("a", 5, 5 if found else 0, [0, 1, 2, 3, 4] if found else [])
    gains, accept_probs = acceptance.expect(["new"], 5)
    assert accept_probs[0] == pytest.approx(0.25, abs=0.12)
    assert gains[0] == pytest.approx(0.25, abs=0.12)


def test_the_fate_of_the_last_draft_tells_of_the_next() -> None:
    acceptance = AcceptanceStats()
    for number in range(800):
        good = number // 10 % 2 == 1
        acceptance.observe("a", 4, 4, [0, 1, 2, 3] if good else [])
    now = acceptance.expect(["a"], 4)[0][0, 0]
    acceptance.observe("a", 4, 4, [])
    assert now > 0.75 > 0.3 > acceptance.expect(["a"], 4)[0][0, 0]


def test_nothing_is_kept_of_what_has_left() -> None:
    acceptance = AcceptanceStats()
    feed(acceptance, "a", 0.5, 10)
    acceptance.stop("a")
    acceptance.stop("never seen")
    assert not acceptance._own and not acceptance._odds and not acceptance._fate


def prospects(batch: int, accept_prob: float, row: float = 0.01, node: float = 0.05, places: int = 16) -> Prospects:
    gains = np.tile(accept_prob ** np.arange(1, places + 1), (batch, 1))
    rows = np.arange(batch * (places + 1) + 1)
    return Prospects(gains, np.ones_like(gains), 1 + row * rows, node * np.arange(places + 1))


def alone_of(one: Prospects) -> ProspectsAlone:
    return ProspectsAlone(one.gains[0].tolist(), one.accept_probs[0].tolist(), one.target.tolist(), one.draft.tolist())


def test_alone_and_together_are_the_same_calculation() -> None:
    one = prospects(1, 0.8)
    alone = alone_of(one).rates
    grid, num_draft_tokens = one.rates_together()
    for cell in np.ndindex(grid.shape):
        assert grid[cell] == pytest.approx(alone[num_draft_tokens[cell][0]])
    for own in (one, alone_of(one)):
        tokens, seconds = own.outlook([7])
        assert tokens / seconds == pytest.approx(alone[7])
    assert alone[3] == pytest.approx((1 + 0.8 + 0.64 + 0.512) / (1 + 0.01 * 4 + 0.15))


def test_the_price_stands_where_the_best_chain_ends() -> None:
    one = prospects(1, 0.8)
    rates = alone_of(one).rates
    best = rates.index(max(rates))
    least = min_acceptance_prob(rates[best], [best], one.target, one.draft)
    assert 0.8 ** (best + 1) < least * 1.1 and 0.8**best > least * 0.9
    assert min_acceptance_prob(1.0, [0], one.target, one.draft) == 0.0


def test_what_rows_cost_is_spent_on_the_better_sequences() -> None:
    gains = np.stack([0.9 ** np.arange(1, 9), 0.2 ** np.arange(1, 9)])
    both = Prospects(gains, np.ones_like(gains), 1 + 0.2 * np.arange(19), np.zeros(9))
    grid, num_draft_tokens = both.rates_together()
    good, bad = num_draft_tokens[np.unravel_index(int(grid.argmax()), grid.shape)]
    assert good >= 3 > 1 >= bad


def test_probes_are_paid_for() -> None:
    probes = Probes()
    made = 0
    for _ in range(1000):
        probes.earn(1.0)
        if probes.due:
            made += probes.buy(2.0)
    assert made == 5  # one per cent of a thousand seconds, at two seconds each
    for _ in range(100):
        probes.earn(1.0)
        if probes.due:
            made += probes.buy(0.0)
    assert made <= 5 + 100 // 8 + 1


@pytest.mark.parametrize("batch", [1, 128, 2000])
def test_more_rows_than_costs_are_kept_of(batch: int) -> None:
    probability = min_acceptance_prob(0.1, [12] * batch, list(range(1025)), list(range(13)))
    assert 0.0 <= probability <= 0.9
