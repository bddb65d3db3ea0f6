"""Caches of one pool against lists of tokens: whatever is shared, evicted or refused, each holds what it was fed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forerun.errors import OutOfPagesError
from forerun.kernels.cpu.page_layout import PAGE, PageLayout
from forerun.kv_cache import PagedCache, PagePool, SequenceCache
from forerun.kv_cache.contiguous import ContiguousCache, bytes_per_page
from fuzzing import examples
from pool_integrity import check_integrity

SHAPES = [(1, 2, 3), (2, 3, 1)]
TENANTS = (None, None, None, "a")
MARKS = 251
"""Bfloat16 holds all whole numbers below."""
CHUNKS = (1, 3, PAGE - 1, PAGE, PAGE + 5, 3 * PAGE)
SEEDS = st.integers(0, 2**32)


class Held:
    """A cache, and what it must hold."""

    def __init__(self, cache: SequenceCache) -> None:
        self.cache = cache
        self.committed: list[int] = []
        self.scratch: list[int] = []
        self.parents: list[int] = []
        self.published: tuple[int, str | None] | None = None  # positions at least, and whose
        self.is_forked = False  # then what it shares may have been published as another tenant's

    def path_to(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path_to(self.parents[node]), node]

    def marks(self) -> list[int]:
        """Of each slot, a number that depends on all tokens up to there."""
        marks, last = [], 0
        for token_id in self.committed:
            last = (last * 31 + token_id + 1) % MARKS
            marks.append(last)
        of_node = {-1: last}
        for node, (token_id, parent) in enumerate(zip(self.scratch, self.parents, strict=True)):
            of_node[node] = (of_node[parent] * 31 + token_id + 1) % MARKS
            marks.append(of_node[node])
        return marks

    def end(self, path: Sequence[int] = ()) -> None:
        self.committed += [self.scratch[node] for node in path]
        self.scratch, self.parents = [], []

    def keep(self, length: int) -> None:
        del self.committed[length:]
        if self.published is not None and self.published[0] > length:
            self.published = None if length < PAGE else (length // PAGE * PAGE, self.published[1])
        self.end()


def rows_of(marks: Sequence[int], layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    heads, key_width, value_width = SHAPES[layer]
    numbers = 7 * torch.arange(heads * (key_width + value_width)).view(heads, 1, -1)
    rows = ((torch.tensor(marks).view(1, -1, 1) + numbers + layer) % MARKS).to(dtype)
    return rows[..., :key_width], rows[..., key_width:]


def text(number: int, length: int) -> list[int]:
    """One of a few texts, which begin alike for a while."""
    return [(place // PAGE + (number if place >= 40 * number else 0)) % 5 for place in range(length)]


class Pools(RuleBasedStateMachine):
    """Any order of what may happen to the caches of a pool."""

    kind = "paged"

    @initialize(num_pages=st.sampled_from((None, 4, 9, 16, 40)))
    def begin(self, num_pages: int | None) -> None:
        if self.kind == "paged":
            self.layout = PageLayout(SHAPES, torch.bfloat16)
            self.pool = PagePool(self.layout.nbytes, self.layout.new_page)
        else:
            self.pool = PagePool(bytes_per_page(SHAPES, torch.float64))
        self.pool.limit(num_pages)
        self.caches: list[Held] = []
        self.public: set[tuple[str | None, tuple[int, ...]]] = set()  # what each tenant may find, in whole pages

    def cache(self) -> SequenceCache:
        if self.kind == "paged":
            return PagedCache(self.pool, self.layout)
        return ContiguousCache(self.pool, SHAPES, torch.float64)

    def any(self, rng: random.Random) -> Held:
        if not self.caches or (len(self.caches) < 6 and rng.random() < 0.1):
            self.caches.append(Held(self.cache()))
        return rng.choice(self.caches)

    @rule(seed=SEEDS)
    def feed(self, seed: int) -> None:
        """Rows of a text, or of a tree; what does not fit is refused and changes nothing."""
        rng = random.Random(seed)
        held = self.any(rng)
        count, first = rng.choice(CHUNKS), len(held.scratch)
        tokens = text(rng.randrange(3), 400)[len(held.committed) :][:count] or [0]
        parents = list(range(first - 1, first + len(tokens) - 1))
        if rng.random() < 0.3:
            parents = [rng.randrange(max(-1, row - 4), row) for row in range(first, first + len(tokens))]
        slots = len(held.committed) + first + len(tokens)
        is_refusable = held.cache.pages_wanted(slots) > self.pool.num_available
        try:
            held.cache.feed(parents)
        except OutOfPagesError:
            assert is_refusable
            return
        held.scratch += tokens
        held.parents += parents
        assert held.cache.pages_wanted(slots) == 0
        marks = held.marks()[-len(tokens) :]
        for layer in range(len(SHAPES)):
            held.cache.write(layer, first, *rows_of(marks, layer, torch.float32))
        if rng.random() < 0.4:
            self.settle(held, len(held.scratch) - 1)

    def settle(self, held: Held, node: int) -> None:
        path = held.path_to(node)
        held.cache.commit(path)
        held.end(path)

    @rule(seed=SEEDS)
    def serve(self, seed: int) -> None:
        """A request from its prompt to its end: adopt, compute, publish, and often free."""
        rng = random.Random(seed)
        tokens, tenant = text(rng.randrange(3), rng.choice((70, 130, 200, 260))), rng.choice(TENANTS)
        self.take_over(tokens, tenant)
        held = self.caches[-1]
        if not self.compute(held, tokens[len(held.committed) :]):
            return
        self.make_public(held, len(tokens), tenant)
        if rng.random() < 0.6:
            self.caches.pop().cache.free()

    def compute(self, held: Held, new: list[int], is_final: bool = True) -> bool:
        """Feed a chain after what is committed, if there is room for it. is_final: and commit it."""
        if held.cache.pages_wanted(len(held.committed) + len(new)) > self.pool.num_available:
            return False
        held.cache.feed(range(-1, len(new) - 1))
        held.scratch, held.parents = new, list(range(-1, len(new) - 1))
        for layer in range(len(SHAPES)):
            held.cache.write(layer, 0, *rows_of(held.marks()[-len(new) :], layer, torch.float32))
        if is_final:
            self.settle(held, len(new) - 1)
        return True

    def fresh(self, tokens: list[int]) -> Held | None:
        """A cache that has computed all of these tokens and published none; None if there is no room."""
        held = Held(self.cache())
        if not self.compute(held, tokens):
            return None
        self.caches.append(held)
        return held

    @rule(seed=SEEDS)
    def go_back(self, seed: int) -> None:
        """A cache that another was forked from goes back into what they share, and is written anew."""
        rng = random.Random(seed)
        source = self.fresh(text(rng.randrange(3), rng.randrange(PAGE, 3 * PAGE)))
        if source is None:
            return
        length = rng.randrange(PAGE, len(source.committed) + 1)
        held = Held(self.cache())
        try:
            held.cache.fork(source.cache, length)
        except OutOfPagesError:
            length = 0
        held.committed, held.is_forked, source.is_forked = source.committed[:length], True, True
        self.caches.append(held)
        keep = rng.randrange(PAGE)
        source.cache.truncate(keep)
        source.keep(keep)
        self.compute(source, [4] * rng.randrange(1, 8))
        self.holds_what_it_was_fed()
        self.leave(source)

    @rule(seed=SEEDS)
    def publish_early(self, seed: int) -> None:
        """Tokens are given that the cache has not committed; its scratch, which holds others, is not taken for them."""
        rng = random.Random(seed)
        number, tenant = rng.randrange(3), rng.choice(TENANTS)
        held = self.fresh(text(number, rng.choice((1, 2)) * PAGE - rng.randrange(1, 4)))
        if held is None:
            return
        if self.compute(held, [3, 3, 3, 3, 3], is_final=False):
            tokens = [*held.committed, 2, 2, 2, 2, 2]
            held.published = 0, tenant
            self.allow(held.committed, tenant)
            held.cache.publish(tokens, tenant)
            self.take_over(tokens, tenant)
            self.holds_what_it_was_fed()
        self.leave(held)

    @rule(seed=SEEDS)
    def change_hands(self, seed: int) -> None:
        """A cache with pages of one tenant is told to publish more for another: each finds what is its own alone."""
        rng = random.Random(seed)
        tokens = [5 + seed % 97, *text(rng.randrange(3), rng.choice((2, 3)) * PAGE)]
        held = self.fresh(tokens)
        if held is None:
            return
        tenants = rng.sample((None, "a"), 2)
        for length, tenant in zip((PAGE, len(tokens)), tenants, strict=True):
            self.make_public(held, length, tenant)
        for tenant in tenants:
            self.take_over(tokens, tenant)
        self.leave(held)

    def leave(self, held: Held) -> None:
        self.caches.remove(held)
        held.cache.free()

    @rule(seed=SEEDS)
    def commit(self, seed: int) -> None:
        rng = random.Random(seed)
        held = self.any(rng)
        self.settle(held, rng.randrange(-1, len(held.scratch)))

    @rule(seed=SEEDS)
    def drop(self, seed: int) -> None:
        rng = random.Random(seed)
        held = self.any(rng)
        keep = rng.randrange(len(held.scratch) + 1)
        held.cache.drop(keep)
        del held.scratch[keep:], held.parents[keep:]

    @rule(seed=SEEDS)
    def truncate(self, seed: int) -> None:
        rng = random.Random(seed)
        held = self.any(rng)
        length = len(held.committed)
        length = rng.choice((length // PAGE * PAGE, max(0, length - 1), rng.randrange(length + 1)))
        held.cache.truncate(length)
        held.keep(length)

    @rule(seed=SEEDS)
    def publish(self, seed: int) -> None:
        rng = random.Random(seed)
        held = self.any(rng)
        if held.published is None:
            held.published = 0, rng.choice(TENANTS)
        tenant = held.published[1] if rng.random() < 0.8 else rng.choice(TENANTS)
        length = len(held.committed)
        self.make_public(held, rng.choice((length, rng.randrange(length + 1))), tenant, rng.randrange(3))

    def make_public(self, held: Held, length: int, tenant: str | None, more: int = 0) -> None:
        """more: tokens given beside those that the cache has."""
        if held.published is None:
            held.published = 0, tenant
        more *= length == len(held.committed)
        self.allow(held.committed[:length], tenant)
        held.cache.publish(held.committed[:length] + [1] * more, tenant)
        whole = length // PAGE * PAGE
        if self.kind == "paged" and not held.is_forked and tenant == held.published[1] and whole > held.published[0]:
            held.published = whole, tenant

    def allow(self, tokens: list[int], tenant: str | None) -> None:
        """From now on the tenant may find these tokens: they are computed, and published as its own."""
        self.public |= {(tenant, tuple(tokens[:end])) for end in range(PAGE, len(tokens) + 1, PAGE)}

    @rule(seed=SEEDS)
    def adopt(self, seed: int) -> None:
        """Whatever comes, it is what these tokens have; and what a living cache has published does come."""
        rng = random.Random(seed)
        tenant = rng.choice(TENANTS)
        tokens = text(rng.randrange(3), rng.randrange(300))
        if self.caches and rng.random() < 0.7:
            tokens = [*rng.choice(self.caches).committed, *tokens]
        self.take_over(tokens, tenant)

    def take_over(self, tokens: list[int], tenant: str | None) -> None:
        """A new cache adopts what there is of these tokens: nothing that was not published for this very tenant."""
        others = [other for other in self.caches if other.published is not None and other.published[1] == tenant]
        held = Held(self.cache())
        available = self.pool.num_available
        length = held.cache.adopt(tokens, tenant)
        assert length % PAGE == 0 and length == held.cache.length and (not length or length < len(tokens))
        assert not length or (tenant, tuple(tokens[:length])) in self.public
        assert self.pool.num_available <= available
        if self.kind == "paged":
            for other in others:
                assert other.published is not None
                shared = other.committed[: other.published[0]]
                alike = next((i for i, (a, b) in enumerate(zip(shared, tokens, strict=False)) if a != b), None)
                alike = min(len(shared), len(tokens) - 1) if alike is None else min(alike, len(tokens) - 1)
                assert length >= alike // PAGE * PAGE
        held.committed = tokens[:length]
        held.published = (length if self.kind == "paged" else 0, tenant) if length else None
        self.caches.append(held)

    @precondition(lambda self: self.caches)
    @rule(seed=SEEDS)
    def fork(self, seed: int) -> None:
        rng = random.Random(seed)
        other = rng.choice(self.caches)
        held, length = Held(self.cache()), rng.randrange(len(other.committed) + 1)
        try:
            held.cache.fork(other.cache, length)
        except OutOfPagesError:
            length = 0
        held.committed = other.committed[:length]
        held.is_forked = other.is_forked = True
        self.caches.append(held)

    @precondition(lambda self: self.caches)
    @rule(seed=SEEDS)
    def free(self, seed: int) -> None:
        rng = random.Random(seed)
        held = self.caches.pop(rng.randrange(len(self.caches)))
        if rng.random() < 0.3 and held.cache.pages_wanted(len(held.committed) + 1) <= self.pool.num_available:
            held.cache.drop()
            held.cache.feed([-1])  # NaN of a sequence that failed must not reach others
            for layer, (heads, *widths) in enumerate(SHAPES):
                nans = [torch.full((heads, 1, width), torch.nan) for width in widths]
                held.cache.write(layer, 0, *nans)
        held.cache.free()
        assert held.cache.length == held.cache.nbytes == 0

    @rule(num_pages=st.sampled_from((None, 3, 8, 20)))
    def limit(self, num_pages: int | None) -> None:
        self.pool.limit(num_pages)

    @rule()
    def recount(self) -> None:
        """Changes nothing when all is in order."""
        before = self.pool.num_taken, self.pool.num_available, self.pool.num_published
        self.pool.recount()
        assert before == (self.pool.num_taken, self.pool.num_available, self.pool.num_published)

    @invariant()
    def holds_what_it_was_fed(self) -> None:
        for held in getattr(self, "caches", []):
            cache = held.cache
            assert (cache.length, cache.scratch_parents) == (len(held.committed), held.parents)
            marks = held.marks()
            for layer in (len(marks) % len(SHAPES),) if marks else ():
                for stored, expected in zip(cache.read(layer), rows_of(marks, layer, cache.dtype), strict=True):
                    assert torch.equal(stored, expected)
            if isinstance(cache, PagedCache) and cache.pages:
                assert cache.addresses.tolist() == [page.data_ptr() for page in cache.pages]
                assert all(bool(page.isfinite().all()) for page in cache.pages)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "pool"):
            check_integrity(self.pool, [held.cache for held in self.caches])

    def teardown(self) -> None:
        """What is left when all caches have gone can all be taken."""
        for held in getattr(self, "caches", []):
            held.cache.free()
        if hasattr(self, "pool"):
            check_integrity(self.pool)
            assert self.pool.num_available >= (self.pool.num_pages or 0)


class ContiguousPools(Pools):
    kind = "contiguous"


STEPS = {
    "serve": 6,
    "go_back": 1,
    "publish_early": 1,
    "change_hands": 1,
    "feed": 4,
    "commit": 2,
    "drop": 1,
    "truncate": 4,
    "publish": 3,
    "adopt": 2,
    "fork": 2,
    "free": 4,
}


def walk(machine: type[Pools], seed: int, num_steps: int) -> None:
    """The machine's rules in random order, the frequent ones often."""
    rng = random.Random(seed)
    pools = machine()
    pools.begin(rng.choice((None, 4, 9, 16, 24)))
    for name in rng.choices(list(STEPS), list(STEPS.values()), k=num_steps):
        if rng.random() < 0.05:
            pools.limit(rng.choice((None, 4, 8, 20)))
        if pools.caches or name in ("serve", "feed", "go_back", "publish_early", "change_hands"):
            getattr(pools, name)(rng.randrange(2**32))
        pools.holds_what_it_was_fed()
        pools.adds_up()
    pools.recount()
    pools.teardown()


MACHINES = pytest.mark.parametrize("machine", [Pools, ContiguousPools], ids=["paged", "contiguous"])


@MACHINES
@examples(8)
@example(seed=57795)  # pages of one tenant are published for another, after a fork
@example(seed=5673861)  # a forked cache finds its first page published by another
@given(seed=SEEDS)
def test_caches_hold_what_they_were_fed(machine: type[Pools], seed: int) -> None:
    walk(machine, seed, 100)


@pytest.mark.slow
@MACHINES
def test_caches_hold_what_they_were_fed_in_an_order_that_shrinks(machine: type[Pools]) -> None:
    run_state_machine_as_test(machine, settings=settings(examples(200), stateful_step_count=50))
