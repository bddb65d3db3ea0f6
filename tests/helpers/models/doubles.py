"""Test doubles: a tiny language model computed from its context by hashing, and drafters of bad character."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.drafters import Drafter, Traits
from forerun.kv_cache import Unpaged
from forerun.models import Exactness, Forward, Rows
from forerun.models.base import context_reason
from forerun.models.draft_session import Pick
from forerun.types import Draft, Needs, Sequence, Step
from forerun.utils.tree import Tree


class FakeCache(Unpaged):
    """Holds the tokens themselves, and insists on its contract."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scratch = Tree()
        self.final: list[int] = []  # what it held when it was freed
        self.freed = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens)

    @property
    def num_scratch(self) -> int:
        return len(self.scratch)

    def commit(self, path: Seq[int]) -> None:
        assert not self.freed
        assert all(self.scratch.parents[row] == parent for parent, row in zip([-1, *path], path))
        self.tokens += [self.scratch.ids[row] for row in path]
        self.scratch = Tree()

    def drop(self, keep: int = 0) -> None:
        self.scratch = self.scratch.part(range(min(keep, len(self.scratch))))

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.tokens, self.scratch = self.tokens[:length], Tree()

    def free(self) -> None:
        self.final, self.tokens, self.scratch, self.freed = self.tokens, [], Tree(), True

    def fork(self, other: Any, length: int) -> None:
        assert not self.tokens and not self.scratch.ids and 0 <= length <= other.length
        self.tokens = other.tokens[:length]


class FakeModel:
    """Logits are a fixed random vector per hash of the last `order` tokens: deterministic, the same in any batch."""

    def __init__(
        self,
        vocab_size: int = 11,
        order: int = 3,
        seed: int = 0,
        context_length: int = 4096,
        eos_token_ids: Seq[int] = (),
        dtype: torch.dtype = torch.float32,
        scale: float = 3.0,
        num_contexts: int = 4093,
    ) -> None:
        self.name = "fake"
        self.loaded_by = ""
        self.vocab_size = vocab_size
        self.order = order
        self.context_length = self.full_context_length = context_length
        self.eos_token_ids = frozenset(eos_token_ids)
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.num_parameters = 0
        self.exactness, self.recommended_sampling = Exactness(True), {}
        self.adapter = self.quantize = self.kv_cache_dtype = None
        self.kernels = "reference"
        self.state_nbytes, self.output_layer = 0, None
        self.mask_token: int | None = None
        self.output_tokens: torch.Tensor | None = None
        self.pool: Any = None
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(num_contexts, vocab_size, generator=generator, dtype=torch.float64).to(dtype) * scale
        self.caches: list[FakeCache] = []
        self.num_forwards = 0
        self.num_rows = 0
        self.before_forward: Callable[[Seq[Rows]], None] = lambda _: None

    @property
    def context_reason(self) -> str:
        return context_reason(self.context_length, self.full_context_length)

    def new_cache(self) -> FakeCache:
        self.caches.append(FakeCache())
        return self.caches[-1]

    def draft_session(self, caches: Seq[Any], pick: Pick) -> None:
        """None: it has nothing but `forward`."""

    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        self.before_forward(batch)
        self.num_forwards += 1
        slots: list[int] = []
        hidden_rows: list[int] = []
        for rows in batch:
            cache: Any = rows.cache
            assert not cache.freed
            assert len(rows.token_ids) > 0
            self.num_rows += len(rows.token_ids)
            first, n = cache.num_scratch, len(rows.token_ids)
            parents = range(first - 1, first + n - 1) if rows.parents is None else rows.parents
            for token_id, parent in zip(rows.token_ids, parents, strict=True):
                assert 0 <= token_id < self.vocab_size
                assert -1 <= parent < cache.num_scratch
                cache.scratch.add(token_id, parent)
            for count, wanted in ((rows.num_wanted, slots), (rows.num_hidden_rows, hidden_rows)):
                assert 0 <= count <= n
                for row in range(first + n - count, first + n):
                    path = [cache.scratch.ids[node] for node in cache.scratch.path_to(row)]
                    wanted.append(self.slot([*cache.tokens[-self.order :], *path]))
        return Forward(self.table[slots], self.hidden_outputs(hidden_rows, layers))

    def hidden_outputs(self, slots: list[int], layers: Seq[int]) -> Tensor | None:
        """Hidden states that tell the slot and the layer."""
        if not layers:
            return None
        return torch.tensor([[[float(slot), float(layer)] for layer in layers] for slot in slots]).to(self.dtype)

    def slot(self, path: Seq[int]) -> int:
        """Which row of the table follows this context."""
        value = 0
        for token_id in path[-self.order :]:
            value = value * self.vocab_size + token_id + 1
        return value % len(self.table)

    def logits_after(self, tokens: Seq[int]) -> Tensor:
        return self.table[self.slot(tokens)]

    def greedy(self, prompt: Seq[int], count: int) -> list[int]:
        """What greedy decoding must give; EOS is not looked at."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits_after(tokens).argmax()))
        return tokens[len(prompt) :]


class MarkovCache(FakeCache):
    """Looks at nothing but the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch: Any = []

    def commit(self, path: Seq[int]) -> None:
        self.tokens += [self.scratch[row] for row in path]
        self.scratch = []

    def drop(self, keep: int = 0) -> None:
        del self.scratch[keep:]

    def truncate(self, length: int) -> None:
        self.tokens, self.scratch = self.tokens[:length], []

    def free(self) -> None:
        self.tokens, self.scratch = [], []


class MarkovModel(FakeModel):
    """Order 1, one table row per token, all sequences at once: fast enough for a million samples."""

    def __init__(self, table: Tensor, eos_token_ids: Seq[int] = ()) -> None:
        super().__init__(len(table), 1, eos_token_ids=eos_token_ids, dtype=table.dtype)
        self.table = table
        self.context_length = self.full_context_length = 2**31

    def slot(self, path: Seq[int]) -> int:
        return path[-1]

    def new_cache(self) -> MarkovCache:
        return MarkovCache()

    def forward(self, batch: Seq[Rows], layers: Seq[int] = ()) -> Forward:
        wanted: list[int] = []
        for rows in batch:
            cache: Any = rows.cache
            cache.scratch += rows.token_ids
            wanted += rows.token_ids[len(rows.token_ids) - rows.num_wanted :]
        return Forward(self.table[wanted])


class Scripted(Drafter):
    """A drafter that proposes what a function says, and records what is reported to it."""

    needs = Needs()  # plain attributes: a test may set them
    traits = Traits(("Scripted",))
    nbytes = 0

    def __init__(self, propose: Callable[[Sequence, int], Draft | Seq[int]]) -> None:
        self.propose = propose
        self.active: set[int] = set()
        self.steps: list[Step] = []

    def start(self, sequence: Sequence) -> None:
        assert sequence.id not in self.active
        self.active.add(sequence.id)

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        drafts = []
        for sequence, most in zip(sequences, num_draft_tokens, strict=True):
            assert sequence.id in self.active
            k = min(most, sequence.room)
            proposal = self.propose(sequence, k) if k else []
            drafts.append(proposal if isinstance(proposal, Draft) else Draft.chain(list(proposal)))
        return drafts

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            sequence, draft, verdict = step.sequence, step.draft, step.verdict
            assert sequence.id in self.active
            assert (draft is None) == (verdict is None)
            if draft is not None and verdict is not None:
                assert step.num_computed == len(sequence.token_ids) - 1
                new = [*(draft.ids[node] for node in verdict.path), verdict.next_token]
                assert sequence.token_ids[-len(new) :] == new
        self.steps += steps

    def stop(self, sequence: Sequence) -> None:
        self.active.remove(sequence.id)


References = dict[tuple[int, ...], list[int]]
"""Prompt -> the greedy continuation."""


def _next(references: References, sequence: Sequence, k: int) -> list[int]:
    prompt = tuple(sequence.token_ids[: sequence.num_prompt])
    done = sequence.num_output
    return references.get(prompt, [])[done : done + k]


def adversaries(references: References, vocab_size: int) -> dict[str, Scripted]:
    """Drafters that are always right, always wrong, random, duplicated, or empty."""
    rng = np.random.default_rng(0)

    def wrong(sequence: Sequence, k: int) -> list[int]:
        return [(token_id + 1) % vocab_size for token_id in _next(references, sequence, k)]

    def duplicated(sequence: Sequence, k: int) -> Draft:
        """Every node twice, so that siblings hold the same token; the chain goes on below the second."""
        tokens, parents, parent = [], [], -1
        for token_id in _next(references, sequence, k)[: k // 2]:
            tokens += [token_id, token_id]
            parents += [parent, parent]
            parent = len(tokens) - 2
        return Draft(tokens, parents)

    def tree(sequence: Sequence, k: int) -> Draft:
        """A random tree that holds the right chain among wrong leaves."""
        right = _next(references, sequence, (k + 1) // 2)
        tokens, parents, parent = [], [], -1
        for token_id in right:
            if len(tokens) + 2 > k:
                break
            tokens += [(token_id + 1) % vocab_size, token_id]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(tokens, parents)

    return {
        "right": Scripted(lambda sequence, k: _next(references, sequence, k)),
        "wrong": Scripted(wrong),
        "random": Scripted(lambda _, k: rng.integers(0, vocab_size, int(rng.integers(0, k + 1))).tolist()),
        "duplicated": Scripted(duplicated),
        "tree": Scripted(tree),
        "empty": Scripted(lambda *_: []),
    }


class PieceTokenizer:
    """Token i is a few bytes of UTF-8, perhaps half a character; decoding counts the tokens it is given."""

    chat_template = None

    def __init__(self, pieces: Seq[bytes]) -> None:
        self.pieces = list(pieces)
        self.num_decoded = 0

    @classmethod
    def of_bytes(cls) -> PieceTokenizer:
        return cls([bytes([i]) for i in range(256)])

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [self.pieces.index(bytes([byte])) for byte in text.encode()]}

    def decode(self, ids: Seq[int], **_: object) -> str:
        self.num_decoded += len(ids)
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(len(self.pieces))}


def tree_draft(token_ids: Seq[int], parents: Seq[int], **rest: Any) -> Draft:
    """A draft of any shape; rest: as of Draft. Its columns are of the kind that Draft.chain makes of a list."""
    return Draft(Draft.chain(list(token_ids)).token_ids, Draft.chain(list(parents)).token_ids, **rest)


def tokens_of(draft: Draft) -> list[int]:
    """[n] the tokens of a draft's nodes."""
    return [int(token_id) for token_id in draft.token_ids]


def parents_of(draft: Draft) -> list[int]:
    """[n] the parents of a draft's nodes."""
    return [int(parent) for parent in draft.parents]
