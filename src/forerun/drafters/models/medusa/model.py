"""The model of Medusa heads: all of them in one pass over the target's last state, for any sequences at once.

`MedusaConfig` describes the computation. Linear layers are of the target's kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from forerun.drafters.models.heads.config import StoredHead
from forerun.drafters.models.heads.layers import HeadLayers, HeadModel
from forerun.drafters.models.medusa.config import MedusaConfig
from forerun.kernels.torch.elementwise import rms_norm
from forerun.kv_cache import Unpaged
from forerun.models.base import Forward, LanguageModel, Rows
from forerun.models.linear import Linear
from forerun.types import Cache
from forerun.utils.tree import Tree

EMBEDDING_EPS = 1e-6
"""Epsilon of the root mean square that embeddings are divided by."""


@dataclass(slots=True, eq=False)
class PathCache(Unpaged):
    """The heads' cache of one sequence: no keys, but the tokens from the last committed one on.

    Attributes:
        length: positions of the sequence that are behind it.
        committed: tokens after the position at which `begin` was called last, none or one.
        scratch: the rows fed since the last commit.
        num_heads: how many of the heads are computed.
        logits: [num_heads, draft vocabulary] of all heads, where they do not depend on tokens; None: not computed yet.
    """

    length: int = 0
    committed: list[int] = field(default_factory=list)
    scratch: Tree = field(default_factory=Tree)
    num_heads: int = 0
    logits: Tensor | None = None

    @property
    def num_scratch(self) -> int:
        """Return the number of rows fed since the last commit."""
        return len(self.scratch)

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return 0 if self.logits is None else self.logits.nbytes

    def begin(self, length: int) -> None:
        """Begin a draft: the next row holds the token at `length`, and belongs to the first head."""
        self.length = length
        self.committed = []
        self.scratch = Tree()
        self.logits = None

    def feed(self, rows: Rows) -> list[list[int]]:
        """Add rows; of each the tokens down to it. The last of k tokens is the row of head k - 1."""
        first = len(self.scratch)
        count = len(rows.token_ids)
        parents = range(first - 1, first + count - 1) if rows.parents is None else rows.parents
        for token_id, parent in zip(rows.token_ids, parents, strict=True):
            self.scratch.add(int(token_id), parent)
        ids = self.scratch.ids
        paths = self.scratch.paths() if rows.parents is not None else [list(range(row + 1)) for row in range(len(ids))]
        return [[*self.committed, *(ids[node] for node in path)] for path in paths[first:]]

    def commit(self, path: Sequence[int]) -> None:
        """Keep these rows."""
        self.committed += [self.scratch.ids[row] for row in path]
        self.length += len(path)
        self.scratch = Tree()

    def drop(self, keep: int = 0) -> None:
        """Drop the rows fed since the last commit, but for the first `keep`."""
        self.scratch = self.scratch.part(range(min(keep, len(self.scratch))))

    def truncate(self, length: int) -> None:
        """Keep no more than `length` positions; a draft begins anew then."""
        self.begin(min(length, self.length))

    def free(self) -> None:
        """Forget everything."""
        self.begin(0)

    def fork(self, other: Cache, length: int) -> None:
        """Do nothing: the heads hold no keys."""


class MedusaModel(HeadModel):
    """Heads over their target, as a language model whose rows read the target's state (`Rows.states`, [n, H] of the
    token before the last committed one, the same for all rows of a sequence).

    The row of the last committed token has the logits of the first head, a row that follows it those of the next.

    Args:
        head: its tensors, in any number format, or quantized.
        target: whose embeddings, and perhaps output layer, they read.
        name: for messages and stored costs.

    Raises:
        IncompatibleDrafterError: the target is of another size.
    """

    def __init__(self, head: StoredHead[MedusaConfig], target: LanguageModel, name: str = "a head") -> None:
        super().__init__(head, target, name)
        config = self.config = head.config
        self._made = made = HeadLayers.of(head, target)
        self.compute_dtype = made.compute
        firsts = [f"blocks.{k}.layers.0" for k in range(config.num_heads)]
        parts = [[first] for first in firsts] if config.sequential else [firsts]
        self._first = [made.linear(*names) for names in parts]
        self._later = [
            [made.linear(f"blocks.{k}.layers.{layer}") for layer in range(1, config.num_layers)]
            for k in range(config.num_heads)
        ]
        self._output = _output_layers(made, target, self.token_ids)
        self._eps = torch.tensor(EMBEDDING_EPS, dtype=made.compute, device=target.device)
        self._ones = torch.ones(config.target_hidden_size, dtype=made.compute, device=target.device)

    def new_cache(self) -> PathCache:
        """Return an empty cache for one sequence."""
        return PathCache()

    @torch.inference_mode()
    def look(self, caches: Sequence[PathCache], states: Tensor) -> Tensor:
        """Compute the logits of all heads, which read no tokens, into the caches.

        Args:
            states: [n, H] of the target, of each cache's sequence.

        Returns:
            [heads of all caches, draft vocabulary], those of one cache after another.
        """
        most = max(cache.num_heads for cache in caches)
        states = states.to(self.device, self.compute_dtype)
        count, width = states.shape
        h = self._made.multiply(self._first[0], states).view(count, -1, width)[:, :most]
        x = states[:, None] + F.silu(h)
        if self.config.num_layers > 1:
            x = torch.stack([self._deeper(k, x[:, k]) for k in range(most)], 1)
        if self.config.output_rows == "each":
            logits = torch.stack([self._made.multiply(self._output[k], x[:, k]) for k in range(most)], 1)
        else:
            logits = self._made.multiply(self._output[0], x.reshape(count * most, width)).view(count, most, -1)
        for cache, each in zip(caches, logits, strict=True):
            cache.logits = each[: cache.num_heads]
        kept = [each[: cache.num_heads] for cache, each in zip(caches, logits, strict=True)]
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows], layers: Sequence[int] = ()) -> Forward:
        """Compute rows; the heads have no hidden-state outputs.

        Raises:
            ValueError: rows have no states, or layers are requested.
        """
        if layers or any(rows.states is None for rows in batch):
            raise ValueError("heads read a state of the target, and have no layers to look into")
        caches: list[PathCache] = []
        paths: list[list[list[int]]] = []
        for rows in batch:
            assert isinstance(rows.cache, PathCache)
            caches.append(rows.cache)
            paths.append(rows.cache.feed(rows)[len(rows.token_ids) - rows.num_wanted :])
        if self.config.sequential:
            logits = self._after(paths, [rows.states[0] for rows in batch if rows.states is not None])
        else:
            new = [(c, rows.states[:1]) for c, rows in zip(caches, batch, strict=True) if c.logits is None]  # type: ignore[index]
            if new:
                self.look([cache for cache, _ in new], torch.cat([state for _, state in new]))
            logits = _gathered(caches, paths)
        return Forward(logits)

    def _after(self, paths: Sequence[Sequence[Sequence[int]]], states: Sequence[Tensor]) -> Tensor:
        """Return [rows, draft vocabulary] logits of heads that read the tokens of each row's path. states: of each
        sequence."""
        by_head: dict[int, list[int]] = {}
        flat = [(path, state) for each, state in zip(paths, states, strict=True) for path in each]
        for row, (path, _) in enumerate(flat):
            by_head.setdefault(len(path) - 1, []).append(row)
        logits = torch.empty(0)
        for k, rows in by_head.items():
            state = torch.stack([flat[row][1] for row in rows]).to(self.device, self.compute_dtype)
            tokens = torch.tensor([token for row in rows for token in flat[row][0]])
            embedding = self.target.embedding_rows(tokens.to(self.device)).to(self.compute_dtype)
            embedding = rms_norm(embedding, self._ones, self._eps).view(len(rows), -1)
            h = self._made.multiply(self._first[k], torch.cat([state, embedding], 1))
            x = self._deeper(k, state + F.silu(h))
            found = self._made.multiply(self._output[k if self.config.output_rows == "each" else 0], x)
            if len(by_head) == 1:
                return found
            logits = logits if len(logits) else found.new_empty(len(flat), found.shape[1])
            logits[rows] = found
        return logits

    def _deeper(self, k: int, x: Tensor) -> Tensor:
        """Compute the layers of one head except the first."""
        for linear in self._later[k]:
            x = x + F.silu(self._made.multiply(linear, x))
        return x


def _output_layers(made: HeadLayers, target: LanguageModel, token_ids: Tensor) -> list[Linear]:
    """Return the output layers: one for all heads, or one for each."""
    config = made.head.config
    assert isinstance(config, MedusaConfig)
    if config.output_rows == "target":
        return [made.product([target.output_rows(token_ids)])]
    if config.output_rows == "one":
        return [made.linear("lm_head")]
    return [made.linear(f"lm_heads.{k}") for k in range(config.num_heads)]


def _gathered(caches: Sequence[PathCache], paths: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return [rows, draft vocabulary] each row's logits of its head."""
    parts = []
    for cache, each in zip(caches, paths, strict=True):
        assert cache.logits is not None
        heads = [len(path) - 1 for path in each]
        is_all = heads == list(range(len(cache.logits)))
        parts.append(cache.logits if is_all else cache.logits[heads])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
