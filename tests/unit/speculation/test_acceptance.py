"""What nodes are worth, and what is chosen because of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from forerun.speculation import AcceptanceStats


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
    gains, accept_probs = acceptance.expect("new", 10)
    assert gains == pytest.approx(0.7 ** np.arange(1, 11), rel=0.25)
    assert gains[:3] == pytest.approx(0.7 ** np.arange(1, 4), rel=0.12)
    assert min(accept_probs) > 0.99


def test_trees_are_counted_by_place() -> None:
    acceptance = AcceptanceStats()
    for first in np.random.default_rng(0).random(600) < 0.5:  # one of two siblings, or the second and its child
        acceptance.observe("a", 3, 3, [0] if first else [1, 2])
    gains, _ = acceptance.expect("new", 3)
    assert gains[0] == pytest.approx(0.5, abs=0.1)
    assert sum(gains) == pytest.approx(1.5, abs=0.2)


def test_sequences_that_are_harder_are_known_and_others_are_not_blamed() -> None:
    acceptance = AcceptanceStats()
    for turn in range(60):
        feed(acceptance, "easy", 0.9, 1, seed=turn)
        feed(acceptance, "hard", 0.2, 1, seed=turn)
    easy, hard, new = (sum(acceptance.expect(key, 4)[0]) for key in ("easy", "hard", "new"))
    assert easy > 1.3 * new > 1.3 * 1.3 * hard


def test_drafts_that_are_not_there() -> None:
    acceptance = AcceptanceStats()
    for number in range(400):
        found = number % 4 == 0
        acceptance.observe("a", 5, 5 if found else 0, [0, 1, 2, 3, 4] if found else [])
    gains, accept_probs = acceptance.expect("new", 5)
    assert accept_probs[0] == pytest.approx(0.25, abs=0.12)
    assert gains[0] == pytest.approx(0.25, abs=0.12)


def test_what_a_sequence_has_shown_fades_while_it_is_not_asked() -> None:
    acceptance = AcceptanceStats()
    feed(acceptance, "others", 0.6, 100)
    feed(acceptance, "hard", 0.0, 12)
    hard, others = acceptance.expect("hard", 1)[0][0], acceptance.expect("new", 1)[0][0]
    for _ in range(100):
        acceptance.fade("hard")
    acceptance.fade("never seen")
    assert hard < 0.6 * others
    assert acceptance.expect("hard", 1)[0][0] == pytest.approx(others, rel=0.15)


def test_a_record_is_believed_until_trials_say_otherwise() -> None:
    acceptance = AcceptanceStats(prior=(0.3, 0.5))
    assert acceptance.expect("a", 3)[0] == pytest.approx([0.3, 0.15, 0.075])
    feed(acceptance, "a", 0.9, 120)
    assert acceptance.expect("b", 1)[0][0] > 0.8


def test_one_rejected_draft_does_not_outweigh_a_record() -> None:
    """For its own sequence, and for the next one, a draft of four still promises more tokens than it costs."""
    acceptance = AcceptanceStats(prior=(0.7, 0.87))
    acceptance.observe("a", 4, 4, [])
    assert 0.52 < acceptance.expect("a", 1)[0][0] < 0.65
    acceptance.stop("a")
    assert acceptance.expect("b", 1)[0][0] > 0.6


def test_what_later_places_have_shown_stays_while_drafts_are_short() -> None:
    acceptance = AcceptanceStats()
    for number in range(60):
        acceptance.observe("a", 4, 4, [0, 1, 2, 3] if number % 5 == 0 else [0, 1])
    before = acceptance.expect("new", 4)[0]
    for _ in range(2000):
        acceptance.observe("b", 2, 2, [0, 1])
    gains = acceptance.expect("new", 4)[0]
    assert gains[2] / gains[1] == pytest.approx(before[2] / before[1], rel=0.15) == pytest.approx(0.2, abs=0.1)


def test_nothing_is_kept_of_what_has_left() -> None:
    acceptance = AcceptanceStats()
    feed(acceptance, "a", 0.5, 10)
    acceptance.stop("a")
    acceptance.stop("never seen")
    assert not acceptance._own and not acceptance._odds
