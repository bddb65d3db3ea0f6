"""The MTP layer of Qwen3.5: against Transformers' modules, and through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import VOCAB
from forerun import LLM, EagleTree, Hybrid, Mtp, Suffix
from forerun.drafters import Drafter
from forerun.drafters.eagle.config import EagleConfig
from forerun.drafters.eagle.model import EagleModel
from forerun.drafters.heads.config import StoredHead
from forerun.drafters.mtp.checkpoint_format import read_mtp
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Model, Rows, load_model
from forerun.types import Draft, Sequence
from forerun.utils.machine import GIB
from head_rig import GREEDY, Rig, cases
from heads import states_of
from mtp_layers import expected_logits, with_mtp

DRAFTED = [5, 9, 2]
LONG = replace(GREEDY, max_tokens=50)
SEEDED = replace(LONG, temperature=0.9, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp(tmp_path_factory.mktemp("mtp"))


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_of(target: Model, folder: Path, text: list[int], drafted: list[int]) -> torch.Tensor:
    """The layer's logits of a text in two chunks, and of drafted tokens row by row."""
    head = read_mtp(target, str(folder))
    model, found = EagleModel(head, target), []
    cache, states = model.new_cache(), model.fuse(states_of(target, head, text[:-1]))
    for part in (slice(0, 7), slice(7, None)):
        result = model.forward([Rows(cache, text[1:][part], states=states[part])])
        cache.commit(range(len(text[1:][part])))
        found.append(result.logits)
    for token in drafted:
        assert result.hidden_outputs is not None
        result = model.forward([Rows(cache, [token], states=result.hidden_outputs[-1])])
        found.append(result.logits)
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_the_layer_is_that_of_the_checkpoint(kind: str, folder: Path) -> None:
    text = tokens(23, 1)
    target = load_model(folder, "float64" if kind == "reference" else "float32")
    found = logits_of(target, folder, text, DRAFTED).double()
    expected = expected_logits(folder, text, DRAFTED)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < (1e-5 if kind == "reference" else 2e-4)


MAKE: dict[str, Callable[[StoredHead[EagleConfig]], Drafter]] = {
    "chain": Mtp,
    "tree": EagleTree,
    "behind suffix": lambda head: Hybrid([Suffix(), Mtp(head)]),
}


@pytest.fixture(scope="module")
def rig(folder: Path) -> Rig:
    return Rig(load_model(folder), lambda target: read_mtp(target, str(folder)))


@pytest.mark.parametrize(("kind", "options"), cases(MAKE))
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str, options: dict[str, Any]) -> None:
    assert rig.target.exactness.exact
    assert rig.answers(MAKE[kind](rig.head), **options) == rig.expected
    assert rig.drafted > 0


def test_nobody_sees_who_lost_its_place(rig: Rig) -> None:
    """The pool has room for the longest request and one page more."""
    pool, longest, params = rig.target.pool, max(map(len, rig.prompts)) + LONG.max_tokens, [LONG, SEEDED] * 2 + [LONG]
    room = rig.target.new_cache().pages_wanted(longest) + 1
    plain: Any = LLM(rig.target, None).generate(rig.prompts, params)
    llm = LLM(rig.target, Mtp(rig.head), num_draft_tokens=3, cache_memory=room * pool.page_nbytes / GIB)
    try:
        results: Any = llm.generate(rig.prompts, params)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        assert sum(result.stats.num_preemptions for result in results) > 0
        pool.check_integrity()
    finally:
        pool.limit(None)


class Watched(Mtp):
    """Keeps how many rows its sequences have taken over, and what it drafted first for each."""

    def __init__(self, head: StoredHead[EagleConfig]) -> None:
        super().__init__(head)
        self.taken: list[int] = []
        self.first: list[list[int]] = []

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        self.taken.append(self._states[sequence].cache.length)

    def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
        drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.first += [draft.ids] if sequence.num_output == 1 else []
        return drafts


def test_a_prefix_that_is_reused_is_not_computed_again(rig: Rig) -> None:
    """The second request takes over the target's pages and states and the layer's rows, and drafts the same."""
    prompt, drafter = tokens(2 * PAGE + 9, 4), Watched(rig.head)
    llm = LLM(rig.target, drafter, num_draft_tokens=4)
    results: Any = [llm.generate(prompt, GREEDY) for _ in range(2)]
    assert results[1].stats.num_cached_tokens == 2 * PAGE and drafter.taken == [0, 2 * PAGE]
    assert results[0].token_ids == results[1].token_ids and drafter.first[0] == drafter.first[1] != []
    for pool in (rig.target.pool, *drafter.pools):
        pool.check_integrity()


def test_a_prefix_of_which_the_layer_lacks_rows_is_drafted_for(rig: Rig) -> None:
    prompt = tokens(2 * PAGE + 9, 5)
    plain: Any = LLM(rig.target, None).generate(prompt, GREEDY)
    drafter = Watched(rig.head)
    result: Any = LLM(rig.target, drafter, num_draft_tokens=4).generate(prompt, GREEDY)
    assert result.stats.num_cached_tokens == 2 * PAGE and drafter.taken == [0]
    assert result.token_ids == plain.token_ids and result.stats.num_draft_tokens > 0
