"""Token Recycling: tokens that the target gave a high probability before are proposed again.

Luo and others, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling",
2408.08696. A matrix keeps, for every token, the k most probable successors that the target gave when it last computed
the token, in whatever context, rejected drafts included; a tree is read off it. The tree here is not fixed: which
ranks get a node follows from measured acceptance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forerun.drafters.base import Binding, OneByOne, Traits
from forerun.drafters.growth.ranked_tree import Child, RankedTree, best_tree
from forerun.errors import ConfigError, DrafterError, IncompatibleDrafterError
from forerun.speculation import Rates
from forerun.types import Draft, Needs, Sequence, Step
from forerun.utils.json_file import open_regular
from forerun.utils.vocabulary import ids_fingerprint

Matrix = npt.NDArray[np.int32]
_NAME = "successors"
"""Name of the matrix's tensor in its file."""
STEADY = 4
"""Classes of steadiness: how often in a row a token's most probable successor stayed the same, counted up to three."""


class Successors:
    """The last seen most probable successors of each token; only rows that were seen take memory.

    Args:
        vocab_size: V; there are never more rows than that.
        width: k, successors of a token.
        base: [V, k] rows of tokens not seen yet, -1 where there is none; never written to.
    """

    __slots__ = ("_base", "_leaders", "_rows", "_slots", "_steady", "_vocab_size", "_width")

    def __init__(self, vocab_size: int, width: int, base: Matrix | None = None) -> None:
        self._vocab_size = vocab_size
        self._width = width
        self._base = base
        self._slots: dict[int, int] = {}
        self._rows: Matrix = np.empty((64, width), np.int32)
        self._leaders: list[int] = []
        self._steady = bytearray()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Return the bytes held, without the base."""
        return self._rows.nbytes + sys.getsizeof(self._slots) + sys.getsizeof(self._leaders) + len(self._steady)

    def of(self, token_id: int) -> tuple[list[int], int]:
        """Return a token's successors, most probable first (none if it was never seen), and how steady the first is."""
        slot = self._slots.get(token_id)
        if slot is not None:
            return self._rows[slot].tolist(), self._steady[slot]
        if self._base is None:
            return [], 0
        return [each for each in self._base[token_id].tolist() if each >= 0], 0

    def update(self, token_ids: Seq[int], top: npt.NDArray[Any]) -> None:
        """Take over the target's most probable tokens after each of these.

        top: [n, k], most probable first; of equal token_ids the last counts.
        """
        slots = self._slots
        leaders = self._leaders
        steady = self._steady
        at: list[int] = []
        for token_id, leader in zip(token_ids, top[:, 0].tolist(), strict=True):
            slot = slots.get(token_id)
            if slot is None:
                slot = slots[token_id] = len(slots)
                leaders.append(leader)
                steady.append(0)
            elif leaders[slot] == leader:
                steady[slot] = min(steady[slot] + 1, STEADY - 1)
            else:
                leaders[slot] = leader
                steady[slot] = 0
            at.append(slot)
        if len(slots) > len(self._rows):
            size = min(max(len(slots), 2 * len(self._rows)), self._vocab_size)
            self._rows = np.concatenate([self._rows, np.empty((size - len(self._rows), self._width), np.int32)])
        self._rows[at if len(at) > 1 else at[0]] = top

    def dense(self) -> Matrix:
        """Return [V, k], -1 where nothing was seen."""
        matrix = np.full((self._vocab_size, self._width), -1, np.int32) if self._base is None else self._base.copy()
        matrix[list(self._slots)] = self._rows[: len(self._slots)]
        return matrix


def save_matrix(path: str | Path, matrix: Matrix, tokenizer: Any) -> None:
    """Write a matrix as safetensors, with the fingerprint of the tokenizer whose ids it holds.

    Raises:
        DrafterError: the file cannot be written.
    """
    try:
        save_file({_NAME: np.ascontiguousarray(matrix)}, path, {"tokenizer": ids_fingerprint(tokenizer)})
    except (OSError, ValueError, SafetensorError) as error:
        raise DrafterError(f"The matrix cannot be written to {str(path)!r}: {error}. Give another path.") from error


def load_matrix(path: str | Path, vocab_size: int, width: int, tokenizer: Any) -> Matrix:
    """Read a saved matrix.

    Returns:
        [vocab_size, width] int32.

    Raises:
        DrafterError: the file cannot be read, or holds something else.
        IncompatibleDrafterError: it was saved for another vocabulary or width.
    """
    remedy = "Give a file that Recycling.save has written, or leave the option out."
    try:
        with open_regular(path), safe_open(path, framework="np") as file:
            matrix: Matrix = file.get_tensor(_NAME)
            saved_fingerprint = (file.metadata() or {}).get("tokenizer", "")
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"matrix is {str(path)!r}, which cannot be read: {error}. {remedy}") from error
    if matrix.dtype != np.int32 or matrix.ndim != 2:
        raise DrafterError(f"matrix is {str(path)!r}, which holds {matrix.dtype} {list(matrix.shape)}. {remedy}")
    other = bool(saved_fingerprint) and tokenizer is not None and saved_fingerprint != ids_fingerprint(tokenizer)
    if other or matrix.shape != (vocab_size, width):
        raise IncompatibleDrafterError(
            f"matrix is {str(path)!r}, of {len(matrix)} tokens with {matrix.shape[1]} successors each, and was saved "
            f"for another tokenizer or width than this target's {vocab_size} tokens with {width}. {remedy}"
        )
    if matrix.size and (matrix.min() < -1 or matrix.max() >= vocab_size):
        raise DrafterError(f"matrix is {str(path)!r}, which holds ids outside the vocabulary. {remedy}")
    return matrix


_DEPTHS = 3
"""Depths whose acceptance is measured apart; deeper nodes count as the last."""
_PRIORS = (0.4, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02)
"""Prior probability of each rank."""
_REFRESH = 16
"""Drafts after which the probabilities measured since are used."""


class Recycling(OneByOne):
    """Drafts a tree from the target's former predictions; no model, no training. Chosen, never drawn.

    Args:
        width: k, successors kept of every token (1..8).
        share: one matrix for all requests. It makes the first drafts of a request better, but how fast a request is
            served may then reveal something of the others' text; without it, every request fills a matrix of its own.
        matrix: a file that `save` has written, which every request's matrix begins with.
        learn_prompt: fill the matrix from the prompt too; its logits are then computed at every token.

    Raises:
        ConfigError: width is out of range.
    """

    def __init__(
        self,
        width: int = 8,
        share: bool = False,
        matrix: str | None = None,
        learn_prompt: bool = False,
    ) -> None:
        if not 1 <= width <= len(_PRIORS):
            raise ConfigError(
                f"width is {width}, but must lie in 1..{len(_PRIORS)}: successors beyond are too seldom "
                "accepted. Leave it out."
            )
        self._needs = Needs(top_tokens=width, prompt_rows=learn_prompt)
        self._width = width
        self._share = share
        self._path = matrix
        self._vocab_size = 0
        self._tokenizer: Any = None
        self._base: Matrix | None = None
        self._shared: Successors | None = None
        self._successors: dict[Sequence, Successors] = {}
        self._trees: dict[Sequence, tuple[int, RankedTree]] = {}  # and the tokens there were when it was drafted
        accept_probs = _PRIORS[:width]
        self._rates = Rates([accept_prob for _ in range(STEADY * _DEPTHS) for accept_prob in accept_probs])
        self._order = self._ranked()
        self._num_learned = 0

    @property
    def needs(self) -> Needs:
        return self._needs

    @property
    def traits(self) -> Traits:
        options = f"width={self._width} share={self._share} learn_prompt={self._needs.prompt_rows}"
        return Traits(("Recycling", options), estimates=True, can_sleep=True, learns=True)

    def bind(self, binding: Binding) -> None:
        """Read the saved matrix. Raises DrafterError if it cannot be read or was saved for another vocabulary."""
        self._vocab_size = binding.target.vocab_size
        self._tokenizer = binding.tokenizer
        if self._path is not None:
            self._base = load_matrix(self._path, self._vocab_size, self._columns, self._tokenizer)
        self._shared = self._new() if self._share else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of all matrices."""
        every = [self._shared] if self._shared is not None else list(self._successors.values())
        return sum(each.nbytes for each in every) + (0 if self._base is None else self._base.nbytes)

    def save(self, path: str | Path) -> None:
        """Write the shared matrix, for `matrix` of a later drafter with this tokenizer.

        Raises:
            DrafterError: there is none, since share is False; or the file cannot be written.
        """
        if self._shared is None:
            raise DrafterError(
                "There is no matrix to save: share is False, so each request's own is gone with it. Set share=True."
            )
        save_matrix(path, self._shared.dense(), self._tokenizer)

    def start(self, sequence: Sequence) -> None:
        self._successors[sequence] = self._new() if self._shared is None else self._shared

    def stop(self, sequence: Sequence) -> None:
        self._successors.pop(sequence, None)
        self._trees.pop(sequence, None)

    def reset(self) -> None:
        if self._shared is not None:
            self._shared = self._new()

    def commit(self, steps: Seq[Step]) -> None:
        for step in steps:
            drafted = self._trees.pop(step.sequence, None)
            if drafted is not None:  # by the committed text alone, whichever drafter proposed it
                drafted[1].observe_tokens(self._rates, step.sequence.token_ids[drafted[0] :])
                self._num_learned += 1
            if step.top_tokens is not None:
                token_ids, top = _seen(step)
                self._successors[step.sequence].update(token_ids, top)
        if self._num_learned >= _REFRESH:
            self._num_learned = 0
            self._order = self._ranked()

    @property
    def _columns(self) -> int:
        """Return the number of successors of a token; small vocabularies may have fewer than `width`."""
        return min(self._width, self._vocab_size)

    def _new(self) -> Successors:
        return Successors(self._vocab_size, self._columns, self._base)

    def _draft(self, sequence: Sequence, max_nodes: int, min_acceptance_prob: float) -> Draft:
        successors = self._successors[sequence]
        order = self._order

        def children(token_id: int, depth: int) -> list[Child[int]]:
            tokens, steady = successors.of(token_id)
            ranked = order[steady * _DEPTHS + min(depth, _DEPTHS - 1)]
            return [
                Child(accept_prob, tokens[rank], level, tokens[rank])
                for accept_prob, rank, level in ranked
                if rank < len(tokens)
            ]

        tree = best_tree(sequence.token_ids[-1], children, max_nodes, sequence.room, min_acceptance_prob)
        self._trees[sequence] = len(sequence.token_ids), tree
        return Draft(tree.token_ids, tree.parents, accept_probs=tree.accept_probs)

    def _ranked(self) -> list[list[tuple[float, int, int]]]:
        """Return for each class of steadiness and depth: (probability, rank, level), the most probable first."""
        order = []
        for first in range(0, len(self._rates), self._width):
            levels = range(first, first + self._width)
            accept_probs = [(self._rates.rate(level), level - first, level) for level in levels]
            order.append(sorted(accept_probs, key=lambda each: -each[0]))
        return order


def _seen(step: Step) -> tuple[list[int], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the tokens of the step's rows and what may follow each; of equal tokens, the decisive row comes last."""
    assert step.top_tokens is not None
    top = step.top_tokens.numpy()
    if step.draft is None or step.verdict is None:
        end = step.num_computed
        return step.sequence.token_ids[end - len(top) : end], top
    drafted = step.draft.ids
    if not drafted and len(top) == 1:
        return step.sequence.token_ids[-2:-1], top
    n = len(drafted)
    path = step.verdict.path
    before = len(step.sequence.token_ids) - len(path) - 1  # tokens there were when this was drafted
    first = len(top) - n - 1
    token_ids = [*drafted[::-1], *step.sequence.token_ids[before - 1 - first : before], *(drafted[i] for i in path)]
    rows = [*range(first + n, first, -1), *range(first + 1), *(first + 1 + i for i in path)]
    return token_ids, top[rows]
