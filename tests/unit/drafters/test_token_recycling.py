"""Token Recycling: the matrix against a plain one, the tree read off it, the file, and what comes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from against_plain import assert_output_is_plain
from doubles import FakeModel, PieceTokenizer
from forerun.config import MAX_NUM_DRAFT_TOKENS, EngineConfig, SamplingParams
from forerun.drafters import Binding, Recycling
from forerun.drafters.lookup.token_recycling import STEADY, Successors
from forerun.engine import Engine
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.types import Draft, Sequence, Step, Verdict

GREEDY = SamplingParams(temperature=0, max_tokens=40)


def bound(fake: FakeModel | None = None, tokenizer: Any = None, **options: Any) -> Recycling:
    drafter = Recycling(**options)
    drafter.bind(Binding(fake or FakeModel(), tokenizer))
    return drafter


def generate(fake: FakeModel, drafter: Recycling | None, prompt: list[int], params: SamplingParams = GREEDY):
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=12, seed=0))
    engine.add(prompt, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(output.error is None for output in outputs)
    return outputs[0].choice


def top(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def test_the_matrix_against_a_plain_one() -> None:
    rng = np.random.default_rng(0)
    known, plain, steady = Successors(300, 4), {}, {}
    assert known.of(7) == ([], 0)
    for _ in range(200):
        token_ids = rng.integers(0, 300, rng.integers(1, 30)).tolist()
        rows = rng.integers(0, 3, (len(token_ids), 4))
        for token_id, row in zip(token_ids, rows.tolist(), strict=True):
            same = token_id in plain and plain[token_id][0] == row[0]
            steady[token_id] = min(steady[token_id] + 1, STEADY - 1) if same else 0
            plain[token_id] = row
        known.update(token_ids, rows)
        for token_id in range(300):
            assert known.of(token_id) == (plain.get(token_id, []), steady.get(token_id, 0))
    dense = known.dense()
    assert all(dense[token_id].tolist() == plain.get(token_id, [-1] * 4) for token_id in range(300))
    assert len(known) == len(plain) and known.nbytes < 300 * (4 * 4 + 200)


def test_a_matrix_over_another_leaves_it_alone() -> None:
    base = np.full((5, 2), -1, np.int32)
    base[1] = [3, -1]
    base[2] = [4, 0]
    kept = base.copy()
    known = Successors(5, 2, base)
    assert [known.of(token_id)[0] for token_id in range(3)] == [[], [3], [4, 0]]
    known.update([1, 4], np.array([[2, 0], [1, 3]]))
    assert [known.of(token_id)[0] for token_id in (1, 2, 4)] == [[2, 0], [4, 0], [1, 3]]
    assert known.dense().tolist() == [[-1, -1], [2, 0], [4, 0], [-1, -1], [1, 3]]
    assert np.array_equal(base, kept)


def test_what_is_learned_of_a_step() -> None:
    """Check that of rows after one token the accepted one counts, then the prompt's, then the more probable node."""
    drafter = bound(width=2)
    sequence = Sequence(0, [1, 2, 3], 3, GREEDY)
    drafter.start(sequence)
    drafter.commit([Step(sequence, None, None, 2, top([5, 6], [7, 8]))])
    known = drafter._successors[sequence]
    assert [known.of(i)[0] for i in (1, 2, 3)] == [[5, 6], [7, 8], []]
    sequence.token_ids.append(4)
    drafter.commit([Step(sequence, Draft.empty(), Verdict([], 4), 3, top([9, 10]))])
    assert known.of(3)[0] == [9, 10]
    # 4 -> 5 -> 6 accepted, below it nothing; 5 and 6 are also rejected nodes, before and after
    draft = Draft([6, 5, 5, 6, 6], [-1, -1, 0, 1, 3])
    sequence.token_ids += [5, 6, 0]
    rows = top([1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7])
    drafter.commit([Step(sequence, draft, Verdict([1, 3], 0), 6, rows)])
    assert [known.of(i)[0] for i in (4, 5, 6)] == [[1, 2], [3, 4], [5, 6]]
    # the last prompt tokens come with a draft: rows before the draft's follow them
    late = Sequence(1, [1, 2, 3, 4], 3, GREEDY)
    drafter.start(late)
    drafter.commit([Step(late, Draft.empty(), Verdict([], 4), 3, top([5, 6], [7, 8], [9, 10]))])
    assert [drafter._successors[late].of(i)[0] for i in (1, 2, 3)] == [[5, 6], [7, 8], [9, 10]]
    # rejected nodes: the one thought more of counts
    draft = Draft([8, 9, 8], [-1, -1, 1])
    late.token_ids.append(1)
    drafter.commit([Step(late, draft, Verdict([], 1), 4, top([0, 1], [1, 2], [2, 3], [3, 4]))])
    assert [drafter._successors[late].of(i)[0] for i in (4, 8, 9)] == [[0, 1], [1, 2], [2, 3]]


def filled(seed: int = 0, missing: int = 0, **options: Any) -> tuple[Recycling, Sequence]:
    """Return a drafter that has the successors of ten of eleven tokens or fewer."""
    rng = random.Random(seed)
    drafter = bound(**options)
    sequence = Sequence(seed, [1], 1, GREEDY)
    drafter.start(sequence)
    for token_id in range(11 - missing):
        drafter._successors[sequence].update([token_id], np.array([rng.sample(range(11), 8)]))
    return drafter, sequence


@pytest.mark.parametrize("budget", [1, 2, 7, 24, MAX_NUM_DRAFT_TOKENS])
@pytest.mark.parametrize("room", [1, 2, 5, 100])
@pytest.mark.parametrize("missing", [0, 6, 10])
def test_the_tree_is_read_off_the_matrix(budget: int, room: int, missing: int) -> None:
    drafter, sequence = filled(missing=missing)
    sequence.max_length = 2 + room
    (draft,) = drafter.draft([sequence], [budget])
    token_ids, parents = [1, *draft.ids], draft.parents
    depths = [0]
    edges = set()
    for node, parent in enumerate(parents, 1):
        depths.append(depths[parent + 1] + 1)
        successors = drafter._successors[sequence].of(token_ids[parent + 1])[0]
        edges.add((parent, successors.index(token_ids[node])))
    assert len(edges) == len(draft) <= budget and draft.probs is None  # no sibling twice
    assert len(draft) == 0 or max(depths) <= room
    if missing == 0:
        assert len(draft) == min(budget, sum(8**depth for depth in range(1, room + 1)))
    if missing == 10:
        assert len(draft) == 0
    # the best of the first ranks, before anything was learned: ancestors and better siblings are always there
    for parent, rank in edges:
        assert rank == 0 or (parent, rank - 1) in edges


def test_the_price_prunes() -> None:
    drafter, sequence = filled()
    lengths = [
        len(drafter.draft([sequence], [60], min_acceptance_prob)[0])
        for min_acceptance_prob in (0.0, 0.01, 0.1, 0.3, 0.5)
    ]
    assert lengths[0] == 60 and lengths[-1] == 0 and lengths == sorted(lengths, reverse=True)
    assert 1 <= lengths[3] < 5
    whole = drafter.draft([sequence], [60])[0].ids
    for min_acceptance_prob, length in zip((0.01, 0.1), lengths[1:], strict=False):
        assert drafter.draft([sequence], [60], min_acceptance_prob)[0].ids == whole[:length]


def test_ranks_learn_their_worth() -> None:
    """Check that the tree becomes a chain of second successors where the second one is always right."""
    drafter, sequence = filled()
    for _ in range(200):
        (draft,) = drafter.draft([sequence], [24])
        known = drafter._successors[sequence].of
        path, token_id, node = [], sequence.token_ids[-1], -1
        while (rank_two := known(token_id)[0][1]) is not None:
            below = [i for i, p in enumerate(draft.parents) if p == node and draft.token_ids[i] == rank_two]
            if not below:
                break
            node, token_id = below[0], rank_two
            path.append(node)
        sequence.token_ids += [*(draft.ids[node] for node in path), rank_two]
        drafter.commit([Step(sequence, draft, Verdict(path, rank_two), len(sequence.token_ids) - 1)])
    (draft,) = drafter.draft([sequence], [4])
    assert draft.is_chain
    expected = [sequence.token_ids[-1]]
    for _ in range(4):
        expected.append(drafter._successors[sequence].of(expected[-1])[0][1])
    assert draft.ids == expected[1:]


def test_no_budget_still_learns() -> None:
    fake = FakeModel(order=1, vocab_size=9)
    drafter = bound(fake)
    sequence = Sequence(0, [1, 2], 2, GREEDY)
    drafter.start(sequence)
    assert len(drafter.draft([sequence], [0])[0]) == 0
    drafter.commit([Step(sequence, Draft.empty(), Verdict([], 2), 1, top(list(range(8))))])
    assert drafter._successors[sequence].of(1)[0] == list(range(8))


def test_requests_do_not_see_each_other_unless_shared() -> None:
    fake = FakeModel(order=1)
    for share in (False, True):
        drafter = bound(fake, share=share)
        first, again = generate(fake, drafter, [1, 2, 3]), generate(fake, drafter, [1, 2, 3])
        assert first.token_ids == again.token_ids == fake.greedy([1, 2, 3], 40)
        assert first.stats.num_accepted_tokens > 0
        assert not drafter._successors and not drafter._trees
        assert (drafter.nbytes > 0) == share
        sequences = [Sequence(i, [1, 2, 3], 3, GREEDY) for i in range(2)]
        for sequence in sequences:
            drafter.start(sequence)
        seen = [drafter._successors[sequences[0]].of(token_id)[0] for token_id in first.token_ids[:-1]]
        assert all(len(row) == (8 if share else 0) for row in seen)
        drafter.commit([Step(sequences[0], None, None, 1, top(list(range(8))))])
        assert (drafter._successors[sequences[1]].of(1)[0] == list(range(8))) == share


def test_a_saved_matrix_starts_every_request(tmp_path: Path) -> None:
    fake, path = FakeModel(order=1), tmp_path / "successors.safetensors"
    tokenizer = PieceTokenizer.of_bytes()
    shared = bound(fake, tokenizer, share=True)
    cold = generate(fake, shared, [1, 2, 3])
    shared.save(path)
    for share in (False, True):
        warm = bound(fake, tokenizer, share=share, matrix=str(path))
        assert warm.nbytes >= 11 * 8 * 4
        for _ in range(2):
            assert generate(fake, warm, [1, 2, 3]).stats.num_forwards < cold.stats.num_forwards
    again = tmp_path / "again.safetensors"
    warm = bound(fake, tokenizer, share=True, matrix=str(path))
    warm.save(again)
    assert np.array_equal(shared._shared.dense(), bound(fake, tokenizer, matrix=str(again))._base)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "successors.safetensors"
    bytes_, other = PieceTokenizer.of_bytes(), PieceTokenizer([b"a", b"b"])
    shared = bound(tokenizer=bytes_, share=True)
    shared.save(path)

    def refused(words: str, error: type = DrafterError, tokenizer: Any = bytes_, fake: Any = None, **options: Any):
        with pytest.raises(error, match=words):
            bound(fake, tokenizer, matrix=str(path), **options)

    refused("another tokenizer", IncompatibleDrafterError, other)
    refused("of 11 tokens with 8 successors", IncompatibleDrafterError, fake=FakeModel(vocab_size=12))
    refused("another tokenizer or width", IncompatibleDrafterError, width=7)
    content = path.read_bytes()
    for broken in (b"", content[:20], content[:-5], b"\x80\x04N."):
        path.write_bytes(broken)
        refused("cannot be read")
    save_file({"weights": np.zeros((11, 8), np.int32)}, path)
    refused("cannot be read")
    for wrong in (np.zeros((11, 8), np.float32), np.zeros(88, np.int32)):
        save_file({"successors": wrong}, path)
        refused("which holds")
    save_file({"successors": np.full((11, 8), 11, np.int32)}, path)
    refused("outside the vocabulary")
    path.unlink()
    refused("cannot be read")


def test_a_matrix_of_one_request_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="share=True"):
        bound().save(tmp_path / "matrix")
    with pytest.raises(DrafterError, match="cannot be written"):
        bound(share=True).save(tmp_path / "no" / "such" / "folder")


@pytest.mark.parametrize("options", [{"width": 0}, {"width": 9}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Recycling(**options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(10))
def test_the_output_is_that_of_plain_decoding(seed: int) -> None:
    rng = random.Random(seed)
    eos = [6] if seed % 3 else []
    fake = FakeModel(vocab_size=rng.choice([7, 12]), order=1 + seed % 2, seed=seed, eos_token_ids=eos)
    drafter = bound(fake, share=bool(seed % 2), width=rng.randint(1, 8), learn_prompt=bool(seed % 4))
    config = EngineConfig(num_draft_tokens=rng.randint(1, 40), prefill_chunk=rng.choice([2, 256]), max_batch=3)
    assert_output_is_plain(fake, drafter, config, rng)
    assert not drafter._successors
