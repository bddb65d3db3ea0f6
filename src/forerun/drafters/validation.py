"""Validation of drafters and of their drafts before the engine uses them."""

from __future__ import annotations

import operator
from collections.abc import Sequence as Seq
from functools import lru_cache

from torch import Tensor

from forerun.drafters.base import Drafter
from forerun.drafters.registry import DRAFTERS
from forerun.errors import DrafterError
from forerun.types import Draft, Needs, Sequence

SUM_TOLERANCE = 1e-3
"""Largest difference of a distribution's sum from 1."""


def check_drafter(drafter: object) -> None:
    """Raise DrafterError if this is no drafter."""
    if isinstance(drafter, type):
        raise DrafterError(
            f"drafter is the class {drafter.__name__}, but must be an object of it. Write {drafter.__name__}()."
        )
    if not isinstance(drafter, Drafter):
        raise DrafterError(
            f"drafter is of type {type(drafter).__name__}, which does not derive from forerun.Drafter. Derive it, and "
            "implement start, draft, commit and stop."
        )
    if not isinstance(drafter.needs, Needs):
        raise DrafterError(f"{name_of(drafter)} has needs of type {type(drafter.needs).__name__}. Give a Needs.")


def name_of(drafter: Drafter) -> str:
    """Return how error messages name a drafter."""
    return f"The drafter {type(drafter).__name__}"


def checked_drafts(
    drafter: Drafter,
    sequences: Seq[Sequence],
    num_draft_tokens: Seq[int],
    min_acceptance_prob: float = 0.0,
    vocab_size: int | None = None,
) -> Seq[Draft]:
    """Draft, and check the drafts: always their shape, and types and numbers if the drafter is not built in.

    Nodes deeper than an output can become are cut off: K is a number of nodes, whether of chains or trees.

    Tokens on a device are not read. What a drawn token's own distribution gives it, verification looks at.

    Args:
        vocab_size: of the target; None skips the check of ids and of the width of distributions.

    Raises:
        DrafterError: a draft breaks the contract; the message names the drafter.
    """
    given = tuple(num_draft_tokens)
    drafts: object = drafter.draft(list(sequences), given, min_acceptance_prob)
    if not isinstance(drafts, (list, tuple)):
        raise DrafterError(
            f"{name_of(drafter)} gave {_type_name(drafts)} for its drafts. Return a list with a Draft for each "
            "sequence."
        )
    if len(drafts) != len(sequences):
        raise DrafterError(f"{name_of(drafter)} gave {len(drafts)} drafts for {len(sequences)} sequences.")
    is_built_in = _is_built_in(type(drafter))
    for draft, max_nodes in zip(drafts, given, strict=True):
        if not isinstance(draft, Draft):
            raise DrafterError(
                f"{name_of(drafter)} gave {_type_name(draft)} for a draft. Return Draft.empty() for none."
            )
        if not is_built_in:
            _check_types(drafter, draft)
        _check_shape(drafter, draft, max_nodes)
        if vocab_size is not None:
            check_tokens(drafter, draft, vocab_size, read=False)
        if draft.probs is not None:
            _check_probs(drafter, draft, vocab_size, is_built_in)
    return [draft.within(sequence.room) for draft, sequence in zip(drafts, sequences, strict=True)]


def check_tokens(drafter: Drafter, draft: Draft, vocab_size: int, read: bool = True) -> None:
    """Raise DrafterError if the draft holds ids outside the vocabulary.

    read: ids on a device are read, which waits for it; otherwise they are passed over.
    """
    if not len(draft) or not (read or isinstance(draft.token_ids, list)):
        return
    ids = draft.ids
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise DrafterError(f"{name_of(drafter)} gave token ids outside the vocabulary 0..{vocab_size - 1}.")


def _check_types(drafter: Drafter, draft: Draft) -> None:
    """Convert whole numbers of any kind to Python's."""
    try:
        draft.parents = [operator.index(parent) for parent in draft.parents]
        if not isinstance(draft.token_ids, Tensor):
            draft.token_ids = [operator.index(token_id) for token_id in draft.token_ids]
        elif draft.token_ids.is_floating_point():
            raise TypeError
        draft.num_candidates = operator.index(draft.num_candidates)
    except TypeError:
        raise DrafterError(
            f"{name_of(drafter)} gave token ids, parents or a number of candidates that are not whole numbers."
        ) from None
    for field, given in (("sources", draft.sources), ("accept_probs", draft.accept_probs)):
        if not isinstance(given, (list, tuple)) or any(isinstance(each, Tensor) or each != each for each in given):
            raise DrafterError(
                f"{name_of(drafter)} gave {_type_name(given)} as {field}. Give a tuple, one for each token."
            )
    for field, value in (("probs", draft.probs), ("hidden", draft.hidden)):
        if value is not None and not (isinstance(value, Tensor) and value.is_floating_point()):
            raise DrafterError(
                f"{name_of(drafter)} gave {_type_name(value)} as {field}. Give a tensor of floats, or None."
            )


def _check_shape(drafter: Drafter, draft: Draft, max_nodes: int) -> None:
    n = len(draft.token_ids)
    parents = draft.parents
    name = name_of(drafter)
    if n > max_nodes:
        raise DrafterError(f"{name} gave {n} tokens, but at most {max_nodes} were requested.")
    if len(parents) != n or any(not -1 <= parent < i for i, parent in enumerate(parents)):
        raise DrafterError(f"{name} gave parents that are no rooted tree in order: {parents}.")
    if not 0 <= draft.num_candidates <= n:
        raise DrafterError(f"{name} gave {draft.num_candidates} candidates among {n} tokens.")
    if draft.sources and len(draft.sources) != n:
        raise DrafterError(f"{name} gave {len(draft.sources)} sources for {n} tokens.")
    if draft.accept_probs and len(draft.accept_probs) != n:
        raise DrafterError(f"{name} gave {len(draft.accept_probs)} accept_probs for {n} tokens.")
    if draft.hidden is not None and (len(draft.hidden) != n + 1 or not draft.is_chain):
        raise DrafterError(
            f"{name} gave {len(draft.hidden)} hidden states for {n} nodes; only chains may "
            "come with them, one for the last committed token and one for each node."
        )


def _check_probs(drafter: Drafter, draft: Draft, vocab_size: int | None, is_built_in: bool) -> None:
    probs = draft.probs
    n = len(draft)
    assert probs is not None
    width = probs.shape[-1] if vocab_size is None and probs.ndim else vocab_size
    if probs.shape != (n + 1, width):
        raise DrafterError(
            f"{name_of(drafter)} gave probs of shape {list(probs.shape)} for {n} nodes. Give [{n + 1}, {width}]: a "
            "distribution for the last committed token and one for each node."
        )
    if is_built_in:
        return
    rows = sorted({parent + 1 for parent in draft.parents[: draft.num_candidates]})
    drawn = probs[rows]
    # comparisons that NaN fails
    if rows and not (bool(drawn.amin() >= 0) and bool(((drawn.double().sum(-1) - 1).abs() <= SUM_TOLERANCE).all())):
        raise DrafterError(
            f"{name_of(drafter)} gave probs that are no distributions: each row that tokens were drawn from must be "
            "finite, not negative, and sum to 1. Give what they were drawn from, as float32, or no probs if they were "
            "chosen."
        )


def _type_name(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


@lru_cache(maxsize=64)
def _is_built_in(kind: type) -> bool:
    """Return whether the class is built in: its own tests cover what is not checked here."""
    return any((kind.__module__, kind.__qualname__) == (row.module, row.class_name) for row in DRAFTERS.values())
