"""Whatever became of the drafts, a draft model's cache holds, to the bit, what a fresh computation would."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forerun import SamplingParams
from forerun.drafters import Binding, DraftModel, DraftTree, Staged
from forerun.models import Model, Rows, load_model, load_tokenizer
from forerun.models.draft_session import NativeDraftSession
from forerun.types import Draft, Sequence, Step, Verdict
from forerun.utils.tree import Tree

DRAFTERS: dict[str, Any] = {
    "chain": lambda model: DraftModel(model),
    "dynamic tree": lambda model: DraftTree(model, min_gain=0.0),
    "static tree": lambda model: DraftTree(model, shape="static"),
    "staged": lambda model: Staged(model),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("bundled-draft", "float32")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams()])
def test_cache_after_many_commits(
    model: Model, name: str, params: SamplingParams, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fails: some forwards of the draft model raise when their rows have been computed, and are tried again."""
    rng = random.Random(name)
    tokenizer = load_tokenizer("bundled-draft")
    drafter = DRAFTERS[name](model)
    drafter.bind(Binding(model, tokenizer, seed=1))
    prompt = tokenizer("def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return")["input_ids"]
    sequences = [Sequence(i, list(prompt[i:]), len(prompt) - i, params) for i in range(2)]
    for each in sequences:
        drafter.start(each)
    calls, failures = 0, 0

    def failing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def failing_at_times(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            result = compute(*args)
            if calls in (5, 23, 41, 60):
                raise RuntimeError("out of memory")
            return result

        return failing_at_times

    if fails:
        monkeypatch.setattr(model, "forward", failing(model.forward))
        monkeypatch.setattr(NativeDraftSession, "advance", failing(NativeDraftSession.advance))
    kept = 0
    for _ in range(8):
        steps = []
        while True:
            try:
                drafts = drafter.draft(sequences, [10, 7])
                break
            except RuntimeError:
                failures += 1
        for each, draft in zip(sequences, drafts):
            path = draft.path_to(rng.randrange(-1, len(draft)))
            kept += len(path)
            each.token_ids += [*(draft.ids[node] for node in path), rng.randrange(4096)]
            steps.append(Step(each, draft, Verdict(path, each.token_ids[-1]), len(each.token_ids) - 1))
        drafter.commit(steps)
    monkeypatch.undo()
    drafter.draft(sequences, [1, 1])
    assert kept > 12 and (failures > 1) == fails
    for each in sequences:
        cache = drafter.drafting_model.states[each].cache
        length = cache.length + cache.num_scratch  # what was fed for the next draft is not committed
        assert length == len(each.token_ids) and cache.length >= length - 2
        fresh = model.new_cache()
        model.forward([Rows(fresh, each.token_ids, None, 0)])
        for layer in range(model.num_layers):
            for stored, expected in zip(cache.read(layer), fresh.read(layer), strict=True):
                assert torch.equal(stored, expected)
    assert drafter.nbytes > 0
    for each in sequences:
        drafter.stop(each)
    assert drafter.nbytes == 0


@pytest.mark.parametrize(
    ("written", "path"), [([], []), ([5], [1]), ([5, 6], [1, 3]), ([5, 7], [1]), ([4, 6], [0]), ([9], [])]
)
def test_walk_follows_what_was_written(written: list[int], path: list[int]) -> None:
    assert Tree([4, 5, 9, 6], [-1, -1, 0, 1]).follow(written) == path


def test_a_draft_inside_another_draft_is_counted_by_its_tokens(model: Model) -> None:
    """Check a drafter that merges several drafts and reports the merged one."""
    drafter = DraftModel(model)
    drafter.bind(Binding(model, load_tokenizer("bundled-draft"), seed=1))
    each = Sequence(0, [5, 6, 7], 3, SamplingParams(temperature=0))
    drafter.start(each)
    (draft,) = drafter.draft([each], [1], 1e-9)
    own = drafter.drafting_model.states[each]
    assert own.drafted is not None
    tree, rates = own.drafted
    (level,) = tree.levels
    trials, rate = rates._tried[level], rates.rate(level)
    (first,) = draft.ids
    merged = Draft([(first + 1) % 4096, first], [-1, -1])
    each.token_ids += [first, 9]
    drafter.commit([Step(each, merged, Verdict([1], 9), 4)])
    assert rates._tried[level] == trials + 1
    assert rates.rate(level) > rate
    assert own.drafted is None
