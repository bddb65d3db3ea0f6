"""Do two tokenizers mean the same by every id? Compared by vocabulary, not by size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.errors import IncompatibleDrafterError
from forerun.vocabulary.tokenizer import tokens_by_id


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids of one model.

    Attributes:
        name: of the model, for messages.
        size: width of its logits.
        tokenizer: what tells the meaning of the ids; None if there is none.
    """

    name: str
    size: int
    tokenizer: Any


def check_same_tokens(target: Vocabulary, draft: Vocabulary) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    A model's logits may be wider than its vocabulary (padding): that is no difference. Where neither model has
    a tokenizer, ids are all there is, and the widths must agree.

    Raises:
        IncompatibleDrafterError: names the first id that differs and what it stands for on either side.
    """
    if target.tokenizer is None and draft.tokenizer is None:
        if target.size != draft.size:
            raise IncompatibleDrafterError(
                f"{draft.name} has {draft.size} token ids and {target.name} has {target.size}, and without "
                "tokenizers there is no telling whether the rest is padding. Put the tokenizers beside the weights."
            )
        return
    if target.tokenizer is None or draft.tokenizer is None:
        bare = target.name if target.tokenizer is None else draft.name
        raise IncompatibleDrafterError(
            f"{bare} has no tokenizer, so the vocabularies of {target.name} and {draft.name} cannot be compared. "
            "Put its tokenizer beside its weights."
        )
    first = first_difference(tokens_by_id(target.tokenizer), tokens_by_id(draft.tokenizer))
    if first is not None:
        token_id, ours, theirs = first
        raise IncompatibleDrafterError(
            f"{draft.name} cannot draft for {target.name}: token {token_id} is {shown(ours)} in the target's "
            f"vocabulary and {shown(theirs)} in the draft's. Choose a draft model with the same tokenizer."
        )


def first_difference(ours: dict[int, str], theirs: dict[int, str]) -> tuple[int, str | None, str | None] | None:
    """The lowest id that stands for different tokens, with both; None stands for no token at all."""
    if ours == theirs:
        return None
    token_id = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    return token_id, ours.get(token_id), theirs.get(token_id)


def shown(token: str | None) -> str:
    """A token in a message."""
    return "absent" if token is None else repr(token)
