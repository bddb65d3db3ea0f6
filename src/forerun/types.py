"""The types that travel between packages: caches, grammars, drafts, verdicts, sequences, noise and verifiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forerun.config import SamplingParams
from forerun.errors import DrafterError, GrammarDeadEndError
from forerun.utils.tree import Tree

# Interfaces of memory for keys and values: the cache of one sequence, and the pool that caches take pages from.


class Cache(Protocol):
    """The keys and values of one sequence in one model.

    Scratch accumulates: each forward adds its rows to those fed since the last commit, numbered from 0, and
    `Rows.parents` may name any of them. `commit` ends that account, and so does `drop`, which must
    follow every forward that failed or whose rows are not needed.
    """

    @property
    def length(self) -> int:
        """Return the number of committed positions."""

    @property
    def num_scratch(self) -> int:
        """Return the number of rows fed since the last commit."""

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""

    def commit(self, path: Seq[int]) -> None:
        """Keep these of the rows fed since the last commit, root to leaf, and drop the remaining ones."""

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep` of them."""

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed positions only, and no scratch; fewer where recurrent layers have no state
        after those."""

    def free(self) -> None:
        """Give the memory back."""

    def pages_wanted(self, num_slots: int) -> int:
        """Return the number of pages that this cache must still take to hold `num_slots` slots, scratch included."""

    def adopt(self, token_ids: Seq[int], tenant: str | None) -> int:
        """Take over the longest published prefix of these tokens, into an empty cache.

        Args:
            token_ids: what the sequence holds. The last one is not adopted: it must be fed to have logits.
            tenant: whose published pages are searched; None: those that were published without a tenant.

        Returns:
            The positions that the cache holds now: a multiple of PAGE, below len(token_ids).
        """

    def is_finite(self) -> bool:
        """Return whether what is committed is free of NaN and infinity, as far as they reach later layers."""

    def publish(self, token_ids: Seq[int], tenant: str | None) -> None:
        """Let other caches adopt the whole pages of these tokens. token_ids[i] stands at committed position i.

        Scratch is never published, and nothing is published where the pool has no page for it. A further call
        continues where the last one ended.
        """

    def fork(self, other: Cache, length: int) -> None:
        """Hold the first `length` committed positions of another cache of the same model, in an empty cache. Whole
        pages are shared, the remaining positions are copied.

        Raises:
            OutOfPagesError: there is no page for the remaining positions. The cache is empty still.
        """


class Pool(Protocol):
    """The pages that the keys and values of one model's sequences may take, of PAGE positions each.

    A page is taken by caches, published, both, or free. Published pages that no cache holds are evicted when pages
    are needed, the least recently used first.
    """

    @property
    def num_pages(self) -> int | None:
        """Return the bound; None without one."""

    @property
    def num_taken(self) -> int:
        """Return the number of pages that caches hold, or that are published."""

    @property
    def num_available(self) -> int:
        """Return the number of pages that can be taken now, evictable ones included; very large without a bound."""

    @property
    def page_nbytes(self) -> int:
        """Return the bytes of a page."""

    def limit(self, num_pages: int | None) -> None:
        """Set the bound. Where more is taken, nothing can be until enough has been given back.

        Raises:
            ConfigError: num_pages is below 1.
        """

    def forget(self) -> bool:
        """Drop the published pages that no cache holds. Return whether no page is published any more."""

    def recount(self) -> None:
        """Count again what the caches hold, after an interrupt that may have come between a page and its count."""


# Interfaces of grammars: a matcher, and the constraint of one sequence that the pipeline calls.

Bits: TypeAlias = NDArray[np.uint8]
"""[ceil(V / 8)] one bit per token, the lowest bit of the first byte for token 0."""
Allowed: TypeAlias = Bits | GrammarDeadEndError | None
"""What may follow a prefix: these tokens; nothing, and why; None: anything, since the output has ended there."""


class Matcher(Protocol):
    """A position in a text under a grammar. Its answers are a function of the tokens accepted so far."""

    def accept(self, token_id: int) -> bool:
        """Accept a token; return False, with nothing changed, if the grammar refuses it. No end token is ever given."""

    def undo(self, count: int) -> bool:
        """Undo the last accepted tokens; return False if the matcher is of no further use."""

    def allowed(self) -> tuple[Bits, bool]:
        """Return the tokens that may follow, end tokens apart, in an array of the caller's; and whether the text may
        end.

        Raises:
            GrammarDeadEndError: it cannot compute them. After that the matcher is of no further use.
        """

    def forced(self) -> list[int]:
        """Return tokens of the only text that may follow; other tokens may make the same text."""


class Constraint(Protocol):
    """The grammar of one sequence, which holds no state beyond the sequence's tokens."""

    def allowed(self, sequence: Sequence, paths: Seq[Seq[int]]) -> list[Allowed]:
        """Return what may follow the sequence's tokens and each of the paths of tokens after them."""

    def viable(self, sequence: Sequence, tree: Tree) -> list[bool]:
        """Return [n] whether the output may continue to each node of the tree, along the node's path."""

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """Return at most `limit` tokens that the grammar forces, as far as it shows."""


def is_allowed(bits: Bits, token_id: int) -> bool:
    """Return whether the token's bit is set."""
    return bool(bits[token_id >> 3] >> (token_id & 7) & 1)


def allow(bits: Bits, token_ids: Iterable[int]) -> None:
    """Set the bits of these tokens."""
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)


def forbid(bits: Bits, token_id: int) -> None:
    """Clear the token's bit."""
    bits[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))


FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True, eq=False, repr=False)
class Draft(Tree):
    """A drafter's proposal for one sequence: a tree of tokens, and how they were found.

    Row 0 of the target's rows follows the last committed token; row i + 1 follows node i.

    Attributes:
        probs: [n + 1, V] float; row r is the distribution that the children of row r were drawn from, in index order.
            None: the nodes were chosen by a rule that does not depend on the target's randomness.
        replacement: siblings were drawn with replacement; False: each draw was removed before the next.
        num_candidates: nodes at and after this index are probes: computed by the target, never accepted. -1: all of
            the nodes are candidates.
        accept_probs: [n] estimates of how probable it is that each node and all above it are accepted, falling; empty
            where there are none.
        sources: [n] who proposed each node, for statistics; empty where there is one source only.
        is_settled: whoever made it has weighed what its rows cost, so that it is not cut.
        hidden: [n + 1, H] states of the last committed token and of every node entering the target's layer
            first_layer, of a drafter that has computed the layers below in the sequence's own cache, where they are
            the rows fed since the last commit; chains only.
        first_layer: see `hidden`.

    Nodes that are more probable should come first, as far as parents allow: of a draft cut short, the
    first nodes stay.
    """

    probs: Tensor | None = None
    replacement: bool = True
    num_candidates: int = -1
    accept_probs: Seq[float] = ()
    sources: tuple[str, ...] = ()
    is_settled: bool = False
    hidden: Tensor | None = None
    first_layer: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.token_ids, Tensor) and self.token_ids.device.type == "cpu":
            self.token_ids = self.token_ids.tolist()
        if self.num_candidates < 0:
            self.num_candidates = len(self.parents)

    def __repr__(self) -> str:
        """Show the size without tokens, like `Sequence`."""
        return f"Draft({len(self)} nodes)"

    @classmethod
    def chain(cls, token_ids: Seq[int] | Tensor, probs: Tensor | None = None) -> Draft:
        """Make a draft of width one. token_ids: [n]; probs: [n + 1, V] or None (the last row is not read)."""
        return cls(token_ids, list(range(-1, len(token_ids) - 1)), probs)

    def first(self, count: int) -> Draft:
        """Return its first nodes; all of them if it has no more."""
        if count >= len(self):
            return self
        probs = None if self.probs is None else self.probs[: count + 1]
        return replace(
            self,
            token_ids=self.token_ids[:count],
            parents=self.parents[:count],
            probs=probs,
            num_candidates=min(self.num_candidates, count),
            accept_probs=self.accept_probs[:count],
            sources=self.sources[:count],
            hidden=None,
        )

    def part(self, nodes: Iterable[int]) -> Draft:
        """Return the draft of these nodes alone: parents before their children, and of siblings that were drawn all.

        The target computes it from its first layer on.
        """
        chosen = list(nodes)
        tree = Tree.part(self, chosen)
        return replace(
            self,
            token_ids=tree.token_ids,
            parents=tree.parents,
            probs=None if self.probs is None else self.probs[[0, *(node + 1 for node in chosen)]],
            num_candidates=sum(node < self.num_candidates for node in chosen),
            accept_probs=[self.accept_probs[node] for node in chosen] if self.accept_probs else (),
            sources=tuple([self.sources[node] for node in chosen]) if self.sources else (),
            hidden=None,
        )

    def within(self, depth: int) -> Draft:
        """Return its nodes of this depth at most, which were found, or drawn, without those below them."""
        if len(self) <= depth:
            return self
        nodes = [node for node, each in enumerate(self.depths) if each <= depth]
        return self if len(nodes) == len(self) else self.part(nodes)

    @classmethod
    def empty(cls) -> Draft:
        """Make an empty draft: the step is one of plain decoding."""
        return cls()


@dataclass(frozen=True, slots=True)
class PackedDrafts:
    """The drafts of one step's sequences, beside the target's rows for them.

    Attributes:
        drafts: one per sequence.
        offsets: len B + 1; rows offsets[b]..offsets[b + 1] of the target's rows belong to sequence b,
            one row more than it has nodes.
    """

    drafts: Seq[Draft]
    offsets: Seq[int]

    @classmethod
    def of(cls, drafts: Seq[Draft]) -> PackedDrafts:
        return cls(drafts, list(accumulate((len(draft) + 1 for draft in drafts), initial=0)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted part of one draft. A step appends the path's tokens and next_token.

    Attributes:
        path: accepted nodes, root to leaf.
        next_token: the recovered token after a rejection, or the bonus token.
    """

    path: list[int]
    next_token: int


class TokenIds(list[int]):
    """A list of token ids that only its owner lengthens, by `list.extend`; reading costs what it costs of a list.

    Every other change raises DrafterError. Slices and copies are plain lists.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise DrafterError(
            "A sequence's tokens belong to the engine, and cannot be changed. Change a copy of them: "
            "list(sequence.token_ids)."
        )

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of one request, as it grows.

    Invariant between steps, once the prompt is computed: the target's cache holds `len(token_ids) - 1`
    positions, since the last committed token has not been fed yet.

    Attributes:
        id: unique within the engine.
        token_ids: prompt and committed tokens. The engine's are `TokenIds`: a drafter reads them.
        num_prompt: how many of token_ids are the prompt.
        params: the request's options.
        choice: index among the request's `n` choices; part of the key of its noise.
        max_length: token_ids never grows beyond this (max_tokens and the target's context).
        prediction: the client's prediction of the output, in the target's tokens; None without one.
        cache: the target's cache of this sequence while it is in the engine. Only a drafter that computes with the
            target's own layers may touch it: it may feed rows, but commits none.
        constraint: what the grammar of the request allows after these tokens; None without one.
    """

    id: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    choice: int = 0
    max_length: int = 2**62
    finish_reason: FinishReason | None = field(default=None)
    prediction: list[int] | None = None
    cache: Cache | None = None
    constraint: Constraint | None = None

    def __repr__(self) -> str:
        """Show the length without tokens, since errors may quote it."""
        return f"Sequence(id={self.id}, {len(self.token_ids)} tokens)"

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def room(self) -> int:
        """Return the number of draft tokens that a step could accept before max_length, since it appends one token
        more."""
        return self.max_length - len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Needs:
    """The rows and states of the target that a drafter needs, given to it in Step.

    Attributes:
        top_tokens: this many most probable tokens of every verified row; 0 for none.
        prompt_rows: the same of the prompt's rows, whose logits are then computed as well; not of those whose keys and
            values are taken over from another sequence, which are not computed.
        layers: hidden states of the same rows, entering these of the target's layers, residual included; as many as
            it has layers stands for the state after the final norm, which enters the output layer.
        states: the hidden states of every committed position, the prompt's too, whose logits are not computed for
            that. States of positions that are taken over from another sequence are not computed, and not given.
    """

    top_tokens: int = 0
    prompt_rows: bool = False
    layers: tuple[int, ...] = ()
    states: bool = False

    @property
    def rows(self) -> bool:
        """Return whether anything is needed of the target's rows."""
        return self.top_tokens > 0 or bool(self.layers)

    def __or__(self, other: Needs) -> Needs:
        """Combine two drafters' needs; layers in rising order."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Needs(
            max(self.top_tokens, other.top_tokens),
            self.prompt_rows or other.prompt_rows,
            layers,
            self.states or other.states,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step for one sequence, reported to the drafter after the target's forward.

    Attributes:
        sequence: already holds the new tokens.
        draft: the draft that was verified; None while the prompt is computed.
        verdict: what was accepted, after truncation at a stop; None while the prompt is computed.
        num_computed: positions now in the target's cache.
        top_tokens: as many as `Needs.top_tokens`, [rows, k] int64, most probable first, of the logits before any
            processing. The last rows are the draft's: row -(n + 1) follows the token before it, row i - n node i,
            accepted or not. Rows before them (with `Needs.prompt_rows`) follow the prompt's tokens up to there.
            None where no row was needed.
        hidden_outputs: the layers of `Needs.layers`, [rows, layers, H] of the same rows, in the type in which the
            target's decoder keeps states.
        states: with `Needs.states`, [n, layers, H] likewise: of the last n of the `num_computed` positions,
            which are those that this step has added, of the prompt or of the draft's accepted path.
    """

    sequence: Sequence
    draft: Draft | None
    verdict: Verdict | None
    num_computed: int
    top_tokens: Tensor | None = None
    hidden_outputs: Tensor | None = None
    states: Tensor | None = None


class Noise(Protocol):
    """The random numbers of one step, in the packed order of the target's rows."""

    def uniform(self, size: int) -> Tensor:
        """Return [size] float64 in [0, 1), fresh at every call."""

    def gumbel(self, rows: Seq[int], vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        """Return [len(rows), V] float64 Gumbel noise; for a seeded request keyed by (seed, choice, absolute position).

        token_ids: [n] int64; of these tokens alone, [len(rows), n].
        """


class Verifier(Protocol):
    """An acceptance rule."""

    lossless: bool

    def verify(self, drafts: PackedDrafts, target_logprobs: Tensor, noise: Noise) -> list[Verdict]:
        """Return one verdict per sequence. target_logprobs: [rows, V], the target's processed distribution at each."""
