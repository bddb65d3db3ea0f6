"""The MTP layer of Qwen3.5: against Transformers' modules, and through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from families import make_family
from forerun import LLM, EagleTree, Hybrid, Mtp, Suffix
from forerun.config import AUTO, REFERENCE, EngineConfig
from forerun.drafters import Drafter
from forerun.drafters.belonging import belonging
from forerun.drafters.build import automatic_drafter
from forerun.drafters.models.eagle.config import EagleConfig
from forerun.drafters.models.head_files.folder import save_head
from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.mtp.checkpoint_format import read_mtp
from forerun.engine.memory_division import MemoryPlan
from forerun.errors import ConfigError, DrafterError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import load_model, load_tokenizer
from forerun.types import Draft, Sequence
from forerun.utils import workloads
from forerun.utils.machine import GIB
from head_rig import GREEDY, Rig, cases
from heads import logits_of, states_of, tokens
from mtp_layers import FAMILY, TINY, expected_logits, with_mtp
from pool_integrity import check_integrity

DRAFTED = [5, 9, 2]
LONG = replace(GREEDY, max_tokens=50)
SEEDED = replace(LONG, temperature=0.9, seed=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp(tmp_path_factory.mktemp("mtp"))


@pytest.mark.parametrize("kind", ["reference", "native"])
def test_the_layer_is_that_of_the_checkpoint(kind: str, folder: Path) -> None:
    text = tokens(23, 1)
    target = load_model(folder, "float64" if kind == "reference" else "float32")
    head = read_mtp(target, str(folder))
    found = logits_of(target, head, text, DRAFTED).double()
    expected = expected_logits(folder, text, DRAFTED, states_of(target, head, text[:-1])[:, 0].double())
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < (1e-5 if kind == "reference" else 1e-4)


def test_dense_qwen3_next_has_such_a_layer_too(tmp_path: Path) -> None:
    folder = with_mtp(tmp_path, "qwen3_next", num_experts=0)
    target = load_model(folder, "float64")
    head, text = read_mtp(target, str(folder)), tokens(12, 6)
    assert head.config.extras() == ["normed output", "norms of queries and keys", "gated attention"]
    states = states_of(target, head, text[:-1])[:, 0].double()
    expected = expected_logits(folder, text, DRAFTED, states, "qwen3_next")
    assert (logits_of(target, head, text, DRAFTED) - expected).abs().max() < 1e-5
    assert automatic_drafter(str(folder)) == "hybrid:sources=suffix+mtp"


def test_drafts_through_the_engine_are_those_of_the_formulas(folder: Path) -> None:
    target, made = load_model(folder, "float64"), []

    class Recording(Mtp):
        def draft(self, sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> list[Draft]:
            drafts = super().draft(sequences, num_draft_tokens, min_acceptance_prob)
            made.extend((list(each.token_ids), draft.ids) for each, draft in zip(sequences, drafts, strict=True))
            return drafts

    LLM(target, Recording(), num_draft_tokens=3, prefill_chunk=7).generate([tokens(20, 2), tokens(5, 3)], GREEDY)
    assert len(made) > 12
    for text, drafted in made[::9]:
        logits = expected_logits(folder, text, drafted[:-1])
        assert logits[len(text) - 2 :].argmax(-1).tolist() == drafted


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_quantized_layer_is_near(quantize: str | None, folder: Path, tmp_path: Path) -> None:
    """The layer with 8 bits, as it is made for a quantized target."""
    target = load_model(folder, "float32", quantize=quantize)
    head = read_mtp(target, str(folder))
    with pytest.raises(ConfigError, match="stays in its target's checkpoint"):
        save_head(tmp_path / "head", head.config, head.tensors)
    text = tokens(23, 1)
    exact = expected_logits(folder, text, DRAFTED)
    near = logits_of(target, head, text, DRAFTED).double()
    assert (near - exact).norm() < (0.02 if quantize is None else 0.2) * exact.norm()
    plain, drafted = (LLM(target, each, num_draft_tokens=3).generate([text], GREEDY) for each in (None, Mtp(head)))
    assert drafted[0].token_ids == plain[0].token_ids and drafted[0].stats.num_draft_tokens > 0  # type: ignore[index, union-attr]


MAKE: dict[str, Callable[[StoredHead[EagleConfig]], Drafter]] = {
    "chain": Mtp,
    "tree": EagleTree,
    "behind suffix": lambda head: Hybrid([Suffix(), Mtp(head)]),
}


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig(load_model(TINY), lambda target: read_mtp(target, str(TINY)))


@pytest.mark.parametrize(("kind", "options"), cases(MAKE))
def test_tokens_are_those_of_plain_decoding(rig: Rig, kind: str, options: dict[str, Any]) -> None:
    assert rig.target.exactness.exact
    assert rig.answers(MAKE[kind](rig.head), **options) == rig.expected
    assert rig.drafted > 0


def test_most_of_the_first_drafted_tokens_are_accepted(rig: Rig) -> None:
    tokenizer = load_tokenizer(str(TINY))
    prompts = [tokenizer(case.prompt)["input_ids"][:100] for case in workloads.load_workload("code", 3)]
    for params, least in ((replace(GREEDY, max_tokens=100), 0.7), (replace(SEEDED, max_tokens=100), 0.4)):
        plain: Any = LLM(rig.target, None).generate(prompts, params)
        results: Any = LLM(rig.target, "mtp", num_draft_tokens=2).generate(prompts, params)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        stats = [result.stats for result in results]
        first, tried = (
            sum(each[0] for each in counts)
            for counts in zip(*((each.accepted_per_position, each.reached_per_position) for each in stats), strict=True)
        )
        assert first / tried > least


def test_nobody_sees_who_lost_its_place(rig: Rig) -> None:
    """The pool has room for the longest request and one page more."""
    pool, longest, params = rig.target.pool, max(map(len, rig.prompts)) + LONG.max_tokens, [LONG, SEEDED] * 2 + [LONG]
    room = rig.target.new_cache().pages_wanted(longest) + 1
    plain: Any = LLM(rig.target, None).generate(rig.prompts, params)
    llm = LLM(rig.target, Mtp(rig.head), num_draft_tokens=3, cache_memory=room * pool.page_nbytes / GIB)
    try:
        results: Any = llm.generate(rig.prompts, params)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        if rig.target.kernels != REFERENCE:  # whose caches double: one alone finds room
            assert sum(result.stats.num_preemptions for result in results) > 0
        check_integrity(pool)
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
        self.taken.append(self.drafting_model.states[sequence].cache.length)

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
        check_integrity(pool)


def test_auto_takes_the_layer_that_the_checkpoint_carries(folder: Path, tmp_path: Path) -> None:
    text = "hybrid:sources=suffix+mtp"
    assert [(each.text, each.place) for each in belonging(folder)] == [("mtp", "in its checkpoint")]
    assert automatic_drafter(str(folder)) == text
    plan = MemoryPlan.of(folder, AUTO, EngineConfig())
    assert [draft.name for draft in plan.drafts] == [f"the MTP layer of {folder}"]
    head = read_mtp(load_model(folder), str(folder))
    assert plan.drafts[0].weights > head.nbytes and plan.drafts[0].page_nbytes > 0
    without = make_family(FAMILY, tmp_path, mtp_num_hidden_layers=1)
    assert belonging(without) == [] and automatic_drafter(str(without)) == "suffix"
    with pytest.raises(DrafterError, match=r"speaks of 1 MTP layers \(mtp_num_hidden_layers\)"):
        LLM(without, "mtp")


def test_a_prefix_of_which_the_layer_lacks_rows_is_drafted_for(rig: Rig) -> None:
    prompt = tokens(2 * PAGE + 9, 5)
    plain: Any = LLM(rig.target, None).generate(prompt, GREEDY)
    drafter = Watched(rig.head)
    result: Any = LLM(rig.target, drafter, num_draft_tokens=4).generate(prompt, GREEDY)
    assert result.stats.num_cached_tokens == 2 * PAGE and drafter.taken == [0]
    assert result.token_ids == plain.token_ids and result.stats.num_draft_tokens > 0
