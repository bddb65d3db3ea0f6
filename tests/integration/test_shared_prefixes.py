"""What a cache takes over is, bit for bit, what it would have computed, whoever computed it and in whatever chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forerun import SamplingParams
from forerun.drafters import Binding, DraftModel
from forerun.drafters.models.base import BoundModel
from forerun.drafters.models.draft_model import SharedVocabulary
from forerun.drafters.models.prefill_policy import PrefillPolicy
from forerun.kernels.cpu import native
from forerun.kernels.cpu.page_layout import PAGE
from forerun.models import Model, Rows, load_draft_model, load_model
from forerun.types import Cache, Sequence as Running, Step
from pool_integrity import check_integrity

TOKENS = [(7 * i * i + 3 * i + 11) % 2000 for i in range(5 * PAGE + 9)]
TREE = [-1, 0, 0, 1, 2, 3]


@pytest.fixture(params=["bfloat16", "int8", "float32", "float64", "reference"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The bundled draft; "reference": in bfloat16, computed in PyTorch; "int8": keys and values alone."""
    if request.param == "reference":
        monkeypatch.setenv("FORERUN_KERNELS", "reference")
    if request.param == "int8":
        if native() is None:
            pytest.skip("there are no native kernels here")
        model = load_model("bundled-draft", kv_cache_dtype="int8")
    else:
        model = load_draft_model("bundled-draft", "bfloat16" if request.param == "reference" else request.param)
    if request.param == "float64" and not model.exactness.exact:
        pytest.skip(f"float64 is not promised to be exact: {model.exactness.reason}")
    assert model.exactness.exact and model.pool.num_taken == 0
    model.pool.limit(200)
    return model


def computed(model: Model, tokens: Sequence[int], chunk: int) -> Cache:
    cache = model.new_cache()
    compute(model, cache, tokens, chunk)
    return cache


def compute(model: Model, cache: Cache, tokens: Sequence[int], chunk: int) -> None:
    while cache.length < len(tokens):
        part = tokens[cache.length : cache.length + chunk]
        model.forward([Rows(cache, part, num_logits=0)])
        cache.commit(range(len(part)))


def verified(model: Model, cache: Cache) -> Tensor:
    """Logits of the rest of the tokens, one by one, then of a tree and of a chain after them."""
    done = cache.length
    compute(model, cache, TOKENS[:-2], 70)
    logits = [model.forward([Rows(cache, TOKENS[-2:-1])]).logits]
    cache.commit([0])
    logits.append(model.forward([Rows(cache, [TOKENS[-1], *TOKENS[:5]], TREE)]).logits)
    cache.commit([0, 2, 4])
    logits.append(model.forward([Rows(cache, TOKENS[5:9])]).logits)
    cache.drop()
    assert done <= cache.length
    return torch.cat(logits)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("chunk", [1, 37, 256])
def test_what_is_adopted_or_forked_is_what_would_be_computed(model: Model, chunk: int) -> None:
    alone = verified(model, computed(model, TOKENS[:1], 1))
    source = computed(model, TOKENS[: 5 * PAGE + 3], chunk)
    source.publish(TOKENS[: source.length], None)
    adopted, forked = model.new_cache(), model.new_cache()
    assert adopted.adopt(TOKENS, "another") == 0
    assert adopted.adopt(TOKENS, None) == 5 * PAGE
    forked.fork(source, 4 * PAGE + 13)
    caches = [adopted, forked, source]
    for cache in caches:
        assert torch.equal(verified(model, cache), alone)
        again = model.new_cache()
        assert again.adopt(TOKENS, None) == 5 * PAGE  # nobody has written to what is shared
        assert torch.equal(verified(model, again), alone)
        again.free()
    truncated = model.new_cache()
    truncated.adopt(TOKENS, None)
    truncated.truncate(3 * PAGE - 5)
    assert torch.equal(verified(model, truncated), alone)
    assert torch.equal(verified(model, truncated_to(adopted, 2 * PAGE + 1)), alone)


def truncated_to(cache: Cache, length: int) -> Cache:
    cache.truncate(length)
    return cache


def run(drafter: DraftModel, tokens: list[int], number: int, tenant: str | None = None) -> tuple[int, list[int]]:
    """Positions that a draft has taken over, and the tokens it proposes."""
    sequence = Running(number, list(tokens), len(tokens), SamplingParams(temperature=0, tenant=tenant))
    drafter.start(sequence)
    adopted = drafter.drafting_model.states[sequence].cache.length
    drafter.commit([Step(sequence, None, None, len(tokens) - 1)])
    (draft,) = drafter.draft([sequence], [6])
    drafter.stop(sequence)
    return adopted, draft.ids


def shared(model: Model) -> BoundModel:
    """The model as its own draft model."""
    return BoundModel(model, SharedVocabulary(model.vocab_size, model.vocab_size))


def test_a_draft_model_takes_over_what_it_has_computed_for_the_tenant() -> None:
    model = load_draft_model("bundled-draft", "bfloat16")
    drafter = DraftModel(model)
    drafter.drafting_model.use(shared(model), Binding(model, seed=0))
    drafter.drafting_model._prefill_policy = PrefillPolicy(is_cheap=True)
    drafter.drafting_model._prefill_policy._overall_share = 1.0  # others draft
    tokens = TOKENS[: 3 * PAGE + 1]
    first = run(drafter, tokens, 0)
    assert first[0] == 0 and len(first[1]) == 6
    assert run(drafter, tokens, 1) == (3 * PAGE, first[1])
    assert run(drafter, tokens, 2, "a") == (0, first[1])
    assert drafter.nbytes == 0 and drafter.pools == (model.pool,)
    check_integrity(model.pool)
    drafter.drafting_model.use(shared(model), Binding(model, seed=0, prefix_reuse=False))
    assert run(drafter, tokens, 3) == (0, first[1])


def test_a_draft_without_room_is_left_out() -> None:
    model = load_draft_model("bundled-draft", "bfloat16")
    drafter = DraftModel(model)
    drafter.drafting_model.use(shared(model), Binding(model, seed=0))
    room = model.new_cache().pages_wanted(3 * PAGE)  # the reference's caches are of 256 positions at least
    model.pool.limit(room)
    assert run(drafter, TOKENS[: 3 * PAGE - 6], 0)[1] != []  # the last token and six more just fit in three pages
    assert run(drafter, TOKENS[1 : room * PAGE - 4], 1)[1] == []
    check_integrity(model.pool)
