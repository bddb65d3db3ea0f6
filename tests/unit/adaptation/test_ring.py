"""Rings of verified tokens: every token once, bounded, each tenant's apart."""

from __future__ import annotations

import pytest
import torch

from forerun import SamplingParams
from forerun.adaptation.ring import CONTEXT, MOST_TENANTS, SEGMENT, Rings, excerpts_file, read_excerpts
from forerun.errors import ModelLoadError
from forerun.types import Draft, Sequence, Step, Verdict

VOCAB, LAYERS, WIDTH = 1000, 2, 4
GENERATOR = torch.Generator().manual_seed(0)


def sequence_of(length: int, num_prompt: int, tenant: str | None = None) -> Sequence:
    tokens = torch.randint(VOCAB, (length,), generator=GENERATOR).tolist()
    return Sequence(0, tokens, num_prompt, SamplingParams(tenant=tenant))


def states(first: int, last: int) -> torch.Tensor:
    """Those of positions first to last - 1, which have their position in two numbers, exact in bfloat16."""
    positions = torch.arange(first, last)
    parts = torch.stack([positions // 64, positions % 64, positions % 3, positions % 5], 1)
    return parts.float()[:, None].expand(-1, LAYERS, WIDTH)


def serve(rings: Rings, sequence: Sequence, each: int = 3) -> None:
    """Let the rings see a whole sequence: its prompt, then steps that add so many tokens each."""
    tokens, end = sequence.token_ids, sequence.num_prompt
    sequence.token_ids = tokens[: end + 1]
    rings.see([Step(sequence, None, None, end, states=states(0, end))])
    while end + 1 < len(tokens):
        more = min(each, len(tokens) - 1 - end)
        sequence.token_ids = tokens[: end + more + 1]
        rings.see([Step(sequence, Draft(), Verdict([], 0), end + more, states=states(end, end + more))])
        end += more
    rings.leave(sequence)


def test_every_token_of_an_answer_is_kept_once_beside_its_state() -> None:
    rings = Rings(1 << 20)
    sequence = sequence_of(700, 200)
    serve(rings, sequence)
    older, newest = rings.split(None)
    kept = [*older, *newest]
    learnt = [token for each in kept for token in each.token_ids[each.first :].tolist()]
    assert learnt == sequence.token_ids[200:]
    place = 200 - CONTEXT
    for each in kept:
        start = int(64 * each.states[0, 0, 0].float() + each.states[0, 0, 1].float())
        assert each.first <= CONTEXT + 1
        assert each.num_tokens <= SEGMENT + 3
        assert torch.equal(each.states.float(), states(start, start + len(each.states)))
        assert each.token_ids.tolist() == sequence.token_ids[start : start + len(each.token_ids)]
        assert each.before.tolist() == sequence.token_ids[max(0, start - len(each.before)) : start]
        place = start
    assert place > 200


def test_states_that_are_missing_begin_another_segment() -> None:
    rings = Rings(1 << 20)
    sequence = sequence_of(60, 10)
    for first, last in ((10, 20), (30, 40)):
        rings.see([Step(sequence, Draft(), Verdict([], 0), last, states=states(first, last))])
    rings.leave(sequence)
    older, newest = rings.split(None)
    assert [each.token_ids.tolist() for each in (*older, *newest)] == [
        sequence.token_ids[10:21],
        sequence.token_ids[30:41],
    ]


def test_the_newest_tenth_judges() -> None:
    rings = Rings(1 << 20)
    for _ in range(40):
        serve(rings, sequence_of(60, 10))
    older, newest = rings.split(None)
    assert len(older) == 36
    assert sum(each.num_tokens for each in newest) == 200


def test_memory_is_bounded_and_shared_by_tenants() -> None:
    rings = Rings(100_000)
    serve(rings, sequence_of(300, 10, "calm"))
    before = rings.split("calm")
    for _ in range(50):
        serve(rings, sequence_of(300, 10, "busy"))
        assert rings.nbytes <= 100_000
    assert [len(part) for part in rings.split("calm")] == [len(part) for part in before]
    assert sum(each.nbytes for part in rings.split("busy") for each in part) <= 50_000
    assert rings.tenants()["busy"] == 50 * 290
    for number in range(MOST_TENANTS):
        serve(rings, sequence_of(30, 10, str(number)))
    assert list(rings.tenants()) == [str(number) for number in range(MOST_TENANTS)]
    assert rings.split("busy") == ([], [])


def test_a_sequence_whose_tokens_are_replaced_is_forgotten() -> None:
    rings = Rings(1 << 20)
    sequence = sequence_of(60, 10)
    rings.see([Step(sequence, Draft(), Verdict([], 0), 30, states=states(10, 30))])
    rings.leave(sequence, 20)
    rings.leave(sequence)
    assert rings.tenants() == {}


def test_what_was_kept_is_older_than_what_has_come_meanwhile() -> None:
    rings, kept = Rings(1 << 20), Rings(1 << 20)
    serve(kept, sequence_of(60, 10))
    serve(rings, sequence_of(60, 10))
    old, new = [[*older, *newest] for older, newest in (kept.split(None), rings.split(None))]
    rings.restore(None, old)
    older, newest = rings.split(None)
    assert [*older, *newest] == [*old, *new]
    assert rings.tenants() == {None: 100}


def test_what_is_kept_on_disk_is_the_same_and_damage_is_told() -> None:
    rings = Rings(1 << 20)
    serve(rings, sequence_of(300, 10))
    older, newest = rings.split(None)
    content = excerpts_file([*older, *newest])
    again = read_excerpts(content, (LAYERS, WIDTH), VOCAB)
    for ours, theirs in zip([*older, *newest], again, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.states, theirs.states)
        assert ours.first == theirs.first
    wrong = [(content[:100], (LAYERS, WIDTH), VOCAB), (content, (LAYERS, 5), VOCAB), (content, (LAYERS, WIDTH), 100)]
    for each in wrong:
        with pytest.raises(ModelLoadError, match="damaged, or of another target"):
            read_excerpts(*each)
