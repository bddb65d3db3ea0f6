"""Branching trees: every node has the bits of its own path decoded token by token, and so has what is committed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import FAMILIES, RECURRENT, VOCAB, Folders
from forerun.kernels.partition import KV_BLOCK, MAX_LANES, AttentionShape
from forerun.kv_cache import SequenceCache
from forerun.models import Model, Rows, load_model
from forerun.models.attention.base import LayerAttention
from forerun.models.attention.reference import ReferenceAttention, SegmentPlanner
from forerun.models.attention.segment_plan import Views
from forerun.models.attention.tree_mask import tree_segments
from forerun.models.model import lay_out

Bits = tuple[list[int], list[int]]  # tokens and parents
CPU = torch.device("cpu")


def random_tree(rng: random.Random, n: int, spread: int, first: int = 1) -> Bits:
    """Draw parents among the last `spread` nodes, after a chain; few tokens, so that siblings are often duplicates."""
    parents = list(range(-1, first - 1))
    parents += [rng.randrange(max(0, i - spread), i) for i in range(first, n)]
    return [rng.randrange(4) for _ in range(n)], parents


def path_of(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@torch.inference_mode()
def prefilled(model: Model, length: int) -> SequenceCache:
    """Return a cache with drawn keys and values, the same for the same length."""
    cache = model.new_cache()
    cache.feed(range(-1, length - 1))
    generator = torch.Generator().manual_seed(length)
    for layer, (heads, key_width, value_width) in enumerate(cache.shapes):
        new = torch.randn(2, heads, length, max(key_width, value_width), generator=generator)
        cache.write(layer, 0, new[0, ..., :key_width], new[1, ..., :value_width])
    cache.commit(range(length))
    return cache


def decode(model: Model, cache: SequenceCache, tokens: Sequence[int]) -> Tensor:
    """Return the logits of the tokens, computed one forward each."""
    logits = []
    for token_id in tokens:
        logits.append(model.forward([Rows(cache, [token_id])]).logits)
        cache.commit([0])
    return torch.cat(logits)


def held(cache: SequenceCache) -> list[Tensor]:
    return [stored[:, : cache.length].clone() for layer in range(len(cache.shapes)) for stored in cache.read(layer)]


def check_tree(model: Model, length: int, tree: Bits, logits: Tensor, cache: SequenceCache) -> None:
    """Compare all nodes with plain decoding of their paths; then commit the deepest path, and decode further."""
    tokens, parents = tree
    plain = prefilled(model, length)
    known: dict[int, Tensor] = {}
    leaves = set(range(len(tokens))) - set(parents)
    path: list[int] = []
    for leaf in sorted(leaves, key=lambda leaf: len(path_of(leaf, parents))):
        last, path = path, path_of(leaf, parents)
        shared = sum(node in last for node in path)  # from the root on; the cache holds these already
        if plain.state is not None:  # whatever is rolled back, a state is computed anew
            plain, shared = prefilled(model, length), 0
        plain.truncate(length + shared)
        new = path[shared:]
        known.update(zip(new, decode(model, plain, [tokens[node] for node in new]), strict=True))
    assert torch.equal(logits, torch.stack([known[node] for node in range(len(tokens))]))
    cache.commit(path)
    assert all(torch.equal(a, b) for a, b in zip(held(cache), held(plain), strict=True))
    assert torch.equal(decode(model, cache, [5, 6]), decode(model, plain, [5, 6]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("families"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in RECURRENT])
def test_nodes_have_the_bits_of_their_paths(family: str, dtype: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[family], dtype=dtype)
    assert model.exactness.exact, model.exactness.reason
    rng = random.Random(f"{family} {dtype}")
    for length, n in ((0, 4), (63, 6), (64, 3), (65, 8), (250, 16), (255, 5), (256, 12), (257, 8)):
        tree = random_tree(rng, n, rng.choice((2, 3, n)))
        cache = prefilled(model, length)
        check_tree(model, length, tree, model.forward([Rows(cache, *tree)]).logits, cache)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_trees_beside_trees_chains_and_prompts(family: str, folders: dict[str, Path]) -> None:
    model = load_model(folders[family], dtype="float32")
    rng = random.Random(family)
    lengths = (30, 252, 62)
    trees = [random_tree(rng, n, 3) for n in (3, 9, 14)]
    caches = [prefilled(model, length) for length in lengths]
    batch = [Rows(cache, *tree) for cache, tree in zip(caches, trees, strict=True)]
    prompt = [rng.randrange(VOCAB) for _ in range(40)]
    chain = Rows(prefilled(model, 200), [1, 2, 3])
    logits = model.forward([batch[0], Rows(model.new_cache(), prompt, num_logits=0), batch[1], chain, batch[2]]).logits
    parts = (logits[:3], logits[3:12], logits[12:15], logits[15:])
    assert torch.equal(parts[2], decode(model, prefilled(model, 200), [1, 2, 3]))
    for length, tree, part, cache in zip(lengths, trees, (parts[0], parts[1], parts[3]), caches, strict=True):
        check_tree(model, length, tree, part, cache)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(40))
def test_attention_of_random_trees(seed: int) -> None:
    """Compare one layer of any shape, and trees up to more nodes than one product takes."""
    rng = random.Random(seed)
    length = rng.choice((0, 1, 60, 63, 64, 65, 120, 190, 250, 255, 256, 257, 300, 511))
    n = 230 if seed % 10 == 0 else rng.choice((2, 3, 5, 16, 40, 128))
    parents = random_tree(rng, n, rng.choice((1, 2, 3, 8, n)), first=rng.choice((1, n // 2)))[1]
    parents[-1] = -1  # a second root, and so always a branching tree
    kv_heads, group, width = rng.choice(((1, 1, 16), (2, 2, 64), (4, 4, 32), (2, 3, 16), (1, 4, 256)))
    window, softcap = rng.choice((None, 1, 24, 70, 300)), rng.choice((None, 5.0))
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(group * kv_heads, generator=generator) if rng.random() < 0.5 else None
    keys, values = torch.randn(2, length + n, kv_heads, width, generator=generator)
    query = torch.randn(n, group * kv_heads, width, generator=generator)
    form = AttentionShape(0.2, window, softcap, sinks)
    planner = SegmentPlanner([LayerAttention(kv_heads, group, width, width, form)], torch.float32, CPU)

    def rows_of(cache: SequenceCache, new: list[int], parents: list[int] | None) -> Tensor:
        layout = lay_out([Rows(cache, [0] * len(new), parents)], planner)
        padded = new + new[-1:] * (layout.num_rows - len(new))
        slots = [length + node for node in padded]
        given = (query[padded], keys[slots], values[slots])
        return ReferenceAttention(torch.float32).forward(0, *given, layout, form)[: len(new)]

    cache = planner.new_cache()
    cache.feed(range(-1, length - 1))
    cache.write(0, 0, keys[:length].transpose(0, 1), values[:length].transpose(0, 1))
    cache.commit(range(length))
    tree = rows_of(cache, list(range(n)), parents)
    for leaf in rng.sample(range(n), min(n, 6)):
        cache.truncate(length)
        for node in path_of(leaf, parents):
            alone = rows_of(cache, [node], None)
            cache.commit([0])
            assert torch.equal(alone[0], tree[node]), (node, length)


def test_large_trees_are_cut_until_each_product_fits() -> None:
    rng = random.Random(0)
    for length in (0, 63, 250, 300):
        for n, spread in ((130, 2), (150, 150), (400, 5), (400, 1)):
            parents = random_tree(rng, n, spread)[1]
            parents[-1] = 0
            views = Views([(1, None)], torch.float32, CPU)
            segments = tree_segments(0, length, parents, 0, 7, 0, views)
            positions = [length + len(path_of(node, parents)) - 1 for node in range(n)]
            rows: list[int] = []
            for segment in segments:
                partition = segment.partitions[1, None]
                assert partition.lanes is not None
                shared, unseen = partition.shared, (partition.mask[0, 0] == -torch.inf).nonzero()
                num_lanes = int(unseen) - shared
                assert shared % 64 + num_lanes < MAX_LANES
                assert partition.lanes.max() <= num_lanes
                own = range(7, 7 + n) if segment.rows is None else segment.rows.tolist()
                reached = [positions[row - 7] for row in own]
                assert len({position // KV_BLOCK for position in reached}) == 1
                assert max(reached) // KV_BLOCK * KV_BLOCK <= shared <= min(reached)
                rows += own
            assert sorted(rows) == list(range(7, 7 + n))
