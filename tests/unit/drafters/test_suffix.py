"""Suffix drafting: what is copied, how much of it, and who may read whose text."""

from __future__ import annotations

import gc
import random

import pytest

from forerun.config import SamplingParams
from forerun.drafters import Suffix
from forerun.drafters.lookup.copy_drafter import COPY_RATES
from forerun.drafters.lookup.suffix import LENGTH_BASE, LENGTH_FACTOR, SharedText, Tenants
from forerun.drafters.lookup.suffix_automaton import SuffixAutomaton
from forerun.errors import ConfigError, SamplingError
from forerun.types import Draft, Sequence, Step, Verdict

PARAMS = SamplingParams()


def sequence(token_ids: list[int], tenant: str | None = None, max_length: int = 2**62) -> Sequence:
    return Sequence(0, list(token_ids), len(token_ids), SamplingParams(tenant=tenant), max_length=max_length)


def begun(drafter: Suffix, token_ids: list[int], tenant: str | None = None) -> Sequence:
    own = sequence(token_ids, tenant)
    drafter.start(own)
    return own


def drafted(drafter: Suffix, own: Sequence, budget: int = 16, min_acceptance_prob: float = 0.0) -> list[int]:
    (draft,) = drafter.draft([own], [budget], min_acceptance_prob)
    assert draft.is_chain and draft.probs is None
    tokens: list[int] = draft.ids
    return tokens


def verified(drafter: Suffix, own: Sequence, draft: Draft, said: list[int]) -> None:
    """Replace the draft by these tokens of the target."""
    tokens = draft.ids
    accepted = next((i for i, (a, b) in enumerate(zip(tokens, said, strict=False)) if a != b), len(tokens))
    own.token_ids += said[: accepted + 1]
    drafter.commit([Step(own, draft, Verdict(list(range(accepted)), own.token_ids[-1]), len(own.token_ids) - 1)])


def test_the_longest_match_decides() -> None:
    drafter = Suffix()
    own = begun(drafter, [1, 2, 3, 40, 9, 3, 50, 9, 3, 50, 8, 2, 3, 60, 1, 2, 3])
    # 3 alone was followed by 50 twice, 2 3 by 60 most recently, 1 2 3 by 40
    assert drafted(drafter, own, 4) == [40, 9, 3, 50]


def test_the_copy_grows_with_the_match() -> None:
    text = list(range(100, 140))
    for matched in (1, 2, 3):
        drafter = Suffix()
        own = begun(drafter, [*text, 7, *text[:matched]])
        expected = LENGTH_BASE + LENGTH_FACTOR * matched
        assert drafted(drafter, own, 64) == text[matched : matched + expected]
        assert drafted(drafter, own, 2) == text[matched : matched + 2]


def test_no_copy_below_the_least_match() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2]
    for least, expected in ((2, [3, 4, 5]), (3, [])):
        drafter = Suffix(min_match=least)
        assert drafted(drafter, begun(drafter, text), 3) == expected
    assert drafted(drafter, begun(drafter, [1, 2, 3]), 3) == []


def test_a_copy_that_overlaps_the_end_goes_on() -> None:
    drafter = Suffix()
    assert drafted(drafter, begun(drafter, [9, 1, 2, 3, 1, 2, 3]), 7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafted(drafter, begun(drafter, [5, 5, 5]), 6) == [5] * 6


def test_room_bounds_the_draft() -> None:
    drafter = Suffix()
    for room, length in ((3, 3), (0, 0), (-1, 0)):
        own = sequence([1, 2, 3, 1, 2, 3], max_length=7 + room)
        drafter.start(own)
        assert own.room == room
        assert len(drafted(drafter, own, 8)) == length


def test_prompts_in_chunks_and_budgets_of_zero_change_nothing() -> None:
    rng = random.Random(0)
    eager, lazy = Suffix(), Suffix()
    tokens = [rng.randrange(3) for _ in range(60)]
    one, other = begun(eager, tokens[:30]), begun(lazy, tokens[:30])
    for end in (8, 16, 24):
        lazy.commit([Step(other, None, None, end)])
    held = lazy.nbytes
    assert held > 0
    for token in tokens[30:]:
        drafted(eager, one)
        one.token_ids.append(token)
        assert drafted(lazy, other, 0) == []
        other.token_ids.append(token)
        lazy.commit([Step(other, Draft.empty(), Verdict([], token), len(other.token_ids) - 1)])
    assert lazy.nbytes == held  # nothing is computed before someone wants a draft
    assert drafted(lazy, other) == drafted(eager, one) != []


@pytest.mark.parametrize("end", range(7))
def test_a_token_is_read_once_however_often_its_computing_is_told(end: int) -> None:
    drafter = Suffix()
    own = begun(drafter, [1, 2, 3, 4, 5, 6])
    assert drafted(drafter, own) == []
    held = drafter.nbytes
    drafter.commit([Step(own, None, None, end)])
    assert drafted(drafter, own) == [] and drafter.nbytes == held
    own.token_ids.append(2)
    assert drafted(drafter, own, 3) == [3, 4, 5]


def test_a_batch_is_its_sequences_one_by_one() -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(5)]
    drafter = Suffix()
    batch = [begun(drafter, text) for text in texts]
    budgets = [4, 0, 9, 1, 16]
    together = [draft.ids for draft in drafter.draft(batch, budgets)]
    for text, budget, tokens in zip(texts, budgets, together, strict=True):
        alone = Suffix()
        assert drafted(alone, begun(alone, text), budget) == tokens


def test_a_token_must_be_worth_its_price() -> None:
    drafter = Suffix()
    own = begun(drafter, [*range(100, 130), 7, 100])
    accept_prob, count = 1.0, 0
    for length in range(1, 6):
        accept_prob *= COPY_RATES[length.bit_length()]
        count += accept_prob > 0.15
    assert 0 < count < 5
    assert drafted(drafter, own, 5, min_acceptance_prob=0.15) == list(range(101, 101 + count))
    assert drafted(drafter, own, 5, min_acceptance_prob=COPY_RATES[1]) == []
    assert len(drafted(drafter, own, 5)) == 5


def test_the_price_is_held_against_what_was_accepted() -> None:
    right, wrong = Suffix(), Suffix()
    for drafter, said in ((right, 101), (wrong, 50)):
        for _ in range(40):
            own = begun(drafter, [*range(100, 130), 7, 100])
            (draft,) = drafter.draft([own], [5], 0.5)  # too dear at first: what is not drafted teaches as well
            verified(drafter, own, draft, [said, 102, 103])
            drafter.stop(own)
    own = begun(right, [*range(100, 130), 7, 100])
    assert drafted(right, own, 5, 0.5)[:1] == [101]
    own = begun(wrong, [*range(100, 130), 7, 100])
    assert drafted(wrong, own, 5, 0.1) == []


def test_without_share_nothing_is_shared() -> None:
    drafter = Suffix()
    begun(drafter, list(range(100, 120)), "a")
    assert drafted(drafter, begun(drafter, [100, 101, 102], "a")) == []


def test_text_is_shared_within_a_tenant_and_never_between() -> None:
    drafter = Suffix(share=True)
    secret = list(range(100, 120))
    done = begun(drafter, secret[:10], "a")
    done.token_ids += secret[10:]
    drafter.stop(done)  # what it said since its last draft is kept
    for tenant in ("b", None):
        begun(drafter, [1, 2, 3, 4, 5], tenant)
        assert drafted(drafter, begun(drafter, secret[:3], tenant)) == []
    assert drafted(drafter, begun(drafter, secret[:3], "a"), 64) == secret[3:16]
    assert drafted(drafter, begun(drafter, [9, *secret[9:12]], "a"), 64) == secret[12:]
    assert drafted(drafter, begun(drafter, [9, 1, 2, 3], "a")) == []


def test_nothing_is_shared_by_requests_without_a_tenant() -> None:
    drafter = Suffix(share=True)
    drafter.stop(begun(drafter, list(range(100, 120))))
    assert drafted(drafter, begun(drafter, [100, 101, 102])) == []
    assert drafted(drafter, begun(drafter, [100, 101, 102], "a")) == []


def test_a_running_request_is_read_as_it_grows() -> None:
    drafter = Suffix(share=True)
    one, other = begun(drafter, [1, 2], "a"), begun(drafter, [1, 2], "a")
    assert drafted(drafter, one) == drafted(drafter, other) == []
    one.token_ids += [30, 40, 50]
    assert drafted(drafter, one) == []
    assert drafted(drafter, other) == [30, 40, 50]
    other.token_ids += [30, 41]
    assert drafted(drafter, other) == []
    assert drafted(drafter, begun(drafter, [7, 1, 2, 30], "a"), 1) == [41]  # as frequent as 40, and newer


def test_its_own_text_goes_before_anothers_unless_that_matches_longer() -> None:
    drafter = Suffix(share=True)
    for _ in range(3):
        drafter.stop(begun(drafter, [1, 2, 3, 70, 71, 72], "a"))
    assert drafted(drafter, begun(drafter, [9, 2, 3, 80, 2, 3], "a"), 2) == [80, 2]
    assert drafted(drafter, begun(drafter, [9, 2, 3, 80, 1, 2, 3], "a"), 2) == [70, 71]


def test_the_oldest_text_goes_first() -> None:
    drafter = Suffix(share=True, max_shared_tokens=40)
    texts = [list(range(start, start + 10)) for start in range(100, 200, 10)]
    for text in texts:
        drafter.stop(begun(drafter, text, "a"))
    known = [bool(drafted(drafter, begun(drafter, text[:2], "a"))) for text in texts]
    assert known[-1] and known[-2] and not any(known[:6])
    assert known == sorted(known)


@pytest.mark.parametrize("length", [1, 7, 300])
def test_memory_is_bounded_per_tenant(length: int) -> None:
    rng = random.Random(length)
    text = SharedText(100)
    tenants = Tenants(100, 2)
    tenants._busy["a"] = text
    most = 0
    for _ in range(600 // length + 2):
        sharer = tenants.enter("a")
        sharer.write([rng.randrange(1000) for _ in range(length)])
        most = max(most, text.num_tokens)
        assert text.num_tokens <= 100
        assert len(text.young) + (len(text.old) if text.old else 0) <= 2 * 100 + 2
        tenants._busy["a"].sharers.discard(sharer)
    assert most > 50 or length == 1


def test_the_number_of_tenants_is_bounded() -> None:
    tenants = Tenants(100, 2)
    running = tenants.enter("running")
    for name in "abcd":
        sharer = tenants.enter(name)
        sharer.write([1, 2, 3])
        assert len(tenants) <= 4
        tenants.leave(name, sharer)
    assert set(tenants._idle) == {"c", "d"}
    again = tenants.enter("c")
    assert [position.text.num_tokens for position in again.positions()] == [3]
    tenants.leave("c", again)
    tenants.leave("running", running)
    assert set(tenants._idle) == {"c", "running"}  # the least recent went
    assert not tenants._busy


def test_a_sequence_keeps_its_match_when_its_text_becomes_the_old_one() -> None:
    drafter = Suffix(share=True, max_shared_tokens=40)
    drafter.stop(begun(drafter, list(range(100, 115)), "a"))
    reader = begun(drafter, [100, 101, 102], "a")
    assert drafted(drafter, reader, 2) == [103, 104]
    drafter.stop(begun(drafter, list(range(300, 304)), "a"))  # 22 tokens: the young text is full
    writer = begun(drafter, [1], "a")
    drafted(drafter, writer)
    reader.token_ids.append(103)
    assert drafted(drafter, reader, 2) == [104, 105]
    assert drafted(drafter, begun(drafter, [101, 102], "a"), 2) == [103, 104]
    drafter.stop(begun(drafter, list(range(400, 425)), "a"))
    drafter.stop(begun(drafter, list(range(500, 525)), "a"))
    assert drafted(drafter, reader) == []


def automata() -> int:
    gc.collect()
    return sum(type(thing) is SuffixAutomaton for thing in gc.get_objects())


@pytest.mark.parametrize("share", [False, True])
def test_what_a_sequence_held_is_freed(share: bool) -> None:
    before = automata()
    drafter = Suffix(share=share)
    assert drafter.nbytes == 0
    own = begun(drafter, [1, 2, 3] * 50, "a")
    other = begun(drafter, [1, 2, 3] * 50)
    drafter.draft([own, other], [4, 4])
    assert automata() == before + 2 + share
    for leaving in (own, own, other):
        drafter.stop(leaving)
    assert automata() == before + share  # the tenant's text stays
    assert not drafter._states and not drafter._copied
    assert (drafter.nbytes > 0) == share


@pytest.mark.parametrize(("options", "words"), [({"min_match": 0}, "min_match is 0"), ({"max_shared_tokens": 1}, "1")])
def test_impossible_options_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Suffix(**options)


def test_a_tenant_has_a_name() -> None:
    with pytest.raises(SamplingError, match="tenant is ''"):
        SamplingParams(tenant="")
