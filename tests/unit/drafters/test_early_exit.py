"""The target's first layers draft: no layer computes a token twice, and nothing of the output changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families import VOCAB, make_family
from forerun import LLM, SamplingParams
from forerun.drafters import Binding
from forerun.drafters.early_exit import EarlyExit
from forerun.errors import ConfigError, IncompatibleDrafterError
from forerun.models import Model, load_model

PROMPTS = [[7, 30, 2], [50], list(range(1, 31)), [90 % VOCAB, 0]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, logprobs=1),
    SamplingParams(temperature=0, max_tokens=9, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=1.2, seed=4, max_tokens=14, logprobs=1),
    SamplingParams(temperature=0.8, top_k=9, seed=5, max_tokens=11, logprobs=1),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float64"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("target")), request.param)


def answers(llm: LLM) -> list[Any]:
    """Return the tokens, and the bits of their log-probabilities where those are promised."""
    results: Any = llm.generate(PROMPTS, PARAMS)
    return [(each.token_ids, each.logprobs if llm.exact else None) for each in results]


@pytest.fixture(scope="module")
def plain(target: Model) -> list[Any]:
    return answers(LLM(target, None))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("options", [{}, {"max_batch": 1}, {"prefill_chunk": 2}, {"max_batch": 3, "prefill_chunk": 7}])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_bits_are_those_of_plain_decoding(target: Model, plain: list[Any], k: int, options: dict[str, int]) -> None:
    for exit_layer in range(1, target.num_layers):
        llm = LLM(target, EarlyExit(exit_layer), num_draft_tokens=k, **options)  # type: ignore[arg-type]
        assert answers(llm) == plain, exit_layer


def test_no_layer_computes_a_token_twice(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that as many rows pass the layers below the exit as those above, one of each per token fed."""
    decoder: Any = target.decoder
    inner, rows = decoder.forward_layers, {"below": 0, "above": 0}

    def forward_layers(x: Any, layout: Any, first: int, last: int, hidden_outputs: Any) -> Any:
        real = layout.num_new
        rows["below"] += real if first == 0 else 0
        rows["above"] += real if last == target.num_layers else 0
        return inner(x, layout, first, last, hidden_outputs)

    monkeypatch.setattr(decoder, "forward_layers", forward_layers)
    result: Any = LLM(target, EarlyExit(1), num_draft_tokens=5).generate([3, 1, 4, 1, 5], PARAMS[0])
    assert rows["below"] == rows["above"]
    assert rows["above"] == 5 + (result.stats.num_forwards - 1) + result.stats.num_draft_tokens


def test_drawn_drafts_carry_their_distribution_and_the_cache_is_left_as_it_was(target: Model) -> None:
    llm = LLM(target, EarlyExit(1), num_draft_tokens=3, seed=0)
    drafter: Any = llm.drafter
    seen = []
    inner = drafter.draft

    def draft(sequences: Any, num_draft_tokens: Any, min_acceptance_prob: float = 0.0) -> Any:
        lengths = [each.cache.length for each in sequences]
        drafts = inner(sequences, num_draft_tokens, min_acceptance_prob)
        assert [each.cache.length for each in sequences] == lengths
        seen.extend(drafts)
        return drafts

    drafter.draft = draft
    llm.generate([5, 6, 7], SamplingParams(temperature=1.1, max_tokens=20))
    assert any(len(each) for each in seen)
    for each in seen:
        if len(each):
            assert each.probs.shape == (len(each) + 1, target.vocab_size)
            assert (len(each.hidden), each.first_layer) == (len(each) + 1, 1)
    assert drafter.nbytes == 0 and not drafter.drafting_model.states


def test_a_price_ends_the_chain_early(target: Model) -> None:
    """Check that above any probability nothing greedy is drafted, and one drawn token is kept."""
    drafter = EarlyExit(1)
    llm = LLM(target, drafter, num_draft_tokens=6, seed=0)
    inner: Any = drafter.draft
    drafter.draft = lambda sequences, budgets, min_acceptance_prob=0.0: inner(sequences, budgets, 2.0)  # type: ignore[method-assign]
    greedy: Any = llm.generate([5, 6, 7], PARAMS[0])
    assert greedy.stats.num_draft_tokens == 0
    drawn: Any = llm.generate([5, 6, 7], SamplingParams(max_tokens=12))
    assert drawn.stats.num_draft_tokens <= drawn.stats.num_forwards
    assert drawn.stats.num_draft_tokens > 0


@pytest.mark.parametrize("min_acceptance_prob", [0.02, 0.05, 0.2])
def test_a_chain_that_a_price_ends_has_the_states_of_its_nodes(target: Model, min_acceptance_prob: float) -> None:
    """Check a greedy chain whose last token has been fed already although the next one was not worth drafting."""
    drafter, lengths = EarlyExit(1), []
    llm = LLM(target, drafter, num_draft_tokens=6, seed=0)
    inner: Any = drafter.draft

    def draft(sequences: Any, num_draft_tokens: Any, _: float = 0.0) -> Any:
        drafts = inner(sequences, num_draft_tokens, min_acceptance_prob)
        for budget, each in zip(num_draft_tokens, drafts, strict=True):
            assert each.hidden is None or len(each.hidden) == len(each) + 1
            lengths.append((budget, len(each)))
        return drafts

    drafter.draft = draft  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=40)
    own: Any = llm.generate([5, 6, 7], params)
    plain: Any = LLM(target, None).generate([5, 6, 7], params)
    assert own.token_ids == plain.token_ids
    if min_acceptance_prob == 0.02:
        assert any(0 < length < budget for budget, length in lengths)


def test_what_cannot_be_is_refused(target: Model, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exit_layer is 0"):
        EarlyExit(0)
    with pytest.raises(ConfigError, match=f"has {target.num_layers} layers"):
        EarlyExit(target.num_layers).bind(Binding(target))
    general = load_model(make_family("codegen", tmp_path), "float32")
    with pytest.raises(IncompatibleDrafterError, match="fused decoder"):
        EarlyExit(1).bind(Binding(general))
