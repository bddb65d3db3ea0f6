"""Trees of the draft model: what they hold, what its cache keeps of them, and what is told to the verifier."""

import random
from typing import Any

import pytest
import torch

from doubles import FakeModel, MarkovModel
from forerun import LLM, SamplingParams
from forerun.drafters import Binding, DraftModel, DraftTree
from forerun.errors import ConfigError
from forerun.sampling import LogitsPipeline, LogitsRow, NoiseKey, keyed_gumbel
from forerun.types import Draft, Sequence, Step, Verdict

GREEDY = SamplingParams(temperature=0)
OPTIONS = [
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.7, "logit_bias": {3: 2.0}},
    {"seed": 3},
    {"seed": 4, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.2},
]


def near(noise: float = 1.5, **options: Any) -> FakeModel:
    """Return a draft model that agrees with FakeModel() much of the time."""
    fake = FakeModel(**options)
    fake.table = fake.table + torch.randn(fake.table.shape, generator=torch.Generator().manual_seed(5)) * noise
    return fake


def bound(draft: FakeModel, **options: Any) -> DraftTree:
    drafter = DraftTree(draft, **options)  # type: ignore[arg-type]
    drafter.bind(Binding(FakeModel(vocab_size=draft.vocab_size), seed=1))  # type: ignore[arg-type]
    return drafter


def sequence(tokens: list[int], params: SamplingParams = GREEDY, **options: Any) -> Sequence:
    return Sequence(options.pop("id", 0), list(tokens), len(tokens), params, **options)


def paths_of(draft: Draft) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(draft.ids, draft.parents):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def settle(drafter: DraftTree, each: Sequence, draft: Draft, path: list[int], bonus: int) -> None:
    """Update the sequence and the drafter as the engine does after verification."""
    each.token_ids += [*(draft.ids[node] for node in path), bonus]
    drafter.commit([Step(each, draft, Verdict(path, bonus), len(each.token_ids) - 1)])


def random_path(rng: random.Random, draft: Draft) -> list[int]:
    """Return a random node, and all above it."""
    path: list[int] = []
    node = rng.randrange(-1, len(draft))
    while node >= 0:
        path.insert(0, node)
        node = draft.parents[node]
    return path


@pytest.mark.parametrize("shape", ["dynamic", "static"])
@pytest.mark.parametrize("options", OPTIONS)
def test_output_is_the_targets(shape: str, options: dict[str, Any]) -> None:
    target, params = FakeModel(eos_token_ids=[10]), SamplingParams(max_tokens=150, **options)
    prompts = [[1, 2, 3], [4], [5, 6] * 20]
    expected = [r.token_ids for r in LLM(target, None).generate(prompts, params)]
    for noise in (0.0, 1.5, 20.0):
        drafter = DraftTree(near(noise), shape=shape)  # type: ignore[arg-type]
        results = LLM(target, drafter, max_batch=2).generate(prompts, params)
        assert [r.token_ids for r in results] == expected
        assert drafter.nbytes == 0 and not drafter.drafting_model.states


@pytest.mark.parametrize("shape", ["dynamic", "static"])
def test_a_tree_is_accepted_further_than_the_chain(shape: str) -> None:
    target, params = FakeModel(), SamplingParams(temperature=0, max_tokens=400)
    chain = LLM(target, DraftModel(near()), num_draft_tokens=12).generate([1, 2], params).stats
    tree = LLM(target, DraftTree(near(), shape), num_draft_tokens=12).generate([1, 2], params).stats
    assert tree.mean_acceptance_length > 1.2 * chain.mean_acceptance_length


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", ["dynamic", "static"])
@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.8}])
def test_any_history_and_its_cache(shape: str, options: dict[str, Any]) -> None:
    """Check random branching verdicts, draft sizes, retries and batches; the cache always holds a prefix."""
    rng = random.Random(0)
    fake = near()
    drafter = bound(fake, shape=shape, width=4)
    params = SamplingParams(max_tokens=10**6, **options)
    sequences = [sequence([rng.randrange(11) for _ in range(rng.randint(1, 9))], params, id=i) for i in range(4)]
    for each in sequences:
        drafter.start(each)
    num_rows = 0
    for _ in range(60):
        some = rng.sample(sequences, rng.randint(1, 4))
        budgets = [rng.choice([0, 1, 2, 6, 20]) for _ in some]
        if rng.random() < 0.2:
            drafter.draft(some, [7] * len(some))  # a step that failed, and is tried again
        before = {each: drafter.drafting_model.states[each].cache.length for each in some}
        for each, budget, draft in zip(some, budgets, drafter.draft(some, budgets, rng.choice([0, 0, 0.05]))):
            check(draft, budget)
            cache: Any = drafter.drafting_model.states[each].cache
            if budget:
                assert cache.tokens == each.token_ids
            else:
                assert cache.length <= before[each]
            path = random_path(rng, draft)
            settle(drafter, each, draft, path, rng.randrange(11))
            num_rows += len(path)
    for each in sequences:
        drafter.stop(each)
        drafter.stop(each)
    assert num_rows > 40
    assert all(cache.freed for cache in fake.caches)


def check(draft: Draft, budget: int) -> None:
    parents = draft.parents
    assert len(draft) <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    siblings = list(zip(parents, draft.ids))
    assert len(set(siblings)) == len(siblings)


def test_accepted_rows_are_not_computed_twice() -> None:
    fake = near(0.0)
    drafter, each = bound(fake), sequence([1, 2, 3])
    drafter.start(each)
    (draft,) = drafter.draft([each], [20])
    expected = fake.greedy([1, 2, 3], 12)
    deepest = max(paths_of(draft), key=lambda path: sum(a == b for a, b in zip(path, expected)))
    assert len(deepest) > 3
    assert deepest == expected[: len(deepest)]
    path: list[int] = []
    for node, nodes in enumerate(paths_of(draft)):
        if nodes == expected[: len(nodes)]:
            path.append(node)
    settle(drafter, each, draft, path, 7)
    fed: list[list[int]] = []
    fake.before_forward = lambda batch: fed.append(list(batch[0].token_ids))
    drafter.draft([each], [1])
    assert fed[0] == each.token_ids[-len(fed[0]) :]
    assert len(fed[0]) <= 2  # the deepest node may never have been fed, since it had no children


def test_children_are_the_tokens_that_the_noise_favours() -> None:
    fake, params = near(), SamplingParams(seed=9, temperature=0.8)
    drafter, each = bound(fake, width=3, min_gain=0.0), sequence([1, 2, 3], params, choice=2)
    drafter.start(each)
    (draft,) = drafter.draft([each], [30])
    assert draft.probs is None
    pipeline, children = LogitsPipeline(11), {}
    for path in paths_of(draft):
        children.setdefault(tuple(path[:-1]), []).append(path[-1])
    assert max(map(len, children)) > 1
    for above, tokens in children.items():
        distribution = pipeline.process(fake.logits_after([1, 2, 3, *above])[None], [LogitsRow(each, above)])[0]
        noise = keyed_gumbel([NoiseKey(9, 2, 3 + len(above))], 11)[0]
        assert tokens == (distribution + noise).topk(len(tokens)).indices.tolist()


def test_drawn_trees_carry_the_processed_distribution_they_were_drawn_from() -> None:
    fake = near()
    params = SamplingParams(temperature=0.8, top_k=4, presence_penalty=0.5)
    drafter, each = bound(fake), sequence([1, 2, 3], params)
    drafter.start(each)
    (draft,) = drafter.draft([each], [16])
    assert draft.probs is not None and draft.probs.shape == (len(draft) + 1, 11)
    assert not draft.replacement
    assert not draft.is_chain
    pipeline, paths = LogitsPipeline(11), [[], *paths_of(draft)]
    inner = {int(parent) + 1 for parent in draft.parents}
    for row, path in enumerate(paths):
        logits = fake.logits_after([1, 2, 3, *path])[None]
        distribution = pipeline.process(logits, [LogitsRow(each, path)])[0].exp()
        assert torch.allclose(draft.probs[row], distribution if row in inner else torch.zeros(11))
        for node in draft.children()[row]:
            assert draft.probs[row, draft.ids[node]] > 0


def test_draws_follow_their_distribution_in_order() -> None:
    table = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    drafter = DraftTree(MarkovModel(table))  # type: ignore[arg-type]
    drafter.bind(Binding(FakeModel(vocab_size=3), seed=5))  # type: ignore[arg-type]
    sequences = [sequence([0], SamplingParams(), id=i) for i in range(2000)]
    for each in sequences:
        drafter.start(each)
    firsts, seconds = torch.zeros(3), torch.zeros(3)
    for draft in drafter.draft(sequences, [8] * 2000):
        of: dict[int, list[int]] = {}
        for parent, token in zip(draft.parents, draft.ids):
            of.setdefault(parent, []).append(token)
        for tokens in of.values():
            firsts[tokens[0]] += 1
            if tokens[0] == 2 and len(tokens) > 1:
                seconds[tokens[1]] += 1
    distribution = table[0].softmax(0)
    for counts, expected in (
        (firsts, distribution * firsts.sum()),
        (seconds[:2], distribution[:2] / distribution[:2].sum() * seconds.sum()),
    ):
        assert seconds[2] == 0
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 13.8  # chi-squared, at most 2 degrees of freedom, p = 0.001


def test_undrawn_trees_are_the_most_probable_tokens_and_count_as_chosen() -> None:
    drafter, each = bound(near(), drawn=False), sequence([1, 2, 3], SamplingParams())
    drafter.start(each)
    (draft,) = drafter.draft([each], [6])
    top = near().logits_after([1, 2, 3]).argmax()
    assert draft.probs is None and int(draft.token_ids[0]) == top


@pytest.mark.parametrize("shape", ["dynamic", "static"])
def test_a_high_price_silences_it_and_a_low_one_prunes(shape: str) -> None:
    drafter, each = bound(near(), shape=shape), sequence([1, 2, 3])
    drafter.start(each)
    sizes = [len(drafter.draft([each], [16], min_acceptance_prob)[0]) for min_acceptance_prob in (0.0, 0.1, 0.3, 0.999)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 16 and sizes[-1] == 0


def test_a_wrong_draft_model_learns_to_be_silent() -> None:
    fake = FakeModel(seed=1)
    for shape in ("dynamic", "static"):
        drafter, each = bound(fake, shape=shape), sequence([1, 2, 3])
        drafter.start(each)
        rng = random.Random(1)
        sizes = []
        for _ in range(300):
            (draft,) = drafter.draft([each], [8], 0.1)
            sizes.append(len(draft))
            wrong = next(
                t for t in rng.sample(range(11), 11) if t not in [draft.ids[node] for node in draft.children()[0]]
            )
            settle(drafter, each, draft, [], wrong)
        assert sum(sizes[:10]) > 4 * sum(sizes[-10:])


def test_rooms_and_contexts_bound_the_depth() -> None:
    for context in (4, 6, 8):
        target, draft = FakeModel(), near(0.0, context_length=context)

        def fits(batch: Any, context: int = context) -> None:
            for rows in batch:
                assert rows.cache.length + _depth(rows) <= context

        draft.before_forward = fits
        result = LLM(target, DraftTree(draft), num_draft_tokens=12).generate(
            [1, 2, 3], SamplingParams(temperature=0, max_tokens=40)
        )
        assert result.token_ids == target.greedy([1, 2, 3], 40)
    each = sequence([1, 2, 3], max_length=6)
    drafter = bound(near(0.0))
    drafter.start(each)
    (room_of_two,) = drafter.draft([each], [16])
    assert max(map(len, paths_of(room_of_two))) == 2


def _depth(rows: Any) -> int:
    depths: list[int] = []
    first, n = rows.cache.num_scratch, len(rows.token_ids)
    fed = [*rows.cache.scratch.parents, *(range(first - 1, first + n - 1) if rows.parents is None else rows.parents)]
    for i, parent in enumerate(fed):
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
        assert parent < i
    return max(depths)


@pytest.mark.parametrize("widths", [(11, 16), (16, 11)])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"temperature": 0.7}])
def test_padding_of_either_vocabulary(widths: tuple[int, int], options: dict[str, Any]) -> None:
    target, draft = FakeModel(vocab_size=widths[0]), FakeModel(vocab_size=widths[1], seed=1)
    words = type("Words", (), {"get_vocab": lambda self: {"a": 0, "b": 1}, "decode": lambda self, *_, **__: ""})()
    llm = LLM(target, DraftTree(draft), tokenizer=words, num_draft_tokens=8)
    params = SamplingParams(max_tokens=60, **options)
    result = llm.generate([1, 2], params)
    assert result.stats.num_draft_tokens > 60
    if options != {"temperature": 0.7}:
        assert result.token_ids == LLM(target, None).generate([1, 2], params).token_ids


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    fake = near()
    drafter, each = bound(fake), sequence([1, 2, 3])
    drafter.start(each)
    (expected,) = drafter.draft([each], [9])
    calls = 0

    def fail(_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")

    fake.before_forward = fail
    with pytest.raises(RuntimeError):
        drafter.draft([each], [9])
    each.token_ids += [*expected.ids[:1], 3]
    cache: Any = drafter.drafting_model.states[each].cache
    assert cache.num_scratch == 0
    drafter.draft([each], [9])
    assert cache.tokens == each.token_ids


@pytest.mark.parametrize(
    "options",
    [{"shape": "round"}, {"width": 0}] + [{"min_gain": 1.0}, {"min_gain": -0.1}],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DraftTree(**options)
