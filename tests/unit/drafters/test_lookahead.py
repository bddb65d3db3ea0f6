"""Lookahead decoding: the window against the paper's mask and a plain restatement, the pool, and what comes of them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from against_plain import assert_output_is_plain
from doubles import FakeModel
from forerun.config import MAX_NUM_DRAFT_TOKENS, EngineConfig, SamplingParams
from forerun.drafters import Binding, Lookahead
from forerun.drafters.hybrid.by_request import ByRequest
from forerun.drafters.lookup.lookahead import MAX_NGRAMS, LookaheadWindow, NgramPool, window_parents
from forerun.engine import Engine
from forerun.errors import ConfigError
from forerun.types import Draft, Sequence, Step, Verdict

GREEDY = SamplingParams(temperature=0, max_tokens=60)


def bound(fake: FakeModel, **options: Any) -> Lookahead:
    drafter = Lookahead(**options)
    drafter.bind(Binding(fake))
    return drafter


def generate(fake: FakeModel, drafter: Lookahead | None, prompt: list[int], params: SamplingParams, **config: Any):
    engine = Engine(fake, drafter, config=EngineConfig(seed=0, **config))
    engine.add(prompt, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(output.error is None for output in outputs)
    return [output.choice for output in outputs]


def ancestors(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("columns", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6])
def test_the_mask_of_the_paper(columns: int, num_rows: int) -> None:
    """Check that row 0 is causal; row r, column j sees row 0 up to column j, then column j of rows 1..r; all see the
    root."""
    place = [(r, j) for r in range(num_rows) for j in range(columns)][1:]
    parents, last_row = window_parents(columns, num_rows)
    assert len(parents) == len(place) == columns * num_rows - 1
    for node, (r, j) in enumerate(place):
        seen = [place[each] for each in ancestors(parents, node)]
        assert seen == [(0, i) for i in range(1, j + 1)] + [(i, j) for i in range(1, r + 1)]
        assert len(seen) == r + j  # the position, counted from the last committed token
    assert [place[node] if node >= 0 else (0, 0) for node in last_row] == [(num_rows - 1, j) for j in range(columns)]


def test_the_pool_against_a_list() -> None:
    rng = random.Random(0)
    pool, naive = NgramPool(3, 10**6), {}
    for _ in range(2000):
        head, rest = rng.randrange(4), (rng.randrange(3), rng.randrange(3))
        pool.push(head, rest)
        seen = naive.setdefault(head, [])
        naive[head] = [rest, *(each for each in seen if each != rest)][:3]
        assert pool.find(head) == naive[head]
        assert len(pool) == sum(map(len, naive.values()))
    assert pool.find(99) == []


def test_the_pool_is_bounded_and_forgets_the_oldest_token() -> None:
    pool = NgramPool(4, 50)
    for token_id in range(400):
        pool.push(0, (token_id % 3,))
        for rest in range(3):
            pool.push(token_id, (rest,))
        assert len(pool) <= 50
    assert pool.find(0) and pool.find(399) and pool.find(395) and not pool.find(100)


@pytest.mark.parametrize(("window", "ngram"), [(3, 4), (1, 3), (4, 3), (2, 5)])
def test_the_pool_holds_what_a_plain_restatement_finds(window: int, ngram: int) -> None:
    fake = FakeModel(vocab_size=13, order=2, seed=3)
    drafter = bound(fake, window=window, ngram=ngram, guesses=4, prompt_pool=False)
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=drafter.traits.fixed_length_draft))
    engine.add([1, 2, 3, 4, 5], GREEDY)
    engine.step()
    sequence, state = next(iter(drafter._states.items()))
    columns: list[list[int]] = []
    pool = NgramPool(4, 10**6)
    updates = 0
    while engine.has_work:
        context = list(sequence.token_ids)
        engine.step()
        if not columns:
            # the first window is filled from the prompt, in its order; only its newest row was computed
            assert state.window is not None
            columns = [list(column) for column in state.window._columns]
            for column in columns:
                run = column[:-1]
                assert all(b == a % 5 + 1 for a, b in pairwise(run))
            updates = 1
            continue
        if sequence.room < 2 * ngram + window:
            break
        columns[0][0] = context[-1]
        new = []
        for j, column in enumerate(columns):
            row0 = [columns[i][0] for i in range(j + 1)]
            new.append(int(fake.logits_after([*context[:-1], *row0, *column[1:]]).argmax()))
        if updates >= ngram - 2:
            for column, token_id in zip(columns, new, strict=True):
                pool.push(column[0], (*column[1:], token_id))
        columns = [[*column[1:], token_id] for column, token_id in zip(columns, new, strict=True)]
        updates += 1
        for token_id in range(13):
            assert state.pool.find(token_id) == pool.find(token_id)
    assert updates > ngram and len(pool) > 0


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_at_the_fixed_point_every_step_gives_a_whole_ngram(ngram: int) -> None:
    """Order 1: the text runs into a circle, and so does the window; a guess and its bonus are N tokens."""
    fake = FakeModel(vocab_size=8, order=1, seed=4)
    drafter = bound(fake, window=4, ngram=ngram, guesses=3)
    prompt, count = [1, 2, 3], 400
    (choice,) = generate(
        fake,
        drafter,
        prompt,
        SamplingParams(temperature=0, max_tokens=count),
        num_draft_tokens=drafter.traits.fixed_length_draft,
    )
    assert choice.token_ids == fake.greedy(prompt, count)
    assert choice.stats.mean_acceptance_length > 0.9 * ngram


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 12, 19, 30, 64])
@pytest.mark.parametrize("room", [1, 2, 3, 4, 6, 50])
def test_any_budget_and_any_room(budget: int, room: int) -> None:
    rng = random.Random(budget)
    drafter = bound(FakeModel(), window=5, ngram=4, guesses=5)
    sequence = Sequence(0, [1, *(rng.randrange(3) for _ in range(40))], 41, GREEDY, max_length=42 + room)
    drafter.start(sequence)
    assert drafter.draft([sequence], [0])[0].ids == []
    (draft,) = drafter.draft([sequence], [budget])
    assert draft.num_candidates == 0  # nothing was computed yet, so the pool is empty
    drafter.commit([Step(sequence, None, None, 40)])
    (draft,) = drafter.draft([sequence], [budget])
    parents = draft.parents
    depths = [len(ancestors(parents, node)) for node in range(len(draft))]
    n = draft.num_candidates
    assert 0 < len(draft) <= budget and max(depths) <= room and draft.probs is None
    assert all(parent < n for parent in parents[:n])
    pooled = {ngram[:room] for ngram in drafter._states[sequence].pool.find(sequence.token_ids[-1])}
    prefixes = {ngram[:size] for ngram in pooled for size in range(1, len(ngram) + 1)}
    probes = drafter.traits.num_probes
    assert n == min(budget - probes if budget > probes else budget, len(prefixes))
    paths = [tuple(draft.ids[each] for each in ancestors(parents, node)) for node in range(n)]
    assert len(set(paths)) == n and set(paths) <= prefixes
    columns = (len(draft) - n + 1) // 3
    if len(draft) > n:
        assert (len(draft) - n + 1) % 3 == 0
    assert columns == 5 or len(draft) + 3 > budget or columns + 3 > room  # one more would not fit
    drafter.stop(sequence)
    assert not drafter._states


def test_the_window_may_be_verified_too() -> None:
    """Check the first window, a piece of the prompt; where that is right, its rows are accepted."""
    fake = FakeModel(vocab_size=8, order=1, seed=4)
    circle = fake.greedy([1], 60)[30:]
    start = circle.index(circle[0], 1)
    for verify, accepted in ((False, 0), (True, 1)):
        drafter = bound(fake, window=6, ngram=3, guesses=1, prompt_pool=False, verify_window=verify)
        engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=drafter.traits.fixed_length_draft))
        engine.add(circle[: start + 1], GREEDY, stream=True)
        engine.step()
        (output,) = engine.step()
        assert min(output.chunk.num_accepted_draft, 1) == accepted
        assert output.chunk.token_ids == fake.greedy(circle[: start + 2], 30)[: len(output.chunk.token_ids)]


def test_the_price_keeps_out_guesses_but_not_the_window() -> None:
    drafter = bound(FakeModel(), window=2, ngram=3, guesses=5)
    sequence = Sequence(0, [1, 2, 3, 1, 2, 4, 1], 7, GREEDY)
    drafter.start(sequence)
    drafter.commit([Step(sequence, None, None, 6)])
    sizes = []
    for min_acceptance_prob in (0.0, 0.3, 0.99):
        (draft,) = drafter.draft([sequence], [30], min_acceptance_prob)
        sizes.append(draft.num_candidates)
        assert len(draft) == draft.num_candidates + 3
    # guesses of 1: (2, 4) before (2, 3)
    assert sizes == [3, 1, 0]


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_counts_drafted_tokens_and_no_probes(k: int, by_request: bool) -> None:
    """Of the engine and of a request: as many are drafted, beside the whole window."""
    fake = FakeModel(vocab_size=8, order=1, seed=4)
    for config, params in (({"num_draft_tokens": k}, GREEDY), ({}, replace(GREEDY, num_draft_tokens=k))):
        drafter: Any = bound(fake)
        made = ByRequest({"lookahead": drafter}) if by_request else drafter
        (choice,) = generate(fake, made, [1, 2, 3], params, **({"num_draft_tokens": 9} | config))
        stats = choice.stats
        assert choice.token_ids == fake.greedy([1, 2, 3], 60)
        assert stats.num_accepted_tokens > 20
        assert stats.num_draft_tokens <= k * stats.num_forwards
        assert stats.mean_num_draft_tokens == pytest.approx(k, rel=0.2)  # at the end, the window is smaller


def test_guesses_learn_their_worth() -> None:
    fake = FakeModel()
    drafter = bound(fake, window=1, ngram=2, guesses=2)
    sequence = Sequence(0, [1, 2, 1, 3, 1], 5, GREEDY)
    drafter.start(sequence)
    drafter.commit([Step(sequence, None, None, 4)])
    (draft,) = drafter.draft([sequence], [2])
    assert draft.ids == [3, 2]
    for _ in range(30):  # the older guess is always the right one
        (draft,) = drafter.draft([sequence], [9])
        right = draft.ids[: draft.num_candidates].index(2)
        sequence.token_ids += [2, 1]
        drafter.commit([Step(sequence, draft, Verdict([right], 1), len(sequence.token_ids) - 1)])
    (draft,) = drafter.draft([sequence], [2])
    assert draft.ids == [2, 3]


def test_ends_of_text_are_kept_out_of_the_window() -> None:
    window = LookaheadWindow(2, 3, [5, 6], seed=0)
    found = []
    for step in range(6):
        found += window.advance(1, [9 if step == 3 else step, 7], frozenset([9]))
        assert 9 not in window.token_ids(2)
    first = [rest for head, rest in found if rest[-1] != 7]
    # columns are worth an n-gram from their third update on; after the end of text its column begins anew
    assert first == [(0, 1, 2), (1, 2, 9)]
    assert len([rest for _, rest in found if rest == (7, 7, 7)]) == 4


def test_columns_that_were_not_computed_stay() -> None:
    window = LookaheadWindow(3, 2, [5, 6], seed=0)
    window.advance(1, [7, 8, 9], frozenset())
    before = window.token_ids(3)
    assert before[2:] == [7, 8, 9]
    found = window.advance(1, [4], frozenset())
    assert found == [(1, (7, 4))]
    assert window.token_ids(3)[2:] == [4, 8, 9] and window.token_ids(3)[:2] == before[:2]


def test_a_draft_of_another_is_not_learned_from() -> None:
    fake = FakeModel()
    drafter = bound(fake, window=2, ngram=3, guesses=2, prompt_pool=False)
    sequence = Sequence(0, [1, 2, 3], 3, GREEDY)
    drafter.start(sequence)
    for _ in range(6):
        drafter.draft([sequence], [9])
        other = Draft.chain([4])
        sequence.token_ids.append(5)
        top = torch.full((2, 1), 6)
        drafter.commit([Step(sequence, other, Verdict([], 5), len(sequence.token_ids) - 1, top)])
    assert len(drafter._states[sequence].pool) == 0 and drafter.nbytes == 0


def test_memory_is_bounded_and_told() -> None:
    drafter = bound(FakeModel())
    rng = random.Random(0)
    prompt = [rng.randrange(30_000) for _ in range(MAX_NGRAMS + 3000)]
    sequence = Sequence(0, prompt, len(prompt), GREEDY)
    drafter.start(sequence)
    for end in range(256, len(prompt), 256):
        drafter.commit([Step(sequence, None, None, end)])
    assert len(drafter._states[sequence].pool) == MAX_NGRAMS
    assert 100 * MAX_NGRAMS < drafter.nbytes < 1000 * MAX_NGRAMS
    drafter.stop(sequence)
    assert drafter.nbytes == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 0}, "window is 0"),
        ({"ngram": 1}, "ngram is 1"),
        ({"guesses": -2}, "guesses is -2"),
        ({"window": 40, "ngram": 5, "guesses": 5}, rf"ask for 180 rows .* most {MAX_NUM_DRAFT_TOKENS}"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Lookahead(**options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(10))
def test_the_output_is_that_of_plain_decoding(seed: int) -> None:
    rng = random.Random(seed)
    fake = FakeModel(vocab_size=7, order=1 + seed % 2, seed=seed, eos_token_ids=[6] if seed % 3 else [])
    options = {"window": rng.randint(1, 6), "ngram": rng.randint(2, 5), "guesses": rng.randint(1, 6)}
    drafter = bound(fake, **options, prompt_pool=bool(seed % 3), verify_window=seed % 4 == 3)
    config = EngineConfig(num_draft_tokens=rng.randint(6, 40), prefill_chunk=rng.choice([2, 256]), max_batch=3)
    assert_output_is_plain(fake, drafter, config, rng)
    assert not drafter._states
