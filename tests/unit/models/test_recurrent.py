"""Models with recurrent layers: whatever the rows came with, and whatever was rolled back, they give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from families import RECURRENT, VOCAB, Folders, make_family
from forerun import (
    LLM,
    DraftModel,
    EarlyExit,
    Hybrid,
    Lookahead,
    Medusa,
    PromptLookup,
    Recycling,
    SamplingParams,
    Suffix,
)
from forerun.drafters import Drafter
from forerun.errors import BatchError, NonFiniteError, OutOfPagesError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.kv_cache.recurrent_state import MOST_RECORDED
from forerun.models import Model, Rows, load_model
from forerun.utils.machine import GIB
from medusa_heads import random_medusa

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS = ("float64", "float32", "bfloat16")
DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "suffix": lambda target: Suffix(),
    "prompt lookup": lambda target: PromptLookup(),
    "lookahead": lambda target: Lookahead(),
    "recycling": lambda target: Recycling(),
    "early exit": lambda target: EarlyExit(1),
    "head": lambda target: Medusa(random_medusa(target, draft_vocab_size=60)),
    "draft model": lambda target: DraftModel(target),
    "hybrid": lambda target: Hybrid([Suffix(), Recycling()]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("recurrent"))


@pytest.fixture(scope="module")
def model(folders: Folders) -> Model:
    return load_model(folders["qwen3_5_text"], "float32")


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether these are the same bits; of float64, whose products BLAS adds up in orders of its own, nearly so."""
    if expected.dtype == torch.float64:
        return torch.allclose(found, expected, rtol=0, atol=1e-9)
    return torch.equal(found, expected)


TEXT = tokens(150)


def together(model: Model, text: list[int] = TEXT) -> torch.Tensor:
    return model.forward([Rows(model.new_cache(), text)]).logits


def in_steps(model: Model, sizes: list[int], wanted: int | None = None) -> torch.Tensor:
    """Logits of the text in chunks of these sizes; of `wanted` rows of each at most."""
    cache, parts, done = model.new_cache(), [], 0
    for size in sizes:
        parts.append(
            model.forward([Rows(cache, TEXT[done : done + size], num_logits=min(size, wanted or size))]).logits
        )
        cache.commit(range(size))
        done += size
    return torch.cat(parts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("family", RECURRENT)
def test_chunks_of_any_size(family: str, dtype: str, folders: Folders) -> None:
    model = load_model(folders[family], dtype)
    expected = in_steps(model, [1] * 100)
    assert same(together(model, TEXT[:100]), expected)
    for size in (2, 3, 5, 16, 33, 64):
        sizes = [size] * (100 // size)
        assert same(in_steps(model, sizes), expected[: sum(sizes)])
        ends = [sum(sizes[: count + 1]) - 1 for count in range(len(sizes))]
        assert same(in_steps(model, sizes, wanted=1), expected[ends])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("family", RECURRENT)
def test_rows_that_are_rolled_back_leave_nothing(family: str, dtype: str, folders: Folders) -> None:
    model = load_model(folders[family], dtype)
    expected, cache, done = together(model), model.new_cache(), 0
    for kept, wrong in ((40, 0), (3, 2), (1, 4), (0, 3), (5, 0), (1, 1), (0, 1), (2, 40), (30, 5), (1, 0), (4, 9)):
        rows = [*TEXT[done : done + kept], *tokens(wrong, seed=done + 1)]
        logits = model.forward([Rows(cache, rows)]).logits
        assert same(logits[:kept], expected[done : done + kept])
        cache.commit(range(kept)) if kept else cache.drop()
        done += kept
    assert same(model.forward([Rows(cache, TEXT[done:])]).logits, expected[done:])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("family", RECURRENT)
def test_trees(family: str, dtype: str, folders: Folders) -> None:
    """Of several steps, each after a part of the one before it, and fed in two forwards."""
    model = load_model(folders[family], dtype)
    expected, cache = together(model), model.new_cache()
    model.forward([Rows(cache, TEXT[:20], num_logits=1)])
    cache.commit(range(20))
    done = 20
    for _ in range(4):
        a, b, c, d = TEXT[done : done + 4]
        nodes, parents = [7, a, b, 9, b, c, 3, d], [-1, -1, 0, 1, 1, 4, 4, 5]
        first = model.forward([Rows(cache, nodes[:5], parents[:5])]).logits
        second = model.forward([Rows(cache, nodes[5:], parents[5:])]).logits
        path = [1, 4, 5, 7]
        assert same(torch.cat([first, second])[path], expected[done : done + 4])
        cache.commit(path[: 2 + done % 3])
        done += 2 + done % 3
    assert same(model.forward([Rows(cache, TEXT[done:])]).logits, expected[done:])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", RECURRENT)
def test_layers_in_two_parts(family: str, folders: Folders) -> None:
    """Rows go through the first layer one by one, then through the others together, or from the start again."""
    model = load_model(folders[family], "bfloat16")
    expected, cache, done = together(model), model.new_cache(), 20
    model.forward([Rows(cache, TEXT[:20], num_logits=1)])
    cache.commit(range(20))
    for step, (kept, wrong) in enumerate([(2, 0), (1, 0), (2, 2), (2, 2), (1, 3), (3, 1), (1, 9), (2, 1), (4, 4)] * 2):
        rows = [*TEXT[done : done + kept], *tokens(wrong, seed=step)]
        hidden = [model.forward_first([Rows(cache, [token_id])], 1)[0] for token_id in rows]
        if step % 4 == 3:
            cache.drop()
        again = Rows(cache, rows) if step % 4 == 3 else Rows(cache, rows, hidden=torch.cat(hidden), first_layer=1)
        assert same(model.forward([again]).logits[:kept], expected[done : done + kept])
        cache.commit(range(kept))
        done += kept


def test_a_prompt_with_a_draft_behind_it(model: Model) -> None:
    """Rows without logits are kept together; any path of those behind them can be."""
    expected, cache = together(model), model.new_cache()
    rows, parents = [*TEXT[:60], 5, TEXT[60], 8, TEXT[61]], [*range(-1, 59), 59, 59, 61, 61]
    logits = model.forward([Rows(cache, rows, parents, num_logits=5)]).logits
    assert same(logits[[0, 2, 4]], expected[59:62])
    cache.commit([*range(60), 61, 63])
    assert same(model.forward([Rows(cache, TEXT[62:])]).logits, expected[62:])
    cache.drop()
    model.forward([Rows(cache, TEXT[62:100], num_logits=1)])
    with pytest.raises(ValueError, match="committed together"):
        cache.commit(range(4))


def test_more_rows_than_are_recorded(model: Model) -> None:
    count = MOST_RECORDED + 20
    logits = model.forward([Rows(cache := model.new_cache(), TEXT[:count])]).logits
    assert same(logits, together(model)[:count])
    cache.commit(range(25))  # the first twenty are kept together
    assert same(model.forward([Rows(cache, TEXT[25:])]).logits, together(model)[25:])
    cache.drop()
    model.forward([Rows(cache, TEXT[25:125])])
    with pytest.raises(ValueError, match="apart"):
        model.forward([Rows(cache, TEXT[:60])])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", RECURRENT)
def test_company_and_threads(family: str, folders: Folders) -> None:
    model, threads = load_model(folders[family], "bfloat16"), torch.get_num_threads()
    expected = together(model)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            caches = [model.new_cache() for _ in range(3)]
            model.forward([Rows(cache, TEXT[:50], num_logits=0) for cache in caches])
            for kept, cache in zip((50, 50, 50), caches, strict=True):
                cache.commit(range(kept))
            batch = [Rows(caches[0], tokens(9, 4)), Rows(caches[1], TEXT[50:80]), Rows(caches[2], [1, 2], [-1, -1])]
            assert same(model.forward(batch).logits[9:39], expected[50:80])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kernels", ["float32", "float64"])
def test_a_state_can_be_brought_back_to_a_mark(kernels: str, folders: Folders) -> None:
    model = load_model(folders["qwen3_5_text"], kernels)
    expected, cache = together(model), model.new_cache()
    for size in (30, 3, 10):
        model.forward([Rows(cache, TEXT[cache.length : cache.length + size])])
        cache.commit(range(size))
        if cache.length == 33:
            cache.mark()
    cache.truncate(40)
    assert cache.length == 33
    assert same(model.forward([Rows(cache, TEXT[33:])]).logits, expected[33:])
    cache.truncate(20)
    assert cache.length == 0
    assert same(model.forward([Rows(cache, TEXT)]).logits, expected)


def test_memory_of_a_sequence(model: Model) -> None:
    """A state and a few records; another state while a prompt is computed."""
    cache = model.new_cache()
    assert cache.nbytes == 0
    model.forward([Rows(cache, TEXT[:100], num_logits=1)])
    cache.commit(range(100))
    layout = model.decoder.planner.new_state.layout
    held = [cache.nbytes - len(cache.held) * cache.pool.page_nbytes]
    for _ in range(20):
        model.forward([Rows(cache, [1, 2, 3, 4])])
        cache.commit(range(3))
        held.append(cache.nbytes - len(cache.held) * cache.pool.page_nbytes)
    assert 4 * layout.state_size <= min(held)
    assert max(held) <= 4 * (layout.state_size + 32 * layout.record_size) <= model.state_nbytes
    cache.free()
    assert cache.nbytes == 0


def answers(target: Model, drafter: Drafter | None, prompts: list[list[int]], **options: Any) -> list[Any]:
    params = [replace(GREEDY, logprobs=1), replace(GREEDY, temperature=0.9, seed=3, logprobs=1), GREEDY]
    if drafter is not None:
        options.setdefault("num_draft_tokens", 4)
    results: Any = LLM(target, drafter, **options).generate(prompts, params)
    return [(each.token_ids, each.logprobs) for each in results]


PROMPTS = [tokens(40) * 2, tokens(9, 1), tokens(70, 2) * 2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", RECURRENT)
def test_drafters(family: str, drafter: str, folders: Folders) -> None:
    target = load_model(folders[family], "bfloat16")
    expected = answers(target, None, PROMPTS, prefix_reuse="off")
    assert answers(target, DRAFTERS[drafter](target), PROMPTS) == expected


def test_preemption(model: Model) -> None:
    expected = answers(model, None, PROMPTS, prefix_reuse="off")
    target = load_model(Path(model.name), "float32")
    pool = target.pool
    assert pool is not None
    memory = 5.5 * pool.page_nbytes / GIB
    assert answers(target, Suffix(), PROMPTS, cache_memory=memory, num_draft_tokens=3) == expected


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_prefixes_are_shared_where_a_page_ends(dtype: str, folders: Folders) -> None:
    target = load_model(folders["qwen3_5_text"], dtype)
    text = tokens(2 * PAGE + 20, 5)
    prompts = [text, [*text[: 2 * PAGE + 3], 1, 2, 3], [*text[: PAGE + 9], 4, 5, 6]]
    plain = LLM(target, None, prefix_reuse="off")
    expected = [plain.generate(prompt, GREEDY).token_ids for prompt in prompts]
    llm = LLM(load_model(folders["qwen3_5_text"], dtype), Suffix(), num_draft_tokens=3, prefix_reuse="on")
    found = [llm.generate(prompt, GREEDY) for prompt in prompts]
    assert [each.token_ids for each in found] == expected
    cached = [each.stats.num_cached_tokens for each in found]
    assert cached[0] == 0 and cached[1] == 2 * PAGE and cached[2] == 0  # no state was kept after the first page


def test_a_state_that_was_evicted_is_computed_again(folders: Folders) -> None:
    target = load_model(folders["qwen3_5_text"], "float32")
    llm = LLM(target, None)
    text = tokens(PAGE + 5, 6)
    expected = llm.generate(text, GREEDY)
    assert llm.generate(text, GREEDY).stats.num_cached_tokens == PAGE
    target.pool.most_states = 2
    for seed in range(7, 10):
        llm.generate(tokens(PAGE + 5, seed), GREEDY)
    again = llm.generate(text, GREEDY)
    assert again.stats.num_cached_tokens == 0 and again.token_ids == expected.token_ids


def test_several_samples_of_a_prompt(model: Model) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)
    plain, fast = (
        LLM(model, drafter, prefix_reuse=reuse).generate(tokens(PAGE + 30, 8), params)
        for drafter, reuse in ((None, "off"), (Suffix(), "on"))
    )
    assert [each.token_ids for each in fast.choices] == [each.token_ids for each in plain.choices]
    assert len({tuple(each.token_ids) for each in plain.choices}) == 3


def test_forks_have_the_whole_state(model: Model) -> None:
    cache, fork = model.new_cache(), model.new_cache()
    model.forward([Rows(cache, TEXT[:70])])
    cache.commit(range(70))
    with pytest.raises(ValueError, match="cannot fork"):
        fork.fork(cache, 60)
    fork.fork(cache, 70)
    expected = together(model)[70:90]
    for each in (fork, cache):
        assert same(model.forward([Rows(each, TEXT[70:90])]).logits, expected)


def test_no_memory_for_a_row(folders: Folders) -> None:
    """A forward that fails before it computes leaves the state as it was."""
    model = load_model(folders["qwen3_5_text"], "float32")
    cache, expected = model.new_cache(), together(model)
    model.forward([Rows(cache, TEXT[:10])])
    cache.commit(range(10))
    model.pool.limit(1)
    with pytest.raises(OutOfPagesError):
        model.forward([Rows(cache, TEXT[: PAGE * 2])])
    model.pool.limit(None)
    cache.drop()
    assert same(model.forward([Rows(cache, TEXT[10:])]).logits, expected[10:])


def test_what_becomes_of_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """One request ends, and the others go on."""
    folder = make_family("qwen3_5_text", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 5] = 0
    tensors["model.embed_tokens.weight"][17] = torch.eye(64)[5]
    tensors["model.layers.0.linear_attn.in_proj_qkv.weight"][64:, 5] = 1e38  # of values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = [[1, 2, 3] * 5, [4, 17, 5, 6]]
    llm = LLM(load_model(folder, "float32"), Suffix(), num_draft_tokens=3)
    expected = llm.generate(prompts[0], GREEDY).token_ids
    with pytest.raises(BatchError) as failed:
        llm.generate(prompts, GREEDY)
    assert isinstance(failed.value.errors[1], NonFiniteError)
    assert failed.value.generations[0].token_ids == expected
